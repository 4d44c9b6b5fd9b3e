"""Where data lies, and arrays from outside: IDX and NPZ files, hostile until parsed.

Nothing here unpickles, and nothing is decompressed beyond the size that the checked header announces.
"""

import gzip
import os
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedrax.errors import FedraxError

MAX_BYTES = 16 << 30  # the largest array taken from a file
MAX_INFLATION = 1032  # deflate cannot expand by more than this
IDX_UINT8 = 0x08


def data_directory(data_dir: str | Path | None, dataset: str, files: Sequence[str]) -> Path:
    """The directory of data files: ``data_dir``, or the environment variable FEDRAX_DATA.

    Raises FedraxError, naming what ``dataset`` needs and where, if neither is given or a file is missing.
    """
    chosen = data_dir or os.environ.get("FEDRAX_DATA")
    wanted = ", ".join(files)
    if not chosen:
        raise FedraxError(f"data set {dataset!r} needs a data directory with {wanted}; set --data-dir or FEDRAX_DATA.")
    for file in files:
        if find_file(Path(chosen) / file) is None:
            raise FedraxError(f"data set {dataset!r} needs {wanted} in {chosen}, where {file} is missing.")
    return Path(chosen)


def cache_directory() -> Path:
    """Where decoded and downloaded data is kept: FEDRAX_CACHE, or ~/.cache/fedrax."""
    return Path(os.environ.get("FEDRAX_CACHE") or Path.home() / ".cache" / "fedrax")


def find_file(path: Path) -> Path | None:
    """``path``, or the same file gzipped, or None."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """An array of bytes, uint8 with ``ndim`` axes, from an IDX file, gzipped (.gz) or not.

    The format of MNIST: two zero bytes, the type (0x08), the number of axes, their lengths as big-endian
    uint32, the data. Raises FedraxError if any of that is not so, or the file is shorter or longer.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            header = file.read(4 + 4 * ndim)
            if len(header) < 4 + 4 * ndim or header[:4] != bytes([0, 0, IDX_UINT8, ndim]):
                raise FedraxError(f"{path} is not an IDX file of bytes with {ndim} axes.")
            shape = tuple(int(n) for n in np.frombuffer(header, ">u4", offset=4))
            size = int(np.prod(shape, dtype=object))
            if size > min(MAX_BYTES, path.stat().st_size * MAX_INFLATION):
                raise FedraxError(f"{path} announces an array of shape {shape}, more than the file can hold.")
            data = file.read(size)
            if len(data) < size:
                raise FedraxError(f"{path} is truncated: {len(data)} of {size} bytes.")
            if file.read(1):
                raise FedraxError(f"{path} holds more than its header announces, an array of shape {shape}.")
    except (OSError, EOFError, zlib.error) as error:
        raise FedraxError(f"{path} cannot be read: {error}.") from error
    return np.frombuffer(data, np.uint8).reshape(shape)


def read_npz(path: Path, keys: Iterable[str], optional: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """The arrays ``keys`` and those of ``optional`` that are there, from an NPZ file.

    Raises FedraxError for a missing key, an array of Python objects, or sizes that do not agree.
    """
    arrays, total = {}, 0
    keys = tuple(keys)
    try:
        with zipfile.ZipFile(path) as archive:
            stored = [name.removesuffix(".npy") for name in archive.namelist()]
            for key in (*keys, *(k for k in optional if k in stored)):
                if key not in stored:
                    raise FedraxError(f"{path} has no array {key!r}; it has {', '.join(stored) or 'none'}.")
                info = archive.getinfo(key + ".npy")
                total += info.file_size
                if total > MAX_BYTES:
                    raise FedraxError(f"{path} holds more than {MAX_BYTES >> 30} GiB.")
                with archive.open(info) as member:
                    _check_npy_header(member, info.file_size, f"array {key!r} of {path}")
                with archive.open(info) as member:
                    arrays[key] = np.lib.format.read_array(member, allow_pickle=False)
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise FedraxError(f"{path} cannot be read as an NPZ file: {error}.") from error
    return arrays


def _check_npy_header(file, size: int, what: str) -> None:
    """Refuse an array of objects, or one whose shape does not agree with its ``size`` in bytes."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in readers:
        raise FedraxError(f"{what} has the unsupported NPY version {version}.")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise FedraxError(f"{what} holds Python objects, which are not read from files.")
    if file.tell() + int(np.prod(shape, dtype=object)) * dtype.itemsize != size:
        raise FedraxError(f"{what} has shape {shape} and dtype {dtype}, which its {size} bytes are not.")
