"""Folders of images: a folder for each class, and around them one for each client where there are clients.

What is opened is a PNG or JPEG file of stated bounds; its pixels are decompressed once its size is known. Links are
refused: a folder from elsewhere shows what is in it, and nothing else of the machine.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fedrax.data.columns import from_rows, split
from fedrax.data.dataset import Dataset, as_samples
from fedrax.data.files import MAX_BYTES
from fedrax.errors import FedraxError, unknown
from fedrax.files import reading

MAX_SIDE = 4096
"""Pixels of a side that images are resized to."""
MAX_PIXELS, MAX_FILE = 50_000_000, 256 << 20
"""Pixels and bytes of a file."""
MODES = {"rgb": ("RGB", 3), "grey": ("L", 1)}
ENDINGS = (".png", ".jpg", ".jpeg")
TOGETHER = 1024
"""Images under way at once."""
_EIGHT_BITS = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


@dataclass
class Listing:
    """The images of one part, their classes and clients, and how many files are no images."""

    paths: list[Path] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    others: int = 0


def load_image_folder(
    path: str | Path,
    size: tuple[int, int],
    color: Literal["rgb", "grey"] = "rgb",
    clients: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """PNG and JPEG files in folders class/file, or with ``clients`` client/class/file, as uint8 [n, height, width, 3].

    With color="grey" the last axis is 1. ``path`` holds those folders, or the folders train and test (or val) with
    them. Images are resized to ``size``, (height, width), by bilinear interpolation, whatever their proportions;
    transparency is left out. Classes, clients and files are in the order of their names. Mean and deviation are those
    of the training pixels. Without a test folder each client, or else each class, keeps ``test_fraction`` of its images
    for the test.
    """
    if color not in MODES:
        raise unknown("color:", color, MODES)
    if len(size) != 2 or not all(1 <= side <= MAX_SIDE for side in size):
        raise FedraxError(f"size is a height and a width of 1 to {MAX_SIDE:,} pixels, not {list(size)}.")
    parts = [_listed(folder, clients) for folder in _parts(Path(path))]
    paths = [file for part in parts for file in part.paths]
    mode, channels = MODES[color]
    if len(paths) * math.prod(size) * channels > MAX_BYTES:
        raise FedraxError(f"{path}: {len(paths):,} images of size {list(size)} are more than {MAX_BYTES >> 30} GiB.")
    found, y = np.unique([name for part in parts for name in part.classes], return_inverse=True)
    names, owner = np.unique([name for part in parts for name in part.clients], return_inverse=True)
    images = _decoded(paths, (*size, channels), mode)
    if len(parts) == 2:
        train, test = np.arange(len(parts[0].paths)), np.arange(len(parts[0].paths), len(paths))
    else:
        train, test = split(y, owner if clients else None, test_fraction, seed)
    mean, std = _moments(images, train)
    made = from_rows(
        Path(path).resolve().name or "images",
        as_samples(images, y),
        owner if clients else None,
        train,
        test,
        tuple(found.tolist()),
        client_names=tuple(names.tolist()),
        notes=_notes(parts),
    )
    return replace(made, pixels=True, mean=mean, std=std)


def _parts(path: Path) -> list[Path]:
    """The folders of the training part and, where there is one, of the test part."""
    inside = [folder.name for folder in _folders(path)]
    if "train" not in inside or not _folders(path / "train"):  # a class may be called so
        return [path]
    return [path / "train", *(path / name for name in ("test", "val") if name in inside)][:2]


def _folders(path: Path) -> list[Path]:
    return [Path(entry) for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _entries(path: Path) -> list[os.DirEntry]:
    """What is in a folder, by name; without what is hidden, and no links."""
    try:
        with os.scandir(path) as entries:
            found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise FedraxError(f"{path} cannot be read as a folder of images: {error.strerror}.") from error
    link = next((entry for entry in found if entry.is_symlink()), None)
    if link is not None:
        raise FedraxError(f"{link.path} is a link, which is not followed in a folder of images.")
    return found


def _listed(path: Path, clients: bool) -> Listing:
    made = Listing()
    for client in _folders(path) if clients else [path]:
        for folder in _folders(client):
            before = len(made.paths)
            for entry in _entries(folder):
                if entry.is_file() and entry.name.lower().endswith(ENDINGS):
                    made.paths.append(Path(entry))
                    made.classes.append(_written(folder))
                    made.clients.extend([_written(client)] * clients)
                else:
                    made.others += 1
            if len(made.paths) == before:
                raise FedraxError(f"{folder} holds no images, files that end in {', '.join(ENDINGS)}.")
    if not made.paths:
        wanted = "client/class/file" if clients else "class/file"
        raise FedraxError(f"{path} holds no images in folders {wanted}.")
    return made


def _written(folder: Path) -> str:
    """The name of a folder, which may hold bytes that are no text."""
    return os.fsencode(folder.name).decode("utf-8", "replace")


def _decoded(paths: Sequence[Path], shape: tuple[int, int, int], mode: str) -> np.ndarray:
    """The images uint8 [n, *shape]; those of one block are decoded at the same time."""
    images = np.empty((len(paths), *shape), np.uint8)
    decode = partial(_image, shape=shape, mode=mode)
    with warnings.catch_warnings(action="ignore"), ThreadPoolExecutor(os.cpu_count()) as pool:
        for rows in _blocks(len(paths)):
            for row, image in zip(rows, pool.map(decode, paths[rows.start : rows.stop]), strict=True):
                images[row] = image
    return images


def _blocks(rows: int) -> Iterator[range]:
    return (range(start, min(start + TOGETHER, rows)) for start in range(0, rows, TOGETHER))


def _image(path: Path, shape: tuple[int, int, int], mode: str) -> np.ndarray:
    from PIL import Image

    with reading(path, MAX_FILE) as file:
        try:
            with Image.open(file, formats=("JPEG", "PNG")) as image:
                if math.prod(image.size) > MAX_PIXELS:  # known before any pixel is decompressed
                    raise FedraxError(f"{path} announces {image.size} pixels, more than {MAX_PIXELS:,} in all.")
                if image.mode not in _EIGHT_BITS:
                    raise FedraxError(f"{path} has more than 8 bits a channel (mode {image.mode}): convert it first.")
                resized = image.convert(mode).resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
                return np.asarray(resized).reshape(shape)
        except FedraxError:
            raise
        except Exception as error:  # a damaged image may break the decoders in any way; too large ones have their own
            raise FedraxError(f"{path} is not a readable JPEG or PNG image ({error}).") from error


def _moments(images: np.ndarray, train: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel of the training images, scaled by 1/255; of a constant one 1."""
    counts = np.zeros((images.shape[-1], 256), np.int64)
    for rows in _blocks(len(train)):
        block = images[train[rows.start : rows.stop]]
        counts += [np.bincount(block[..., c].ravel(), minlength=256) for c in range(len(counts))]
    values, weights = np.arange(256) / 255, counts / counts.sum(1, keepdims=True)
    mean = weights @ values
    std = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(1))
    return tuple(mean.tolist()), tuple(np.where(std > 0, std, 1.0).tolist())


def _notes(parts: Sequence[Listing]) -> tuple[str, ...]:
    others = sum(part.others for part in parts)
    said = "pixels are standardised by mean and deviation of the training images (normalise)"
    return (said, *[f"{others:,} files and folders are no images and left out"] * bool(others))
