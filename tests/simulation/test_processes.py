"""Several processes with several devices each, joined by jax.distributed, against one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

CHILD = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax
process, processes, devices, port = map(int, sys.argv[1:5])
jax.config.update("jax_num_cpu_devices", devices)
if processes > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
import numpy as np
import fedrax
from fedrax.data import Federation, load
from fedrax.data.partition import Shards
from fedrax.models import Logistic

data = load("digits")
federation = Federation.from_dataset(data, Shards(clients=20), seed=0)
task = fedrax.classification(Logistic().build(data.train.x.shape[1:], 10))
results = []
methods = fedrax.FedAvg(), fedrax.Scaffold(), fedrax.MIFA(memory="server"), fedrax.Episode(gamma=0.05), fedrax.GradMA()
for algorithm in methods:
    kept = {"directory": f"{sys.argv[5]}/{type(algorithm).__name__}", "checkpoint_every": 2}
    if isinstance(algorithm, fedrax.Scaffold):
        kept = {}  # what clients remember lies in all processes and is not saved
    result = fedrax.simulate(algorithm, task, federation, rounds=6, cohort_size=7, eval_every=3, **kept)
    last = {k: v for k, v in result.events[-1].items() if not k.startswith("seconds")}
    results.append([result.plan, np.asarray(result.params["output"]["weight"]).tolist(), last])
print(json.dumps(results))
"""


def start(process: int, processes: int, devices: int, port: int, path: Path) -> subprocess.Popen:
    """A child that prints to a file: one that waits for a pipe to be read would keep the other from ending."""
    directory = path.parent / f"runs of {processes}"
    command = [sys.executable, "-c", CHILD, *map(str, (process, processes, devices, port, directory))]
    with path.open("w") as file:
        return subprocess.Popen(command, stdout=file, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def output(child: subprocess.Popen, path: Path) -> list:
    assert child.wait(timeout=1800) == 0
    return json.loads(path.read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_processes_of_two_devices_equal_one_of_four(port: int, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second", "alone")]
    children = [start(process, 2, 2, port, files[process]) for process in range(2)]
    first, second = map(output, children, files[:2])
    alone = output(start(0, 1, 4, port, files[2]), files[2])
    assert len(list(tmp_path.glob("runs of 2/*/checkpoint/*"))) == len(first) - 1
    for mine, other, reference in zip(first, second, alone, strict=True):
        assert "4 CPU cores" in mine[0]
        assert mine == other
        np.testing.assert_allclose(mine[1], reference[1], rtol=2e-6, atol=2e-7)  # another order of the same sums
        assert mine[2].keys() == reference[2].keys()
        for key, value in reference[2].items():
            assert mine[2][key] == pytest.approx(value, rel=1e-5)
