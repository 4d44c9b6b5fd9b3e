"""The gradient of a convolution's kernel, in forms that XLA's CPU backend runs fast.

It is a convolution whose kernel is as large as the images and whose result is as small as a kernel. Eigen's products
want some dozens of channels in their result, and its convolutions neighboring entries that lie side by side: which
form gives both is decided by the shapes alone.

Shapes are written with N for the samples, which are summed over, C and D for channels in and out, "space" for height,
width and the like of the images, and k for these axes of a kernel. ``images`` are [N, space, C], ``upstream``, the
gradient of what the convolution gave, [N, space of the result, D].
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
    canonical,
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
"""Of a batch that is turned round by a product with the identity: its arithmetic grows with the batch."""
_FEW = 24
"""Channels: products with up to so many in their result are slow."""
_VERY_FEW, _NARROW = 4, 16
"""Samples and channels out: with so few of both, or of one axis so few samples, products of samples as channels are
slow."""
_FEW_COPIES = 3
"""Of each pixel, up to which it is worth laying out what each place saw."""
_WIDEST = 7
"""Entries along an axis of a kernel up to which images and upstream are copied once for each."""
_FEWEST_PIXELS, _MOST_PIXELS = 16, 32
"""Of which products are added up in one loop: XLA makes it of vectors only where they are not too few."""


def kernel_gradient(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """[k, C, D] of a kernel that went over ``images``; ``places`` is k.

    window: how the upstream goes over the images, so that its strides are the dilation of the convolution that is
    differentiated, and the other way round.
    """
    if images.dtype != jnp.float32 or math.prod(places) == 1:
        return _dot_per_tap(images, upstream, window, places, precision)
    for axis in range(len(places)):
        if len(places) > 1 and upstream.shape[1 + axis] == 1 and places[axis] > 1:
            images = axis_to_channels(images, window, axis, places[axis], window.strides[axis])
            others, upstream = places[:axis] + places[axis + 1 :], jnp.squeeze(upstream, 1 + axis)
            y = kernel_gradient(images, upstream, window.without_axis(axis), others, precision)
            return jnp.moveaxis(y.reshape(*others, places[axis], -1, y.shape[-1]), -3, axis)
    if len(places) > 2:
        return _fold_depth(images, upstream, window, places, precision)
    over = Window(window.dilation, window.pads, window.gaps, window.strides)
    fewest = min(images.shape[-1], upstream.shape[-1])
    if is_mostly_padding(images.shape[1:-1], places, over, upstream.shape[1:-1], fewest):
        return _dot_per_tap_region(images, upstream, over, places, precision)
    unit = (1,) * len(places)
    fewer = images.shape[-1] > upstream.shape[-1]  # channels out than in
    if fewer and window.dilation != unit and window.gaps == window.strides == unit:
        return _by_phase(images, upstream, window, places, precision)
    if window.gaps != unit or (fewer and window.dilation == unit):
        # the same sums as images that go over the upstream, from the kernel's end on
        window = _swap_roles(window, images.shape[1:-1], upstream.shape[1:-1], places)
        y = _choose_form(upstream, images, window, places, precision)
        return lax.rev(jnp.swapaxes(y, -2, -1), range(len(places)))
    return _choose_form(images, upstream, window, places, precision)


def _fold_depth(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """Of an axis less: the first one's pixels as samples, its entries as channels."""
    given = (places[0], window.strides[0], upstream.shape[1], window.dilation[0])
    planes, rest = fold_depth(images, window, *given)
    y = kernel_gradient(planes, upstream.reshape(-1, *upstream.shape[2:]), rest, places[1:], precision)
    return jnp.moveaxis(y.reshape(*places[1:], places[0], -1, upstream.shape[-1]), -3, 0)


def _by_phase(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """For strided kernels: entries one stride apart saw pixels one stride apart, as a kernel without strides would."""
    steps, unit = window.dilation, (1,) * len(places)
    most = [-(-k // step) for k, step in zip(places, steps, strict=True)]

    def of_phase(phase: Sequence[int]) -> Array:
        entries = tuple(-(-(k - at) // step) for k, at, step in zip(places, phase, steps, strict=True))
        lows = [low for low, _ in window.pads]
        first = [(at - low) % step for at, low, step in zip(phase, lows, steps, strict=True)]  # pixel of this phase
        if min(entries) <= 0 or any(at >= n for at, n in zip(first, images.shape[1:-1], strict=True)):
            return jnp.zeros((*most, images.shape[-1], upstream.shape[-1]), images.dtype)  # which met padding alone
        own = lax.slice(images, (0, *first, 0), images.shape, (1, *steps, 1))
        before = [(at + low - p) // step for at, low, p, step in zip(first, lows, phase, steps, strict=True)]
        needed = [m + k - 1 for m, k in zip(upstream.shape[1:-1], entries, strict=True)]
        pads = tuple((low, n - low - size) for low, n, size in zip(before, needed, own.shape[1:-1], strict=True))
        y = kernel_gradient(own, upstream, Window(unit, pads, unit, unit), entries, precision)
        return jnp.pad(y, [*((0, n - k) for n, k in zip(most, entries, strict=True)), (0, 0), (0, 0)])

    found = [of_phase(phase) for phase in product(*map(range, steps))]
    y = jnp.stack(found).reshape(*steps, *most, *found[0].shape[-2:])
    axes = len(places)
    y = y.transpose(*(axis for i in range(axes) for axis in (axes + i, i)), 2 * axes, 2 * axes + 1)
    y = y.reshape(*(n * step for n, step in zip(most, steps, strict=True)), *y.shape[-2:])
    return lax.slice(y, (0,) * y.ndim, (*places, *y.shape[-2:]))


def _swap_roles(window: Window, space: Space, given: Space, places: Space) -> Window:
    """How images go over the upstream."""
    far = [(k - 1) * stride for k, stride in zip(places, window.strides, strict=True)]
    low = [end - before for end, (before, _) in zip(far, window.pads, strict=True)]
    reach = [
        (n - 1) * gap + 1 + end - (m - 1) * step - 1
        for n, gap, end, m, step in zip(space, window.gaps, far, given, window.dilation, strict=True)
    ]
    pads = tuple((before, n - before) for before, n in zip(low, reach, strict=True))
    return Window(window.strides, pads, gaps=window.dilation, dilation=window.gaps)


def _choose_form(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """The best form for images with fewer channels than the upstream, or for strided outputs."""
    form, touched = _samples_as_channels, 2 * (images.nbytes + upstream.nbytes)
    if math.prod(window.dilation) > 1:
        in_a_row = len(places) == 1 and images.shape[-1] <= _FEW  # a patch is contiguous
        if in_a_row or math.prod(places) <= _FEW_COPIES * math.prod(window.dilation):
            channels = math.prod(places) * images.shape[-1] + upstream.shape[-1]
            form, touched = _im2col, upstream.nbytes // upstream.shape[-1] * channels
    elif math.prod(window.strides) == 1 and len(places) == 2 and max(places) <= _WIDEST and upstream.shape[-1] <= _FEW:
        form, touched = _row_convolutions, 2 * (1 + max(places)) * (images.nbytes + upstream.nbytes)
    if (
        form is _samples_as_channels
        and len(images) <= _VERY_FEW
        and (len(places) == 1 or upstream.shape[-1] <= _NARROW)
    ):
        form = _fold_depth if len(places) > 1 else _im2col
    return _sum_over_chunks(partial(form, window=window, places=places, precision=precision), images, upstream, touched)


def _sum_over_chunks(form: Callable[[Array, Array], Array], images: Array, upstream: Array, touched: int) -> Array:
    """The sum of ``form`` over as many samples at a time as stay in the cache. Of all, so many bytes are touched."""
    samples = len(images)
    fewest = min(samples, -(-touched // limits().kernel_gradient_bytes))
    number = next((n for n in range(fewest, min(2 * fewest, samples + 1)) if samples % n == 0), 1)
    if number == 1:
        return form(images, upstream)
    # Cut inside the loop: of what is reshaped before it, XLA would compute the images once more.
    chunk = lambda i: [lax.dynamic_slice_in_dim(a, i * size, size) for a in (images, upstream)]  # noqa: E731
    size = samples // number
    shape = jax.eval_shape(lambda: form(*chunk(0)))
    zero = jnp.zeros(shape.shape, shape.dtype)
    return lax.fori_loop(0, number, lambda i, total: total + form(*chunk(i)), zero)


def _dot_per_tap(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """A product for each entry of the kernel."""
    seen = patches(images, upstream.shape[1:-1], window, places)
    products = [_product(pixels, upstream, precision) for pixels in seen]
    return jnp.stack(products).reshape(*places, *products[0].shape)


def _dot_per_tap_region(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """A product for each entry of the kernel, whose ``window`` it is, of the pixels that it met and their upstream."""
    axes, channels = len(places), (images.shape[-1], upstream.shape[-1])
    found = dict.fromkeys(product(*map(range, places)), jnp.zeros(channels, images.dtype))
    for met in tap_regions(images.shape[1:-1], places, window, upstream.shape[1:-1]):
        pixels = strided_slice(images, met.pixel, met.size, window.strides)
        found[met.index] = _product(pixels, strided_slice(upstream, met.first, met.size, (1,) * axes), precision)
    return jnp.stack(list(found.values())).reshape(*places, *channels)


def _im2col(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """One product of the upstream and what each place of it saw of the images."""
    given = upstream.shape[1:-1]
    if is_patches(window, images.shape[1:-1], given, places):
        cut = images.reshape(len(images), *(n for pair in zip(given, places, strict=True) for n in pair), -1)
        axes = range(1, 2 * len(places), 2)
        columns = cut.transpose(0, *axes, *(axis + 1 for axis in axes), cut.ndim - 1)
    else:
        columns = jnp.stack(list(patches(images, given, window, places)), -2)
    y = _product(columns.reshape(len(images), *given, -1), upstream, precision)
    return y.reshape(*places, -1, upstream.shape[-1])


def is_patches(window: Window, space: Space, given: Space, places: Space) -> bool:
    """Whether each pixel of the upstream saw a part of the images that no other one saw, and nothing is left over."""
    exact = all(n == m * k for n, m, k in zip(space, given, places, strict=True))
    plain = window.strides == window.gaps == (1,) * len(places) and not any(map(any, window.pads))
    return exact and plain and window.dilation == places


def _product(left: Array, right: Array, precision: Any) -> Array:
    """[..., A], [..., B] -> [A, B], the larger one last while it is made."""
    if left.shape[-1] > right.shape[-1]:
        return _product(right, left, precision).T
    left, right = (a.reshape(-1, a.shape[-1]) for a in (left, right))
    return lax.dot_general(left, right, (((0,), (0,)), ((), ())), precision)


def _row_convolutions(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """Every entry of the kernel in one product, of images shifted along the width and upstream along the height.

    So both have as many times their few channels as the kernel has entries along an axis.
    """
    (high, wide), (height, width) = places, (images.shape[1], upstream.shape[2])
    (above, _), sides = window.pads
    rows = padded(upstream, ((high - 1 - above, height + above - upstream.shape[1]), (0, 0)), (1, 1), 0)
    columns = padded(images, ((0, 0), sides), (1, 1), 0)
    rows, columns = lax.optimization_barrier((rows, columns))  # or each shift would look anew where the padding is
    rows = jnp.stack([strided_slice(rows, (high - 1 - i, 0), (height, width), (1, 1)) for i in range(high)], -2)
    columns = jnp.stack([strided_slice(columns, (0, j), (height, width), (1, 1)) for j in range(wide)], -2)
    rows, columns = (a.reshape(*a.shape[:-2], -1) for a in (rows, columns))
    y = _product(columns, rows, precision).reshape(wide, -1, high, upstream.shape[-1])
    return y.transpose(2, 0, 1, 3)


def _samples_as_channels(images: Array, upstream: Array, window: Window, places: Space, precision: Any) -> Array:
    """A convolution of images [C, space, N] with upstream [space, N, D]."""
    window = window._replace(pads=_just_enough(images.shape[1:-1], upstream.shape[1:-1], window, places))
    images, window = crop_negative_padding(_last_to_first(images), window)
    images, window = pad_small_images(images, window, upstream.shape[1:-1], places)
    numbers = lax.ConvDimensionNumbers(*canonical(len(places)))
    over = (window.strides, window.pads, window.gaps, window.dilation)
    y = lax.conv_general_dilated(images, jnp.moveaxis(upstream, 0, -2), *over, numbers, precision=precision)
    return jnp.moveaxis(y, 0, -2)


def _just_enough(space: Space, given: Space, window: Window, places: Space) -> Pads:
    """The padding with which a window as large as ``given`` takes as many places and goes nowhere else."""
    end = [
        (k - 1) * step + (m - 1) * apart + 1
        for k, step, m, apart in zip(places, window.strides, given, window.dilation, strict=True)
    ]
    wide = [(n - 1) * gap + 1 for n, gap in zip(space, window.gaps, strict=True)]
    return tuple((low, last - low - n) for (low, _), last, n in zip(window.pads, end, wide, strict=True))


def _last_to_first(x: Array) -> Array:
    """[N, space, C] -> [C, space, N]."""
    if len(x) > _MAX_TRANSPOSED_SAMPLES:
        return jnp.swapaxes(x, 0, -1)
    # a product with the identity: XLA transposes element by element, and recomputes for each what x is made of
    flat, identity = x.reshape(len(x), -1), jnp.eye(len(x), dtype=x.dtype)
    turned = lax.dot_general(flat, identity, (((0,), (0,)), ((), ())), lax.Precision.HIGHEST)
    return jnp.moveaxis(turned.reshape(*x.shape[1:], len(x)), -2, 0)


def depthwise_kernel_gradient(images: Array, upstream: Array, window: Window, places: Space) -> Array:
    """[k, C M] of a kernel [k, 1, C M] that went over each channel by itself; upstream is [N, space, C M].

    Each entry is a sum over all pixels of products of two numbers. All entries, which stay in the cache, are added up
    together, a few rows of pixels at a time.
    """
    channels, several = images.shape[-1], upstream.shape[-1] // images.shape[-1]
    upstream = jnp.swapaxes(upstream.reshape(*upstream.shape[:-1], channels, several), -1, -2)
    block = _block(upstream.shape[1:-2])
    blocks = [-(-n // size) for n, size in zip(upstream.shape[1:-2], block, strict=True)]
    whole = [n * size for n, size in zip(blocks, block, strict=True)]
    reach = lambda pixels: [  # noqa: E731 - of the images, seen from so many pixels of the upstream
        (k - 1) * apart + (n - 1) * step + 1
        for k, apart, n, step in zip(places, window.strides, pixels, window.dilation, strict=True)
    ]
    images = padded(images, window.pads, window.gaps, 0)
    images = _with_room(images, (len(images), *reach(whole), channels))
    upstream = _with_room(upstream, (len(images), *whole, several, channels))

    def add(turn: Array, total: Array) -> Array:
        sample, *first = jnp.unravel_index(turn, (len(images), *blocks))
        first = [at * size for at, size in zip(first, block, strict=True)]
        given = lax.dynamic_slice(upstream, (sample, *first, 0, 0), (1, *block, several, channels))[0]
        first = [at * step for at, step in zip(first, window.dilation, strict=True)]
        seen = lax.dynamic_slice(images, (sample, *first, 0), (1, *reach(block), channels))
        for pixel in product(*map(range, block)):
            start = tuple(at * step for at, step in zip(pixel, window.dilation, strict=True))
            total = total + strided_slice(seen, start, places, window.strides)[0][..., None, :] * given[pixel]
        return total

    zero = jnp.zeros((*places, several, channels), images.dtype)
    total = lax.fori_loop(0, len(images) * math.prod(blocks), add, zero)
    return jnp.swapaxes(total, -1, -2).reshape(*places, -1)


def _block(space: Space) -> Space:
    """Pixels that are accumulated in one step: of a row, or of a few rows if rows are short."""
    *lines, width = space
    wide = -(-width // -(-width // _MOST_PIXELS))
    if not lines:
        return (wide,)
    fewest = min(-(-_FEWEST_PIXELS // wide), lines[-1])
    high = next((n for n in range(fewest, 2 * fewest) if lines[-1] % n == 0), fewest)
    return (*(1 for _ in lines[:-1]), high, wide)


def _with_room(x: Array, shape: Sequence[int]) -> Array:
    """With zeros at the ends of axes that are shorter, and without the ends of those that are longer."""
    config = [(0, size - n, 0) for n, size in zip(x.shape, shape, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), config) if any(more for _, more, _ in config) else x
