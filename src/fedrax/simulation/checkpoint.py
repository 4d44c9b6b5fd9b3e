"""A run's state on disk: one file, replaced as a whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.tree import Tree

FILE = "state.npz"


def save(directory: Path, state: Tree, meta: dict[str, Any]) -> None:
    """Write a pytree of arrays and a JSON-able ``meta`` to ``directory``; raises FedraxError if it cannot."""
    leaves = {
        f"{i:04d}:{n}": np.asarray(x)
        for i, (n, x) in enumerate(zip(tree.leaf_names(state), jax.tree.leaves(state), strict=True))
    }
    leaves["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    path, part = directory / FILE, directory / f".{FILE}.part"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            np.savez(file, allow_pickle=False, **leaves)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise FedraxError(f"cannot write the checkpoint {path}: {error.strerror}") from error


def exists(directory: Path) -> bool:
    """Whether ``directory`` holds a checkpoint."""
    return (directory / FILE).is_file()


def load_meta(directory: Path) -> dict[str, Any]:
    """The checkpoint's ``meta``."""
    return _read(directory / FILE, None)[1]


def load(directory: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """(state, meta); the state must have the structure, shapes and dtypes of ``like``."""
    return _read(directory / FILE, like)


def _read(path: Path, like: Tree | None) -> tuple[Tree, dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            meta = json.loads(file["meta"].tobytes().decode())
            arrays = [] if like is None else [file[name] for name in sorted(set(file.files) - {"meta"})]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise FedraxError(f"the checkpoint {path} is damaged or not a checkpoint: {error}") from error
    if not isinstance(meta, dict):
        raise FedraxError(f"the checkpoint {path} is damaged: it holds no description")
    if like is None:
        return None, meta
    expected, structure = jax.tree.flatten(like)
    same = len(arrays) == len(expected) and all(
        a.shape == e.shape and a.dtype == e.dtype for a, e in zip(arrays, expected, strict=True)
    )
    if not same:
        raise FedraxError(f"the checkpoint {path} belongs to another algorithm, model or number of devices")
    return jax.tree.unflatten(structure, arrays), meta
