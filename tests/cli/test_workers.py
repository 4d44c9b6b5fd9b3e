"""Comparisons on the workers of an executor equal local ones, even if a worker is killed."""

import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import jax
import pytest

from fedrax.errors import FedraxError
from fedrax.experiments.jobs import ComparisonWatcher
from fedrax.experiments.run_comparison import ComparisonResult, compare
from tests.cli.conftest import GRID_COMPARISON, events_by_run
from tests.compiler import set_fast_compilation


class RecordingProgress(ComparisonWatcher):
    """Records messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def initialize_worker() -> None:
    """Give a worker the devices and the compiler options of this process."""
    jax.config.update("jax_num_cpu_devices", 2)
    set_fast_compilation()


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=initialize_worker)


@pytest.mark.slow
def test_run_of_a_killed_worker_is_repeated(local_comparison: ComparisonResult, tmp_path: Path) -> None:
    """One of two processes is killed during its first run; the results equal local ones."""
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    made: list[ProcessPoolExecutor] = []

    def make() -> ProcessPoolExecutor:
        made.append(pool())
        if len(made) == 1:
            threading.Thread(target=kill_one, args=(made[0], tmp_path / "there"), daemon=True).start()
        return made[-1]

    heard = RecordingProgress()
    there = compare(tmp_path / "t.toml", directory=tmp_path / "there", executor=make, watcher=heard)
    assert len(made) >= 2 and any("submitted again" in line for line in heard.said)
    assert dict(there.search_results["fedavg"].best.point) == dict(local_comparison.search_results["fedavg"].best.point)
    assert events_by_run(tmp_path / "there") == events_by_run(local_comparison.directory)


def kill_one(executor: ProcessPoolExecutor, directory: Path) -> None:
    """Kill a worker of the pool as soon as a run has begun."""
    while not list(directory.rglob("experiment.toml")):
        time.sleep(0.01)
    os.kill(next(iter(executor._processes)), signal.SIGKILL)


class BreakingExecutor(ThreadPoolExecutor):
    """An executor that breaks with its first task."""

    def submit(self, *arguments: object, **options: object):  # type: ignore[override]
        return super().submit(broken)


def broken() -> None:
    raise BrokenProcessPool("a worker was killed")


def test_repeatedly_broken_executors_are_reported(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(GRID_COMPARISON)
    with BreakingExecutor(1) as fragile, pytest.raises(FedraxError, match="call again with a new one"):
        compare(tmp_path / "t.toml", directory=tmp_path / "a", executor=fragile)
    with pytest.raises(FedraxError, match="3 executors broke"):
        compare(tmp_path / "t.toml", directory=tmp_path / "a", executor=lambda: BreakingExecutor(1))
