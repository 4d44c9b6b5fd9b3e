"""PNG and JPEG images as arrays of one shape, hostile until decoded."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np

from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.errors import FedraxError, unknown

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE = 4096
"""Pixels of a side that images are resized to."""
MAX_PIXELS, MAX_FILE = 50_000_000, 256 << 20
"""Pixels and bytes of an encoded image."""
MODES = {"rgb": ("RGB", 3), "grey": ("L", 1)}
ALONE = 2_000_000
"""Pixels beyond which an image is decoded by itself: it takes some 6 bytes a pixel, on a machine of many cores."""
UPRIGHT, ON_A_SIDE = 1, 5
"""The orientation of an image whose pixels lie as it is to be seen, and the first of those with sides exchanged."""
TOGETHER = 1024
"""Images under way at once."""
_one_at_a_time = threading.Lock()
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")

Source = TypeVar("Source")


def check_form(size: tuple[int, ...], color: str) -> tuple[tuple[int, int, int], str]:
    """The shape (height, width, channels) and Pillow's mode of images; FedraxError where there are none such."""
    if color not in MODES:
        raise unknown("color:", color, MODES)
    sides = size if isinstance(size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides):
        raise FedraxError(f"size is a height and a width of 1 to {MAX_SIDE:,} pixels, not {list(sides) or size!r}.")
    mode, channels = MODES[color]
    return (size[0], size[1], channels), mode


def decoded(
    sources: Sequence[Source],
    opened: Callable[[Source], AbstractContextManager[BinaryIO]],
    shape: tuple[int, int, int],
    mode: str,
    where: str,
) -> np.ndarray:
    """The images uint8 [n, *shape], each resized by bilinear interpolation; several are decoded at the same time.

    ``where``: what a message names, with the number of the image, where sources have no names.
    """
    if len(sources) * math.prod(shape) > MAX_BYTES:
        raise FedraxError(f"{where}: {len(sources):,} images of shape {list(shape)} are over {MAX_BYTES >> 30} GiB.")
    images = np.empty((len(sources), *shape), np.uint8)

    def decode(row: int) -> None:
        source = sources[row]
        name = str(source) if isinstance(source, os.PathLike) else f"{where}, row {row}"
        with opened(source) as file:
            images[row] = _image(file, name, shape, mode)

    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows in _blocks(len(sources)):
            for _ in pool.map(decode, rows):
                pass
    return images


def _blocks(rows: int) -> Iterator[range]:
    return (range(start, min(start + TOGETHER, rows)) for start in range(0, rows, TOGETHER))


def orientation(image: Image.Image) -> int:
    """How a camera was held, 1 to 8 (EXIF 2.3, tag 0x0112): its pixels lie as the sensor did."""
    try:
        found = image.getexif().get(0x0112, UPRIGHT)
    except Exception:  # of a damaged block the decoder raises anything; it tells of no orientation
        return UPRIGHT
    return found if found in range(1, 9) else UPRIGHT


def _image(file: BinaryIO, name: str, shape: tuple[int, int, int], mode: str) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=("JPEG", "PNG")) as image:
            if math.prod(image.size) > MAX_PIXELS:  # known before any pixel is decompressed
                raise FedraxError(f"{name} announces {image.size} pixels, more than {MAX_PIXELS:,} in all.")
            if image.mode not in _EIGHT_BITS or any("16" in str(tile[-1]) for tile in image.tile):
                raise FedraxError(f"{name} has more than 8 bits a channel (mode {image.mode}): convert it first.")
            with _one_at_a_time if math.prod(image.size) > ALONE else nullcontext():
                held = image.convert(mode)
                if orientation(image) != UPRIGHT:
                    ImageOps.exif_transpose(held, in_place=True)
                resized = held.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
                return np.asarray(resized).reshape(shape)
    except FedraxError:
        raise
    except Exception as error:  # a damaged image may break the decoders in any way; too large ones have their own
        raise FedraxError(f"{name} is not a readable JPEG or PNG image ({error}).") from error


def moments(images: np.ndarray, train: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel of the training images, scaled by 1/255; the deviation of a constant is 1."""
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for rows in _blocks(len(train)):
        block = images[train[rows.start : rows.stop]]
        counts += [np.bincount(block[..., c].ravel(), minlength=256) for c in range(len(counts))]
    values, weights = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())
