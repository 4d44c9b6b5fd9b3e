"""PyTorch's operators that change shapes, index arrays and create arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.models.pytorch.operators import OPERATORS, Context, axes, operator

OPERATORS |= {
    "permute": lambda x, dims: jnp.transpose(x, [d % x.ndim for d in dims]),
    "transpose": lambda x, dim0, dim1: jnp.swapaxes(x, dim0, dim1) if x.ndim else x,
    "t": lambda x: x.T,
    "numpy_T": lambda x: x.T,
    "movedim": lambda x, source, destination: jnp.moveaxis(x, source, destination),
    "view_as": lambda x, other: x.reshape(other.shape),
    "stack": lambda tensors, dim=0: jnp.stack(tensors, axis=dim),
    "flip": lambda x, dims: jnp.flip(x, axes(dims, x.ndim)),
    "tril": lambda x, diagonal=0: jnp.tril(x, diagonal),
    "triu": lambda x, diagonal=0: jnp.triu(x, diagonal),
    "index_select": lambda x, dim, index: jnp.take(x, index, axis=dim),
    "gather": lambda x, dim, index, sparse_grad=False: x[_index_along(x, dim, index)] if x.ndim else x,
    "diagonal": lambda x, offset=0, dim1=0, dim2=1: jnp.diagonal(x, offset, dim1, dim2),
    "expand_as": lambda x, other: jnp.broadcast_to(x, other.shape),
}

# --- Shapes ----------------------------------------------------------------------------------------


@operator("view", "_unsafe_view", "reshape")
def _view(x: Array, size: Sequence[int], *_: Any) -> Array:
    if not isinstance(size, Sequence):
        raise FedraxError("Tensor.view(dtype) is not supported: use Tensor.to(dtype), which converts values")
    return x.reshape(tuple(size))


@operator("flatten")
def _flatten(x: Array, start_dim: int = 0, end_dim: int = -1) -> Array:
    if x.ndim == 0:
        return x.reshape(1)
    first, last = start_dim % x.ndim, end_dim % x.ndim
    return x.reshape(*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :])


@operator("unflatten")
def _unflatten(x: Array, dim: int, sizes: Sequence[int]) -> Array:
    dim %= x.ndim
    known = -math.prod(sizes) if -1 in sizes else 1
    lengths = [x.shape[dim] // known if size == -1 else size for size in sizes]
    return x.reshape(*x.shape[:dim], *lengths, *x.shape[dim + 1 :])


@operator("unsqueeze")
def _unsqueeze(x: Array, dim: int) -> Array:
    return jnp.expand_dims(x, dim)


@operator("squeeze")
def _squeeze(x: Array, dim: Any = None) -> Array:
    return x.squeeze(tuple(d for d in axes(dim, x.ndim) if x.ndim and x.shape[d] == 1))


@operator("expand")
def _expand(x: Array, size: Sequence[int], *, implicit: bool = False) -> Array:
    lengths = [1] * (len(size) - x.ndim) + list(x.shape)
    return jnp.broadcast_to(x, [have if want == -1 else want for have, want in zip(lengths, size, strict=True)])


@operator("repeat")
def _repeat(x: Array, repeats: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(repeats))


@operator("tile")
def _tile(x: Array, dims: Sequence[int]) -> Array:
    return jnp.tile(x, tuple(dims))


@operator("repeat_interleave.self_int")
def _repeat_interleave(x: Array, repeats: int, dim: int | None = None, *, output_size: Any = None) -> Array:
    return jnp.repeat(x, repeats, axis=dim)


@operator("roll")
def _roll(x: Array, shifts: Any, dims: Any = ()) -> Array:
    return jnp.roll(x, tuple(shifts), tuple(dims)) if dims else jnp.roll(x.reshape(-1), shifts).reshape(x.shape)


@operator("cat", "concat")
def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    nonempty = [t for t in tensors if t.shape != (0,)] or list(tensors)  # PyTorch ignores empty vectors
    return jnp.concatenate(nonempty, axis=dim)


@operator("split", "split_with_sizes", "split.sizes")
def _split(x: Array, size: Any, dim: int = 0) -> list[Array]:
    length = x.shape[dim]
    sizes = list(size) if isinstance(size, Sequence) else [min(size, length - i) for i in range(0, length, size)]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return jnp.split(x, ends, axis=dim)


@operator("chunk")
def _chunk(x: Array, chunks: int, dim: int = 0) -> list[Array]:
    return _split(x, -(-x.shape[dim] // chunks), dim)


@operator("unbind")
def _unbind(x: Array, dim: int = 0) -> list[Array]:
    return [lax.index_in_dim(x, i, dim % x.ndim, keepdims=False) for i in range(x.shape[dim])]


@operator("constant_pad_nd", "pad")
def _pad(x: Array, pad: Sequence[int], mode: Any = "constant", value: Any = None) -> Array:
    value = mode if value is None and not isinstance(mode, str) else value
    mode = mode if isinstance(mode, str) else "constant"
    widths = [(0, 0)] * (x.ndim - len(pad) // 2) + list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    kinds = {"constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if mode == "constant":
        return lax.pad(x, jnp.asarray(value or 0, x.dtype), [(low, high, 0) for low, high in widths])
    return jnp.pad(x, widths, mode=kinds[mode])


@operator("reflection_pad1d", "reflection_pad2d", "reflection_pad3d")
def _reflection_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad(x, padding, "reflect")


@operator("replication_pad1d", "replication_pad2d", "replication_pad3d")
def _replication_pad(x: Array, padding: Sequence[int]) -> Array:
    return _pad(x, padding, "replicate")


@operator("pixel_shuffle")
def _pixel_shuffle(x: Array, upscale_factor: int) -> Array:
    r = upscale_factor
    *batch, channels, height, width = x.shape
    parts = x.reshape(*batch, channels // r**2, r, r, height, width)
    n = len(batch)
    order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
    return parts.transpose(order).reshape(*batch, channels // r**2, height * r, width * r)


@operator("pixel_unshuffle")
def _pixel_unshuffle(x: Array, downscale_factor: int) -> Array:
    r = downscale_factor
    *batch, channels, height, width = x.shape
    parts = x.reshape(*batch, channels, height // r, r, width // r, r)
    n = len(batch)
    order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
    return parts.transpose(order).reshape(*batch, channels * r**2, height // r, width // r)


@operator("unfold")
def _unfold(x: Array, dimension: int, size: int, step: int) -> Array:
    dimension %= x.ndim
    starts = jnp.arange(0, x.shape[dimension] - size + 1, step)
    windows = jnp.take(x, starts[:, None] + jnp.arange(size), axis=dimension)
    return jnp.moveaxis(windows, dimension + 1, -1)


# --- Indexing ------------------------------------------------------------------------------------------


@operator("select")
def _select(x: Array, dim: int, index: Any) -> Array:
    dim %= x.ndim
    if isinstance(index, int):
        return lax.index_in_dim(x, index, dim, keepdims=False)
    return jnp.take(x, index, axis=dim)


def _slices(x: Array, dim: int, start: Any, end: Any, step: int) -> tuple[slice, ...]:
    """An index that slices one axis."""
    return (*[slice(None)] * (dim % x.ndim), slice(start, end, step))


@operator("slice")
def _slice(x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x[_slices(x, dim, start, end, step)]


@operator("narrow")
def _narrow(x: Array, dim: int, start: int, length: int) -> Array:
    return lax.slice_in_dim(x, start, start + length, axis=dim % x.ndim)


@operator("slice_scatter")
def _slice_scatter(x: Array, source: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x.at[_slices(x, dim, start, end, step)].set(source)


@operator("select_scatter")
def _select_scatter(x: Array, source: Array, dim: int, index: int) -> Array:
    return x.at[(*[slice(None)] * (dim % x.ndim), index)].set(source)


@operator("copy")
def _copy(x: Array, source: Array, non_blocking: bool = False) -> Array:
    return jnp.broadcast_to(source, x.shape).astype(x.dtype)


@operator("index", "_unsafe_index")
def _index(x: Array, indices: Sequence[Array | None]) -> Array:
    if any(i is not None and i.dtype == bool for i in indices):
        raise FedraxError("indexing by a mask gives arrays of unknown length: use torch.where or masked_fill")
    return x[tuple(slice(None) if i is None else i for i in indices)]


@operator("index_put", "_unsafe_index_put")
def _index_put(x: Array, indices: Sequence[Array | None], values: Array, accumulate: bool = False) -> Array:
    given = [i for i in indices if i is not None]
    if len(given) == 1 and given[0].dtype == bool and indices[0] is not None and values.size == 1:
        mask = given[0].reshape(given[0].shape + (1,) * (x.ndim - given[0].ndim))
        return jnp.where(mask, values.reshape(()), x)
    if any(i.dtype == bool for i in given):
        raise FedraxError("setting by a mask needs one value: use torch.where or masked_fill")
    target = x.at[tuple(slice(None) if i is None else i for i in indices)]
    return target.add(values) if accumulate else target.set(values)


def _index_along(x: Array, dim: int, index: Array) -> tuple[Array, ...]:
    """Indices of all axes for entries at ``index`` along one axis, as in ``torch.gather``."""
    indices = list(jnp.indices(index.shape, sparse=True))
    indices[dim % x.ndim] = index
    return tuple(indices)


@operator("scatter.src", "scatter.value")
def _scatter(x: Array, dim: int, index: Array, source: Any) -> Array:
    values = source if jnp.ndim(source) == 0 else source[tuple(map(slice, index.shape))]
    return x.at[_index_along(x, dim, index)].set(values)


@operator("scatter_add")
def _scatter_add(x: Array, dim: int, index: Array, source: Array) -> Array:
    return x.at[_index_along(x, dim, index)].add(source[tuple(map(slice, index.shape))])


@operator("scatter_reduce.two")
def _scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, *, include_self: bool = True
) -> Array:
    """Sum, mean, maximum or minimum of the entries scattered to an index; ties share the gradient equally."""
    source, target = source[tuple(map(slice, index.shape))], _index_along(x, dim, index)
    counts = jnp.full(x.shape, int(include_self)).at[target].add(1)
    if reduce in ("sum", "mean"):
        start = x if include_self else jnp.where(counts > 0, 0, x)
        total = start.at[target].add(source)
        return total / jnp.maximum(counts, 1) if reduce == "mean" else total
    if reduce not in ("amax", "amin"):
        raise FedraxError(f"scatter_reduce(reduce={reduce!r}) is not implemented: use sum, mean, amax or amin")
    sign = 1 if reduce == "amax" else -1
    signed_source, signed_x = sign * lax.stop_gradient(source), sign * lax.stop_gradient(x)
    start = signed_x if include_self else jnp.where(counts > 0, -jnp.inf, signed_x)
    largest = start.at[target].max(signed_source)
    own, others = signed_x == largest, signed_source == largest[target]
    own = own if include_self else own & (counts == 0)
    ties = own.astype(x.dtype).at[target].add(others)
    return jnp.where(own, x, 0).at[target].add(jnp.where(others, source, 0)) / jnp.maximum(ties, 1)


@operator("one_hot")
def _one_hot(x: Array, num_classes: int = -1) -> Array:
    if num_classes < 0:
        raise FedraxError("one_hot needs num_classes, because its length would depend on the data: set it")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


@operator("embedding")
def _embedding(
    weight: Array, indices: Array, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Array:
    if scale_grad_by_freq:
        raise FedraxError("embedding(scale_grad_by_freq=True) is not implemented: leave it False")
    rows = jnp.take(weight, indices, axis=0)
    if padding_idx >= 0:  # PyTorch does not train the padding row; a change of the table would copy it
        rows = jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)
    return rows


@operator("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Array,
    indices: Array,
    offsets: Array,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Array, None, None, None]:
    """Sum (mode 0), mean (1) or maximum (2) of the rows in each bag: the tokens from its offset to the next one."""
    starts = offsets[:-1] if include_last_offset else offsets
    tokens, bags = jnp.arange(indices.size, dtype=jnp.int32), len(starts)
    bag = jnp.searchsorted(starts, tokens, side="right") - 1
    valid = (indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool))[:, None]
    rows = _embedding(weight, indices, padding_idx, scale_grad_by_freq)
    if mode == 2:
        values = jnp.where(valid, lax.stop_gradient(rows), -jnp.inf)
        largest = jax.ops.segment_max(values, bag, bags)
        is_maximum = valid & (values == largest[bag])
        first = jax.ops.segment_min(jnp.where(is_maximum, tokens[:, None], indices.size), bag, bags)
        maxima = jnp.take_along_axis(rows, jnp.minimum(first, indices.size - 1), 0)
        return jnp.where(first < indices.size, maxima, 0), None, None, None
    rows = rows if per_sample_weights is None else rows * per_sample_weights[:, None]
    total = jax.ops.segment_sum(jnp.where(valid, rows, 0), bag, bags)
    if mode == 1:
        total = total / jnp.maximum(jax.ops.segment_sum(valid.astype(rows.dtype), bag, bags), 1)
    return total, None, None, None


# --- Creation -------------------------------------------------------------------------------------------


@operator("zeros", "empty", "new_zeros", "new_empty")
def _zeros(context: Context, *arguments: Any, dtype: Any = None, **_: Any) -> Array:
    return _filled(context, arguments, 0, dtype)


@operator("ones", "new_ones")
def _ones(context: Context, *arguments: Any, dtype: Any = None, **_: Any) -> Array:
    return _filled(context, arguments, 1, dtype)


@operator("full", "new_full")
def _full(context: Context, *arguments: Any, dtype: Any = None, **_: Any) -> Array:
    *size, value = arguments
    kind = {bool: jnp.bool_, int: jnp.int32}.get(type(value))
    return _filled(context, tuple(size), value, dtype, kind)


def _filled(context: Context, arguments: tuple, value: Any, dtype: Any, kind: Any = None) -> Array:
    """A constant array; ``arguments`` are (size) or (array, size) of ``new_...``, whose dtype is the default."""
    *like, size = arguments
    kind = like[0].dtype if like else kind or context.float_type
    return jnp.full(tuple(size), value, kind if dtype is None else context.type_of(dtype))


@operator("zeros_like", "empty_like")
def _zeros_like(context: Context, x: Array, *, dtype: Any = None, **_: Any) -> Array:
    return jnp.zeros(x.shape, x.dtype if dtype is None else context.type_of(dtype))


@operator("ones_like")
def _ones_like(context: Context, x: Array, *, dtype: Any = None, **_: Any) -> Array:
    return jnp.ones(x.shape, x.dtype if dtype is None else context.type_of(dtype))


@operator("full_like")
def _full_like(context: Context, x: Array, value: Any, *, dtype: Any = None, **_: Any) -> Array:
    return jnp.full(x.shape, value, x.dtype if dtype is None else context.type_of(dtype))


@operator("scalar_tensor")
def _scalar(context: Context, value: Any, *, dtype: Any = None, **_: Any) -> Array:
    return context.cast(value, dtype)


@operator("arange")
def _arange(context: Context, *limits: Any, dtype: Any = None, **_: Any) -> Array:
    floating = any(isinstance(limit, float) for limit in limits)
    kind = context.float_type if floating else jnp.int32
    return jnp.arange(*limits, dtype=kind if dtype is None else context.type_of(dtype))


@operator("linspace")
def _linspace(context: Context, start: Any, end: Any, steps: int, *, dtype: Any = None, **_: Any) -> Array:
    return jnp.linspace(start, end, steps, dtype=context.float_type if dtype is None else context.type_of(dtype))


@operator("eye")
def _eye(context: Context, n: int, m: int | None = None, *, dtype: Any = None, **_: Any) -> Array:
    return jnp.eye(n, m, dtype=context.float_type if dtype is None else context.type_of(dtype))


@operator("tril_indices")
def _tril_indices(row: int, col: int, offset: int = 0, **_: Any) -> Array:
    return jnp.stack(jnp.tril_indices(row, offset, col))


@operator("triu_indices")
def _triu_indices(row: int, col: int, offset: int = 0, **_: Any) -> Array:
    return jnp.stack(jnp.triu_indices(row, offset, col))
