"""Runs of Table 1, stored as lines, and the search of a method's grid with them."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax import FedraxError, files, sweep
from fedrax.experiments import comparison, experiment
from fedrax.experiments.comparison import merge_tables
from fedrax.experiments.experiment import Experiment
from fedrax.simulation.results.result import Result
from fedrax.tuning.sweeps import should_vectorize
from papers.losac.running import processor

AXES: dict[str, tuple[tuple[str, ...], tuple[float, ...]]] = {
    "local step": (("local", "lr"), (0.001, 0.01, 0.1)),
    "server step": (("server_optimizer", "lr"), (0.1, 1.0, 10.0)),
    "server step (GradMA)": (("server_lr",), (0.1, 1.0, 10.0)),
    "mu": (("mu",), (0.001, 0.01, 0.1)),
    "alpha": (("alpha",), (0.001, 0.01, 0.1)),
    "beta1": (("server_optimizer", "momentum"), (0.1, 0.5, 0.9)),
    "beta1 (GradMA)": (("beta1",), (0.1, 0.5, 0.9)),
    "beta2": (("beta2",), (0.1, 0.5, 0.9)),
    "beta": (("beta",), (0.1, 0.5, 0.9)),
    "memory": (("memory",), (0, 10, 20, 40, 60, 80, 100)),
}
"""The grids of the paper's appendix .2.1, and the sizes of memory of its Figure 6: key of a method's table, values."""
METHODS: dict[str, tuple[str, ...]] = {
    "FedAvg": ("local step", "server step"),
    "FedProx": ("local step", "server step", "mu"),
    "FedMLB": ("local step", "server step"),
    "MOON": ("local step", "server step"),
    "Scaffold": ("local step", "server step"),
    "GradMA-W": ("local step", "server step"),
    "FedAvgM": ("local step", "server step", "beta1"),
    "MIFA": ("local step", "server step"),
    "MIFAM": ("local step", "server step", "beta1"),
    "GradMA-S": ("local step", "server step (GradMA)", "beta1 (GradMA)", "beta2"),
    "FedProxM": ("local step", "server step", "mu", "beta1"),
    "FedMLBM": ("local step", "server step", "beta1"),
    "MOONM": ("local step", "server step", "beta1"),
    "FedDyn": ("local step", "alpha"),
    "MimeLite": ("local step", "server step", "beta"),
    "GradMA": ("local step", "server step (GradMA)", "beta1 (GradMA)", "beta2"),
}
"""What is tuned of each method, in the order in which `axes` walks through it."""

Point = tuple[float, ...]
"""A value for each of a method's axes."""


@dataclass(frozen=True)
class Cell:
    """A column of the table."""

    cohort: int
    omega: float

    def __str__(self) -> str:
        return f"S={self.cohort}, omega={self.omega:g}"


Key = tuple[Cell, str, Point, int]
"""Column, method, point and seed of a run."""


class Runs:
    """Runs of the methods of an experiment file, stored as lines of JSON that may be added by later sessions and
    machines.

    kept: the file of these lines. rounds: overrides the file's. first: values of axes at which a search starts.
    changes: changes of the file's table. curves: a run stored without its curve counts as missing. axes: of each
    method's points.
    """

    def __init__(
        self,
        file: Path,
        kept: Path,
        rounds: int | None,
        data_dir: str | None,
        first: Mapping[str, float] | None = None,
        changes: Mapping[str, Any] | None = None,
        curves: bool = False,
        axes: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self.table = merge_tables(files.read_toml(file), changes or {})
        self.file, self.kept, self.data_dir = file, kept, data_dir
        self.first, self.curves, self.axes = dict(first or {}), curves, METHODS if axes is None else axes
        self.rounds = rounds or self.table["run"]["rounds"]
        self.base = {entry["label"]: entry for entry in self.table["compare"]}
        self._built: tuple[tuple[Cell, int] | None, Any, Any] = (None, None, None)
        self._read: tuple[int, dict[Key, dict[str, Any]]] = (0, {})

    def start(self, method: str) -> Point:
        """The point of the file, with the values of ``first``."""
        entry = merge_tables(self.table["algorithm"], self.base[method])
        chosen = {axis: self.first.get(axis.removesuffix(" (GradMA)")) for axis in self.axes[method]}
        return tuple(_value(entry, *AXES[axis]) if value is None else value for axis, value in chosen.items())

    def stored(self, cell: Cell, method: str, point: Point, seed: int) -> dict[str, Any] | None:
        """The record of a run, or None; FedraxError if it belongs to another experiment."""
        record = self._records().get((cell, method, point, seed))
        if record is not None and record["experiment"] != self._digest(cell, method, point, seed):
            which = f"{cell}, {method}, seed {seed}"
            raise FedraxError(f"{self.kept} holds a run of another experiment, {which}: choose another --results.")
        return record

    def missing(self, cell: Cell, method: str, points: Iterable[Point], seed: int) -> list[Point]:
        """Points that are not stored."""
        stored = {point: self.stored(cell, method, point, seed) for point in points}
        return [point for point, record in stored.items() if record is None or (self.curves and "curve" not in record)]

    def _records(self) -> dict[Key, dict[str, Any]]:
        """All stored ones, read again if another process has added to them."""
        size = self.kept.stat().st_size if self.kept.exists() else 0
        if size != self._read[0]:
            with files.open_regular_file(self.kept, files.MAX_JSON) as file:
                self._read = (size, dict(self._record(number, line) for number, line in enumerate(file, 1)))
        return self._read[1]

    def _record(self, number: int, line: bytes) -> tuple[Key, dict[str, Any]]:
        try:
            record = json.loads(line)
            cell = Cell(record["cohort"], record["omega"])
            return (cell, record["method"], tuple(record["point"]), record["seed"]), record
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise FedraxError(f"{self.kept}: line {number} is not a run; take it out and go on.") from error

    def machines(self) -> list[str]:
        """Machines of the runs."""
        return sorted({record["processor"] for record in self._records().values()})

    def seeds(self) -> list[int]:
        """With which runs were made."""
        return sorted({record["seed"] for record in self._records().values()})

    def run(self, cell: Cell, method: str, points: list[Point], seed: int) -> None:
        """Run what is not stored, and store each result; the points of a method run together if that is faster."""
        points = self.missing(cell, method, points, seed)
        if not points:
            return
        made = [self._experiment(cell, method, point, seed) for point in points]
        if self._built[0] != (cell, seed):
            self._built = ((cell, seed), *experiment.build(made[0], self.data_dir)[1:])
        _, task, federation = self._built
        algorithms, settings = [m.algorithm for m in made], made[0].run
        apart = [[one] for one in algorithms]
        for some in [algorithms] if should_vectorize(algorithms, task, federation, settings) else apart:
            results = sweep(some, task, federation, (seed,), settings)
            self._store(cell, method, points[: len(results)], seed, [result for (result,) in results])
            points = points[len(results) :]

    def _store(self, cell: Cell, method: str, points: list[Point], seed: int, results: list[Result]) -> None:
        """Append a line for each run."""
        for point, result in zip(points, results, strict=True):
            accuracy = [100 * event["test_accuracy"] for event in result.events if "test_accuracy" in event]
            half = accuracy[len(accuracy) // 2 :]
            which = {"cohort": cell.cohort, "omega": cell.omega, "method": method, "point": point, "seed": seed}
            record = which | {
                "top": round(max(accuracy, default=0.0), 4),
                "second_half": round(sum(half) / max(1, len(half)), 4),
                "diverged": result.stopped == "diverged",
                "every": self.table["run"]["eval_every"],
                "curve": [round(one, 2) for one in accuracy],
                "experiment": self._digest(cell, method, point, seed),
                "processor": processor(),
                "date": datetime.date.today().isoformat(),
            }
            self._append(json.dumps(record) + "\n")

    def _append(self, line: str) -> None:
        try:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            with files.open_to_append(self.kept) as file:
                file.write(line)
        except OSError as error:
            raise FedraxError(f"cannot write {self.kept}: {error.strerror or error}") from error

    def top(self, cell: Cell, method: str, point: Point, seed: int) -> float | None:
        """Highest test accuracy in percent of a stored run; 0 if it was never evaluated."""
        record = self.stored(cell, method, point, seed)
        return None if record is None else record["top"]

    def usual(self, cell: Cell, method: str, point: Point, seed: int) -> float:
        """Mean test accuracy in percent over the second half of a stored run's evaluations."""
        record = self.stored(cell, method, point, seed)
        return 0.0 if record is None else record["second_half"]

    def curve(self, cell: Cell, method: str, point: Point, seed: int) -> list[tuple[int, float]]:
        """(round, test accuracy in percent) of a stored run's evaluations; empty if no curve was stored."""
        record = self.stored(cell, method, point, seed) or {}
        every = record.get("every", 1)
        return [(every * (i + 1), accuracy) for i, accuracy in enumerate(record.get("curve", ()))]

    def date(self, cell: Cell, method: str, point: Point, seed: int) -> str:
        """Date of a stored run; empty if there is none."""
        record = self.stored(cell, method, point, seed)
        return "" if record is None else record["date"]

    def known(self, cell: Cell, method: str, seed: int) -> dict[Point, float]:
        """All evaluated points of the grid with their highest accuracy."""
        every = itertools.product(*(AXES[axis][1] for axis in self.axes[method]))
        found = {point: self.top(cell, method, point, seed) for point in every}
        return {point: top for point, top in found.items() if top is not None}

    def _table(self, cell: Cell, method: str, point: Point, seed: int) -> dict[str, Any]:
        """The run as an experiment file with one method."""
        over: dict[str, Any] = {}
        for axis, value in zip(self.axes[method], point, strict=True):
            over = merge_tables(over, _nested(AXES[axis][0], value))
        table = {key: value for key, value in self.table.items() if key not in ("seeds", "compare")}
        table["partition"] = table["partition"] | {"omega": cell.omega, "seed": seed}
        table["run"] = table["run"] | {"cohort_size": cell.cohort, "rounds": self.rounds, "seed": seed}
        table["compare"] = [merge_tables(self.base[method], over)]
        return table

    def _experiment(self, cell: Cell, method: str, point: Point, seed: int) -> Experiment:
        table = self._table(cell, method, point, seed)
        (made,) = comparison.from_table(table, str(self.file), self.file.parent).methods
        made.check()
        return dataclasses.replace(made, run=dataclasses.replace(made.run, seed=seed))

    def _digest(self, cell: Cell, method: str, point: Point, seed: int) -> str:
        """Digest that identifies runs of the same experiment."""
        table = self._table(cell, method, point, seed)
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def candidates(runs: Runs, cell: Cell, method: str, seed: int, stage: int, mode: str) -> list[Point]:
    """Points of a stage of the search: first that of the file; then, by mode, one axis after another around the best
    point so far (axes), or the whole grid (grid). All earlier stages must have been run.
    """
    axes = [AXES[axis][1] for axis in METHODS[method]]
    if stage == 0:
        return [runs.start(method)]
    if mode == "grid":
        return list(itertools.product(*axes)) if stage == 1 else []
    if mode == "none" or stage > len(axes):
        return []
    # of the points on the search's own way: others that are kept would lead it elsewhere when it is gone again
    way = [point for before in range(stage) for point in candidates(runs, cell, method, seed, before, mode)]
    best = max(way, key=lambda point: runs.top(cell, method, point, seed) or 0.0)
    return [(*best[: stage - 1], value, *best[stage:]) for value in axes[stage - 1]]


def best_point(runs: Runs, cell: Cell, method: str, seeds: Sequence[int]) -> Point:
    """The point with the highest mean top accuracy of those run with all seeds; if none was, with the first seed."""
    tried = [runs.known(cell, method, seed) for seed in seeds]
    complete = [point for point in tried[0] if all(point in known for known in tried)]
    if complete:
        return max(complete, key=lambda point: sum(known[point] for known in tried))
    return max(tried[0], key=lambda point: tried[0][point]) if tried[0] else runs.start(method)


def work(runs: Runs, cells: list[Cell], methods: list[str], seeds: list[int], mode: str) -> Iterator[tuple]:
    """(cell, method, points, seed) in order of execution: each stage of the search in all cells before the next stage,
    and the search, which uses the first seed, before the other seeds, which run at the best point, or without a search
    (mode "none") at the same point. Mode "best": only the best stored points.
    """
    if mode == "best":
        for seed, cell, method in itertools.product(seeds, cells, methods):
            yield cell, method, [best_point(runs, cell, method, runs.seeds() or seeds)], seed
        return
    for stage in range(1 + max(len(METHODS[method]) for method in methods)):
        for cell, method in itertools.product(cells, methods):
            points = candidates(runs, cell, method, seeds[0], stage, mode)
            if points:
                yield cell, method, points, seeds[0]
    for seed, cell, method in itertools.product(seeds[1:], cells, methods):
        point = runs.start(method) if mode == "none" else best_point(runs, cell, method, seeds[:1])
        yield cell, method, [point], seed


def _value(table: Mapping[str, Any], path: tuple[str, ...], values: tuple[float, ...]) -> float:
    """The table's value at ``path``, or the middle of the axis."""
    for key in path:
        if key not in table:
            return values[1]
        table = table[key]
    return float(table)  # type: ignore[arg-type]


def _nested(path: tuple[str, ...], value: float) -> dict[str, Any]:
    """A table with ``value`` at ``path``."""
    return {path[0]: _nested(path[1:], value) if path[1:] else value}
