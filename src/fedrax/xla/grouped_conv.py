"""Grouped convolutions as batched matrix products, for clients under ``vmap`` on accelerators.

Matches ``conv_general_dilated`` with feature or batch groups. ``jax.vmap`` makes one of clients with a kernel each, a
group a client, for which the libraries of accelerators have no fast code. :func:`vmap` replaces it by patches (im2col)
and a batched ``dot_general``, which these libraries do best. Grouped convolutions of the user's own go the same way.

It does not apply on CPUs, to integers, or where both kernel and output have more than `MOST_TAPS` places. Groups are
computed in a loop where their patches exceed `Limits.grouped_conv_bytes`.

Shapes are written with N for the batch, G for groups, C and D for channels in and out of one of them, "space" for
height, width and the like, and k for these axes of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import (
    MOST_TAPS,
    Space,
    Window,
    crop_negative_padding,
    is_half_precision,
    out_space,
    patches,
    taps,
)
from fedrax.xla.linear_algebra import lower_linear_algebra
from fedrax.xla.options import is_enabled, limits, note_applied
from fedrax.xla.rewriting import rewrite

_MAX_DEPTHWISE_CHANNELS = 4
"""Channels in times channels out, up to which sums of images are better than products."""


def vmap(function: Callable, in_axes: Any = 0) -> Callable:
    """``jax.vmap(function, in_axes)`` with convolutions in groups as products, on accelerators.

    Values differ by rounding only.
    """
    mapped = jax.vmap(function, in_axes)
    if jax.default_backend() == "cpu":
        return lower_linear_algebra(mapped)
    return lower_grouped_convs(mapped) if is_enabled("grouped_conv") else mapped


def lower_grouped_convs(function: Callable) -> Callable:
    """``function`` with its convolutions in groups as products."""
    return rewrite(function, {"conv_general_dilated": lower_grouped_conv})


def lower_grouped_conv(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for ``conv_general_dilated``; None without groups, for integers and for kernels that are too large."""
    (x, kernel), params = inputs, equation.params
    by_batch = params["batch_group_count"]
    groups = params["feature_group_count"] * by_batch  # one of both is one
    if groups == 1 or not jnp.issubdtype(x.dtype, jnp.floating) or x.size == 0 or kernel.size == 0:
        return None
    numbers = params["dimension_numbers"]
    window = Window(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"])
    space = len(window.strides)
    batch, channel, *pixels = numbers.lhs_spec
    out, into, *entries = numbers.rhs_spec
    x, kernel = x.transpose(batch, *pixels, channel), kernel.transpose(*entries, into, out)
    places = out_space(x.shape[1:-1], kernel.shape[:-2], window)
    entries = kernel.shape[:-2]
    cut = _is_partition(x.shape[1:-1], entries, window, places)
    if 0 in places or (not cut and min(math.prod(places), math.prod(entries)) > MOST_TAPS):
        return None
    note_applied("grouped_conv")
    of_batch = x.reshape(groups, -1, *x.shape[1:]) if by_batch > 1 else jnp.moveaxis(_split(x, groups), -2, 0)
    of_kernel = jnp.moveaxis(_split(kernel, groups), -2, 0)
    y = _group_dots(of_batch, of_kernel, window, places, params)  # [G, N, space, D]
    y = jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], -1)
    here = [0, space + 1, *range(1, space + 1)]
    return y.transpose([here[numbers.out_spec.index(axis)] for axis in range(space + 2)])


def _split(a: Array, groups: int) -> Array:
    """[..., G C] -> [..., G, C]."""
    return a.reshape(*a.shape[:-1], groups, -1)


def _group_dots(x: Array, kernel: Array, window: Window, places: tuple[int, ...], params: dict[str, Any]) -> Array:
    """[G, N, space, C], [G, k, C, D] -> [G, N, space, D], as many groups at once as the limit on patches allows."""

    def one(pair: tuple[Array, Array]) -> Array:
        return _product(*pair, window, places, params)

    seen = math.prod(places) * math.prod(kernel.shape[1:-1]) * x.shape[1] * x.dtype.itemsize  # of a group
    together = max(1, limits().grouped_conv_bytes // seen)
    if together >= len(x):
        return jax.vmap(one)((x, kernel))
    return lax.map(one, (x, kernel), batch_size=together)


def _is_partition(space: Space, entries: Space, window: Window, places: Space) -> bool:
    """Whether each place sees pixels that no other sees, and none are left over: as patches, or every so many."""
    plain = not any(map(any, window.pads)) and set(window.gaps) <= {1}
    exact = all(n == k * m for n, k, m in zip(space, entries, places, strict=True))
    ones = (1,) * len(space)
    patches, apart = (entries, ones), (ones, places)
    return plain and exact and (window.strides, window.dilation) in (patches, apart)


def _partition_patches(x: Array, entries: Space, window: Window, places: Space) -> Array:
    """[N, places, k, C] of images that are cut once."""
    space, inner = len(entries), window.strides == entries
    sizes = zip(places, entries, strict=True) if inner else zip(entries, places, strict=True)
    x = x.reshape(len(x), *(n for pair in sizes for n in pair), x.shape[-1])
    outer = [range(1, 2 * space, 2), range(2, 2 * space + 1, 2)]
    return x.transpose(0, *outer[not inner], *outer[inner], x.ndim - 1)


def _product(x: Array, kernel: Array, window: Window, places: tuple[int, ...], params: dict[str, Any]) -> Array:
    """[N, space, C], [k, C, D] -> [N, space, D]."""
    entries, (channels, results) = kernel.shape[:-2], kernel.shape[-2:]
    precision, sums = params["precision"], params["preferred_element_type"]
    result = jnp.dtype(sums or x.dtype)
    few_places = math.prod(places) < math.prod(entries)  # as in the gradient of a kernel
    x, window = crop_negative_padding(x, window)
    if channels * results <= _MAX_DEPTHWISE_CHANNELS and not few_places:
        short = is_half_precision(result)  # numbers of 16 bits are summed in 32, as products' are
        wide = [a.astype(jnp.float32 if short else result) for a in (x, kernel)]
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
