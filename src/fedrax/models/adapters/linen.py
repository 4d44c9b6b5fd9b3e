"""Adapter of Flax Linen modules.

Mutable statistics, such as those of batch norm, are kept beside the parameters in `Variables`: training updates them
and evaluation reads them.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError
from fedrax.inputs import Inputs, arrays_of, as_arguments, map_inputs
from fedrax.models.adapters.modules import (
    Arguments,
    ModuleFunction,
    explain_axis_errors,
    library,
    make_model,
    mode_arguments,
)

_MAX_CONSTANT_BYTES = 1 << 20
"""Larger collections that never change are statistics: constants are embedded in every program of the model."""


@checked_arguments
def from_linen(
    module: Any,
    sample_input: Any,
    *,
    features: ModuleFunction | None = None,
    blocks: Sequence[ModuleFunction] = (),
) -> Model:
    """Convert a Flax Linen module, which maps a batch [B, ...] to outputs [B, ...], to a model.

    Several inputs of a sample are keyword arguments of ``__call__`` (a dictionary) or positional ones (a tuple).
    The collection "params" holds the parameters. Other collections, such as "batch_stats", are running statistics.
    There are two exceptions: collections that grow with every call (sown intermediates) are dropped, and those that
    training does not change and that are the same for every key are constants. An argument ``train``,
    ``deterministic`` or another common name for the mode is set to training or evaluation. A key feeds "dropout" and
    all other random streams.

    Args:
        module: An instance of a Linen module.
        sample_input: A batch [B, ...] as the data set stores it, an array or several inputs; only its shape and dtype
            matter.
        features: Method name or function (module, x) that gives the input of the last layer.
        blocks: Method names or functions (module, x) that ``__call__`` applies one after the other.

    Returns:
        The model; its parameters are `Variables` if there are running statistics.

    Raises:
        FedraxError: Flax is not installed, a method is missing, the module does not accept ``sample_input``, it
            updates statistics or draws random numbers in evaluation, or a mode argument of unknown name prevents
            either in training.

    Example:
        >>> from flax import linen
        >>> model = fedrax.models.from_linen(linen.Dense(2), jnp.ones((1, 3)))
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape
        (5, 2)
    """
    _check_instance(module, library("flax.linen", "flax"))
    errors, meta = importlib.import_module("flax.errors"), importlib.import_module("flax.core.meta")
    call, sample = type(module).__call__, _batch(sample_input)
    arguments = as_arguments(sample)
    training, evaluation = mode_arguments(call, train=True), mode_arguments(call, train=False)

    @jax.jit  # one trace for shapes and values
    def variables_of(key: Array) -> dict[str, Any]:
        # Partitioning metadata is removed: devices are assigned to clients, not to slices of parameters.
        return meta.unbox(module.init({"params": key}, *arguments[0], **arguments[1], **evaluation))

    try:
        # The matmul precision of a run, so that the run finds this trace in the cache.
        with jax.default_matmul_precision("highest"), explain_axis_errors(type(module)):
            shapes = jax.eval_shape(variables_of, jax.random.key(0))
            collections, unchanged = _mutable_collections(module, shapes, arguments, training)
    except (errors.FlaxError, TypeError, ValueError) as error:
        example = ", ".join(f"{a.dtype} {list(a.shape)}" for a in arrays_of(sample))
        raise FedraxError(
            f"{type(module).__name__} cannot be initialized with a batch {example}: {_first_line(error)}"
        ) from error
    constants = _equal_for_all_keys(variables_of, unchanged)
    collections = [name for name in collections if name not in constants]

    def init(key: Array) -> Params:
        variables = variables_of(key)
        params = variables.get("params", {})
        return Variables(params, {name: variables[name] for name in collections}) if collections else params

    def run(method: Callable, variables: Any, arguments: Arguments, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if collections else (variables, {})
        # Flax derives any other random stream from "params".
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        args, options = arguments[0], {"rngs": rngs, "method": method, **arguments[1], **mode_arguments(method, train)}
        together = {"params": params, **constants, **statistics}
        with _explain_flax_errors(module, errors):
            if not (collections and train):
                return module.apply(together, *args, **options), statistics
            outputs, updated = module.apply(together, *args, mutable=collections, **options)
            return outputs, {**statistics, **updated}

    if collections:
        known = {name: shapes[name] for name in shapes if name in ("params", *collections)}
        with _explain_flax_errors(module, errors):
            args, named = arguments
            jax.eval_shape(lambda v: module.apply({**constants, **v}, *args, **named, **evaluation), known)
    return make_model(type(module), init, run, features, blocks, has_statistics=bool(collections))


def _check_instance(module: Any, linen: ModuleType) -> None:
    """Raise FedraxError for a class or factory in place of a module instance."""
    if not isinstance(module, linen.Module):
        made = getattr(module, "func", module)  # of a functools.partial
        name = made.__name__ if isinstance(made, type) else None
        what = type(module).__name__ if name is None else f"the class {name}: give {name}(...)"
        raise FedraxError(f"from_linen takes an instance of a Linen module, not {what}")


def _batch(sample_input: Any) -> Inputs:
    """The sample input as an array, or as several; raises FedraxError if it is none."""
    try:
        return map_inputs(jnp.asarray, sample_input)
    except (TypeError, ValueError) as error:
        what = type(sample_input).__name__
        raise FedraxError(
            "from_linen takes as sample_input a batch in the form of the data set, an array [B, ...] or a dictionary or"
            f" tuple of arrays, not a {what}"
        ) from error


def _mutable_collections(
    module: Any, shapes: Any, arguments: Arguments, training: dict[str, bool]
) -> tuple[list[str], list[str]]:
    """(names of the mutable collections, names of those that a training call does not change).

    The latter never include batch norm's statistics.
    """
    names = [name for name in shapes if name != "params"]
    if not names:
        return [], []

    def called(variables: Any, key: Array) -> Any:
        options = {"mutable": names, "rngs": {"dropout": key, "params": key}, **arguments[1], **training}
        updated = module.apply(variables, *arguments[0], **options)[1]
        return {name: updated.get(name, variables[name]) for name in names}

    made, shape = jax.make_jaxpr(called, return_shape=True)(shapes, jax.random.key(0))
    before = jax.tree.unflatten(jax.tree.structure(shapes), made.jaxpr.invars[:-1])  # the last one is the key
    after = jax.tree.unflatten(jax.tree.structure(shape), made.jaxpr.outvars)
    mutable = [name for name in names if jax.tree.structure(after[name]) == jax.tree.structure(shapes[name])]

    def changes(name: str) -> bool:
        return any(a is not b for a, b in zip(*map(jax.tree.leaves, (before[name], after[name])), strict=True))

    return mutable, [name for name in mutable if name != "batch_stats" and not changes(name)]


def _equal_for_all_keys(variables_of: Callable[[Array], dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The small collections that have the same values for two keys, and so presumably for all."""
    if not names:
        return {}
    init = jax.jit(lambda key: {name: variables_of(key)[name] for name in names})
    one, other = init(jax.random.key(0)), init(jax.random.key(1))

    def same(name: str) -> bool:
        leaves = jax.tree.leaves(one[name])
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
            return False
        small = sum(leaf.nbytes for leaf in leaves) <= _MAX_CONSTANT_BYTES
        return small and all(map(np.array_equal, leaves, jax.tree.leaves(other[name])))

    return {name: one[name] for name in names if same(name)}


@contextmanager
def _explain_flax_errors(module: Any, errors: ModuleType) -> Iterator[None]:
    """Convert Flax's errors to FedraxError with a remedy."""
    name = type(module).__name__
    try:
        yield
    except errors.InvalidRngError as error:
        raise FedraxError(
            f"{name} draws random numbers in evaluation too ({_first_line(error)}): give its __call__ an argument"
            " train, and draw them only if it is true"
        ) from error
    except errors.ModifyScopeVariableError as error:
        raise FedraxError(
            f"{name} updates its statistics in evaluation too: give its __call__ an argument train, and its layers"
            " use_running_average=not train"
        ) from error
    except errors.FlaxError as error:
        raise FedraxError(f"{name} cannot be computed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """The first line of an error, without Flax's link to its documentation."""
    return str(error).strip().split("\n")[0].split(" (https://")[0].rstrip(".")
