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

from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError
from fedrax.models.adapters.modules import Part, library, model_of, modes, told_of_axes

_LARGEST = 1 << 20
"""Most bytes of a constant, which is embedded in every program of the model. Larger ones become statistics."""


def from_linen(
    module: Any, sample_input: Array | np.ndarray, *, features: Part | None = None, blocks: Sequence[Part] = ()
) -> Model:
    """Convert a Flax Linen module, which maps a batch [B, ...] to outputs [B, ...], to a model.

    The collection "params" holds the parameters. Other collections, such as "batch_stats", are running statistics.
    There are two exceptions: collections that grow with every call (sown intermediates) are dropped, and those that
    training does not change and that are the same for every key are constants. An argument ``train``,
    ``deterministic`` or another common name for the mode is set to training or evaluation. A key feeds "dropout" and
    all other random streams.

    Args:
        module: An instance of a Linen module.
        sample_input: A batch [B, ...] as the data set stores it; only its shape and dtype matter.
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
    training, evaluation = modes(call, train=True), modes(call, train=False)

    @jax.jit  # for its shapes, and for the start: traced once
    def variables_of(key: Array) -> dict[str, Any]:
        # without the names of axes that parameters are partitioned by: the devices share out clients instead
        return meta.unbox(module.init({"params": key}, sample, **evaluation))

    try:
        # in a run's precision, so that its trace is found again
        with jax.default_matmul_precision("highest"), told_of_axes(type(module)):
            shapes = jax.eval_shape(variables_of, jax.random.key(0))
            collections, still = _that_stay(module, shapes, sample, training)
    except (errors.FlaxError, TypeError, ValueError) as error:
        example = f"{sample.dtype} {list(sample.shape)}"
        raise FedraxError(f"{type(module).__name__} cannot be begun with a batch {example}: {_said(error)}") from error
    constants = _alike(variables_of, still)
    collections = [name for name in collections if name not in constants]

    def init(key: Array) -> Params:
        variables = variables_of(key)
        params = variables.get("params", {})
        return Variables(params, {name: variables[name] for name in collections}) if collections else params

    def run(method: Callable, variables: Any, x: Array, key: Array | None, train: bool) -> tuple[Any, Any]:
        params, statistics = variables if collections else (variables, {})
        # what asks for a stream that is not there gets one made of "params"
        rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
        options = {"rngs": rngs, "method": method, **modes(method, train)}
        together = {"params": params, **constants, **statistics}
        with _told_of_flax(module, errors):
            if not (collections and train):
                return module.apply(together, x, **options), statistics
            outputs, moved = module.apply(together, x, mutable=collections, **options)
            return outputs, {**statistics, **moved}

    if collections:
        known = {name: shapes[name] for name in shapes if name in ("params", *collections)}
        with _told_of_flax(module, errors):
            jax.eval_shape(lambda v: module.apply({**constants, **v}, sample, **evaluation), known)
    return model_of(type(module), init, run, features, blocks, has_statistics=bool(collections))


def _check_instance(module: Any, linen: ModuleType) -> None:
    """Raise FedraxError for a class or factory in place of a module instance."""
    if not isinstance(module, linen.Module):
        made = getattr(module, "func", module)  # of a functools.partial
        name = made.__name__ if isinstance(made, type) else None
        what = type(module).__name__ if name is None else f"the class {name}: give {name}(...)"
        raise FedraxError(f"from_linen takes an instance of a Linen module, not {what}")


def _batch(sample_input: Any) -> Array:
    try:
        return jnp.asarray(sample_input)
    except (TypeError, ValueError) as error:
        what = type(sample_input).__name__
        raise FedraxError(
            f"from_linen begins a module with a batch as data sets store it, an array [B, ...], not a {what}: a module"
            " with several inputs takes its parts of x"
        ) from error


def _that_stay(module: Any, shapes: Any, x: Any, training: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The names of the mutable collections, and of those that a training call leaves unchanged.

    Batch norm's statistics are never among the latter, whether they changed or not: they belong to trained parameters.
    """
    names = [name for name in shapes if name != "params"]
    if not names:
        return [], []

    def called(variables: Any, key: Array) -> Any:
        moved = module.apply(variables, x, mutable=names, rngs={"dropout": key, "params": key}, **training)[1]
        return {name: moved.get(name, variables[name]) for name in names}

    made, shape = jax.make_jaxpr(called, return_shape=True)(shapes, jax.random.key(0))
    before = jax.tree.unflatten(jax.tree.structure(shapes), made.jaxpr.invars[:-1])  # the last one is the key
    after = jax.tree.unflatten(jax.tree.structure(shape), made.jaxpr.outvars)
    stay = [name for name in names if jax.tree.structure(after[name]) == jax.tree.structure(shapes[name])]

    def moves(name: str) -> bool:
        return any(a is not b for a, b in zip(*map(jax.tree.leaves, (before[name], after[name])), strict=True))

    return stay, [name for name in stay if name != "batch_stats" and not moves(name)]


def _alike(variables_of: Callable[[Array], dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """The collections that have the same values for every key."""
    if not names:
        return {}
    begin = jax.jit(lambda key: {name: variables_of(key)[name] for name in names})
    one, other = begin(jax.random.key(0)), begin(jax.random.key(1))

    def same(name: str) -> bool:
        leaves = jax.tree.leaves(one[name])
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves):
            return False
        small = sum(leaf.nbytes for leaf in leaves) <= _LARGEST
        return small and all(map(np.array_equal, leaves, jax.tree.leaves(other[name])))

    return {name: one[name] for name in names if same(name)}


@contextmanager
def _told_of_flax(module: Any, errors: ModuleType) -> Iterator[None]:
    """Convert Flax's errors to FedraxError with a remedy."""
    name = type(module).__name__
    try:
        yield
    except errors.InvalidRngError as error:
        raise FedraxError(
            f"{name} draws random numbers in evaluation too ({_said(error)}): give its __call__ an argument train, and"
            " draw them only where it is true."
        ) from error
    except errors.ModifyScopeVariableError as error:
        raise FedraxError(
            f"{name} moves its statistics in evaluation too: give its __call__ an argument train, and its layers"
            " use_running_average=not train."
        ) from error
    except errors.FlaxError as error:
        raise FedraxError(f"{name} cannot be computed: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The first line of an error, without Flax's link to its documentation."""
    return str(error).strip().split("\n")[0].split(" (https://")[0].rstrip(".")
