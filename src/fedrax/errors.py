"""The exception for invalid input, the warning, and suggestions for misspelled names."""

import difflib
import functools
import inspect
import re
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LISTED_NAMES = 60
"""Most known names that a message lists; a table may have thousands of columns."""
MAX_VALUE_LENGTH = 60
"""Most characters of a value that a message quotes."""


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


def plain_name(name: str) -> str:
    """A name in the form in which names are compared: in lower case, without spaces, "-" and "_"."""
    return re.sub("[-_ ]", "", name).lower()


def unknown(kind: str, name: object, known: Iterable[str]) -> FedraxError:
    """The error for a name that is not in ``known``, with the closest known name as a suggestion.

    It is returned and not raised, so that callers write ``raise unknown("partition", name, PARTITIONS)``.
    """
    names = sorted(known)
    lower = {other.lower(): other for other in reversed(names)}
    near = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    suggestion = f"did you mean {lower[near[0]]!r}?" if near else f"known are: {listed(names)}."
    return FedraxError(f"unknown {kind} {str(name)!r}; {suggestion}")


def listed(names: Sequence[str]) -> str:
    """Names in a message: the first ones of a long list, and the number of the others."""
    more = f" and {len(names) - MAX_LISTED_NAMES:,} others" if len(names) > MAX_LISTED_NAMES else ""
    return (", ".join(name or "''" for name in names[:MAX_LISTED_NAMES]) or "none") + more


def describe_value(value: object) -> str:
    """A value of a wrong type, for messages: scalars as they are written, all else by its type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return f"the function {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeio' else 'a'} {name}"


def binding_error(
    name: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], what: str = "argument"
) -> FedraxError:
    """The error for arguments that a function, method or constructor does not take.

    The first parameter of methods and constructors, ``self`` or ``cls``, is none of the caller's.
    """
    own = ("self", "cls") if "." in name else ("self",)
    known = [p for p in signature.parameters.values() if p.name not in own]
    by_name = [p.name for p in known if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    by_position = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    extra = [argument for argument in kwargs if argument not in by_name]
    if extra and not any(p.kind == p.VAR_KEYWORD for p in known):
        return unknown(f"{what} of {name}:", extra[0], by_name)
    args = args[len(signature.parameters) - len(known) :]
    if len(args) > len(by_position) and not any(p.kind == p.VAR_POSITIONAL for p in known):
        only = f"; by name: {', '.join(by_name[len(by_position) :])}" if len(by_name) > len(by_position) else ""
        return FedraxError(
            f"{name} takes {', '.join(by_position) or 'no arguments'} by position, not {len(args)} arguments{only}"
        )
    if twice := [argument for argument in by_position[: len(args)] if argument in kwargs]:
        return FedraxError(f"{name} is given the {what} {twice[0]} by position and by name")
    given = {*by_position[: len(args)], *kwargs}
    missing = [p.name for p in known if p.default is p.empty and p.name in {*by_name, *by_position} - given]
    return FedraxError(f"{name} needs the {what} {' and '.join(missing)}")


def known_fields_only(cls: type[T]) -> type[T]:
    """Class decorator: fields that the class does not have raise FedraxError, as in ``Settings(round=8)``."""
    original = cls.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        try:
            bound = signature.bind(self, *values, **fields)
        except TypeError:
            raise binding_error(cls.__name__, signature, (self, *values), fields, "field") from None
        original(*bound.args, **bound.kwargs)

    cls.__init__ = init
    return cls
