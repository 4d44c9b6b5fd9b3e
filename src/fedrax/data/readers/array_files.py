"""The data directory, and readers of untrusted IDX and NPZ files.

Nothing is unpickled, and nothing is decompressed beyond the size that the checked header states.
"""

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from fedrax.errors import FedraxError
from fedrax.files import decompressed_limit, open_regular_file

MAX_BYTES = 16 << 30  # the largest array taken from a file
IDX_UINT8 = 0x08


def given_directory(data_dir: str | Path | None) -> Path | None:
    """``data_dir``, or the directory that the environment variable FEDRAX_DATA names; None if neither is set."""
    chosen = data_dir or os.environ.get("FEDRAX_DATA")
    return Path(chosen) if chosen else None


def data_directory(
    data_dir: str | Path | None, dataset: str, files: Sequence[str], published: Sequence[str] = ()
) -> Path:
    """The directory of data files: ``data_dir``, or the environment variable FEDRAX_DATA.

    ``published``: the files that ``fedrax download`` gets, which may replace ``files``.

    Raises FedraxError, naming what ``dataset`` needs and where, if neither is given or a file is missing.
    """
    chosen = given_directory(data_dir)
    wanted = ", ".join(files)
    hint = f"; `fedrax download {dataset}` gets the published files" if published else ""
    if chosen is None:
        raise FedraxError(
            f"data set {dataset!r} needs a data directory with {wanted}; set --data-dir or FEDRAX_DATA{hint}."
        )
    if published and all(find_file(chosen / file) is not None for file in published):
        return chosen
    for file in files:
        if find_file(chosen / file) is None:
            raise FedraxError(f"data set {dataset!r} needs {wanted} in {chosen}, where {file} is missing{hint}.")
    return chosen


def find_file(path: Path) -> Path | None:
    """``path``, or the same file gzipped, or None."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """An array of bytes, uint8 with ``ndim`` axes, from an IDX file, gzipped (.gz) or not.

    The format of MNIST: two zero bytes, the type (0x08), the number of axes, their lengths as big-endian
    uint32, the data. Raises FedraxError if any of that is not so, or the file is shorter or longer.
    """
    with open_regular_file(path) as stored:
        try:
            with gzip.open(stored) if path.suffix == ".gz" else nullcontext(stored) as file:
                return _idx_array(file, ndim, path, os.fstat(stored.fileno()).st_size)
        except (OSError, EOFError, zlib.error) as error:
            raise FedraxError(f"{path} cannot be read: {error}.") from error


def _idx_array(file: Any, ndim: int, path: Path, stored: int) -> np.ndarray:
    header = file.read(4 + 4 * ndim)
    if len(header) < 4 + 4 * ndim or header[:4] != bytes([0, 0, IDX_UINT8, ndim]):
        raise FedraxError(f"{path} is not an IDX file of bytes with {ndim} axes.")
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
    size = math.prod(shape)
    if size > min(MAX_BYTES, decompressed_limit(stored) if path.suffix == ".gz" else stored):
        raise FedraxError(f"{path} announces an array of shape {shape}, more than {_can_hold(path, stored)}")
    data = file.read(size)
    if len(data) < size:
        raise FedraxError(f"{path} is truncated: {len(data)} of {size} bytes.")
    if file.read(1):
        raise FedraxError(f"{path} holds more than its header announces, an array of shape {shape}.")
    return np.frombuffer(data, np.uint8).reshape(shape)


def _can_hold(path: Path, stored: int) -> str:
    """End of the message about a file that is too large."""
    if path.suffix != ".gz":
        return "the file can hold."
    return f"the {decompressed_limit(stored) >> 20:,} MiB that are taken from a compressed file of its size: unpack it."


def npz_names(path: Path) -> list[str]:
    """The names of the arrays of an NPZ file."""
    try:
        with open_regular_file(path) as stored, zipfile.ZipFile(stored) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except FedraxError:
        raise
    except Exception as error:  # a damaged file may break zipfile in any way
        raise FedraxError(f"{path} cannot be read as an NPZ file: {error or type(error).__name__}.") from error


def read_npz(path: Path, keys: Iterable[str], optional: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """The arrays ``keys``, and those of ``optional`` that exist, from an NPZ file.

    All headers are read and compared with the sizes before any data is. Raises FedraxError for a missing key, an array
    of Python objects or of nothing, and sizes that do not agree.
    """
    arrays, keys = {}, tuple(keys)
    try:
        with open_regular_file(path) as stored, zipfile.ZipFile(stored) as archive:
            members = {info.filename: info for info in archive.infolist()}
            names = [name.removesuffix(".npy") for name in members]
            for key in keys:
                if f"{key}.npy" not in members:
                    raise FedraxError(f"{path} has no array {key!r}; it has {', '.join(names) or 'none'}.")
            wanted = {key: members[f"{key}.npy"] for key in (*keys, *optional) if f"{key}.npy" in members}
            _check_members(archive, wanted, path, os.fstat(stored.fileno()).st_size)
            for key, info in wanted.items():
                with archive.open(info) as member:
                    arrays[key] = np.lib.format.read_array(member, allow_pickle=False)
    except FedraxError:
        raise
    except Exception as error:  # a damaged file may break NumPy, zipfile and the decompressors in any way
        raise FedraxError(f"{path} cannot be read as an NPZ file: {error or type(error).__name__}.") from error
    return arrays


def _check_members(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], path: Path, stored: int) -> None:
    """Raise FedraxError for arrays that are too large, object arrays, and unequal lengths in a part (_train, _test)."""
    total, rows = 0, {}
    for key, info in members.items():
        total += info.file_size
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FedraxError(f"array {key!r} of {path} is compressed as NumPy does not: save it with np.savez.")
        if total > min(MAX_BYTES, decompressed_limit(stored)):
            raise FedraxError(
                f"{path} announces {total:,} bytes, more than the {decompressed_limit(stored):,} that are taken from"
                f" a file of its size (at most {MAX_BYTES:,}): save it with np.savez, not compressed."
            )
        with archive.open(info) as member:
            shape = _check_npy_header(member, info.file_size, f"array {key!r} of {path}")
        part = key.rpartition("_")[2]
        first = rows.setdefault(part, (key, shape[:1]))
        if first[1] != shape[:1] and part in ("train", "test"):
            other = f"{first[0]!r} and {key!r} of {path} are not n samples with n labels"
            raise FedraxError(f"{other}: they have {first[1]} and {shape[:1]} rows.")


def _check_npy_header(file: Any, size: int, what: str) -> tuple[int, ...]:
    """The shape; FedraxError for object arrays, empty arrays, and headers that disagree with ``size`` in bytes."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise FedraxError(f"{what} has the unsupported NPY version {version}.")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise FedraxError(f"{what} holds Python objects, which are not read from files.")
    if min(shape, default=1) < 0 or file.tell() + math.prod(shape) * dtype.itemsize != size:
        raise FedraxError(f"{what} has shape {shape} and dtype {dtype}, which its {size} bytes are not.")
    if shape[:1] > (0,) and (dtype.itemsize == 0 or 0 in shape):
        raise FedraxError(f"{what} has {shape[0]} rows of nothing.")
    return shape
