"""Gradients of max pooling, and sums over windows at every place, on CPUs.

- Matches ``select_and_scatter_add``, which XLA:CPU runs element by element: the first maximum of each window is found
  by comparing shifted slices, and gradients are gathered in one pass over the pixels.
- Matches ``reduce_window_sum`` without strides, as the gradient of average pooling has it: slices are added, one axis
  after another.

Neither applies to windows of more than 128 entries, or to other types than float32, float64 and half precision.
"""

from __future__ import annotations

import math
from itertools import product

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_half_precision

_FEW_TAPS, _MOST_TAPS = 8, 128
"""Entries of a window: up to so many XLA adds up fast of itself, and so many are worth being laid out one after
another."""


def lower_max_pool_gradient(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """`select_and_scatter_add`: each window's ``source`` goes to the first maximum of ``operand`` in the window."""
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
    # windows need not reach the last pixels, and may go beyond them by less than a stride
    room = [(0, max(0, n - have), 0) for n, have in zip(padded.shape, total.shape, strict=True)]
    total = lax.pad(total, jnp.zeros((), total.dtype), room)
    low = [pad for pad, _ in pads]
    return lax.slice(total, low, [at + n for at, n in zip(low, operand.shape, strict=True)])


def _argmax_tap(x: Array, pixels: list[tuple], strides: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The number of the pixel at which each window of x has its first maximum, [shape], of the type of x."""
    best, first = None, jnp.zeros(shape, x.dtype)
    for number, pixel in enumerate(pixels):
        stop = [i + (n - 1) * s + 1 for i, n, s in zip(pixel, shape, strides, strict=True)]
        seen = lax.slice(x, pixel, stop, strides)
        if best is not None:
            first = jnp.where(seen > best, jnp.asarray(number**2, x.dtype), first)
        best = seen if best is None else jnp.maximum(best, seen)
    # XLA takes comparisons for cheap and would make them anew for every pixel of the window, but not roots
    return jnp.sqrt(first)


def _scatter_to_windows(source: Array, first: Array, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """What each pixel gets from the windows: ``source`` of those, [shape], whose pixel number ``first`` it is.

    In one pass over the pixels, with an axis for the strides and one for what is left of them beside each other, so
    that nothing is put in order afterwards. Windows that overlap are added in the order of their pixels.
    """
    reach = [-(-size // stride) for size, stride in zip(sizes, strides, strict=True)]
    full = [n + r - 1 for n, r in zip(source.shape, reach, strict=True)]
    if max(reach) > 1:  # padded once: asking for each pixel whether it is beyond the edge takes ten times as long
        around = [(r - 1, r - 1, 0) for r in reach]
        laid = lambda a, filling: lax.pad(a, jnp.asarray(filling, a.dtype), around)  # noqa: E731
        first, source = laid(first, -1), laid(source, 0)
    total = None
    for steps in product(*map(range, reach)):
        begin = [r - 1 - q for q, r in zip(steps, reach, strict=True)]
        end = [at + n for at, n in zip(begin, full, strict=True)]
        apart = lambda a, at=(begin, end): jnp.expand_dims(lax.slice(a, *at), tuple(range(1, 2 * a.ndim, 2)))  # noqa: E731
        numbers = jnp.expand_dims(_tap_numbers(steps, sizes, strides), tuple(range(0, 2 * source.ndim, 2)))
        part = jnp.where(apart(first) == numbers.astype(first.dtype), apart(source), 0)
        total = part if total is None else total + part
    assert total is not None
    return total.reshape([n * s for n, s in zip(full, strides, strict=True)])


def _tap_numbers(steps: tuple[int, ...], sizes: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Of the pixels so many strides into a window, by what is left of them, int32 [strides]; -2 beyond the window."""
    number, inside = jnp.zeros(strides, jnp.int32), jnp.ones(strides, bool)
    for axis, (q, stride, size) in enumerate(zip(steps, strides, sizes, strict=True)):
        pixel = q * stride + lax.broadcasted_iota(jnp.int32, strides, axis)
        number, inside = number * size + pixel, inside & (pixel < size)
    return jnp.where(inside, number, -2)


def lower_window_sum(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """`reduce_window_sum` at every place, as the gradient of average pooling has it: one axis after another."""
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
