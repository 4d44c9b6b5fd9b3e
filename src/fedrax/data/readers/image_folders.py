"""Folders of images: a folder for each class, and around them one for each client where there are clients.

What is opened is a PNG or JPEG file of stated bounds; its pixels are decompressed once its size is known. Links are
rejected: a folder from elsewhere shows what is in it, and nothing else of the machine.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from fedrax.data.dataset import Dataset, as_samples
from fedrax.data.readers.assembly import make_dataset, reject_unused_options, small_split_notes, split_rows
from fedrax.data.readers.images import MAX_FILE, cached_images, channel_moments, check_image_form, decode_images
from fedrax.errors import FedraxError
from fedrax.files import open_regular_file

EXTENSIONS = (".png", ".jpg", ".jpeg")
TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Folders beside train with the test images, of which the first that exists is used; case-insensitive."""
MTIME_GRANULARITY = 2_000_000_000
"""Resolution of modification times in nanoseconds, on the coarsest file systems."""


@dataclass
class FolderListing:
    """The images of one part, their classes and clients, and the number of files that are not images."""

    paths: list[Path] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    clients: list[str] = field(default_factory=list)
    others: int = 0


def load_image_folder(
    path: str | Path,
    size: tuple[int, int],
    color: Literal["rgb", "gray"] = "rgb",
    clients: bool = False,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """PNG and JPEG files in folders class/file, or with ``clients`` client/class/file, as uint8 [n, height, width, 3].

    With color="gray" the last axis is 1. ``path`` holds those folders, or the folders train and test (else val,
    valid or validation) with them. Images are resized to ``size``, (height, width), by bilinear interpolation,
    whatever their proportions; transparency is left out. Classes, clients and files are in the order of their
    names. Mean and deviation are those of the training pixels. Without a test folder each client, or else each
    class, keeps ``test_fraction`` of its images for the test. Decoded images are kept in the cache directory: a
    second start reads them there.

    Args:
        path: Folder of the classes or clients, or of the folders train and test.
        size: Height and width in pixels to which images are resized.
        color: Whether images have three channels, "rgb", or one, "gray".
        clients: Whether the outer folders are the natural clients.
        test_fraction: Share of the images of each client, or else class, that is held out without a test folder, drawn
            image by image. It is for independent images: frames of one video or slices of one scan need a test folder
            of whole ones.
        seed: Seed of the choice of the test images.
    """
    shape, mode = check_image_form(size, color)
    folders, ignored = _part_folders(Path(path))
    if len(folders) == 2:
        reject_unused_options(
            load_image_folder, f"where {folders[1]} holds the test images", test_fraction=test_fraction
        )
    parts = [_list_images(folder, clients) for folder in folders]
    paths = [file for part in parts for file in part.paths]
    found, y = np.unique([name for part in parts for name in part.classes], return_inverse=True)
    names, owner = np.unique([name for part in parts for name in part.clients], return_inverse=True)
    images, few = _decode(paths, shape, mode, str(path)), ()
    if len(parts) == 2:
        train, test = np.arange(len(parts[0].paths)), np.arange(len(parts[0].paths), len(paths))
    else:
        train, test = split_rows(y, owner if clients else None, test_fraction, seed)
        few = small_split_notes(owner if clients else None, test, test_fraction)
    mean, std = channel_moments(images, train)
    made = make_dataset(
        Path(path).resolve().name or "images",
        as_samples(images, y),
        owner if clients else None,
        train,
        test,
        tuple(found.tolist()),
        client_names=tuple(names.tolist()),
        notes=(*_notes(parts, ignored), *few),
    )
    return replace(made, pixels=True, mean=mean, std=std)


def _decode(paths: list[Path], shape: tuple[int, int, int], mode: str, where: str) -> np.ndarray:
    """The images of files, from the cache where no file has changed; decoded images are cached."""
    name, changed = _fingerprint(paths, shape, mode)

    def is_current() -> bool:
        return time.time_ns() - changed > MTIME_GRANULARITY and _fingerprint(paths, shape, mode)[0] == name

    decode = partial(decode_images, paths, partial(open_regular_file, limit=MAX_FILE), shape, mode, where)
    return cached_images(name, (len(paths), *shape), decode, is_current)


def _fingerprint(paths: list[Path], shape: tuple[int, int, int], mode: str) -> tuple[str, int]:
    """The cache key of decoded images, and the latest modification time of the files.

    The time of the last change of a file's entry tells of a change whose writer put the time of writing back.
    """
    from PIL import __version__

    made, last = hashlib.sha256(repr((1, __version__, shape, mode)).encode()), 0
    for path in paths:
        with suppress(OSError):  # what is not there any more, the decoder says
            facts = path.stat()
            made.update(os.fsencode(path.absolute()) + b"\0")
            made.update(f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} ".encode())
            last = max(last, facts.st_mtime_ns, facts.st_ctime_ns)
    return made.hexdigest(), last


def _part_folders(path: Path) -> tuple[list[Path], list[str]]:
    """The folders of the training part and, if there is one, of the test part; names of ignored folders."""
    inside: dict[str, list[Path]] = {}
    for folder in _folders(path):
        inside.setdefault(folder.name.lower(), []).append(folder)
    if not any(map(_folders, inside.get("train", ()))):  # a class may be called so
        return [path], []
    chosen = ["train", *(name for name in TEST_FOLDERS if name in inside)][:2]
    twice = next((name for name in chosen if len(inside[name]) > 1), None)
    if twice is not None:
        one, other, *_ = inside[twice]
        raise FedraxError(f"{one} and {other.name} are both called {twice}: rename one of them.")
    others = [folder.name for name, folders in inside.items() if name not in chosen for folder in folders]
    return [inside[name][0] for name in chosen], others


def _folders(path: Path) -> list[Path]:
    return [Path(entry) for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _entries(path: Path) -> list[os.DirEntry]:
    """The entries of a folder by name, without hidden files and links."""
    try:
        with os.scandir(path) as entries:
            found = sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedraxError(f"{path} cannot be read as a folder of images: {reason}.") from error
    link = next((entry for entry in found if entry.is_symlink()), None)
    if link is not None:
        raise FedraxError(f"{link.path} is a link, which is not followed in a folder of images.")
    return found


def _list_images(path: Path, clients: bool) -> FolderListing:
    made = FolderListing()
    for client in _folders(path) if clients else [path]:
        for folder in _folders(client):
            before = len(made.paths)
            for entry in _entries(folder):
                if entry.is_file() and entry.name.lower().endswith(EXTENSIONS):
                    made.paths.append(Path(entry))
                    made.classes.append(_folder_name(folder))
                    made.clients.extend([_folder_name(client)] * clients)
                else:
                    made.others += 1
            if len(made.paths) == before:
                hint = ""
                if _folders(folder):
                    hint = ", but folders: parts are called train and test"
                    hint += ", and clients = true reads client/class/file" if not clients else ""
                raise FedraxError(f"{folder} holds no images, files that end in {', '.join(EXTENSIONS)}{hint}.")
    if not made.paths:
        wanted = "client/class/file" if clients else "class/file"
        raise FedraxError(f"{path} holds no images in folders {wanted}.")
    return made


def _folder_name(folder: Path) -> str:
    """The name of a folder, which may contain bytes that are not UTF-8."""
    return os.fsencode(folder.name).decode("utf-8", "backslashreplace")


def _notes(parts: Sequence[FolderListing], ignored: Sequence[str]) -> tuple[str, ...]:
    others = sum(part.others for part in parts)
    return (
        "pixels are standardized by mean and deviation of the training images (normalize)",
        *[f"the folders beside train that hold no test images are left out: {', '.join(ignored)}"] * bool(ignored),
        *[f"{others:,} files and folders are no images and left out"] * bool(others),
    )
