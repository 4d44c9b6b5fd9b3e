"""Convolutions that give more pixels than they read, as scatters of whole kernels, on CPUs.

Matches convolutions whose kernels meet mostly padding, such as the gradient of a convolution without padding (a full
convolution). Each pixel is multiplied with the whole kernel instead, one row of the kernel after another, and the
results are added at the places that it reaches.

Shapes are written with N for the batch, C and D for channels in and out, "space" for height and width, and k for these
axes of a kernel.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fedrax.xla.conv.window import Space, Window
from fedrax.xla.options import limits

_USEFUL = 0.78
"""Part of what the kernel meets that is no padding, up to which leaving the padding out is faster, with many channels
and no skipped pixels; for others see `Limits.full_conv_useful`."""
_MIN_CHANNELS = 32, 16
"""Channels in, whose products are written out, and out."""


def is_full_convolution(x: Array, kernel: Array, window: Window, out: Space) -> bool:
    """Whether images [N, space, C] under a kernel [k, C, D] are best spread."""
    if set(window.strides) != {1} or len(out) > 2 or math.prod(kernel.shape[:-2]) == 1:
        return False
    useful = math.prod(min(1, n * gap / m) for n, gap, m in zip(x.shape[1:-1], window.gaps, out, strict=True))
    many = set(window.gaps) == {1} and all(n >= few for n, few in zip(kernel.shape[-2:], _MIN_CHANNELS, strict=True))
    return math.prod(x.shape[:-1]) >= limits().full_conv_pixels and useful <= (
        _USEFUL if many else limits().full_conv_useful
    )


def scatter_convolution(x: Array, kernel: Array, window: Window, out: Space, precision: Any) -> Array:
    """[N, space, C], [k, C, D] -> [N, space of the result, D], one row of the kernel after another."""
    if len(out) == 1:
        at = int(
            len(kernel) > limits().full_conv_taps
        )  # where the unit axis goes: a long kernel is looped over entry by entry
        x, kernel = jnp.expand_dims(x, 1 + at), jnp.expand_dims(kernel, at)
        more = lambda values, one: (*values[:at], one, *values[at:])  # noqa: E731
        out, window = more(out, 1), Window(*(more(*pair) for pair in zip(window, (1, (0, 0), 1, 1), strict=True)))
    (height, width), (high, wide), results = x.shape[1:-1], kernel.shape[:2], kernel.shape[-1]
    (down, across), (apart, aside) = window.gaps, window.dilation
    # Pixel p reaches place p gap - t dilation + low by entry t. Places are counted from the first one that any reaches,
    # and go to arrays by what is left of their number when it is divided by the gap.
    rows, columns = (
        (n - 1) * apart // gap + size
        for n, apart, gap, size in ((high, apart, down, height), (wide, aside, across, width))
    )

    def add(row: Array, total: Array) -> Array:
        """total: [down, N, rows, columns across, D]."""
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
