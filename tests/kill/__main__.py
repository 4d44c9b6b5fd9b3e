"""python -m tests.kill --runs N [--seed S] [--compare]: kill N runs, each at one of its writes, and resume them.

With --compare the killed command is a comparison of two methods, one of which searches its learning rate.

All processes are forked from this one, which has imported everything and started neither threads nor devices.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fedrax.cli import compare_command, main, resume_command, run_command  # noqa: F401 - imported once, before forks
from tests.compiler import set_fast_compilation
from tests.kill.writes import COMPARISON, EXPERIMENT, at_every_write, continuing_command, outcome

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
SECONDS = 1200
"""Limit for a process on any machine; they take seconds."""


def run_in_fork(work: Callable[[], int]) -> int:
    """Exit status of a forked process that calls ``work``; negative if a signal ended it."""
    child = os.fork()
    if not child:
        status = 70
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup and background shells ignore it
            status = work()
        finally:
            sys.stderr.flush()
            os._exit(status)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    raise AssertionError(f"it hangs: {SECONDS} s")


def count_writes(command: list[str], into: Path) -> int:
    """Run the command and write its number of writes to a file."""
    count = 0

    def one() -> None:
        nonlocal count
        count += 1

    with at_every_write(one):
        status = main(command)
    into.write_text(str(count))
    return status


def kill_at_write(command: list[str], number: signal.Signals, at: int) -> int:
    """Run the command, which receives the signal at the write ``at``."""
    count = 0

    def one() -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), number)

    with at_every_write(one):
        return main(command)


def run_all(runs: int, seed: int, base: Path, text: str) -> None:
    """Kill and resume runs and print a summary; raise AssertionError for the first one with a different end."""
    experiment, folder, rng = base / "x.toml", base / "r", random.Random(seed)
    experiment.write_text(text)
    command = continuing_command(folder, experiment)
    for _ in range(2):  # the first one fills the compilation cache
        shutil.rmtree(folder, ignore_errors=True)
        assert run_in_fork(lambda: count_writes(command, base / "count")) == 0
    writes, expected = int((base / "count").read_text()), outcome(folder)
    print(f"{writes} writes", flush=True)
    ended: dict[str, int] = {}
    begun = 0
    for run in range(runs):
        number, at = SIGNALS[run % len(SIGNALS)], 1 + (run * writes // runs + rng.randrange(3)) % writes
        shutil.rmtree(folder, ignore_errors=True)
        where = f"{number.name} at write {at} of {writes}"
        status = run_in_fork(lambda number=number, at=at: kill_at_write(command, number, at))
        assert status in (-number, 128 + number, 0), f"{where}: status {status}"
        begun += any(folder.rglob("experiment.toml"))
        after = continuing_command(folder, experiment)
        status_after = run_in_fork(lambda after=after: main(after))
        assert status_after == 0, f"{where}: then status {status_after}"
        now = outcome(folder)
        other = [name for name in {**expected, **now} if now.get(name) != expected.get(name)]
        assert not other, f"{where}: different results: {other} {set(now['files']) ^ set(expected['files'])}"
        left = [path.name for path in folder.rglob(".*.part")]
        assert not left, f"{where}: {left} left"
        key = f"{number.name} -> {status}"
        ended[key] = ended.get(key, 0) + 1
    assert ended.get(f"SIGKILL -> {-signal.SIGKILL}", 0) > 0.9 * (runs // len(SIGNALS)), (
        f"few processes were killed: {ended}"
    )
    summary = ", ".join(f"{key}: {count}" for key, count in sorted(ended.items()))
    print(f"{runs} killed ({summary}): {begun} resumed, {runs - begun} started again, all with bitwise equal results")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.kill")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true")
    given = parser.parse_args()
    set_fast_compilation()
    with tempfile.TemporaryDirectory() as made:
        os.environ["FEDRAX_CACHE"] = str(Path(made) / "cache")
        began = time.monotonic()
        run_all(given.runs, given.seed, Path(made), COMPARISON if given.compare else EXPERIMENT)
        print(f"{time.monotonic() - began:.0f} s")
