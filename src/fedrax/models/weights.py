"""``load_weights``: pretrained parameters of a model from checkpoint files of any library."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Variables
from fedrax.errors import FedraxError, warn
from fedrax.escaping import printable_line
from fedrax.models.weight_files import Arrays, read_arrays
from fedrax.tree import Tree

Rename = Mapping[str, str | None] | Callable[[str], str | None]
"""New first parts of names, or a function of a name; None leaves arrays out."""

PARTS = ("params", "statistics")
"""First parts of names in files of fedrax; in files of Flax, "params" too."""
_BOX = "/value"
"""Last part of names in checkpoints of a state of Flax NNX."""
_COUNTER = "num_batches_tracked"
"""PyTorch's counter of batch norm, which a model need not have."""
_LISTED, _COMPARED, _LENGTH = 5, 2_000, 120
"""Most names of a kind in a message, most names among which the closest one is searched, and most letters of one."""


@checked_arguments
def load_weights(
    path: Path | str,
    params: Tree,
    *,
    rename: Rename | None = None,
    convert: Callable[[str, np.ndarray], Any] | None = None,
    skip: Sequence[str] | str = (),
    strict: bool = True,
) -> Any:
    """Read pretrained weights from a file or directory into the parameters of a model.

    Formats, which the content tells:

    - safetensors;
    - a state dict of ``torch.save``, read with ``torch.load(weights_only=True)``, which needs PyTorch;
    - MessagePack of ``flax.serialization``, and an Orbax checkpoint (a directory), which need Flax;
    - a directory of ``save_pretrained``, as of ``transformers`` and ``peft``, and the index of sharded files.

    An array is for the parameter of its name: ``fc1.weight`` and ``fc1/weight`` are the leaf ``weight`` of ``fc1``.
    Names of the parameters are those of `fedrax.tree.leaf_names`. PyTorch's layers store [outputs, inputs] and
    [outputs, inputs, height, width], Flax's [inputs, outputs] and [height, width, inputs, outputs].

    Args:
        path: the file or directory.
        params: parameters of the model, such as ``model.init(key)``; `Variables` where it has running statistics.
        rename: new first parts of names by old ones, such as ``{"bert.encoder": "layers", "bert": ""}``, of which the
            longest applies, or a function of a name with slashes. None as a new name leaves arrays out.
        convert: function (name of a parameter, array) -> array of the parameter's shape, such as a transpose.
        skip: patterns of names of parameters that keep their values, such as ``"head/*"`` of a new head.
        strict: raise an error for parameters without an array and for arrays without a parameter. Otherwise such
            parameters keep their values, and a warning names both.

    Returns:
        The parameters in the tree structure and the dtypes of ``params``.

    Raises:
        FedraxError: the file is missing or damaged, a package that reads it is not installed, or it does not fit the
            parameters: one message names what is missing, has no place, or has another shape or kind of numbers.

    Example:
        >>> from safetensors.numpy import save_file
        >>> model = fedrax.models.Logistic().build((4,), 3)
        >>> save_file({"head.weight": np.ones((3, 4), np.float32), "head.bias": np.zeros(3, np.float32)}, "weights")
        >>> params = fedrax.models.load_weights("weights", model.init(jax.random.key(0)), rename={"head": "output"})
        >>> params["output"]["weight"].sum().item()
        12.0
    """
    path, like = Path(path), params if isinstance(params, Variables) else Variables(params, ())
    check_arrays(like)
    found = Fit.of(_renamed(read_arrays(path), rename, path), like, path, skip, convert)
    if problem := found.problem(strict):
        remedies = "; ".join(found.remedies(strict, rename is not None))
        raise FedraxError(f"{path} does not fit the parameters: {problem}{': ' if remedies else ''}{remedies}.")
    if left := found.left():
        warn(f"{path} fits the parameters in part: {left}")
    leaves, structure = jax.tree.flatten(like)
    made = [_as_leaf(found.arrays.pop(i), leaf) if i in found.arrays else leaf for i, leaf in enumerate(leaves)]
    if shapes := [found.names[i] for i, leaf in enumerate(made) if isinstance(leaf, jax.ShapeDtypeStruct)]:
        raise FedraxError(f"{_listed(shapes)}: params has the shape only, and not the value to keep: pass init(key)")
    variables = jax.tree.unflatten(structure, made)
    return variables if isinstance(params, Variables) else variables.params


@dataclass
class Fit:
    """Which arrays of a file are for which leaves of parameters and running statistics."""

    names: list[str]
    """The name of each leaf: parameters, then running statistics."""
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    """Arrays by the number of their leaf."""
    missing: list[str] = field(default_factory=list)
    """Leaves without an array."""
    unexpected: list[str] = field(default_factory=list)
    """Arrays without a leaf."""
    wrong: list[str] = field(default_factory=list)
    """Leaves whose arrays have other shapes or kinds of numbers, in words."""
    prefixes: tuple[str, str] | None = None
    """First parts of names of arrays without a leaf, and of leaves without an array, after which they agree."""

    @classmethod
    def of(
        cls,
        arrays: Arrays,
        like: Variables,
        path: Path,
        skip: Sequence[str] | str = (),
        convert: Callable[[str, np.ndarray], Any] | None = None,
    ) -> Fit:
        """Find the arrays for the leaves.

        Args:
            arrays: The arrays by name.
            like: Parameters and running statistics, of which shapes and dtypes matter.
            path: The file, for messages.
            skip: Patterns of names of leaves that need no array.
            convert: Function (name of a leaf, array) -> array.

        Returns:
            The arrays, and what does not fit.
        """
        names, leaves = [tree.leaf_names(part) for part in like], jax.tree.leaves(like)
        found = cls([name for part in names for name in part])
        skipped = tree.matching_names(found.names, (skip,) if isinstance(skip, str) else tuple(skip), "skip")
        places, sources, unplaced = _places(names), {}, []
        for name in arrays:
            place = places.get(_with_slashes(name), places.get(_with_slashes(name).removesuffix(_BOX)))
            if place is None:
                unplaced.append(name)
            elif place in sources:
                raise FedraxError(f"{path} holds two arrays for the leaf {_shown(found.names[place])}")
            else:
                sources[place] = name
        used = {_memory(arrays[name]) for name in sources.values()}
        for place, name in sources.items():
            if (own := found.names[place]) not in skipped:
                found.arrays[place] = arrays[name] if convert is None else _converted(convert, own, arrays[name])
                if problem := _mismatch(found.arrays[place], leaves[place]):
                    found.wrong.append(f"{_shown(own)} is of {problem}")
        missing = [i for i, name in enumerate(found.names) if i not in sources and name not in skipped]
        # of PyTorch's tied parameters, which share memory, a model may have one
        unplaced = [name for name in unplaced if not name.endswith(_COUNTER) and _memory(arrays[name]) not in used]
        found.missing, found.unexpected = [found.names[i] for i in missing], unplaced
        found.prefixes = _prefixes(
            {_with_slashes(name): np.shape(arrays[name]) for name in unplaced},
            {_with_slashes(found.names[i]): np.shape(leaves[i]) for i in missing},
        )
        return found

    def problem(self, strict: bool = True) -> str:
        """Why the file does not fit, in words; empty if it does. Not strict: leaves may be without an array."""
        found = list(self.wrong)
        if strict or not self.arrays:
            found += [f"it has no {_listed(self.missing, self.unexpected)}"] if self.missing else []
            found += [f"the model has no {_listed(self.unexpected)}"] if self.unexpected else []
        return "; ".join(found)

    def remedies(self, strict: bool, is_renamed: bool) -> list[str]:
        """What a caller of `load_weights` can do about the problem."""
        found = []
        if self.prefixes is not None and not is_renamed:
            found.append(f"rename={dict([self.prefixes])!r} renames arrays")
        elif self.unexpected and (strict or not self.arrays):
            found.append("rename={'OLD': 'NEW'} renames arrays, {'OLD': None} leaves them out")
        if (self.missing and self.arrays and strict) or self.wrong:
            found.append("skip keeps values of parameters")
        return found

    def left(self) -> str:
        """The leaves without an array and the arrays without a leaf, in words; empty for none."""
        kept = f"{len(self.missing):,} keep their values ({_listed(self.missing)})" if self.missing else ""
        unused = (
            f"{len(self.unexpected):,} of its arrays are not used ({_listed(self.unexpected)})"
            if self.unexpected
            else ""
        )
        return " and ".join(part for part in (kept, unused) if part)


def _places(names: Sequence[Sequence[str]]) -> dict[str, int]:
    """The number of the leaf that each name of an array stands for."""
    flat = [(part, name) for part, of_part in zip(PARTS, names, strict=True) for name in of_part]
    places = {_with_slashes(f"{part}/{name}" if name else part): i for i, (part, name) in enumerate(flat)}
    return places | {_with_slashes(name): i for i, (_, name) in enumerate(flat)}


def _mismatch(array: Any, leaf: Any) -> str:
    """What an array has instead of the shape or the kind of numbers of a leaf; empty if they agree."""
    have, need = np.shape(array), tuple(leaf.shape)
    if have != need:
        turned = " (transpose it with convert)" if have == need[::-1] else ""
        return f"shape {have}, should be of shape {need}{turned}"
    found, wanted = (_kind(dtype) for dtype in (array.dtype, leaf.dtype))
    return "" if found == wanted else f"dtype {array.dtype}, should be {np.dtype(leaf.dtype)}"


def _kind(dtype: Any) -> str:
    """Whether numbers are integers, floats or Boolean."""
    kinds = {"b": "boolean", "u": "integer", "i": "integer"}
    return "float" if jnp.issubdtype(dtype, jnp.floating) else kinds.get(np.dtype(dtype).kind, str(dtype))


def _as_leaf(array: np.ndarray, leaf: Any) -> Any:
    """The array in the dtype of a leaf."""
    cast = np.asarray(array).astype(np.dtype(leaf.dtype))
    if cast.dtype.kind in "iu" and not (cast == array).all():
        raise FedraxError(f"the file holds integers that do not fit {cast.dtype}")
    return jnp.asarray(cast) if jax.dtypes.canonicalize_dtype(cast.dtype) == cast.dtype else cast


def _converted(convert: Callable[[str, np.ndarray], Any], name: str, array: np.ndarray) -> np.ndarray:
    """The result of the user's function as an array."""
    made = convert(name, array)
    if not (hasattr(made, "dtype") and hasattr(made, "shape")):
        raise FedraxError(f"convert must return an array for {name}, not {type(made).__name__}")
    return np.asarray(made)


def _memory(array: np.ndarray) -> tuple[int, tuple[int, ...], str]:
    """What identifies an array: the place of its memory, its shape and dtype."""
    return array.__array_interface__["data"][0], array.shape, array.dtype.name


def _with_slashes(name: str) -> str:
    """A PyTorch name in the form of names of leaves: ``fc1/weight`` for ``fc1.weight``."""
    return name.replace(".", "/")


def _renamed(arrays: Arrays, rename: Rename | None, path: Path) -> Arrays:
    """The arrays by new names; raises FedraxError where two get the same."""
    if rename is None:
        return arrays
    if callable(rename):
        news = {name: rename(_with_slashes(name)) for name in arrays}
        if wrong := [new for new in news.values() if not isinstance(new, str | None)]:
            raise FedraxError(f"rename must return a name or None, not {type(wrong[0]).__name__}")
    else:
        news = _with_new_parts(list(arrays), {_with_slashes(old): new for old, new in rename.items()}, path)
    found: Arrays = {}
    for name, new in news.items():
        if new is not None and _with_slashes(new) in found:
            raise FedraxError(f"rename gives two arrays of {path} the name {_shown(new)}")
        found |= {} if new is None else {_with_slashes(new): arrays[name]}
    return found


def _with_new_parts(names: Sequence[str], parts: Mapping[str, str | None], path: Path) -> dict[str, str | None]:
    """New names, of which the longest first part that ``parts`` has is replaced."""
    found: dict[str, str | None] = {}
    used = set()
    for name in names:
        pieces = _with_slashes(name).split("/")
        length = next((i for i in range(len(pieces), -1, -1) if "/".join(pieces[:i]) in parts), None)
        if length is None:
            found[name] = name
            continue
        used.add(old := "/".join(pieces[:length]))
        new, rest = parts[old], pieces[length:]
        found[name] = None if new is None else "/".join([*[new] * bool(new), *rest])
    if unused := [old for old in parts if old not in used]:
        split = [_with_slashes(name).split("/") for name in names[:_COMPARED]]
        known = {"/".join(pieces[:i]) for pieces in split for i in range(1, len(pieces) + 1)}
        near = _nearest(unused[0], sorted(known), 0.3)
        closest = f"; the closest one is {_shown(near)}" if near else ""
        raise FedraxError(f"rename: no name in {path} begins with {unused[0]!r}{closest}")
    return found


def _prefixes(unexpected: Mapping[str, tuple], missing: Mapping[str, tuple]) -> tuple[str, str] | None:
    """First parts (of an unexpected name, of a missing one) after which most of them agree, with equal shapes."""
    by_last: dict[tuple, list[str]] = {}
    for name, shape in islice(unexpected.items(), _COMPARED):
        by_last.setdefault((name.rpartition("/")[2], shape), []).append(name)
    pairs: Counter[tuple[str, str]] = Counter()
    for name, shape in islice(missing.items(), _COMPARED // 10):
        for other in by_last.get((name.rpartition("/")[2], shape), ())[: _COMPARED // 10]:
            old, new = other.split("/"), name.split("/")
            while old and new and old[-1] == new[-1]:
                old.pop()
                new.pop()
            pairs["/".join(old), "/".join(new)] += 1
    best = pairs.most_common(1)
    return best[0][0] if best and 2 * best[0][1] > len(missing) else None


def _listed(names: Sequence[str], known: Sequence[str] = ()) -> str:
    """Some of the names in words; of each the closest of ``known``."""
    words = []
    for name in names[:_LISTED]:
        near = _nearest(name, known, 0.6)
        words.append(_shown(name) + (f" (closest: {_shown(near)})" if near else ""))
    more = f" and {len(names) - _LISTED:,} more" if len(names) > _LISTED else ""
    return ", ".join(words) + more


def _nearest(name: str, known: Sequence[str], cutoff: float) -> str:
    """The closest one of known names, empty for none; long ones take too much time."""
    short = [one for one in known[:_COMPARED] if len(one) <= _LENGTH]
    return next(iter(difflib.get_close_matches(name[:_LENGTH], short, 1, cutoff)), "")


def _shown(name: str) -> str:
    """A name in a message, whatever characters it has."""
    return printable_line(name[:_LENGTH]) or "''"


def shapes_by_name(params: Tree) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf by its name."""
    return {name: np.shape(leaf) for name, leaf in zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True)}


def shape_problem(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """What a tree has in which it differs from another in names and shapes, in words; empty if it does not."""
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    wrong = [
        f"{name} of shape {shape}, which should be of shape {wanted[name]}"
        for name, shape in found.items()
        if name in wanted and shape != wanted[name]
    ]
    parts = [f"no {_listed(missing, unexpected)}"] if missing else []
    parts += [f"{_listed(unexpected)}, which should not be there"] if unexpected else []
    return "; ".join(parts + wrong[:_LISTED])


def check_arrays(params: Tree) -> None:
    """Raise FedraxError for what is no tree of arrays."""
    leaves: Iterable[Any] = jax.tree.leaves(params)
    wrong = [leaf for leaf in leaves if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape"))]
    if wrong or not leaves:
        found = type(wrong[0]).__name__ if wrong else "nothing"
        raise FedraxError(f"params must be a tree of arrays, such as model.init(key), and it holds {found}")
