"""Several processes with several devices each, joined by jax.distributed, against one process."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedrax
from fedrax.simulation.persistence import checkpoint

CHILD = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax
import fedrax
process, processes, devices, port = map(int, sys.argv[1:5])
jax.config.update("jax_num_cpu_devices", devices)
if processes > 1:
    fedrax.simulation.join_processes(f"127.0.0.1:{port}", processes, process)
import numpy as np
from fedrax.data import Federation, load
from fedrax.data.partition import Shards
from fedrax.models import Logistic

data = load("digits")
federation = Federation.from_dataset(data, Shards(clients=20), seed=0)
task = fedrax.classification(Logistic().build(data.train.x.shape[1:], 10))
results = []
mifa, episode = fedrax.algorithms.MIFA(memory="server"), fedrax.Episode(gamma=0.05)
methods = fedrax.FedAvg(), fedrax.Scaffold(), mifa, episode, fedrax.GradMA()
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
    """Start a child that prints to a file; a full pipe could block both children."""
    directory = path.parent / f"runs of {processes}"
    command = [sys.executable, "-c", CHILD, *map(str, (process, processes, devices, port, directory))]
    with path.open("w") as file:
        return subprocess.Popen(command, stdout=file, env=os.environ | {"JAX_PLATFORMS": "cpu"})


def output(child: subprocess.Popen, path: Path) -> list:
    assert child.wait(timeout=1800) == 0
    return json.loads(path.read_text().splitlines()[-1])


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_two_processes_of_two_devices_equal_one_of_four(port: int, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second", "alone")]
    children = [start(process, 2, 2, port, files[process]) for process in range(2)]
    first, second = map(output, children, files[:2])
    alone = output(start(0, 1, 4, port, files[2]), files[2])
    assert len(list(tmp_path.glob("runs of 2/*/checkpoint/state.npz"))) == len(first) - 1
    for mine, other, reference in zip(first, second, alone, strict=True):
        assert "4 CPU cores" in mine[0]
        assert mine == other
        np.testing.assert_allclose(mine[1], reference[1], rtol=2e-6, atol=2e-7)  # another order of the same sums
        assert mine[2].keys() == reference[2].keys()
        for key, value in reference[2].items():
            assert mine[2][key] == pytest.approx(value, rel=1e-5)


WAITING = """
import os, signal, sys, time
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax
import fedrax
port, process, what, directory = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 1)
fedrax.simulation.join_processes(f"127.0.0.1:{port}", 2, process)
from tests.simulation.problems import FEDERATION, LOCAL, TASK

class Second:
    def start(self, info): pass
    def finish(self, result): pass
    def event(self, event):
        if process == 1 and event["round"] == 4:
            time.sleep(40) if what == "sleeps" else os.kill(os.getpid(), signal.SIGKILL)

settings = {"rounds": 8, "cohort_size": 4, "eval_every": 2, "checkpoint_every": 2}
try:
    fedrax.simulate(fedrax.FedAvg(local=LOCAL), TASK, FEDERATION, directory=directory, sinks=[Second()], **settings)
except fedrax.FedraxError as error:
    sys.exit(f"error: {error}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["is killed", "sleeps"])
def test_process_waits_for_the_other_or_raises(failure: str, port: int, tmp_path: Path) -> None:
    """It waits silently, or the run ends with a clear error and a checkpoint."""
    path = os.pathsep.join(p for p in sys.path if p)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(port), str(process), failure, str(tmp_path)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    (_, printed), _ = [child.communicate(timeout=1800) for child in children]
    first, second = (child.returncode for child in children)
    written = {int(event["round"]) for event in fedrax.simulation.read_events(tmp_path)}
    if failure == "sleeps":
        assert (first, second) == (0, 0) and max(written) == 8
        assert not [line for line in printed.splitlines() if "Gloo" not in line]
    else:
        assert second == -signal.SIGKILL and first == 1 and max(written) < 8
        assert "error: another process of this run has ended" in printed and "Traceback" not in printed
        assert checkpoint.load_meta(tmp_path / "checkpoint")["round"] in (4, 6)


RESUMED = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax
import fedrax
port, process, rounds, directory, lr = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5])
jax.config.update("jax_num_cpu_devices", 1)
fedrax.simulation.join_processes(f"127.0.0.1:{port}", 2, process)
from tests.simulation.problems import FEDERATION, TASK

method = fedrax.FedAvg(local=fedrax.LocalSGD(lr=lr, steps=3, batch_size=2))
settings = {"rounds": rounds, "cohort_size": 4, "eval_every": 2, "checkpoint_every": 2}
try:
    result = fedrax.simulate(method, TASK, FEDERATION, directory=directory, resume=True, **settings)
except fedrax.FedraxError as error:
    sys.exit(f"error: {error}")
print(json.dumps([result.events[-1]["test_loss"], len(result.events)]))
"""


def run_in_two_processes(directory: Path, port: int, rounds: int, lr: float = 0.05) -> list[tuple[int, str, str]]:
    """(status, output, errors) of each process."""
    return run_code_in_two_processes(RESUMED, port, rounds, directory, lr)


def run_code_in_two_processes(code: str, port: int, *arguments: Any) -> list[tuple[int, str, str]]:
    """(status, output, errors) of each of two processes."""
    path = os.pathsep.join(p for p in sys.path if p)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, (port, process, *arguments))],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    printed = [child.communicate(timeout=1800) for child in children]
    return [(child.returncode, *texts) for child, texts in zip(children, printed, strict=True)]


@pytest.mark.slow
def test_all_processes_resume_from_one_checkpoint(port: int, tmp_path: Path) -> None:
    first, further = (run_in_two_processes(tmp_path / "run", port, rounds) for rounds in (4, 8))
    uninterrupted = run_in_two_processes(tmp_path / "whole", port, 8)
    assert [status for status, _, _ in (*first, *further, *uninterrupted)] == [0] * 6, further
    ends = [[json.loads(out.splitlines()[-1]) for _, out, _ in printed] for printed in (further, uninterrupted)]
    assert ends[0] == ends[1]


STOPPED = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
import jax
import fedrax
jax.config.update("jax_num_cpu_devices", 1)
fedrax.simulation.join_processes(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from tests.simulation.problems import FEDERATION, LOCAL, TASK

rounds = (4, 2)[int(sys.argv[2])]
settings = {"rounds": 8, "cohort_size": 4, "eval_every": 2, "callbacks": [lambda seen: seen.event["round"] == rounds]}
result = fedrax.simulate(fedrax.FedAvg(local=LOCAL), TASK, FEDERATION, **settings)
print(json.dumps([result.stopped, len(result.events)]))
"""


@pytest.mark.slow
def test_callback_of_the_first_process_ends_the_run_of_all(port: int) -> None:
    ends = [json.loads(out.splitlines()[-1]) for _, out, _ in run_code_in_two_processes(STOPPED, port)]
    assert ends == [["callback", 4]] * 2


@pytest.mark.slow
def test_diverged_run_raises_a_clear_error_in_all_processes(port: int, tmp_path: Path) -> None:
    for status, _, printed in run_in_two_processes(tmp_path / "run", port, 20, 1e38):
        assert status == 1 and " is not finite" in printed and "Traceback" not in printed
    assert (tmp_path / "run" / "failure" / "state.npz").exists()
