"""Models of W5 to W11 and G1 to G6 in Flax Linen, as a user writes them, and PyTorch's weights as their parameters.

fedrax uses them by its adapter, FedJAX as functions. Layers have PyTorch's names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from benchmarks.workloads import Workload

HEADS = 4


class ConvNet(nn.Module):
    """3x3 convolutions, each with group norm and max pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate((32, 64, 128)):
            x = nn.Conv(width, (3, 3), name=f"convs_{i}")(x)
            x = nn.relu(nn.GroupNorm(num_groups=8, name=f"norms_{i}")(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(10, name="fc")(x.mean((1, 2)))


class Residual(nn.Module):
    """A residual block of two 3x3 convolutions; it halves the image if the width grows."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        grows = x.shape[-1] != self.width
        strides = 2 if grows else 1
        y = nn.Conv(self.width, (3, 3), strides, padding=1, use_bias=False, name="conv1")(x)
        y = nn.relu(nn.GroupNorm(num_groups=8, name="norm1")(y))
        y = nn.Conv(self.width, (3, 3), padding=1, use_bias=False, name="conv2")(y)
        y = nn.GroupNorm(num_groups=8, name="norm2")(y)
        if grows:
            x = nn.Conv(self.width, (1, 1), strides, use_bias=False, name="shortcut")(x)
            x = nn.GroupNorm(num_groups=8, name="shortcut_norm")(x)
        return nn.relu(x + y)


class ResNet20(nn.Module):
    """He et al.'s network of 20 layers for small images, with group norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(16, (3, 3), padding=1, use_bias=False, name="stem")(x)
        x = nn.relu(nn.GroupNorm(num_groups=8, name="stem_norm")(x))
        for i, width in enumerate((16, 16, 16, 32, 32, 32, 64, 64, 64)):
            x = Residual(width, name=f"blocks_{i}")(x)
        return nn.Dense(10, name="fc")(x.mean((1, 2)))


class NextSymbol(nn.Module):
    """An embedding and a GRU, whose last hidden state predicts the next symbol."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(90, 128, name="embedding")(x)
        hidden: Any = nn.RNN(nn.GRUCell(128, name="gru"))(x)
        return nn.Dense(90, name="fc")(hidden[:, -1])


class Block(nn.Module):
    """A transformer block: norm, attention, norm, two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        x = x + nn.MultiHeadDotProductAttention(HEADS, name="self_attn")(nn.LayerNorm(name="norm1")(x))
        y = nn.Dense(2 * width, name="linear1")(nn.LayerNorm(name="norm2")(x))
        return x + nn.Dense(width, name="linear2")(nn.gelu(y))


class VisionTransformer(nn.Module):
    """Vision transformer: patches of 4x4, learned positions, four blocks, mean pooling."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(128, (4, 4), strides=4, name="patches")(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for i in range(4):
            x = Block(name=f"blocks_{i}")(x)
        return nn.Dense(10, name="fc")(nn.LayerNorm(name="norm")(x).mean(1))


class Separable(nn.Module):
    """A depthwise 3x3 convolution and a 1x1 convolution, each with group norm."""

    width: int
    strides: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        x = nn.Conv(
            channels,
            (3, 3),
            self.strides,
            padding=1,
            feature_group_count=channels,
            use_bias=False,
            name="depthwise",
        )(x)
        x = nn.relu(nn.GroupNorm(num_groups=8, name="norm1")(x))
        x = nn.Conv(self.width, (1, 1), use_bias=False, name="pointwise")(x)
        return nn.relu(nn.GroupNorm(num_groups=8, name="norm2")(x))


class MobileNet(nn.Module):
    """Five depthwise-separable blocks."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(32, (3, 3), padding=1, use_bias=False, name="stem")(x)
        x = nn.relu(nn.GroupNorm(num_groups=8, name="stem_norm")(x))
        for i, (width, strides) in enumerate(((64, 1), (128, 2), (128, 1), (256, 2), (256, 1))):
            x = Separable(width, strides, name=f"blocks_{i}")(x)
        return nn.Dense(10, name="fc")(x.mean((1, 2)))


class MLP(nn.Module):
    """Two hidden layers of 64."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(64, name="fc1")(x))
        x = nn.relu(nn.Dense(64, name="fc2")(x))
        return nn.Dense(5, name="fc3")(x)


class SmallConvNet(nn.Module):
    """Two 3x3 convolutions, max pooling and two dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate((32, 64)):
            x = nn.relu(nn.Conv(width, (3, 3), padding="VALID", name=f"convs_{i}")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return nn.Dense(10, name="fc2")(nn.relu(nn.Dense(128, name="fc1")(x)))


class DroppedConvNet(nn.Module):
    """Two 3x3 convolutions, max pooling and two dense layers, with dropout before each of these."""

    side: int
    widths: tuple[int, int]
    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.relu(nn.Conv(width, (3, 3), padding="VALID", name=f"convs_{i}")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x).reshape(len(x), -1)
        x = nn.relu(nn.Dense(self.hidden, name="fc1")(x))
        return nn.Dense(self.classes, name="fc2")(nn.Dropout(0.5, deterministic=not train)(x))


class PooledConvNet(nn.Module):
    """Two padded 5x5 convolutions, each with max pooling, and two dense layers."""

    side: int
    widths: tuple[int, int]
    hidden: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i, width in enumerate(self.widths):
            x = nn.max_pool(nn.relu(nn.Conv(width, (5, 5), name=f"convs_{i}")(x)), (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(self.hidden, name="fc1")(x.reshape(len(x), -1)))
        return nn.Dense(self.classes, name="fc2")(x)


class ResNet18(nn.Module):
    """ResNet-18 for small images: a 3x3 stem without pooling, group norm."""

    width: int
    side: int
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (3, 3), padding=1, use_bias=False, name="stem")(x)
        x = nn.relu(nn.GroupNorm(num_groups=8, name="stem_norm")(x))
        for i in range(8):
            x = Residual(self.width << i // 2, name=f"blocks_{i}")(x)
        return nn.Dense(self.classes, name="fc")(x.mean((1, 2)))


class Adapter(nn.Module):
    """x A B."""

    rank: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        a = self.param("a", nn.initializers.lecun_normal(), (width, self.rank))
        return x @ a @ self.param("b", nn.initializers.zeros, (self.rank, width))


class CausalBlock(nn.Module):
    """Causal attention and two dense layers, each after a norm; adapters at queries and values if ``rank`` is
    positive.
    """

    heads: int
    rank: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        y = nn.LayerNorm(name="norm1")(x)
        query, key, value = (nn.Dense(width, name=name)(y) for name in ("query", "key", "value"))
        if self.rank:
            query += Adapter(self.rank, name="query_adapter")(y)
            value += Adapter(self.rank, name="value_adapter")(y)
        by_head = (a.reshape(*a.shape[:2], self.heads, -1) for a in (query, key, value))
        mixed = jax.nn.dot_product_attention(*by_head, is_causal=True)
        x = x + nn.Dense(width, name="out")(mixed.reshape(x.shape))
        y = nn.Dense(4 * width, name="linear1")(nn.LayerNorm(name="norm2")(x))
        return x + nn.Dense(width, name="linear2")(nn.gelu(y))


class CausalTransformer(nn.Module):
    """Predicts each next symbol."""

    layers: int
    width: int
    heads: int
    tokens: int
    symbols: int
    rank: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(self.symbols, self.width, name="embedding")(x)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for i in range(self.layers):
            x = CausalBlock(self.heads, self.rank, name=f"blocks_{i}")(x)
        return nn.Dense(self.symbols, name="fc")(nn.LayerNorm(name="norm")(x))


class CharacterLSTM(nn.Module):
    """Embedded characters, two LSTM layers; the last hidden state predicts the next character."""

    hidden: int
    embedding: int
    tokens: int
    symbols: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Embed(self.symbols, self.embedding, name="embedding")(x)
        for i in range(2):
            hidden: Any = nn.RNN(nn.OptimizedLSTMCell(self.hidden, name=f"lstm_{i}"))(x)
            x = hidden
        return nn.Dense(self.symbols, name="fc")(x[:, -1])


NETWORKS: dict[str, type[nn.Module]] = {
    network.__name__: network for network in (DroppedConvNet, PooledConvNet, ResNet18, CausalTransformer, CharacterLSTM)
}
"""Networks with sizes that the workload sets."""

MODULES: dict[str, nn.Module] = {
    "W5": ConvNet(),
    "W6": ResNet20(),
    "W7": NextSymbol(),
    "W8": VisionTransformer(),
    "W9": MobileNet(),
    "W10": MLP(),
    "W11": SmallConvNet(),
}
INPUTS = {"W7": np.zeros((1, 80), np.int32), "W10": np.zeros((1, 30), np.float32)}
IMAGES = np.zeros((1, 32, 32, 3), np.float32)


def module_of(workload: Workload) -> nn.Module:
    """The workload's network."""
    return NETWORKS[workload.network](**workload.sizes) if workload.network else MODULES[workload.name]


def sample_input(workload: Workload) -> Any:
    """A batch of one sample, in NumPy: JAX may have to be configured first."""
    if "tokens" in workload.sizes:
        return np.zeros((1, workload.sizes["tokens"]), np.int32)
    if "side" in workload.sizes:
        side, channels = workload.sizes["side"], 1 if workload.network == "PooledConvNet" else 3
        return np.zeros((1, side, side, channels), np.float32)
    return INPUTS.get(workload.name, IMAGES)


def parameters(initial: dict[str, np.ndarray]) -> dict[str, Any]:
    """PyTorch's weights as Flax's tree of parameters."""
    params: dict[str, Any] = {}
    for name, value in initial.items():
        *layers, array = re.sub(r"\.(\d+)", r"_\1", name).split(".")
        for path, converted in arrays(layers, array, value):
            *place, leaf = path
            level = params
            for layer in place:
                level = level.setdefault(layer, {})
            level[leaf] = jnp.asarray(np.ascontiguousarray(converted))
    return params


def arrays(layers: list[str], array: str, value: np.ndarray) -> Iterator[tuple[list[str], np.ndarray]]:
    """Flax's paths and arrays for an array of PyTorch: inputs first, channels last, gates and heads separated."""
    layer = layers[-1] if layers else ""
    if layer == "lstm":
        kind, source, number = re.fullmatch(r"(weight|bias)_(ih|hh)_l(\d+)", array).groups()  # type: ignore[union-attr]
        cell = f"lstm_{number}"
        if kind == "bias" and source == "hh":
            return  # not trained, zero
        for gate, part in zip("ifgo", np.split(value, 4), strict=True):
            gate = ("h" if kind == "bias" else source[0]) + gate
            yield [*layers[:-1], cell, gate, "kernel" if kind == "weight" else "bias"], part.T
    elif layer == "gru":
        gates = ["r", "z", "n"] if array != "bias_hn" else ["n"]
        kind, source = array.split("_")
        for gate, part in zip(gates, np.split(value, len(gates)), strict=True):
            yield [*layers, source[0] + gate, "kernel" if kind == "weight" else "bias"], part.T
    elif layer == "self_attn":
        for name, part in zip(("query", "key", "value"), np.split(value, 3), strict=True):
            leaf = "kernel" if array == "in_proj_weight" else "bias"
            yield [*layers, name, leaf], part.T.reshape(*part.shape[1:], HEADS, -1)
    elif layer == "out_proj":
        path = [*layers[:-1], "out"]
        yield (
            ([*path, "kernel"], value.T.reshape(HEADS, -1, len(value)))
            if array == "weight"
            else ([*path, "bias"], value)
        )
    elif layer.endswith("_adapter"):
        yield [*layers, array], value.T
    elif array != "weight":
        yield [*layers, array], value
    elif layer == "embedding":
        yield [*layers, "embedding"], value
    elif value.ndim == 1:
        yield [*layers, "scale"], value
    else:
        yield [*layers, "kernel"], value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
