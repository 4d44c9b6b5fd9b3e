"""Run a grid of learning rates and three seeds in one compiled call.

python examples/step_sizes.py
"""

import numpy as np

from fedrax import Federation, LocalSGD, Scaffold, classification, sweep
from fedrax.data import Shards, load
from fedrax.models import Logistic

digits = load("digits")
federation = Federation.from_dataset(digits, Shards(clients=20, per_client=1), seed=0)
task = classification(Logistic().build(digits.train.x.shape[1:], 10), digits.preprocess())
step_sizes = (0.01, 0.03, 0.1, 0.3, 1.0)
methods = [Scaffold(local=LocalSGD(lr=lr, steps=10)) for lr in step_sizes]
results = sweep(methods, task, federation, seeds=(0, 1, 2), rounds=50, cohort_size=5)
for lr, runs in zip(step_sizes, results, strict=True):
    finals = [run.metric("test_accuracy")[-1][1] for run in runs if run.stopped != "diverged"]
    print(f"lr {lr:4}: accuracy {np.mean(finals):.3f} ± {np.std(finals):.3f}" if finals else f"lr {lr:4}: diverged")
