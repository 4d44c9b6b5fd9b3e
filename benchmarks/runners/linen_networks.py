"""Plain Flax Linen networks of `benchmarks.networks`; `torch_networks` has the same networks in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

Three, Two = (3, 3), (2, 2)
pool = partial(nn.max_pool, window_shape=Two, strides=Two)


def group_norm(x: Array) -> Array:
    return nn.GroupNorm(num_groups=4)(x)


def mnist_cnn(x: Array) -> Array:
    for channels in (32, 64):
        x = nn.avg_pool(nn.relu(nn.Conv(channels, Three)(x)), Two, Two)
    return nn.Dense(10)(nn.relu(nn.Dense(256)(x.reshape(len(x), -1))))


def wide_kernels(x: Array) -> Array:
    for _ in range(2):
        x = nn.max_pool(nn.relu(nn.Conv(64, (5, 5))(x)), Three, Two, "SAME")
    x = x.reshape(len(x), -1)
    for units in (384, 192):
        x = nn.relu(nn.Dense(units)(x))
    return nn.Dense(10)(x)


def vgg(x: Array) -> Array:
    for channels in (32, 64, 128):
        for _ in range(2):
            x = nn.relu(nn.Conv(channels, Three)(x))
        x = pool(x)
    return nn.Dense(10)(nn.relu(nn.Dense(128)(x.reshape(len(x), -1))))


def densenet(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = conv(24, Three)(x)
    for block in range(3):
        for _ in range(4):
            x = jnp.concatenate([x, conv(12, Three)(nn.relu(group_norm(x)))], -1)
        if block < 2:
            channels = x.shape[-1] // 8 * 4
            x = nn.avg_pool(conv(channels, (1, 1))(nn.relu(group_norm(x))), Two, Two)
    return nn.Dense(10)(nn.relu(group_norm(x)).mean((1, 2)))


class batch_norm_resnet(nn.Module):
    """With running statistics."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        norm = partial(nn.BatchNorm, use_running_average=not train)
        x = nn.relu(norm()(nn.Conv(16, Three, use_bias=False)(x)))
        for stage, channels in enumerate((16, 32, 64)):
            for block in range(2):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(norm()(nn.Conv(channels, Three, strides, use_bias=False)(x)))
                y = norm()(nn.Conv(channels, Three, use_bias=False)(y))
                if x.shape != y.shape:
                    x = nn.Conv(channels, (1, 1), strides, use_bias=False)(x)
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


def convnext(x: Array) -> Array:
    x = nn.LayerNorm()(nn.Conv(48, Two, Two)(x))
    for stage, channels in enumerate((48, 96)):
        if stage:
            x = nn.Conv(channels, Two, Two)(nn.LayerNorm()(x))
        for _ in range(2):
            y = nn.LayerNorm()(nn.Conv(channels, (7, 7), feature_group_count=channels)(x))
            x = x + nn.Dense(channels)(nn.gelu(nn.Dense(4 * channels)(y)))
    return nn.Dense(10)(nn.LayerNorm()(x.mean((1, 2))))


def efficientnet(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = nn.silu(group_norm(conv(16, Three)(x)))
    for out, stride, size in ((24, 2, 3), (24, 1, 3), (40, 2, 5), (40, 1, 5)):
        into, wide = x.shape[-1], 4 * x.shape[-1]
        y = nn.silu(group_norm(conv(wide, (1, 1))(x)))
        y = nn.silu(group_norm(conv(wide, (size, size), (stride, stride), feature_group_count=wide)(y)))
        weight = nn.sigmoid(nn.Dense(wide)(nn.silu(nn.Dense(into)(y.mean((1, 2))))))
        y = group_norm(conv(out, (1, 1))(y * weight[:, None, None]))
        x = x + y if x.shape == y.shape else y
    return nn.Dense(10)(x.mean((1, 2)))


def shufflenet(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = nn.relu(group_norm(conv(48, Three, Two)(x)))
    for _ in range(4):
        y = nn.relu(group_norm(conv(48, (1, 1), feature_group_count=4)(x)))
        y = y.reshape(*y.shape[:-1], 4, 12).swapaxes(-1, -2).reshape(y.shape)
        y = conv(48, (1, 1), feature_group_count=4)(group_norm(conv(48, Three, feature_group_count=48)(y)))
        x = nn.relu(x + y)
    return nn.Dense(10)(x.mean((1, 2)))


def inception(x: Array) -> Array:
    one = lambda channels: nn.Conv(channels, (1, 1))  # noqa: E731
    x = nn.relu(nn.Conv(32, Three)(x))
    for _ in range(2):
        branches = [
            one(16)(x),
            nn.Conv(32, Three)(nn.relu(one(16)(x))),
            nn.Conv(16, (5, 5))(nn.relu(one(8)(x))),
            one(16)(nn.max_pool(x, Three, (1, 1), "SAME")),
        ]
        x = pool(nn.relu(jnp.concatenate(branches, -1)))
    return nn.Dense(10)(x.reshape(len(x), -1))


def dilated(x: Array) -> Array:
    x = nn.relu(nn.Conv(32, Three)(x))
    x = pool(nn.relu(nn.Conv(32, Three, kernel_dilation=Two)(x)))
    x = nn.relu(nn.Conv(64, Three, kernel_dilation=Two)(x))
    x = pool(nn.relu(nn.Conv(64, Three, feature_group_count=4)(x)))
    return nn.Dense(10)(x.reshape(len(x), -1))


def unet(x: Array) -> Array:
    def twice(x: Array, channels: int) -> Array:
        for _ in range(2):
            x = nn.relu(nn.Conv(channels, Three)(x))
        return x

    up = lambda x, channels: nn.ConvTranspose(channels, Two, Two)(x)  # noqa: E731
    first = twice(x, 16)
    second = twice(pool(first), 32)
    x = up(twice(pool(second), 64), 32)
    x = up(twice(jnp.concatenate([x, second], -1), 32), 16)
    return nn.Conv(3, (1, 1))(twice(jnp.concatenate([x, first], -1), 16))


def autoencoder(x: Array) -> Array:
    for channels in (32, 64, 128):
        x = nn.leaky_relu(nn.Conv(channels, (4, 4), Two)(x))
    for channels in (64, 32):
        x = nn.relu(nn.ConvTranspose(channels, (4, 4), Two)(x))
    return nn.ConvTranspose(4, (4, 4), Two)(x)


def volumes(x: Array) -> Array:
    for channels in (16, 32):
        x = nn.max_pool(nn.relu(nn.Conv(channels, (3, 3, 3))(x)), (2, 2, 2), (2, 2, 2))
    return nn.Dense(5)(nn.relu(nn.Conv(64, (3, 3, 3))(x)).mean((1, 2, 3)))


def waveform(x: Array) -> Array:
    x = nn.relu(group_norm(nn.Conv(32, (80,), (4,))(x)))
    for channels in (32, 64, 64):
        x = nn.max_pool(x, (4,), (4,))
        x = nn.relu(group_norm(nn.Conv(channels, (3,))(x)))
    return nn.Dense(10)(x.mean(1))


def temporal(x: Array) -> Array:
    for level in range(4):
        conv = partial(nn.Conv, 48, (3,), kernel_dilation=2**level, padding="CAUSAL")
        y = nn.relu(conv()(nn.relu(conv()(x))))
        x = nn.relu((x if x.shape == y.shape else nn.Conv(48, (1,))(x)) + y)
    return nn.Dense(10)(x[:, -1])


def characters(x: Any) -> Any:
    x = nn.Embed(90, 8)(x)
    for _ in range(2):
        x = nn.RNN(nn.OptimizedLSTMCell(256))(x)
    return nn.Dense(90)(x)


def both_ways(x: Array) -> Array:
    x = nn.Embed(2000, 64)(x)
    there: Any = nn.RNN(nn.OptimizedLSTMCell(64))(x)
    back: Any = nn.RNN(nn.OptimizedLSTMCell(64), reverse=True, keep_order=True)(x)
    return nn.Dense(2)(jnp.concatenate([there, back], -1).max(1))


def language_model(x: Array) -> Array:
    return nn.Dense(1000)(attending(nn.Embed(1000, 128)(x), nn.make_causal_mask(x)))


def mixer(x: Array) -> Array:
    x = nn.Conv(128, (4, 4), (4, 4))(x).reshape(len(x), 64, 128)
    for _ in range(4):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        x = x + nn.Dense(64)(nn.gelu(nn.Dense(128)(y))).swapaxes(1, 2)
        x = x + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(x))))
    return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class emnist_dropout(nn.Module):
    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        for channels in (32, 64):
            x = nn.relu(nn.Conv(channels, Three, padding="VALID")(x))
        x = nn.Dropout(0.25, deterministic=not train)(pool(x)).reshape(len(x), -1)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(nn.Dense(128)(x)))
        return nn.Dense(62)(x)


class cifar_dropout(nn.Module):
    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        for channels in (32, 64):
            for _ in range(2):
                x = nn.relu(nn.Conv(channels, Three)(x))
            x = nn.Dropout(0.25, deterministic=not train)(pool(x))
        x = nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


class encoder(nn.Module):
    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        h, some = nn.Embed(2000, 128)(x), partial(nn.Dropout, 0.1, deterministic=not train)
        for _ in range(2):
            y = nn.LayerNorm()(h)
            attend = nn.MultiHeadDotProductAttention(
                4, dropout_rate=0.1, broadcast_dropout=False, deterministic=not train
            )
            h = h + some()(attend(y, y))
            y = some()(nn.gelu(nn.Dense(512)(nn.LayerNorm()(h))))
            h = h + some()(nn.Dense(128)(y))
        return nn.Dense(4)(nn.LayerNorm()(h).mean(1))


def resnet56(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = nn.relu(group_norm(conv(16, Three)(x)))
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(9):
            strides = (2, 2) if stage and not block else (1, 1)
            y = nn.relu(group_norm(conv(channels, Three, strides)(x)))
            y = group_norm(conv(channels, Three)(y))
            if x.shape != y.shape:
                x = group_norm(conv(channels, (1, 1), strides)(x))
            x = nn.relu(x + y)
    return nn.Dense(10)(x.mean((1, 2)))


def mobilenet(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = nn.relu6(group_norm(conv(32, Three)(x)))
    stages = (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    for wider, out, blocks, stride in stages:
        for block in range(blocks):
            wide, strides = wider * x.shape[-1], (1, 1) if block else (stride, stride)
            y = nn.relu6(group_norm(conv(wide, (1, 1))(x)))
            y = nn.relu6(group_norm(conv(wide, Three, strides, feature_group_count=wide)(y)))
            y = group_norm(conv(out, (1, 1))(y))
            x = x + y if x.shape == y.shape else y
    return nn.Dense(10)(nn.relu6(group_norm(conv(1280, (1, 1))(x))).mean((1, 2)))


def deep_transformer(x: Array) -> Array:
    x = nn.Conv(192, (4, 4), (4, 4))(x).reshape(len(x), 64, 192)
    for _ in range(12):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(3)(y, y)
        x = x + nn.Dense(192)(nn.gelu(nn.Dense(768)(nn.LayerNorm()(x))))
    return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def next_word(x: Array) -> Array:
    h: Any = nn.RNN(nn.OptimizedLSTMCell(670))(nn.Embed(10004, 96)(x))
    return nn.Dense(10004)(nn.Dense(96)(h))


def text_cnn(x: Array) -> Array:
    words = nn.Embed(5000, 128)(x)
    found = [nn.relu(nn.Conv(100, (size,), padding="VALID")(words)).max(1) for size in (3, 4, 5)]
    return nn.Dense(4)(jnp.concatenate(found, -1))


class eegnet(nn.Module):
    """With running statistics."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        norm, conv = partial(nn.BatchNorm, use_running_average=not train), partial(nn.Conv, use_bias=False)
        x = norm()(conv(8, (1, 64))(x))
        x = nn.elu(norm()(conv(16, (22, 1), padding="VALID", feature_group_count=8)(x)))
        x = conv(16, (1, 16), feature_group_count=16)(nn.avg_pool(x, (1, 4), (1, 4)))
        x = nn.avg_pool(nn.elu(norm()(conv(16, (1, 1))(x))), (1, 8), (1, 8))
        return nn.Dense(4)(x.reshape(len(x), -1))


def vgg11(x: Array) -> Array:
    for channels, convolutions in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(convolutions):
            x = nn.relu(nn.Conv(channels, Three)(x))
        x = pool(x)
    return nn.Dense(10)(x.reshape(len(x), -1))


def alexnet(x: Array) -> Array:
    smaller = partial(nn.max_pool, window_shape=Three, strides=Two)
    x = smaller(nn.relu(nn.Conv(64, (11, 11), (4, 4), padding=2)(x)))
    x = smaller(nn.relu(nn.Conv(192, (5, 5))(x)))
    for channels in (384, 256, 256):
        x = nn.relu(nn.Conv(channels, Three)(x))
    x = smaller(x).reshape(len(x), -1)
    for _ in range(2):
        x = nn.relu(nn.Dense(1024)(x))
    return nn.Dense(10)(x)


def resnext(x: Array) -> Array:
    conv = partial(nn.Conv, use_bias=False)
    x = nn.relu(group_norm(conv(64, Three)(x)))
    for stage, channels in enumerate((64, 128, 256)):
        for block in range(2):
            strides = (2, 2) if stage and not block else (1, 1)
            y = nn.relu(group_norm(conv(channels, (1, 1))(x)))
            y = nn.relu(group_norm(conv(channels, Three, strides, padding=1, feature_group_count=16)(y)))
            y = group_norm(conv(2 * channels, (1, 1))(y))
            x = nn.relu(y + (x if x.shape == y.shape else group_norm(conv(2 * channels, (1, 1), strides)(x))))
    return nn.Dense(10)(x.mean((1, 2)))


def attending(h: Array, mask: Array | None = None) -> Array:
    for _ in range(2):
        y = nn.LayerNorm()(h)
        h = h + nn.MultiHeadDotProductAttention(num_heads=4)(y, y, mask=mask)
        h = h + nn.Dense(128)(nn.gelu(nn.Dense(512)(nn.LayerNorm()(h))))
    return nn.LayerNorm()(h)


def documents(x: Array) -> Array:
    return nn.Dense(4)(attending(nn.Embed(2000, 128)(x)).mean(1))


def long_context(x: Array) -> Array:
    return nn.Dense(100)(attending(nn.Embed(100, 128)(x), nn.make_causal_mask(x)))


class Network(nn.Module):
    """A module defined by a function of the inputs."""

    function: Callable

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return self.function(x)


def network(name: str) -> Any:
    """The network with this name."""
    made = globals()[name]
    return made() if isinstance(made, type) else Network(made)
