"""Models users bring: Flax Linen, Flax NNX and Equinox modules as pairs of pure functions.

Modules that carry mutable statistics (batch norm) are refused: a pure `apply` has nowhere to put them,
and averaging them over heterogeneous clients is what group norm was made to avoid.
"""

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
from jax import Array

from fedrax.errors import FedraxError
from fedrax.models.model import Model, Params


def from_linen(module: Any, sample_input: Array) -> Model:
    """A Flax Linen module that maps a batch [B, ...] to outputs [B, ...]; `sample_input` is such a batch.

    Parameters are the collection "params". Where the module's `__call__` has an argument `train`,
    `training` or `deterministic`, it is set by whether a key is given; the key feeds "dropout".
    """
    _import("flax.linen", "flax")
    mode = [a for a in inspect.signature(type(module).__call__).parameters if a in _TRAINING | _INFERENCE]

    def mode_arguments(key: Array | None) -> dict[str, bool]:
        return {a: (key is not None) == (a in _TRAINING) for a in mode}

    def init(key: Array) -> Params:
        variables = module.init({"params": key}, sample_input, **mode_arguments(None))
        _refuse_state(set(variables) - {"params"})
        return variables.get("params", {})

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        rngs = None if key is None else {"dropout": key}
        return module.apply({"params": params}, x, rngs=rngs, **mode_arguments(key))

    return Model(init, apply, name=type(module).__name__)


def from_nnx(module: Any) -> Model:
    """A Flax NNX module, or a function `nnx.Rngs -> module`, that maps a batch [B, ...] to outputs.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Without a key the module runs in its evaluation mode, with one in its training mode.
    """
    nnx = _import("flax.nnx", "flax")
    create: Callable = (lambda rngs: module) if isinstance(module, nnx.Module) else module
    example = create(nnx.Rngs(0))
    graph, template, other = nnx.split(example, nnx.Param, ...)
    kinds = jax.tree.leaves(other, is_leaf=lambda v: isinstance(v, nnx.Variable))
    _refuse_state({type(v).__name__ for v in kinds if not isinstance(v, nnx.RngState)})

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(create(nnx.Rngs(key)), nnx.Param))

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        values = jax.tree.map(lambda v: v, template)  # a fresh copy: filling it must not touch the template
        nnx.replace_by_pure_dict(values, params)
        network = nnx.merge(graph, values, other, copy=True)
        if key is None:
            network.eval()
        else:
            network.train()
            nnx.reseed(network, default=key, dropout=key)
        return network(x)

    return Model(init, apply, name=type(example).__name__)


def from_equinox(module: Any) -> Model:
    """An Equinox module, or a function `key -> module`, that maps one sample; it is vmapped over the batch.

    A module's own values are the start, whatever the key of `init`; a function gives a start for each key.
    Parameters are the module's floating-point arrays. Where its `__call__` has an argument `key`, each
    sample gets its own; without a key the module runs in inference mode.
    """
    equinox = _import("equinox", "equinox")
    create: Callable = (lambda key: module) if isinstance(module, equinox.Module) else module
    example = create(jax.random.key(0))
    parts = jax.tree.leaves(example, is_leaf=lambda v: isinstance(v, equinox.nn.StateIndex))
    _refuse_state({"StateIndex" for v in parts if isinstance(v, equinox.nn.StateIndex)})
    _, static = equinox.partition(example, equinox.is_inexact_array)
    takes_key = "key" in inspect.signature(type(example).__call__).parameters

    def init(key: Array) -> Params:
        return equinox.filter(create(key), equinox.is_inexact_array)

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        network = equinox.combine(params, static)
        if key is None:
            return jax.vmap(equinox.nn.inference_mode(network))(x)
        if not takes_key:
            return jax.vmap(network)(x)
        keys = jax.random.split(key, x.shape[0])
        return jax.vmap(lambda sample, k: network(sample, key=k))(x, keys)

    return Model(init, apply, name=type(example).__name__)


_TRAINING = {"train", "training"}
_INFERENCE = {"deterministic"}


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedraxError(f"this model needs {package}: pip install 'fedrax[{package}]'.") from None


def _refuse_state(kinds: set[str]) -> None:
    if kinds:
        raise FedraxError(
            f"the module keeps mutable state ({', '.join(sorted(kinds))}), which fedrax does not carry; "
            "use a layer without running statistics, such as group norm, instead of batch norm."
        )
