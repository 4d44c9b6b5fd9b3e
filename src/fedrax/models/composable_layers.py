"""Layers with parameters and running statistics as pairs of pure functions, and their composition to networks.

A `Layer` keeps running statistics apart from parameters; `build_network` makes a `Model` of a sequence of layers.
Images are [B, H, W, C]. Parameters are initialized as those of PyTorch's layers.
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
"""No normalization; group norm (Wu and He 2018), the same in training and evaluation; or batch norm."""

MOMENTUM = 0.1
"""Weight of a batch in batch norm's running statistics, as in PyTorch."""
EPSILON = 1e-5
"""Added to variances, as in PyTorch."""


class Mode(NamedTuple):
    """Training or evaluation mode, and the random key of a call."""

    train: bool
    """Whether batch norm uses and updates the statistics of the batch, and dropout is active."""
    key: Array | None
    """Random key of dropout; None for no dropout."""

    def for_layer(self, index: int) -> Mode:
        """The mode with the key of the layer at ``index`` of a sequence."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, index))


class Layer(NamedTuple):
    """A layer of a network, or a composition of layers."""

    init: Callable[[Array], tuple[dict, dict]]
    """key -> (parameters, statistics), by name; empty dictionaries for none."""
    apply: Callable[[dict, dict, Array, Mode], tuple[Array, dict]]
    """(parameters, statistics, x, mode) -> (outputs, new statistics)."""


def stateless(apply: Callable[[Array], Array]) -> Layer:
    """A layer without parameters."""
    return Layer(lambda key: ({}, {}), lambda params, statistics, x, mode: (apply(x), {}))


def sequential(**members: Layer) -> Layer:
    """Layers applied one after the other; their names are the keys of the parameters."""

    def init(key: Array) -> tuple[dict, dict]:
        keys = jax.random.split(key, len(members))
        variables = {name: layer.init(k) for k, (name, layer) in zip(keys, members.items(), strict=True)}
        params, statistics = ({name: v[i] for name, v in variables.items() if v[i]} for i in (0, 1))
        return params, statistics

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        updated = {}
        for index, (name, layer) in enumerate(members.items()):
            x, new = layer.apply(params.get(name, {}), statistics.get(name, {}), x, mode.for_layer(index))
            updated |= {name: new} if new else {}
        return x, updated

    return Layer(init, apply)


def residual(body: Layer, shortcut: Layer) -> Layer:
    """relu(body(x) + shortcut(x)) (He et al. 2016)."""
    branches = {"body": body, "shortcut": shortcut}

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        outputs, updated = [], {}
        for index, (name, layer) in enumerate(branches.items()):
            y, new = layer.apply(params.get(name, {}), statistics.get(name, {}), x, mode.for_layer(index))
            outputs.append(y)
            updated |= {name: new} if new else {}
        return jax.nn.relu(outputs[0] + outputs[1]), updated

    return Layer(sequential(**branches).init, apply)


def dense(inputs: int, units: int) -> Layer:
    """A dense layer on x [B, ...], flattened: weight [inputs, units] and bias [units]."""
    return Layer(
        lambda key: (init_dense(key, inputs, units), {}),
        lambda params, statistics, x, mode: (layers.dense(params, layers.flatten(x)), {}),
    )


def conv(channels: int, filters: int, side: int = 3, stride: int = 1, padding: int = 0, bias: bool = True) -> Layer:
    """A convolution with square kernels on images [B, H, W, channels]."""

    def init(key: Array) -> tuple[dict, dict]:
        layer = init_conv(key, (side, side, channels, filters))
        return (layer if bias else {"weight": layer["weight"]}), {}

    return Layer(init, lambda params, statistics, x, mode: (layers.conv2d(params, x, stride, padding), {}))


def norm(kind: Norm, channels: int, groups: int = 8) -> Layer:
    """Normalization of x [B, ..., channels], with a scale, initially one, and a bias, initially zero, per channel.

    Group norm uses the mean and variance over the positions and a group of channels of each sample. Batch norm uses
    those of each channel over samples and positions in training, and running statistics in evaluation.
    """
    if kind == "none":
        return stateless(lambda x: x)
    if kind == "group" and channels % groups:
        raise FedraxError(
            f"group norm cannot split {channels} channels into {groups} groups: set groups to a divisor of the channels"
        )

    def init(key: Array) -> tuple[dict, dict]:
        zeros, ones = jnp.zeros(channels), jnp.ones(channels)
        return {"scale": ones, "bias": zeros}, {"mean": zeros, "var": ones} if kind == "batch" else {}

    def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
        if kind == "group":
            return scaled(_group_normalized(x, groups), params), {}
        mean, var = statistics["mean"], statistics["var"]
        if mode.train:
            axes, count = tuple(range(x.ndim - 1)), x.size // channels
            mean, var = x.mean(axes), x.var(axes)
            unbiased = {"mean": mean, "var": var * (count / max(count - 1, 1))}
            statistics = jax.tree.map(lambda old, new: old + MOMENTUM * (new - old), statistics, unbiased)
        return scaled((x - mean) * lax.rsqrt(var + EPSILON), params), statistics

    def scaled(x: Array, params: dict) -> Array:
        return x * params["scale"] + params["bias"]

    return Layer(init, apply)


def _group_normalized(x: Array, groups: int) -> Array:
    """Group norm without scale and bias."""
    grouped = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    mean, var = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    return ((grouped - mean) * lax.rsqrt(var + EPSILON)).reshape(x.shape)


def relu() -> Layer:
    """max(x, 0)."""
    return stateless(jax.nn.relu)


def max_pool(side: int = 2, padding: int = 0) -> Layer:
    """Max pooling of ``side`` x ``side`` windows with stride 2; incomplete windows are dropped."""
    return stateless(lambda x: layers.max_pool(x, side, padding))


def global_mean_pool() -> Layer:
    """The mean over all positions: [B, H, W, C] -> [B, C]."""
    return stateless(lambda x: x.mean((1, 2)))


def dropout(rate: float) -> Layer:
    """Dropout, in training with a key."""
    if not 0 <= rate < 1:
        raise FedraxError(f"a dropout rate must be in [0, 1), not {rate}")
    return Layer(
        lambda key: ({}, {}),
        lambda params, statistics, x, mode: (layers.dropout(x, rate, mode.key if mode.train else None), {}),
    )


def add_channel_axis() -> Layer:
    """[B, H, W] or [B, H, W, C] -> [B, H, W, C]."""
    return stateless(layers.add_channel_axis)


def build_network(name: str, blocks: dict[str, Layer], num_features: int, num_outputs: int) -> Model:
    """A model that applies ``blocks`` one after the other and a dense layer "output" to their flattened outputs."""
    if num_features < 1 or num_outputs < 1:
        raise FedraxError(f"{name} needs positive sizes, not {num_features} features and {num_outputs} outputs")
    top = Layer(
        lambda key: (init_output(key, num_features, num_outputs), {}),
        lambda params, statistics, x, mode: (layers.output(params, layers.flatten(x)), {}),
    )
    body, whole = sequential(**blocks), sequential(**blocks, output=top)
    words = jax.ShapeDtypeStruct((2,), jnp.uint32)  # an abstract key: building a model must not initialize devices
    has_statistics = bool(jax.eval_shape(lambda w: whole.init(jax.random.wrap_key_data(w)), words)[1])

    def init(key: Array) -> Params:
        params, statistics = whole.init(key)
        return Variables(params, statistics) if has_statistics else params

    def run(layer: Layer, variables: Any, x: Array, key: Array | None) -> tuple[Array, dict]:
        params, statistics = variables if has_statistics else (variables, {})
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(params["output"]["weight"].dtype)
        return layer.apply(params, statistics, x, Mode(key is not None, key))

    def block(index: int, name: str, layer: Layer) -> Callable:
        """One block of the model, which derives its key from that of the whole model."""

        def apply(params: dict, statistics: dict, x: Array, mode: Mode) -> tuple[Array, dict]:
            return layer.apply(params.get(name, {}), statistics.get(name, {}), x, mode.for_layer(index))

        alone = Layer(layer.init, apply)
        return lambda variables, x, key=None: run(alone, variables, x, key)[0]

    all_blocks = {**blocks, "output": top}
    return Model(
        init,
        lambda variables, x, key=None: run(whole, variables, x, key)[0],
        lambda variables, x, key=None: layers.flatten(run(body, variables, x, key)[0]),
        name,
        tuple(block(index, *item) for index, item in enumerate(all_blocks.items())),
        (lambda variables, x, key: run(whole, variables, x, key)) if has_statistics else None,
        reads_amounts=True,
    )


def image_shape(name: str, shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """(height, width, channels) of images [H, W] or [H, W, C]; raises FedraxError for other shapes."""
    if len(shape) not in (2, 3) or min(shape[:2]) < smallest:
        raise FedraxError(
            f"{name} takes images (height, width) or (height, width, channels) "
            f"of at least {smallest}x{smallest} pixels, not inputs of shape {tuple(shape)}"
        )
    return shape[0], shape[1], shape[2] if len(shape) == 3 else 1
