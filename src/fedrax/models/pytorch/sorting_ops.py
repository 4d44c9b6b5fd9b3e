"""PyTorch's operators of sorting, searching and cumulative reductions."""

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


def _take_with_index(x: Array, index: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """(entries at ``index`` [.., 1, ..] along an axis, index)."""
    value = jnp.take_along_axis(x, index, axis=dim)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@operator("kthvalue")
def _kthvalue(x: Array, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    order = jnp.argsort(x, axis=dim, stable=True)
    return _take_with_index(x, lax.slice_in_dim(order, k - 1, k, axis=dim % x.ndim), dim, keepdim)


@operator("median.dim")
def _median(x: Array, dim: int = -1, keepdim: bool = False) -> tuple[Array, Array]:
    """The median along an axis and its index; the lower of two middle values."""
    return _kthvalue(x, (x.shape[dim] + 1) // 2, dim, keepdim)


@operator("median", "median.default")
def _median_of_all(x: Array) -> Array:
    """The median of all entries; entries equal to it share the gradient."""
    is_median = x == lax.stop_gradient(_median(x.reshape(-1))[0])
    return (jnp.where(is_median, x, 0).sum() / is_median.sum()).astype(x.dtype)


def _cumulative_extreme(best: Any, x: Array, dim: int) -> tuple[Array, Array]:
    """(cumulative maximum or minimum, index of its last occurrence)."""
    dim %= x.ndim
    values = lax.stop_gradient(x)
    is_extreme = values == best(values, axis=dim)
    places = jnp.where(is_extreme, lax.broadcasted_iota(jnp.int32, x.shape, dim), 0)
    index = lax.cummax(places, axis=dim)
    return jnp.take_along_axis(x, index, axis=dim), index


OPERATORS["cummax"], OPERATORS["cummin"] = (partial(_cumulative_extreme, best) for best in (lax.cummax, lax.cummin))


@operator("logcumsumexp")
def _logcumsumexp(x: Array, dim: int) -> Array:
    return lax.cumlogsumexp(x, axis=dim % x.ndim)


@operator("bucketize")
def _bucketize(x: Any, boundaries: Array, *, out_int32: bool = False, right: bool = False) -> Array:
    return jnp.searchsorted(boundaries, x, side="right" if right else "left")


@operator("searchsorted")
def _searchsorted(
    ordered: Array,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Array | None = None,
) -> Array:
    """Indices at which x [..., n] would be inserted into ascending numbers [..., m] or [m]."""
    if sorter is not None:
        ordered = jnp.take_along_axis(ordered, sorter, axis=-1)
    find = partial(jnp.searchsorted, side=side or ("right" if right else "left"))
    if ordered.ndim == 1:
        return find(ordered, x)
    rows = jax.vmap(find)(ordered.reshape(-1, ordered.shape[-1]), x.reshape(-1, x.shape[-1]))
    return rows.reshape(x.shape)
