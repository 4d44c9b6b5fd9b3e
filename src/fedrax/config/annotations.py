"""Descriptions of dataclass fields, read from their type annotations.

`hyperparameters` reads from them which fields are static and which bounds apply, experiment files how a value is parsed
and written, and the command line which fields select a class by name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, EnumType
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, Literal, SupportsFloat, TypeVar

import numpy as np

from fedrax.errors import FedraxError

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """Bounds of a number: ``gt`` and ``lt`` exclude the end point, ``ge`` and ``le`` include it."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def violation(self, value: float) -> str | None:
        """The violated bound as 'must be ...', or None."""
        if self.gt is not None and not value > self.gt:
            return f"must be greater than {self.gt:g}"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.lt is not None and not value < self.lt:
            return f"must be less than {self.lt:g}"
        if self.le is not None and not value <= self.le:
            return f"must be at most {self.le:g}"
        return None


_INT32_LIMIT = 2**31
"""Compiled programs use 32-bit integers."""


def as_float(value: Any) -> float:
    """``value`` as a float; an int or a fraction above the largest float is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class PytreeRole(Enum):
    """Annotation that makes a field static or a pytree leaf, whatever its type."""

    STATIC = "static"
    LEAF = "leaf"


Static = Annotated[T, PytreeRole.STATIC]
"""``Static[float]``: part of the compilation cache key; a new value recompiles."""
Leaf = Annotated[T, PytreeRole.LEAF]
"""``Leaf[Any]``: an array or a pytree of arrays, an input of the compiled program."""


@dataclass(frozen=True)
class Converter:
    """Annotation of a field whose values are converted by the constructor, such as functions into schedules."""

    convert: Callable[[Any], Any]
    """The conversion; returns values that need none unchanged."""


@dataclass(frozen=True)
class LazyClasses:
    """Annotation of a field that also accepts objects of classes that are generated on first use."""

    classes: Callable[[], Mapping[str, type]]
    """Returns the classes by the names that files use."""


_SCALAR_TYPES: dict[Any, tuple[str, Any]] = {
    int: ("a whole number", (int, np.integer)),
    float: ("a number", SupportsFloat),
    bool: ("true or false", (bool, np.bool_)),
    str: ("a string", str),
    Path: ("a path", (str, Path)),
}
"""Types that a TOML file can hold: how messages call them, and the classes of accepted values."""
Scalar = int | float | bool | str


@dataclass(frozen=True)
class FieldType:
    """The type of a field, or one member of the union that is its type."""

    type: Any
    """The type without parameters and annotations: ``tuple`` for ``tuple[int, ...]``. Types other than scalars,
    literals, sequences, enumerations and dataclasses accept any value."""
    bounds: tuple[Bound, ...] = ()
    """Bounds of a number."""
    choices: tuple[Any, ...] = ()
    """The values of a ``Literal``."""
    items: tuple[Field, ...] = ()
    """The items of a tuple or list, or the one description of all items if ``repeated``."""
    repeated: bool = False
    """Whether a tuple or list may have any length."""

    @property
    def nested(self) -> bool:
        """Whether the type is a dataclass."""
        return isinstance(self.type, type) and dataclasses.is_dataclass(self.type)

    @property
    def members(self) -> Mapping[str, Any]:
        """Members of an enumeration by name; empty for other types."""
        return self.type.__members__ if isinstance(self.type, EnumType) else {}

    @property
    def description(self) -> str:
        """How messages call a value of this type; empty if a file cannot hold it."""
        if self.members:
            return f"a {self.type.__name__}: {', '.join(self.members)}"
        if self.items:
            item_types = [item_type for item in self.items for item_type in item.types]
            if self.repeated and len(item_types) == 1 and item_types[0].choices:
                return f"a list of {', '.join(map(repr, item_types[0].choices))}"
            scalars = {t.description.removeprefix("a ") for t in item_types if t.type in _SCALAR_TYPES}
            count = "" if self.repeated else f"{len(self.items)} "
            return f"a list of {count}{scalars.pop() if len(scalars) == 1 else 'value'}s"
        if self.choices:
            return "one of " * (len(self.choices) > 1) + ", ".join(map(repr, self.choices))
        return _SCALAR_TYPES[self.type][0] if self.type in _SCALAR_TYPES else self.type.__name__ if self.nested else ""

    def item_fields(self, value: Any) -> list[tuple[Field, Any]]:
        """(description, item) for each item of a tuple or list."""
        return list(zip(self.items * len(value) if self.repeated else self.items, value, strict=False))

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` has this type, whether or not it is within the bounds."""
        if self.items:
            fits = isinstance(value, list | tuple) and (self.repeated or len(value) == len(self.items))
            return fits and all(field.accepts(item) for field, item in self.item_fields(value))
        if self.choices:
            return getattr(value, "ndim", 0) == 0 and value in self.choices
        if self.type in _SCALAR_TYPES:
            fits = isinstance(value, _SCALAR_TYPES[self.type][1]) and getattr(value, "ndim", 0) == 0
            if self.type is float and hasattr(value, "dtype"):
                fits = fits and value.dtype.kind in "iufV"  # V: bfloat16
            return fits and (self.type is bool or not isinstance(value, bool))
        return isinstance(value, self.type) if self.nested or self.members or self.type is type(None) else True

    def python_value(self, value: Any) -> Any:
        """``value``, which has this type, with numbers and strings of other types as Python's of this type.

        An int or a NumPy scalar in a float field becomes a float: as an input of a compiled program it would have
        another dtype, and as a part of a run's identity another text. Arrays of JAX are unchanged.
        """
        if self.items:
            items = [field.python_value(item) for field, item in self.item_fields(value)]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return (tuple(items) if isinstance(value, tuple) else items) if changed else value
        if self.type is float and isinstance(value, Real | np.ndarray):
            return as_float(value)
        scalar = self.type in _SCALAR_TYPES or self.choices
        return value.item() if scalar and isinstance(value, np.generic) else value

    def violation(self, value: Any) -> str | None:
        """The bound that ``value``, which has this type, violates, as 'must be ...', or None."""
        if self.items:
            return next(
                (f"must hold items that {p}" for f, item in self.item_fields(value) if (p := f.problem(item))), None
            )
        if self.type is float and not math.isfinite(as_float(value)):
            return "must be a finite number"
        if (
            self.type is int
            and all(bound.lt is None for bound in self.bounds)
            and not -_INT32_LIMIT <= value < _INT32_LIMIT
        ):
            return "must fit into 32 bits"
        bounds = self.bounds if self.type in (int, float) else ()
        if not bounds:
            return None
        number = value if isinstance(value, int) else float(value)  # an int may be above the largest float
        return next(filter(None, (bound.violation(number) for bound in bounds)), None)


@dataclass(frozen=True)
class Field:
    """Description of a dataclass field, or of an item of a tuple or list."""

    name: str
    """Name of the field; empty for an item."""
    types: tuple[FieldType, ...]
    """The type, or the members of a union."""
    metadata: tuple[Any, ...] = ()
    """Metadata of ``Annotated``."""

    @property
    def optional(self) -> bool:
        """Whether None is accepted."""
        return any(t.type is type(None) for t in self.types)

    @property
    def classes(self) -> tuple[type, ...]:
        """The dataclasses among the types."""
        return tuple(t.type for t in self.types if t.nested)

    @property
    def serializable(self) -> bool:
        """Whether a file can hold a value other than None of one of the types."""
        return any(t.description for t in self.types)

    @property
    def static(self) -> bool:
        """Whether the field is part of the compilation cache key instead of an input of the compiled program."""
        roles = [mark for mark in self.metadata if isinstance(mark, PytreeRole)]
        if roles:
            return roles[0] is PytreeRole.STATIC
        inputs = (t.type is float or t.nested or any(not item.static for item in t.items) for t in self.types)
        return not any(inputs)

    @property
    def description(self) -> str:
        """How messages call the accepted values."""
        return ("of class " if self.classes else "") + " or ".join(filter(None, (t.description for t in self.types)))

    def accepts(self, value: Any) -> bool:
        """Whether ``value`` has one of the types, whether or not it is within the bounds."""
        return any(t.accepts(value) for t in self.types)

    def python_value(self, value: Any) -> Any:
        """``value`` with numbers and strings as Python's of the first type that accepts them: see `FieldType`."""
        if type(value) in _SCALAR_TYPES and type(value) in (t.type for t in self.types):
            return value
        return next((t.python_value(value) for t in self.types if t.accepts(value)), value)

    def problem(self, value: Any) -> str | None:
        """Why ``value`` is not accepted, as 'must be ...', or None."""
        violations = [t.violation(value) for t in self.types if t.accepts(value)]
        if not violations:
            duck_typed = not isinstance(value, type) and has_shared_methods(value, self.classes)
            return None if duck_typed else f"must be {self.description}"
        return None if None in violations else violations[0]


def has_shared_methods(value: Any, classes: tuple[type, ...]) -> bool:
    """Whether ``value``, a dataclass or an object of one, has every public method that all of ``classes`` share.

    Such a class of user code is accepted where one of ``classes`` is: a schedule, a server optimizer, a proximal
    operator. False for fewer than two classes, which share no interface.
    """
    if len(classes) < 2 or not dataclasses.is_dataclass(value):
        return False
    shared = set.intersection(*map(_public_methods, classes)) - {"check"}
    return bool(shared) and shared <= _public_methods(value)


def _public_methods(thing: Any) -> set[str]:
    """Names of the public methods of a class or an object, and ``__call__``."""
    names = {name for name in dir(thing) if name == "__call__" or not name.startswith("_")}
    return {name for name in names if callable(getattr(thing, name, None))}


def describe_type(hint: Any, name: str = "") -> Field:
    """The description of a type annotation, which may be that of the field ``name``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        inner, metadata = describe_type(arguments[0]), arguments[1:]
        bounds = tuple(mark for mark in metadata if isinstance(mark, Bound))
        bounded = tuple(dataclasses.replace(t, bounds=t.bounds + bounds) for t in inner.types)
        return Field(name, bounded, metadata + inner.metadata)
    if origin in (typing.Union, types.UnionType):
        members = [describe_type(member) for member in arguments]
        return Field(name, sum((m.types for m in members), ()), sum((m.metadata for m in members), ()))
    described = FieldType(origin or hint)
    if origin is Literal:
        described = FieldType(origin, choices=arguments)
    elif described.type in (tuple, list):
        repeated = described.type is list or not arguments or arguments[-1] is Ellipsis
        items = (arguments or (Static[Scalar],))[: 1 if repeated else None]
        described = FieldType(described.type, items=tuple(map(describe_type, items)), repeated=repeated)
    return Field(name, (described,))


def type_hints(thing: Any) -> dict[str, Any]:
    """The evaluated annotations of a class or function.

    Raises:
        FedraxError: an annotation cannot be evaluated.
    """
    try:
        return typing.get_type_hints(thing, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        raise FedraxError(f"the annotations of {thing.__name__} cannot be read: {error}") from error


@functools.cache
def fields_of(cls: type) -> Mapping[str, Field]:
    """The descriptions of a dataclass's fields by name, in order."""
    hints = type_hints(cls)
    return {field.name: describe_type(hints[field.name], field.name) for field in dataclasses.fields(cls)}


def snake_case(name: str) -> str:
    """The name of a class in files: ``StepDecay`` -> ``step_decay``, ``SGD`` -> ``sgd``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def infer_type(default: Any) -> Any:
    """The type of a parameter without annotation, inferred from its default or ``dataclasses.MISSING``."""
    if type(default) in (int, float, bool, str):
        return type(default)
    if isinstance(default, tuple | list):
        item = functools.reduce(operator.or_, map(infer_type, default)) if default else Scalar
        return list[item] if isinstance(default, list) else tuple[item, ...]
    if default is None or default is dataclasses.MISSING:
        return Scalar | tuple[Scalar, ...] | (None if default is None else Scalar)
    return Any
