"""A function that many programs hold, traced once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend import core
from jax.sharding import AbstractMesh, use_abstract_mesh

from fedrax.compiled.lengths import of_differences

P = ParamSpec("P")
T = TypeVar("T")
NO_MESH = AbstractMesh((), ())
KEPT = 32
"""Traces of one function."""


def traced_once(fixed: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for functions whose first ``fixed`` arguments are hashable and whose others are pytrees of arrays.

    The function is laid out where it is called. ``jax.jit`` with ``inline`` would trace it anew inside every
    ``shard_map``; here a trace is found again wherever the shapes and JAX's settings are the same. So the function must
    not speak of the axes of a mesh.
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(KEPT)
        def trace(statics: tuple, structure: Any, shapes: tuple, settings: tuple) -> tuple[core.ClosedJaxpr, Any]:
            inner: Callable = function
            with use_abstract_mesh(NO_MESH):
                made, shape = jax.make_jaxpr(
                    lambda *leaves: inner(*statics, *jax.tree.unflatten(structure, leaves)), return_shape=True
                )(*shapes)
            return of_differences(made), jax.tree.structure(shape)

        @wraps(function)
        def call(*args: P.args, **none: P.kwargs) -> T:
            if jax.config.values["jax_disable_jit"]:
                return function(*args, **none)
            leaves, structure = jax.tree.flatten(args[fixed:])
            settings = tuple(jax.config.values.items())
            made, shape = trace(args[:fixed], structure, tuple(map(_shape_of, leaves)), settings)
            return jax.tree.unflatten(shape, core.jaxpr_as_fun(made)(*leaves))

        return call

    return decorated


def _shape_of(a: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(a)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
