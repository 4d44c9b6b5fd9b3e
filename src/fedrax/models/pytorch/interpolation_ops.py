"""PyTorch's operators of interpolation and grid sampling; images are [B, C, ...] with the spatial axes last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.models.pytorch.operators import operator


def multiply_axis(x: Array, matrix: np.ndarray, axis: int) -> Array:
    """The product of matrix [out, length] with an axis of x."""
    if (matrix == matrix.flat[0]).all() and len(matrix) == 1:
        return x.mean(axis, keepdims=True)
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(matrix.T, x.dtype), -1, axis)


def _targets(x: Array, output_size: Any, factors: Any) -> list[tuple[int, int, float]]:
    """(axis, new length, old pixels per new pixel) for each spatial axis."""
    space = x.ndim - 2
    factors = list(factors) if factors else [None] * space
    sizes = output_size or [math.floor(n * f) for n, f in zip(x.shape[2:], factors, strict=True)]
    steps = [1 / f if f else n / size for n, f, size in zip(x.shape[2:], factors, sizes, strict=True)]
    return list(zip(range(2, x.ndim), sizes, steps, strict=True))


@operator("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest3d.vec")
def _nearest(x: Array, output_size: Any, scale_factors: Any = None) -> Array:
    for axis, size, step in _targets(x, output_size, scale_factors):
        x = jnp.take(x, np.minimum(np.floor(np.arange(size) * step).astype(int), x.shape[axis] - 1), axis=axis)
    return x


@operator("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_trilinear3d.vec")
def _linear(x: Array, output_size: Any, align_corners: bool, scale_factors: Any = None) -> Array:
    for axis, size, step in _targets(x, output_size, scale_factors):
        length, new = x.shape[axis], np.arange(size)
        old = new * (length - 1) / max(size - 1, 1) if align_corners else np.maximum((new + 0.5) * step - 0.5, 0)
        low = np.minimum(old.astype(int), length - 1)
        matrix = np.zeros((size, length))
        np.add.at(matrix, (new, low), 1 - (old - low))
        np.add.at(matrix, (new, np.minimum(low + 1, length - 1)), old - low)
        x = multiply_axis(x, matrix, axis)
    return x


@operator("grid_sampler_2d", "grid_sampler_3d")
def _grid_sample(x: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Array:
    """x [B, C, space] at positions grid [B, out, axes], from -1 to 1; the first entry is along the last axis."""
    if interpolation_mode == 2:
        raise FedraxError("grid_sample(mode='bicubic') is not implemented: use 'bilinear'")
    lengths = x.shape[2:]
    positions = [
        _pad_positions(
            (g + 1) / 2 * (n - 1) if align_corners else ((g + 1) * n - 1) / 2, n, padding_mode, align_corners
        )
        for g, n in zip(jnp.moveaxis(grid, -1, 0)[::-1], lengths, strict=True)
    ]
    if interpolation_mode == 1:
        return _pixels_at(x, [jnp.round(lax.stop_gradient(at)) for at in positions])
    total = jnp.zeros((), x.dtype)
    low = [jnp.floor(lax.stop_gradient(at)) for at in positions]
    for corner in product((0, 1), repeat=len(lengths)):
        pixel = [first + c for first, c in zip(low, corner, strict=True)]
        weight = math.prod(1 - jnp.abs(at - p) for at, p in zip(positions, pixel, strict=True))
        total = total + _pixels_at(x, pixel) * jnp.expand_dims(weight, 1)
    return total


def _pad_positions(at: Array, length: int, padding_mode: int, align_corners: bool) -> Array:
    """Positions with PyTorch's padding mode: unchanged (0, zeros), clipped (1, border) or reflected (2)."""
    if padding_mode == 0:
        return at
    if padding_mode == 2:
        low, span = (0.0, length - 1.0) if align_corners else (-0.5, float(length))
        beyond = jnp.abs(at - low)
        reflections = jnp.floor(beyond / max(span, 1e-30))
        rest = beyond - reflections * span
        at = (jnp.where(reflections % 2 == 0, rest + low, span - rest + low)) if span else jnp.zeros_like(at)
    return jnp.clip(at, 0, length - 1)


def _pixels_at(x: Array, positions: Sequence[Array]) -> Array:
    """The pixels [B, C, out] of x [B, C, space] at integer positions [B, out]; zero outside the image."""
    inside, index = jnp.array(True), []
    for at, length in zip(positions, x.shape[2:], strict=True):
        inside = inside & (at >= 0) & (at <= length - 1)
        index.append(jnp.clip(at, 0, length - 1).astype(jnp.int32))
    pixels = jax.vmap(lambda image, *at: image[(slice(None), *at)])(x, *index)
    return jnp.where(jnp.expand_dims(inside, 1), pixels, 0)
