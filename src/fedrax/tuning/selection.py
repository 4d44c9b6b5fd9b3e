"""The best of several settings, by validation data: a grid over an algorithm's fields, and which point is chosen."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax

from fedrax.config.annotations import fields_of
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation, hold_out
from fedrax.errors import FedraxError, unknown
from fedrax.simulation.evaluation import is_lower_better
from fedrax.simulation.results.events import Event
from fedrax.simulation.settings import Settings, SettingsOptions
from fedrax.simulation.validate import changed_settings, check_arguments, check_lists
from fedrax.tuning.sweeps import resolve_seeds, sweep

NEAR = 0.05
"""Share of a range that counts as its end."""


@dataclass(frozen=True)
class SearchRange:
    """Numbers from ``low`` to ``high``: whole ones where both ends are; evenly, or evenly in their logarithms."""

    low: float
    high: float
    log: bool = False

    @property
    def whole(self) -> bool:
        """Whether it has whole numbers alone."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def place(self, value: float) -> float:
        """Where a value lies, from 0 (``low``) to 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' * self.log}"


@dataclass(frozen=True)
class Trial:
    """A point of a grid, as its runs came out."""

    point: Mapping[str, Any]
    """The value at each path."""
    value: float | None
    """The metric on validation data after the last round, mean over seeds; None where a run diverged."""
    rounds: int
    """Rounds before the first of the runs diverged, or all."""


@dataclass(frozen=True)
class SearchResult:
    """The trials of one method, and which of them is best."""

    metric: str
    lower_is_better: bool
    trials: tuple[Trial, ...]
    ranges: Mapping[str, SearchRange] = dataclasses.field(default_factory=dict)
    """The ranges that values were drawn from, by path; other settings had values of their own."""

    @property
    def best(self) -> Trial:
        """The best value, the first of equal ones; where every point diverged, the one that lasted longest."""
        sign = 1 if self.lower_is_better else -1
        sound = [trial for trial in self.trials if trial.value is not None]
        if not sound:
            return max(self.trials, key=lambda trial: trial.rounds)
        return min(sound, key=lambda trial: sign * trial.value)  # type: ignore[operator]

    def at_ends(self) -> list[str]:
        """The paths of numbers whose best value is the smallest or largest tried: values beyond may be better.

        A smallest value of zero has nothing beyond it.
        """
        return [path for path in self.best.point if self.end(path) is not None]

    def end(self, path: str) -> str | None:
        """ "smallest" or "largest" where the best value of a number is so, or near that end of its range, else None."""
        if path in self.ranges:
            place = self.ranges[path].place(self.best.point[path])
            near = "smallest" if place < NEAR else "largest" if place > 1 - NEAR else None
            return None if self.best.value is None else near
        values = {trial.point[path] for trial in self.trials if _is_number(trial.point[path])}
        best = self.best.point[path]
        if len(values) < 2 or not _is_number(best) or self.best.value is None:
            return None
        if best == max(values):
            return "largest"
        return "smallest" if best == min(values) and best != 0 else None


@dataclass(frozen=True)
class TuningResult(SearchResult):
    """What :func:`tune` found."""

    algorithm: Algorithm = dataclasses.field(kw_only=True)
    """The algorithm with the best settings."""

    def __repr__(self) -> str:
        """A line a point, the best one marked."""
        lines = [f"Tuned by validation {self.metric}:"]
        for trial in self.trials:
            words = ", ".join(f"{path} {value}" for path, value in trial.point.items())
            came = f"diverged in round {trial.rounds + 1}" if trial.value is None else f"{trial.value:.4g}"
            lines.append(f"  {words}: {came}{' *' if trial is self.best else ''}")
        lines += [f"  the best {path} is the {self.end(path)} tried" for path in self.at_ends()]
        return "\n".join(lines)


def tune(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    grid: Mapping[str, Sequence[Any]],
    settings: Settings | None = None,
    *,
    validation: float = 0.2,
    seeds: Sequence[int] | None = None,
    metric: str | None = None,
    progress: bool = True,
    **options: Unpack[SettingsOptions],
) -> TuningResult:
    """The best point of a grid over an algorithm's fields, by a share of the clients' training rows held out.

    grid: values by path, ``{"local.lr": (0.01, 0.1), "server_optimizer": (SGD(), Adam())}``; every combination is run,
    those that differ in floats together (:func:`fedrax.sweep`). validation: the share of each client's rows. metric:
    accuracy by default, the loss where there is none, after the last round, mean over ``seeds``, by default the one of
    the settings. settings, options, progress: as of :func:`fedrax.simulate`. The test data is not looked at.

    Raises FedraxError for a path that the algorithm has not, an empty grid, and a metric that the task has not.
    """
    seeds = resolve_seeds(seeds, settings, options)
    settings = changed_settings(settings, options)
    check_arguments(algorithm, task, federation)
    check_lists(seeds=seeds, **{f"the grid's {path}": values for path, values in grid.items()})
    if not grid or not all(len(values) for values in grid.values()):
        raise FedraxError("a grid needs a path and values for it: {'local.lr': (0.01, 0.03, 0.1)}")
    metric = selection_metric(task, metric)
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    candidates = [with_values(algorithm, point) for point in points]
    held = hold_out(federation, validation)
    runs: dict[int, list[Any]] = {}
    for group in group_by_structure(candidates):
        found = sweep([candidates[i] for i in group], task, held, seeds, settings, progress=progress)
        runs |= dict(zip(group, found, strict=True))
    trials = tuple(
        make_trial(point, [(run.events, run.stopped == "diverged") for run in runs[i]], metric)
        for i, point in enumerate(points)
    )
    choice = SearchResult(metric, is_lower_better(task, metric), trials)
    best = candidates[next(i for i, trial in enumerate(trials) if trial is choice.best)]
    return TuningResult(choice.metric, choice.lower_is_better, trials, algorithm=best)


def selection_metric(task: Task, name: str | None) -> str:
    """What to choose by: the metric of that name; unless somebody says accuracy, or the loss where there is none."""
    known = ("loss", *task.metrics, *task.whole_set)
    if name is None:
        return "accuracy" if "accuracy" in known else "loss"
    if name not in known:
        raise unknown("metric to choose by:", name, known)
    return name


def make_trial(point: Mapping[str, Any], runs: Sequence[tuple[Sequence[Event], bool]], metric: str) -> Trial:
    """A point from the events of its runs, each with whether it diverged."""
    rounds = min(len(events) for events, _ in runs)
    if any(diverged for _, diverged in runs):
        return Trial(point, None, rounds)
    key = f"test_{metric}"  # of the rows that stand in place of the test data
    finals = [next((event[key] for event in reversed(events) if key in event), None) for events, _ in runs]
    if None in finals:
        raise FedraxError(f"the runs report no {metric} to choose by")
    return Trial(point, math.fsum(finals) / len(finals), rounds)  # type: ignore[arg-type]


def group_by_structure(algorithms: Sequence[Algorithm]) -> list[list[int]]:
    """The positions of algorithms that differ in floats only, together, in order."""
    groups: dict[Any, list[int]] = {}
    for i, algorithm in enumerate(algorithms):
        groups.setdefault(jax.tree.structure(algorithm), []).append(i)
    return list(groups.values())


def with_values(config: Any, point: Mapping[str, Any]) -> Any:
    """A configuration with the fields at the paths of ``point`` replaced."""
    for path in sorted(point, key=lambda path: path.count(".")):
        config = _replaced(config, path.split("."), point[path], path)
    return config


def _replaced(config: Any, names: list[str], value: Any, path: str) -> Any:
    if not dataclasses.is_dataclass(config):
        raise FedraxError(f"the grid's {path}: {config!r} has no settings")
    if names[0] not in fields_of(type(config)):  # type: ignore[arg-type]
        raise unknown(f"setting of {type(config).__name__} in the grid's {path}:", names[0], fields_of(type(config)))  # type: ignore[arg-type]
    if len(names) > 1:
        value = _replaced(getattr(config, names[0]), names[1:], value, path)
    return dataclasses.replace(config, **{names[0]: value})  # type: ignore[type-var]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
