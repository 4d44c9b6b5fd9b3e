"""Killed or interrupted processes: after resuming, runs end as if uninterrupted."""

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
"""Number of kills for each of two methods."""
MOST_ROUNDS = 14
"""Approximate maximum number of rounds of a killed process."""

Start = Callable[..., subprocess.Popen]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Start a child process with a method and directory; all share the compilation cache."""
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
    """Output of the child."""
    assert process.stdout is not None
    return process.stdout


def read_until(process: subprocess.Popen, round: int) -> int:
    """Wait until the child has finished ``round``, and return the current round."""
    for line in lines(process):
        if int(line) >= round:
            return int(line)
    raise AssertionError(f"the child ended with status {process.wait()} before round {round}")


def finish(process: subprocess.Popen) -> None:
    """Wait until the child exits."""
    lines(process).read()
    assert process.wait() == 0


def assert_same_end(one: Path, other: Path) -> None:
    """Assert equal events except for durations, and bitwise equal parameters and states."""
    assert without_times(read_events(one)) == without_times(read_events(other))
    with np.load(one / "final.npz") as a, np.load(other / "final.npz") as b:
        assert a.files == b.files
        for name in a.files:
            assert a[name].tobytes() == b[name].tobytes()
            assert np.abs(a[name]).max() > 0  # all states, so that no client is skipped


def kill_repeatedly(start: Start, method: str, directory: Path) -> int:
    """Kill the run KILLS times, then let it finish; return how often a partial checkpoint remained."""
    rng, part, torn = random.Random(method), directory / "checkpoint" / ".state.npz.part", 0
    for kill in range(KILLS):
        process = start(method, directory)
        first = read_until(process, 0)
        if kill:  # the first kill is before the end of the first round
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
def test_run_killed_repeatedly_ends_as_uninterrupted(start: Start, tmp_path: Path):
    for method in ("scaffold", "losac"):  # first one after the other, to fill the compilation cache
        finish(start(method, tmp_path / f"{method}-whole"))
    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(kill_repeatedly, start, m, tmp_path / m) for m in ("scaffold", "losac")]
        torn = sum(task.result() for task in tasks)
    assert torn >= 1
    for method in ("scaffold", "losac"):
        assert len(read_events(tmp_path / method)) == ROUNDS
        assert_same_end(tmp_path / method, tmp_path / f"{method}-whole")


@pytest.mark.slow
def test_first_ctrl_c_writes_a_checkpoint_and_second_one_exits(start: Start, tmp_path: Path):
    """The first one ends the run after the block of rounds."""
    rounds, sleep_at = 150, 5
    finish(start("scaffold", tmp_path / "whole", rounds=rounds))
    process = start("scaffold", tmp_path / "cut", sleep_at, rounds=rounds)
    read_until(process, sleep_at)
    process.send_signal(signal.SIGINT)
    assert read_until(process, sleep_at) == sleep_at  # it has received the signal, and waits for the end of its round
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    lines(process).close()
    assert process.wait(timeout=1800) == 4

    process = start("scaffold", tmp_path / "cut", rounds=rounds)
    at = read_until(process, 0)
    assert at == sleep_at - 1  # round 5 was not saved
    at = read_until(process, at + 3)
    process.send_signal(signal.SIGINT)
    done = int([str(at), *lines(process).read().split()][-1])
    assert process.wait(timeout=1800) == 3
    assert at <= done < rounds
    process = start("scaffold", tmp_path / "cut", rounds=rounds)
    assert read_until(process, 0) == done
    finish(process)
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
