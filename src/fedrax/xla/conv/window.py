"""Convolution geometry: windows, padding, patches, and the regions of the input that each kernel entry meets.

Shapes are written with N for the batch, C and D for input and output channels, "space" for spatial axes such as height
and width, and k for the spatial axes of a kernel. The canonical layout is [N, space, C] for images and results and
[k, C, D] for kernels. An "entry" is a spatial position of a kernel (also called tap), with a matrix [C, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

Space = tuple[int, ...]
"""A number for each spatial axis."""
Pads = tuple[tuple[int, int], ...]
"""Padding before and after each spatial axis; negative padding drops pixels."""

MOST_TAPS = 128
"""Most entries of a window that are unrolled into one operation each."""


_MAX_USEFUL = 0.78
"""Largest fraction of kernel entries that meet pixels and not padding for which products for each entry are faster than
a convolution of padded images."""
_MIN_CHANNELS, _MAX_ENTRIES = 128, 9
"""Fewest channels and most kernel entries for which this holds."""


class Window(NamedTuple):
    """Parameters of a convolution, a value for each spatial axis."""

    strides: tuple[int, ...]
    pads: Pads
    gaps: tuple[int, ...]
    """Input dilation: 2 puts one zero between neighboring pixels, as in a transposed convolution."""
    dilation: tuple[int, ...]
    """Kernel dilation: distance of neighboring entries."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Window:
        """The window of a ``conv_general_dilated`` with these parameters."""
        return cls(params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"])

    def without_axis(self, axis: int) -> Window:
        """The window without one spatial axis."""
        return Window(*(values[:axis] + values[axis + 1 :] for values in self))  # type: ignore[arg-type]

    def without_padding(self) -> Window:
        """The window for images that :func:`padded` has padded and dilated."""
        none = tuple((0, 0) for _ in self.pads)
        return self._replace(pads=none, gaps=(1,) * len(none))


def out_space(space: Sequence[int], kernel_space: Sequence[int], window: Window) -> tuple[int, ...]:
    """Spatial sizes of the result, from those of the images and of the kernel."""
    room = [(n - 1) * g + 1 + sum(p) for n, g, p in zip(space, window.gaps, window.pads, strict=True)]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel_space, window.dilation, strict=True)]
    return tuple(max(0, (n - r) // s + 1) for n, r, s in zip(room, reach, window.strides, strict=True))


def is_half_precision(dtype: Any) -> bool:
    """Whether a dtype is bfloat16 or float16, in which XLA:CPU computes by float32 and rounds every result."""
    return dtype in (jnp.bfloat16, jnp.float16)


def canonical_convolution(x: Array, kernel: Array, window: Window, precision: Any) -> Array:
    """``lax.conv_general_dilated`` in the canonical layout, the one that XLA:CPU hands to Eigen."""
    space = len(window.strides)
    images = (0, space + 1, *range(1, space + 1))
    numbers = lax.ConvDimensionNumbers(images, (space + 1, space, *range(space)), images)
    return lax.conv_general_dilated(
        x, kernel, window.strides, window.pads, window.gaps, window.dilation, numbers, precision=precision
    )


def to_output_layout(y: Array, numbers: lax.ConvDimensionNumbers) -> Array:
    """A result [N, space, D] in the output layout of a convolution's dimension numbers."""
    axes = [0, y.ndim - 1, *range(1, y.ndim - 1)]
    return y.transpose([axes[numbers.out_spec.index(axis)] for axis in range(y.ndim)])


def padded(x: Array, pads: Pads, gaps: tuple[int, ...], value: float) -> Array:
    """Images [N, space, C] with ``gaps - 1`` pixels of ``value`` between pixels, and ``pads`` around."""
    config = [(0, 0, 0), *((low, high, gap - 1) for (low, high), gap in zip(pads, gaps, strict=True)), (0, 0, 0)]
    if not any(any(axis) for axis in config):
        return x
    return lax.pad(x, jnp.asarray(value, x.dtype), config)


def crop_negative_padding(x: Array, window: Window) -> tuple[Array, Window]:
    """Images without the pixels that negative padding drops, and the window for them."""
    if all(low >= 0 and high >= 0 for low, high in window.pads):
        return x, window
    return padded(x, window.pads, window.gaps, 0), window.without_padding()


def fold_depth(x: Array, window: Window, entries: int, dilation: int, number: int, stride: int) -> tuple[Array, Window]:
    """Images [N, depth, space, C] as [N number, space, entries C], and the window for the other spatial axes.

    Each of the ``number`` output positions along the depth becomes an example, and each of the kernel's ``entries``
    along the depth a group of channels; ``dilation`` and ``stride`` are those of the depth.
    """
    none = ((0, 0),) * (len(window.pads) - 1)
    rest = window.without_axis(0)
    x = padded(x, (window.pads[0], *none), (window.gaps[0], *(1 for _ in none)), 0)
    ends = [at * dilation + (number - 1) * stride + 1 for at in range(entries)]
    seen = [lax.slice_in_dim(x, at * dilation, end, stride, axis=1) for at, end in enumerate(ends)]
    planes = jnp.stack(seen, -2)
    return planes.reshape(len(x) * number, *x.shape[2:-1], -1), rest


def axis_to_channels(x: Array, window: Window, axis: int, entries: int, dilation: int) -> Array:
    """[N, space, C] -> [N, other space, entries C]: the patch of the first output position along a spatial axis."""
    low, (size, gap) = window.pads[axis][0], (x.shape[1 + axis], window.gaps[axis])
    end = (entries - 1) * dilation + 1
    config = [(0, 0, 0)] * x.ndim
    config[1 + axis] = (low, end - low - (size - 1) * gap - 1, gap - 1)
    x = lax.slice_in_dim(lax.pad(x, jnp.zeros((), x.dtype), config), 0, end, dilation, 1 + axis)
    x = jnp.moveaxis(x, 1 + axis, -2)
    return x.reshape(*x.shape[:-2], -1)


def strided_slice(x: Array, start: tuple[int, ...], size: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """``size`` pixels of images [N, space, C] from ``start`` on, with ``strides``."""
    stop = [at + (n - 1) * s + 1 for at, n, s in zip(start, size, strides, strict=True)]
    return lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *strides, 1))


def taps(x: Array, kernel_space: tuple[int, ...], window: Window, out: tuple[int, ...]) -> Iterator[tuple]:
    """For each kernel entry (its index, the pixels that it meets, [N, space of the result, C])."""
    x = padded(x, window.pads, window.gaps, 0)
    for index in product(*map(range, kernel_space)):
        start = tuple(i * d for i, d in zip(index, window.dilation, strict=True))
        yield index, strided_slice(x, start, out, window.strides)


def patches(x: Array, kernel_space: tuple[int, ...], window: Window, out: tuple[int, ...]) -> Iterator[Array]:
    """The patch of each output position, [N, k, C]."""
    x = padded(x, window.pads, window.gaps, 0)
    for index in product(*map(range, out)):
        start = tuple(i * s for i, s in zip(index, window.strides, strict=True))
        yield strided_slice(x, start, kernel_space, window.dilation)


class TapRegion(NamedTuple):
    """The output positions at which one kernel entry meets pixels and not padding."""

    index: Space
    """The kernel entry."""
    first: Space
    """First of the output positions."""
    pixel: Space
    """Pixel that the entry meets there."""
    size: Space
    """Number of output positions."""


def tap_regions(space: Space, entries: Space, window: Window, out: Space) -> list[TapRegion]:
    """Regions of the kernel entries that meet any pixel, for images without input dilation."""

    def along(n: int, size: int, low: int, stride: int, dilation: int, out: int) -> list[tuple[int, int, int, int]]:
        found = []
        for at in range(size):
            begin = max(0, -((at * dilation - low) // stride))  # first output position beyond the leading padding
            end = min(out, (n - 1 - at * dilation + low) // stride + 1)
            if end > begin:
                found.append((at, begin, begin * stride + at * dilation - low, end - begin))
        return found

    lows = [low for low, _ in window.pads]
    axes = [along(*each) for each in zip(space, entries, lows, window.strides, window.dilation, out, strict=True)]
    return [TapRegion(*zip(*one, strict=True)) for one in product(*axes)]  # type: ignore[arg-type]


def is_mostly_padding(space: Space, entries: Space, window: Window, out: Space, fewest: int) -> bool:
    """Whether padding is so large a part of what the kernel meets that a product for each entry is faster.

    So it is for small images. ``fewest``: the smaller number of channels, input or output.
    """
    few_entries = 1 < math.prod(entries) <= _MAX_ENTRIES and len(entries) <= 2
    if set(window.gaps) != {1} or not few_entries or fewest < _MIN_CHANNELS:
        return False
    pixels = sum(math.prod(met.size) for met in tap_regions(space, entries, window, out))
    return pixels <= _MAX_USEFUL * math.prod(entries) * math.prod(out)


def pad_small_images(x: Array, window: Window, entries: Space, out: tuple[int, ...]) -> tuple[Array, Window]:
    """Pad images explicitly where XLA:CPU would not use Eigen with padding as a parameter of the convolution.

    XLA:CPU does not use it for images of fewer pixels than the kernel has ``entries``, since it exchanges the roles of
    images and kernel then, and for images smaller than the result (full convolutions).
    """
    # Without the barriers XLA would merge the padding into the convolution again.
    if math.prod(entries) > math.prod(x.shape[1:-1]):
        return lax.optimization_barrier(padded(x, window.pads, window.gaps, 0)), window.without_padding()
    if math.prod(entries) > math.prod(max(1, n - 2 * (k - 1)) for n, k in zip(x.shape[1:], entries, strict=False)):
        x = lax.optimization_barrier(x)  # likewise for padding in user code
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
