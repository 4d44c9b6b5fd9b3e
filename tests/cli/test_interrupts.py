"""Ctrl-C while Python calls a function whose errors it only prints."""

import gc
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from fedrax import cli
from fedrax.cli import list_command
from tests.cli.conftest import Outcome
from tests.slow import slow_cases


@pytest.mark.parametrize("lost", slow_cases([1, 0]))
def test_an_interrupt_that_a_callback_swallows_comes_again(
    lost: int, fedrax: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again, where the first comes just before the system call that sleeps, which then knows nothing of it."""
    before, handler, kill, sent = sys.unraisablehook, signal.getsignal(signal.SIGINT), signal.pthread_kill, []

    def send(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > lost:
            kill(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", send)

    def interrupted(phase: str, info: Any) -> None:
        gc.callbacks.remove(interrupted)
        raise KeyboardInterrupt

    def busy(arguments: list[str]) -> int:
        gc.callbacks.append(interrupted)
        gc.collect()
        time.sleep(30)  # in a while; the interrupt ends it
        return 0

    monkeypatch.setattr(list_command, "main", busy)
    began = time.monotonic()
    assert fedrax("list") == Outcome(130, "", "fedrax: interrupted\n")
    assert time.monotonic() - began < 20 and len(sent) > lost
    assert sys.unraisablehook is before and signal.getsignal(signal.SIGINT) is handler


WAITING = """
import atexit, sys, time
from fedrax import cli
from fedrax.cli import list_command

def interrupted(arguments):
    print("at work")
    raise KeyboardInterrupt

atexit.register(time.sleep, 1000)
list_command.main, sys.argv = interrupted, ["fedrax", "list"]
sys.exit(cli.main())
"""


def test_an_interrupted_command_ends_at_once() -> None:
    """A round of a million steps may take an hour, for whose end JAX waits before a process may go."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "at work\n", "fedrax: interrupted\n")


def test_other_errors_of_such_functions_are_printed_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)

    class Fails:
        def __del__(self) -> None:
            raise ValueError("gone")

    with cli._repeat_lost_interrupts():
        Fails()
    assert [lost.exc_type for lost in seen] == [ValueError]
