"""Decoded images kept between starts, in the cache directory: what was decoded, or nothing at all.

A kept file is an NPY file with the SHA-256 of its pixels behind them. One that is short, long or changed in a single
bit is decoded anew; where nothing can be kept (a full or read-only disk) nothing is.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from fedrax.errors import FedraxError
from fedrax.files import cache_directory, reading, replacing

MOST = 32 << 30
"""Bytes kept in all; beyond, what was not used for longest goes."""
_DIGEST = hashlib.sha256().digest_size


def kept_images(
    name: str, shape: tuple[int, ...], decode: Callable[[], np.ndarray], settled: Callable[[], bool] = lambda: True
) -> np.ndarray:
    """The images uint8 [*shape] kept under ``name``, as a memory map, or else those that ``decode`` makes, kept from
    now on where ``settled`` says afterwards that they are those that ``name`` stands for.
    """
    path = cache_directory() / "images" / f"{name}.npy"
    images = _read(path, shape)
    if images is None:
        images = decode()
        if settled():
            _write(path, images)
    return images


def _header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    header, pixels = _header(shape), int(np.prod(shape))
    try:
        with reading(path) as file:
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


def _write(path: Path, images: np.ndarray) -> None:
    with suppress(FedraxError, OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the images may be nobody else's business
        if images.nbytes > min(MOST, shutil.disk_usage(path.parent).free // 2):
            return
        _make_room(path.parent, MOST - images.nbytes)
        images = np.ascontiguousarray(images)
        with replacing(path) as file:
            file.write(_header(images.shape))
            file.write(images.data)
            file.write(hashlib.sha256(images.data).digest())


def _make_room(folder: Path, left: int) -> None:
    """Remove files, those first that were not used for longest, until the others fit into ``left`` bytes."""
    facts = {path: path.stat() for path in folder.glob("*.npy")}
    taken = sum(fact.st_size for fact in facts.values())
    for path in sorted(facts, key=lambda path: facts[path].st_mtime_ns):
        if taken <= left:
            return
        path.unlink()
        taken -= facts[path].st_size
