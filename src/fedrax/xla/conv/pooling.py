"""Gradients of max pooling and of average pooling, on CPUs.

:func:`lower_max_pool_gradient`:

- Before: ``select_and_scatter_add`` (max pooling).
- After: shifted slices are compared to find the first maximum of each window; one pass over the pixels selects the
  gradients of the windows whose maximum each pixel is.
- Why: XLA:CPU runs ``select_and_scatter_add`` element by element.

:func:`lower_window_sum`:

- Before: ``reduce_window_sum`` without strides, as in the gradient of average pooling.
- After: sums of shifted slices, one axis after another.
- Why: it takes the sum of the window's sizes in additions instead of their product.

Neither is for windows of more than 128 entries, or for dtypes other than float32, float64 and half precision (half
precision is summed by :mod:`fedrax.xla.reductions`).
"""

from __future__ import annotations

import math
from itertools import product

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_half_precision

_FEW_TAPS, _MOST_TAPS = 8, 128
"""Entries of a window up to which XLA:CPU is fast, and up to which they are unrolled into one operation each."""


def lower_max_pool_gradient(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``select_and_scatter_add``, which adds each window's ``source`` to the first maximum of ``operand``."""
    (source, operand), params = inputs, equation.params
    if is_half_precision(operand.dtype):
        total = lower_max_pool_gradient([a.astype(jnp.float32) for a in inputs], equation)
        return None if total is None else total.astype(operand.dtype)
    sizes, strides, pads = params["window_dimensions"], params["window_strides"], params["padding"]
    known = params["select_prim"].name == "ge" and operand.dtype in (jnp.float32, jnp.float64)
    if not known or math.prod(sizes) > _MOST_TAPS or operand.size == 0 or source.size == 0:
        return None
    padded = lax.pad(operand, jnp.asarray(-jnp.inf, operand.dtype), [(low, high, 0) for low, high in pads])
    pixels = list(product(*map(range, sizes)))
    first = _argmax_tap(padded, pixels, strides, source.shape)
    total = _scatter_to_windows(source, first, sizes, strides)
    # windows may end before the last pixels, or beyond them by less than a stride
    room = [(0, max(0, n - have), 0) for n, have in zip(padded.shape, total.shape, strict=True)]
    total = lax.pad(total, jnp.zeros((), total.dtype), room)
    low = [pad for pad, _ in pads]
    return lax.slice(total, low, [at + n for at, n in zip(low, operand.shape, strict=True)])


def _argmax_tap(x: Array, pixels: list[tuple], strides: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The number of the window's pixel that is its first maximum, [shape], in the dtype of x."""
    best, first = None, jnp.zeros(shape, x.dtype)
    for number, pixel in enumerate(pixels):
        stop = [i + (n - 1) * s + 1 for i, n, s in zip(pixel, shape, strides, strict=True)]
        seen = lax.slice(x, pixel, stop, strides)
        if best is not None:
            first = jnp.where(seen > best, jnp.asarray(number**2, x.dtype), first)
        best = seen if best is None else jnp.maximum(best, seen)
    # The number is the square root of its square: XLA would fuse mere comparisons into every reader, one for each pixel
    # of the window, and repeat them there; it does not repeat a square root.
    return jnp.sqrt(first)


def _scatter_to_windows(source: Array, first: Array, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """For each pixel the sum of ``source`` over the windows whose maximum, number ``first``, it is.

    One pass over the pixels. Each axis is split into (stride, position in the stride), so that the result needs no
    transpose. Overlapping windows are added in the order of their pixels.
    """
    reach = [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
    full = [n + r - 1 for n, r in zip(source.shape, reach, strict=True)]
    if max(reach) > 1:  # pad once: padding in every slice takes ten times as long
        around = [(r - 1, r - 1, 0) for r in reach]
        first = lax.pad(first, jnp.asarray(-1, first.dtype), around)
        source = lax.pad(source, jnp.asarray(0, source.dtype), around)
    total = None
    for steps in product(*map(range, reach)):
        begin = [r - 1 - q for q, r in zip(steps, reach, strict=True)]
        end = [at + n for at, n in zip(begin, full, strict=True)]
        unit_axes = tuple(range(1, 2 * source.ndim, 2))
        numbers = jnp.expand_dims(_tap_numbers(steps, sizes, strides), tuple(range(0, 2 * source.ndim, 2)))
        is_maximum = jnp.expand_dims(lax.slice(first, begin, end), unit_axes) == numbers.astype(first.dtype)
        part = jnp.where(is_maximum, jnp.expand_dims(lax.slice(source, begin, end), unit_axes), 0)
        total = part if total is None else total + part
    assert total is not None
    return total.reshape([n * s for n, s in zip(full, strides, strict=True)])


def _tap_numbers(steps: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Numbers of a window's pixels that are ``steps`` strides from its begin, int32 [strides]; -2 outside of it."""
    number, inside = jnp.zeros(strides, jnp.int32), jnp.ones(strides, bool)
    for axis, (q, stride, size) in enumerate(zip(steps, strides, sizes, strict=True)):
        pixel = q * stride + lax.broadcasted_iota(jnp.int32, strides, axis)
        number, inside = number * size + pixel, inside & (pixel < size)
    return jnp.where(inside, number, -2)


def lower_window_sum(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``reduce_window_sum`` without strides; None for few entries, which XLA:CPU adds up fast."""
    (x,), params = inputs, equation.params
    sizes = params["window_dimensions"]
    everywhere = all(math.prod(params[name]) == 1 for name in ("window_strides", "base_dilation", "window_dilation"))
    known = everywhere and x.dtype in (jnp.float32, jnp.float64) and x.size > 0
    if not known or math.prod(sizes) <= _FEW_TAPS or max(sizes) > _MOST_TAPS:
        return None
    if 0 in equation.outvars[0].aval.shape:  # type: ignore[attr-defined]
        return None
    x = lax.pad(x, jnp.zeros((), x.dtype), [(low, high, 0) for low, high in params["padding"]])
    for axis, size in enumerate(sizes):
        places = x.shape[axis] - size + 1
        shifted = [lax.slice_in_dim(x, at, at + places, axis=axis) for at in range(size)]
        x = sum(shifted[1:], shifted[0])
    return x
