"""Where a run starts: the task's own parameters, drawn while the run is laid out, or given ones."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from fedrax import tree, xla
from fedrax.background_thread import begun
from fedrax.contract.model import Params, Variables
from fedrax.contract.task import Task
from fedrax.errors import FedraxError
from fedrax.host_memory import host_memory

_QUICK: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 1}}
"""Random numbers take long to compile and are drawn once; what is drawn does not depend on the level."""


class Start(NamedTuple):
    """Starting parameters whose shapes are known, and whose numbers may not be drawn yet."""

    shapes: Params
    """Of anything with a shape and a type."""
    values: Callable[[], Params]
    """Waits for the numbers where they are still on their way."""


def starting_parameters(task: Task, key: Array, given: Params | None) -> Params:
    """The task's own starting parameters, or those given if they have the same names and shapes."""
    return start_of(task, key, given).values()


def shapes_of(task: Task) -> Params:
    """Starting parameters whose numbers may not be drawn: of anything with a shape and a type."""
    try:
        return jax.eval_shape(task.init, jax.random.key(0))
    except jax.errors.JAXTypeError:  # a user's init may look at the key's value
        return _arrays(task.init(jax.random.key(0)))


def start_of(task: Task, key: Array, given: Params | None) -> Start:
    """As :func:`starting_parameters`; what draws them is compiled in the background."""
    try:
        made, structure = xla.trace_inlined(task.init, key)
        own = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made.out_avals])
        _check_size(own)
        _check_kinds(own)
        if given is None:
            drawing = _drawing(made, key)
            return Start(own, lambda: jax.tree.unflatten(structure, drawing.result()(key)))
    except jax.errors.JAXTypeError:  # a user's init may look at the key's value
        own = _arrays(task.init(key))
        _check_kinds(own)
    except TypeError as error:
        if "is not a valid JAX type" not in str(error):
            raise
        raise FedraxError(
            f"a model's parameters are arrays: {str(error).splitlines()[0]}; of an Equinox module these are"
            " equinox.filter(module, equinox.is_inexact_array), which equinox.combine puts into one again, and"
            " fedrax.models.from_equinox does both"
        ) from error
    if given is None:
        return Start(own, lambda: own)
    start = _arrays(given)
    _check_given(own, start)
    return Start(start, lambda: start)


def _arrays(params: Params) -> Params:
    """With Python's numbers as arrays, too."""
    return jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else np.asarray(leaf), params)


def _drawing(made: core.ClosedJaxpr, key: Array) -> Future[Any]:
    """What gives the values of ``made``, a function of a key; of runs that start alike it is compiled once."""
    text, kind = xla.JaxprText.of(made), xla.shape_struct(key)
    if text is None:
        return _in_background(made, kind)
    found = _known(text, kind, xla.trace_settings())
    if found.done() and found.exception() is not None:  # as for want of memory, of which there may be enough by now
        _known.cache_clear()
        found = _known(text, kind, xla.trace_settings())
    return found


@lru_cache(xla.CACHE_SIZE)
def _known(text: xla.JaxprText, key: Any, _: tuple) -> Future[Any]:
    return _in_background(text.made, key)


def _in_background(made: core.ClosedJaxpr, key: Any) -> Future[Any]:
    """XLA leaves Python alone while it compiles: another core can, and the caller traces the run meanwhile."""
    drawing = jax.jit(lambda key: xla.evaluate_with_batched_draws(made, [key]), **_QUICK).trace(key).lower()
    return begun(drawing.compile)


def _check_given(own: Params, given: Params) -> None:
    _check_kinds(given)
    need, have = (dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True)) for t in (own, given))
    for name in [*need, *have]:
        if need.get(name) != have.get(name):
            wanted, found = (f"of shape {shapes[name]}" if name in shapes else "not there" for shapes in (need, have))
            raise FedraxError(f"the starting parameters do not fit the model: {name} is {found}, should be {wanted}")


def _check_size(shapes: Params) -> None:
    """Refuse a model that this machine's memory cannot hold, before any of it is taken."""
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    needed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    if needed > host_memory():
        raise FedraxError(
            f"the model has {count:.2g} parameters, {needed / 1e9:.3g} GB: more than this machine's memory"
        )


def _check_kinds(params: Params) -> None:
    """Refuse what has no gradient, before it is made a number that has one."""
    trained = params.params if isinstance(params, Variables) else params
    for name, leaf in zip(tree.leaf_names(trained), jax.tree.leaves(trained), strict=True):
        kind = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if not jnp.issubdtype(kind, jnp.floating):
            remedy = "what is not belongs into the statistics of fedrax.contract.Variables, or into the function"
            if jnp.issubdtype(kind, jnp.complexfloating):
                remedy = "make it of two, its real and its imaginary part (jax.lax.complex puts them together)"
            raise FedraxError(
                f"the model's parameter {name or 'tree'} holds {kind}, and only floating-point numbers are trained:"
                f" {remedy}"
            )
