"""PyTorch's operators of layers: convolutions, normalization, dropout, attention.

Arrays have PyTorch's layout: images [B, C, ...] with the spatial axes last, kernels [C out, C in / groups, ...].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.pytorch.operators import Context, axes, operator

Sizes = int | Sequence[int]


def per_axis(sizes: Sizes, space: int) -> list[int]:
    """One number for each of ``space`` spatial axes."""
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * space if len(listed) == 1 else listed


# --- Convolutions -------------------------------------------------------------------------------------


@operator("conv1d", "conv2d", "conv3d")
def _conv(x: Array, weight: Array, bias=None, stride: Sizes = 1, padding: Any = 0, dilation: Sizes = 1, groups=1):
    space = weight.ndim - 2
    if isinstance(padding, str):
        reach = [d * (k - 1) for d, k in zip(per_axis(dilation, space), weight.shape[2:], strict=True)]
        pads = [(0, 0) if padding == "valid" else (r // 2, r - r // 2) for r in reach]
    else:
        pads = [(p, p) for p in per_axis(padding, space)]
    return _convolve(x, weight, bias, per_axis(stride, space), pads, [1] * space, per_axis(dilation, space), groups)


def _convolve(
    x: Array, weight: Array, bias: Array | None, stride: list, pads: list, gaps: list, dilation: list, groups: int
) -> Array:
    """A convolution of x [B, C, ...] or [C, ...]; ``gaps`` dilates the image, ``dilation`` the kernel."""
    batched = x if x.ndim == weight.ndim else x[None]
    spatial = "DHW"[-len(stride) :]
    numbers = (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}")
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
    """Transposed convolution by weight [C in, C out / groups, ...]: one of the dilated image by the flipped kernel."""
    space = weight.ndim - 2
    stride, padding, extra, dilation = (per_axis(v, space) for v in (stride, padding, output_padding, dilation))
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


# --- Normalization --------------------------------------------------------------------------------------------


def _normalized(x: Array, mean: Array, var: Array, eps: float, weight: Array | None, bias: Array | None) -> Array:
    """(x - mean) / sqrt(var + eps) * weight + bias."""
    y = (x - mean) * lax.rsqrt(var + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _by_channel(values: Array, ndim: int) -> Array:
    """``values`` [C] with unit axes appended, to broadcast against [B, C, ...] of ``ndim`` axes."""
    return values.reshape(-1, *[1] * (ndim - 2))


def _batch_norm(x: Array, weight: Array | None, bias: Array | None, eps: float) -> tuple[Array, Array, Array]:
    """(outputs, mean [C], variance [C]) of batch norm with the statistics of the batch."""
    over = (0, *range(2, x.ndim))
    mean, var = x.mean(over), x.var(over)
    shaped = [None if v is None else _by_channel(v, x.ndim) for v in (mean, var, weight, bias)]
    return _normalized(x, shaped[0], shaped[1], eps, *shaped[2:]), mean, var  # type: ignore[arg-type]


@operator("_native_batch_norm_legit_functional")
def _batch_norm_training(x, weight, bias, running_mean, running_var, training: bool, momentum: float, eps: float):
    """(outputs, mean, 1 / standard deviation, new running mean, new running variance)."""
    if not training:
        y, *_ = _batch_norm_evaluation(x, weight, bias, running_mean, running_var, momentum, eps)
        return y, running_mean, running_var, running_mean, running_var
    y, mean, var = _batch_norm(x, weight, bias, eps)
    count = x.size // x.shape[1]
    unbiased = var * (count / max(count - 1, 1))
    new = [(1 - momentum) * old + momentum * now for old, now in ((running_mean, mean), (running_var, unbiased))]
    return y, mean, lax.rsqrt(var + eps), *map(lax.stop_gradient, new)


@operator("_native_batch_norm_legit_no_training")
def _batch_norm_evaluation(x, weight, bias, running_mean, running_var, momentum: float, eps: float):
    shaped = [None if v is None else _by_channel(v, x.ndim) for v in (running_mean, running_var, weight, bias)]
    return _normalized(x, shaped[0], shaped[1], eps, *shaped[2:]), running_mean, running_var  # type: ignore[arg-type]


@operator("_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(x, weight, bias, training: bool, momentum: float, eps: float):
    return _batch_norm(x, weight, bias, eps)


@operator("layer_norm")
def _layer_norm(x: Array, normalized_shape, weight=None, bias=None, eps: float = 1e-5, cudnn: bool = True) -> Array:
    over = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    return _normalized(x, x.mean(over, keepdims=True), x.var(over, keepdims=True), eps, weight, bias)


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
    y = _normalized(groups, groups.mean(-1, keepdims=True), groups.var(-1, keepdims=True), eps, None, None)
    y = y.reshape(x.shape)
    y = y if weight is None else y * _by_channel(weight, x.ndim)
    return y if bias is None else y + _by_channel(bias, x.ndim)


# --- Dropout ------------------------------------------------------------------------------------------


@operator("dropout")
def dropout(context: Context, x: Array, p: float, train: bool, shape: tuple[int, ...] | None = None) -> Array:
    """Set entries to zero with probability p and scale the others by 1/(1 - p); without a key, return x."""
    key = context.key() if train and p > 0 else None
    if key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - p, x.shape if shape is None else shape)
    return jnp.where(keep, x / max(1 - p, 1e-30), 0)


@operator("native_dropout")
def _native_dropout(context: Context, x: Array, p: float, train: bool | None = True) -> tuple[Array, None]:
    return dropout(context, x, p, train is not False), None


@operator("feature_dropout")
def _feature_dropout(context: Context, x: Array, p: float, train: bool) -> Array:
    """Dropout of whole channels."""
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
    """softmax(scale query @ key.T + mask) @ value over [..., L, E]; zeros for a query whose keys are all masked."""
    if enable_gqa:
        key, value = (jnp.repeat(v, query.shape[-3] // v.shape[-3], axis=-3) for v in (key, value))
    scores = query @ key.swapaxes(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if attn_mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        visible = attn_mask if attn_mask.dtype == bool else ~jnp.isneginf(attn_mask)
        some = visible.any(-1, keepdims=True)
        scores = scores if attn_mask.dtype == bool else scores + jnp.where(visible, attn_mask, 0)
        weights = jnp.where(some, jax.nn.softmax(jnp.where(visible | ~some, scores, -jnp.inf), axis=-1), 0)
    return dropout(context, weights, dropout_p, True) @ value


@operator("cosine_similarity")
def _cosine_similarity(x: Array, y: Array, dim: int = 1, eps: float = 1e-8) -> Array:
    over = axes(dim, max(x.ndim, y.ndim))
    lengths = (jnp.sqrt(jnp.maximum((v * v).sum(over, keepdims=True), eps**2)) for v in (x, y))
    first, second = lengths
    return (x / first * (y / second)).sum(over)
