"""Grid search: run every point of a grid of hyper-parameters and select the best by validation data."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax

from fedrax.config.annotations import fields_of
from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation, hold_out
from fedrax.errors import FedraxError, describe_value, each_warning_once, unknown
from fedrax.simulation.evaluation import PERSONAL, is_lower_better, warn_of_direction
from fedrax.simulation.results.events import Event, rounds_done
from fedrax.simulation.settings import Settings, SettingsOptions
from fedrax.simulation.validate import changed_settings
from fedrax.tuning.sweeps import resolve_seeds, sweep

NEAR = 0.05
"""Relative distance to the end of a range below which a value is reported as being at the end."""


@dataclass(frozen=True)
class SearchRange:
    """Search range of a number, integers where both ends are integers."""

    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Whether values are uniform in their logarithm."""

    @property
    def is_integer(self) -> bool:
        """Whether its values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def position(self, value: float) -> float:
        """The relative position of a value, from 0 (``low``) to 1 (``high``), on the range's scale."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / (high - low)

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{':log' * self.log}"


@dataclass(frozen=True)
class Trial:
    """One point of a search with the outcome of its runs."""

    point: Mapping[str, Any]
    """The value of each hyper-parameter, by path (``local.lr``)."""
    value: float | None
    """The validation metric after the last round, mean over seeds; None where a run diverged."""
    rounds: int
    """Rounds of the run that diverged first, or all rounds."""
    metric: str | None = None
    """Name of the metric if it is that of the global model, because the method has no personal models."""


@dataclass(frozen=True)
class SearchResult:
    """The trials of one method's search and the best of them."""

    metric: str
    """Name of the validation metric."""
    lower_is_better: bool
    """Whether smaller values of the metric are better."""
    trials: tuple[Trial, ...]
    """All points that were run."""
    ranges: Mapping[str, SearchRange] = dataclasses.field(default_factory=dict)
    """The range of each path whose values were drawn from a range; the other paths had lists of values."""

    @property
    def best(self) -> Trial:
        """The trial with the best value; where all diverged, the one that ran the most rounds."""
        sign = 1 if self.lower_is_better else -1
        finished = [trial for trial in self.trials if trial.value is not None]
        if not finished:
            return max(self.trials, key=lambda trial: trial.rounds)
        return min(finished, key=lambda trial: sign * trial.value)  # type: ignore[operator]

    def at_ends(self) -> list[str]:
        """Find hyper-parameters whose best value is the smallest or largest tried: values beyond it may be better.

        Returns:
            Their paths. A smallest value of zero is not reported.
        """
        return [path for path in self.best.point if self.end(path) is not None]

    def end(self, path: str) -> str | None:
        """Tell at which end of the values tried the best value of a hyper-parameter is.

        Args:
            path: path of the hyper-parameter.

        Returns:
            ``"smallest"`` or ``"largest"`` where it is at or near that end, otherwise None.
        """
        if path in self.ranges:
            position = self.ranges[path].position(self.best.point[path])
            near = "smallest" if position < NEAR else "largest" if position > 1 - NEAR else None
            return None if self.best.value is None else near
        values = {trial.point[path] for trial in self.trials if _is_number(trial.point[path])}
        best = self.best.point[path]
        if len(values) < 2 or not _is_number(best) or self.best.value is None:
            return None
        if best == max(values):
            return "largest"
        return "smallest" if best == min(values) and best != 0 else None


def is_at_end(results: Mapping[str, SearchResult]) -> bool:
    """Whether a best value of a search is at an end of its grid or range, so that a value beyond may be better."""
    return any(result.at_ends() for result in results.values())


@dataclass(frozen=True)
class TuningResult(SearchResult):
    """Result of :func:`tune`.

    Example:
        >>> from fedrax.tuning.selection import Trial
        >>> trials = (Trial({"local.lr": 0.1}, 0.7, 5), Trial({"local.lr": 1.0}, 0.9, 5))
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 3))
        >>> fedrax.tuning.TuningResult("accuracy", False, trials, algorithm=fedrax.FedAvg(), task=task)
        Tuned by validation accuracy:
          local.lr 0.1: 0.7
          local.lr 1.0: 0.9 *
          the best local.lr is the largest tried
    """

    algorithm: Algorithm = dataclasses.field(kw_only=True)
    """The algorithm with the best hyper-parameters."""
    task: Task = dataclasses.field(kw_only=True)
    """The task, with the best settings where it is a function of settings."""

    def __repr__(self) -> str:
        """One line for each trial, the best one marked."""
        lines = [f"Tuned by validation {self.metric}:"]
        for trial in self.trials:
            words = ", ".join(f"{path} {value}" for path, value in trial.point.items())
            value = f"diverged in round {trial.rounds + 1}" if trial.value is None else f"{trial.value:.4g}"
            lines.append(f"  {words}: {value}{' *' if trial is self.best else ''}")
        lines += [f"  the best {path} is the {self.end(path)} tried" for path in self.at_ends()]
        return "\n".join(lines)


@checked_arguments
def tune(
    algorithm: Algorithm,
    task: Task | Callable[..., Task],
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
    """Search a grid of hyper-parameters by validation data.

    A share of every client's training samples is held out for validation; test data are not used. Every combination of
    the grid is run; combinations that differ in floats of the algorithm only are vectorized (:func:`fedrax.sweep`).

    Args:
        algorithm: the algorithm whose hyper-parameters are searched.
        task: loss and metrics; or a function that makes a task of settings in the grid, such as
            ``lambda rank: classification(lora(model, params, example, rank=rank))``.
        federation: the clients' data.
        grid: values by path, ``{"local.lr": (0.01, 0.1), "server_optimizer": (SGD(), Adam())}``. A path that is the
            name of a parameter of ``task`` is an argument of it: ``{"rank": (2, 8), "local.lr": (0.01, 0.1)}``.
        settings: settings of all runs.
        validation: share of each client's training samples that is held out.
        seeds: seeds over which the metric is averaged; by default the seed of the settings.
        metric: metric to choose by, after the last round; by default accuracy, or the loss where there is none.
        progress: show a progress line in terminals and notebooks.
        **options: settings by name, as in :func:`fedrax.simulate`.

    Returns:
        All trials, and the algorithm and the task with the best hyper-parameters.

    Raises:
        FedraxError: for a path that the algorithm does not have, an empty grid, and an unknown metric.

    Example:
        >>> x, y = np.eye(20, dtype=np.float32), np.arange(20) % 2
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=np.arange(20) // 10, num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((20,), 2))

        >>> grid = {"local.lr": (0.1, 1.0)}
        >>> found = fedrax.tuning.tune(fedrax.FedAvg(), task, federation, grid, rounds=1, cohort_size=2)

        >>> [trial.point for trial in found.trials]
        [{'local.lr': 0.1}, {'local.lr': 1.0}]
    """
    seeds = resolve_seeds(seeds, settings, options)
    settings = changed_settings(settings, options)
    if not grid or not all(len(values) for values in grid.values()):
        raise FedraxError("a grid needs a path and values for it: {'local.lr': (0.01, 0.03, 0.1)}")
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    tasks, of_algorithm = _tasks_at(task, points)
    candidates = [with_values(algorithm, point) for point in of_algorithm]
    metric = selection_metric(tasks[0], metric)
    for one in dict.fromkeys(tasks[1:]):
        selection_metric(one, metric)  # raises if it is unknown
    held = hold_out(federation, validation)
    runs: dict[int, list[Any]] = {}
    with each_warning_once():
        for one in dict.fromkeys(tasks):
            own = [i for i, other in enumerate(tasks) if other is one]
            for positions in group_by_structure([candidates[i] for i in own]):
                group = [own[i] for i in positions]
                found = sweep([candidates[i] for i in group], one, held, seeds, settings, progress=progress)
                runs |= dict(zip(group, found, strict=True))
    trials = tuple(
        make_trial(point, [(run.events, run.stopped == "diverged") for run in runs[i]], metric)
        for i, point in enumerate(points)
    )
    metric, lower = metric_of(trials, metric), is_lower_better(tasks[0], metric)
    choice = SearchResult(metric, lower, trials)
    best = next(i for i, trial in enumerate(trials) if trial is choice.best)
    return TuningResult(metric, choice.lower_is_better, trials, algorithm=candidates[best], task=tasks[best])


def _tasks_at(
    task: Task | Callable[..., Task], points: Sequence[Mapping[str, Any]]
) -> tuple[list[Task], list[dict[str, Any]]]:
    """The task at each point, one object for equal settings, and the settings that are the algorithm's."""
    if isinstance(task, Task):
        return [task] * len(points), [dict(point) for point in points]
    parameters = inspect.signature(task).parameters
    if missing := [name for name, p in parameters.items() if p.default is p.empty and name not in points[0]]:
        raise FedraxError(f"the grid has no values for {', '.join(missing)}, which the function task needs")
    made: dict[str, Task] = {}
    tasks: list[Task] = []
    for point in points:
        own = {name: value for name, value in point.items() if name in parameters}
        key = repr(own)
        if key not in made:
            made[key] = task(**own)
        if not isinstance(made[key], Task):
            raise FedraxError(f"the function task must return a Task, not {describe_value(made[key])}")
        tasks.append(made[key])
    return tasks, [{path: value for path, value in point.items() if path not in parameters} for point in points]


def selection_metric(task: Task, name: str | None) -> str:
    """The metric of the search: ``name``, or by default accuracy, or the loss if the task has no accuracy.

    With the prefix ``PERSONAL`` it is that of the clients' personal models, for methods that have some.
    """
    known = ("loss", *task.metrics, *task.whole_set)
    if name is None:
        return "accuracy" if "accuracy" in known else "loss"
    if name.removeprefix(PERSONAL) not in known:
        raise unknown("metric of the search:", name, (*known, *(PERSONAL + metric for metric in known)))
    warn_of_direction(task, name)
    return name


def make_trial(point: Mapping[str, Any], runs: Sequence[tuple[Sequence[Event], bool]], metric: str) -> Trial:
    """The trial of a point from its runs: their events, and whether each diverged."""
    rounds = min(rounds_done(events) for events, _ in runs)
    if any(diverged for _, diverged in runs):
        return Trial(point, None, rounds)
    key, used = f"test_{metric}", None  # of the validation data, which replace the test data
    if not any(key in event for events, _ in runs for event in events):  # a method without personal models
        used = metric.removeprefix(PERSONAL)
        key = f"test_{used}"
    finals = [next((event[key] for event in reversed(events) if key in event), None) for events, _ in runs]
    if None in finals:
        undefined = any(key in event for events, _ in runs for event in events)
        problem = f"{metric} is undefined (null) on the validation data" if undefined else f"no run reports {metric}"
        raise FedraxError(f"{problem}, and it is the metric of the search: choose another one")
    return Trial(point, math.fsum(finals) / len(finals), rounds, used)  # type: ignore[arg-type]


def metric_of(trials: Iterable[Trial], metric: str) -> str:
    """The metric that was compared: ``metric``, or that of the global model for a method without personal models."""
    return next((trial.metric for trial in trials if trial.metric is not None), metric)


def group_by_structure(algorithms: Sequence[Algorithm]) -> list[list[int]]:
    """Group the positions of algorithms that differ in float hyper-parameters only."""
    groups: dict[Any, list[int]] = {}
    for i, algorithm in enumerate(algorithms):
        groups.setdefault(jax.tree.structure(algorithm), []).append(i)
    return list(groups.values())


def with_values(config: Any, point: Mapping[str, Any]) -> Any:
    """A copy of a configuration with the fields at the paths of ``point`` replaced."""
    for path in sorted(point, key=lambda path: path.count(".")):
        config = _replaced(config, path.split("."), point[path], path)
    return config


def _replaced(config: Any, names: list[str], value: Any, path: str) -> Any:
    """A copy of a configuration with one field replaced."""
    if not dataclasses.is_dataclass(config):
        raise FedraxError(f"the grid's {path}: {config!r} has no settings")
    if names[0] not in fields_of(type(config)):  # type: ignore[arg-type]
        raise unknown(f"setting of {type(config).__name__} in the grid's {path}:", names[0], fields_of(type(config)))  # type: ignore[arg-type]
    if len(names) > 1:
        value = _replaced(getattr(config, names[0]), names[1:], value, path)
    return dataclasses.replace(config, **{names[0]: value})  # type: ignore[type-var]


def _is_number(value: Any) -> bool:
    """Whether a value is a number, not a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)
