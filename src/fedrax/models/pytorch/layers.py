"""PyTorch's layers as operators: convolutions, norms, pooling, interpolation, dropout, attention.

Arrays lie as PyTorch's do: [B, C, ...] with the space last, kernels [C out, C in / groups, ...].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.models.pytorch.operators import Context, axes, operator

Sizes = int | Sequence[int]


def _each(sizes: Sizes, space: int) -> list[int]:
    """A number for each axis of space."""
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * space if len(listed) == 1 else listed


# --- Convolutions -------------------------------------------------------------------------------------


@operator("conv1d", "conv2d", "conv3d")
def _conv(x: Array, weight: Array, bias=None, stride: Sizes = 1, padding: Any = 0, dilation: Sizes = 1, groups=1):
    space = weight.ndim - 2
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(_each(dilation, space), weight.shape[2:], strict=True)]
        pads = [(0, 0) if padding == "valid" else (r // 2, r - r // 2) for r in reach]
    else:
        pads = [(p, p) for p in _each(padding, space)]
    return _convolve(x, weight, bias, _each(stride, space), pads, [1] * space, _each(dilation, space), groups)


def _convolve(
    x: Array, weight: Array, bias: Array | None, stride: list, pads: list, gaps: list, dilation: list, groups: int
) -> Array:
    batched = x if x.ndim == weight.ndim else x[None]
    letters = "DHW"[-len(stride) :]
    numbers = (f"NC{letters}", f"OI{letters}", f"NC{letters}")
    y = lax.conv_general_dilated(
        batched, weight, stride, pads, gaps, dilation, dimension_numbers=numbers, feature_group_count=groups
    )
    y = y if bias is None else y + bias.reshape(-1, *[1] * len(stride))
    return y if x.ndim == weight.ndim else y[0]


@operator("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Array:
    """The transpose of a convolution by weight [C in, C out / groups, ...]: one over a spread image, kernel turned."""
    space = weight.ndim - 2
    stride, padding, extra, dilation = (_each(v, space) for v in (stride, padding, output_padding, dilation))
    reach = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
    into, out, *entries = weight.shape
    kernel = jnp.flip(weight, range(2, weight.ndim)).reshape(groups, into // groups, out, *entries)
    kernel = kernel.swapaxes(1, 2).reshape(groups * out, into // groups, *entries)
    return _convolve(x, kernel, bias, [1] * space, pads, stride, dilation, groups)


@operator("convolution")
def _convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups) -> Array:
    if transposed:
        return _conv_transpose(x, weight, bias, stride, padding, output_padding, groups, dilation)
    return _conv(x, weight, bias, stride, padding, dilation, groups)


# --- Norms --------------------------------------------------------------------------------------------


def _normalised(x: Array, mean: Array, var: Array, eps: float, weight: Array | None, bias: Array | None) -> Array:
    y = (x - mean) * lax.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _by_channel(values: Array, ndim: int) -> Array:
    return values.reshape(-1, *[1] * (ndim - 2))


def _batch_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """By the batch's own mean and variance [C], which it returns too."""
    over = (0, *range(2, x.ndim))
    mean, var = x.mean(over), x.var(over)
    shaped = [None if v is None else _by_channel(v, x.ndim) for v in (mean, var, weight, bias)]
    return _normalised(x, shaped[0], shaped[1], eps, *shaped[2:]), mean, var  # type: ignore[arg-type]


@operator("_native_batch_norm_legit_functional")
def _batch_norm_training(x, weight, bias, running_mean, running_var, training: bool, momentum: float, eps: float):
    """(outputs, mean, 1 / deviation, the new running mean and variance)."""
    if not training:
        y, *_ = _batch_norm_fixed(x, weight, bias, running_mean, running_var, momentum, eps)
        return y, running_mean, running_var, running_mean, running_var
    y, mean, var = _batch_norm(x, weight, bias, eps)
    count = x.size // x.shape[1]
    unbiased = var * (count / max(count - 1, 1))
    new = [(1 - momentum) * old + momentum * now for old, now in ((running_mean, mean), (running_var, unbiased))]
    return y, mean, lax.rsqrt(var + eps), *map(lax.stop_gradient, new)


@operator("_native_batch_norm_legit_no_training")
def _batch_norm_fixed(x, weight, bias, running_mean, running_var, momentum: float, eps: float):
    shaped = [None if v is None else _by_channel(v, x.ndim) for v in (running_mean, running_var, weight, bias)]
    return _normalised(x, shaped[0], shaped[1], eps, *shaped[2:]), running_mean, running_var  # type: ignore[arg-type]


@operator("_native_batch_norm_legit.no_stats")
def _batch_norm_without(x, weight, bias, training: bool, momentum: float, eps: float):
    return _batch_norm(x, weight, bias, eps)


@operator("layer_norm")
def _layer_norm(x: Array, normalized_shape, weight=None, bias=None, eps: float = 1e-5, cudnn: bool = True) -> Array:
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return _normalised(x, x.mean(over, keepdims=True), x.var(over, keepdims=True), eps, weight, bias)


@operator("native_layer_norm")
def _native_layer_norm(x: Array, normalized_shape, weight, bias, eps: float) -> tuple[Array, None, None]:
    return _layer_norm(x, normalized_shape, weight, bias, eps), None, None


@operator("rms_norm")
def _rms_norm(x: Array, normalized_shape, weight=None, eps: float | None = None) -> Array:
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    y = x * lax.rsqrt((x * x).mean(over, keepdims=True) + (jnp.finfo(x.dtype).eps if eps is None else eps))
    return y if weight is None else y * weight


@operator("group_norm")
def _group_norm(x: Array, num_groups: int, weight=None, bias=None, eps: float = 1e-5, cudnn: bool = True) -> Array:
    groups = x.reshape(x.shape[0], num_groups, -1)
    y = _normalised(groups, groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True), eps, None, None)
    y = y.reshape(x.shape)
    y = y if weight is None else y * _by_channel(weight, x.ndim)
    return y if bias is None else y + _by_channel(bias, x.ndim)


# --- Pooling ------------------------------------------------------------------------------------------


def _windows(x: Array, kernel: Sizes, stride: Any, padding: Sizes, dilation: Sizes, ceil_mode: bool, space: int):
    """What `lax.reduce_window` wants, for the last axes of x."""
    kernels, pads = _each(kernel, space), _each(padding, space)
    strides = _each(stride, space) if stride else kernels
    dilations = _each(dilation, space)
    both = []
    for length, k, s, p, d in zip(x.shape[-space:], kernels, strides, pads, dilations, strict=True):
        reach = d * (k - 1) + 1
        places = -(-(length + 2 * p - reach) // s) + 1
        places -= (places - 1) * s >= length + p  # a window begins in the image or before it
        both.append((p, max((places - 1) * s + reach - length - p, 0) if ceil_mode else p))
    lead = [1] * (x.ndim - space)
    return (*lead, *kernels), (*lead, *strides), [(0, 0)] * len(lead) + both, (*lead, *dilations)


@operator("max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(x, kernel_size, stride=(), padding: Sizes = 0, dilation: Sizes = 1, ceil_mode: bool = False, space=None):
    space = space or (len(kernel_size) if not isinstance(kernel_size, int) else x.ndim - 2)
    window, strides, pads, dilations = _windows(x, kernel_size, stride, padding, dilation, ceil_mode, space)
    return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, pads, window_dilation=dilations)


@operator("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d_with_indices")
def _max_pool_with_indices(*arguments: Any, **options: Any) -> tuple[Array, None]:
    return _max_pool(*arguments, **options), None


@operator("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    x: Array,
    kernel_size: Sequence[int],
    stride: Any = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Array:
    space = len(kernel_size)
    window, strides, pads, _ = _windows(x, kernel_size, stride, padding, 1, ceil_mode, space)
    total = lax.reduce_window(x, 0.0, lax.add, window, strides, pads)
    if divisor_override is not None or not any(map(any, pads)):
        return total / (divisor_override or math.prod(window))
    image = jnp.ones((1,) * (x.ndim - space) + x.shape[-space:], x.dtype)
    if count_include_pad:  # but not what only ceil_mode adds
        inner = [(p, min(p, high)) for p, (_, high) in zip(_each(padding, space), pads[-space:], strict=True)]
        image = jnp.pad(image, [(0, 0)] * (x.ndim - space) + inner, constant_values=1)
        pads = [(low - i, high - j) for (low, high), (i, j) in zip(pads[-space:], inner, strict=True)]
        pads = [(0, 0)] * (x.ndim - space) + pads
    return total / lax.reduce_window(image, 0.0, lax.add, window, strides, pads)


@operator("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d")
def _adaptive_avg_pool(x: Array, output_size: Sizes) -> Array:
    sizes = _each(output_size, 1)
    for axis, size in zip(range(-len(sizes), 0), sizes, strict=True):
        shares = np.zeros((size, x.shape[axis]))
        for i, (low, high) in enumerate(_cells(x.shape[axis], size)):
            shares[i, low:high] = 1 / (high - low)
        x = _along(x, shares, axis)
    return x


@operator("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(x: Array, output_size: Sizes) -> tuple[Array, None]:
    sizes = _each(output_size, 1)
    for axis, size in zip(range(x.ndim - len(sizes), x.ndim), sizes, strict=True):
        cells = _cells(x.shape[axis], size)
        x = jnp.stack([lax.slice_in_dim(x, low, high, axis=axis).max(axis) for low, high in cells], axis)
    return x, None


def _cells(length: int, count: int) -> list[tuple[int, int]]:
    return [(i * length // count, -(-(i + 1) * length // count)) for i in range(count)]


def _along(x: Array, matrix: np.ndarray, axis: int) -> Array:
    """matrix [out, length] times an axis of x."""
    if (matrix == matrix.flat[0]).all() and len(matrix) == 1:
        return x.mean(axis, keepdims=True)
    return jnp.moveaxis(jnp.moveaxis(x, axis, -1) @ jnp.asarray(matrix.T, x.dtype), -1, axis)


# --- Interpolation ------------------------------------------------------------------------------------


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
        x = _along(x, matrix, axis)
    return x


# --- Dropout ------------------------------------------------------------------------------------------


@operator("dropout")
def dropout(context: Context, x: Array, p: float, train: bool, shape: tuple[int, ...] | None = None) -> Array:
    """Zeroes entries with probability p, and scales the others by 1/(1 - p); nothing without a key."""
    key = context.key()
    if not train or p == 0 or key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - p, x.shape if shape is None else shape)
    return jnp.where(keep, x / max(1 - p, 1e-30), 0)


@operator("native_dropout")
def _native_dropout(context: Context, x: Array, p: float, train: bool | None = True) -> tuple[Array, None]:
    return dropout(context, x, p, train is not False), None


@operator("feature_dropout")
def _feature_dropout(context: Context, x: Array, p: float, train: bool) -> Array:
    """Whole channels."""
    return dropout(context, x, p, train, (*x.shape[:2], *[1] * (x.ndim - 2)))


# --- Attention ----------------------------------------------------------------------------------------


@operator("scaled_dot_product_attention")
def _attention(
    context: Context,
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Array:
    """softmax(query key' scale + mask) value over [..., L, E]; a query that may see nothing gets zeros."""
    if enable_gqa:
        key, value = (jnp.repeat(v, query.shape[-3] // v.shape[-3], axis=-3) for v in (key, value))
    scores = query @ key.swapaxes(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        seen = attn_mask if attn_mask.dtype == bool else ~jnp.isneginf(attn_mask)
        some = seen.any(-1, keepdims=True)
        scores = scores if attn_mask.dtype == bool else scores + jnp.where(seen, attn_mask, 0)
        weights = jnp.where(some, jax.nn.softmax(jnp.where(seen | ~some, scores, -jnp.inf), axis=-1), 0)
    return dropout(context, weights, dropout_p, True) @ value


@operator("cosine_similarity")
def _cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    over = axes(dim, max(x.ndim, y.ndim))
    lengths = (jnp.sqrt(jnp.maximum((v * v).sum(over, keepdims=True), eps**2)) for v in (x, y))
    first, second = lengths
    return (x / first * (y / second)).sum(over)
