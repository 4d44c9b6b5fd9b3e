"""Convolution geometry: windows, padding, patches and the regions that each kernel entry meets.

Shapes are written with N for the batch, C and D for channels in and out, "space" for height, width and the like, and k
for these axes of a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

Space = tuple[int, ...]
"""A number for each axis of space."""
Pads = tuple[tuple[int, int], ...]

MOST_TAPS = 128
"""Entries of a window up to which it is worth laying them out one after another."""


_PIXELS = 0.78
"""Of what a kernel meets, below which products without the padding are faster than a convolution with it."""
_MANY, _FEW_ENTRIES = 128, 9
"""Channels from which on they are, and entries of the kernel up to which."""


class Window(NamedTuple):
    """How a kernel goes over images, a value for each axis of space."""

    strides: tuple[int, ...]
    pads: Pads
    gaps: tuple[int, ...]
    """Distance of neighboring pixels (input dilation): 2 with one zero between them, as in a transposed convolution."""
    dilation: tuple[int, ...]
    """Distance of neighboring entries of the kernel."""

    def without_axis(self, axis: int) -> Window:
        """On the other axes alone."""
        return Window(*(values[:axis] + values[axis + 1 :] for values in self))  # type: ignore[arg-type]

    def without_padding(self) -> Window:
        """Over images that have been padded."""
        none = tuple((0, 0) for _ in self.pads)
        return self._replace(pads=none, gaps=(1,) * len(none))


def out_space(space: Sequence[int], kernel_space: Sequence[int], window: Window) -> tuple[int, ...]:
    """Height, width, ... of the result, from those of the images and of the kernel."""
    room = [(n - 1) * g + 1 + sum(p) for n, g, p in zip(space, window.gaps, window.pads, strict=True)]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_space, window.dilation, strict=True)]
    return tuple(max(0, (n - r) // s + 1) for n, r, s in zip(room, reach, window.strides, strict=True))


def is_half_precision(dtype: Any) -> bool:
    """Whether numbers are of 16 bits: a CPU has no arithmetic of theirs, and XLA computes in float32 and rounds."""
    return dtype in (jnp.bfloat16, jnp.float16)


def canonical(space: int) -> tuple[tuple[int, ...], ...]:
    """Axes of images, kernels and results in the layout [batch, space, channels], as JAX's dimension numbers."""
    images = (0, space + 1, *range(1, space + 1))
    return images, (space + 1, space, *range(space)), images


def padded(x: Array, pads: Pads, gaps: tuple[int, ...], value: float) -> Array:
    """x [N, space, C] with ``gaps - 1`` pixels put between pixels and ``pads`` around."""
    config = [(0, 0, 0), *((low, high, gap - 1) for (low, high), gap in zip(pads, gaps, strict=True)), (0, 0, 0)]
    if not any(any(axis) for axis in config):
        return x
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def crop_negative_padding(x: Array, window: Window) -> tuple[Array, Window]:
    """Images without the pixels that negative padding drops, and a window without negative padding."""
    if all(low >= 0 and high >= 0 for low, high in window.pads):
        return x, window
    return padded(x, window.pads, window.gaps, 0), window.without_padding()


def fold_depth(x: Array, window: Window, entries: int, apart: int, number: int, step: int) -> tuple[Array, Window]:
    """Images [N, depth, space, C] as [N number, space, entries C], and how a window goes over these.

    Of the depth, each of ``number`` samples sees so many ``entries``, which lie ``apart``, and the next sample the same
    a ``step`` further.
    """
    none = ((0, 0),) * (len(window.pads) - 1)
    rest = Window(window.strides[1:], window.pads[1:], window.gaps[1:], window.dilation[1:])
    x = padded(x, (window.pads[0], *none), (window.gaps[0], *(1 for _ in none)), 0)
    ends = [at * apart + (number - 1) * step + 1 for at in range(entries)]
    seen = [lax.slice_in_dim(x, at * apart, end, step, axis=1) for at, end in enumerate(ends)]
    planes = jnp.stack(seen, -2)
    return planes.reshape(len(x) * number, *x.shape[2:-1], -1), rest


def axis_to_channels(x: Array, window: Window, axis: int, entries: int, apart: int) -> Array:
    """[N, space, C] -> [N, other space, entries C]: of an axis of space so many entries, this far ``apart``.

    From the first that a window sees.
    """
    low, (places, gap) = window.pads[axis][0], (x.shape[1 + axis], window.gaps[axis])
    end = (entries - 1) * apart + 1
    config = [(0, 0, 0)] * x.ndim
    config[1 + axis] = (low, end - low - (places - 1) * gap - 1, gap - 1)
    x = lax.slice_in_dim(lax.pad(x, jnp.zeros((), x.dtype), config), 0, end, apart, 1 + axis)
    x = jnp.moveaxis(x, 1 + axis, -2)
    return x.reshape(*x.shape[:-2], -1)


def strided_slice(x: Array, start: tuple[int, ...], size: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """``size`` pixels of x [N, space, C] from ``start`` on, ``strides`` apart."""
    stop = [at + (n - 1) * s + 1 for at, n, s in zip(start, size, strides, strict=True)]
    return lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *strides, 1))


def taps(x: Array, kernel_space: tuple[int, ...], window: Window, out: tuple[int, ...]) -> Iterator[tuple]:
    """(index, what the kernel's entry of this index sees of the images, [N, space of the result, C]) of each entry."""
    x = padded(x, window.pads, window.gaps, 0)
    for index in product(*map(range, kernel_space)):
        start = tuple(i * d for i, d in zip(index, window.dilation, strict=True))
        yield index, strided_slice(x, start, out, window.strides)


def patches(x: Array, kernel_space: tuple[int, ...], window: Window, out: tuple[int, ...]) -> Iterator[Array]:
    """The patch of each output place, [N, k, C]."""
    x = padded(x, window.pads, window.gaps, 0)
    for index in product(*map(range, out)):
        start = tuple(i * s for i, s in zip(index, window.strides, strict=True))
        yield strided_slice(x, start, kernel_space, window.dilation)


class TapRegion(NamedTuple):
    """The output places at which one kernel entry meets a pixel, and these pixels."""

    index: Space
    first: Space
    """Of the places."""
    pixel: Space
    """Met at the first."""
    size: Space


def tap_regions(space: Space, entries: Space, window: Window, out: Space) -> list[TapRegion]:
    """Regions of the kernel entries that meet any pixel, for images without gaps."""

    def along(n: int, size: int, low: int, step: int, apart: int, places: int) -> list[tuple[int, int, int, int]]:
        found = []
        for at in range(size):
            begin = max(0, -((at * apart - low) // step))  # the first place whose pixel is not before the images
            end = min(places, (n - 1 - at * apart + low) // step + 1)
            if end > begin:
                found.append((at, begin, begin * step + at * apart - low, end - begin))
        return found

    lows = [low for low, _ in window.pads]
    axes = [along(*each) for each in zip(space, entries, lows, window.strides, window.dilation, out, strict=True)]
    return [TapRegion(*zip(*one, strict=True)) for one in product(*axes)]  # type: ignore[arg-type]


def is_mostly_padding(space: Space, entries: Space, window: Window, out: Space, fewest: int) -> bool:
    """Whether a product for each kernel entry is better, as most of what the kernel meets is padding (small images).

    fewest: the smaller number of channels, in or out.
    """
    if set(window.gaps) != {1} or not 1 < math.prod(entries) <= _FEW_ENTRIES or len(entries) > 2 or fewest < _MANY:
        return False
    pixels = sum(math.prod(met.size) for met in tap_regions(space, entries, window, out))
    return pixels <= _PIXELS * math.prod(entries) * math.prod(out)


def pad_small_images(x: Array, window: Window, entries: Space, out: tuple[int, ...]) -> tuple[Array, Window]:
    """Images with their padding, or some of it, where XLA's faster way is not for them without.

    It is not where the images have fewer pixels than the kernel has ``entries``, for XLA takes the one for the other
    then; nor where the images are smaller than the result, as what without padding becomes of images, so that their
    gradient is larger.
    """
    # the barriers: XLA would make it padding of the convolution again
    if math.prod(entries) > math.prod(x.shape[1:-1]):
        return lax.optimization_barrier(padded(x, window.pads, window.gaps, 0)), window.without_padding()
    if math.prod(entries) > math.prod(max(1, n - 2 * (k - 1)) for n, k in zip(x.shape[1:], entries, strict=False)):
        x = lax.optimization_barrier(x)  # a user's own padding, too
    if not set(window.strides) == set(window.gaps) == {1}:
        return x, window
    edges, left = [], []
    for (low, high), size, places in zip(window.pads, x.shape[1:], out, strict=False):
        more = max(places - size, 0)
        before = min(max(more // 2, more - high), low)
        edges.append((before, more - before))
        left.append((low - before, high - more + before))
    if not any(map(any, edges)):
        return x, window
    return lax.optimization_barrier(jnp.pad(x, [(0, 0), *edges, (0, 0)])), window._replace(pads=tuple(left))
