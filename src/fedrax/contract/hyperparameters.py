"""Hyper-parameter objects: frozen dataclasses that are pytrees.

Floating fields (and nested hyper-parameter objects) are leaves, so a compiled program takes their values
as inputs: changing a step size never recompiles, and a grid of step sizes is one ``vmap``. Integers,
booleans, strings and functions are static: they shape the program.

Bounds are part of the annotation (``lr: Positive = 0.1``) and are checked by :func:`check`, not by the
constructor, because a compiled program builds these objects from traced values too.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import jax

from fedrax.errors import FedraxError


@dataclasses.dataclass(frozen=True)
class Bound:
    """The interval a number must lie in; ``gt``/``lt`` exclude the end point."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def violation(self, value: float) -> str | None:
        """What is wrong with ``value``, as 'must be ...', or None."""
        if not math.isfinite(value):
            return "must be a finite number"
        if self.gt is not None and not value > self.gt:
            return f"must be greater than {self.gt:g}"
        if self.ge is not None and not value >= self.ge:
            return f"must be at least {self.ge:g}"
        if self.lt is not None and not value < self.lt:
            return f"must be less than {self.lt:g}"
        if self.le is not None and not value <= self.le:
            return f"must be at most {self.le:g}"
        return None


Positive = Annotated[float, Bound(gt=0)]
NonNegative = Annotated[float, Bound(ge=0)]
Fraction = Annotated[float, Bound(ge=0, le=1)]
Decay = Annotated[float, Bound(ge=0, lt=1)]
Count = Annotated[int, Bound(ge=1)]
Whole = Annotated[int, Bound(ge=0)]

T = TypeVar("T")
_STATIC = (int, bool, str, bytes, type(None))


def _is_static(hint: Any) -> bool:
    """Whether a field of this type shapes the program rather than being an input of it."""
    if typing.get_origin(hint) is Annotated:
        return _is_static(typing.get_args(hint)[0])
    if typing.get_origin(hint) is Literal or hint in _STATIC:
        return True
    if typing.get_origin(hint) in (typing.Union, types.UnionType, tuple):
        return all(_is_static(part) for part in typing.get_args(hint) if part is not Ellipsis)
    return not (hint is float or (isinstance(hint, type) and dataclasses.is_dataclass(hint)) or hint is Any)


@dataclass_transform(frozen_default=True, kw_only_default=False)
def hyperparameters(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass whose floating and nested fields are pytree leaves."""
    cls = dataclasses.dataclass(frozen=True)(cls)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    static = [name for name in fields if _is_static(hints[name])]
    _register(cls, [name for name in fields if name not in static], static)
    return cls


def _register(cls: type, leaves: list[str], static: list[str]) -> None:
    """Make ``cls`` a pytree.

    Its class is part of the structure's data: JAX 0.10 calls the structures of two ``register_dataclass`` classes
    equal when their fields are, and may then take FedAvg's compiled program for FedSGD's, or FedAdam's for FedYogi's.
    """
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(config: Any) -> tuple[list[Any], tuple]:
        return [getattr(config, name) for name in leaves], (cls, *(getattr(config, name) for name in static))

    def flatten_with_keys(config: Any) -> tuple[list[tuple[Any, Any]], tuple]:
        values, data = flatten(config)
        return list(zip(keys, values, strict=True)), data

    def unflatten(data: tuple, values: Any) -> Any:
        return cls(**dict(zip(leaves, values, strict=True)), **dict(zip(static, data[1:], strict=True)))

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


def check(config: Any, path: str = "") -> None:
    """Check every bound in ``config``, nested objects included, then each object's own ``check`` method.

    Raises FedraxError naming the field, e.g. ``Scaffold.local.lr must be greater than 0, got -1.0``.
    """
    path = path or type(config).__name__
    hints = typing.get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), f"{path}.{field.name}"
        if dataclasses.is_dataclass(value):
            check(value, where)
        else:
            _check_value(hints[field.name], value, where)
    own = getattr(config, "check", None)
    if own is not None:
        own()


def _check_value(hint: Any, value: Any, where: str) -> None:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        kind, *marks = typing.get_args(hint)
        _check_value(kind, value, where)
        for bound in (mark for mark in marks if isinstance(mark, Bound)):
            problem = bound.violation(float(value))
            if problem:
                raise FedraxError(f"{where} {problem}, got {value}")
    elif origin in (typing.Union, types.UnionType):
        _check_union(hint, value, where)
    elif origin is Literal and value not in typing.get_args(hint):
        raise FedraxError(f"{where} must be one of {', '.join(map(repr, typing.get_args(hint)))}, got {value!r}")
    elif hint is float and not _is_number(value):
        raise FedraxError(f"{where} must be a number, got {value!r}")
    elif hint is float and not math.isfinite(float(value)):
        raise FedraxError(f"{where} must be a finite number, got {value}")
    elif hint is int and (isinstance(value, bool) or not isinstance(value, int)):
        raise FedraxError(f"{where} must be a whole number, got {value!r}")
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and not isinstance(value, hint):
        raise FedraxError(f"{where} must be a {hint.__name__}, got {value!r}")


def _check_union(hint: Any, value: Any, where: str) -> None:
    if value is None and type(None) in typing.get_args(hint):
        return
    problems = []
    for part in typing.get_args(hint):
        if part is type(None):
            continue
        try:
            return _check_value(part, value, where)
        except FedraxError as problem:
            problems.append(problem)
    raise problems[0]


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool | str) and getattr(value, "ndim", 0) == 0 and hasattr(value, "__float__")
