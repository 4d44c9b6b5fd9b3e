"""A run's state on disk: one file, replaced as a whole, so that a crash leaves the old one or the new one.

It is an NPZ file, not compressed. Its last member, ``meta``, is JSON: the version of the format, a digest of each
array, and what the run says of itself. The file before it stays beside it, for the day when a disk has lost a bit.
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
from fedrax.files import reading, replacing
from fedrax.tree import Tree

FILE, PREVIOUS = "state.npz", "previous.npz"
FORMAT = 2
"""1 had no digests."""
_META_BYTES = 16 << 20
_HEADER_BYTES = 1 << 10
_PIECE_BYTES = 8 << 20


class DamagedCheckpointError(FedraxError):
    """A file that is no checkpoint, or one no longer."""


class ChunkedArray(Protocol):
    """An array that need not fit into memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows in order, a few at a time."""
        ...


class _Digested:
    """A member of the file, of which a digest is taken as it is read or written."""

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
        """ValueError unless all was read that was once written, and nothing else."""
        if self.read(1) or self.digest() != digests.get(name):
            raise ValueError(f"the array {name} is not as it was written")


# -- writing -------------------------------------------------------------------------------------------------------


def save(directory: Path, state: Tree, meta: dict[str, Any], keep_previous: bool = True) -> None:
    """Write a pytree of arrays and a JSON-able ``meta`` to ``directory``; raises FedraxError if it cannot.

    Leaves may be :class:`ChunkedArray`. The checkpoint that is there already stays as ``previous.npz`` if asked for.
    """
    leaves = {
        f"{i:06d}:{n}": x for i, (n, x) in enumerate(zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True))
    }
    _keep_previous(directory)
    digests, types = {}, {}
    with replacing(directory / FILE) as file, zipfile.ZipFile(file, "w") as archive:
        for name, leaf in leaves.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                digested = _Digested(member)
                _write(digested, leaf)
            digests[name] = digested.digest()
            if _is_foreign(dtype := leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype):
                types[name] = dtype.name
        with archive.open("meta.npy", "w") as member:
            text = json.dumps({"format": FORMAT, "digests": digests, "types": types, "meta": meta})
            np.lib.format.write_array(member, np.frombuffer(text.encode(), np.uint8), allow_pickle=False)
    if not keep_previous:
        forget_previous(directory)


def forget_previous(directory: Path) -> None:
    """Remove the checkpoint before the last one: what is there is whole."""
    with suppress(OSError):
        (directory / PREVIOUS).unlink()


def _keep_previous(directory: Path) -> None:
    """Another name for the checkpoint that is there, so that its successor does not take it away: no copy."""
    with suppress(OSError):
        if (directory / FILE).exists():
            (directory / PREVIOUS).unlink(missing_ok=True)
            os.link(directory / FILE, directory / PREVIOUS)


def _is_foreign(dtype: Any) -> bool:
    """Whether a type is none of NumPy's own (bfloat16, int4): its files would not say which."""
    return np.dtype(dtype).kind == "V"


def _on_disk(dtype: Any) -> np.dtype:
    """As what the numbers of a type are written."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}") if _is_foreign(dtype) else np.dtype(dtype)


def _write(member: Any, leaf: Any) -> None:
    if not hasattr(leaf, "pieces"):
        array = np.asarray(leaf)
        np.lib.format.write_array(member, array.view(_on_disk(array.dtype)), allow_pickle=False)
        return
    header = {"descr": np.lib.format.dtype_to_descr(_on_disk(leaf.dtype)), "fortran_order": False, "shape": leaf.shape}
    np.lib.format.write_array_header_1_0(member, header)
    for piece in leaf.pieces():
        member.write(piece.tobytes())


def exists(directory: Path) -> bool:
    """Whether ``directory`` holds a checkpoint, or something in its place."""
    return any(os.path.lexists(directory / name) for name in (FILE, PREVIOUS))


def discard(directory: Path) -> None:
    """Remove ``directory`` and what is in it, if it holds a checkpoint."""
    if exists(directory):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise FedraxError(f"cannot remove {directory}: {error.strerror}") from error


# -- reading -------------------------------------------------------------------------------------------------------


def load_meta(directory: Path) -> dict[str, Any]:
    """The checkpoint's ``meta``."""
    with _archive(directory / FILE) as archive:
        return _description(archive, directory / FILE).meta


def load(directory: Path, like: Tree, in_pieces: str | None = None) -> tuple[Tree, dict[str, Any]]:
    """(state, meta); the state must have the structure, shapes and dtypes of ``like``.

    The leaves below ``in_pieces``, a name of the first level, are not read but :class:`CheckpointArray`.
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
    """The ``meta`` of a checkpoint's file of which every byte has been read and found as it was written."""
    with _archive(path) as archive:
        meta, digests, _ = _description(archive, path)
        if set(digests) != _arrays_in(archive):
            raise ValueError("it does not hold the arrays that were written")
        for name in sorted(_arrays_in(archive)):
            with archive.open(f"{name}.npy") as member:
                digested = _Digested(member)
                while digested.read(_PIECE_BYTES):
                    pass
                digested.check(name, digests)
    return meta


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with reading(path) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except FedraxError:
        raise
    except Exception as error:  # a damaged file may break NumPy and zipfile in any way
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    """What to raise for a file that cannot be read."""
    return DamagedCheckpointError(
        f"the checkpoint {path} is damaged or not a checkpoint: {error or type(error).__name__}"
    )


class _Description(NamedTuple):
    """What the run says of itself, the arrays' digests, and their types where these are none of NumPy's own."""

    meta: dict[str, Any]
    digests: dict[str, str]
    types: dict[str, str]


def _description(archive: zipfile.ZipFile, path: Path) -> _Description:
    info = archive.getinfo("meta.npy")
    if info.file_size > _META_BYTES:
        raise ValueError("its description is too long")
    with archive.open(info) as member:
        array = np.lib.format.read_array(member, allow_pickle=False)
    found = json.loads(array.tobytes().decode())
    if not isinstance(found, dict):
        raise ValueError("it holds no description")
    version = found.get("format", 1)
    if isinstance(version, int) and version > FORMAT:
        raise FedraxError(
            f"the checkpoint {path} was written by a newer fedrax, in format {version}; this one reads format {FORMAT}:"
            " go on with the newer one"
        )
    if version != FORMAT:
        raise FedraxError(
            f"the checkpoint {path} was written by an older fedrax, in format {version!r:.20}; this one reads format"
            f" {FORMAT}: finish the run with the older one, or run it anew"
        )
    meta, digests, types = found.get("meta"), found.get("digests"), found.get("types", {})
    if not (isinstance(meta, dict) and isinstance(digests, dict) and isinstance(types, dict)):
        raise ValueError("it holds no digests")
    return _Description(meta, digests, types)


def _arrays_in(archive: zipfile.ZipFile) -> set[str]:
    return {name.removesuffix(".npy") for name in archive.namelist()} - {"meta"}


def _read(archive: zipfile.ZipFile, name: str, digests: dict[str, str], own: Any) -> np.ndarray:
    """An array; ``own``: its type where that is none of NumPy's."""
    with archive.open(f"{name}.npy") as member:
        digested = _Digested(member)
        array = np.lib.format.read_array(digested, allow_pickle=False)
        digested.check(name, digests)
        return array if own is None or array.dtype != _on_disk(own) else array.view(own)


class CheckpointArray:
    """An array in a checkpoint, :class:`ChunkedArray`; ``own`` as of ``_read``."""

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
        """All rows in order, a few at a time; FedraxError if they are damaged, at the latest after the last ones."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(f"{self.name}.npy") as member:
                digested = _Digested(member)
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
    """Refuse to unpack more than a checkpoint of this state holds."""
    sizes = [member.file_size for member in archive.infolist() if member.filename != "meta.npy"]
    if sum(sizes) > state_bytes + _HEADER_BYTES * len(sizes):
        raise ValueError("it is larger than this run's state")
