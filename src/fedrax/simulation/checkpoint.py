"""A run's state on disk: one file, replaced as a whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.files import replacing
from fedrax.tree import Tree

FILE = "state.npz"
_META_BYTES = 1 << 20
_HEADER_BYTES = 1 << 10


def save(directory: Path, state: Tree, meta: dict[str, Any]) -> None:
    """Write a pytree of arrays and a JSON-able ``meta`` to ``directory``; raises FedraxError if it cannot."""
    leaves = {
        f"{i:06d}:{n}": np.asarray(x)
        for i, (n, x) in enumerate(zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True))
    }
    leaves["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with replacing(directory / FILE) as file:
        np.savez(file, allow_pickle=False, **leaves)


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


def load(directory: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """(state, meta); the state must have the structure, shapes and dtypes of ``like``."""
    return _read(directory / FILE, like)


def _read(path: Path, like: Tree | None) -> tuple[Tree, dict[str, Any]]:
    expected, structure = jax.tree.flatten(like)
    try:
        with np.load(path, allow_pickle=False) as file:
            names = sorted(set(file.files) - {"meta"})
            _check_sizes(file.zip.infolist(), None if like is None else tree.num_bytes(like))
            meta = json.loads(file["meta"].tobytes().decode())
            arrays = [] if like is None or len(names) != len(expected) else [file[name] for name in names]
    except Exception as error:  # a damaged file may break NumPy, zipfile and the decompressors in any way
        raise FedraxError(f"the checkpoint {path} is damaged or not a checkpoint: {error}") from error
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
