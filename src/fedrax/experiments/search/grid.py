"""Grids of comparison files: lists of values for settings, and the experiments at their points.

    grid = { algorithm.local.lr = [0.01, 0.03, 0.1], algorithm.server_optimizer = ["none", "adam"] }

A path is that of a key in an experiment file or of a flag; any setting of the algorithm, the run, the model and the
fine-tuning may vary. A range, "0.001..1:log" or "1..10", may replace a list; Optuna then tries some of its values.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
import tomllib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.errors import FedraxError
from fedrax.escaping import short_path
from fedrax.experiments import experiment
from fedrax.experiments.experiment import Experiment
from fedrax.experiments.nesting import path_for
from fedrax.experiments.serialization import METHODS, Reader, TomlTable, names_another, replaced_by
from fedrax.experiments.user_code import Trust
from fedrax.files import flatten
from fedrax.tuning.selection import SearchRange

SettingPoint = dict[str, Any]
"""A value for each path of a grid."""
Axes = tuple[tuple[str, tuple[Any, ...] | SearchRange], ...]
"""Paths with a list of values or a range for each."""
LARGEST = 1000
"""Limit of the number of points: a larger grid is most likely a mistake, and each point is a run."""
_VARIED = ("algorithm", "run", "model", "finetuning")
"""Tables of an experiment whose settings a grid may vary."""

_NUMBER = r"([-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(:log)?")


def range_of(text: str, source: str) -> SearchRange | None:
    """Parse a range, None if ``text`` is not one; raises FedraxError for an empty range."""
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        return None
    made = SearchRange(value_of(found[1]), value_of(found[2]), found[3] is not None)
    if not (-math.inf < made.low < made.high < math.inf and max(-made.low, made.high) <= sys.float_info.max):
        raise FedraxError(f"{source}: the range {text} is empty or not finite.")
    if made.log and made.low <= 0:
        raise FedraxError(f"{source}: the range {text} is logarithmic: it must begin above 0.")
    return made


@dataclass(frozen=True)
class Grid:
    """Paths of settings with a list of values or a range for each."""

    axes: Axes
    folder: Path = Path()
    """Folder of the file that has the grid."""
    trust: Trust = "typed"
    """Which user code its values may name."""

    @property
    def ranges(self) -> dict[str, SearchRange]:
        """The ranges among the axes."""
        return {path: values for path, values in self.axes if isinstance(values, SearchRange)}

    @property
    def size(self) -> int:
        """The number of points, without the ranges."""
        return math.prod(len(values) for _, values in self.axes if not isinstance(values, SearchRange))

    def points(self) -> list[SettingPoint]:
        """All combinations of a grid without ranges; the last axis varies fastest."""
        paths = [path for path, _ in self.axes]
        values = [values for _, values in self.axes if not isinstance(values, SearchRange)]
        return [dict(zip(paths, point, strict=True)) for point in itertools.product(*values)]

    def ends(self) -> list[SettingPoint]:
        """Points that cover both ends of every range and every listed value.

        All lower ends with the first values, all upper ends with the last ones, and both with every other listed value.
        """
        both = [
            (path, (values.low, values.high) if isinstance(values, SearchRange) else (values[0], values[-1]))
            for path, values in self.axes
        ]
        ends = [{path: pair[i] for path, pair in both} for i in range(2)]
        listed = [
            (path, value) for path, values in self.axes if not isinstance(values, SearchRange) for value in values
        ]
        points = ends + [end | {path: value} for end in ends for path, value in listed]
        return list({repr(point): point for point in points}.values())


def from_table(table: Any, source: str, folder: Path = Path(), trust: Trust = "typed") -> Grid:
    """The grid of a table with a list at each path; paths are dotted keys or nested tables.

    Args:
        table: The table.
        source: Prefix of error messages.
        folder: Folder of the file that has the table.
        trust: Which user code the table may name.

    Returns:
        The checked grid.
    """
    if not isinstance(table, Mapping):
        raise FedraxError(f"{source}: grid must be a table, {{ algorithm.local.lr = [0.01, 0.1] }}, not {table!r}.")
    return Grid(_checked(flatten(table), source), folder, trust)


def from_flags(words: Iterable[str]) -> Grid:
    """The grid of flags ``PATH=VALUE,VALUE,...``."""
    found: dict[str, Any] = {}
    for word in words:
        path, equals, values = word.partition("=")
        if not equals:
            raise FedraxError(f"--grid {word}: write PATH=VALUE,VALUE,..., such as algorithm.local.lr=0.01,0.03,0.1.")
        path = path.strip().replace("-", "_")
        if path in found:
            raise FedraxError(f"--grid names {path} twice.")
        found[path] = values if range_of(values, word) else [value_of(value) for value in values.split(",")]
    return Grid(_checked(found, "--grid"))


def value_of(word: str) -> Any:
    """Parse a word of the command line as a TOML value: a number, true or false, otherwise a string."""
    word = word.strip()
    try:
        return tomllib.loads(f"value = {word}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(word)
    except ValueError:
        return word


def _checked(found: Mapping[str, Any], source: str) -> Axes:
    """Check the values of a grid, and return its axes."""
    axes: list[tuple[str, tuple[Any, ...] | SearchRange]] = []
    for path, values in found.items():
        if path.split(".")[0] not in _VARIED or "." not in path:
            raise FedraxError(
                f"{source}: {path} cannot vary: a grid has settings of {', '.join(_VARIED)}, such as"
                " algorithm.local.lr; data, partition and task are the same for all methods."
            )
        if path == "run.seed":
            raise FedraxError(f"{source}: run.seed cannot vary in a grid: set seeds instead.")
        within = range_of(values, f"{source}: {path}") if isinstance(values, str) else None
        if within is not None:
            axes.append((path, within))
            continue
        if not isinstance(values, list) or not values:
            raise FedraxError(f'{source}: {path} needs a list of values or a range, "0.001..1:log", not {values!r}.')
        values = [_plain(value) for value in values]
        if any(value in values[:i] for i, value in enumerate(values)):
            raise FedraxError(f"{source}: {path} has a duplicate value in {values}.")
        axes.append((path, tuple(values)))
    if not axes:
        raise FedraxError(f"{source}: the grid is empty.")
    size = math.prod(len(values) for _, values in axes if not isinstance(values, SearchRange))
    if size > LARGEST:
        raise FedraxError(f"{source}: a grid of {size:,} points is too large (limit: {LARGEST:,}).")
    return tuple(axes)


def _plain(value: Any) -> Any:
    """A value with scalars of NumPy and JAX converted to Python numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.item() if getattr(value, "ndim", None) == 0 else value


def with_settings(
    spec: Experiment, values: SettingPoint, source: str, folder: Path = Path(), trust: Trust = "typed"
) -> Experiment:
    """``spec`` with the settings at the paths of ``values`` replaced, checked as those of a file in ``folder``."""
    if not values:
        return spec
    table = experiment.to_table(spec)
    if "algorithm.name" not in values:
        values = {path_for(path, spec.algorithm): value for path, value in values.items()}
    replaced = {other for path in values if (other := replaced_by(path, spec)) is not None} - set(values)
    values = dict.fromkeys(replaced, "none") | dict(values)
    for path in sorted(values, key=_sort_key):
        _set(table, path, values[path], source)
    return Reader(source, folder, trust=trust).fields(Experiment, table, "", Experiment())


def _sort_key(path: str) -> tuple[int, bool]:
    """Sorts the name of a class before its settings."""
    return path.count("."), not path.endswith(".name")


def _set(table: TomlTable, path: str, value: Any, source: str) -> None:
    """Set the value at a path of a nested table."""
    *parents, last = path.split(".")
    for depth, parent in enumerate(parents, 1):
        if isinstance(table.get(parent), str) and table[parent] != "none":
            table[parent] = {"name": table[parent]}
        if parent in table and not isinstance(table[parent], dict):
            raise FedraxError(
                f"{source}: {path}: {'.'.join(parents[:depth])} is {table[parent]!r} and has no settings."
            )
        table = table.setdefault(parent, {})
    old = table.get(last)
    if isinstance(old, dict) and isinstance(value, str) and old.get("name") == value:
        return
    if last == "name" and not set(parents) <= set(METHODS) and names_another(table, {"name": value}):
        table.clear()  # its settings belong to another class
    table[last] = value


def of_model(point: SettingPoint) -> SettingPoint:
    """The settings of a point that change the model, and so the task."""
    return {path: value for path, value in point.items() if path.split(".")[0] in ("model", "finetuning")}


def point_directory(point: SettingPoint) -> str:
    """A unique directory name for a point."""
    exact = ",".join(f"{short_path(path)}={value!r}" for path, value in sorted(point.items()))
    name = "".join(c if c.isalnum() or c in "._=,-" else "-" for c in exact)
    return name if name == exact and len(name) <= 100 else f"{name[:80]}-{zlib.crc32(exact.encode()):08x}"
