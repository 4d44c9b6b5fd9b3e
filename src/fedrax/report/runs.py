"""Run directories read back, and their summary statistics. Reading runs no code that an experiment names."""

from __future__ import annotations

import json
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.files import open_regular_file, read_toml
from fedrax.simulation.persistence import checkpoint, run_description
from fedrax.simulation.persistence.run_description import EXPERIMENT, read_description
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.results.events import Event, holds, read_events, rounds_done
from fedrax.simulation.results.result import cost_to_target

RUNTIME = "runtime"
"""Key in the table of a federation, whose value describes it; simulations have none."""
_DEPLOYED = " (deployed)"
"""What the label of a federation ends with, beside simulations of the same name."""
COMPARISON = "comparison.json"
"""File in the directory of a comparison: its table and its search, as JSON."""
MAX_COMPARISON = 64 << 20
"""Largest size in bytes, enough for a thousand grid points of many methods."""
_DRAWN = 1e150
"""Largest mean that is drawn: beyond it an axis has no ticks, and the run has diverged."""


@dataclass(frozen=True, repr=False)
class SavedRun:
    """The contents of a run directory, whose run may be finished or not."""

    directory: Path
    """The run directory."""
    table: dict[str, Any]
    """The experiment, as in experiment.toml."""
    events: list[Event]
    """An event for each finished round."""
    failure: str | None
    """Why the run diverged, if it did."""
    spent: bool = False
    """Whether the run ended because its privacy budget was spent."""
    privacy: str | None = None
    """What the epsilon of a private run bounds: neighbors, adversary, sampling and delta."""

    @property
    def seed(self) -> int | None:
        """The run's seed; None for a federation whose random numbers are secret."""
        seed = self.table["run"]["seed"]
        return None if seed == "none" else int(seed)

    @property
    def federation(self) -> bool:
        """Whether the clients were nodes of a federation, so that times and messages are measured."""
        return RUNTIME in self.table

    @property
    def rounds(self) -> int:
        """Rounds of the experiment."""
        return int(self.table["run"]["rounds"])

    @property
    def rounds_done(self) -> int:
        """Rounds that are done."""
        return rounds_done(self.events)

    @property
    def validation(self) -> bool:
        """Whether the run was evaluated on validation data instead of test data."""
        return bool(self.table.get("validation"))

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        target = self.table["run"].get("target", "none")
        reached = target != "none" and cost_to_target(self.events, "test_accuracy", target) is not None
        done = bool(self.events) and self.rounds_done >= self.rounds
        return done or reached or self.spent or self.failure is not None

    @property
    def state(self) -> str:
        """The state of the run in words."""
        if self.failure is not None:
            return f"diverged in round {self.rounds_done + 1}"
        if self.spent:
            return f"budget spent in round {self.rounds_done}"
        return "finished" if self.finished else f"round {self.rounds_done} of {self.rounds}"

    def __repr__(self) -> str:
        """The directory, the seed and the state: the table and the events would be pages."""
        return f"SavedRun({str(self.directory)!r}, seed {self.seed}, {self.state})"


@dataclass(frozen=True, repr=False)
class MethodRuns:
    """Runs of one method that differ in their seeds."""

    label: str
    """Name of the method in tables."""
    runs: Sequence[SavedRun]
    settings: str = ""
    """Its selected settings and its own run settings, as text."""

    @property
    def failure(self) -> str | None:
        """The state of a run that diverged, if one did."""
        return next((run.state for run in self.runs if run.failure is not None), None)

    def __repr__(self) -> str:
        """The label, the settings, and the number of runs in each state."""
        states = Counter(run.state for run in self.runs)
        runs = ", ".join(f"{count} run{'s' * (count > 1)} {state}" for state, count in states.items())
        return f"MethodRuns({', '.join([repr(self.label), *[self.settings] * bool(self.settings), runs or 'no runs'])})"


@checked_arguments
def read_run(directory: Path | str) -> SavedRun:
    """Read a run directory.

    Args:
        directory: The run directory.

    Returns:
        The experiment and the events so far.

    Raises:
        FedraxError: If the directory holds no run or its files are damaged.

    Example:
        >>> experiment = fedrax.experiments.Experiment()
        >>> _ = fedrax.experiments.experiment.write(experiment, "r/experiment.toml")
        >>> fedrax.report.read_run("r").state
        'round 0 of 100'
    """
    directory = Path(directory)
    table = read_table(directory)
    events = read_events(directory) if (directory / "events.jsonl").exists() else []
    failed = directory / FAILURE  # empty after a full disk
    failure = checkpoint.load_meta(failed).get("error") if checkpoint.exists(failed) else None
    saved = directory / CHECKPOINT
    limited = isinstance(table["run"].get("epsilon_budget"), int | float) and checkpoint.exists(saved)
    spent = limited and checkpoint.load_meta(saved).get("stopped") == "budget"
    described = read_description(directory)
    privacy = None if described is None else described.privacy
    return SavedRun(directory, table, events, None if failure is None else str(failure), spent, privacy)


def read_table(directory: Path) -> dict[str, Any]:
    """Read the experiment of a run: experiment.toml, or run.json of a run that Python code has started.

    Rounds, seed and target are checked to be numbers. The table of a federation has the key ``RUNTIME``.
    """
    described, path = read_description(directory), directory / EXPERIMENT
    federation = described is not None and described.federation
    if described is not None and described.experiment is not None and not path.exists():
        path, table = directory / run_description.FILE, dict(described.experiment)
    else:
        table = read_toml(path)
    run, algorithm = table.get("run"), table.get("algorithm")
    if not isinstance(run, dict) or not isinstance(algorithm, dict) or not {"seed", "rounds"} <= run.keys():
        raise FedraxError(f"{path} is not the complete experiment of a run.")
    may_be_none = {"target", "seed"} if federation else {"target"}
    for key, kind in (("seed", int), ("rounds", int), ("target", (int, float))):
        value = run.get(key, "none")
        if (value != "none" or key not in may_be_none) and (not isinstance(value, kind) or isinstance(value, bool)):
            raise FedraxError(f"{path}: run.{key} must be a number, not {value!r:.40}.")
    return table | {RUNTIME: described.plan} if described is not None and federation else table


def how_to_resume(directory: Path) -> str:
    """The command or the call that resumes a run."""
    try:
        described = read_description(directory)
    except FedraxError:
        described = None
    if described is not None and described.federation:
        return (
            "start the server app again with resume=True, or `flwr run` with --run-config resume=true for an app that"
            " fedrax deploy has written"
        )
    if described is not None and described.experiment is not None and not (directory / EXPERIMENT).exists():
        return "run the Python program that started it again, with resume=True"
    return f"fedrax resume {shlex.quote(str(directory))}"


def directories_of_runs(path: Path, depths: Sequence[str] = ("**",)) -> list[Path]:
    """The run directories below a path, sorted; ``depths``: patterns of their places."""
    names = (EXPERIMENT, run_description.FILE)
    return sorted({file.parent for depth in depths for name in names for file in path.glob(f"{depth}/{name}")})


@checked_arguments
def find_runs(path: Path | str) -> list[SavedRun]:
    """Read the run in a directory, or all runs below it.

    Runs of a search, on validation data, are returned only where there are no others.

    Args:
        path: A run directory, or a directory of several such as that of a comparison.

    Returns:
        The runs, sorted by path.

    Raises:
        FedraxError: If there is no run, or one is damaged.

    Example:
        >>> for seed in range(2):
        ...     experiment = fedrax.experiments.Experiment(run=fedrax.Settings(seed=seed))
        ...     fedrax.experiments.experiment.write(experiment, f"seeds/{seed}/experiment.toml")
        >>> [run.seed for run in fedrax.report.find_runs("seeds")]
        [0, 1]
    """
    path = Path(path)
    if any((path / name).is_file() for name in (EXPERIMENT, run_description.FILE)):
        return [read_run(path)]
    found = [read_run(directory) for directory in directories_of_runs(path)]
    if not found:
        raise FedraxError(f"{path} holds no run: there is no {EXPERIMENT} or {run_description.FILE} in it.")
    shown = [run for run in found if not run.validation] or found
    chosen = {path / directory for directory in read_comparison(path).get("directories", [])}
    current = {_name(run) for run in shown if run.directory.parent in chosen}
    # Not those of the comparison's methods with earlier settings, or settings that a later search did not select
    return [run for run in shown if run.directory.parent in chosen or _name(run) not in current]


def _name(run: SavedRun) -> str:
    """The name of a run's experiment, in a comparison the label of its method."""
    return str(run.table.get("name", ""))


def read_comparison(directory: Path) -> dict[str, Any]:
    """Read comparison.json, empty without the file; raises FedraxError for a damaged one."""
    path = directory / COMPARISON
    if not path.exists():
        return {}
    try:
        with open_regular_file(path, MAX_COMPARISON) as file:
            found = json.loads(file.read().decode())
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.get("directories", [])):
            raise ValueError("not a table, or directories are not strings")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FedraxError(f"{path} is damaged: {error!r:.200}.") from error
    return found


def _without_duplicates(runs: Sequence[SavedRun]) -> list[SavedRun]:
    """Drop duplicates: of runs with equal experiment and seed, keep the one with the most rounds."""
    found: dict[str, SavedRun] = {}
    for run in runs:
        secret = str(run.directory.resolve()) if run.seed is None else ""  # two such runs are never equal
        key = secret + json.dumps(run.table, sort_keys=True, default=str)
        if key not in found or run.rounds_done > found[key].rounds_done:
            found[key] = run
    return list(found.values())


def group(runs: Sequence[SavedRun]) -> list[MethodRuns]:
    """Group runs that differ only in their seeds, under unique labels."""
    groups: dict[str, list[SavedRun]] = {}
    for run in _without_duplicates(runs):
        settings = {k: v for k, v in run.table["run"].items() if k != "seed"}
        groups.setdefault(json.dumps(run.table | {"run": settings}, sort_keys=True, default=str), []).append(run)
    methods = [str(runs[0].table["algorithm"].get("name", "")).rpartition(":")[2] for runs in groups.values()]
    given = [str(runs[0].table.get("name", method)) for runs, method in zip(groups.values(), methods, strict=True)]
    suffixes = [_DEPLOYED if runs[0].federation else "" for runs in groups.values()]
    names = [[name + end for name, end in zip(each, suffixes, strict=True)] for each in (given, methods)]
    names.append([runs[0].directory.name for runs in groups.values()])
    names.append([str(runs[0].directory) for runs in groups.values()])
    if len(groups) == 1 and names[0] == ["experiment"]:
        names.pop(0)
    labels = next((each for each in names if len(set(each)) == len(each)), names[-1])
    return [MethodRuns(label, runs) for label, runs in zip(labels, groups.values(), strict=True)]


def wire_megabytes(event: Event) -> float | None:
    """Cumulative bytes of all messages of a federation, in MB; None for simulated clients."""
    down, up = event.get("wire_bytes_down"), event.get("wire_bytes_up")
    return None if down is None or up is None else (down + up) / 1e6


def megabytes(event: Event) -> float:
    """Cumulative traffic of all clients, down and up, in MB (10^6 bytes)."""
    return (event["bytes_down"] + event["bytes_up"]) / 1e6


def last_values(events: Sequence[Event]) -> dict[str, float]:
    """The last value of every metric."""
    merged: dict[str, float] = {}
    for event in events:
        merged |= event
    return merged


def summary_line(events: Sequence[Event]) -> str:
    """Summarize a run: 'test accuracy 0.912, test loss 0.31 after 50 rounds, 12.3 MB, 5,000 gradients, 4.2 s'."""
    if not events:
        return "no rounds yet"
    last = last_values(events)
    first, after = ("test_accuracy", "test_mse"), ("test_loss", "train_loss", "frobenius_error", "rank", "epsilon")
    asked_for = [key for key in last if key.startswith("test_") and "_client" not in key and key not in after]
    known = dict.fromkeys([*first, *asked_for, *after])
    names = [key for key in known if key in asked_for or last.get(key) is not None]
    shown = ((name.replace("_", " "), last[name]) for name in names)
    values = ", ".join(f"{name} {'undefined' if value is None else f'{value:.4g}'}" for name, value in shown)
    cost = f"{megabytes(events[-1]):.4g} MB, {last['gradients']:,} gradients, {last['seconds']:.3g} s"
    return f"{values} after {last['round']} rounds, {cost}"


def main_metric(methods: Sequence[MethodRuns]) -> str:
    """The metric to compare by: test accuracy if it is reported, otherwise test loss."""
    keys = {key for method in methods for run in method.runs for event in run.events for key in event}
    return "test_accuracy" if "test_accuracy" in keys else "test_loss"


def curve(method: MethodRuns, metric: str) -> pl.DataFrame:
    """Mean and standard deviation of a metric over seeds, at rounds where every run that ever reports it does.

    Columns: round, megabytes, mean, low, high (mean -+ one standard deviation); empty where there are no such rounds.
    """
    having = [[e for e in run.events if holds(e, metric)] for run in method.runs]
    rows = [
        {"round": e["round"], "megabytes": megabytes(e), "value": float(e[metric])} for events in having for e in events
    ]
    table = pl.DataFrame(rows, {"round": pl.Int64, "megabytes": pl.Float64, "value": pl.Float64})
    value = pl.col("value")
    return (
        table.group_by("round")
        .agg(pl.col("megabytes").mean(), value.mean().alias("mean"), value.std().fill_null(0).alias("std"), pl.len())
        .filter(pl.col("len") == sum(map(bool, having)), pl.col("mean").abs() < _DRAWN)
        .sort("round")
        .select("round", "megabytes", "mean", low=pl.col("mean") - pl.col("std"), high=pl.col("mean") + pl.col("std"))
    )


LOG_RATIO = 20.0
"""Ratio of the largest to the smallest mean above which an axis of losses is logarithmic."""
LOG_BAND = 10.0
"""Factor by which bands may extend a logarithmic axis below the smallest mean."""


def needs_log_axis(means: Sequence[float]) -> bool:
    """Whether an axis of losses is logarithmic: all positive, and over more than a factor of ``LOG_RATIO``."""
    return bool(means) and min(means) > 0 and max(means) > LOG_RATIO * min(means)


def log_limits(means: Sequence[float], lows: Sequence[float], highs: Sequence[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis that shows means > 0 and the edges of their bands, mean -+ standard deviation.

    Lower edges more than a factor of ``LOG_BAND`` below the smallest mean, and those at or below zero, which such an
    axis does not have, are outside: charts draw these bands down to the axis' lower end.
    """
    smallest = min(means)
    shown = [low for low in lows if low > smallest / LOG_BAND]
    return min([smallest, *shown]) / 1.25, 1.25 * max(v for v in [*means, *highs] if math.isfinite(v))


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of one value), without overflow of sums and squares."""
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values), math.nan
    if min(values) == max(values):  # the rounded mean may differ from all of them
        return values[0], 0.0
    scale = math.ldexp(1.0, math.frexp(max(map(abs, values)))[1] - 1)  # scaling by a power of two is exact
    scaled = [value / scale for value in values]
    mean = math.fsum(scaled) / len(scaled)
    squares = math.fsum((value - mean) ** 2 for value in scaled)
    return scale * mean, scale * math.sqrt(squares / (len(scaled) - 1))


@dataclass(frozen=True)
class Statistic:
    """A mean over seeds, and the sample standard deviation (None for one seed)."""

    mean: float
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Statistic | None:
        """The statistic of some values, None if there are none."""
        if not values:
            return None
        mean, deviation = mean_and_deviation(values)
        return cls(mean, None if len(values) == 1 else deviation)


@dataclass(frozen=True)
class MethodSummary:
    """A method's row in the table of a comparison: statistics over seeds."""

    label: str
    seeds: int
    """Number of runs."""
    state: str
    accuracy: Statistic | None
    """Final test accuracy."""
    loss: Statistic | None
    """Final test loss."""
    reached: int
    """Number of seeds that reached the target."""
    rounds: Statistic | None
    """Rounds, megabytes, seconds and gradients to the target, None unless all seeds reached it."""
    megabytes: Statistic | None
    seconds: Statistic | None
    gradients: Statistic | None = None
    all_gradients: Statistic | None = None
    """Gradients of single samples that all clients have computed in all rounds."""
    epsilon: Statistic | None = None
    """Privacy loss of private runs."""
    epsilon_paper: Statistic | None = None
    best: Statistic | None = None
    """The best value of the metric to compare by."""
    best_round: Statistic | None = None
    """Its round."""
    others: dict[str, Statistic | None] = field(default_factory=dict)
    """Final values of other metrics, see `other_metrics`; None where one is not defined."""
    settings: str = ""
    """Settings of the method, as text."""
    worst_samples: tuple[int, ...] = ()
    """Sample counts of the worst clients, one for each seed."""
    federation: bool = False
    """Whether the clients were nodes of a federation."""
    guarantee: str | None = None
    """What epsilon bounds: neighbors, adversary, sampling and delta."""
    first_loss: Statistic | None = None
    """Test loss of the first evaluation."""
    difference: Statistic | None = None
    """Metric to compare by minus that of the best method with the same seed; None for the best, see `paired_with`."""
    paired_with: str = ""
    """The label of that method."""


OWN_MODELS = ("_personal_", "_finetuned_")
"""Parts of the names of metrics of personal models."""


def other_metrics(lasts: Sequence[dict[str, Any]]) -> dict[str, Statistic | None]:
    """The metrics besides test accuracy and loss, None where one is not defined in any run.

    Other test metrics, those of personal models, and of per-client metrics the worst client and the 10th or 90th
    percentile: the 10th of accuracies, the 90th of losses.
    """
    known = {name for last in lasts for name in last if name.startswith(("test_", "train_"))}
    whole = {name for name in known if "_client" not in name}
    chosen = {name for name in whole if name.startswith("test_") or any(kind in name for kind in OWN_MODELS)}
    kind = "accuracy" if any(name.endswith("_accuracy_worst_client") for name in known) else "loss"
    bad = "p10" if kind == "accuracy" else "p90"
    chosen |= {name for name in known if name.endswith((f"_{kind}_worst_client", f"_{kind}_client_{bad}"))}
    names = sorted(chosen)
    hidden = ("test_accuracy", "test_loss", "test_mse")  # the mean squared error is the loss
    return {name: Statistic.of(_defined(lasts, name)) for name in names if name not in hidden}


def _defined(lasts: Sequence[dict[str, Any]], name: str) -> list[float]:
    """The values of a metric in the runs that have one."""
    return [last[name] for last in lasts if last.get(name) is not None]


def best_of(run: SavedRun, metric: str) -> tuple[float, int] | None:
    """(best value, its first round) of a metric in a run."""
    values = [(event[metric], event["round"]) for event in run.events if event.get(metric) is not None]
    sign = -1 if metric == "test_accuracy" else 1
    return min(values, key=lambda entry: sign * entry[0], default=None)


def summarize(method: MethodRuns, target: float | None, metric: str = "test_accuracy") -> MethodSummary:
    """Final test metrics and the cost to reach the target, None unless all seeds reached it."""
    lasts = [last_values(run.events) for run in method.runs]
    reached = [] if target is None else [cost_to_target(list(run.events), metric, target) for run in method.runs]
    costs = [entry for entry in reached if entry is not None]
    complete = bool(costs) and len(costs) == len(method.runs)
    best_values = [top for run in method.runs if (top := best_of(run, metric)) is not None]
    return MethodSummary(
        label=method.label,
        seeds=len(method.runs),
        state=method.failure or _state(method.runs),
        accuracy=Statistic.of(_defined(lasts, "test_accuracy")),
        loss=Statistic.of(_defined(lasts, "test_loss")),
        reached=len(costs),
        rounds=Statistic.of([entry["rounds"] for entry in costs]) if complete else None,
        megabytes=Statistic.of([entry["bytes"] / 1e6 for entry in costs]) if complete else None,
        seconds=Statistic.of([entry["seconds"] for entry in costs]) if complete else None,
        gradients=Statistic.of([entry["gradients"] for entry in costs]) if complete else None,
        all_gradients=Statistic.of([last["gradients"] for last in lasts if "gradients" in last]),
        epsilon=Statistic.of(_defined(lasts, "epsilon")),
        epsilon_paper=Statistic.of(_defined(lasts, "epsilon_paper")),
        best=Statistic.of([value for value, _ in best_values]),
        best_round=Statistic.of([at for _, at in best_values]),
        others=other_metrics(lasts),
        settings=method.settings,
        worst_samples=tuple(samples for last in lasts for samples in _worst_client_samples(last)),
        federation=method.runs[0].federation,
        guarantee=next((run.privacy for run in method.runs if run.privacy is not None), None),
        first_loss=Statistic.of([first for run in method.runs if (first := _first_loss(run)) is not None]),
    )


def summarize_all(
    methods: Sequence[MethodRuns], target: float | None, metric: str = "test_accuracy"
) -> list[MethodSummary]:
    """The rows of a table, with the paired differences to the method with the best mean.

    Runs with the same seed have the same data, cohorts and initial parameters, so that differences between them vary
    less than the runs. There are none with fewer than two common seeds.
    """
    rows = [summarize(method, target, metric) for method in methods]
    finals = [_finals(method, metric) for method in methods]
    sign = -1 if metric == "test_accuracy" else 1
    averages = [Statistic.of(list(values.values())) for values in finals]
    means = [math.inf if found is None else sign * found.mean for found in averages]
    if len(rows) < 2 or min(means) == math.inf:
        return rows
    top = means.index(min(means))
    for i, values in enumerate(finals):
        common = sorted(values.keys() & finals[top].keys())
        if i != top and len(common) >= 2:
            found = Statistic.of([values[seed] - finals[top][seed] for seed in common])
            rows[i] = replace(rows[i], difference=found, paired_with=rows[top].label)
    return rows


def _finals(method: MethodRuns, metric: str) -> dict[int, float]:
    """The last value of a metric for each seed; empty if a run diverged or a seed is repeated or secret."""
    seeds = [run.seed for run in method.runs]
    if method.failure or None in seeds or len(set(seeds)) < len(seeds):
        return {}
    lasts = {run.seed: last_values(run.events).get(metric) for run in method.runs}
    return {seed: value for seed, value in lasts.items() if seed is not None and value is not None}


def _first_loss(run: SavedRun) -> float | None:
    """The test loss of the first evaluation."""
    return next((event["test_loss"] for event in run.events if event.get("test_loss") is not None), None)


def _state(runs: Sequence[SavedRun]) -> str:
    """The state of all seeds together."""
    states = {run.state for run in runs}
    if len(states) == 1:
        return states.pop()
    if not all(run.finished for run in runs):
        return "running"
    spent = [run.rounds_done for run in runs if run.spent]
    return f"budget spent in rounds {min(spent)} to {max(spent)}" if len(spent) == len(runs) else "finished"


def _worst_client_samples(last: dict[str, float]) -> list[int]:
    """Sample counts of the worst clients."""
    kind = "accuracy" if any(name.endswith("_accuracy_worst_client") for name in last) else "loss"
    ending = f"_{kind}_worst_client_samples"
    return [int(samples) for name, samples in last.items() if name.endswith(ending) and samples is not None]


def target_of(methods: Sequence[MethodRuns], given: float | None = None) -> tuple[float | None, bool]:
    """(target accuracy whose cost is shown, whether it was given).

    ``given``, or the target at which all runs end; otherwise 95 % of the best method's mean final accuracy, rounded
    down to the percent, and None without an accuracy.
    """
    ends = {run.table["run"].get("target", "none") for method in methods for run in method.runs}
    if given is None and len(ends) == 1 and "none" not in ends:
        (given,) = ends
    if given is not None:
        return given, True
    converged = [method for method in methods if method.failure is None] or methods
    finals = [row.accuracy.mean for m in converged if (row := summarize(m, None)).accuracy is not None]
    known = [final for final in finals if math.isfinite(final)]
    return (math.floor(95 * max(known)) / 100 or None) if known else None, False


def finite(value: Any) -> Any:
    """Replace non-finite floats by None, since JSON has none."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
