"""The command line: ``fedrax run``, ``compare``, ``resume`` and the other ``COMMANDS``.

Each command is a module of this package, imported when it is asked for, so that ``fedrax --help`` is instant.
"""

from __future__ import annotations

import atexit
import errno
import importlib
import io
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fedrax.errors import FedraxError, FedraxWarning
from fedrax.escaping import plain_lines

COMMANDS = {
    "run": "run one experiment: a TOML file, flags, or both",
    "compare": "run several algorithms, each at its best settings, with several seeds; a table and curves",
    "resume": "resume an interrupted run",
    "show": "tables and curves of finished or running runs",
    "report": "one page of HTML about runs: curves, table, partition, settings; it loads nothing",
    "doctor": "what a run's directory holds, what is damaged, what can be saved",
    "partition": "divide a data set among clients, count and draw it, measure its heterogeneity",
    "diagnose": "measure client heterogeneity, gradient noise and curvature; write a comparison to run",
    "privacy": "what a private experiment spends, without training; the noise or the rounds for an epsilon",
    "audit": "attack a private experiment: a lower bound on its epsilon beside the claimed one",
    "profile": "the time of a round by its parts, its heaviest operations, and what to do",
    "list": "list algorithms, data sets, models, optimizers, ...",
}

USAGE = """\
usage: fedrax COMMAND [ARGUMENTS]

Federated optimization on heterogeneous clients: compare methods in simulation.

commands:
{commands}

`fedrax COMMAND --help` explains each. To begin:
  fedrax run --algorithm scaffold --data digits
  fedrax compare --algorithms fedavg scaffold --grid algorithm.local.lr=0.01,0.03,0.1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: a method of a comparison diverged, an audit refuted a claim, or a directory is damaged. 2: invalid
    input. 130: Ctrl-C. 128 + n: stopped by signal n.
    """
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal of few letters shows the others by their numbers
        sys.stdout.reconfigure(errors="backslashreplace")
    status = 0
    try:
        with _warnings_as_sentences(), _interrupts_heard():
            status = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        tell("fedrax: interrupted")
        if arguments is None:  # the command is all that this process does
            atexit.register(_leave, 130)
        return 130
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():  # such as head, which has had enough
            forget_output()
            return status
        sentence = _sentence(error)
        if sentence is None:
            raise
        tell(f"fedrax: {plain_lines(sentence)}")  # it may hold names that files have
        return 2


def _leave(status: int) -> None:
    """End the process: what the devices are at work on may take hours yet, and JAX would wait for it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def tell(text: str) -> None:
    """A line on standard error; that nobody reads it any more is no reason to stop, nor to say that all went well."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _reader_has_left() -> bool:
    """Whether standard output is a pipe that nobody reads: else it is another pipe or connection that is broken."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):  # what stands in its place is no pipe
        return False


def _open_streams() -> None:
    """Where somebody has closed the standard streams, what is written to them goes nowhere.

    The next file to be opened would have their numbers, and hold what libraries print.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the least number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """The library's warnings without the line that led to them, which is this command's; all others as they are."""
    others = warnings.formatwarning

    def sentence(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None):
        if issubclass(category, FedraxWarning):
            return f"fedrax: {plain_lines(str(message))}\n"
        return others(message, category, filename, lineno, line)

    warnings.formatwarning = sentence
    try:
        yield
    finally:
        warnings.formatwarning = others


@contextmanager
def _interrupts_heard() -> Iterator[None]:
    """Ctrl-C stops the command also where it arrives while Python calls a function whose errors it only prints.

    JAX has such a function called by the garbage collector, and so have finalizers. The interrupt then comes again from
    another thread, a moment later, since at once it would find the same place; and again until it is heard, since one
    that comes just before a system call waits for its end.
    """
    others, over = sys.unraisablehook, threading.Event()

    def hook(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            _interrupt_until_heard(over)
        else:
            others(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = others


_PAUSES = (0.02, 1.0)
"""Seconds before the first interrupt, and before each of the next."""


def _interrupt_until_heard(over: threading.Event) -> None:
    """Interrupts the main thread, which calls this, as Ctrl-C does, until that or the command has come to an end."""
    handler, heard = signal.getsignal(signal.SIGINT), threading.Event()

    def hear(number: int, frame: Any) -> None:
        heard.set()
        signal.signal(signal.SIGINT, handler)
        if callable(handler) and not over.is_set():
            handler(number, frame)

    def knock() -> None:
        first, later = _PAUSES
        pause = first
        while not heard.wait(pause):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            pause = later

    signal.signal(signal.SIGINT, hear)
    threading.Thread(target=knock, daemon=True).start()


def _sentence(error: BaseException) -> str | None:
    """What to say of an error: the library's own sentence, whose code it was, what the system does not do, or None."""
    if isinstance(error, FedraxError):
        return str(error)
    own_code = sys.modules.get("fedrax.experiments.user_code")
    if own_code is not None and (theirs := own_code.traceback_of(error)) is not None:
        return theirs
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _OUTPUT:
        forget_output()
        return f"cannot write the output: {error.strerror}"
    return _about_surroundings(error)


def _about_surroundings(error: BaseException) -> str | None:
    """What of the process itself has led to an error, in words."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the current directory is not there any more: change into another one"
    if (jax := sys.modules.get("jax")) is not None and (platforms := getattr(jax.config, "jax_platforms", None)):
        try:
            jax.devices()
        except Exception as cause:  # an assertion of JAX's, too
            why = f" ({str(cause).splitlines()[0]})" if str(cause) else ""
            return f"JAX finds no device of JAX_PLATFORMS={platforms}{why}: leave that out, or set it to cpu"
    return None


_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)


def forget_output() -> None:
    """What is still to be written goes nowhere, or Python would try once more at its end, and complain."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if any("\0" in argument for argument in arguments):
        raise FedraxError("an argument holds a NUL character, which no name or path does.")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = (f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
        print(USAGE.format(commands="\n".join(lines)), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        from fedrax.version import VERSION

        print(f"fedrax {VERSION}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        from fedrax.errors import unknown

        raise unknown("command", command, COMMANDS)
    return importlib.import_module(f"fedrax.cli.{command}_command").main(rest)
