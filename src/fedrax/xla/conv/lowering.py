"""Convolutions in forms that XLA's CPU backend runs fast inside compiled loops.

- Before: any ``conv_general_dilated``.
- After: one of several forms, chosen by the shapes alone: the canonical layout, ``dot_general`` of patches (im2col), a
  product for each kernel entry where the kernel meets mostly padding, one product for several channel groups, or the
  forms of :mod:`~fedrax.xla.conv.kernel_gradient` and :mod:`~fedrax.xla.conv.full_convolution`.
- Why: XLA:CPU hands a convolution to Eigen only in the canonical layout, [N, space, C] with kernels [k, C, D]. At the
  top level of a program it brings other forms, such as the gradients of every convolution, into this layout, but not
  inside a loop or branch: there they run element by element, ten to thirty times slower. Grouped convolutions do so
  everywhere.
- Not for: integers, empty arrays, and float64 convolutions whose patches exceed `_MAX_PATCH_BYTES`.

Shapes are written with N for the batch, C and D for input and output channels, G for channel groups, "space" for
spatial axes such as height and width, and k for the spatial axes of a kernel (:mod:`fedrax.xla.conv.window`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.full_convolution import is_full_convolution, scatter_convolution
from fedrax.xla.conv.kernel_gradient import depthwise_kernel_gradient, is_patches, kernel_gradient
from fedrax.xla.conv.window import (
    MOST_TAPS,
    Window,
    axis_to_channels,
    canonical_convolution,
    crop_negative_padding,
    fold_depth,
    is_half_precision,
    is_mostly_padding,
    out_space,
    pad_small_images,
    padded,
    patches,
    strided_slice,
    tap_regions,
    taps,
    to_output_layout,
)
from fedrax.xla.options import limits

_MAX_PATCH_BYTES = 256 << 20
"""Most bytes of the patches of a float64 convolution, which are materialized."""
_FEW_CHANNELS, _VERY_FEW_CHANNELS = 16, 4
"""Channels up to which XLA:CPU does not use its fast matrix products, or only with more channels on the other side."""


def lower_convolution(inputs: list[Array], equation: core.JaxprEqn, per_example: bool = False) -> Array | None:
    """Rule for ``conv_general_dilated``; None where the pass does not apply.

    Args:
        inputs: images and kernel.
        equation: the convolution.
        per_example: whether channel groups may be examples, so that values that are not finite must stay in their
            group; groups are not merged then.
    """
    (x, kernel), params = inputs, equation.params
    numbers, out_type = params["dimension_numbers"], params["preferred_element_type"]
    if is_half_precision(x.dtype) and is_half_precision(kernel.dtype):
        wide = equation.replace(params=params | {"preferred_element_type": None})
        y = lower_convolution([a.astype(jnp.float32) for a in inputs], wide, per_example)
        return None if y is None else y.astype(equation.outvars[0].aval.dtype)  # type: ignore[attr-defined]
    if jnp.issubdtype(x.dtype, jnp.complexfloating) and x.dtype == kernel.dtype and out_type in (None, x.dtype):
        return _complex_convolution(x, kernel, equation)
    if x.dtype not in (jnp.float32, jnp.float64) or x.dtype != kernel.dtype or out_type not in (None, x.dtype):
        return None
    window, precision = Window.of(params), params["precision"]
    if not window.strides or x.size == 0 or kernel.size == 0:
        return None
    batch, channel, *pixel_axes = numbers.lhs_spec
    out_axis, in_axis, *entry_axes = numbers.rhs_spec
    space, entries = (tuple(a.shape[i] for i in axes) for a, axes in ((x, pixel_axes), (kernel, entry_axes)))
    out = out_space(space, entries, window)
    patch_size = x.size // math.prod(space) * math.prod(out) * math.prod(entries)
    if 0 in out or (x.dtype == jnp.float64 and patch_size * x.dtype.itemsize > _MAX_PATCH_BYTES):
        return None
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    small = math.prod(out) <= MOST_TAPS or is_patches(window, space, entries, out)
    if batch > channel and small:  # the gradient of a kernel, whose entries are the output positions
        images, upstream = x.transpose(channel, *pixel_axes, batch), kernel.transpose(in_axis, *entry_axes, out_axis)
        if groups == 1:
            y = _grouped_kernel_gradient(images, upstream, window, out, batch_groups, precision, per_example)
        else:
            y = _kernel_gradient_by_batch_group(images, upstream, window, out, batch_groups * groups, precision)
        y = jnp.moveaxis(y, -2, 0)
    else:
        x, window = crop_negative_padding(x.transpose(batch, *pixel_axes, channel), window)
        fewest = min(kernel.shape[axis] for axis in (in_axis, out_axis)) if groups == batch_groups == 1 else 0
        if x.dtype == jnp.float32 and is_mostly_padding(x.shape[1:-1], entries, window, out, fewest):
            kernel = kernel.transpose(*entry_axes, *sorted((in_axis, out_axis)))
            y = _sum_of_tap_products(x, kernel, out_axis < in_axis, window, out, precision)
        else:
            kernel = kernel.transpose(*entry_axes, in_axis, out_axis)
            if batch_groups > 1:
                groups = batch_groups
                x = _batch_groups_to_channels(x, groups)
            y = _grouped_merged(x, kernel, window, groups, precision, per_example)
    return to_output_layout(y, numbers)


def _complex_convolution(x: Array, kernel: Array, equation: core.JaxprEqn) -> Array:
    """A complex convolution, from four convolutions of real and imaginary parts."""
    of_real = equation.replace(params=equation.params | {"preferred_element_type": None})

    def real(x: Array, kernel: Array) -> Array:
        y = lower_convolution([x, kernel], of_real)
        return lax.conv_general_dilated_p.bind(x, kernel, **of_real.params) if y is None else y

    (a, b), (c, d) = ((one.real, one.imag) for one in (x, kernel))
    return lax.complex(real(a, c) - real(b, d), real(a, d) + real(b, c))


def _grouped_kernel_gradient(
    images: Array,
    upstream: Array,
    window: Window,
    entries: tuple[int, ...],
    groups: int,
    precision: Any,
    per_example: bool,
) -> Array:
    """[k, C / groups, D] of a kernel that connects each group of input channels to one of output channels."""
    if groups == images.shape[-1] > 1:
        return depthwise_kernel_gradient(images, upstream, window, entries)[..., None, :]
    if per_example and groups > 1:
        return _map_groups(_split_groups(groups, images, upstream), kernel_gradient, window, entries, precision)
    several = _groups_per_dot(groups, min(images.shape[-1], upstream.shape[-1]) // groups)
    parts = zip(jnp.split(images, groups // several, -1), jnp.split(upstream, groups // several, -1), strict=True)
    found = [kernel_gradient(*part, window, entries, precision) for part in parts]
    return jnp.concatenate([_diagonal_blocks(one, several) for one in found], -1)


def _kernel_gradient_by_batch_group(
    images: Array, upstream: Array, window: Window, entries: tuple[int, ...], groups: int, precision: Any
) -> Array:
    """[k, C, groups D]: the kernel gradients of groups of examples, in a loop."""
    images = images.reshape(groups, -1, *images.shape[1:])
    upstream = jnp.moveaxis(upstream.reshape(*upstream.shape[:-1], groups, -1), -2, 0)
    return _map_groups((images, upstream), kernel_gradient, window, entries, precision)


def _split_groups(groups: int, *arrays: Array) -> tuple[Array, ...]:
    """Each array [..., G C] as [G, ..., C]."""
    return tuple(jnp.moveaxis(a.reshape(*a.shape[:-1], groups, -1), -2, 0) for a in arrays)


def _map_groups(groups: tuple[Array, ...], function: Callable[..., Array], *rest: Any) -> Array:
    """Loop over groups: ``function`` maps arrays of one group to [..., D]; the result is [..., G D]."""
    found = jnp.moveaxis(lax.map(lambda parts: function(*parts, *rest), groups), 0, -2)
    return found.reshape(*found.shape[:-2], -1)


def _groups_per_dot(groups: int, fewest: int) -> int:
    """How many neighboring groups share one product; each has at least ``fewest`` input and output channels.

    Merging bounds the number of products, which have to be compiled, and avoids products of very few channels, which
    take twice as long as those of twice as many.
    """
    possible = [
        n for n in range(1, groups + 1) if groups % n == 0 and (groups // n <= limits().conv_groups or n == groups)
    ]
    enough = [n for n in possible if n * fewest > _VERY_FEW_CHANNELS] or [groups]
    return max((n for n in enough if n * fewest <= _FEW_CHANNELS), default=enough[0])


def _merge_groups(kernel: Array, groups: int) -> tuple[Array, int]:
    """(the kernel [k, C, G D] as block-diagonal kernels for several groups each, number of merged groups)."""
    *space, channels, out = kernel.shape
    several = _groups_per_dot(groups, min(channels, out // groups))
    if several == 1:
        return kernel, groups
    own = kernel.reshape(*space, 1, channels, groups // several, several, -1)
    is_own = jnp.eye(several, dtype=bool).reshape(several, 1, 1, several, 1)
    return jnp.where(is_own, own, 0).reshape(*space, several * channels, out), groups // several


def _diagonal_blocks(gradient: Array, several: int) -> Array:
    """[k, n C, n D] -> [k, C, n D]: the gradients of n merged groups, without those between different groups."""
    if several == 1:
        return gradient
    *space, into, out = gradient.shape
    blocks = gradient.reshape(*space, several, into // several, several, out // several)
    is_own = jnp.eye(several, dtype=bool).reshape(several, 1, several, 1)
    return jnp.where(is_own, blocks, 0).sum(-4).reshape(*space, into // several, out)


def _is_depthwise(kernel: Array, groups: int) -> bool:
    """Whether groups of a kernel [k, C, G D] have one input channel or very few channels, and few entries."""
    channels, results = kernel.shape[-2], kernel.shape[-1] // groups
    few = channels == 1 or channels * results <= _VERY_FEW_CHANNELS
    return few and math.prod(kernel.shape[:-2]) <= MOST_TAPS


def _batch_groups_to_channels(x: Array, groups: int) -> Array:
    """[G N, space, C] -> [N, space, G C]: batch groups as channel groups."""
    x = x.reshape(groups, -1, *x.shape[1:])
    return jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], -1)


def _grouped_merged(x: Array, kernel: Array, window: Window, groups: int, precision: Any, per_example: bool) -> Array:
    """:func:`_grouped`, with neighboring groups merged if they are many or have few channels."""
    if groups > 1 and not per_example and not _is_depthwise(kernel, groups):
        kernel, groups = _merge_groups(kernel, groups)
    return _grouped(x, kernel, window, groups, precision, per_example)


def _grouped(x: Array, kernel: Array, window: Window, groups: int, precision: Any, per_example: bool) -> Array:
    """A grouped convolution, [N, space, G C], [k, C, G D] -> [N, space, G D]."""
    if groups == 1:
        return _dense(x, kernel, window, precision)
    out = out_space(x.shape[1:-1], kernel.shape[:-2], window)
    axis, depthwise = _unit_axis(x, kernel, out), _is_depthwise(kernel, groups)
    # with many channels, sums over shifted images are faster than products of few channels each
    if axis is not None and not (depthwise and x.shape[1 + axis] > 1 and kernel.shape[-1] > _FEW_CHANNELS):
        return _without_unit_axis(x, kernel, window, out, groups, precision, axis, per_example)
    if depthwise:
        return _depthwise(x, kernel, window, out)
    if len(x) == 1 or per_example:  # groups are examples with a kernel each
        return _map_groups(_split_groups(groups, x, kernel), _dense, window, precision)
    parts = zip(jnp.split(x, groups, -1), jnp.split(kernel, groups, -1), strict=True)
    return jnp.concatenate([_dense(part, weights, window, precision) for part, weights in parts], -1)


def _dense(x: Array, kernel: Array, window: Window, precision: Any) -> Array:
    """A convolution without groups, [N, space, C], [k, C, D] -> [N, space, D]."""
    entries, unit = kernel.shape[:-2], (1,) * len(window.strides)
    unpadded = not any(low or high for low, high in window.pads)
    out = out_space(x.shape[1:-1], entries, window)
    if math.prod(entries) == 1 and unpadded and window.gaps == unit:
        x = lax.slice(x, (0,) * x.ndim, x.shape, (1, *window.strides, 1))
        return lax.dot_general(x, kernel.reshape(kernel.shape[-2:]), (((x.ndim - 1,), (0,)), ((), ())), precision)
    if math.prod(out) == 1 and unpadded and window.gaps == unit:
        x = strided_slice(x, (0,) * len(entries), entries, window.dilation)
        over = tuple(range(1, x.ndim)), tuple(range(x.ndim - 1))
        y = lax.dot_general(x, kernel, (over, ((), ())), precision)
        return y.reshape(len(x), *out, -1)
    if x.dtype != jnp.float32:
        return _im2col(x, kernel, window, out, precision)
    axis = _unit_axis(x, kernel, out)
    if axis is not None:
        return _without_unit_axis(x, kernel, window, out, 1, precision, axis, False)
    if is_full_convolution(x, kernel, window, out):
        return scatter_convolution(x, kernel, window, out, precision).reshape(len(x), *out, -1)
    if window.gaps != unit and window.strides == window.dilation == unit:
        return _transposed(x, kernel, window, out, precision)
    if len(entries) > 2:  # Eigen's three-dimensional convolutions are slow: fold the depth into batch and channels
        x, rest = fold_depth(x, window, entries[0], window.dilation[0], out[0], window.strides[0])
        kernel = jnp.moveaxis(kernel, 0, -3).reshape(*entries[1:], -1, kernel.shape[-1])
        return _dense(x, kernel, rest, precision).reshape(-1, *out, kernel.shape[-1])
    count = _outputs_per_dot(kernel, window, out)
    if count > 1:
        step, none = window.strides[-1], (0,) * (len(entries) - 1)
        kernel = _stack_kernels([kernel] * count, [(*none, i * step) for i in range(count)])
        window = window._replace(strides=(*window.strides[:-1], count * step))
    x, window = pad_small_images(x, window, entries, out)
    return canonical_convolution(x, kernel, window, precision).reshape(len(x), *out, -1)


def _sum_of_tap_products(
    x: Array, kernel: Array, transposed: bool, window: Window, out: tuple[int, ...], precision: Any
) -> Array:
    """The sum over kernel entries of products with the pixels that they meet, without padding.

    ``transposed``: the kernel is [k, D, C], as in the gradient of images, and not copied to [k, C, D].
    """
    entries, results = kernel.shape[:-2], kernel.shape[-2 if transposed else -1]
    total = jnp.zeros((len(x), *out, results), x.dtype)
    for met in tap_regions(x.shape[1:-1], entries, window, out):
        seen = strided_slice(x, met.pixel, met.size, window.strides)
        y = lax.dot_general(seen, kernel[met.index], (((seen.ndim - 1,), (int(transposed),)), ((), ())), precision)
        ends = [(at, n - at - size) for at, n, size in zip(met.first, out, met.size, strict=True)]
        total = total + jnp.pad(y, [(0, 0), *ends, (0, 0)])
    return total


def _unit_axis(x: Array, kernel: Array, out: tuple[int, ...]) -> int | None:
    """A spatial axis, of several, on which images or results have length one and the kernel more than one entry."""
    entries = kernel.shape[:-2]
    several = range(len(entries)) if len(entries) > 1 else ()
    return next((i for i in several if 1 in (x.shape[1 + i], out[i]) and entries[i] > 1), None)


def _without_unit_axis(
    x: Array,
    kernel: Array,
    window: Window,
    out: tuple[int, ...],
    groups: int,
    precision: Any,
    axis: int,
    per_example: bool,
) -> Array:
    """A convolution whose images or results have length one along an axis: the kernel's axis becomes channels."""
    rest, entries, dilation = window.without_axis(axis), kernel.shape[axis], window.dilation[axis]
    if x.shape[1 + axis] > 1:
        x, kernel = axis_to_channels(x, window, axis, entries, dilation), jnp.moveaxis(kernel, axis, -3)
        x = jnp.swapaxes(x.reshape(*x.shape[:-1], entries, groups, -1), -3, -2).reshape(x.shape)
        kernel = kernel.reshape(*kernel.shape[:-3], -1, kernel.shape[-1])
        return jnp.expand_dims(_grouped_merged(x, kernel, rest, groups, precision, per_example), 1 + axis)

    def entry(at: int) -> Array:
        return lax.index_in_dim(kernel, at // dilation, axis, keepdims=False)

    # for each output position the distance of the only pixel from the first kernel entry
    distances = [window.pads[axis][0] - i * window.strides[axis] for i in range(out[axis])]
    none = jnp.zeros_like(entry(0))
    met = [entry(at) if at % dilation == 0 and 0 <= at // dilation < entries else none for at in distances]
    each = [one.reshape(*one.shape[:-1], groups, -1) for one in met]
    kernel = jnp.concatenate(each, -1).reshape(*none.shape[:-1], -1)
    y = _grouped_merged(jnp.squeeze(x, 1 + axis), kernel, rest, groups, precision, per_example)
    y = jnp.swapaxes(y.reshape(*y.shape[:-1], groups, out[axis], -1), -3, -2)
    return jnp.moveaxis(y.reshape(*y.shape[:-2], -1), -2, 1 + axis)


def _outputs_per_dot(kernel: Array, window: Window, out: tuple[int, ...]) -> int:
    """How many neighboring outputs along the last spatial axis are computed as channels of one position.

    They share the pixels that they read, and products of few channels take as long as those of some more. The cost are
    zeros in the kernel.
    """
    entries, step = kernel.shape[:-2], window.strides[-1]
    channels, results = kernel.shape[-2:]
    if len(entries) != 2 or channels > _FEW_CHANNELS or window.gaps[-1] > 1 or window.dilation[-1] > 1:
        return 1
    enough = 24 if channels > _VERY_FEW_CHANNELS else 48
    if results >= enough:
        return 1
    fitting = [n for n in (2, 4) if out[-1] % n == 0 and (n - 1) * step <= entries[-1]]
    return min((n for n in fitting if n * results >= enough), default=max(fitting, default=1))


def _stack_kernels(kernels: Sequence[Array], before: Sequence[Sequence[int]]) -> Array:
    """n kernels [k, C, D] -> [k', C, n D]: each padded, with so many zeros ``before`` it on each axis."""
    ends = [
        [at + n for at, n in zip(low, kernel.shape, strict=False)] for kernel, low in zip(kernels, before, strict=True)
    ]
    sizes = list(map(max, zip(*ends, strict=True)))
    placed = [
        jnp.pad(kernel, [*((at, size - end) for at, size, end in zip(low, sizes, last, strict=True)), (0, 0), (0, 0)])
        for kernel, low, last in zip(kernels, before, ends, strict=True)
    ]
    return jnp.stack(placed, -2).reshape(*placed[0].shape[:-1], -1)


def _transposed(x: Array, kernel: Array, window: Window, out: tuple[int, ...], precision: Any) -> Array:
    """A transposed convolution, as in the gradient of a strided one, without multiplying the zeros between pixels.

    Output positions whose numbers have the same remainder modulo ``gaps`` (a phase) meet the same kernel entries: each
    phase is a convolution of the images without input dilation. Phases are computed as channels of one convolution
    where these are few or the phases meet the same pixels, otherwise as one convolution each.
    """
    gaps, axes, unit = window.gaps, len(out), (1,) * len(out)
    # for each axis and phase: the first kernel entry that meets a pixel, and the number of this pixel
    meets = [
        [((low - phase) % gap, (phase - low + (low - phase) % gap) // gap) for phase in range(gap)]
        for (low, _), gap in zip(window.pads, gaps, strict=True)
    ]
    phases = [tuple(zip(*phase, strict=True)) for phase in product(*meets)]
    kernels = [kernel[tuple(map(slice, first, (None,) * axes, gaps))] for first, _ in phases]
    blocks = [-(-n // gap) for n, gap in zip(out, gaps, strict=True)]

    def seen(kernel: Array, first: Sequence[int]) -> Array:
        ends = [at + n + size - 1 for at, n, size in zip(first, blocks, kernel.shape, strict=False)]
        pads = tuple((-at, end - n) for at, end, n in zip(first, ends, x.shape[1:-1], strict=True))
        images, window = crop_negative_padding(x, Window(unit, pads, unit, unit))
        return _dense(images, kernel, window, precision)

    if (
        kernel.shape[-1] < _FEW_CHANNELS
        or len({(own.shape, pixel) for own, (_, pixel) in zip(kernels, phases, strict=True)}) == 1
    ):
        least = [min(pixels) for pixels in zip(*(pixel for _, pixel in phases), strict=True)]
        before = [[at - low for at, low in zip(pixel, least, strict=True)] for _, pixel in phases]
        y = seen(_stack_kernels(kernels, before), least)
    else:
        nothing = jnp.zeros((len(x), *blocks, kernel.shape[-1]), x.dtype)
        found = [seen(own, pixel) if own.size else nothing for own, (_, pixel) in zip(kernels, phases, strict=True)]
        y = jnp.stack(found, -2)
    y = y.reshape(len(x), *blocks, *gaps, -1)
    y = y.transpose(0, *(axis for i in range(axes) for axis in (1 + i, 1 + i + axes)), y.ndim - 1)
    y = y.reshape(len(x), *(n * gap for n, gap in zip(blocks, gaps, strict=True)), -1)
    return lax.slice(y, (0,) * y.ndim, (len(x), *out, y.shape[-1]))


def _im2col(x: Array, kernel: Array, window: Window, out: tuple[int, ...], precision: Any) -> Array:
    """One matrix product of patches and kernel."""
    if math.prod(kernel.shape[:-2]) <= math.prod(out):
        columns = jnp.concatenate([pixels for _, pixels in taps(x, kernel.shape[:-2], window, out)], -1)
        flat = kernel.reshape(-1, kernel.shape[-1])
        return lax.dot_general(columns, flat, (((columns.ndim - 1,), (0,)), ((), ())), precision)
    # a large kernel with few output positions, as in the gradient of a kernel: a product for each position
    over = tuple(range(1, x.ndim)), tuple(range(x.ndim - 1))
    products = [
        lax.dot_general(seen, kernel, (over, ((), ())), precision)
        for seen in patches(x, kernel.shape[:-2], window, out)
    ]
    return jnp.stack(products, 1).reshape(len(x), *out, -1)


def _depthwise(x: Array, kernel: Array, window: Window, out: tuple[int, ...]) -> Array:
    """A grouped convolution with few C: sums of shifted images, [N, space, G C], [k, C, G D] -> [N, space, G D]."""
    channels = kernel.shape[-2]
    groups = x.shape[-1] // channels
    whole = padded(x, window.pads, window.gaps, 0)
    if whole is not x:
        # Without the barrier XLA would recompute the images for entries that meet no padding
        x, window = lax.optimization_barrier(whole), window.without_padding()
    x, kernel = x.reshape(*x.shape[:-1], groups, channels), kernel.reshape(*kernel.shape[:-1], groups, -1)
    several = kernel.shape[-1] > 1
    total: Any = 0
    for channel in range(channels):
        for index, seen in taps(x[..., channel], kernel.shape[:-3], window, out):
            weights = kernel[index][channel]
            total = total + (seen[..., None] * weights if several else seen * weights[:, 0])
    return total.reshape(len(x), *out, groups * kernel.shape[-1])
