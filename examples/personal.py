"""Compare the global model with copies that are fine-tuned at each client.

python examples/personal.py
"""

import numpy as np

from fedrax import FedAvg, Federation, LocalSGD, classification, simulate
from fedrax.models import Logistic

rng = np.random.default_rng(0)

# Concept shift: every third client permutes the three class labels.
clients, rows = 15, 80
owner = np.repeat(np.arange(clients), rows)
x = rng.normal(size=(clients * rows, 6)).astype(np.float32)
kind = (x @ rng.normal(size=(6, 3))).argmax(1)
orders = np.array([rng.permutation(3) if client % 3 == 0 else np.arange(3) for client in range(clients)])
y = orders[owner, kind]
test = np.arange(len(owner)) % 4 == 0
federation = Federation.from_arrays(
    x[~test], y[~test], owner[~test], test=(x[test], y[test]), test_client_ids=owner[test]
)

task = classification(Logistic().build((6,), 3))
method = FedAvg(local=LocalSGD(lr=0.3, epochs=1))
result = simulate(method, task, federation, rounds=30, cohort_size=5, per_client=True, finetune=5)
last = result.events[-1]
for name in ("accuracy", "finetuned_accuracy"):
    print(f"{name:18} {last[f'test_{name}']:.3f}, worst client {last[f'test_{name}_worst_client']:.3f}")
