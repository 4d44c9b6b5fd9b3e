"""Grouped convolutions by one kernel that reads patches from the images, for clients under ``vmap`` on NVIDIA GPUs.

- Before: ``conv_general_dilated`` with groups over two spatial axes, as :mod:`fedrax.xla.grouped_conv` matches it.
- After: a Pallas kernel. Each of its programs computes a tile of one group's result, [positions, D] of all N places of
  the result, as products of tiles of patches [positions, k C] with tiles of the kernel [k C, D]. Patches are gathered
  from the images into registers, so that they are never written to memory (implicit GEMM).
- Why: patches take as many bytes as the images times the entries of the kernel, which batched products write and read.
- Not for: other numbers of spatial axes, float64 and integers, patches that partition the images (reshapes suffice
  there), and tiles that would be mostly padding: fewer than `_FEWEST_RESULTS` results or `_FEWEST_TERMS` terms of sums.

Strides, padding, dilations and groups of either kind are supported: both gradients of a convolution are such
convolutions, so that one kernel computes all three. Operands keep their order of axes; the kernel computes addresses.

The kernel has been compared with JAX's operation in interpreter mode only and has not been timed: it is used where
``implicit_gemm`` is enabled, see :class:`fedrax.xla.Options`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.xla.conv.window import Space, Window

_FEWEST_RESULTS, _FEWEST_TERMS = 8, 16
"""Tensor cores multiply tiles of 16 rows and 8 columns or more. A smaller number wastes work and is never wrong."""
_MOST_ROWS, _MOST_COLUMNS, _TERMS = 64, 64, 32
"""Sizes of a tile: 64 x 64 results in registers, 32 terms of their sums at a time. Chosen from the sizes of registers
and shared memory, not by measurement; other powers of two from 16 on give the same results up to rounding."""
_DTYPES = ("float32", "bfloat16", "float16")


class _Geometry(NamedTuple):
    """Static sizes of one group's convolution."""

    batch: int
    channels: int
    results: int
    space: Space
    entries: Space
    places: Space
    window: Window
    images: tuple[int, ...]
    """Axes of batch, channel and space in the images of a group."""
    kernel: tuple[int, ...]
    """Axes of results, channels and space in its kernel."""
    output: tuple[int, ...]
    """Axes of batch, results and space in its result."""


def implicit_gemm(x: Array, kernel: Array, params: dict[str, Any], places: Space) -> Array | None:
    """The result of a grouped ``conv_general_dilated`` with these parameters; None for what the kernel does not take.

    places: spatial sizes of the result.
    """
    numbers, by_batch = params["dimension_numbers"], params["batch_group_count"]
    groups = params["feature_group_count"] * by_batch
    if x.ndim != 4 or x.dtype.name not in _DTYPES or x.dtype != kernel.dtype:
        return None
    images = _split_groups(x, numbers.lhs_spec[0 if by_batch > 1 else 1], groups)
    weights = _split_groups(kernel, numbers.rhs_spec[0], groups)
    batch, channels, *space = (images.shape[1 + axis] for axis in numbers.lhs_spec)
    results, _, *entries = (weights.shape[1 + axis] for axis in numbers.rhs_spec)
    if results < _FEWEST_RESULTS or channels * math.prod(entries) < _FEWEST_TERMS:
        return None
    axes = tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec)
    geometry = _Geometry(
        batch, channels, results, tuple(space), tuple(entries), tuple(places), Window.of(params), *axes
    )
    dtype = jnp.dtype(params["preferred_element_type"] or x.dtype)
    y = _call(geometry, params["precision"], dtype, images, weights)
    y = jnp.moveaxis(y, 0, numbers.out_spec[1])
    shape = list(y.shape)
    shape[numbers.out_spec[1] : numbers.out_spec[1] + 2] = [groups * results]
    return y.reshape(shape)


def _split_groups(a: Array, axis: int, groups: int) -> Array:
    """The groups of an axis as the first axis."""
    return jnp.moveaxis(a.reshape(*a.shape[:axis], groups, -1, *a.shape[axis + 1 :]), axis, 0)


def _call(geometry: _Geometry, precision: Any, dtype: Any, images: Array, weights: Array) -> Array:
    """The kernel on the images and the kernels of all groups [G, ...]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, columns = geometry.batch * math.prod(geometry.places), geometry.results
    tile = min(_MOST_ROWS, _power_of_two(rows)), min(_MOST_COLUMNS, _power_of_two(columns)), _TERMS
    shape = [0] * 4
    for axis, size in zip(geometry.output, (geometry.batch, geometry.results, *geometry.places), strict=True):
        shape[axis] = size
    of_group = lambda a: pl.BlockSpec((None, *a), lambda g, i, j: (g, *(0 for _ in a)))  # noqa: E731
    return pl.pallas_call(
        partial(_tile, geometry, precision, tile),
        jax.ShapeDtypeStruct((len(images), *shape), dtype),
        grid=(len(images), pl.cdiv(rows, tile[0]), pl.cdiv(columns, tile[1])),
        in_specs=[of_group(images.shape[1:]), of_group(weights.shape[1:])],
        out_specs=of_group(tuple(shape)),
        interpret=jax.default_backend() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
        name="implicit_gemm",
    )(images, weights)


def _power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``, at least 16."""
    return max(16, 1 << (size - 1).bit_length())


def _tile(geometry: _Geometry, precision: Any, tile: tuple[int, int, int], images: Any, weights: Any, out: Any) -> None:
    """One program of the kernel: one tile of one group's result."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    rows, columns = (pl.program_id(axis) * n + _range(n) for axis, n in zip((1, 2), tile[:2], strict=True))
    places, entries, channels = geometry.places, geometry.entries, geometry.channels
    terms = math.prod(entries) * channels
    (example, place), is_column = _split(rows, math.prod(places)), columns < geometry.results
    is_row = example < geometry.batch
    where = _split(place, places[1])

    def add_terms(step: Array, total: Array) -> Array:
        term = step * tile[2] + _range(tile[2])
        entry, channel = _split(term, channels)
        of_kernel, met, inside = _split(entry, entries[1]), [], is_row[:, None] & (term < terms)[None]
        for axis in range(2):
            (low, _), gap = geometry.window.pads[axis], geometry.window.gaps[axis]
            at = where[axis][:, None] * geometry.window.strides[axis] - low
            at += of_kernel[axis][None] * geometry.window.dilation[axis]
            inside &= (at >= 0) & (at <= (geometry.space[axis] - 1) * gap)
            if gap > 1:  # zeros between the pixels
                at, between = _split(at, gap)
                inside &= between == 0
            met.append(at)
        pixels = _element(images, geometry.images, (example[:, None], channel[None], *met), inside.shape)
        patches = triton.load(pixels, mask=inside, other=0)
        is_weight = (term < terms)[:, None] & is_column[None]
        by_term = [i[:, None] for i in (channel, *of_kernel)]
        entry_weights = _element(weights, geometry.kernel, (columns[None], *by_term), is_weight.shape)
        factors = triton.load(entry_weights, mask=is_weight, other=0)
        return total + lax.dot_general(patches, factors, (((1,), (0,)), ((), ())), precision, jnp.float32)

    steps = np.int32(pl.cdiv(terms, tile[2]))
    total = lax.fori_loop(np.int32(0), steps, add_terms, jnp.zeros(tile[:2], jnp.float32))
    mask = is_row[:, None] & is_column[None]
    by_row = [i[:, None] for i in where]
    target = _element(out, geometry.output, (example[:, None], columns[None], *by_row), mask.shape)
    triton.store(target, total.astype(out.dtype), mask=mask)


def _split(index: Array, inner: int) -> tuple[Array, Array]:
    """(quotient, remainder) of indices; those of negative ones, which are masked, are not the floor's."""
    divisor = np.int32(inner)
    return lax.div(index, divisor), lax.rem(index, divisor)


def _range(size: int) -> Array:
    """0 to ``size``, int32 whatever jax_enable_x64 is."""
    return lax.iota(jnp.int32, size)


def _element(ref: Any, axes: Sequence[int], indices: Sequence[Array], shape: tuple[int, ...]) -> Any:
    """The elements of a reference at ``indices``, one for each of its ``axes``."""
    by_axis = {axis: jnp.broadcast_to(index, shape) for axis, index in zip(axes, indices, strict=True)}
    return ref.at[tuple(by_axis[axis] for axis in range(len(axes)))]
