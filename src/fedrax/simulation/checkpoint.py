"""A run's state on disk: one file, replaced as a whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import math
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.files import replacing
from fedrax.tree import Tree

FILE = "state.npz"
_META_BYTES = 1 << 20
_HEADER_BYTES = 1 << 10
_PIECE_BYTES = 8 << 20


class InPieces(Protocol):
    """An array that need not fit into memory."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def pieces(self) -> Iterator[np.ndarray]:
        """All rows in order, a few at a time."""
        ...


def save(directory: Path, state: Tree, meta: dict[str, Any]) -> None:
    """Write a pytree of arrays and a JSON-able ``meta`` to ``directory``; raises FedraxError if it cannot.

    Leaves may be :class:`InPieces`. The file is an NPZ file.
    """
    leaves = {
        f"{i:06d}:{n}": x for i, (n, x) in enumerate(zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True))
    }
    leaves["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with replacing(directory / FILE) as file, zipfile.ZipFile(file, "w") as archive:
        for name, leaf in leaves.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                _write(member, leaf)


def _write(member: Any, leaf: Any) -> None:
    if not hasattr(leaf, "pieces"):
        np.lib.format.write_array(member, np.asarray(leaf), allow_pickle=False)
        return
    header = {"descr": np.lib.format.dtype_to_descr(leaf.dtype), "fortran_order": False, "shape": leaf.shape}
    np.lib.format.write_array_header_1_0(member, header)
    for piece in leaf.pieces():
        member.write(piece.tobytes())


def exists(directory: Path) -> bool:
    """Whether ``directory`` holds a checkpoint."""
    return (directory / FILE).is_file()


def discard(directory: Path) -> None:
    """Remove ``directory`` and what is in it, if it holds a checkpoint."""
    if exists(directory):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            raise FedraxError(f"cannot remove {directory}: {error.strerror}") from error


def load_meta(directory: Path) -> dict[str, Any]:
    """The checkpoint's ``meta``."""
    return _read(directory / FILE, None)[1]


def load(directory: Path, like: Tree, in_pieces: str | None = None) -> tuple[Tree, dict[str, Any]]:
    """(state, meta); the state must have the structure, shapes and dtypes of ``like``.

    The leaves below ``in_pieces``, a name of the first level, are not read but :class:`Stored`.
    """
    return _read(directory / FILE, like, in_pieces)


class Stored:
    """An array in a checkpoint, :class:`InPieces`."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as member:
            self.shape, self.dtype = self._header(member)

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
                self._header(member)
                row = math.prod(self.shape[1:])
                step = max(1, _PIECE_BYTES // max(1, row * self.dtype.itemsize))
                for first in range(0, self.shape[0], step):
                    rows = min(step, self.shape[0] - first)
                    data = member.read(rows * row * self.dtype.itemsize)
                    yield np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])
                if member.read(1):
                    raise ValueError(f"{self.name} is too long")
        except Exception as error:  # as in _read
            raise damaged(self.path, error) from error


def damaged(path: Path, error: Exception) -> FedraxError:
    """What to raise for a file that cannot be read."""
    return FedraxError(f"the checkpoint {path} is damaged or not a checkpoint: {error}")


def _read(path: Path, like: Tree | None, in_pieces: str | None = None) -> tuple[Tree, dict[str, Any]]:
    expected, structure = jax.tree.flatten(like)
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(set(file.files) - {"meta"})
            _check_sizes(file.zip.infolist(), None if like is None else tree.num_bytes(like))
            meta = json.loads(file["meta"].tobytes().decode())
            arrays = []
            if like is not None and len(names) == len(expected):
                apart = [in_pieces in name.partition(":")[2].split("/")[:1] for name in names]
                arrays = [Stored(path, n) if away else file[n] for n, away in zip(names, apart, strict=True)]
    except Exception as error:  # a damaged file may break NumPy, zipfile and the decompressors in any way
        raise damaged(path, error) from error
    if not isinstance(meta, dict):
        raise FedraxError(f"the checkpoint {path} is damaged: it holds no description")
    if like is None:
        return None, meta
    same = len(arrays) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype for a, e in zip(arrays, expected, strict=True)
    )
    if not same:
        raise FedraxError(f"the checkpoint {path} belongs to another algorithm or model")
    return jax.tree.unflatten(structure, arrays), meta


def _check_sizes(members: list, state_bytes: int | None) -> None:
    """Refuse to unpack more than a checkpoint of this state holds."""
    sizes = {member.filename: member.file_size for member in members}
    if sizes.pop("meta.npy", 0) > _META_BYTES:
        raise ValueError("its description is too long")
    if state_bytes is not None and sum(sizes.values()) > state_bytes + _HEADER_BYTES * len(sizes):
        raise ValueError("it is larger than this run's state")
