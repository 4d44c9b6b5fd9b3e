"""The one exception a user of fedrax is meant to read."""

import dataclasses
import difflib
import functools
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
