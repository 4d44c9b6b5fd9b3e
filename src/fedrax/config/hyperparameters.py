"""Hyper-parameter objects: frozen dataclasses that are pytrees.

Floating-point fields and nested hyper-parameter objects are leaves: their values are inputs of a compiled program, so
that another learning rate does not recompile, and a grid of learning rates is one ``vmap``. Integers, Booleans, strings
and functions are static: they are part of the compilation cache key and must be hashable. ``Leaf[...]`` and
``Static[...]`` around a field's type override this.

Bounds are part of the annotation (``lr: Positive = 0.1``) and are checked by :func:`check`, not by the
constructor, because compiled programs also build these objects from traced values.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import CodeType, FunctionType
from typing import Annotated, Any, TypeVar, dataclass_transform

import jax

from fedrax.config.annotations import Bound, Converter, Field, fields_of
from fedrax.config.arguments import checked_arguments
from fedrax.config.user_errors import translate_errors
from fedrax.errors import FedraxError, binding_error, describe_value, warnings_about

Positive = Annotated[float, Bound(gt=0)]
NonNegative = Annotated[float, Bound(ge=0)]
Fraction = Annotated[float, Bound(ge=0, le=1)]
Decay = Annotated[float, Bound(ge=0, lt=1)]
PositiveInt = Annotated[int, Bound(ge=1)]
NonNegativeInt = Annotated[int, Bound(ge=0)]

T = TypeVar("T")
_MARK = "__hyperparameters__"
_METHODS = (FunctionType, property, classmethod, staticmethod)


@dataclass_transform(frozen_default=True, kw_only_default=False)
def hyperparameters(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose floating and nested fields are pytree leaves.

    All other fields are static: they shape the compiled program and must be hashable.

    Args:
        cls: the class; its fields are annotated, e.g. ``lr: Positive = 0.1``.

    Returns:
        The class itself, as a dataclass that is registered as a pytree.

    Raises:
        FedraxError: if the default of a field is mutable, or ``cls`` is no class.

    Example:
        >>> @fedrax.contract.hyperparameters
        ... class Damping:
        ...     factor: fedrax.contract.Positive = 0.5
        ...     steps: int = 3
        >>> jax.tree.leaves(Damping())
        [0.5]
    """
    if not isinstance(cls, type):
        raise FedraxError(f"hyperparameters decorates a class, not {describe_value(cls)}")
    try:
        cls = dataclasses.dataclass(frozen=True)(cls)
    except ValueError as error:
        if "mutable default" not in str(error):
            raise
        raise FedraxError(f"{cls.__name__}: {str(error).split(':')[0]}: give a tuple, or numbers") from error
    fields = fields_of(cls).values()
    _wrap_init(cls)
    _register(cls, [field.name for field in fields if not field.static], [f.name for f in fields if f.static])
    setattr(cls, _MARK, True)
    return cls


def _wrap_init(cls: type) -> None:
    """Make the constructor reject unknown fields, naming the nested field that was meant, and convert values."""
    original, described = cls.__init__, fields_of(cls)
    signature = inspect.signature(original)
    convert = {f.name: mark.convert for f in described.values() for mark in f.metadata if isinstance(mark, Converter)}

    @functools.wraps(original)
    def init(self: Any, *values: Any, **fields: Any) -> None:
        for name in fields.keys() - described.keys():
            for part in dataclasses.fields(cls):
                default: Any = part.default
                if hasattr(default, _MARK) and name in {f.name for f in dataclasses.fields(default)}:
                    inner = f"{type(default).__name__}({name}={fields[name]!r})"
                    raise FedraxError(
                        f"{name!r} is a field of {cls.__name__}.{part.name}: {cls.__name__}({part.name}={inner})"
                    )
        try:
            bound = signature.bind(self, *values, **fields)
        except TypeError:
            raise binding_error(cls.__name__, signature, (self, *values), fields, "field") from None
        original(*bound.args, **bound.kwargs)
        for name, field in described.items():
            value = getattr(self, name)
            converted = convert[name](value) if name in convert else field.python_value(value)
            if converted is not value:
                object.__setattr__(self, name, converted)

    cls.__init__ = init


def check_class_definition(cls: type) -> None:
    """Check that a class is complete.

    Raises:
        FedraxError: the class lacks an abstract method, the annotation of a field or the decorator ``@hyperparameters``
            of its base, or the name of a method looks like a misspelling of a base's method.
    """
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise FedraxError(f"{cls.__name__} must define {', '.join(missing)}")
    if hasattr(cls, _MARK) and _MARK not in vars(cls):
        raise FedraxError(f"{cls.__name__} lacks the decorator @hyperparameters")
    for name, value in vars(cls).items() if hasattr(cls, _MARK) else ():
        if _is_unannotated_field(cls, name):
            raise FedraxError(
                f"{cls.__name__}.{name} has no annotation, so it is not a field: write {name}: {type(value).__name__} ="
                f" {_format_value(value, False)}"
            )
        if near := _misspelled_method(cls, name):
            raise FedraxError(f"nothing calls {cls.__name__}.{name}: did you mean {near!r}?")


def _is_unannotated_field(cls: type, name: str) -> bool:
    """Whether an attribute without annotation looks like a field: no function, no override of a base's constant."""
    value = vars(cls)[name]
    if name.startswith("_") or name in vars(cls).get("__annotations__", {}):
        return False
    if hasattr(value, "__get__") or (callable(value) and not dataclasses.is_dataclass(value)):
        return False
    bases = [base for base in cls.__mro__[1:] if name in vars(base)]
    if bases and dataclasses.is_dataclass(bases[0]):  # __dataclass_fields__ also lists class variables
        return name in {field.name for field in dataclasses.fields(bases[0])}
    return not bases


def _misspelled_method(cls: type, name: str) -> str | None:
    """The base's method whose name ``name`` nearly is, unless the class's own code refers to ``name``; else None."""
    if name.startswith("_") or not isinstance(vars(cls)[name], _METHODS):
        return None
    bases = [vars(base) for base in cls.__mro__[1:]]
    inherited = {n for base in bases for n in base if n[0] != "_" and isinstance(base[n], _METHODS)}
    near = difflib.get_close_matches(name, inherited - vars(cls).keys(), 1, cutoff=0.85)
    used = {other for base in cls.__mro__ for other in _referenced_names(base)}
    return None if name in inherited or not near or name in used else near[0]


def _referenced_names(cls: type) -> Iterator[str]:
    """Names of globals and attributes that the code of a class's methods uses."""
    functions = (getattr(value, "fget", getattr(value, "__func__", value)) for value in vars(cls).values())
    codes: list[Any] = [getattr(function, "__code__", None) for function in functions]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield from code.co_names
            codes.extend(code.co_consts)


def _register(cls: type, leaves: list[str], static: list[str]) -> None:
    """Register ``cls`` as a pytree whose auxiliary data includes the class.

    JAX 0.10 treats the tree structures of two ``register_dataclass`` classes with equal fields as equal, and may run
    the compiled program of FedAvg for FedSGD, or that of FedAdam for FedYogi.
    """
    keys = [jax.tree_util.GetAttrKey(name) for name in leaves]

    def flatten(config: Any) -> tuple[list[Any], tuple]:
        return [getattr(config, name) for name in leaves], (cls, *(getattr(config, name) for name in static))

    def flatten_with_keys(config: Any) -> tuple[list[tuple[Any, Any]], tuple]:
        values, data = flatten(config)
        return list(zip(keys, values, strict=True)), data

    def unflatten(data: tuple, values: Any) -> Any:
        config = object.__new__(cls)  # the constructor converts numbers, and leaves may be anything, such as axes
        for name, value in zip((*leaves, *static), (*values, *data[1:]), strict=True):
            object.__setattr__(config, name, value)
        return config

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)


@checked_arguments
def check(config: Any, path: str = "") -> None:
    """Check types and bounds in ``config``, nested objects included, then each object's own ``check`` method.

    Args:
        config: an object of a class that is decorated with `hyperparameters`.
        path: the name of ``config`` in messages; empty: the name of its class.

    Raises:
        FedraxError: naming the field, e.g. ``Scaffold.local.lr must be greater than 0, got -1.0``, or if ``config`` is
            no object of such a class.

    Example:
        >>> fedrax.contract.check(fedrax.FedAvg())
        >>> fedrax.contract.check(fedrax.LocalSGD(lr=-1.0))
        Traceback (most recent call last):
        fedrax.errors.FedraxError: LocalSGD.lr must be greater than 0, got -1.0
    """
    if isinstance(config, type) or not dataclasses.is_dataclass(config):
        raise FedraxError(
            f"{path or 'check'} takes an object of a class with @hyperparameters, not {describe_value(config)}"
        )
    check_class_definition(type(config))
    with warnings_about(type(config).__name__) if hasattr(config, _MARK) else nullcontext():
        _check_fields(config, path)


def _check_fields(config: Any, path: str) -> None:
    """Check the fields of an object, those of nested objects, and then the object as a whole."""
    for field in fields_of(type(config)).values():
        value, where = getattr(config, field.name), f"{path or type(config).__name__}.{field.name}"
        nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
        problem = field.problem(value)
        if problem:
            raise FedraxError(f"{where} {problem}, got {_format_value(value, nested, field.classes)}")
        if nested:
            check(value, where)
        if hasattr(config, _MARK):
            _check_jax_type(field, value, where)
    check_method = getattr(config, "check", None)
    if check_method is not None:
        with translate_errors(config):
            check_method()


def _format_value(value: Any, nested: bool, classes: tuple[type, ...] = ()) -> str:
    """A rejected value for a message; for a function, also what to write where one of ``classes`` is accepted."""
    type_name, accepted = type(value).__name__, [cls.__name__ for cls in classes]
    if inspect.isfunction(value) and accepted:
        if "Optax" in accepted and str(value.__module__).startswith("optax"):
            name = value.__name__
            return f"the function {name}: fedrax.optim.Optax.of(optax.{name}, ...) builds the optimizer"
        remedy = f": write a class with @hyperparameters and the methods of {accepted[-1]}" if len(accepted) > 1 else ""
        return f"the function {value.__name__}{remedy}"
    if isinstance(value, type) and issubclass(value, classes):
        return f"the class: {value.__name__}() makes an object of it"
    return type_name if nested or len(repr(value)) > 100 else repr(value)


def _check_jax_type(field: Field, value: Any, where: str) -> None:
    """Raise FedraxError unless JAX accepts the value: static values must be hashable, leaves must be arrays."""
    if all(type(leaf) in (bool, int, float) for leaf in ([value] if field.static else jax.tree.leaves(value))):
        return  # the usual case: Python numbers can be both, and jax.eval_shape is slow
    try:
        (hash if field.static else partial(jax.eval_shape, lambda value: value))(value)
    except TypeError as error:
        static = "hashable, because it is static: give a tuple, or annotate arrays Leaf[...]"
        leaf = "numbers or arrays, because it is an input of the compiled program: annotate anything else Static[...]"
        if dataclasses.is_dataclass(value):
            leaf = f"a pytree: decorate {type(value).__name__} with @hyperparameters"
        raise FedraxError(f"{where} must be {static if field.static else leaf}") from error
