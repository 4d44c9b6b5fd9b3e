"""PyTorch's pooling operators; images are [B, C, ...] with the spatial axes last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.models.pytorch.interpolation_ops import multiply_axis
from fedrax.models.pytorch.layer_ops import Sizes, per_axis
from fedrax.models.pytorch.operators import operator


def _windows(x: Array, kernel: Sizes, stride: Any, padding: Sizes, dilation: Sizes, ceil_mode: bool, space: int):
    """(window, strides, padding, dilation) of ``lax.reduce_window`` for the last ``space`` axes of x."""
    kernels, pads = per_axis(kernel, space), per_axis(padding, space)
    strides = per_axis(stride, space) if stride else kernels
    dilations = per_axis(dilation, space)
    both = []
    for length, k, s, p, d in zip(x.shape[-space:], kernels, strides, pads, dilations, strict=True):
        reach = d * (k - 1) + 1
        count = -(-(length + 2 * p - reach) // s) + 1
        count -= (count - 1) * s >= length + p  # a window must start in the image or in the padding before it
        both.append((p, max((count - 1) * s + reach - length - p, 0) if ceil_mode else p))
    lead = [1] * (x.ndim - space)
    return (*lead, *kernels), (*lead, *strides), [(0, 0)] * len(lead) + both, (*lead, *dilations)


@operator("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(x, kernel_size, stride=(), padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False, space=None):
    space = space or (len(kernel_size) if not isinstance(kernel_size, int) else x.ndim - 2)
    windows = _windows(x, kernel_size, stride, padding, dilation, ceil_mode, space)
    if any(d > 1 for d in windows[-1]):  # XLA has no derivative of dilated pooling
        return _max_with_index(x, space, *windows)[0]
    window, strides, pads, _ = windows
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads)


@operator("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices")
def _max_pool_with_indices(
    x, kernel_size, stride=(), padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False
) -> tuple[Array, Array]:
    space = len(kernel_size)
    windows = _windows(x, kernel_size, stride, padding, dilation, ceil_mode, space)
    largest = _max_pool(x, kernel_size, stride, padding, dilation, ceil_mode, space)
    return largest, _max_with_index(lax.stop_gradient(x), space, *windows)[1]


def _max_with_index(x: Array, space: int, window: Any, strides: Any, pads: Any, dilations: Any) -> tuple[Array, Array]:
    """The first maximum of each window, and its flat index into the spatial axes."""
    numbers = jnp.arange(math.prod(x.shape[-space:]), dtype=jnp.int32).reshape(x.shape[-space:])
    widths = [(low, high, 0) for low, high in pads]
    x = lax.pad(x, jnp.asarray(-jnp.inf, x.dtype), widths)
    numbers = lax.pad(numbers, jnp.int32(0), widths[-space:])
    counts = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape, window, strides, dilations, strict=True)]
    values, indices = [], []
    for tap in product(*map(range, window)):
        start = [t * d for t, d in zip(tap, dilations, strict=True)]
        stop = [at + (n - 1) * s + 1 for at, n, s in zip(start, counts, strides, strict=True)]
        values.append(lax.slice(x, start, stop, strides))
        index = lax.slice(numbers, start[-space:], stop[-space:], strides[-space:])
        indices.append(jnp.broadcast_to(index, values[-1].shape))
    best = jnp.argmax(lax.stop_gradient(jnp.stack(values)), 0)[None]
    value, index = (jnp.take_along_axis(jnp.stack(taps), best, 0)[0] for taps in (values, indices))
    return value, index


@operator("max_unpool2d", "max_unpool3d")
def _max_unpool(x: Array, indices: Array, output_size: Sequence[int], *_: Any) -> Array:
    """Each value at the index of its maximum, zeros elsewhere."""
    lead = x.shape[: x.ndim - len(output_size)]
    values, flat_indices = (a.reshape(math.prod(lead), -1) for a in (x, indices))
    image = jnp.zeros((len(values), math.prod(output_size)), x.dtype)
    image = image.at[jnp.arange(len(values))[:, None], flat_indices].set(values)
    return image.reshape(*lead, *output_size)


@operator("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    x: Array,
    kernel_size: Sequence[int],
    stride: Any = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    space = len(kernel_size)
    window, strides, pads, _ = _windows(x, kernel_size, stride, padding, 1, ceil_mode, space)
    total = lax.reduce_window(x, 0.0, lax.add, window, strides, pads)
    if divisor_override is not None or not any(map(any, pads)):
        return total / (divisor_override or math.prod(window))
    image = jnp.ones((1,) * (x.ndim - space) + x.shape[-space:], x.dtype)
    if count_include_pad:  # but not the additional padding of ceil_mode
        inner = [(p, min(p, high)) for p, (_, high) in zip(per_axis(padding, space), pads[-space:], strict=True)]
        image = jnp.pad(image, [(0, 0)] * (x.ndim - space) + inner, constant_values=1)
        pads = [(low - i, high - j) for (low, high), (i, j) in zip(pads[-space:], inner, strict=True)]
        pads = [(0, 0)] * (x.ndim - space) + pads
    return total / lax.reduce_window(image, 0.0, lax.add, window, strides, pads)


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d")
def _adaptive_avg_pool(x: Array, output_size: Sizes) -> Array:
    sizes = per_axis(output_size, 1)
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        weights = np.zeros((size, x.shape[axis]))
        for i, (low, high) in enumerate(_cells(x.shape[axis], size)):
            weights[i, low:high] = 1 / (high - low)
        x = multiply_axis(x, weights, axis)
    return x


@operator("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Array, output_size: Sizes) -> tuple[Array, Array]:
    """The first maximum of each cell, and its flat index into the spatial axes."""
    sizes = per_axis(output_size, 1)
    space = x.shape[-len(sizes) :]
    indices = jnp.broadcast_to(jnp.arange(math.prod(space), dtype=jnp.int32).reshape(space), x.shape)
    for axis, size in list(zip(range(-len(sizes), 0), sizes, strict=True))[
        ::-1
    ]:  # the last axis first, so that ties have the order of rows
        maxima, maxima_indices = [], []
        for low, high in _cells(x.shape[axis], size):
            cell, cell_indices = (lax.slice_in_dim(a, low, high, axis=axis) for a in (x, indices))
            best = jnp.argmax(cell, axis, keepdims=True)
            maxima.append(jnp.take_along_axis(cell, best, axis))
            maxima_indices.append(jnp.take_along_axis(cell_indices, best, axis))
        x, indices = jnp.concatenate(maxima, axis), jnp.concatenate(maxima_indices, axis)
    return x, indices


def _cells(length: int, count: int) -> list[tuple[int, int]]:
    """Limits (start, end) of the cells of adaptive pooling along an axis."""
    return [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]
