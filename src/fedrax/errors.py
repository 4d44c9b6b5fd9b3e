"""The one exception that a user of fedrax is meant to read, and the one warning."""

import dataclasses
import difflib
import functools
import sys
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

LISTED = 60
"""Names that a sentence lists at most; a table may have thousands of columns."""


class FedraxError(Exception):
    """What was wrong with the input, in one clear sentence.

    The command line prints the sentence and exits with status 2; library users may catch it.
    Anything else that escapes is a bug of fedrax.
    """


class FedraxWarning(UserWarning):
    """What is likely not meant, in one clear sentence."""


def warn(sentence: str) -> None:
    """Warn by a :class:`FedraxWarning` at the line outside the package that led here."""
    level, outside, frame = 1, 1, sys._getframe()
    while (frame := frame.f_back) is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            outside = level + 1
    warnings.warn(sentence, FedraxWarning, stacklevel=outside)


def unknown(kind: str, name: object, known: Iterable[str]) -> FedraxError:
    """The error for a name that is not one of ``known``, with the nearest known name as a suggestion.

    Returns the error instead of raising it, so that the caller's ``raise`` shows in its own code:
    ``raise unknown("partition", name, PARTITIONS)``.
    """
    names = sorted(known)
    lower = {other.lower(): other for other in reversed(names)}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    listed = ", ".join(name or "''" for name in names[:LISTED]) or "none"
    more = f" and {len(names) - LISTED:,} others" if len(names) > LISTED else ""
    suggestion = f"did you mean {lower[near[0]]!r}?" if near else f"known are: {listed}{more}."
    return FedraxError(f"unknown {kind} {str(name)!r}; {suggestion}")


def known_fields_only(cls: type[T]) -> type[T]:
    """Decorator of a dataclass: a field that it has not is a sentence, ``Shards(client=8)`` names ``clients``."""
    made, names = cls.__init__, {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(made)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        for name in fields.keys() - names:
            raise unknown(f"field of {cls.__name__}:", name, names)
        made(self, *values, **fields)

    cls.__init__ = init
    return cls
