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
from enum import Enum, EnumType
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsFloat, TypeVar

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


_WIDE = 2**31
"""Whole numbers become 32-bit ones in compiled programs."""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # of whole numbers
        return False


class Role(Enum):
    """What a field is to a compiled program, where its type does not say."""

    STATIC = "static"
    LEAF = "leaf"


Static = Annotated[T, Role.STATIC]
"""``Static[float]``: shapes the program; another value compiles anew."""
Leaf = Annotated[T, Role.LEAF]
"""``Leaf[Any]``: an array or a pytree of arrays, an input of the program."""


@dataclass(frozen=True)
class Converter:
    """Mark of a field whose values are converted when an object is made, such as functions into schedules."""

    convert: Callable[[Any], Any]
    """Returns values that need no conversion as they are."""


@dataclass(frozen=True)
class MoreClasses:
    """Mark of a field that also holds objects of classes that are made when they are first needed."""

    classes: Callable[[], Mapping[str, type]]
    """The classes by the names under which files choose them."""


_PLAIN: dict[Any, tuple[str, Any]] = {
    int: ("a whole number", (int, np.integer)),
    float: ("a number", SupportsFloat),
    bool: ("true or false", (bool, np.bool_)),
    str: ("a string", str),
    Path: ("a path", (str, Path)),
}
"""What a file can hold: in words, and the classes of such values."""
Scalar = int | float | bool | str


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
    def members(self) -> Mapping[str, Any]:
        """Those of an enumeration, by name."""
        return self.type.__members__ if isinstance(self.type, EnumType) else {}

    @property
    def words(self) -> str:
        """Such a value in words; none where a file cannot hold it."""
        if self.members:
            return f"a {self.type.__name__}: {', '.join(self.members)}"
        if self.items:
            kinds = [kind for item in self.items for kind in item.kinds]
            if self.repeated and len(kinds) == 1 and kinds[0].choices:
                return f"a list of {', '.join(map(repr, kinds[0].choices))}"
            words = {kind.words.removeprefix("a ") for kind in kinds if kind.type in _PLAIN}
            count = "" if self.repeated else f"{len(self.items)} "
            return f"a list of {count}{words.pop() if len(words) == 1 else 'value'}s"
        if self.choices:
            return "one of " * (len(self.choices) > 1) + ", ".join(map(repr, self.choices))
        return _PLAIN[self.type][0] if self.type in _PLAIN else self.type.__name__ if self.nested else ""

    def each(self, value: Any) -> list[tuple[Field, Any]]:
        """The items of a value with their descriptions."""
        return list(zip(self.items * len(value) if self.repeated else self.items, value, strict=False))

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is of this type, bounds apart."""
        if self.items:
            fits = isinstance(value, list | tuple) and (self.repeated or len(value) == len(self.items))
            return fits and all(field.holds(item) for field, item in self.each(value))
        if self.choices:
            return value in self.choices
        if self.type in _PLAIN:
            fits = isinstance(value, _PLAIN[self.type][1]) and getattr(value, "ndim", 0) == 0
            return fits and (self.type is bool or not isinstance(value, bool))
        return isinstance(value, self.type) if self.nested or self.members or self.type is type(None) else True

    def violation(self, value: Any) -> str | None:
        """Which bound ``value``, of this type, breaks, as 'must be ...'."""
        if self.items:
            return next((f"must hold items that {p}" for f, item in self.each(value) if (p := f.problem(item))), None)
        if self.type is float and not _is_finite(value):
            return "must be a finite number"
        if self.type is int and all(bound.lt is None for bound in self.bounds) and not -_WIDE <= value < _WIDE:
            return "must fit into 32 bits"
        bounds = self.bounds if self.type in (int, float) else ()
        if not bounds:
            return None
        number = value if isinstance(value, int) else float(value)  # a whole number may be beyond all floats
        return next(filter(None, (bound.violation(number) for bound in bounds)), None)


@dataclass(frozen=True)
class Field:
    """What a field, or an item of a tuple, may hold."""

    name: str
    kinds: tuple[Kind, ...]
    """The alternatives."""
    marks: tuple[Any, ...] = ()
    """What else ``Annotated`` says."""

    @property
    def optional(self) -> bool:
        """Whether it may be None."""
        return any(kind.type is type(None) for kind in self.kinds)

    @property
    def classes(self) -> tuple[type, ...]:
        """The dataclasses among the alternatives."""
        return tuple(kind.type for kind in self.kinds if kind.nested)

    @property
    def plain(self) -> bool:
        """Whether a file can hold one of the alternatives, None apart."""
        return any(kind.words for kind in self.kinds)

    @property
    def static(self) -> bool:
        """Whether the field shapes a compiled program, rather than being an input of it."""
        roles = [mark for mark in self.marks if isinstance(mark, Role)]
        if roles:
            return roles[0] is Role.STATIC
        inputs = (k.type is float or k.nested or any(not item.static for item in k.items) for k in self.kinds)
        return not any(inputs)

    @property
    def words(self) -> str:
        """The alternatives in words."""
        return ("of class " if self.classes else "") + " or ".join(filter(None, (kind.words for kind in self.kinds)))

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is of one of the types, bounds apart."""
        return any(kind.holds(value) for kind in self.kinds)

    def problem(self, value: Any) -> str | None:
        """What is wrong with ``value``, as 'must be ...', or None."""
        violations = [kind.violation(value) for kind in self.kinds if kind.holds(value)]
        if not violations:
            own = not isinstance(value, type) and acts_as(value, self.classes)
            return None if own else f"must be {self.words}"
        return None if None in violations else violations[0]


def acts_as(value: Any, classes: tuple[type, ...]) -> bool:
    """Whether ``value``, somebody's own class or an object of it, does what several alternatives all do.

    A schedule of one's own, a server rule, a proximal operator: it has the methods that the known ones share.
    """
    if len(classes) < 2 or not dataclasses.is_dataclass(value):
        return False
    public = lambda cls: {name for name in dir(cls) if name == "__call__" or not name.startswith("_")}  # noqa: E731
    names = [{name for name in public(cls) if callable(getattr(cls, name)) and name != "check"} for cls in classes]
    shared = set.intersection(*names)
    mine = {name for name in dir(value) if callable(getattr(value, name, None))}  # of a class not those of its type
    return bool(shared) and shared <= mine


def describe(hint: Any, name: str = "") -> Field:
    """The description of a type, which may be the annotation of the field ``name``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        inner, marks = describe(arguments[0]), arguments[1:]
        bounds = tuple(mark for mark in marks if isinstance(mark, Bound))
        kinds = tuple(dataclasses.replace(kind, bounds=kind.bounds + bounds) for kind in inner.kinds)
        return Field(name, kinds, marks + inner.marks)
    if origin in (typing.Union, types.UnionType):
        parts = [describe(part) for part in arguments]
        return Field(name, sum((part.kinds for part in parts), ()), sum((part.marks for part in parts), ()))
    kind = Kind(origin or hint)
    if origin is Literal:
        kind = Kind(origin, choices=arguments)
    elif kind.type in (tuple, list):
        repeated = kind.type is list or not arguments or arguments[-1] is Ellipsis
        items = (arguments or (Static[Scalar],))[: 1 if repeated else None]
        kind = Kind(kind.type, items=tuple(map(describe, items)), repeated=repeated)
    return Field(name, (kind,))


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
    """The type of an option without an annotation, from its default; ``MISSING`` stands for none."""
    if type(default) in (int, float, bool, str):
        return type(default)
    if isinstance(default, tuple | list):
        item = functools.reduce(operator.or_, map(inferred, default)) if default else Scalar
        return list[item] if isinstance(default, list) else tuple[item, ...]
    if default is None or default is dataclasses.MISSING:
        return Scalar | tuple[Scalar, ...] | (None if default is None else Scalar)
    return Any
