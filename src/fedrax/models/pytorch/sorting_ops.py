"""PyTorch's operators that put numbers in order, find their places in one, or go along one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.pytorch.operators import OPERATORS, Context, operator


@operator("cumsum")
def _cumsum(context: Context, x: Array, dim: int, *, dtype: Any = None) -> Array:
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return jnp.cumsum(context.cast(x, dtype), axis=dim)


@operator("cumprod")
def _cumprod(context: Context, x: Array, dim: int, *, dtype: Any = None) -> Array:
    return jnp.cumprod(context.cast(x, dtype), axis=dim)


@operator("sort", "sort.stable")
def _sort(x: Array, *arguments: Any, dim: int = -1, descending: bool = False, stable: Any = None):
    if arguments:
        dim, descending = (*arguments, descending)[:2]
    order = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, order, axis=dim), order


@operator("topk")
def _topk(x: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Array, Array]:
    values, order = _sort(x, dim, largest)
    return lax.slice_in_dim(values, 0, k, axis=dim % x.ndim), lax.slice_in_dim(order, 0, k, axis=dim % x.ndim)


def _picked(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """The numbers at places along an axis, which ``index`` [.., 1, ..] names, and the places."""
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@operator("kthvalue")
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    order = jnp.argsort(x, axis=dim, stable=True)
    return _picked(x, lax.slice_in_dim(order, k - 1, k, axis=dim % x.ndim), dim, keepdim)


@operator("median.dim")
def _median(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The lower one of two in the middle."""
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@operator("median", "median.default")
def _median_of_all(x: Array) -> Array:
    """All that are the median share the gradient."""
    same = x == lax.stop_gradient(_median(x.reshape(-1))[0])
    return (jnp.where(same, x, 0).sum() / same.sum()).astype(x.dtype)


def _so_far(best: Any, x: Array, dim: int) -> tuple[Array, Array]:
    """The extremes of all numbers up to each, and the last places that have them."""
    dim %= x.ndim
    known = lax.stop_gradient(x)
    new = known == best(known, axis=dim)
    places = jnp.where(new, lax.broadcasted_iota(jnp.int32, x.shape, dim), 0)
    index = lax.cummax(places, axis=dim)
    return jnp.take_along_axis(x, index, axis=dim), index


OPERATORS["cummax"], OPERATORS["cummin"] = partial(_so_far, lax.cummax), partial(_so_far, lax.cummin)


@operator("logcumsumexp")
def _logcumsumexp(x: Array, dim: int) -> Array:
    return lax.cumlogsumexp(x, axis=dim % x.ndim)


@operator("bucketize")
def _bucketize(x: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")


@operator("searchsorted")
def _searchsorted(
    rising: Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """The places of x [..., n] among numbers that rise [..., m], or [m] for all of them."""
    if sorter is not None:
        rising = jnp.take_along_axis(rising, sorter, axis=-1)
    find = partial(jnp.searchsorted, side=side or ("right" if right else "left"))
    if rising.ndim == 1:
        return find(rising, x)
    rows = jax.vmap(find)(rising.reshape(-1, rising.shape[-1]), x.reshape(-1, x.shape[-1]))
    return rows.reshape(x.shape)
