"""The command line: ``fedrax run``, ``compare``, ``resume`` and the other ``COMMANDS``.

Each command is a module of this package, imported when the command is given, so that ``fedrax --help`` is fast.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from fedrax.errors import FedraxError, FedraxWarning, each_warning_once
from fedrax.escaping import printable_lines
from fedrax.signals import Interrupted, stop_signals_raise

GROUPS = {
    "Experiments": {
        "new": "start a project: data, model, method, experiment, test, Flower app",
        "run": "run one experiment: a TOML file, flags, or both",
        "compare": "compare methods, each at its best settings, over several seeds",
        "resume": "resume an interrupted run",
        "deploy": "make a Flower app of an experiment, with TLS and keys; try it",
    },
    "Results": {
        "show": "print the table of finished or running runs, draw their curves",
        "report": "write one HTML page about runs: curves, table, partition, settings",
        "doctor": "check the files of a run directory, repair what can be repaired",
    },
    "Data and components": {
        "list": "list algorithms, data sets, models, optimizers, ...",
        "download": "download published data sets, verified by checksums",
        "partition": "partition a data set over clients, measure its heterogeneity",
    },
    "Analysis": {
        "diagnose": "measure heterogeneity, noise and curvature; write a comparison",
        "profile": "show the time of a round by its parts, and what to change",
        "privacy": "compute epsilon without training, or the noise for an epsilon",
        "audit": "attack a private experiment: a lower bound on its epsilon",
    },
    "Shell": {
        "completion": "print a completion script for bash, zsh or fish",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


def usage() -> str:
    """The text of ``fedrax --help``: the commands in groups, on a screen of 24 lines of 80 characters."""
    width = max(map(len, COMMANDS))
    lines = ["usage: fedrax COMMAND [ARGUMENTS]; `fedrax COMMAND --help` describes a command"]
    for title, commands in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<{width}}  {text}" for name, text in commands.items())]
    return "\n".join([*lines, "Start with: fedrax run --algorithm scaffold --data digits"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: a method of a comparison diverged, an audit refuted a claim, or a directory is damaged. 2: invalid
    input. 128 + n: stopped by signal n, such as 130 by Ctrl-C.
    """
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # the terminal's encoding may lack some characters
        sys.stdout.reconfigure(errors="backslashreplace")
    status, alone = 0, arguments is None  # whether the process runs nothing but this command
    when_interrupted(str)
    try:
        with each_warning_once(), _short_warnings(), stop_signals_raise(_notify, _leave if alone else None):
            status = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except KeyboardInterrupt as stop:
        if isinstance(stop.__cause__, FedraxError):  # the run was over, such as that of a method that diverged
            tell(f"fedrax: {printable_lines(str(stop.__cause__))}")
        number = stop.signal if isinstance(stop, Interrupted) else signal.SIGINT
        if alone:
            _leave(number)
        _tell_interrupted()
        return 128 + number
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _stdout_is_closed_pipe():  # its reader, such as head, has ended
            discard_output()
            return status
        message = _error_message(error)
        if message is None:
            raise
        tell(f"fedrax: {printable_lines(message)}")  # escaped: the message may contain file names
        return 2


_advice: Callable[[], str] = str


def when_interrupted(advice: Callable[[], str]) -> None:
    """Set what a command advises if it is interrupted from now on, such as how to resume; empty for nothing."""
    global _advice
    _advice = advice


def _tell_interrupted() -> None:
    advice = _advice()
    tell(f"fedrax: interrupted; {advice}" if advice else "fedrax: interrupted")


def _leave(number: int) -> None:
    """End the process after a signal, without waiting for computations on devices, as JAX does at exit.

    They may take hours. Nothing else is lost: files are replaced as a whole, when they are complete.
    """
    _tell_interrupted()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(128 + number)


def _notify(text: str) -> None:
    tell(f"fedrax: {text}")


def tell(text: str) -> None:
    """Print a line on standard error; a closed stream is ignored, so that the exit status stays that of the command."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _stdout_is_closed_pipe() -> bool:
    """Whether standard output is a pipe without a reader; otherwise another pipe or connection has broken."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return bool(poll.poll(0))
    except (OSError, ValueError, AttributeError):  # replaced by an object that is not a file
        return False


def _open_closed_streams() -> None:
    """Open standard streams that are closed as the null device.

    Otherwise the next opened file would get their descriptor, and what libraries print would be written into it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Format the library's warnings as one line without a source line, which would be one of this command."""
    original = warnings.formatwarning

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if issubclass(category, FedraxWarning):
            return f"fedrax: {printable_lines(str(message))}\n"
        return original(message, category, filename, lineno, line)

    warnings.formatwarning = format_warning
    try:
        yield
    finally:
        warnings.formatwarning = original


def _error_message(error: BaseException) -> str | None:
    """One message for an error of the library, user code, a file, the output or the environment; None for others."""
    if isinstance(error, FedraxError):
        return str(error)
    user_code = sys.modules.get("fedrax.experiments.user_code")
    if user_code is not None and (message := user_code.traceback_of(error)) is not None:
        return message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in _OUTPUT_ERRORS:
        discard_output()
        return f"cannot write the output: {error.strerror}"
    return _environment_error(error)


def _environment_error(error: BaseException) -> str | None:
    """A message where the current directory or the JAX platform is the cause of an error."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except OSError:
            return "the current directory does not exist any more: change to another one"
    if (devices := sys.modules.get("fedrax.devices")) is not None:  # JAX is in use
        try:
            devices.check_platform()
        except FedraxError as cause:
            return str(cause)
    return None


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EBADF)
"""Errors without a file name that come from writing to standard output."""


def discard_output() -> None:
    """Redirect standard output to the null device, so that Python's flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names."""
    if any("\0" in argument for argument in arguments):
        raise FedraxError("an argument contains a NUL character, which is not valid in a name or path.")
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
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
