"""Runs killed or interrupted as processes end, once resumed, where the uninterrupted run ends."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from fedrax.data import load
from fedrax.simulation import read_events
from tests.simulation.problems import without_times

ROUNDS = 300
KILLS = 10
"""For each of two methods."""
MOST_ROUNDS = 14
"""A killed process has done this many rounds, give or take."""

Start = Callable[..., subprocess.Popen]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start the child on a method and directory; compiled programs are shared by all of them."""
    base = tmp_path_factory.mktemp("interruption")
    digits = load("digits")
    np.savez(base / "digits.npz", x=digits.train.x, y=digits.train.y)
    more = {"JAX_COMPILATION_CACHE_DIR": str(base / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    path = os.pathsep.join(p for p in sys.path if p)

    def popen(method: str, directory: Path, *more_arguments: int, rounds: int = ROUNDS) -> subprocess.Popen:
        arguments = [base / "digits.npz", method, directory, rounds, *more_arguments]
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("child.py")), *map(str, arguments)],
            env=os.environ | more | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )

    return popen


def lines(process: subprocess.Popen) -> IO[str]:
    """What the child says."""
    assert process.stdout is not None
    return process.stdout


def read_until(process: subprocess.Popen, round: int) -> int:
    """Wait until the child has done ``round``; returns the round it is at."""
    for line in lines(process):
        if int(line) >= round:
            return int(line)
    raise AssertionError(f"the child ended with status {process.wait()} before round {round}")


def finish(process: subprocess.Popen) -> None:
    """Let the child come to its end."""
    lines(process).read()
    assert process.wait() == 0


def assert_same_end(one: Path, other: Path) -> None:
    """The same events but for times, and bitwise the same parameters and states."""
    assert without_times(read_events(one)) == without_times(read_events(other))
    with np.load(one / "final.npz") as a, np.load(other / "final.npz") as b:
        assert a.files == b.files
        for name in a.files:
            assert a[name].tobytes() == b[name].tobytes()
            assert np.abs(a[name]).max() > 0  # of every state: nobody was passed over


def kill_again_and_again(start: Start, method: str, directory: Path) -> int:
    """Kill the run KILLS times, then let it end; returns how often that left half a checkpoint behind."""
    rng, part, torn = random.Random(method), directory / "checkpoint" / ".state.npz.part", 0
    for kill in range(KILLS):
        process = start(method, directory)
        first = read_until(process, 0)
        if kill:  # the first one dies before its first round is over
            read_until(process, first + rng.randint(1, MOST_ROUNDS))
        if kill % 2:
            time.sleep(rng.uniform(0, 0.02))
        else:
            deadline = time.monotonic() + 1
            while kill and not part.exists() and time.monotonic() < deadline:
                pass
        process.send_signal(signal.SIGKILL)
        lines(process).close()
        assert process.wait() == -signal.SIGKILL
        torn += part.exists()
    finish(start(method, directory))
    return torn


@pytest.mark.slow
def test_killed_twenty_times(start: Start, tmp_path: Path):
    for method in ("scaffold", "losac"):  # in turn: they fill the cache of compiled programs
        finish(start(method, tmp_path / f"{method}-whole"))
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(kill_again_and_again, start, m, tmp_path / m) for m in ("scaffold", "losac")]
        torn = sum(task.result() for task in tasks)
    assert torn >= 1
    for method in ("scaffold", "losac"):
        assert len(read_events(tmp_path / method)) == ROUNDS
        assert_same_end(tmp_path / method, tmp_path / f"{method}-whole")


@pytest.mark.slow
def test_interrupted_once_and_twice(start: Start, tmp_path: Path):
    """The first Ctrl-C ends the run after the block with a checkpoint, the second one at once."""
    rounds, sleep_at = 150, 5
    finish(start("scaffold", tmp_path / "whole", rounds=rounds))
    process = start("scaffold", tmp_path / "cut", sleep_at, rounds=rounds)
    read_until(process, sleep_at)
    process.send_signal(signal.SIGINT)
    assert read_until(process, sleep_at) == sleep_at  # it has heard, and waits for its round to end
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    lines(process).close()
    assert process.wait(timeout=1800) == 4

    process = start("scaffold", tmp_path / "cut", rounds=rounds)
    at = read_until(process, 0)
    assert at == sleep_at - 1  # round 5 was never saved
    at = read_until(process, at + 3)
    process.send_signal(signal.SIGINT)
    done = int([str(at), *lines(process).read().split()][-1])
    assert process.wait(timeout=1800) == 3
    assert at <= done < rounds
    process = start("scaffold", tmp_path / "cut", rounds=rounds)
    assert read_until(process, 0) == done
    finish(process)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
