"""The exception for invalid input, the warning, and suggestions for misspelled names."""

import dataclasses
import difflib
import functools
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LISTED_NAMES = 60
"""Most known names that a message lists; a table may have thousands of columns."""


class FedraxError(Exception):
    """Invalid input; the message names the field, the value and the remedy.

    The command line prints the message and exits with status 2. Any other exception is a bug of fedrax, or comes from
    user code.

    Example:
        >>> try:
        ...     fedrax.LocalSGD(epoch=1)
        ... except fedrax.FedraxError as error:
        ...     print(error)
        unknown field of LocalSGD: 'epoch'; did you mean 'epochs'?
    """


class FedraxWarning(UserWarning):
    """Input that is valid but probably not what was intended.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", fedrax.FedraxWarning)  # raise instead of warn
        ...     method = fedrax.FedAvg()
    """


_subject: ContextVar[str] = ContextVar("_subject", default="")
_issued: ContextVar[set[str] | None] = ContextVar("_issued", default=None)


@contextmanager
def warnings_about(subject: str) -> Iterator[None]:
    """Name a method in the warnings of a block, unless an outer block names it, as by its label in a comparison."""
    token = _subject.set(_subject.get() or subject)
    try:
        yield
    finally:
        _subject.reset(token)


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Issue each warning once in a block, which may check a method many times, such as for every seed."""
    token = _issued.set(_issued.get() or set())
    try:
        yield
    finally:
        _issued.reset(token)


def warn(message: str) -> None:
    """Issue a :class:`FedraxWarning` at the innermost stack frame outside the package."""
    subject, issued = _subject.get(), _issued.get()
    if not message.casefold().startswith(subject.casefold()):
        message = f"{subject}: {message}"
    if issued is not None:
        if message in issued:
            return
        issued.add(message)
    level, outside, frame = 1, 1, sys._getframe()
    while (frame := frame.f_back) is not None:
        level += 1
        if frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
            outside = level + 1
    warnings.warn(message, FedraxWarning, stacklevel=outside)


def unknown(kind: str, name: object, known: Iterable[str]) -> FedraxError:
    """The error for a name that is not in ``known``, with the closest known name as a suggestion.

    It is returned and not raised, so that callers write ``raise unknown("partition", name, PARTITIONS)``.
    """
    names = sorted(known)
    lower = {other.lower(): other for other in reversed(names)}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    listed = ", ".join(name or "''" for name in names[:MAX_LISTED_NAMES]) or "none"
    more = f" and {len(names) - MAX_LISTED_NAMES:,} others" if len(names) > MAX_LISTED_NAMES else ""
    suggestion = f"did you mean {lower[near[0]]!r}?" if near else f"known are: {listed}{more}."
    return FedraxError(f"unknown {kind} {str(name)!r}; {suggestion}")


def known_fields_only(cls: type[T]) -> type[T]:
    """Class decorator: unknown constructor arguments raise FedraxError with a suggestion, as ``Shards(client=8)``."""
    original, names = cls.__init__, {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]

    @functools.wraps(original)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        for name in fields.keys() - names:
            raise unknown(f"field of {cls.__name__}:", name, names)
        original(self, *values, **fields)

    cls.__init__ = init
    return cls
