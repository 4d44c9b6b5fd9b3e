"""Run directories as tables of numbers. Reading them runs no code of the experiment's."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from fedrax.errors import FedraxError
from fedrax.files import read_table, reading
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.results.events import Event, holds, read_events
from fedrax.simulation.results.result import cost_to_target

COMPARISON = "comparison.json"
"""In the directory of a comparison: its methods and its search, in numbers."""
MAX_COMPARISON = 64 << 20
"""Its bytes: a thousand points of many methods."""
_DRAWN = 1e150
"""Up to which an axis has ticks: a run whose means are beyond has diverged."""


@dataclass(frozen=True)
class Run:
    """A run directory as it is now."""

    directory: Path
    table: dict[str, Any]
    """experiment.toml."""
    events: list[Event]
    failure: str | None
    """Why the run stopped early, if it did: a number that was not finite."""
    spent: bool = False
    """Whether the privacy budget ended it."""

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.table["run"]["seed"])

    @property
    def rounds(self) -> int:
        """Rounds asked for."""
        return int(self.table["run"]["rounds"])

    @property
    def validation(self) -> bool:
        """Whether it was evaluated on validation data, in place of the test data."""
        return bool(self.table.get("validation"))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        target = self.table["run"].get("target", "none")
        reached = target != "none" and cost_to_target(self.events, "test_accuracy", target) is not None
        return len(self.events) >= self.rounds or reached or self.spent or self.failure is not None

    @property
    def state(self) -> str:
        """In words."""
        if self.failure is not None:
            return f"diverged in round {len(self.events) + 1}"
        if self.spent:
            return f"budget spent in round {len(self.events)}"
        return "finished" if self.finished else f"round {len(self.events)} of {self.rounds}"


@dataclass(frozen=True)
class Method:
    """Runs of one experiment that differ in their seeds."""

    label: str
    runs: Sequence[Run]
    settings: str = ""
    """What it has otherwise than the methods beside it: what a search chose, settings of its runs."""

    @property
    def failure(self) -> str | None:
        """How a run of them diverged, if one did."""
        return next((run.state for run in self.runs if run.failure is not None), None)


def read_run(directory: Path) -> Run:
    """The run in ``directory``; FedraxError if there is none or its files are damaged."""
    table = read_experiment(directory)
    events = read_events(directory) if (directory / "events.jsonl").exists() else []
    failed = directory / FAILURE  # empty where a full disk left no room for the state
    failure = checkpoint.load_meta(failed).get("error") if checkpoint.exists(failed) else None
    kept = directory / CHECKPOINT
    limited = isinstance(table["run"].get("epsilon_budget"), int | float) and checkpoint.exists(kept)
    spent = limited and checkpoint.load_meta(kept).get("stopped") == "budget"
    return Run(directory, table, events, None if failure is None else str(failure), spent)


def read_experiment(directory: Path) -> dict[str, Any]:
    """The table of a run's experiment.toml, in which seed, rounds and target are numbers; FedraxError otherwise."""
    table = read_table(directory / "experiment.toml")
    run, algorithm = table.get("run"), table.get("algorithm")
    if not isinstance(run, dict) or not isinstance(algorithm, dict) or not {"seed", "rounds"} <= run.keys():
        raise FedraxError(f"{directory / 'experiment.toml'} is not the complete experiment of a run.")
    for key, kind in (("seed", int), ("rounds", int), ("target", (int, float))):
        value = run.get(key, "none")
        if (value != "none" or key != "target") and (not isinstance(value, kind) or isinstance(value, bool)):
            raise FedraxError(f"{directory / 'experiment.toml'}: run.{key} is {value!r:.40}, which is no number.")
    return table


def find_runs(path: Path) -> list[Run]:
    """The run in ``path``, or all runs below it; those on validation data only where there are no others."""
    if (path / "experiment.toml").is_file():
        return [read_run(path)]
    left = _settings_left(path)
    found = [read_run(file.parent) for file in sorted(path.glob("**/experiment.toml"))]
    if not found:
        raise FedraxError(f"{path} holds no run: there is no experiment.toml in it.")
    shown = [run for run in found if not run.validation] or found
    return [run for run in shown if not left(run.directory.parent)] or shown


def _settings_left(path: Path) -> Callable[[Path], bool]:
    """Whether a directory has a method's runs with settings that a later search of the comparison did not choose."""
    chosen = {path / place for place in read_comparison(path).get("places", [])}
    methods = {place.parent for place in chosen} - {path}
    return lambda directory: directory.parent in methods and directory not in chosen


def read_comparison(directory: Path) -> dict[str, Any]:
    """What a comparison keeps of itself, empty where the directory is of none; FedraxError where it is damaged."""
    path = directory / COMPARISON
    if not path.exists():
        return {}
    try:
        with reading(path, MAX_COMPARISON) as file:
            found = json.loads(file.read().decode())
        if not isinstance(found, dict) or not all(isinstance(place, str) for place in found.get("places", [])):
            raise ValueError("no table, or places that are no names")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FedraxError(f"{path} is not what a comparison keeps: {error!r:.200}.") from error
    return found


def _once(runs: Sequence[Run]) -> list[Run]:
    """Of runs that differ in nothing, not the seed, the one that is furthest: a run made twice is one seed."""
    found: dict[str, Run] = {}
    for run in runs:
        key = json.dumps(run.table, sort_keys=True, default=str)
        if key not in found or len(run.events) > len(found[key].events):
            found[key] = run
    return list(found.values())


def group(runs: Sequence[Run]) -> list[Method]:
    """Runs that differ in their seeds only, together, under a name that tells them apart."""
    groups: dict[str, list[Run]] = {}
    for run in _once(runs):
        settings = {k: v for k, v in run.table["run"].items() if k != "seed"}
        groups.setdefault(json.dumps(run.table | {"run": settings}, sort_keys=True, default=str), []).append(run)
    names = [[str(runs[0].table.get("name", "")) for runs in groups.values()]]
    names.append([str(runs[0].table["algorithm"].get("name", "")).rpartition(":")[2] for runs in groups.values()])
    names.append([runs[0].directory.name for runs in groups.values()])
    names.append([str(runs[0].directory) for runs in groups.values()])
    if len(groups) == 1 and names[0] == ["experiment"]:
        names.pop(0)
    labels = next((each for each in names if len(set(each)) == len(each)), names[-1])
    return [Method(label, runs) for label, runs in zip(labels, groups.values(), strict=True)]


def megabytes(event: Event) -> float:
    """What all clients received and sent until this round, in MB (10^6 bytes)."""
    return (event["bytes_down"] + event["bytes_up"]) / 1e6


def last_values(events: Sequence[Event]) -> dict[str, float]:
    """The last value of every key."""
    merged: dict[str, float] = {}
    for event in events:
        merged |= event
    return merged


def summary_line(events: Sequence[Event]) -> str:
    """A run in a line: 'test accuracy 0.912, test loss 0.31 after 50 rounds, 12.3 MB, 4.2 s'."""
    if not events:
        return "no rounds yet"
    last = last_values(events)
    first, after = ("test_accuracy", "test_mse"), ("test_loss", "train_loss", "frobenius_error", "rank", "epsilon")
    asked_for = [key for key in last if key.startswith("test_") and "_client" not in key and key not in after]
    names = [key for key in dict.fromkeys([*first, *asked_for, *after]) if last.get(key) is not None]
    values = ", ".join(f"{name.replace('_', ' ')} {last[name]:.4g}" for name in names)
    return f"{values} after {last['round']} rounds, {megabytes(events[-1]):.4g} MB, {last['seconds']:.3g} s"


def main_metric(methods: Sequence[Method]) -> str:
    """What to compare by: test accuracy where there is one, else test loss."""
    keys = {key for method in methods for run in method.runs for event in run.events for key in event}
    return "test_accuracy" if "test_accuracy" in keys else "test_loss"


def curve(method: Method, metric: str) -> pl.DataFrame:
    """Mean and deviation of a metric over the seeds, at the rounds where every run of the method that has it ever does.

    Columns: round, megabytes, mean, low, high (mean -+ one standard deviation); empty where nothing can be drawn.
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


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 of one value) of numbers whose sum or squares may be beyond all floats."""
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values), math.nan
    if min(values) == max(values):  # their mean may be rounded
        return values[0], 0.0
    scale = math.ldexp(1.0, math.frexp(max(map(abs, values)))[1] - 1)  # a power of two: nothing is rounded by it
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
        """None where there are no values."""
        if not values:
            return None
        mean, deviation = mean_and_deviation(values)
        return cls(mean, None if len(values) == 1 else deviation)


@dataclass(frozen=True)
class Row:
    """A method's line in the table of a comparison."""

    label: str
    seeds: int
    state: str
    accuracy: Statistic | None
    loss: Statistic | None
    reached: int
    """Seeds that reached the target."""
    rounds: Statistic | None
    megabytes: Statistic | None
    seconds: Statistic | None
    epsilon: Statistic | None = None
    """What private runs have spent."""
    epsilon_paper: Statistic | None = None
    best: Statistic | None = None
    """The best value of what methods are compared by, and its round."""
    best_round: Statistic | None = None
    others: dict[str, Statistic] = field(default_factory=dict)
    """Final values of the other metrics on test data."""
    settings: str = ""
    worst_samples: tuple[int, ...] = ()
    """The samples behind the worst clients, of each seed."""


OWN_MODELS = ("_personal_", "_finetuned_")
"""Of metrics of clients' own models."""


def other_metrics(lasts: Sequence[dict[str, float]]) -> dict[str, Statistic]:
    """The metrics besides test accuracy and loss.

    Other test metrics, those of personal models, and of per-client metrics the worst client and the 10th or 90th
    percentile, whichever is the bad end.
    """
    known = {name for last in lasts for name in last if name.startswith(("test_", "train_"))}
    whole = {name for name in known if "_client" not in name}
    chosen = {name for name in whole if name.startswith("test_") or any(kind in name for kind in OWN_MODELS)}
    kind = "accuracy" if any(name.endswith("_accuracy_worst_client") for name in known) else "loss"
    bad = "p10" if kind == "accuracy" else "p90"
    chosen |= {name for name in known if name.endswith((f"_{kind}_worst_client", f"_{kind}_client_{bad}"))}
    names = sorted(chosen)
    found = {name: Statistic.of([last[name] for last in lasts if name in last]) for name in names}
    hidden = ("test_accuracy", "test_loss", "test_mse")  # the mean squared error is the loss
    return {name: value for name, value in found.items() if value is not None and name not in hidden}


def best_of(run: Run, metric: str) -> tuple[float, int] | None:
    """(best value, its first round) of a metric in a run."""
    values = [(event[metric], event["round"]) for event in run.events if metric in event]
    sign = -1 if metric == "test_accuracy" else 1
    return min(values, key=lambda entry: sign * entry[0], default=None)


def summarize(method: Method, target: float | None, metric: str = "test_accuracy") -> Row:
    """Final test values, and what it took to reach the target (over the seeds that did; None if not all did)."""
    lasts = [last_values(run.events) for run in method.runs]
    reached = [] if target is None else [cost_to_target(list(run.events), metric, target) for run in method.runs]
    took = [entry for entry in reached if entry is not None]
    complete = bool(took) and len(took) == len(method.runs)
    pick = {name: Statistic.of([entry[name] for entry in took]) if complete else None for name in ("rounds", "seconds")}
    tops = [top for run in method.runs if (top := best_of(run, metric)) is not None]
    return Row(
        label=method.label,
        seeds=len(method.runs),
        state=method.failure or _state(method.runs),
        accuracy=Statistic.of([last["test_accuracy"] for last in lasts if "test_accuracy" in last]),
        loss=Statistic.of([last["test_loss"] for last in lasts if "test_loss" in last]),
        reached=len(took),
        rounds=pick["rounds"],
        megabytes=Statistic.of([entry["bytes"] / 1e6 for entry in took]) if complete else None,
        seconds=pick["seconds"],
        epsilon=Statistic.of([last["epsilon"] for last in lasts if last.get("epsilon") is not None]),
        epsilon_paper=Statistic.of([last["epsilon_paper"] for last in lasts if last.get("epsilon_paper") is not None]),
        best=Statistic.of([value for value, _ in tops]),
        best_round=Statistic.of([at for _, at in tops]),
        others=other_metrics(lasts),
        settings=method.settings,
        worst_samples=tuple(samples for last in lasts for samples in _behind_the_worst(last)),
    )


def _state(runs: Sequence[Run]) -> str:
    """Of all seeds together."""
    states = {run.state for run in runs}
    if len(states) == 1:
        return states.pop()
    if not all(run.finished for run in runs):
        return "running"
    spent = [len(run.events) for run in runs if run.spent]
    return f"budget spent in rounds {min(spent)} to {max(spent)}" if len(spent) == len(runs) else "finished"


def _behind_the_worst(last: dict[str, float]) -> list[int]:
    """How many samples the worst clients of a table's columns have."""
    kind = "accuracy" if any(name.endswith("_accuracy_worst_client") for name in last) else "loss"
    return [int(samples) for name, samples in last.items() if name.endswith(f"_{kind}_worst_client_samples")]


def target_of(methods: Sequence[Method], given: float | None = None) -> tuple[float | None, bool]:
    """(the accuracy whose cost is shown, whether somebody chose it).

    ``given``, or the one at which all runs end; else 95 % of the best method's mean final accuracy, to the percent, and
    None where there is no accuracy.
    """
    ends = {run.table["run"].get("target", "none") for method in methods for run in method.runs}
    if given is None and len(ends) == 1 and "none" not in ends:
        (given,) = ends
    if given is not None:
        return given, True
    sound = [method for method in methods if method.failure is None] or methods
    finals = [row.accuracy.mean for m in sound if (row := summarize(m, None)).accuracy is not None]
    known = [final for final in finals if math.isfinite(final)]
    return (math.floor(95 * max(known)) / 100 or None) if known else None, False


def finite(value: Any) -> Any:
    """For JSON, which knows no infinity: null in its place."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
