"""A million clients: memory is proportional to the data, and the cost of a round is independent of their number."""

import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, sys, time
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import fedrax
from fedrax.models import Logistic
features = 20
task = fedrax.classification(Logistic().build((features,), 2))
algorithm = fedrax.FedAvg(local=fedrax.LocalSGD(steps=20, batch_size=2))
class Clock:
    def __init__(self): self.times = []
    def start(self, run): pass
    def event(self, event): self.times.append(time.process_time())
    def finish(self, result): pass
found = []
for n in map(int, sys.argv[1:]):
    rng, clock = np.random.default_rng(0), Clock()
    x = rng.standard_normal((2 * n, features), np.float32)
    federation = fedrax.Federation.from_arrays(
        x, rng.integers(0, 2, 2 * n), offsets=np.arange(0, 2 * n + 1, 2), test=(x[:100], np.zeros(100, int)),
        shuffle=False,
    )
    result = fedrax.simulate(algorithm, task, federation, rounds=40, cohort_size=50, eval_every=2, sinks=[clock])
    rounds = [b - a for a, b in zip(clock.times[3:-2:2], clock.times[5::2])]
    status = open("/proc/self/status").read()  # getrusage would also count the process that started this one
    peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
    found.append({"round": min(rounds) / 2, "gib": peak, "loss": result.events[-1]["train_loss"]})
print(json.dumps(found))
"""


def measure(*clients: int) -> list[dict[str, float]]:
    """CPU seconds of the fastest round, peak memory in GiB, and last loss, of configurations run in one process."""
    path = os.pathsep.join(p for p in sys.path if p)
    completed = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, clients)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_a_million_clients():
    few, many = measure(1000, 1_000_000)
    assert 0 < many["loss"] < 2
    assert many["gib"] < 1.2  # samples are 0.17 GiB, a copy on each device
    assert many["round"] < 4 * few["round"]  # about 1; with a permutation of all clients in each round 11
