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
from fedrax.errors import FedraxError
from fedrax.files import write_bytes
from fedrax.models.weight_files import read_safetensors
from fedrax.models.weights import PARTS, Fit
from fedrax.simulation.persistence.run_directory import MODEL
from fedrax.tree import Tree


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
    for part, values in zip(PARTS, (params, statistics), strict=True):
        for name, leaf in zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True):
            yield f"{part}/{name}" if name else part, leaf


@checked_arguments
def load_model(path: Path | str, like: Tree | None = None) -> Any:
    """Read the model of a run, or a file that :meth:`fedrax.Result.save` wrote.

    It is what ``Result.model`` is: an argument of the task's functions, or of ``simulate(..., params=...)``.
    :func:`fedrax.models.load_weights` reads files of other libraries.

    Args:
        path: the safetensors file, or a run directory, for the global model of its last checkpoint. For models of
            clients see :func:`fedrax.experiments.load_result`.
        like: parameters whose tree structure the result takes, such as ``task.init(key)`` of an Equinox model; by
            default nested dictionaries.

    Returns:
        The parameters, or :class:`fedrax.contract.Variables` where the file holds running statistics too. Arrays have
        the precision of the file; 64-bit arrays are NumPy's where ``jax_enable_x64`` is off.

    Raises:
        FedraxError: for a file that is damaged or of another library, for a directory without one, and for names,
            shapes or kinds of numbers unlike ``like``.

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
    arrays = read_safetensors(path)
    if not all(name.partition("/")[0] in PARTS for name in arrays):
        raise FedraxError(
            f"{path} is not a model file of fedrax, whose arrays are called params/...:"
            " fedrax.models.load_weights(path, model.init(key)) reads weights of other libraries"
        )
    if like is not None:
        variables = like if isinstance(like, Variables) else Variables(like, ())
        if problem := problem_of(*variables):
            raise FedraxError(problem)
        found = Fit.of(arrays, variables, path)
        if problem := found.problem():
            raise FedraxError(f"{path} does not fit the model: {problem}")
        leaves, structure = jax.tree.flatten(variables)
        filled = [_held(_with_integer_width(found.arrays[i], leaf)) for i, leaf in enumerate(leaves)]
        variables = jax.tree.unflatten(structure, filled)
        return variables if isinstance(like, Variables) else variables.params
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in PARTS}
    for name, array in arrays.items():
        part, _, rest = name.partition("/")
        parts[part][rest] = array
    params, statistics = map(_nested, parts.values())
    return Variables(params, statistics) if parts["statistics"] else params


def _held(array: np.ndarray) -> Any:
    """The array as a JAX array, unless JAX would change its dtype."""
    return jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array


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
