"""Arrays of checkpoint files by name: safetensors, PyTorch, Flax, Orbax, and directories of ``transformers``.

Files are untrusted. Nothing is unpickled but by PyTorch's unpickler of tensors, and no name in a file leads out of its
directory.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.errors import FedraxError
from fedrax.escaping import printable_line
from fedrax.files import open_regular_file, read_json

Arrays = dict[str, np.ndarray]
"""Arrays by their names in a file; parts of a name are separated by dots or slashes."""

_IN_DIRECTORY = (
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin"),
    *("flax_model.msgpack", "flax_model.msgpack.index.json"),
)
"""Files of weights in a directory, in order of preference."""
_INDEX = ".index.json"
_ORBAX = "_METADATA"
"""The file with the names of the arrays of an Orbax checkpoint."""
_PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files of ``torch.save``: a ZIP archive with a pickle, or a pickle."""
_MAPS = (*(bytes([byte]) for byte in range(0x81, 0x90)), b"\xde", b"\xdf")
"""First bytes of MessagePack files of a dictionary."""
_DEEP = 100
"""Most slashes in a name: deeper nesting would exceed Python's recursion limit later."""


def read_arrays(path: Path) -> Arrays:
    """The arrays of a checkpoint, in their own dtypes.

    Args:
        path: A file or a directory.

    Returns:
        The arrays by name; those of PyTorch may share memory.

    Raises:
        FedraxError: The file is missing, damaged, or of no known format, or a package that reads it is not installed.
    """
    if path.is_dir():
        found = next((path / name for name in _IN_DIRECTORY if (path / name).is_file()), None)
        return _orbax(path) if found is None else read_arrays(found)
    return _sharded(path) if path.name.endswith(_INDEX) else _read_file(path)


def _read_file(path: Path) -> Arrays:
    """The arrays of a file, whose format its first bytes tell."""
    with open_regular_file(path, MAX_BYTES) as file:
        head = file.read(9)
    if head.startswith(_PICKLES):
        return _pytorch(path)
    if head.startswith(_MAPS) and head[8:] != b"{":
        return _msgpack(path)
    return read_safetensors(path)


def read_safetensors(path: Path) -> Arrays:
    """The arrays of a safetensors file; raises FedraxError if it is none."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular_file(path, MAX_BYTES), safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # AttributeError: of dtypes that NumPy does not have, such as float4
        with open_regular_file(path) as file:
            pickled = file.read(2).startswith(_PICKLES)
        remedy = "; fedrax.models.load_weights reads files of torch.save" if pickled else ""
        raise FedraxError(f"{path} cannot be read as a safetensors file: {_line(error)}{remedy}.") from error
    return _checked(arrays, path)


def _checked(arrays: Arrays, path: Path) -> Arrays:
    """The arrays; raises FedraxError for names and dtypes that no model has."""
    for name, array in arrays.items():
        if array.dtype.kind not in "buif" and array.dtype.name != "bfloat16":
            raise FedraxError(f"{path} is not a model file: {_shown(name)} has dtype {array.dtype}.")
        if name.count("/") + name.count(".") > _DEEP:
            raise FedraxError(f"{path} is not a model file: {_shown(name)} ... is nested too deeply.")
    return arrays


def _sharded(path: Path) -> Arrays:
    """The arrays of an index file, from the files beside it."""
    index = read_json(path)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not places or not all(isinstance(file, str) for file in places.values()):
        raise FedraxError(f"{path} is not an index of weights: it has no weight_map with a file for each array.")
    found: Arrays = {}
    for file in sorted(set(places.values())):
        if file in ("", "..") or "\0" in file or PurePosixPath(file).name != file:
            raise FedraxError(f"{path} names the file {_shown(file)}, which is not one beside it.")
        arrays = _read_file(path.with_name(file))
        names = [name for name, place in places.items() if place == file]
        if missing := [name for name in names if name not in arrays]:
            raise FedraxError(f"{path} places {_shown(missing[0])} in {file}, which does not hold it.")
        found |= {name: arrays[name] for name in names}
    return found


def _pytorch(path: Path) -> Arrays:
    """The arrays of a state dict that ``torch.save`` wrote, alone or as one entry of a dictionary."""
    torch = _package("torch", "torch", path, "; or save it with safetensors.torch.save_file(module.state_dict(), path)")
    with _reading(path, "a state dict of PyTorch", "; torch.save(module.state_dict(), path) writes one"):
        found = torch.load(path, map_location="cpu", weights_only=True)
    if not _is_state_dict(torch, found):
        inside = found if isinstance(found, Mapping) else {}
        states = [name for name, value in inside.items() if _is_state_dict(torch, value)]
        if len(states) != 1:
            entries = ", ".join(_shown(str(name)) for name in list(inside)[:10]) or type(found).__name__
            raise FedraxError(
                f"{path} holds {'several state dicts' if states else 'no state dict'} ({entries}):"
                " torch.save(module.state_dict(), path) writes one."
            )
        found = inside[states[0]]
    with _reading(path, "a state dict of PyTorch"):
        return _checked({name: _as_numpy(torch, tensor) for name, tensor in found.items()}, path)


def _is_state_dict(torch: ModuleType, value: Any) -> bool:
    """Whether a value is a dictionary of tensors by name."""
    tensors = isinstance(value, Mapping) and all(isinstance(tensor, torch.Tensor) for tensor in value.values())
    return tensors and bool(value) and all(isinstance(name, str) for name in value)


def _as_numpy(torch: ModuleType, tensor: Any) -> np.ndarray:
    """A tensor as an array of the same memory."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"a tensor is {'quantized' if tensor.is_quantized else 'sparse'}")
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(jnp.bfloat16)
    return tensor.detach().numpy()


def _msgpack(path: Path) -> Arrays:
    """The arrays of a file of ``flax.serialization``."""
    serialization = _package("flax.serialization", "flax", path)
    with open_regular_file(path, MAX_BYTES) as file, _reading(path, "a MessagePack file of Flax"):
        return _flat(serialization.msgpack_restore(file.read()), path)


def _orbax(path: Path) -> Arrays:
    """The arrays of an Orbax checkpoint."""
    if not (path / _ORBAX).is_file():
        below = sorted(file.parent for pattern in (f"*/{_ORBAX}", f"*/*/{_ORBAX}") for file in path.glob(pattern))
        remedy = f"choose {' or '.join(str(one) for one in below[-3:])}" if below else (
            f"it has neither one of {', '.join(_IN_DIRECTORY)} nor {_ORBAX} of Orbax"
        )  # fmt: skip
        raise FedraxError(f"{path} is no checkpoint: {remedy}.")
    checkpoint = _package("orbax.checkpoint", "flax", path)
    _check_orbax_names(read_json(path / _ORBAX), path)
    with _reading(path, "an Orbax checkpoint"), checkpoint.PyTreeCheckpointer() as reader:
        shapes = reader.metadata(path.resolve()).item_metadata.tree
        # as NumPy arrays: the devices on which they were saved may not be here
        as_numpy = jax.tree.map(lambda leaf: checkpoint.RestoreArgs(restore_type=np.ndarray), shapes)
        return _flat(reader.restore(path.resolve(), restore_args=as_numpy), path)


def _check_orbax_names(metadata: Any, path: Path) -> None:
    """Raise FedraxError for a name of an array that, as the name of its folder, would lead out of the checkpoint."""
    entries = metadata.get("tree_metadata") if isinstance(metadata, dict) else None
    if not isinstance(entries, dict):
        raise FedraxError(f"{path / _ORBAX} is not the metadata of an Orbax checkpoint.")
    for entry in entries.values():
        keys = entry.get("key_metadata") if isinstance(entry, dict) else None
        if not isinstance(keys, list) or not all(isinstance(key, dict) for key in keys):
            raise FedraxError(f"{path / _ORBAX} is not the metadata of an Orbax checkpoint.")
        parts = [str(key.get("key")) for key in keys]
        for name in (*parts, ".".join(parts)):
            if name.startswith("/") or ".." in name.split("/") or "\0" in name or "://" in name:
                raise FedraxError(f"{path} has an array {_shown(name)}, a name that leads out of the checkpoint.")


def _flat(tree: Any, path: Path) -> Arrays:
    """The arrays and numbers of nested dictionaries and lists by names; other values are left out."""
    found: Arrays = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), tree)]
    while waiting:
        names, value = waiting.pop()
        if len(names) > _DEEP:
            raise FedraxError(f"{path} is not a model file: {_shown('/'.join(names))} ... is nested too deeply.")
        if isinstance(value, Mapping):
            waiting += [((*names, str(name)), inside) for name, inside in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [((*names, str(i)), inside) for i, inside in enumerate(value)]
        elif hasattr(value, "dtype") or isinstance(value, int | float):
            name = "/".join(names)
            if name in found:
                raise FedraxError(f"{path} holds two arrays for the leaf {_shown(name)}.")
            found[name] = np.asarray(value)
    return _checked(dict(reversed(found.items())), path)


@contextmanager
def _reading(path: Path, kind: str, remedy: str = "") -> Iterator[None]:
    """Convert the errors of a damaged file, which may be any, to FedraxError."""
    try:
        yield
    except FedraxError:
        raise
    except Exception as error:
        raise FedraxError(f"{path} cannot be read as {kind}: {_line(error)}{remedy}.") from error


def _package(module: str, package: str, path: Path, remedy: str = "") -> ModuleType:
    """Import an optional package; raises FedraxError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise FedraxError(f"{path} can be read with {package} only: pip install 'fedrax[{package}]'{remedy}.") from None


def _line(error: Exception) -> str:
    """The first line of an error's message."""
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return printable_line(text[:200]).rstrip(".:")


def _shown(name: str) -> str:
    """A name in a message, whatever characters it has."""
    return printable_line(name[:100])
