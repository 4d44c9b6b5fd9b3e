"""Grouped convolutions as batched matrix products, for clients under ``vmap`` on accelerators.

- Before: ``conv_general_dilated`` with feature or batch groups: ``jax.vmap`` over clients, each with its kernel, makes
  a convolution with a group for each client. Grouped convolutions of user code are matched as well.
- After: patches (im2col) and a batched ``dot_general``, in a loop over groups where the patches of all groups exceed
  `Limits.grouped_conv_bytes`.
- Why: libraries for accelerators have no fast code for convolutions with many groups, but for batched products.
- Not for: CPUs (see :mod:`fedrax.xla.conv`), integers, and convolutions whose kernel and output both have more than
  `MOST_TAPS` positions.

Shapes are written with N for the batch, G for groups, C and D for input and output channels of one group, "space" for
spatial axes such as height and width, and k for the spatial axes of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.implicit_gemm import implicit_gemm
from fedrax.xla.conv.window import (
    MOST_TAPS,
    Space,
    Window,
    crop_negative_padding,
    is_half_precision,
    out_space,
    patches,
    taps,
    to_output_layout,
)
from fedrax.xla.linear_algebra import lower_linear_algebra
from fedrax.xla.options import is_enabled, limits, note_applied
from fedrax.xla.rewriting import rewrite

_MAX_DEPTHWISE_CHANNELS = 4
"""Input times output channels of a group up to which shifted images are summed instead of multiplied as matrices."""


def vmap(function: Callable, in_axes: Any = 0) -> Callable:
    """``jax.vmap(function, in_axes)``, with grouped convolutions as matrix products on accelerators.

    On CPUs, factorizations and small products are lowered by :mod:`fedrax.xla.linear_algebra`. Values differ by
    rounding only.
    """
    mapped = jax.vmap(function, in_axes)
    if jax.default_backend() == "cpu":
        return lower_linear_algebra(mapped)
    return lower_grouped_convs(mapped) if is_enabled("grouped_conv") else mapped


def lower_grouped_convs(function: Callable) -> Callable:
    """Transform a function to compute grouped convolutions as matrix products."""
    return rewrite(function, {"conv_general_dilated": lower_grouped_conv})


def lower_grouped_conv(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``conv_general_dilated``; None without groups, for integers, and for large kernels on large images."""
    (x, kernel), params = inputs, equation.params
    by_batch = params["batch_group_count"]
    groups = params["feature_group_count"] * by_batch  # at most one of them exceeds 1
    if groups == 1 or not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0 or kernel.size == 0:
        return None
    numbers = params["dimension_numbers"]
    window = Window.of(params)
    batch, channel, *pixels = numbers.lhs_spec
    out, into, *axes = numbers.rhs_spec
    space, entries = (tuple(a.shape[axis] for axis in of) for a, of in ((x, pixels), (kernel, axes)))
    places = out_space(space, entries, window)
    if 0 in places:
        return None
    partition = _is_partition(space, entries, window, places)
    if not partition and is_enabled("implicit_gemm") and jax.default_backend() != "tpu":
        y = implicit_gemm(x, kernel, params, places)
        if y is not None:
            note_applied("implicit_gemm")
            return y
    if not partition and min(math.prod(places), math.prod(entries)) > MOST_TAPS:
        return None
    note_applied("grouped_conv")
    x, kernel = x.transpose(batch, *pixels, channel), kernel.transpose(*axes, into, out)
    of_batch = x.reshape(groups, -1, *x.shape[1:]) if by_batch > 1 else jnp.moveaxis(_split(x, groups), -2, 0)
    of_kernel = jnp.moveaxis(_split(kernel, groups), -2, 0)
    y = _group_dots(of_batch, of_kernel, window, places, params)  # [G, N, space, D]
    y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], -1)
    return to_output_layout(y, numbers)


def _split(a: Array, groups: int) -> Array:
    """[..., G C] -> [..., G, C]."""
    return a.reshape(*a.shape[:-1], groups, -1)


def _group_dots(x: Array, kernel: Array, window: Window, places: tuple[int, ...], params: dict[str, Any]) -> Array:
    """[G, N, space, C], [G, k, C, D] -> [G, N, space, D], as many groups at once as the limit on patches allows."""

    def one(pair: tuple[Array, Array]) -> Array:
        return _product(*pair, window, places, params)

    patch_bytes = math.prod(places) * math.prod(kernel.shape[1:-1]) * x.shape[1] * x.dtype.itemsize  # of a group
    together = max(1, limits().grouped_conv_bytes // patch_bytes)
    if together >= len(x):
        return jax.vmap(one)((x, kernel))
    return lax.map(one, (x, kernel), batch_size=together)


def _is_partition(space: Space, entries: Space, window: Window, places: Space) -> bool:
    """Whether the patches partition the images: adjacent patches, or interleaved ones (dilation)."""
    plain = not any(map(any, window.pads)) and set(window.gaps) <= {1}
    exact = all(n == k * m for n, k, m in zip(space, entries, places, strict=True))
    ones = (1,) * len(space)
    adjacent, interleaved = (entries, ones), (ones, places)
    return plain and exact and (window.strides, window.dilation) in (adjacent, interleaved)


def _partition_patches(x: Array, entries: Space, window: Window, places: Space) -> Array:
    """Patches [N, places, k, C] that partition the images, by reshape and transpose."""
    space, inner = len(entries), window.strides == entries
    sizes = zip(places, entries, strict=True) if inner else zip(entries, places, strict=True)
    x = x.reshape(len(x), *(n for pair in sizes for n in pair), x.shape[-1])
    outer = [range(1, 2 * space, 2), range(2, 2 * space + 1, 2)]
    return x.transpose(0, *outer[not inner], *outer[inner], x.ndim - 1)


def _product(x: Array, kernel: Array, window: Window, places: tuple[int, ...], params: dict[str, Any]) -> Array:
    """The convolution of one group, [N, space, C], [k, C, D] -> [N, space, D]."""
    entries, (channels, results) = kernel.shape[:-2], kernel.shape[-2:]
    precision, sums = params["precision"], params["preferred_element_type"]
    result = jnp.dtype(sums or x.dtype)
    few_places = math.prod(places) < math.prod(entries)  # the gradient of a kernel
    x, window = crop_negative_padding(x, window)
    if channels * results <= _MAX_DEPTHWISE_CHANNELS and not few_places:
        # half precision is accumulated in float32, as by dot_general
        wide = [a.astype(jnp.float32 if is_half_precision(result) else result) for a in (x, kernel)]
        total: Any = 0
        for index, seen in taps(wide[0], entries, window, places):
            total = total + (seen[..., None] * wide[1][index]).sum(-2)
        return total.astype(result)
    if _is_partition(x.shape[1:-1], entries, window, places):
        seen = _partition_patches(x, entries, window, places)
        over = tuple(range(1 + len(places), seen.ndim)), tuple(range(kernel.ndim - 1))
    elif few_places:
        seen = jnp.stack(list(patches(x, entries, window, places)), 1)  # [N, places, k, C]
        over = tuple(range(2, seen.ndim)), tuple(range(kernel.ndim - 1))
    else:
        seen = jnp.concatenate([one for _, one in taps(x, entries, window, places)], -1)
        kernel = kernel.reshape(-1, results)
        over = (seen.ndim - 1,), (0,)
    y = lax.dot_general(seen, kernel, (over, ((), ())), precision, sums)
    return y.reshape(len(x), *places, results)
