"""Arguments of the papers' commands: valid numbers, and writable folders."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path
from typing import Any

from fedrax import FedraxError


def count(text: str) -> int:
    """An integer of at least 1."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """An integer of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number of {least} or more is wanted, not {text!r}")
    return int(text)


class Different(argparse.Action):
    """An action for values without duplicates, which would count twice in means and deviations."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        """Store the values, or exit with an error."""
        if len(set(values)) < len(values):
            parser.error(f"{self.option_strings[0]} has a value twice: {' '.join(map(str, values))}")
        setattr(namespace, self.dest, values)


UNSAID = ("what", "out", "results", "data_dir", "only_write")
"""Arguments that do not change what a command finds."""


def command(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> str:
    """The command that ``parser`` read, for its tables: options that differ from their defaults, and no folders."""
    words = [arguments.what]
    for name, value in vars(arguments).items():
        if name not in UNSAID and value != parser.get_default(name):
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return f"{parser.prog} {shlex.join(words)}"


def folders(arguments: argparse.Namespace, name: str, tried: bool) -> None:
    """Set the defaults of ``--out`` and ``--results``: runs/NAME, and a folder beside the command.

    A shortened run (``tried``) has its own folders, so that it neither replaces complete tables nor mixes with their
    runs. Raises FedraxError if tables cannot be written.
    """
    runs = Path("runs", name)
    arguments.out = getattr(arguments, "out", None) or (runs / "tried" if tried else runs)
    beside = Path(__file__).parent / name / "results"
    arguments.results = writable(arguments.results or (arguments.out / "results" if tried else beside))


def writable(folder: Path) -> Path:
    """Create ``folder`` if necessary; raises FedraxError if it is not writable, before hours of computation."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FedraxError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder
