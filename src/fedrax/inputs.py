"""Inputs of samples: one array [n, ...], or a dictionary or tuple of arrays [n, ...] with a row for each sample.

Dictionaries and tuples are pytrees: where JAX may be imported, `jax.tree.map` treats all three alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedrax.errors import FedraxError

Inputs = Any
"""One array, or a dictionary (of names that are Python identifiers) or tuple of arrays."""


def has_several(x: Inputs) -> bool:
    """Whether the inputs are a dictionary or tuple of arrays."""
    return isinstance(x, dict | tuple)


def map_inputs(function: Callable[[Any], Any], x: Inputs) -> Inputs:
    """``function`` of each array, in the form of ``x``."""
    if isinstance(x, dict):
        return {key: function(a) for key, a in x.items()}
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def map_one(function: Callable[[Any], Any], x: Inputs, key: str) -> Inputs:
    """``x`` with ``function`` of the array of this key, see :func:`by_key`."""
    if isinstance(x, dict):
        return x | {key: function(x[key])}
    return tuple(function(a) if str(i) == key else a for i, a in enumerate(x))


def by_key(x: Inputs) -> dict[str, Any]:
    """Several arrays by their names in order, or by their numbers in a tuple as texts; empty for one array."""
    if isinstance(x, dict):
        return {key: x[key] for key in sorted(x)}
    return {str(i): a for i, a in enumerate(x)} if isinstance(x, tuple) else {}


def flat_inputs(x: Inputs, name: str = "x") -> dict[str, Any]:
    """The arrays by a name for files and messages: x, x_mask or x_0."""
    return {f"{name}_{key}": a for key, a in by_key(x).items()} if has_several(x) else {name: x}


def arrays_of(x: Inputs) -> list[Any]:
    """The arrays, those of a dictionary in the order of its names."""
    return list(flat_inputs(x).values())


def named_inputs(x: Inputs, name: str = "x") -> list[tuple[str, Any]]:
    """(name in error messages, array) of each array: x, x['mask'] or x[0]."""
    form = f"{name}[{{!r}}]" if isinstance(x, dict) else f"{name}[{{}}]"
    return [(form.format(key), a) for key, a in by_key(x).items()] if has_several(x) else [(name, x)]


def describe_inputs(x: Inputs) -> str:
    """Dtype and shape of a sample of each array: "x float32 [3]"."""
    return ", ".join(f"{name} {a.dtype} {list(a.shape[1:])}" for name, a in named_inputs(x))


def same_form(x: Inputs, other: Inputs) -> bool:
    """Whether both are one array, dictionaries with the same names, or tuples of one length."""
    return flat_inputs(x).keys() == flat_inputs(other).keys()


def from_flat(arrays: Mapping[str, Any], name: str = "x") -> Inputs:
    """Inverse of :func:`flat_inputs`; raises FedraxError for other names."""
    if set(arrays) == {name}:
        return arrays[name]
    parts = {key.removeprefix(f"{name}_"): a for key, a in arrays.items() if key.startswith(f"{name}_")}
    if len(parts) == len(arrays) > 0:
        if set(parts) == set(map(str, range(len(parts)))):
            return tuple(parts[str(i)] for i in range(len(parts)))
        if all(map(str.isidentifier, parts)):
            return {key: parts[key] for key in sorted(parts)}
    raise FedraxError(
        f"inputs are {name}, or {name}_NAME with names that are Python identifiers, or {name}_0, {name}_1, ..., not"
        f" {', '.join(sorted(arrays))[:200] or 'none'}"
    )


def as_arguments(x: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, keyword) arguments of a module: a dictionary by name, a tuple in order, or one array."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}
