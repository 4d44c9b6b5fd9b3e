"""Initial parameters: drawn by the task while the run is traced, or given."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import core

from fedrax import tree, xla
from fedrax.background_thread import run_in_background
from fedrax.contract.model import Params, Variables
from fedrax.contract.task import Task
from fedrax.errors import FedraxError
from fedrax.host_memory import host_memory

_FAST_COMPILATION: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 1}}
"""Fast compilation: initial parameters are drawn once, and their values do not depend on the level."""


class InitialParameters(NamedTuple):
    """Initial parameters whose shapes are known and whose values may still be computed in the background."""

    shapes: Params
    """Leaves with a shape and a dtype."""
    values: Callable[[], Params]
    """Waits for the values and returns them."""


def initial_parameters(task: Task, key: Array, given: Params | None) -> Params:
    """``given``, checked to have the names and shapes of the task's parameters; None: those of the task."""
    return initial_parameters_in_background(task, key, given).values()


def shapes_of(task: Task) -> Params:
    """The shapes and dtypes of the initial parameters."""
    try:
        return jax.eval_shape(lambda: task.init(jax.random.key(0)))  # without computing the key
    except jax.errors.JAXTypeError:  # init of user code reads the value of the key
        return _arrays(task.init(jax.random.key(0)))


def initial_parameters_in_background(task: Task, key: Array, given: Params | None) -> InitialParameters:
    """As :func:`initial_parameters`, compiled in the background."""
    try:
        made, structure = xla.trace_inlined(task.init, key)
        own = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made.out_avals])
        _check_size(own)
        _check_dtypes(own)
        if given is None:
            drawing = _compiled_init(made, key)
            return InitialParameters(own, lambda: jax.tree.unflatten(structure, drawing.result()(key)))
    except jax.errors.JAXTypeError:  # init of user code reads the value of the key
        own = _arrays(task.init(key))
        _check_dtypes(own)
    except TypeError as error:
        if "is not a valid JAX type" not in str(error):
            raise
        raise FedraxError(
            f"a model's parameters must be arrays: {str(error).splitlines()[0]}; for an Equinox module use"
            " fedrax.models.from_equinox, which separates the arrays from the module"
        ) from error
    if given is None:
        return InitialParameters(own, lambda: own)
    start = _arrays(given)
    _check_given(own, start)
    return InitialParameters(start, lambda: start)


def _arrays(params: Params) -> Params:
    """``params`` with Python numbers as arrays."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else np.asarray(leaf), params)


def _compiled_init(made: core.ClosedJaxpr, key: Array) -> Future[Any]:
    """The compiled function of a key that computes the values of ``made``; compiled once for equal programs."""
    text, kind = xla.JaxprText.of(made), xla.shape_struct(key)
    if text is None:
        return _compile_in_background(made, kind)
    found = _cached_init(text, kind, xla.trace_settings())
    if found.done() and found.exception() is not None:  # such as out of memory: try again
        _cached_init.cache_clear()
        found = _cached_init(text, kind, xla.trace_settings())
    return found


@lru_cache(xla.CACHE_SIZE)
def _cached_init(text: xla.JaxprText, key: Any, _: tuple) -> Future[Any]:
    return _compile_in_background(text.made, key)


def _compile_in_background(made: core.ClosedJaxpr, key: Any) -> Future[Any]:
    """Compile in a thread; XLA releases the interpreter lock, so that the caller can trace the run meanwhile."""
    drawing = jax.jit(lambda key: xla.evaluate_with_batched_draws(made, [key]), **_FAST_COMPILATION).trace(key).lower()
    return run_in_background(drawing.compile)


def _check_given(own: Params, given: Params) -> None:
    _check_dtypes(given)
    need, have = (dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True)) for t in (own, given))
    for name in [*need, *have]:
        if need.get(name) != have.get(name):
            wanted, found = (f"of shape {shapes[name]}" if name in shapes else "missing" for shapes in (need, have))
            raise FedraxError(f"the initial parameters do not fit the model: {name} is {found}, should be {wanted}")
    for name, leaf in zip(tree.leaf_names(given), jax.tree.leaves(given), strict=True):
        known = not isinstance(leaf, Tracer) and getattr(leaf, "is_fully_addressable", True)
        if known and not np.isfinite(np.asarray(leaf)).all():
            raise FedraxError(f"the initial parameters are not finite: {name} has entries that are NaN or infinite")


def _check_size(shapes: Params) -> None:
    """Raise FedraxError for a model that exceeds the memory of this machine, before allocating it."""
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    if needed > host_memory():
        raise FedraxError(
            f"the model has {count:.2g} parameters, {needed / 1e9:.3g} GB: more than this machine's memory"
        )


def _check_dtypes(params: Params) -> None:
    """Raise FedraxError for parameters that are not floating-point, before they would be converted."""
    trained = params.params if isinstance(params, Variables) else params
    for name, leaf in zip(tree.leaf_names(trained), jax.tree.leaves(trained), strict=True):
        kind = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not jnp.issubdtype(kind, jnp.floating):
            remedy = "put constants into the statistics of fedrax.contract.Variables, or into the function"
            if jnp.issubdtype(kind, jnp.complexfloating):
                remedy = "use two parameters, the real and the imaginary part, and combine them by jax.lax.complex"
            raise FedraxError(
                f"the model's parameter {name or 'tree'} holds {kind}, and only floating-point parameters are trained:"
                f" {remedy}"
            )
