"""Processes that are started together and all stopped together, with every process that they have started."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from fedrax.errors import FedraxError
from fedrax.signals import STOP_SIGNALS, Interrupted, exit_held

_GRACE_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL, and until a process that does not end is reported. Flower's end within about two."""
_POLL_SECONDS = 0.2
_PROC = Path("/proc")


class ProcessSet:
    """Context of processes that are stopped at its end, also after an error or a signal.

    Each process leads a process group of its own, so that Ctrl-C in a terminal reaches only this process, which then
    stops the others. What they start is found by its parent and by its group: a process that outlives its parent stays
    known by its group. SIGINT, SIGTERM and SIGHUP raise :class:`Interrupted` in the context, but not while a process
    is started or stopped.

    Args:
        logs: directory of the files NAME.log with the output of each process.
        environment: environment variables of the processes.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]):
        self.logs, self._environment = logs, dict(environment)
        self._started: list[tuple[str, subprocess.Popen]] = []
        self._finite: set[subprocess.Popen] = set()
        """Those that end by themselves."""
        self._groups: set[int] = set()
        self._files, self._held = ExitStack(), ExitStack()
        self._handlers: dict[int, Any] = {}
        self._uninterrupted, self._signal = False, 0

    def __enter__(self) -> Self:
        """Listen to signals; one that this process ignores stays ignored."""
        atexit.register(self.stop)
        self._held.enter_context(exit_held())
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        """Stop all processes."""
        try:
            self.stop()
        finally:
            atexit.unregister(self.stop)
            self._held.close()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        if self._signal and error[0] is None:
            raise Interrupted(self._signal)

    def _handle(self, number: int, frame: object) -> None:
        """Raise Interrupted, or remember the signal for later."""
        self._signal = number
        if not self._uninterrupted:
            raise Interrupted(number)

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen:
        """Start a process.

        Args:
            name: its name in messages, and its log's.
            command: the command and its arguments.

        Returns:
            The process.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self._files.enter_context((self.logs / f"{name}.log").open("ab"))
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        self._uninterrupted = True
        try:
            process = subprocess.Popen(command, env=self._environment, start_new_session=True, **options)
            self._started.append((name, process))
            self._groups.add(process.pid)
        except OSError as error:
            raise FedraxError(f"cannot start {command[0]}: {error.strerror or error}") from error
        finally:
            self._uninterrupted = False
        if self._signal:
            raise Interrupted(self._signal)
        return process

    def run(self, name: str, command: Sequence[str], seconds: float) -> None:
        """Start a process and wait until it has ended.

        Args:
            name: its name in messages, and its log's.
            command: the command and its arguments.
            seconds: the longest time to wait.

        Raises:
            FedraxError: if it or another process fails, and after the time.
        """
        process = self.start(name, command)
        self._finite.add(process)
        self.wait(lambda: process.poll() is not None, seconds, name)
        self._check()

    def wait(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for a condition.

        Args:
            done: the condition.
            seconds: the longest time to wait.
            what: what is waited for, for the message.

        Raises:
            FedraxError: if a process fails before it, and after the time.
        """
        due = time.monotonic() + seconds
        while not done():
            self._observe()
            self._check()
            if time.monotonic() > due:
                raise FedraxError(f"{what} took more than {seconds:g} seconds: see the logs in {self.logs}")
            time.sleep(_POLL_SECONDS)

    def _check(self) -> None:
        """Raise FedraxError for a process that has failed, or has ended although it should run until `stop`."""
        for name, process in self._started:
            status = process.poll()
            if status or (status == 0 and process not in self._finite):
                raise FedraxError(f"{name} ended with status {process.returncode}: see {self.logs / name}.log")

    def stop(self) -> None:
        """Stop all processes and those that they have started."""
        self._uninterrupted = True
        for number in (signal.SIGTERM, signal.SIGKILL):
            for one in self._observe():
                with suppress(OSError):  # it has ended meanwhile
                    os.kill(one.number, number)
            end = time.monotonic() + _GRACE_SECONDS
            while self._observe() and time.monotonic() < end:
                time.sleep(_POLL_SECONDS / 4)
        self._files.close()
        if left := self._observe():
            raise FedraxError(f"processes that do not end: {', '.join(str(one.number) for one in left)}")

    def _observe(self) -> list[_Process]:
        """The processes of this set that run. Their groups are stored; one without processes gets no new ones."""
        for _, process in self._started:
            process.poll()  # or it stays listed as a zombie
        running, found = [one for one in _running() if one.number != os.getpid()], set()
        while True:
            numbers = {one.number for one in found}
            groups = self._groups | {one.group for one in found}
            ours = {one for one in running if one.group in groups or one.parent in numbers}
            if ours == found:
                self._groups = {one.group for one in ours}
                return sorted(ours)
            found = ours


class _Process(NamedTuple):
    """A process of this machine."""

    number: int
    parent: int
    group: int


def _running() -> list[_Process]:
    """The processes of this machine, without those that have ended and are not waited for."""
    if not (_PROC / "self" / "stat").exists():
        command = ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="]
        rows = [line.split() for line in subprocess.check_output(command, text=True).splitlines()]
        return [_Process(*map(int, row[:3])) for row in rows if not row[3].startswith("Z")]
    found = []
    for directory in _PROC.iterdir():
        with suppress(OSError, ValueError):  # it is no process, or has ended
            number, stat = int(directory.name), (directory / "stat").read_text("utf-8", "replace")
            state, parent, group, *_ = stat.rpartition(")")[2].split()  # behind the name, which may hold anything
            if state not in "ZX":
                found.append(_Process(number, int(parent), int(group)))
    return found
