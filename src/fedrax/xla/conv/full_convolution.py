"""Full convolutions, whose result is larger than the images, as scatters of kernels, on CPUs.

- Before: a convolution whose kernel meets mostly padding or the zeros of input dilation, such as the gradient of a
  convolution without padding with respect to its images.
- After: each pixel times the whole kernel, one row of the kernel after another, added at the output positions that the
  pixel reaches.
- Why: XLA:CPU multiplies padding and zeros as well.
- Not for: strides, more than two spatial axes, kernels of one entry, few pixels (`Limits.full_conv_pixels`).

Shapes are written as in :mod:`fedrax.xla.conv.window`.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fedrax.xla.conv.window import Space, Window
from fedrax.xla.options import limits

_MAX_USEFUL = 0.78
"""Largest fraction of kernel entries that meet pixels and not padding, up to which a scatter is faster, with many
channels and no input dilation; for others see `Limits.full_conv_useful`."""
_MIN_CHANNELS = 32, 16
"""Fewest input and output channels for which `_MAX_USEFUL` is the limit: the products are written to memory."""


def is_full_convolution(x: Array, kernel: Array, window: Window, out: Space) -> bool:
    """Whether a convolution of images [N, space, C] and a kernel [k, C, D] is faster as a scatter."""
    if set(window.strides) != {1} or len(out) > 2 or math.prod(kernel.shape[:-2]) == 1:
        return False
    useful = math.prod(min(1, n * gap / m) for n, gap, m in zip(x.shape[1:-1], window.gaps, out, strict=True))
    many = set(window.gaps) == {1} and all(n >= few for n, few in zip(kernel.shape[-2:], _MIN_CHANNELS, strict=True))
    return math.prod(x.shape[:-1]) >= limits().full_conv_pixels and useful <= (
        _MAX_USEFUL if many else limits().full_conv_useful
    )


def scatter_convolution(x: Array, kernel: Array, window: Window, out: Space, precision: Any) -> Array:
    """The convolution [N, space, C], [k, C, D] -> [N, space of the result, D], one row of the kernel after another."""
    if len(out) == 1:
        # Insert a unit axis: as second axis for long kernels, to loop over the entries; as first for short ones, whose
        # entries are unrolled.
        at = int(len(kernel) > limits().full_conv_taps)
        x, kernel = jnp.expand_dims(x, 1 + at), jnp.expand_dims(kernel, at)

        def with_unit_axis(values: tuple, one: Any) -> tuple:
            return (*values[:at], one, *values[at:])

        out = with_unit_axis(out, 1)
        window = Window(*(with_unit_axis(*pair) for pair in zip(window, (1, (0, 0), 1, 1), strict=True)))
    (height, width), (high, wide), results = x.shape[1:-1], kernel.shape[:2], kernel.shape[-1]
    (down, across), (apart, aside) = window.gaps, window.dilation
    # Pixel p reaches output position p gap - t dilation + low by entry t. Positions are counted from the first one that
    # any pixel reaches; those with the same remainder modulo the gap (a phase) are in one array.
    rows, columns = (
        (n - 1) * apart // gap + size
        for n, apart, gap, size in ((high, apart, down, height), (wide, aside, across, width))
    )

    def add(row: Array, total: Array) -> Array:
        """Add the products with one row of the kernel to ``total``, [down, N, rows, columns across, D]."""
        products = lax.dot_general(x, kernel[row], (((3,), (1,)), ((), ())), precision)
        of_phase = [jnp.zeros((len(x), height, columns, results), x.dtype)] * across
        for entry in range(wide):
            at, phase = divmod((wide - 1 - entry) * aside, across)
            ends = [(0, 0), (0, 0), (at, columns - at - width), (0, 0)]
            of_phase[phase] = of_phase[phase] + jnp.pad(products[:, :, :, entry], ends)
        line = jnp.stack(of_phase, 3).reshape(1, len(x), height, columns * across, results)
        at, phase = jnp.divmod((high - 1 - row) * apart, down)
        start = (phase, 0, at, 0, 0)
        return lax.dynamic_update_slice(total, lax.dynamic_slice(total, start, line.shape) + line, start)

    zero = jnp.zeros((down, len(x), rows, columns * across, results), x.dtype)
    total = lax.fori_loop(0, high, add, zero)
    total = jnp.moveaxis(total, 0, 2).reshape(len(x), rows * down, columns * across, results)
    firsts = [(n - 1) * d - low for n, d, (low, _) in zip((high, wide), (apart, aside), window.pads, strict=True)]
    ends = [(-at, at + n - size, 0) for at, n, size in zip(firsts, out, total.shape[1:-1], strict=True)]
    return lax.pad(total, jnp.zeros((), x.dtype), [(0, 0, 0), *ends, (0, 0, 0)])
