"""Comparisons on local Dask and Ray workers, one of which is killed; invalid schedulers."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedrax.errors import FedraxError
from fedrax.experiments import backends, jobs
from fedrax.experiments.jobs import ComparisonWatcher
from fedrax.experiments.run_comparison import ComparisonResult, compare
from tests.cli.conftest import GRID_COMPARISON, events_by_run
from tests.cli.conftest import Outcome as Printed

ROOT = Path(__file__).parents[2]
PRELOAD = "from tests.cli.test_workers import initialize_worker\ninitialize_worker()\n"


@contextlib.contextmanager
def process(module: str, *arguments: object, path: Path = ROOT) -> Iterator[subprocess.Popen]:
    """Run a Python module in a process until the end of the context."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    paths = os.pathsep.join([str(path), str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    started = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})  # output is shown by pytest
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def wait_until(started: subprocess.Popen, is_ready: Callable[[], bool]) -> None:
    """Wait until ``is_ready`` for at most as long as the process lives."""
    while not is_ready():
        assert started.poll() is None, f"it ended with status {started.returncode}"
        time.sleep(0.05)


@pytest.fixture
def dask(tmp_path: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen]]]:
    """Address of a scheduler, and its two workers by name."""
    file, options = tmp_path / "scheduler.json", ["--no-dashboard"]
    (tmp_path / "preload.py").write_text(PRELOAD)
    with contextlib.ExitStack() as stack:
        where = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", file]
        scheduler = stack.enter_context(process("distributed.cli.dask_scheduler", *where, *options))
        wait_until(scheduler, file.exists)
        address = json.loads(file.read_text())["address"].removeprefix("tcp://")
        options += ["--nthreads", 1, "--no-nanny", "--preload", tmp_path / "preload.py", "--local-directory", tmp_path]
        workers = {
            name: stack.enter_context(process("distributed.cli.dask_worker", address, "--name", name, *options))
            for name in ("first", "second")
        }
        yield address, workers


def kill_busy(address: str, workers: dict[str, subprocess.Popen], lost: list[str]) -> None:
    """Kill the first worker that has been assigned a run."""
    distributed = importlib.import_module("distributed")
    with distributed.Client(f"tcp://{address}", set_as_default=False) as client:
        while not lost:
            names = {at: facts["name"] for at, facts in client.scheduler_info()["workers"].items()}
            lost += [key for at, keys in client.processing().items() if names.get(at) == "first" for key in keys]
            time.sleep(0.01)
        workers["first"].kill()


@pytest.mark.slow
def test_run_of_a_killed_dask_worker_is_repeated_by_another(
    dask: tuple[str, dict[str, subprocess.Popen]],
    local_comparison: ComparisonResult,
    tmp_path: Path,
) -> None:
    """The results are bitwise equal to those in this process."""
    address, workers = dask
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    lost: list[str] = []
    thread = threading.Thread(target=kill_busy, args=(address, workers, lost), daemon=True)
    thread.start()
    there = compare(tmp_path / "t.toml", directory=tmp_path / "there", executor=f"dask://{address}")
    thread.join()
    assert lost and workers["first"].wait() == -9
    assert dict(there.search_results["fedavg"].best.point) == dict(local_comparison.search_results["fedavg"].best.point)
    assert events_by_run(tmp_path / "there") == events_by_run(local_comparison.directory)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost:8786", "not the address of a scheduler"),
        ("dask://", "not the address of a scheduler"),
        ("dusk://localhost:1", "did you mean 'dask'"),
        ("dask://127.0.0.1:1", "cannot connect to a dask scheduler at 127.0.0.1:1"),
        ("dask://nobody", "cannot connect to a dask scheduler"),
    ],
)
def test_invalid_schedulers_are_rejected(
    fedrax: Callable[..., Printed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, message: str
) -> None:
    monkeypatch.setattr(backends, "TIMEOUT", 1)
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    printed = fedrax("compare", "t.toml", "--on", address, "--quiet", "--out", "c")
    assert printed.status == 2 and message in printed.err and len(printed.err.splitlines()) == 1, printed.err
    assert not (tmp_path / "c").exists()


def test_trackers_are_rejected_with_a_scheduler(fedrax: Callable[..., Printed], tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    assert "leave out --on" in fedrax("compare", "t.toml", "--on", "dask://localhost:1", "--tensorboard").err


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(FedraxError, match="needs the package distributed: pip install 'distributed'"):
        backends.executor_factory("dask://localhost:8786")


def test_missing_run_directories_of_workers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "FILE_TIMEOUT", 0.1)
    with pytest.raises(FedraxError, match="workers need the same file system"):
        jobs.wait_for_file(tmp_path / "run/experiment.toml", "FedAvg, seed 0")


@pytest.fixture
def ray(tmp_path: Path) -> Iterator[str]:
    """Address of a Ray cluster with one node."""
    pytest.importorskip("ray", reason="ray is not installed: make test-ray")
    of_workers = f"    {PRELOAD.replace(chr(10), '; ')}"  # Ray has no preload option, so use Python's sitecustomize
    condition = "import sys\nif any('default_worker' in word for word in sys.orig_argv):\n"
    (tmp_path / "sitecustomize.py").write_text(condition + of_workers)
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        head, client = (place.getsockname()[1] for place in held)
    folder = tempfile.mkdtemp(prefix="ray")  # paths of Unix sockets must be short
    options = ["--node-ip-address=127.0.0.1", "--include-dashboard=false", f"--temp-dir={folder}", "--num-cpus=2"]
    ports = [f"--port={head}", f"--ray-client-server-port={client}"]
    with process("ray.scripts.scripts", "start", "--head", "--block", *options, *ports, path=tmp_path) as started:
        wait_until(started, lambda: not socket.socket().connect_ex(("127.0.0.1", client)))
        yield f"127.0.0.1:{client}"
        started.terminate()  # which ends the node as well
        started.wait()
    shutil.rmtree(folder, ignore_errors=True)


class Killing(ComparisonWatcher):
    """Kills the process of a run as soon as it has begun, and records messages."""

    def __init__(self, directory: Path):
        self.said: list[str] = []
        threading.Thread(target=self.kill, args=(directory,), daemon=True).start()

    def kill(self, directory: Path) -> None:
        while not list(directory.rglob("experiment.toml")):
            time.sleep(0.01)
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (place / "cmdline").read_bytes().startswith(b"ray::run_in_worker"):
                    os.kill(int(place.name), signal.SIGKILL)
                    return

    def say(self, text: str) -> None:
        self.said.append(text)


def test_run_of_a_killed_ray_worker_is_repeated(ray: str, local_comparison: ComparisonResult, tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    watcher = Killing(tmp_path / "there")
    compare(tmp_path / "t.toml", directory=tmp_path / "there", executor=f"ray://{ray}", watcher=watcher)
    assert any("submitted again" in line for line in watcher.said), watcher.said
    assert events_by_run(tmp_path / "there") == events_by_run(local_comparison.directory)
