"""One run on the devices of several processes, on one or several machines. Without arguments: one process.

python examples/several_processes.py 127.0.0.1:7788 2 0 &
python examples/several_processes.py 127.0.0.1:7788 2 1
"""

import sys

import fedrax
from fedrax.data import DirichletClients, Federation, load
from fedrax.models import TwoNN

if len(sys.argv) == 4:
    coordinator, processes, process = sys.argv[1:]
    fedrax.simulation.join_processes(coordinator, int(processes), int(process))

data = load("digits")
federation = Federation.from_dataset(data, DirichletClients(alpha=0.3, clients=30), seed=0)
task = fedrax.classification(TwoNN().build(data.train.x.shape[1:], data.num_classes))
method = fedrax.FedAvg(local=fedrax.LocalSGD(lr=0.1, epochs=2))
result = fedrax.simulate(method, task, federation, rounds=30, cohort_size=10, eval_every=10)
print(f"{result.plan}: accuracy {result.events[-1]['test_accuracy']:.3f}")
