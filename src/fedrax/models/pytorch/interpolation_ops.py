"""PyTorch's images at other places: interpolation and grids; images are [B, C, ...] with the space last."""

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


def along(x: Array, matrix: np.ndarray, axis: int) -> Array:
    """matrix [out, length] times an axis of x."""
    if (matrix == matrix.flat[0]).all() and len(matrix) == 1:
        return x.mean(axis, keepdims=True)
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(matrix.T, x.dtype), -1, axis)


def _targets(x: Array, output_size: Any, factors: Any) -> list[tuple[int, int, float]]:
    """(axis, new length, old pixels a new one) of each axis of space."""
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
        length, places = x.shape[axis], np.arange(size)
        at = places * (length - 1) / max(size - 1, 1) if align_corners else np.maximum((places + 0.5) * step - 0.5, 0)
        low = np.minimum(at.astype(int), length - 1)
        matrix = np.zeros((size, length))
        np.add.at(matrix, (places, low), 1 - (at - low))
        np.add.at(matrix, (places, np.minimum(low + 1, length - 1)), at - low)
        x = along(x, matrix, axis)
    return x


@operator("grid_sampler_2d", "grid_sampler_3d")
def _grid_sample(x: Array, grid: Array, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Array:
    """x [B, C, space] at places grid [B, out, axes of space]: -1 and 1 are the edges, and the last axis comes first."""
    if interpolation_mode == 2:
        raise FedraxError("grid_sample(mode='bicubic') has no form here: use 'bilinear'")
    lengths = x.shape[2:]
    places = [
        _inside((g + 1) / 2 * (n - 1) if align_corners else ((g + 1) * n - 1) / 2, n, padding_mode, align_corners)
        for g, n in zip(jnp.moveaxis(grid, -1, 0)[::-1], lengths, strict=True)
    ]
    if interpolation_mode == 1:
        return _taken(x, [jnp.round(lax.stop_gradient(at)) for at in places])
    total = jnp.zeros((), x.dtype)
    first = [jnp.floor(lax.stop_gradient(at)) for at in places]
    for corner in product((0, 1), repeat=len(lengths)):
        share = math.prod(1 - jnp.abs(at - (low + c)) for at, low, c in zip(places, first, corner, strict=True))
        total = total + _taken(x, [low + c for low, c in zip(first, corner, strict=True)]) * jnp.expand_dims(share, 1)
    return total


def _inside(at: Array, length: int, padding_mode: int, align_corners: bool) -> Array:
    """Places beyond an axis on it: as they are (0), at its ends (1), or turned back there (2)."""
    if padding_mode == 0:
        return at
    if padding_mode == 2:
        low, span = (0.0, length - 1.0) if align_corners else (-0.5, float(length))
        beyond = jnp.abs(at - low)
        turns = jnp.floor(beyond / max(span, 1e-30))
        rest = beyond - turns * span
        at = (jnp.where(turns % 2 == 0, rest + low, span - rest + low)) if span else jnp.zeros_like(at)
    return jnp.clip(at, 0, length - 1)


def _taken(x: Array, places: Sequence[Array]) -> Array:
    """The pixels of x [B, C, space] at whole places [B, out], [B, C, out]; beyond the edges there is nothing."""
    inside, index = jnp.array(True), []
    for at, length in zip(places, x.shape[2:], strict=True):
        inside = inside & (at >= 0) & (at <= length - 1)
        index.append(jnp.clip(at, 0, length - 1).astype(jnp.int32))
    found = jax.vmap(lambda image, *at: image[(slice(None), *at)])(x, *index)
    return jnp.where(jnp.expand_dims(inside, 1), found, 0)
