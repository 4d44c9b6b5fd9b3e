"""What the papers' commands are told: numbers that mean something, and folders that files can be put into."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from fedrax import FedraxError


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number of {least} or more is wanted, not {text!r}")
    return int(text)


class Different(argparse.Action):
    """Values of which none may be given twice: it would count twice in means and deviations."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        """Keep them, or end in a sentence."""
        if len(set(values)) < len(values):
            parser.error(f"{self.option_strings[0]} has a value twice: {' '.join(map(str, values))}")
        setattr(namespace, self.dest, values)


def folders(arguments: argparse.Namespace, name: str, tried: bool) -> None:
    """Where ``--out`` and ``--results`` do not say it, keep runs in runs/NAME and write tables beside the command.

    A command that is ``tried`` out on less has a folder of its own for both: its tables would take the place of the
    whole ones, and its runs would be in the way of theirs. FedraxError where tables cannot be written.
    """
    runs = Path("runs", name)
    arguments.out = getattr(arguments, "out", None) or (runs / "tried" if tried else runs)
    beside = Path(__file__).parent / name / "results"
    arguments.results = writable(arguments.results or (arguments.out / "results" if tried else beside))


def writable(folder: Path) -> Path:
    """``folder``, made if it is not there; FedraxError where no file can be put into it, before hours are spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise FedraxError(f"cannot write to {folder}: {error.strerror or error}") from error
    return folder
