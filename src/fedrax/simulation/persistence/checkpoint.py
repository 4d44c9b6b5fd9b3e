"""Checkpoint files: a pytree of arrays and its metadata in one NPZ file, replaced atomically.

A crash during a write leaves the old file or the new one, never a mixture. The last member of the file, ``meta``, is
JSON: the format's number, the version of fedrax that wrote it, a digest of each array, and the run's own metadata.
The previous checkpoint stays beside the last one, in case the disk damages that one.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.files import atomic_write, open_regular_file
from fedrax.tree import Tree
from fedrax.version import VERSION

FILE, PREVIOUS = "state.npz", "previous.npz"
FORMAT = 6
"""Number of the file format and of the names in the states and identities that runs store. Format 1 had no digests; in
format 2 classes and fields of the stored states had other names; format 3 had no digest of the code of participation
policies; format 4 had digests of settings instead of their values; format 5 had learning rates in the digest of
the program. Checkpoints of another format are rejected."""
_META_BYTES = 16 << 20
"""Most bytes of ``meta`` that are read: protects against a file that claims to be huge."""
_HEADER_BYTES = 1 << 10
"""Most bytes of an array's header in the file."""
_PIECE_BYTES = 8 << 20
"""Bytes of an array that are read or written at a time."""


class DamagedCheckpointError(FedraxError):
    """The file is not a checkpoint, or its content has changed since it was written."""


class CheckpointFormatError(FedraxError):
    """The checkpoint was written by a version of fedrax whose format this version does not read."""


class ChunkedArray(Protocol):
    """An array that is read in chunks of rows, since it may not fit into memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows in order, in chunks of a few rows."""
        ...


class _DigestingFile:
    """A member of the archive whose digest is updated with every read and write."""

    def __init__(self, member: Any):
        self._member, self._hash = member, hashlib.blake2b(digest_size=16)

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        return self._member.write(data)

    def read(self, size: int = -1) -> bytes:
        data = self._member.read(size)
        self._hash.update(data)
        return data

    def digest(self) -> str:
        return self._hash.hexdigest()

    def check(self, name: str, digests: dict[str, str]) -> None:
        """Raise ValueError unless exactly the bytes that were once written have been read."""
        if self.read(1) or self.digest() != digests.get(name):
            raise ValueError(f"the array {name} is not as it was written")


# -- writing -------------------------------------------------------------------------------------------------------


def save(directory: Path, state: Tree, meta: dict[str, Any], keep_previous: bool = True) -> None:
    """Write a checkpoint; raises FedraxError where the directory cannot be written.

    Args:
        directory: where to write ``state.npz``.
        state: a pytree of arrays; leaves may be :class:`ChunkedArray`.
        meta: metadata that JSON can hold.
        keep_previous: keep the checkpoint that is already there as ``previous.npz``.
    """
    leaves = {
        f"{i:06d}:{n}": x for i, (n, x) in enumerate(zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True))
    }
    _keep_previous(directory)
    digests, types = {}, {}
    with atomic_write(directory / FILE) as file, zipfile.ZipFile(file, "w") as archive:
        for name, leaf in leaves.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                digested = _DigestingFile(member)
                _write(digested, leaf)
            digests[name] = digested.digest()
            if _is_extension_dtype(dtype := leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype):
                types[name] = dtype.name
        with archive.open("meta.npy", "w") as member:
            described = {"format": FORMAT, "fedrax": VERSION, "digests": digests, "types": types, "meta": meta}
            text = json.dumps(described)
            np.lib.format.write_array(member, np.frombuffer(text.encode(), np.uint8), allow_pickle=False)
    if not keep_previous:
        forget_previous(directory)


def forget_previous(directory: Path) -> None:
    """Remove the previous checkpoint: the last one is complete."""
    with suppress(OSError):
        (directory / PREVIOUS).unlink()


def _keep_previous(directory: Path) -> None:
    """Link the present checkpoint under the name of the previous one, without a copy, before it is replaced."""
    with suppress(OSError):
        if (directory / FILE).exists():
            (directory / PREVIOUS).unlink(missing_ok=True)
            os.link(directory / FILE, directory / PREVIOUS)


def _is_extension_dtype(dtype: Any) -> bool:
    """Whether a dtype is not NumPy's own (bfloat16, int4): NPY headers do not name these."""
    return np.dtype(dtype).kind == "V"


def _on_disk(dtype: Any) -> np.dtype:
    """The NumPy dtype in which numbers of ``dtype`` are written."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}") if _is_extension_dtype(dtype) else np.dtype(dtype)


def _write(member: Any, leaf: Any) -> None:
    """Write a leaf in NPY format, chunk by chunk where it has chunks."""
    if not hasattr(leaf, "pieces"):
        array = np.asarray(leaf)
        np.lib.format.write_array(member, array.view(_on_disk(array.dtype)), allow_pickle=False)
        return
    header = {"descr": np.lib.format.dtype_to_descr(_on_disk(leaf.dtype)), "fortran_order": False, "shape": leaf.shape}
    np.lib.format.write_array_header_1_0(member, header)
    for piece in leaf.pieces():
        member.write(piece.tobytes())


def exists(directory: Path) -> bool:
    """Whether ``directory`` has a file with a checkpoint's name, damaged or not."""
    return any(os.path.lexists(directory / name) for name in (FILE, PREVIOUS))


def discard(directory: Path) -> None:
    """Remove ``directory`` with all its files if it holds a checkpoint."""
    if exists(directory):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise FedraxError(f"cannot remove {directory}: {error.strerror}") from error


# -- reading -------------------------------------------------------------------------------------------------------


def load_meta(directory: Path) -> dict[str, Any]:
    """The metadata of a checkpoint, without its arrays."""
    with _archive(directory / FILE) as archive:
        return _description(archive, directory / FILE).meta


def check_format(directory: Path) -> None:
    """Raise CheckpointFormatError where ``directory`` holds a checkpoint that another version of fedrax wrote.

    A missing or damaged checkpoint is reported when it is loaded.
    """
    try:
        load_meta(directory)
    except CheckpointFormatError:
        raise
    except (OSError, FedraxError):
        pass


def load(directory: Path, like: Tree, in_pieces: str | None = None) -> tuple[Tree, dict[str, Any]]:
    """Read a checkpoint and check the digest of every array.

    Args:
        directory: the checkpoint's directory.
        like: the expected structure, shapes and dtypes of the state.
        in_pieces: key of the first level whose leaves are not read but returned as :class:`CheckpointArray`.

    Returns:
        The state and the metadata.

    Raises:
        FedraxError: for a damaged file, another format, or a state unlike ``like``.
    """
    path, (expected, structure) = directory / FILE, jax.tree.flatten(like)
    with _archive(path) as archive:
        (meta, digests, types), arrays = _description(archive, path), []
        _check_sizes(archive, tree.num_bytes(like))
        names = sorted(_arrays_in(archive))
        if len(names) == len(expected):
            apart = [in_pieces in name.partition(":")[2].split("/")[:1] for name in names]
            for name, away, leaf in zip(names, apart, expected, strict=True):
                own = leaf.dtype if types.get(name) == leaf.dtype.name else None
                arrays.append(CheckpointArray(path, name, digests, own) if away else _read(archive, name, digests, own))
    same = len(arrays) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype for a, e in zip(arrays, expected, strict=True)
    )
    if not same:
        raise FedraxError(f"the checkpoint {path} belongs to another algorithm or model")
    return jax.tree.unflatten(structure, arrays), meta


def verify(path: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint file, check the digests, and return the metadata."""
    with _archive(path) as archive:
        meta, digests, _ = _description(archive, path)
        if set(digests) != _arrays_in(archive):
            raise ValueError("it does not hold the arrays that were written")
        for name in sorted(_arrays_in(archive)):
            with archive.open(f"{name}.npy") as member:
                digested = _DigestingFile(member)
                while digested.read(_PIECE_BYTES):
                    pass
                digested.check(name, digests)
    return meta


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """The opened file; whatever fails while it is read becomes a DamagedCheckpointError."""
    try:
        with open_regular_file(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except FedraxError:
        raise
    except Exception as error:  # a damaged file may break NumPy and zipfile in any way
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    """The error for a checkpoint file that cannot be read."""
    return DamagedCheckpointError(
        f"the checkpoint {path} is damaged or not a checkpoint: {error or type(error).__name__}"
    )


class _Description(NamedTuple):
    """The JSON member of a checkpoint file."""

    meta: dict[str, Any]
    """The run's metadata."""
    digests: dict[str, str]
    """Digest of each array."""
    types: dict[str, str]
    """Dtype of each array whose dtype is not NumPy's own."""


def _description(archive: zipfile.ZipFile, path: Path) -> _Description:
    """Read and check ``meta``; raises CheckpointFormatError for another format."""
    info = archive.getinfo("meta.npy")
    if info.file_size > _META_BYTES:
        raise ValueError("its description is too long")
    with archive.open(info) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    found = json.loads(array.tobytes().decode())
    if not isinstance(found, dict):
        raise ValueError("it holds no description")
    written = found.get("format", 1)
    if written != FORMAT:
        newer = isinstance(written, int) and written > FORMAT
        remedy = "resume the run with that version" if newer else "finish the run with that version, or run it again"
        raise CheckpointFormatError(
            f"the checkpoint {path} was written by {_writer(found)} in format {written!r:.20}, and this fedrax"
            f" {VERSION} reads format {FORMAT}: {remedy}"
        )
    meta, digests, types = found.get("meta"), found.get("digests"), found.get("types", {})
    if not (isinstance(meta, dict) and isinstance(digests, dict) and isinstance(types, dict)):
        raise ValueError("it holds no digests")
    return _Description(meta, digests, types)


def _writer(found: dict[str, Any]) -> str:
    """The version of fedrax that wrote a checkpoint, as its description or the run's identity in it names it."""
    if isinstance(named := found.get("fedrax"), str):
        return f"fedrax {named:.40}"
    meta = found.get("meta")
    identity = meta.get("identity") if isinstance(meta, dict) else None
    versions = identity.get("versions") if isinstance(identity, dict) else None
    return f"an older version ({versions:.80})" if isinstance(versions, str) else "an older version of fedrax"


def _arrays_in(archive: zipfile.ZipFile) -> set[str]:
    """The names of the arrays in the file."""
    return {name.removesuffix(".npy") for name in archive.namelist()} - {"meta"}


def _read(archive: zipfile.ZipFile, name: str, digests: dict[str, str], own: Any) -> np.ndarray:
    """An array, its digest checked; ``own``: its dtype where that is not NumPy's own."""
    with archive.open(f"{name}.npy") as member:
        digested = _DigestingFile(member)
        array = np.lib.format.read_array(digested, allow_pickle=False)
        digested.check(name, digests)
        return array if own is None or array.dtype != _on_disk(own) else array.view(own)


class CheckpointArray:
    """A :class:`ChunkedArray` that reads its rows from a checkpoint file."""

    def __init__(self, path: Path, name: str, digests: dict[str, str], own: Any = None):
        self.path, self.name, self._digests = path, name, digests
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
            self.shape, self.dtype = self._header(member)
        if own is not None and self.dtype == _on_disk(own):
            self.dtype = np.dtype(own)

    def _header(self, member: Any) -> tuple[tuple[int, ...], np.dtype]:
        version = np.lib.format.read_magic(member)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(member)
        if version != (1, 0) or fortran or dtype.hasobject or not shape:
            raise ValueError(f"{self.name} is not an array of rows")
        return shape, dtype

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows in order, in chunks; raises DamagedCheckpointError, at the latest after the last chunk."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as member:
                digested = _DigestingFile(member)
                self._header(digested)
                row = math.prod(self.shape[1:])
                step = max(1, _PIECE_BYTES // max(1, row * self.dtype.itemsize))
                for first in range(0, self.shape[0], step):
                    rows = min(step, self.shape[0] - first)
                    data = digested.read(rows * row * self.dtype.itemsize)
                    yield np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])
                digested.check(self.name, self._digests)
        except Exception as error:  # as in _archive
            raise damaged(self.path, error) from error


def _check_sizes(archive: zipfile.ZipFile, state_bytes: int) -> None:
    """Raise ValueError where the arrays are larger than a checkpoint of this state."""
    sizes = [member.file_size for member in archive.infolist() if member.filename != "meta.npy"]
    if sum(sizes) > state_bytes + _HEADER_BYTES * len(sizes):
        raise ValueError("it is larger than this run's state")
