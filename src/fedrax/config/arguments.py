"""Checks of the arguments of public functions against their signatures and annotations."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, ParamSpec, TypeVar

import numpy as np

from fedrax.config.annotations import Field, FieldType, describe_type
from fedrax.errors import FedraxError, binding_error, describe_value

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")

_LISTS = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)
_DESCRIPTIONS: dict[Any, str] = {
    **dict.fromkeys(_LISTS, "a list"),
    collections.abc.Callable: "a function",
    collections.abc.Mapping: "a dictionary",
    type: "a class",
}
"""How messages call types that files cannot hold."""


def checked_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Make a public function raise FedraxError for wrong arguments before it computes anything.

    Arguments are wrong if the signature does not take them, or if they do not have the annotated type, be it a scalar
    with its bounds, a literal, a class, a protocol, an array, a function, a list or a dictionary. Numbers become
    Python's of the annotated type, and lists become arrays where an array is annotated. A class may have a static
    method ``_remedy(value) -> str`` that tells how to make an object of it from another one.

    Args:
        function: A function, or a method without its ``classmethod``.

    Returns:
        The function with the checks.
    """
    signature, name = inspect.signature(function), function.__qualname__.rpartition("<locals>.")[2]
    what, name = ("field" if name.endswith(".__init__") else "argument"), name.removesuffix(".__init__")

    @functools.cache
    def annotated() -> Mapping[str, _Argument]:
        hints = {n: p.annotation for n, p in signature.parameters.items() if p.kind is not Parameter.VAR_KEYWORD}
        return {n: _Argument.of(_evaluated(hint, function)) for n, hint in hints.items() if hint is not Parameter.empty}

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            raise binding_error(name, signature, args, kwargs, what) from None
        for argument, given in bound.arguments.items():
            parameter, expected = signature.parameters[argument], annotated().get(argument)
            if expected is None or given is parameter.default:
                continue
            several = parameter.kind is Parameter.VAR_POSITIONAL
            made = [expected.checked(one, f"{name}: {argument}") for one in (given if several else [given])]
            bound.arguments[argument] = tuple(made) if several else made[0]
        return function(*bound.args, **bound.kwargs)

    return checked


def checked_fields(cls: type[C]) -> type[C]:
    """Class decorator: the constructor checks its arguments as :func:`checked_arguments` does."""
    cls.__init__ = checked_arguments(cls.__init__)
    return cls


def _evaluated(annotation: Any, function: Callable) -> Any:
    """An annotation that may be a string; Any if it names what only type checkers import."""

    def holder() -> None: ...

    holder.__annotations__ = {"value": annotation}
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["value"]
    except NameError:
        return Any


@dataclass(frozen=True)
class _Argument:
    """What the annotation of an argument, or of the items of one, accepts."""

    field: Field
    items: Mapping[Any, _Argument]
    """What the values of a dictionary or the items of a list are, by the type that holds them. Items are checked if
    they are objects of a class or functions: there may be millions of scalars and texts."""

    @classmethod
    def of(cls, hint: Any) -> _Argument:
        """The description of an annotation."""
        origin = typing.get_origin(hint)
        members = typing.get_args(hint) if origin in (typing.Union, types.UnionType) else (hint,)
        held = {typing.get_origin(m): typing.get_args(m)[-1] for m in members if typing.get_args(m)}
        items = {kind: cls.of(item) for kind, item in held.items() if kind in _LISTS and _is_class(item)}
        values = {kind: cls.of(item) for kind, item in held.items() if kind is collections.abc.Mapping}
        return cls(describe_type(hint), items | values)

    def checked(self, value: Any, where: str) -> Any:
        """``value`` with numbers and lists converted; raises FedraxError if it is not accepted."""
        fitting = [option for option in self.field.types if _fits(option, value)]
        if not fitting:
            array = _as_array(value) if any(_is_array_type(option.type) for option in self.field.types) else None
            if array is not None:
                return array
            wanted = " or ".join(dict.fromkeys(map(_description, self.field.types)))
            raise FedraxError(f"{where} must be {wanted}, not {describe_value(value)}{_remedy(self.field, value)}")
        problems = [option.violation(value) for option in fitting]
        if None not in problems:
            raise FedraxError(f"{where} {problems[0]}, not {describe_value(value)}")
        item = self.items.get(fitting[0].type)
        if item is not None and isinstance(value, Mapping):
            return {key: item.checked(one, f"{where}[{key!r}]") for key, one in value.items()}
        if item is not None and isinstance(value, list | tuple):
            made = [item.checked(one, f"{where}[{i}]") for i, one in enumerate(value)]
            return tuple(made) if isinstance(value, tuple) else made
        return self.field.python_value(value)


def _is_class(hint: Any) -> bool:
    """Whether an annotation is a class of objects or a function: no scalar, list, dictionary, or union."""
    (option, *others) = describe_type(hint).types
    is_object = option.nested or not option.description
    return is_object and not others and option.type not in (*_LISTS, collections.abc.Mapping, Any, object)


def _fits(option: FieldType, value: Any) -> bool:
    """Whether ``value`` has a type, as :meth:`FieldType.accepts`, which lets through classes that files cannot hold."""
    kind = option.type
    if option.description or kind in (Any, object, type(None)) or not isinstance(kind, type):
        return option.accepts(value)
    if _is_array_type(kind):
        return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)
    if kind in _LISTS:
        listed = isinstance(value, collections.abc.Iterable) and getattr(value, "ndim", 1) > 0
        return listed and not isinstance(value, str | bytes | collections.abc.Mapping | type)
    if getattr(kind, "_is_protocol", False):
        needed = [member for member in vars(kind) if not member.startswith("_")]
        return not isinstance(value, type) and all(hasattr(value, member) for member in needed)
    return isinstance(value, kind)


def _is_array_type(kind: Any) -> bool:
    """Whether a type is the arrays of NumPy or JAX, which is not imported here."""
    package = getattr(kind, "__module__", "").partition(".")[0]  # of JAX, or of jaxlib in some versions
    return kind is np.ndarray or (
        package in ("jax", "jaxlib") and getattr(kind, "__name__", "").rpartition(".")[2] == "Array"
    )


def _as_array(value: Any) -> np.ndarray | None:
    """A list as an array; None for anything else, and for what are not numbers in one shape."""
    try:
        array = np.asarray(value if isinstance(value, list | tuple) else None)
    except (ValueError, TypeError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _description(option: FieldType) -> str:
    """How messages call a type."""
    kind = option.type
    if len(option.items) == 2 and all(item.types[0].type is Any for item in option.items):
        return "a pair"
    if option.description and not option.nested:
        return option.description
    if kind in (None, type(None)):
        return "None"
    if _is_array_type(kind):
        return "an array"
    name = getattr(kind, "__name__", str(kind))
    return _DESCRIPTIONS.get(kind) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _remedy(field: Field, value: Any) -> str:
    """How to correct a wrong argument, after a colon or semicolon; empty if unknown."""
    types = (option.type for option in field.types if isinstance(option.type, type))
    classes = [cls for cls in types if not getattr(cls, "_is_protocol", False)]
    choices = [choice for option in field.types for choice in option.choices if isinstance(choice, str)]
    if isinstance(value, str) and (near := difflib.get_close_matches(value, choices, 1, cutoff=0.5)):
        return f"; did you mean {near[0]!r}?"
    if isinstance(value, type) and issubclass(value, tuple(classes)):
        return f": give an object, {value.__name__}(...)"
    texts = (text for cls in classes if hasattr(cls, "_remedy") and (text := cls._remedy(value)))
    if remedy := next(texts, ""):
        return f": {remedy}"
    scalar = isinstance(value, str | int | float)
    return ": put brackets around it" if scalar and any(option.type in _LISTS for option in field.types) else ""
