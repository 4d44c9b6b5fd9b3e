"""The data of a report, read from run directories: runs, searches, partitions and machines.

Files may come from other users: they are validated, and no code that they name is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedrax.errors import FedraxError
from fedrax.files import flatten, open_regular_file
from fedrax.report import search_plots
from fedrax.report.runs import (
    COMPARISON,
    MethodRuns,
    SavedRun,
    find_runs,
    group,
    main_metric,
    read_comparison,
    target_of,
)
from fedrax.simulation.persistence.client_summary import ClientSummary, read_client_summary
from fedrax.tuning.selection import SearchRange, SearchResult, Trial

ENVIRONMENT = "environment.json"
_MAX_DEPTH = 8
"""Limit of nested lists or tables in one setting."""


@dataclass(frozen=True)
class SearchOutcome:
    """The search of a comparison."""

    validation: float
    """Share of the training rows that was held out."""
    seeds: tuple[int, ...]
    """Seeds of the search."""
    results: Mapping[str, SearchResult]
    """The results, by label."""
    lines: Sequence[str]
    """Its description, as printed by the command."""


@dataclass(frozen=True)
class ReportSource:
    """A requested directory and its methods."""

    directory: Path
    name: str
    """Name of the comparison or run."""
    methods: Sequence[MethodRuns]
    target: float | None = None
    """Target of the comparison."""
    search: SearchOutcome | None = None
    """Search of the comparison."""


@dataclass(frozen=True)
class ReportData:
    """The data of a report."""

    sources: Sequence[ReportSource]
    methods: Sequence[MethodRuns]
    """The methods of all sources, under unique labels."""
    target: float | None
    given: bool
    """Whether the user set the target."""
    repeated: Sequence[Path] = ()
    """Directories of runs that equal one of ``methods`` in all settings and the seed, and are left out."""

    @property
    def metric(self) -> str:
        """The metric to compare by."""
        return main_metric(self.methods)

    @property
    def runs(self) -> list[SavedRun]:
        """Every run."""
        return [run for method in self.methods for run in method.runs]

    def clients(self) -> list[ClientSummary]:
        """The distinct partitions of the runs; empty without clients.json files."""
        return list(
            dict.fromkeys(found for run in self.runs if (found := read_client_summary(run.directory)) is not None)
        )

    def environments(self) -> list[tuple[dict[str, str], int]]:
        """The distinct machines and versions, each with the number of its runs."""
        counts: dict[tuple[tuple[str, str], ...], int] = {}
        for run in self.runs:
            if (run.directory / ENVIRONMENT).exists():
                facts = tuple(read_environment(run.directory).items())
                counts[facts] = counts.get(facts, 0) + 1
        return [(dict(facts), count) for facts, count in counts.items()]


def about_repeated(directories: Sequence[Path]) -> str:
    """A sentence about runs that are left out; empty without any."""
    if not directories:
        return ""
    first, more = directories[0], len(directories) - 1
    return f"left out, because a run shown has the same settings and seed: {first}{f' and {more} more' * (more > 0)}."


def gather(directories: Sequence[Path], target: float | None = None) -> ReportData:
    """Read directories, each run once.

    Runs outside of comparisons that differ in their seeds only are one method, also across directories.

    Args:
        directories: Run directories or directories of runs; raises FedraxError for one without runs or a damaged one.
        target: Target accuracy; by default that of the first comparison, otherwise 95 % of the best method's.

    Returns:
        The data.
    """
    places: dict[Path, Path] = {}
    for path in directories:
        places.setdefault(path.resolve(), path)
    saved = {path: read_comparison(path) for path in places.values()}
    requested: dict[Path, Path] = {}
    read: list[SavedRun] = []
    sources: list[ReportSource] = []
    for path in sorted(
        saved, key=lambda path: not saved[path]
    ):  # comparisons first, since they have labels and settings
        runs = [run for run in find_runs(path) if requested.setdefault(run.directory.resolve(), path) == path]
        read += runs
        if runs:
            sources.append(_source(path, saved[path], group(runs)))
    methods = [method for source in sources if saved[source.directory] for method in source.methods]
    plain = [method for source in sources if not saved[source.directory] for method in source.methods]
    methods = _unique_labels(methods + group([run for method in plain for run in method.runs]), requested)
    used = {run.directory.resolve() for method in methods for run in method.runs}
    repeated = [found.directory for found in read if found.directory.resolve() not in used]
    theirs = next((source.target for source in sources if source.target is not None), None)
    return ReportData(sources, methods, *target_of(methods, target if target is not None else theirs), repeated)


def _unique_labels(methods: Sequence[MethodRuns], requested: Mapping[Path, Path]) -> list[MethodRuns]:
    """The methods under unique labels: equal ones are prefixed by the name or the path of their directory, or a number.

    ``requested`` maps each run's directory to the requested directory that contains it.
    """
    places = [requested[method.runs[0].directory.resolve()] for method in methods]
    before = (
        [""] * len(methods),
        [f"{place.resolve().name}: " for place in places],
        [f"{place}: " for place in places],
        [f"{number}: " for number in range(1, len(methods) + 1)],
    )
    ways = ([f"{word}{m.label}" for word, m in zip(words, methods, strict=True)] for words in before)
    labels = next(labels for labels in ways if len(set(labels)) == len(labels))
    return [replace(method, label=label) for method, label in zip(methods, labels, strict=True)]


def _source(directory: Path, saved: dict[str, Any], methods: Sequence[MethodRuns]) -> ReportSource:
    """The source of a directory; ``saved``: its comparison.json, empty if it has none."""
    if not saved:
        only = methods[0] if len(methods) == 1 else None
        name = directory.resolve().name if only is None else str(only.runs[0].table.get("name", only.label))
        return ReportSource(directory, name, methods)
    try:
        return _comparison_source(saved, directory, methods)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        raise FedraxError(f"{directory / COMPARISON} is damaged: {error!r:.200}.") from error


def _comparison_source(saved: Any, directory: Path, methods: Sequence[MethodRuns]) -> ReportSource:
    """The methods in the order of the comparison, with their selected settings; raises for invalid values."""
    settings = {str(row["label"]): str(row.get("settings", "")) for row in saved["methods"]}
    order = {label: place for place, label in enumerate(settings)}
    shown = [replace(m, settings=settings.get(m.label, m.settings)) for m in methods]
    shown.sort(key=lambda method: order.get(method.label, len(order)))
    target = None if saved.get("target_is_default") or saved.get("target") is None else _number(saved["target"])
    return ReportSource(
        directory, str(saved["name"]), shown, target, _search(saved["search"]) if "search" in saved else None
    )


def _search(saved: Any) -> SearchOutcome:
    """The search in comparison.json; raises for invalid values."""
    search_results = {}
    for label, found in saved["methods"].items():
        trials = tuple(_trial(trial) for trial in found["trials"])
        paths = {tuple(trial.point) for trial in trials}
        if len(paths) != 1:
            raise ValueError(f"the grid of {label!r} has no settings, or different ones from point to point")
        lower = found.get("lower_is_better", found["metric"] == "loss")
        ranges = {str(path): _range(within) for path, within in found.get("ranges", {}).items()}
        search_results[label] = SearchResult(str(found["metric"]), bool(lower), trials, ranges)
    share, seeds = _number(saved["validation"]), tuple(int(seed) for seed in saved["seeds"])
    if not all(isinstance(line, str) for line in saved.get("lines", [])):
        raise ValueError("the lines of the search are not strings")
    return SearchOutcome(
        share, seeds, search_results, list(saved.get("lines", [])) or search_plots.lines(search_results, share, seeds)
    )


def _range(saved: Any) -> SearchRange:
    """A search range; raises for invalid values."""
    low, high, log = _number(saved["low"]), _number(saved["high"]), saved["log"] is True
    if not low < high or (log and low <= 0):
        raise ValueError(f"the range {low} to {high} is empty")
    return SearchRange(low, high, log)


def _trial(saved: Any) -> Trial:
    """A trial; raises for invalid values."""
    value = saved["value"]
    point = {str(path): _value(found) for path, found in saved["point"].items()}
    return Trial(point, None if value is None else _number(value), int(saved["rounds"]))


def _value(found: Any, depth: int = 0) -> Any:
    """A setting: a finite number, a string, a boolean, or lists and tables of these; raises for others."""
    if depth > _MAX_DEPTH:
        raise ValueError("a setting is nested too deeply")
    if isinstance(found, dict):
        return {name: _value(one, depth + 1) for name, one in found.items()}
    if isinstance(found, list):
        return [_value(one, depth + 1) for one in found]
    return found if isinstance(found, bool | str) else type(found)(_number(found))


def _number(value: Any) -> float:
    """A finite number; raises for other values."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} is not a number")
    return float(value)


def read_environment(directory: Path) -> dict[str, str]:
    """Read environment.json as text values; raises FedraxError for a damaged file."""
    path = directory / ENVIRONMENT
    try:
        with open_regular_file(path) as file:
            found = json.loads(file.read(1 << 20).decode())
        return {str(name): _words(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise FedraxError(f"{path} does not describe the machine of a run: {error!r:.200}.") from error


def _words(value: Any) -> str:
    """A value as text, shortened."""
    if isinstance(value, list):
        return f"{len(value)}: {', '.join(map(str, value[:8]))}{', …' if len(value) > 8 else ''}"
    return str(value)[:500]


def differences(methods: Sequence[MethodRuns]) -> dict[str, list[Any]]:
    """The settings except seeds in which methods differ: for each path the values of all methods, None if unset."""
    tables = [flatten(method.runs[0].table, keep_empty=True) for method in methods]
    paths = dict.fromkeys(path for table in tables for path in table if path not in ("name", "run.seed"))
    values = {path: [table.get(path) for table in tables] for path in paths}
    return {path: found for path, found in values.items() if len(set(map(repr, found))) > 1}
