"""PNG and JPEG images as arrays of one shape; the cache of decoded images; image tables of Hugging Face."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import numpy as np

from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.table_files import parquet_errors
from fedrax.errors import FedraxError, unknown
from fedrax.files import atomic_write, cache_directory, decompressed_limit, open_regular_file

if TYPE_CHECKING:
    from PIL import Image

MAX_SIDE = 4096
"""Largest side, in pixels, to which images are resized."""
MAX_PIXELS, MAX_FILE = 50_000_000, 256 << 20
"""Limits of an encoded image: pixels and bytes."""
COLOR_MODES = {"rgb": ("RGB", 3), "gray": ("L", 1)}
SERIAL_PIXELS = 2_000_000
"""Pixels beyond which images are decoded one at a time, because decoding takes about 6 bytes per pixel."""
EXIF_UPRIGHT, EXIF_SIDEWAYS = 1, 5
"""EXIF orientation of an upright image, and the first orientation with exchanged sides."""
DECODE_BATCH = 1024
"""Images that are decoded at the same time."""
_LARGE_IMAGES = threading.Lock()
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")

Source = TypeVar("Source")


def check_image_form(size: tuple[int, ...], color: str) -> tuple[tuple[int, int, int], str]:
    """The shape (height, width, channels) and Pillow's mode of images; FedraxError for unsupported ones."""
    if color not in COLOR_MODES:
        raise unknown("color:", color, COLOR_MODES)
    sides = size if isinstance(size, tuple | list) else ()
    if len(sides) != 2 or not all(isinstance(side, int) and 1 <= side <= MAX_SIDE for side in sides):
        raise FedraxError(f"size is a height and a width of 1 to {MAX_SIDE:,} pixels, not {list(sides) or size!r}.")
    mode, channels = COLOR_MODES[color]
    return (size[0], size[1], channels), mode


def decode_images(
    sources: Sequence[Source],
    open_source: Callable[[Source], AbstractContextManager[BinaryIO]],
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
        with open_source(source) as file:
            images[row] = _decode_image(file, name, shape, mode)

    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows in _blocks(len(sources)):
            for _ in pool.map(decode, rows):
                pass
    return images


def _blocks(rows: int) -> Iterator[range]:
    return (range(start, min(start + DECODE_BATCH, rows)) for start in range(0, rows, DECODE_BATCH))


def exif_orientation(image: Image.Image) -> int:
    """Orientation of the camera, 1 to 8 (EXIF 2.3, tag 0x0112); pixels are stored in the order of the sensor."""
    try:
        found = image.getexif().get(0x0112, EXIF_UPRIGHT)
    except Exception:  # of a damaged block the decoder raises anything; it tells of no orientation
        return EXIF_UPRIGHT
    return found if found in range(1, 9) else EXIF_UPRIGHT


def _decode_image(file: BinaryIO, name: str, shape: tuple[int, int, int], mode: str) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with Image.open(file, formats=("JPEG", "PNG")) as image:
            if math.prod(image.size) > MAX_PIXELS:  # known before any pixel is decompressed
                raise FedraxError(f"{name} announces {image.size} pixels, more than {MAX_PIXELS:,} in all.")
            if image.mode not in _EIGHT_BITS or any("16" in str(tile[-1]) for tile in image.tile):
                raise FedraxError(f"{name} has more than 8 bits a channel (mode {image.mode}): convert it first.")
            with _LARGE_IMAGES if math.prod(image.size) > SERIAL_PIXELS else nullcontext():
                held = image.convert(mode)
                if exif_orientation(image) != EXIF_UPRIGHT:
                    ImageOps.exif_transpose(held, in_place=True)
                resized = held.resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
                return np.asarray(resized).reshape(shape)
    except FedraxError:
        raise
    except Exception as error:  # a damaged image may break the decoders in any way; too large ones have their own
        raise FedraxError(f"{name} is not a readable JPEG or PNG image ({error}).") from error


def channel_moments(images: np.ndarray, train: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel of the training images, scaled by 1/255; the deviation of a constant is 1."""
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for rows in _blocks(len(train)):
        block = images[train[rows.start : rows.stop]]
        counts += [np.bincount(block[..., c].ravel(), minlength=256) for c in range(len(counts))]
    values, weights = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def read_cifar_binary(paths: Sequence[Path], label_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 32, 32, 3] and labels of CIFAR's binary files, the last of the ``label_bytes`` of a record.

    A record is one label byte (CIFAR-10), or a coarse and a fine one (CIFAR-100), and 3,072 bytes of red, green and
    blue pixels.
    """
    records = []
    for path in paths:
        with open_regular_file(path, MAX_FILE) as file:
            content = file.read()
        if not content or len(content) % (label_bytes + 3072):
            raise FedraxError(f"{path} is not a whole number of CIFAR's records of {label_bytes + 3072:,} bytes.")
        records.append(np.frombuffer(content, np.uint8).reshape(-1, label_bytes + 3072))
    every = np.concatenate(records)
    pixels = every[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels), every[:, label_bytes - 1].astype(np.int32)


# --- Cache of decoded images ---

MAX_CACHE_BYTES = 32 << 30
"""Size of the cache in bytes; beyond it, the least recently used files are removed."""
_DIGEST = hashlib.sha256().digest_size


def cached_images(
    name: str, shape: tuple[int, ...], decode: Callable[[], np.ndarray], is_current: Callable[[], bool] = lambda: True
) -> np.ndarray:
    """The cached images uint8 [*shape] called ``name``, as a memory map; decoded and cached if missing.

    What ``decode`` returns is cached only if ``is_current`` confirms afterwards that ``name`` still describes it.
    """
    path = cache_directory() / "images" / f"{name}.npy"
    images = _read_cached(path, shape)
    if images is None:
        images = decode()
        if is_current():
            _write_cached(path, images)
    return images


def _npy_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _read_cached(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    header, pixels = _npy_header(shape), int(np.prod(shape))
    try:
        with open_regular_file(path) as file:
            if os.fstat(file.fileno()).st_size != len(header) + pixels + _DIGEST or file.read(len(header)) != header:
                return None
            images = np.memmap(file, np.uint8, "r", offset=len(header), shape=shape)  # type: ignore[arg-type]
            file.seek(len(header) + pixels)
            if hashlib.sha256(images.data).digest() != file.read():
                return None
        os.utime(path)
    except (FedraxError, OSError, ValueError):
        return None
    return images


def _write_cached(path: Path, images: np.ndarray) -> None:
    with suppress(FedraxError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the images may be confidential
        if images.nbytes > min(MAX_CACHE_BYTES, shutil.disk_usage(path.parent).free // 2):
            return
        _make_room(path.parent, MAX_CACHE_BYTES - images.nbytes)
        images = np.ascontiguousarray(images)
        with atomic_write(path) as file:
            file.write(_npy_header(images.shape))
            file.write(images.data)
            file.write(hashlib.sha256(images.data).digest())


def _make_room(folder: Path, left: int) -> None:
    """Remove the least recently used files until the others fit into ``left`` bytes."""
    facts = {path: path.stat() for path in folder.glob("*.npy")}
    taken = sum(fact.st_size for fact in facts.values())
    for path in sorted(facts, key=lambda path: facts[path].st_mtime_ns):
        if taken <= left:
            return
        path.unlink()
        taken -= facts[path].st_size


# --- Image tables ---


def read_image_table(path: Path, label: str, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Images uint8 [n, height, width, 3], labels int64 [n] and class names of a Hugging Face image parquet.

    The table has a column ``img``, a struct with the encoded ``bytes``, and an integer column ``label``.
    Decoded images are kept under the checksum of the file, so that a second load is a memory map.
    Raises FedraxError if a column is missing or an image is not a JPEG or PNG of ``size``.
    """
    import polars as pl

    with open_regular_file(path) as file:
        stored = os.fstat(file.fileno()).st_size
    with parquet_errors(path):
        schema = pl.read_parquet_schema(path)
        for column in ("img", label):
            if column not in schema:
                raise unknown(f"column of {path}", column, schema)
        if not schema[label].is_integer() or "bytes" not in getattr(schema["img"], "to_schema", dict)():
            raise FedraxError(f"{path} needs a column 'img' with encoded bytes and an integer column {label!r}.")
        rows = int(pl.scan_parquet(path, glob=False).select(pl.len()).collect().item())
        shape = (rows, size[1], size[0], 3)
        if rows > stored or math.prod(shape) > min(MAX_BYTES, decompressed_limit(stored)):
            raise FedraxError(f"{path} announces {rows:,} images, more than its {stored:,} bytes can hold.")
        labels = pl.read_parquet(path, columns=[label], glob=False)[label]
        with path.open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        images = cached_images(checksum, shape, lambda: _decode_table_images(path, shape))
        names = _class_names(pl.read_parquet_metadata(path), label)
    if labels.null_count():
        raise FedraxError(f"{path}: column {label!r} has missing values.")
    return images, labels.to_numpy(), names


def _decode_table_images(path: Path, shape: tuple[int, int, int, int]) -> np.ndarray:
    import polars as pl
    from PIL import Image

    encoded = pl.read_parquet(path, columns=["img"], glob=False)["img"].struct.field("bytes")
    images = np.empty(shape, np.uint8)
    size = (shape[2], shape[1])
    for row, data in enumerate(encoded):
        try:
            with (
                warnings.catch_warnings(action="ignore"),
                Image.open(io.BytesIO(data or b""), formats=("JPEG", "PNG")) as image,
            ):
                if image.size != size:  # known before any pixel is decompressed
                    raise FedraxError(f"{path}, row {row}: the image is {image.size}, not {size} pixels.")
                images[row] = np.asarray(image.convert("RGB"))
        except FedraxError:
            raise
        except Exception as error:  # a damaged image may break the decoders in any way; too large ones have their own
            raise FedraxError(f"{path}, row {row}: not a readable JPEG or PNG image ({error}).") from error
    return images


def _class_names(metadata: dict[str, str], label: str) -> tuple[str, ...]:
    """Names from the ``huggingface`` entry of a parquet's metadata; none if it is absent or malformed."""
    try:
        names = json.loads(metadata["huggingface"])["info"]["features"][label]["names"]
    except (KeyError, TypeError, ValueError):
        return ()
    return tuple(names) if isinstance(names, list) and all(isinstance(n, str) for n in names) else ()
