"""What the annotations of a class say of its fields, read once for everything that asks.

Hyper-parameter objects ask which fields are static and what bounds hold, experiment files how a value is read and
written, the command line where a class can be chosen by name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np

from fedrax.errors import FedraxError

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """The interval a number must lie in; ``gt``/``lt`` exclude the end point."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def violation(self, value: float) -> str | None:
        """What is wrong with ``value``, as 'must be ...', or None."""
        if self.gt is not None and not value > self.gt:
            return f"must be greater than {self.gt:g}"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.lt is not None and not value < self.lt:
            return f"must be less than {self.lt:g}"
        if self.le is not None and not value <= self.le:
            return f"must be at most {self.le:g}"
        return None


class Role(Enum):
    """What a field is to a compiled program, where its type does not decide that."""

    STATIC = "shapes the program"
    LEAF = "is an input of the program"


Static = Annotated[T, Role.STATIC]
"""``Static[float]``: compiled in; every other value compiles anew."""
Leaf = Annotated[T, Role.LEAF]
"""``Leaf[Any]``: an array or a pytree of arrays, an input of the compiled program."""

Scalar = int | float | bool | str
Plain = Scalar | tuple[Scalar, ...]
"""What a field of unknown type may hold in a file."""


class Words(typing.NamedTuple):
    """A plain type: what it is called, alone and in a list, and whether a value is of it."""

    one: str
    many: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__")


_PLAIN = {
    int: Words("a whole number", "whole numbers", _is_whole),
    float: Words("a number", "numbers", _is_number),
    bool: Words("true or false", "truth values", lambda value: isinstance(value, bool | np.bool_)),
    str: Words("a string", "strings", lambda value: isinstance(value, str)),
    Path: Words("a path", "paths", lambda value: isinstance(value, str | Path)),
}


@dataclass(frozen=True)
class Kind:
    """One alternative of a field's type."""

    type: Any
    """The type without annotations: ``tuple`` for ``tuple[int, ...]``. One that is not known here holds anything."""
    bounds: tuple[Bound, ...] = ()
    choices: tuple[Any, ...] = ()
    """The values of a ``Literal``."""
    items: tuple[Field, ...] = ()
    """What a tuple or list holds; a single description of all items where it is ``repeated``."""
    repeated: bool = False

    @property
    def nested(self) -> bool:
        """Whether this is a dataclass."""
        return isinstance(self.type, type) and dataclasses.is_dataclass(self.type)

    @property
    def plain(self) -> bool:
        """Whether a file can hold such a value."""
        return self.nested or self.type in _PLAIN or self.type is Literal or any(item.plain for item in self.items)

    @property
    def leaf(self) -> bool:
        """Whether such a value is an input of a compiled program."""
        return self.type is float or self.nested or any(not item.static for item in self.items)

    def each(self, count: int) -> tuple[Field, ...]:
        """The descriptions of ``count`` items."""
        return self.items * count if self.repeated else self.items

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is of this type, bounds apart."""
        if self.type is Literal:
            return value in self.choices
        if self.items:
            return isinstance(value, list | tuple) and self._matches(value)
        if self.type in _PLAIN:
            return _PLAIN[self.type].holds(value)
        return isinstance(value, self.type) if self.nested else True

    def _matches(self, items: list | tuple) -> bool:
        each = self.each(len(items))
        return len(each) == len(items) and all(field.holds(item) for field, item in zip(each, items, strict=True))

    def violation(self, value: Any) -> str | None:
        """Which bound ``value``, of this type, breaks, as 'must be ...'."""
        if self.items:
            each = zip(self.each(len(value)), value, strict=True)
            return next((f"must hold items that {p}" for f, item in each if (p := f.problem(item))), None)
        if self.type is float and not math.isfinite(float(value)):
            return "must be a finite number"
        return next(filter(None, (bound.violation(float(value)) for bound in self.bounds)), None)


@dataclass(frozen=True)
class Field:
    """What a field, or an item of a tuple, may hold."""

    kinds: tuple[Kind, ...]
    """The alternatives, None apart."""
    optional: bool = False
    """Whether it may be None."""
    marks: tuple[Any, ...] = ()
    """What else ``Annotated`` says."""
    name: str = ""
    """The field's name; none for an item."""

    @property
    def classes(self) -> tuple[type, ...]:
        """The dataclasses among the alternatives."""
        return tuple(kind.type for kind in self.kinds if kind.nested)

    @property
    def plain(self) -> bool:
        """Whether a file can hold one of the alternatives."""
        return self.optional or any(kind.plain for kind in self.kinds)

    @property
    def static(self) -> bool:
        """Whether the field shapes a compiled program, rather than being an input of it."""
        roles = [mark for mark in self.marks if isinstance(mark, Role)]
        return roles[0] is Role.STATIC if roles else not any(kind.leaf for kind in self.kinds)

    @property
    def wanted(self) -> str:
        """The alternatives in words."""
        words = [_in_words(kind) for kind in self.kinds if not kind.nested]
        if self.classes:
            *names, last = [cls.__name__ for cls in self.classes]
            words.append(f"of class {', '.join(names)} or {last}" if names else f"of class {last}")
        return " or ".join(filter(None, words))

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is of one of the types, bounds apart."""
        return (value is None and self.optional) or any(kind.holds(value) for kind in self.kinds)

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``, as 'must be ...', or None."""
        if value is None and self.optional:
            return None
        violations = [kind.violation(value) for kind in self.kinds if kind.holds(value)]
        if not violations:
            return f"must be {self.wanted}"
        return None if None in violations else violations[0]


def _in_words(kind: Kind) -> str:
    if kind.type is Literal:
        return "one of " * (len(kind.choices) > 1) + ", ".join(map(repr, kind.choices))
    if kind.items:
        inner = {_PLAIN[item.type].many for field in kind.items for item in field.kinds if item.type in _PLAIN}
        return (
            f"a list of {'' if kind.repeated else f'{len(kind.items)} '}{inner.pop() if len(inner) == 1 else 'values'}"
        )
    return _PLAIN[kind.type].one if kind.type in _PLAIN else ""


def describe(hint: Any, name: str = "") -> Field:
    """The description of a type, which may be the annotation of the field ``name``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        field = describe(arguments[0], name)
        bounds = tuple(mark for mark in arguments[1:] if isinstance(mark, Bound))
        kinds = tuple(dataclasses.replace(kind, bounds=kind.bounds + bounds) for kind in field.kinds)
        return dataclasses.replace(field, kinds=kinds, marks=arguments[1:] + field.marks)
    if origin in (typing.Union, types.UnionType):
        parts = [describe(part) for part in arguments]
        kinds = tuple(kind for part in parts for kind in part.kinds)
        marks = tuple(mark for part in parts for mark in part.marks)
        return Field(kinds, any(part.optional for part in parts), marks, name)
    if hint in (None, type(None)):
        return Field((), optional=True, name=name)
    if origin is Literal:
        return Field((Kind(Literal, choices=arguments),), name=name)
    if (origin or hint) in (tuple, list):
        repeated = origin is not tuple or arguments[-1:] == (...,)
        items = (arguments[0] if arguments else Scalar,) if repeated else arguments
        return Field((Kind(origin or hint, items=tuple(map(describe, items)), repeated=repeated),), name=name)
    return Field((Kind(hint),), name=name)


def hints_of(thing: Any) -> dict[str, Any]:
    """The annotations of a class or function, as types; FedraxError where one names what is not there."""
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise FedraxError(f"the annotations of {thing.__name__} cannot be read: {error}") from error


@functools.cache
def fields_of(cls: type) -> Mapping[str, Field]:
    """The descriptions of a dataclass's fields, in order."""
    hints = hints_of(cls)
    return {field.name: describe(hints[field.name], field.name) for field in dataclasses.fields(cls)}


def inferred(default: Any) -> Any:
    """The type of an option without an annotation, from its default."""
    if type(default) in (int, float, bool, str):
        return type(default)
    if isinstance(default, tuple | list) and default:
        items = [inferred(item) for item in default]
        return tuple[functools.reduce(operator.or_, items), ...]
    return Plain
