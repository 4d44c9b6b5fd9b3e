"""Parts that deep networks are put together of: convolutions, pooling, norms, and ways to join them.

A `Part` is a pair of pure functions that knows its running statistics apart from its parameters; `network` makes a
`Model` of a series of parts. Images are [B, H, W, C]. Parameters start as PyTorch's layers do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.contract.model import Model, Params, Variables
from fedrax.errors import FedraxError
from fedrax.models import layers
from fedrax.models.layers import init_conv, init_dense, init_output

Norm = Literal["none", "group", "batch"]
"""No norm; group norm (Wu and He 2018), alike in training and evaluation; or batch norm with running statistics."""

MOMENTUM = 0.1
"""What a batch weighs in batch norm's running statistics, as in PyTorch."""
EPSILON = 1e-5


class Mode(NamedTuple):
    """How a network is run."""

    train: bool
    key: Array | None
    """Feeds dropout; None where nothing is dropped."""

    def at(self, place: int) -> Mode:
        """The same with a key of its own for the part at ``place``."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, place))


class Part(NamedTuple):
    """A part of a network."""

    init: Callable[[Array], tuple[dict, dict]]
    """key -> (parameters, statistics), by name; nothing is an empty dictionary."""
    apply: Callable[[dict, dict, Array, Mode], tuple[Array, dict]]
    """(parameters, statistics, x, mode) -> (outputs, new statistics)."""


def function(apply: Callable[[Array], Array]) -> Part:
    """A part without parameters."""
    return Part(lambda key: ({}, {}), lambda params, statistics, x, mode: (apply(x), {}))


def series(**parts: Part) -> Part:
    """Parts one after the other, by name."""

    def init(key: Array) -> tuple[dict, dict]:
        keys = jax.random.split(key, len(parts))
        made = {name: part.init(k) for k, (name, part) in zip(keys, parts.items(), strict=True)}
        return {n: m[0] for n, m in made.items() if m[0]}, {n: m[1] for n, m in made.items() if m[1]}

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        moved = {}
        for place, (name, part) in enumerate(parts.items()):
            x, new = part.apply(params.get(name, {}), statistics.get(name, {}), x, mode.at(place))
            moved |= {name: new} if new else {}
        return x, moved

    return Part(init, apply)


def residual(body: Part, shortcut: Part) -> Part:
    """relu(body(x) + shortcut(x)) (He et al. 2016)."""
    both = {"body": body, "shortcut": shortcut}

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        outputs, moved = [], {}
        for place, (name, part) in enumerate(both.items()):
            y, new = part.apply(params.get(name, {}), statistics.get(name, {}), x, mode.at(place))
            outputs.append(y)
            moved |= {name: new} if new else {}
        return jax.nn.relu(outputs[0] + outputs[1]), moved

    return Part(series(**both).init, apply)


def dense(inputs: int, units: int) -> Part:
    """x [B, ...] flattened, times a weight [inputs, units], plus a bias."""
    return Part(
        lambda key: (init_dense(key, inputs, units), {}),
        lambda params, statistics, x, mode: (layers.dense(params, layers.flatten(x)), {}),
    )


def conv(channels: int, filters: int, side: int = 3, stride: int = 1, padding: int = 0, bias: bool = True) -> Part:
    """Square kernels on images [B, H, W, channels]."""

    def init(key: Array) -> tuple[dict, dict]:
        layer = init_conv(key, (side, side, channels, filters))
        return (layer if bias else {"weight": layer["weight"]}), {}

    return Part(init, lambda params, statistics, x, mode: (layers.conv2d(params, x, stride, padding), {}))


def norm(kind: Norm, channels: int, groups: int = 8) -> Part:
    """A norm over the last axis of x [B, ..., channels], with a scale (ones) and a bias (zeros) a channel.

    Group norm: mean and variance of each sample over positions and a group of channels. Batch norm: of each channel
    over samples and positions in training, its running statistics in evaluation.
    """
    if kind == "none":
        return function(lambda x: x)
    if kind == "group" and channels % groups:
        raise FedraxError(f"group norm cannot cut {channels} channels into {groups} groups.")

    def init(key: Array) -> tuple[dict, dict]:
        zeros, ones = jnp.zeros(channels), jnp.ones(channels)
        return {"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones} if kind == "batch" else {}

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        if kind == "group":
            return scaled(_group_normal(x, groups), params), {}
        mean, var = statistics["mean"], statistics["var"]
        if mode.train:
            axes, count = tuple(range(x.ndim - 1)), x.size // channels
            mean, var = x.mean(axes), x.var(axes)
            seen = {"mean": mean, "var": var * (count / max(count - 1, 1))}
            statistics = jax.tree.map(lambda old, new: old + MOMENTUM * (new - old), statistics, seen)
        return scaled((x - mean) * lax.rsqrt(var + EPSILON), params), statistics

    def scaled(x: Array, params: dict) -> Array:
        return x * params["scale"] + params["bias"]

    return Part(init, apply)


def _group_normal(x: Array, groups: int) -> Array:
    grouped = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, var = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    return ((grouped - mean) * lax.rsqrt(var + EPSILON)).reshape(x.shape)


def relu() -> Part:
    """max(x, 0)."""
    return function(jax.nn.relu)


def pool(side: int = 2, padding: int = 0) -> Part:
    """Max pooling of ``side`` x ``side`` with stride 2; what is left of a window at the end is left out."""
    return function(lambda x: layers.max_pool(x, side, padding))


def mean_pool() -> Part:
    """The mean over all positions: [B, H, W, C] -> [B, C]."""
    return function(lambda x: x.mean((1, 2)))


def drop(rate: float) -> Part:
    """Dropout, in training with a key."""
    if not 0 <= rate < 1:
        raise FedraxError(f"a dropout rate must lie in [0, 1), not {rate}.")
    return Part(
        lambda key: ({}, {}),
        lambda params, statistics, x, mode: (layers.dropout(x, rate, mode.key if mode.train else None), {}),
    )


def images() -> Part:
    """[B, H, W] or [B, H, W, C] -> [B, H, W, C]."""
    return function(layers.images)


def network(name: str, blocks: dict[str, Part], num_features: int, num_outputs: int) -> Model:
    """A model of ``blocks`` one after the other, with a dense layer "output" on their flattened outputs."""
    if num_features < 1 or num_outputs < 1:
        raise FedraxError(f"{name} needs positive sizes, not {num_features} features, {num_outputs} outputs.")
    top = Part(
        lambda key: (init_output(key, num_features, num_outputs), {}),
        lambda params, statistics, x, mode: (layers.output(params, layers.flatten(x)), {}),
    )
    body, whole = series(**blocks), series(**blocks, output=top)
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)  # abstract: building a model starts no device
    has_statistics = bool(jax.eval_shape(lambda w: whole.init(jax.random.wrap_key_data(w)), words)[1])

    def init(key: Array) -> Params:
        params, statistics = whole.init(key)
        return Variables(params, statistics) if has_statistics else params

    def run(part: Part, variables: Any, x: Array, key: Array | None) -> tuple[Array, dict]:
        params, statistics = variables if has_statistics else (variables, {})
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(params["output"]["weight"].dtype)
        return part.apply(params, statistics, x, Mode(key is not None, key))

    def block(place: int, name: str, part: Part) -> Callable:
        """The block alone; what it is given is the key of the whole, as in one run of all."""
        alone = Part(part.init, lambda p, s, x, m: part.apply(p.get(name, {}), s.get(name, {}), x, m.at(place)))
        return lambda variables, x, key=None: run(alone, variables, x, key)[0]

    parts = {**blocks, "output": top}
    return Model(
        init,
        lambda variables, x, key=None: run(whole, variables, x, key)[0],
        lambda variables, x, key=None: layers.flatten(run(body, variables, x, key)[0]),
        name,
        tuple(block(place, *pair) for place, pair in enumerate(parts.items())),
        (lambda variables, x, key: run(whole, variables, x, key)) if has_statistics else None,
        reads_amounts=True,
    )


def image_shape(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """(height, width, channels) of images [H, W] or [H, W, C]; FedraxError for anything else."""
    if len(shape) not in (2, 3) or min(shape[:2]) < smallest:
        raise FedraxError(
            f"{name} reads images (height, width) or (height, width, channels) "
            f"of at least {smallest}x{smallest} pixels, not inputs of shape {tuple(shape)}."
        )
    return shape[0], shape[1], shape[2] if len(shape) == 3 else 1
