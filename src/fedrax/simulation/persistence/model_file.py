"""Model files: parameters and running statistics by name, in the safetensors format, which cannot hold code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.contract.task import Variables
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.errors import FedraxError
from fedrax.files import open_regular_file, write_bytes
from fedrax.simulation.persistence.run_directory import MODEL
from fedrax.tree import Tree

_PARTS = ("params", "statistics")
_RUNNING = ("running_mean", "running_var")
"""Names of PyTorch's running statistics."""
_COUNTER = "num_batches_tracked"
"""PyTorch's counter of batch norm, which a model need not have."""
_DEEP = 100
"""Most slashes in a name: deeper nesting would exceed Python's recursion limit later."""


def save_model(path: Path | str, params: Tree, statistics: Tree = ()) -> None:
    """Write parameters and statistics atomically; a leaf is called ``params/dense1/weight``."""
    from safetensors.numpy import save

    if problem := problem_of(params, statistics):
        raise FedraxError(problem)
    arrays = {name: np.array(np.asarray(leaf), order="C") for name, leaf in _named(params, statistics)}
    write_bytes(Path(path), save(arrays, {"format": "fedrax"}))


def problem_of(params: Tree, statistics: Tree) -> str:
    """Why a model file cannot hold the arrays; empty if it can."""
    names = Counter(name for name, _ in _named(params, statistics))
    for name, leaf in _named(params, statistics):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        if jnp.issubdtype(dtype, jax.dtypes.extended) or np.dtype(dtype).kind not in "buif":
            return f"{name} has dtype {dtype}, which a model file cannot hold"
        if names[name] > 1:  # as in {"a/b": x, "a": {"b": y}}
            _, _, own = name.partition("/")
            return f"two arrays of the model are called {own}: rename one, names in a file are unique"
    return ""


def _named(params: Tree, statistics: Tree) -> Iterator[tuple[str, Any]]:
    """(name in a file, array) of each leaf."""
    for part, values in zip(_PARTS, (params, statistics), strict=True):
        for name, leaf in zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True):
            yield f"{part}/{name}" if name else part, leaf


@checked_arguments
def load_model(path: Path | str, like: Tree | None = None) -> Any:
    """Read the model of a run, a file that :meth:`fedrax.Result.save` wrote, or a plain state dict.

    It is what ``Result.model`` is: an argument of the task's functions, or of ``simulate(..., params=...)``.

    A plain state dict is a safetensors file of another library, such as that of
    ``safetensors.torch.save_file(module.state_dict(), path)``: the array ``fc1.weight`` or ``fc1/weight`` is the leaf
    ``weight`` of ``fc1``. Arrays must have the layout of the model's parameters, which is PyTorch's for a model of
    `from_torch` and [inputs, outputs] for the models of `fedrax.models`.

    Args:
        path: the safetensors file, or a run directory, for the global model of its last checkpoint. For models of
            clients see :func:`fedrax.experiments.load_result`.
        like: parameters whose tree structure the result takes, such as ``task.init(key)`` of an Equinox model; by
            default nested dictionaries. A state dict with running statistics needs it.

    Returns:
        The parameters, or :class:`fedrax.contract.Variables` where the file holds running statistics too. Arrays have
        the precision of the file; 64-bit arrays are NumPy's where ``jax_enable_x64`` is off.

    Raises:
        FedraxError: for a file that is damaged or not in the safetensors format, for a directory without one, for names
            or shapes unlike ``like``, and for a state dict with running statistics without ``like``.

    Example:
        >>> x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=1, cohort_size=2, progress=False)
        >>> result.save("model.safetensors")
        >>> jax.tree.map(jnp.shape, fedrax.simulation.load_model("model.safetensors"))
        {'output': {'bias': (2,), 'weight': (2, 2)}}
    """
    path = Path(path)
    if path.is_dir():
        path /= MODEL
        if not path.exists():
            raise FedraxError(
                f"{path.parent} has no {MODEL}: it is not a run directory, or its run has not come to a checkpoint"
            )
    arrays = _read(path)
    found: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
    if all(name.partition("/")[0] in _PARTS for name in arrays):
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            found[part][rest] = array
    else:
        found = _state_dict_parts(arrays, like, path)
    if like is not None:
        params, statistics = like if isinstance(like, Variables) else (like, ())
        if problem := problem_of(params, statistics):
            raise FedraxError(problem)
        filled = [_filled(one, found[part], path) for part, one in zip(_PARTS, (params, statistics), strict=True)]
        return Variables(*filled) if isinstance(like, Variables) else filled[0]
    params, statistics = (_nested(values) for values in found.values())
    return Variables(params, statistics) if found["statistics"] else params


def _state_dict_parts(arrays: dict[str, np.ndarray], like: Tree | None, path: Path | str) -> dict[str, Any]:
    """Parameters and running statistics among the arrays of a plain state dict, by the names of the leaves."""
    by_name: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if _with_slashes(name) in by_name:
            raise FedraxError(f"{path} holds two arrays for the leaf {_with_slashes(name)}.")
        by_name[_with_slashes(name)] = array
    if like is None:
        running = next((name for name in by_name if name.endswith(_RUNNING)), None)
        if running is not None:
            raise FedraxError(
                f"{path} holds running statistics, {running}: pass like=task.init(key), to tell them from parameters."
            )
        return {"params": by_name, "statistics": {}}
    found = {}
    for part, values in zip(_PARTS, like if isinstance(like, Variables) else (like, ()), strict=True):
        leaves = {_with_slashes(name): name for name in tree.leaf_names(values)}
        found[part] = {leaves[name]: by_name.pop(name) for name in leaves if name in by_name}
    left = next((name for name in by_name if not name.endswith(_COUNTER)), None)
    if left is not None:
        raise FedraxError(
            f"{path} does not fit the model, which has no {left}: load frozen parameters and constant buffers into a"
            " PyTorch module before from_torch converts it."
        )
    return found


def _with_slashes(name: str) -> str:
    """A PyTorch name in the form of names of leaves: ``fc1/weight`` for ``fc1.weight``."""
    return name.replace(".", "/")


def _read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file by name, checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular_file(path, MAX_BYTES), safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        # AttributeError: of dtypes that NumPy does not have, such as float4
        raise FedraxError(f"{path} cannot be read as a safetensors file: {error}{_pickle_hint(path)}.") from error
    for name, array in arrays.items():
        if array.dtype.kind not in "buif" and array.dtype.name != "bfloat16":
            raise FedraxError(f"{path} is not a model file: {name:.100} has dtype {array.dtype}.")
        if _with_slashes(name).count("/") > _DEEP:
            raise FedraxError(f"{path} is not a model file: {name:.100} ... is nested too deeply.")
    return arrays


def _pickle_hint(path: Path) -> str:
    """The remedy for a file of ``torch.save``, which is a ZIP archive or a pickle; fedrax unpickles nothing."""
    with open_regular_file(path) as file:
        is_pickle = file.read(2) in (b"PK", b"\x80\x02")
    return "; save it with safetensors.torch.save_file(module.state_dict(), path)" if is_pickle else ""


def _held(array: np.ndarray) -> Any:
    """The array as a JAX array, unless JAX would change its dtype."""
    return jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array


def _filled(like: Tree, arrays: dict[str, np.ndarray], path: Path | str) -> Tree:
    """The arrays in the tree structure of ``like``."""
    names = tree.leaf_names(like)
    wanted = dict(zip(names, jax.tree.leaves(like), strict=True))
    for name in [*wanted, *arrays]:
        have, need = (np.shape(d[name]) if name in d else None for d in (arrays, wanted))
        if have != need:
            shown = ["not there" if shape is None else f"of shape {shape}" for shape in (have, need)]
            raise FedraxError(f"{path} does not fit the model: {name} is {shown[0]}, should be {shown[1]}.")
    fitted = [_held(_with_integer_width(arrays[name], leaf)) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), fitted)


def _with_integer_width(array: np.ndarray, leaf: Any) -> np.ndarray:
    """Integers in the dtype of the leaf if they fit: PyTorch counts batches in 64 bits, JAX in 32."""
    dtype = np.dtype(getattr(leaf, "dtype", array.dtype))
    if array.dtype.kind in "iu" and dtype.kind in "iu" and (array == array.astype(dtype)).all():
        return array.astype(dtype)
    return array


def _nested(arrays: dict[str, np.ndarray]) -> Any:
    """Nested dictionaries from names with slashes; a single unnamed array is returned as it is."""
    if set(arrays) == {""}:
        return _held(arrays[""])
    nested: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, last = name.split("/")
        place = nested
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                raise FedraxError(f"a model file has an array {name!r} and another one with the name of its parent.")
        if isinstance(place.get(last), dict) or (not folders and not last):
            raise FedraxError(f"a model file has an array {name!r} and another one with the name of its parent.")
        place[last] = _held(array)
    return nested
