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
from tests.cli.conftest import SEARCHED, numbers
from tests.compiler import compile_quickly


class Heard(ComparisonWatcher):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def as_here() -> None:
    """A worker with the devices and the compiler of this process."""
    jax.config.update("jax_num_cpu_devices", 2)
    compile_quickly()


def pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"), initializer=as_here)


@pytest.mark.slow
def test_a_killed_workers_run_is_taken_up(here: ComparisonResult, tmp_path: Path) -> None:
    """One of two processes is killed in its first run; the numbers are those of the same runs here."""
    (tmp_path / "t.toml").write_text(SEARCHED)
    made: list[ProcessPoolExecutor] = []

    def make() -> ProcessPoolExecutor:
        made.append(pool())
        if len(made) == 1:
            threading.Thread(target=kill_one, args=(made[0], tmp_path / "there"), daemon=True).start()
        return made[-1]

    heard = Heard()
    there = compare(tmp_path / "t.toml", directory=tmp_path / "there", executor=make, watcher=heard)
    assert len(made) >= 2 and any("submitted again" in line for line in heard.said)
    assert dict(there.search_results["fedavg"].best.point) == dict(here.search_results["fedavg"].best.point)
    assert numbers(tmp_path / "there") == numbers(here.directory)


def kill_one(executor: ProcessPoolExecutor, directory: Path) -> None:
    """Kill a worker of the pool as soon as one has begun a run."""
    while not list(directory.rglob("experiment.toml")):
        time.sleep(0.01)
    os.kill(next(iter(executor._processes)), signal.SIGKILL)


class Fragile(ThreadPoolExecutor):
    """Breaks with its first task."""

    def submit(self, *arguments: object, **options: object):  # type: ignore[override]
        return super().submit(broken)


def broken() -> None:
    raise BrokenProcessPool("a worker was killed")


def test_what_cannot_be_taken_up_is_reported(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(SEARCHED)
    with Fragile(1) as fragile, pytest.raises(FedraxError, match="call again with a new one"):
        compare(tmp_path / "t.toml", directory=tmp_path / "a", executor=fragile)
    with pytest.raises(FedraxError, match="3 executors broke"):
        compare(tmp_path / "t.toml", directory=tmp_path / "a", executor=lambda: Fragile(1))
