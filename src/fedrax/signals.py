"""Stop signals: Ctrl-C, SIGTERM and SIGHUP. A run ends with a checkpoint, a command at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from fedrax.errors import FedraxError

STOP_SIGNALS: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals of Ctrl-C; of ``kill``, time limits of clusters and stopped containers; of a closed terminal."""
ECHO_SECONDS = 0.5
"""A signal that follows another one so closely is the same request: ``timeout`` signals a process and then its group,
and a program that started this one may pass a terminal's Ctrl-C on. Two requests of a person are further apart."""
NOTICE_SECONDS = 2.0
"""Seconds after the first signal until a command that still works on its block of rounds says so."""
GRACE_SECONDS = 5.0
"""Seconds for a command to react to a signal; then the process ends, because the main thread is inside a compilation
or a long computation, which Python cannot interrupt. Too short, and a slow write of results would be cut off."""


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run, after a checkpoint was written if it has a directory.

    Args:
        number: the signal.
        outcome: what was kept and how to resume, the message.

    Example:
        >>> fedrax.simulation.Interrupted().signal
        <Signals.SIGINT: 2>
    """

    def __init__(
        self,
        number: int = signal.SIGINT,
        outcome: str = "the run was stopped; if it has a directory, resume=True continues from its checkpoint",
    ):
        super().__init__(outcome)
        self.signal = number
        """The signal."""


# -- runs --------------------------------------------------------------------------------------------------------------


class StopFlag:
    """A flag that a signal sets."""

    signal: int | None = None
    heard: bool = False
    """Whether signals set it, and not only :func:`stop_runs`."""

    def is_set(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None


_active_flags: list[StopFlag] = []
"""The flags of the runs of this process."""
_last_request = -ECHO_SECONDS
"""When the last signal was handled that was no echo."""


def _is_echo() -> bool:
    """Whether a signal belongs to the request before it; otherwise it begins a new one."""
    global _last_request
    now = time.monotonic()
    if now - _last_request < ECHO_SECONDS:
        return True
    _last_request = now
    return False


def _expect_request() -> None:
    """Take the next signal as a new request, however closely it follows the last one."""
    global _last_request
    _last_request = -ECHO_SECONDS


def stop_runs(number: int) -> None:
    """Stop the runs of this process as the signal ``number`` would: each ends its block of rounds with a checkpoint."""
    for flag in _active_flags:
        flag.signal = number


def _heeded(replace: bool = True) -> dict[int, Any]:
    """The handlers of the stop signals, without those that are ignored or that another language has set."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    found = {number: old for number, old in handlers.items() if old is not None and old is not signal.SIG_IGN}
    python = (signal.SIG_DFL, signal.default_int_handler)
    return found if replace else {number: old for number, old in found.items() if old in python}


@contextmanager
def interrupt_flag(replace: bool = True) -> Iterator[StopFlag]:
    """Context of a run whose flag is set by the first stop signal; a second request has the signal's usual effect.

    At the end of the context a set flag raises :class:`Interrupted`, also in place of a FedraxError such as that of a
    diverged run, after which a comparison would begin its next run.

    A signal that the process ignores stays ignored, such as Ctrl-C for a background job of a shell script, or SIGHUP
    under nohup. A run outside the main thread receives no signals: the main thread, which waits for it, receives them.

    Args:
        replace: whether to replace handlers that are not Python's own, such as those of the process of a Flower server.
    """
    signals_end_waits()
    flag = StopFlag()
    usual = _heeded(replace) if threading.current_thread() is threading.main_thread() else {}

    def handler(number: int, frame: Any) -> None:
        if flag.signal is None and flag in _active_flags:
            _is_echo()  # begins a request
            flag.signal = number
        elif not _is_echo():
            if callable(usual[number]):
                usual[number](number, frame)
            else:
                signal.signal(number, usual[number])
                signal.raise_signal(number)

    flag.heard = bool(usual)
    if not _active_flags:
        _expect_request()
    for number in usual:
        signal.signal(number, handler)
    _active_flags.append(flag)
    try:
        try:
            yield flag
        finally:
            _active_flags.remove(flag)
            for number, old in usual.items():
                signal.signal(number, old)
    except FedraxError as error:
        if flag.signal is None:
            raise
        raise Interrupted(flag.signal) from error
    if flag.signal is not None:
        raise Interrupted(flag.signal)


_holds: list[object] = []


@contextmanager
def exit_held() -> Iterator[None]:
    """Context of work that must finish before a signal ends the command, such as stopping other processes.

    The work may set signal handlers of its own.
    """
    hold = object()
    _holds.append(hold)
    try:
        yield
    finally:
        _holds.remove(hold)


def signals_end_waits() -> None:
    """Let Ctrl-C interrupt system calls of the main thread; Polars, once imported, restarts them instead."""
    signal.siginterrupt(signal.SIGINT, True)


# -- commands ----------------------------------------------------------------------------------------------------------


@contextmanager
def stop_signals_raise(notify: Callable[[str], None], leave: Callable[[int], None] | None) -> Iterator[None]:
    """Context of a command in the main thread, in which every stop signal raises :class:`Interrupted`.

    Inside a run the first one ends its block of rounds instead, as :func:`interrupt_flag` says. A signal that is not
    handled within ``GRACE_SECONDS``, and every second request, ends the process.

    Args:
        notify: prints a line.
        leave: ends the process at once, after the signal that it is given; None to leave a process alone that does
            more than this command.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _expect_request()
    raised, ended = threading.Event(), threading.Event()

    def handler(number: int, frame: Any) -> None:
        if not _is_echo():
            raised.set()
            raise Interrupted(number)

    usual = _heeded()
    watched = nullcontext() if leave is None else _watched(notify, leave, raised, ended)
    with watched, _lost_interrupts_repeated(raised, ended):
        for number in usual:
            signal.signal(number, handler)
        try:
            yield
        finally:
            ended.set()
            for number, old in usual.items():
                signal.signal(number, old)


@contextmanager
def _watched(
    notify: Callable[[str], None], leave: Callable[[int], None], raised: threading.Event, ended: threading.Event
) -> Iterator[None]:
    """Watch the signals from a thread, since Python runs their handlers only between steps of the main thread.

    The operating system's part of Python writes the number of each signal into a pipe at once. Two signals during one
    compiled call would otherwise be one.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        requests, last = 0, -ECHO_SECONDS
        while received := os.read(reader, 1):
            now = time.monotonic()
            if received[0] not in STOP_SIGNALS or now - last < ECHO_SECONDS:
                continue
            requests, last = requests + 1, now
            threading.Thread(target=see_to, args=(received[0], requests), daemon=True).start()
        os.close(reader)

    def see_to(number: int, requests: int) -> None:
        if requests == 1 and any(flag.heard for flag in _active_flags):
            if not ended.wait(NOTICE_SECONDS) and _active_flags:
                notify("stopping after the current block of rounds; a second signal stops at once")
            return
        over = ended if requests > 1 else raised
        if over.wait(GRACE_SECONDS) or ended.is_set():
            return
        if _holds:
            while _holds:
                time.sleep(_PAUSES[0])
            if ended.wait(GRACE_SECONDS):
                return
        leave(number)

    threading.Thread(target=watch, name="fedrax-signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)


@contextmanager
def _lost_interrupts_repeated(raised: threading.Event, ended: threading.Event) -> Iterator[None]:
    """Repeat an interrupt that is raised where Python cannot raise it, and only prints it.

    Python does so in finalizers and in callbacks of the garbage collector; JAX registers one. The interrupt is repeated
    from another thread after a pause, so that the callback has returned, and until a handler has run, since a signal
    that arrives just before a system call is handled only after it.
    """
    original = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            raised.clear()
            threading.Thread(target=send, args=(getattr(lost.exc_value, "signal", signal.SIGINT),), daemon=True).start()
        else:
            original(lost)

    def send(number: int) -> None:
        first, later = _PAUSES
        pause = first
        while not raised.wait(pause) and not ended.is_set():
            _expect_request()
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            pause = later

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = original


_PAUSES = (0.02, 1.0)
"""Seconds before the first repeated interrupt, and between the next ones."""
