"""Gradients of convolution kernels, in forms that XLA's CPU backend runs fast.

- Before: the gradient of a convolution with respect to its kernel: a ``conv_general_dilated`` whose "kernel" is the
  gradient of the output, nearly as large as the images, and whose result is as small as a kernel.
- After: one of several forms, chosen by the shapes alone (:func:`kernel_gradient`).
- Why: Eigen's matrix products are fast from some dozens of channels in the result on, and its convolutions only for
  contiguous entries. For other shapes XLA:CPU runs element by element in a loop.
- Not for: see :mod:`fedrax.xla.conv.lowering`, which calls this module.

Shapes are written as in :mod:`fedrax.xla.conv.window`. ``images`` are [N, space, C]; ``upstream``, the gradient of the
convolution's output, is [N, space of the output, D]; ``entries`` are the spatial sizes k of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.xla.conv.window import (
    Pads,
    Space,
    Window,
    axis_to_channels,
    canonical_convolution,
    crop_negative_padding,
    fold_depth,
    is_mostly_padding,
    pad_small_images,
    padded,
    patches,
    strided_slice,
    tap_regions,
)
from fedrax.xla.options import limits

_MAX_TRANSPOSED_SAMPLES = 128
"""Most examples of a batch that is transposed by a product with the identity, whose arithmetic grows with the batch."""
_FEW_CHANNELS = 24
"""Channels of a result up to which matrix products are slow."""
_FEW_SAMPLES, _FEW_OUT_CHANNELS = 4, 16
"""Examples and output channels up to which convolutions with examples as channels are slow."""
_MAX_PATCH_COPIES = 3
"""Most patches that contain a pixel, on average, for which patches are materialized."""
_MAX_KERNEL_SIZE = 7
"""Most kernel entries along an axis for which images and upstream are copied once for each."""
_MIN_PIXELS, _MAX_PIXELS = 16, 32
"""Pixels accumulated in one step of a loop: XLA:CPU vectorizes the step only if they are not too few."""


def kernel_gradient(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """Compute the gradient [k, C, D] of a kernel.

    Args:
        images: input of the differentiated convolution, [N, space, C].
        upstream: gradient of its output, [N, space of the output, D].
        window: of the convolution that computes the gradient. Its strides are the kernel dilation of the differentiated
            convolution, and its dilation the strides.
        entries: spatial sizes k of the kernel.
        precision: of the products.
    """
    if images.dtype != jnp.float32 or math.prod(entries) == 1:
        return _dot_per_tap(images, upstream, window, entries, precision)
    for axis in range(len(entries)):
        if len(entries) > 1 and upstream.shape[1 + axis] == 1 and entries[axis] > 1:
            images = axis_to_channels(images, window, axis, entries[axis], window.strides[axis])
            others, upstream = entries[:axis] + entries[axis + 1 :], jnp.squeeze(upstream, 1 + axis)
            y = kernel_gradient(images, upstream, window.without_axis(axis), others, precision)
            return jnp.moveaxis(y.reshape(*others, entries[axis], -1, y.shape[-1]), -3, axis)
    if len(entries) > 2:
        return _fold_depth(images, upstream, window, entries, precision)
    forward = Window(window.dilation, window.pads, window.gaps, window.strides)  # of the differentiated convolution
    fewest = min(images.shape[-1], upstream.shape[-1])
    if is_mostly_padding(images.shape[1:-1], entries, forward, upstream.shape[1:-1], fewest):
        return _dot_per_tap_region(images, upstream, forward, entries, precision)
    unit = (1,) * len(entries)
    fewer_out = images.shape[-1] > upstream.shape[-1]
    if fewer_out and window.dilation != unit and window.gaps == window.strides == unit:
        return _by_phase(images, upstream, window, entries, precision)
    if window.gaps != unit or (fewer_out and window.dilation == unit):
        # the same sums with exchanged roles: the images as the kernel of a convolution of the upstream, reversed
        window = _swap_roles(window, images.shape[1:-1], upstream.shape[1:-1], entries)
        y = _choose_form(upstream, images, window, entries, precision)
        return lax.rev(jnp.swapaxes(y, -2, -1), range(len(entries)))
    return _choose_form(images, upstream, window, entries, precision)


def _fold_depth(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """Fold the first spatial axis: its output positions become examples, its kernel entries channels."""
    planes, rest = fold_depth(images, window, entries[0], window.strides[0], upstream.shape[1], window.dilation[0])
    y = kernel_gradient(planes, upstream.reshape(-1, *upstream.shape[2:]), rest, entries[1:], precision)
    return jnp.moveaxis(y.reshape(*entries[1:], entries[0], -1, upstream.shape[-1]), -3, 0)


def _by_phase(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """For strided convolutions: kernel entries at distances of a stride (a phase) form a kernel without strides."""
    steps, unit = window.dilation, (1,) * len(entries)
    most = [-(-k // step) for k, step in zip(entries, steps, strict=True)]

    def of_phase(phase: Sequence[int]) -> Array:
        own_entries = tuple(-(-(k - at) // step) for k, at, step in zip(entries, phase, steps, strict=True))
        lows = [low for low, _ in window.pads]
        first = [(at - low) % step for at, low, step in zip(phase, lows, steps, strict=True)]  # first pixel it meets
        if min(own_entries) <= 0 or any(at >= n for at, n in zip(first, images.shape[1:-1], strict=True)):
            return jnp.zeros((*most, images.shape[-1], upstream.shape[-1]), images.dtype)  # it meets padding only
        own = lax.slice(images, (0, *first, 0), images.shape, (1, *steps, 1))
        before = [(at + low - p) // step for at, low, p, step in zip(first, lows, phase, steps, strict=True)]
        needed = [m + k - 1 for m, k in zip(upstream.shape[1:-1], own_entries, strict=True)]
        pads = tuple((low, n - low - size) for low, n, size in zip(before, needed, own.shape[1:-1], strict=True))
        y = kernel_gradient(own, upstream, Window(unit, pads, unit, unit), own_entries, precision)
        return jnp.pad(y, [*((0, n - k) for n, k in zip(most, own_entries, strict=True)), (0, 0), (0, 0)])

    found = [of_phase(phase) for phase in product(*map(range, steps))]
    y = jnp.stack(found).reshape(*steps, *most, *found[0].shape[-2:])
    axes = len(entries)
    y = y.transpose(*(axis for i in range(axes) for axis in (axes + i, i)), 2 * axes, 2 * axes + 1)
    y = y.reshape(*(n * step for n, step in zip(most, steps, strict=True)), *y.shape[-2:])
    return lax.slice(y, (0,) * y.ndim, (*entries, *y.shape[-2:]))


def _swap_roles(window: Window, space: Space, out: Space, entries: Space) -> Window:
    """The window with images and upstream exchanged, for the reversed kernel."""
    far = [(k - 1) * stride for k, stride in zip(entries, window.strides, strict=True)]
    low = [end - before for end, (before, _) in zip(far, window.pads, strict=True)]
    reach = [
        (n - 1) * gap + 1 + end - (m - 1) * step - 1
        for n, gap, end, m, step in zip(space, window.gaps, far, out, window.dilation, strict=True)
    ]
    pads = tuple((before, n - before) for before, n in zip(low, reach, strict=True))
    return Window(window.strides, pads, gaps=window.dilation, dilation=window.gaps)


def _choose_form(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """The fastest form for images with no more channels than the upstream, or for a strided convolution."""
    form, touched = _samples_as_channels, 2 * (images.nbytes + upstream.nbytes)
    if math.prod(window.dilation) > 1:
        contiguous = len(entries) == 1 and images.shape[-1] <= _FEW_CHANNELS
        if contiguous or math.prod(entries) <= _MAX_PATCH_COPIES * math.prod(window.dilation):
            channels = math.prod(entries) * images.shape[-1] + upstream.shape[-1]
            form, touched = _im2col, upstream.nbytes // upstream.shape[-1] * channels
    elif (
        math.prod(window.strides) == 1
        and len(entries) == 2
        and max(entries) <= _MAX_KERNEL_SIZE
        and upstream.shape[-1] <= _FEW_CHANNELS
    ):
        form, touched = _row_convolutions, 2 * (1 + max(entries)) * (images.nbytes + upstream.nbytes)
    if (
        form is _samples_as_channels
        and len(images) <= _FEW_SAMPLES
        and (len(entries) == 1 or upstream.shape[-1] <= _FEW_OUT_CHANNELS)
    ):
        form = _fold_depth if len(entries) > 1 else _im2col
    return _sum_over_chunks(
        partial(form, window=window, entries=entries, precision=precision), images, upstream, touched
    )


def _sum_over_chunks(form: Callable[[Array, Array], Array], images: Array, upstream: Array, touched: int) -> Array:
    """Sum ``form`` over chunks of examples that fit the cache; ``touched``: bytes that the whole batch reads."""
    samples = len(images)
    fewest = min(samples, -(-touched // limits().kernel_gradient_bytes))
    number = next((n for n in range(fewest, min(2 * fewest, samples + 1)) if samples % n == 0), 1)
    if number == 1:
        return form(images, upstream)
    size = samples // number

    # Slices inside the loop: of arrays that are reshaped before it, XLA would recompute the operands.
    def chunk(i: Any) -> list[Array]:
        return [lax.dynamic_slice_in_dim(a, i * size, size) for a in (images, upstream)]

    shape = jax.eval_shape(lambda: form(*chunk(0)))
    zero = jnp.zeros(shape.shape, shape.dtype)
    return lax.fori_loop(0, number, lambda i, total: total + form(*chunk(i)), zero)


def _dot_per_tap(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """A matrix product for each kernel entry."""
    seen = patches(images, upstream.shape[1:-1], window, entries)
    products = [_product(pixels, upstream, precision) for pixels in seen]
    return jnp.stack(products).reshape(*entries, *products[0].shape)


def _dot_per_tap_region(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """A product for each kernel entry, of the pixels that it meets in the forward ``window``, without padding."""
    axes, channels = len(entries), (images.shape[-1], upstream.shape[-1])
    found = dict.fromkeys(product(*map(range, entries)), jnp.zeros(channels, images.dtype))
    for met in tap_regions(images.shape[1:-1], entries, window, upstream.shape[1:-1]):
        pixels = strided_slice(images, met.pixel, met.size, window.strides)
        found[met.index] = _product(pixels, strided_slice(upstream, met.first, met.size, (1,) * axes), precision)
    return jnp.stack(list(found.values())).reshape(*entries, *channels)


def _im2col(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """One matrix product of patches and upstream."""
    out = upstream.shape[1:-1]
    if is_patches(window, images.shape[1:-1], out, entries):
        cut = images.reshape(len(images), *(n for pair in zip(out, entries, strict=True) for n in pair), -1)
        axes = range(1, 2 * len(entries), 2)
        columns = cut.transpose(0, *axes, *(axis + 1 for axis in axes), cut.ndim - 1)
    else:
        columns = jnp.stack(list(patches(images, out, window, entries)), -2)
    y = _product(columns.reshape(len(images), *out, -1), upstream, precision)
    return y.reshape(*entries, -1, upstream.shape[-1])


def is_patches(window: Window, space: Space, out: Space, entries: Space) -> bool:
    """Whether the forward convolution reads disjoint patches that cover the images (stride = kernel size)."""
    exact = all(n == m * k for n, m, k in zip(space, out, entries, strict=True))
    plain = window.strides == window.gaps == (1,) * len(entries) and not any(map(any, window.pads))
    return exact and plain and window.dilation == entries


def _product(left: Array, right: Array, precision: Any) -> Array:
    """Contract all but the last axes, [..., A], [..., B] -> [A, B]; computed with the larger of A and B last."""
    if left.shape[-1] > right.shape[-1]:
        return _product(right, left, precision).T
    left, right = (a.reshape(-1, a.shape[-1]) for a in (left, right))
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision)


def _row_convolutions(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """All kernel entries in one product of images shifted along the width and upstream shifted along the height.

    Both operands have several times their few channels this way: once for each kernel entry along an axis.
    """
    (high, wide), (height, width) = entries, (images.shape[1], upstream.shape[2])
    (above, _), sides = window.pads
    rows = padded(upstream, ((high - 1 - above, height + above - upstream.shape[1]), (0, 0)), (1, 1), 0)
    columns = padded(images, ((0, 0), sides), (1, 1), 0)
    rows, columns = lax.optimization_barrier((rows, columns))  # otherwise every shift pads again
    rows = jnp.stack([strided_slice(rows, (high - 1 - i, 0), (height, width), (1, 1)) for i in range(high)], -2)
    columns = jnp.stack([strided_slice(columns, (0, j), (height, width), (1, 1)) for j in range(wide)], -2)
    rows, columns = (a.reshape(*a.shape[:-2], -1) for a in (rows, columns))
    y = _product(columns, rows, precision).reshape(wide, -1, high, upstream.shape[-1])
    return y.transpose(2, 0, 1, 3)


def _samples_as_channels(images: Array, upstream: Array, window: Window, entries: Space, precision: Any) -> Array:
    """A convolution of images [C, space, N] with the upstream [space, N, D] as kernel."""
    window = window._replace(pads=_exact_padding(images.shape[1:-1], upstream.shape[1:-1], window, entries))
    images, window = crop_negative_padding(_batch_to_channels(images), window)
    images, window = pad_small_images(images, window, upstream.shape[1:-1], entries)
    y = canonical_convolution(images, jnp.moveaxis(upstream, 0, -2), window, precision)
    return jnp.moveaxis(y, 0, -2)


def _exact_padding(space: Space, out: Space, window: Window, entries: Space) -> Pads:
    """The padding with which a kernel of the size ``out`` has exactly ``entries`` output positions."""
    end = [
        (k - 1) * stride + (m - 1) * dilation + 1
        for k, stride, m, dilation in zip(entries, window.strides, out, window.dilation, strict=True)
    ]
    wide = [(n - 1) * gap + 1 for n, gap in zip(space, window.gaps, strict=True)]
    return tuple((low, last - low - n) for (low, _), last, n in zip(window.pads, end, wide, strict=True))


def _batch_to_channels(x: Array) -> Array:
    """Transpose [N, space, C] to [C, space, N]."""
    if len(x) > _MAX_TRANSPOSED_SAMPLES:
        return jnp.swapaxes(x, 0, -1)
    # a product with the identity: XLA:CPU transposes element by element, and recomputes x for each of them
    flat, identity = x.reshape(len(x), -1), jnp.eye(len(x), dtype=x.dtype)
    turned = lax.dot_general(flat, identity, (((0,), (0,)), ((), ())), lax.Precision.HIGHEST)
    return jnp.moveaxis(turned.reshape(*x.shape[1:], len(x)), -2, 0)


def depthwise_kernel_gradient(images: Array, upstream: Array, window: Window, entries: Space) -> Array:
    """The gradient [k, C M] of a depthwise kernel [k, 1, C M]; upstream is [N, space, C M].

    Every entry is a sum over all pixels. All entries are accumulated together in the cache, a few rows of pixels at a
    time.
    """
    channels, several = images.shape[-1], upstream.shape[-1] // images.shape[-1]
    upstream = jnp.swapaxes(upstream.reshape(*upstream.shape[:-1], channels, several), -1, -2)
    block = _block(upstream.shape[1:-2])
    blocks = [-(-n // size) for n, size in zip(upstream.shape[1:-2], block, strict=True)]
    whole = [n * size for n, size in zip(blocks, block, strict=True)]

    def reach(pixels: Sequence[int]) -> list[int]:
        """Spatial sizes of the images that so many pixels of the upstream meet."""
        return [
            (k - 1) * stride + (n - 1) * dilation + 1
            for k, stride, n, dilation in zip(entries, window.strides, pixels, window.dilation, strict=True)
        ]

    images = padded(images, window.pads, window.gaps, 0)
    images = _resized(images, (len(images), *reach(whole), channels))
    upstream = _resized(upstream, (len(images), *whole, several, channels))

    def add(step: Array, total: Array) -> Array:
        sample, *first = jnp.unravel_index(step, (len(images), *blocks))
        first = [at * size for at, size in zip(first, block, strict=True)]
        given = lax.dynamic_slice(upstream, (sample, *first, 0, 0), (1, *block, several, channels))[0]
        first = [at * dilation for at, dilation in zip(first, window.dilation, strict=True)]
        seen = lax.dynamic_slice(images, (sample, *first, 0), (1, *reach(block), channels))
        for pixel in product(*map(range, block)):
            start = tuple(at * dilation for at, dilation in zip(pixel, window.dilation, strict=True))
            total = total + strided_slice(seen, start, entries, window.strides)[0][..., None, :] * given[pixel]
        return total

    zero = jnp.zeros((*entries, several, channels), images.dtype)
    total = lax.fori_loop(0, len(images) * math.prod(blocks), add, zero)
    return jnp.swapaxes(total, -1, -2).reshape(*entries, -1)


def _block(space: Space) -> Space:
    """Sizes of the block of pixels that is accumulated in one step: part of a row, or a few short rows."""
    *lines, width = space
    wide = -(-width // -(-width // _MAX_PIXELS))
    if not lines:
        return (wide,)
    fewest = min(-(-_MIN_PIXELS // wide), lines[-1])
    high = next((n for n in range(fewest, 2 * fewest) if lines[-1] % n == 0), fewest)
    return (*(1 for _ in lines[:-1]), high, wide)


def _resized(x: Array, shape: Sequence[int]) -> Array:
    """The array padded with zeros or cut at the end of each axis to ``shape``."""
    config = [(0, size - n, 0) for n, size in zip(x.shape, shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), config) if any(more for _, more, _ in config) else x
