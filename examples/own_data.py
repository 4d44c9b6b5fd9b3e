"""Use your own arrays: two methods on 12 hospitals of different sizes whose measurements are shifted.

python examples/own_data.py
"""

import numpy as np

from fedrax import FedAvg, Federation, LocalSGD, Scaffold, classification, simulate
from fedrax.models import MLP

rng = np.random.default_rng(0)

# Replace this by your own arrays. Here: 12 hospitals with 30 to 600 patients each; each hospital shifts its features.
sizes = rng.integers(30, 600, size=12)
hospital = np.repeat(np.arange(12), sizes)
shift = rng.normal(size=(12, 10))
x = rng.normal(size=(len(hospital), 10)) + shift[hospital]
ill = (np.tanh(x - 0.7 * shift[hospital]) @ rng.normal(size=10) > 0).astype(int)

# Hold out a fifth of each hospital's rows as test data.
test = rng.random(len(hospital)) < 0.2
x = (x - x[~test].mean(0)) / x[~test].std(0)
federation = Federation.from_arrays(
    x[~test].astype(np.float32),
    ill[~test],
    hospital[~test],
    test=(x[test].astype(np.float32), ill[test]),
    test_client_ids=hospital[test],
)

task = classification(MLP(hidden=(32,)).build((10,), 2))
local = LocalSGD(lr=0.1, epochs=1, batch_size=20)
for method in (FedAvg(local=local), Scaffold(local=local)):
    result = simulate(method, task, federation, rounds=30, cohort_size=6, per_client=True)
    last = result.events[-1]
    print(
        f"{type(method).__name__:9} accuracy {last['test_accuracy']:.3f}, "
        f"at the worst hospital {last['test_accuracy_worst_client']:.3f}, "
        f"{(last['bytes_up'] + last['bytes_down']) / 1e6:.1f} MB"
    )
