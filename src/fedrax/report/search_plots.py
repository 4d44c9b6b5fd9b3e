"""A hyper-parameter search as figures and text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedrax.escaping import escape_matplotlib, format_setting, format_settings, short_path
from fedrax.report.curves import DASHES, PALETTE, legend_columns, set_scale
from fedrax.report.runs import COMPARISON, log_limits, needs_log_axis
from fedrax.tuning.selection import SearchResult, Trial

_MOST_TRIALS = 10
"""Trials of a method that are printed: a grid may have a thousand."""


def draw_grids(search_results: Mapping[str, SearchResult], title: str = "") -> Figure:
    """Draw the validation metric against each setting, with a line for each method.

    Each point is the best over the other settings of the grid. A ring marks the selected value; a cross at the lower
    edge (the upper one if smaller values are better) marks a value at which every run diverged. Axes of positive
    settings over more than a factor of five are logarithmic, those of losses as in `draw_curves`.
    """
    paths = varied_paths(search_results)
    columns = min(len(paths), 3)
    rows = math.ceil(len(paths) / columns)
    figure = Figure(figsize=(max(5.5, 4.2 * columns), 0.9 + 3.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(paths) :]:
        axes.remove()
    for axes, path in zip(grid.flat, paths, strict=False):
        _panel(axes, path, search_results)
    handles = {
        label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    across = legend_columns(figure, list(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=across, frameon=False)
    if title:
        figure.suptitle(escape_matplotlib(title), x=0.01, ha="left", fontsize="medium")
    return figure


def varied_paths(search_results: Mapping[str, SearchResult]) -> list[str]:
    """The settings of which several values were tried; all settings if there are none."""
    values: dict[str, set[str]] = {}
    for result in search_results.values():
        for trial in result.trials:
            for path, value in trial.point.items():
                values.setdefault(path, set()).add(repr(value))
    return [path for path, found in values.items() if len(found) > 1] or list(values)


def _panel(axes: Axes, path: str, search_results: Mapping[str, SearchResult]) -> None:
    """Draw the metric against one setting."""
    shown = {label: result for label, result in search_results.items() if path in result.trials[0].point}
    places = _places([trial.point[path] for result in shown.values() for trial in result.trials])
    metric, drawn = next(iter(shown.values())), []
    for i, (label, result) in enumerate(search_results.items()):
        if label not in shown:
            continue
        best = best_over_the_others(path, result)
        xs, color = [places(value) for value, _ in best], PALETTE[i % len(PALETTE)]
        ys = [math.nan if trial.value is None else trial.value for _, trial in best]
        dash = DASHES[(i // len(PALETTE)) % len(DASHES)]
        dash = "none" if path in result.ranges else dash  # sampled values differ in the other settings: no curve
        axes.plot(xs, ys, color=color, linestyle=dash, marker="o", markersize=4, label=escape_matplotlib(label))
        chosen = result.best
        if chosen.value is not None:
            axes.plot(places(chosen.point[path]), chosen.value, "o", color=color, markersize=11, fillstyle="none")
        lost = [x for x, (_, trial) in zip(xs, best, strict=True) if trial.value is None]
        edge = 0.97 if metric.lower_is_better else 0.03
        axes.plot(lost, [edge] * len(lost), "x", color=color, transform=axes.get_xaxis_transform())
        drawn += [y for y in ys if math.isfinite(y)]
    is_log = "accuracy" not in metric.metric and needs_log_axis(drawn)
    set_scale(axes, metric.metric, log_limits(drawn, drawn, drawn) if is_log else None)
    _axes(axes, path, metric, [trial.point[path] for result in shown.values() for trial in result.trials])


def best_over_the_others(path: str, result: SearchResult) -> list[tuple[Any, Trial]]:
    """For each value of a setting the best trial over the other settings, sorted if values are numbers."""
    groups: dict[str, list[Trial]] = {}
    for trial in result.trials:
        groups.setdefault(repr(trial.point[path]), []).append(trial)
    found = [
        (trials[0].point[path], SearchResult(result.metric, result.lower_is_better, tuple(trials)).best)
        for trials in groups.values()
    ]
    return sorted(found, key=lambda entry: entry[0]) if are_numbers([value for value, _ in found]) else found


def are_numbers(values: Sequence[Any]) -> bool:
    """Whether all values are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _places(values: Sequence[Any]) -> Any:
    """A function from values to positions on the axis: numbers themselves, or the indices of names."""
    if are_numbers(values):
        return float
    names = list(dict.fromkeys(map(format_setting, values)))
    return lambda value: names.index(format_setting(value))


def _axes(axes: Axes, path: str, result: SearchResult, values: Sequence[Any]) -> None:
    """Set labels, scale and ticks."""
    axes.set_xlabel(escape_matplotlib(short_path(path)))
    axes.set_ylabel(f"validation {escape_matplotlib(result.metric)}")
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not are_numbers(values):
        names = list(dict.fromkeys(map(format_setting, values)))
        axes.set_xticks(range(len(names)), [escape_matplotlib(name) for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
        return
    if min(values) > 0 and max(values) > 5 * min(values):
        axes.set_xscale("log")
    ticks = sorted(set(map(float, values)))
    places = [math.log(tick) for tick in ticks] if axes.get_xscale() == "log" else ticks
    gaps = [after - before for before, after in pairwise(places)]
    if all(gap > 0.09 * (places[-1] - places[0]) for gap in gaps):  # else their numbers would overlap
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def lines(
    search_results: Mapping[str, SearchResult],
    share: float,
    seeds: Sequence[int],
    trials: int | None = None,
    fixed: Sequence[str] = (),
) -> list[str]:
    """Describe the search: the criterion, the selected settings, and warnings.

    ``fixed`` are the labels of the methods that were not searched.
    """
    of_trials = "" if trials is None else f", from up to {trials} settings of each method that Optuna proposed"
    described = [
        f"selected by the {' and '.join(dict.fromkeys(c.metric for c in search_results.values()))} on validation data,"
        f" {100 * share:g} % of each client's training rows, with seed{'s' * (len(seeds) > 1)}"
        f" {', '.join(map(str, seeds))}{of_trials}; the table is of test data, after training on all rows:"
    ]
    for label, result in search_results.items():
        best, lost = result.best, sum(trial.value is None for trial in result.trials)
        value = "every point diverged" if best.value is None else f"{result.metric} {best.value:.4g}"
        diverged = f", {lost} diverged" if lost and best.value is not None else ""
        described.append(f"  {label}: {format_settings(best.point)} ({value}; {len(result.trials)} points{diverged})")
    return described + warnings(search_results, fixed)


def trial_lines(search_results: Mapping[str, SearchResult]) -> list[str]:
    """The best trials of each method on validation data, a line each."""
    found = []
    for label, result in search_results.items():
        ranked = sorted(result.trials, key=partial(_rank, result.lower_is_better))
        found.append(f"{label}: validation {result.metric}")
        for trial in ranked[:_MOST_TRIALS]:
            value = "diverged" if trial.value is None else f"{trial.value:.4g}"
            found.append(f"  {format_settings(trial.point)}: {value}")
        if len(ranked) > _MOST_TRIALS:
            found.append(f"  and {len(ranked) - _MOST_TRIALS} more in {COMPARISON}")
    return found


def _rank(lower_is_better: bool, trial: Trial) -> float:
    """A key that sorts the best trial first."""
    if trial.value is None or math.isnan(trial.value):
        return math.inf
    return trial.value if lower_is_better else -trial.value


def _unequal_searches(search_results: Mapping[str, SearchResult], fixed: Sequence[str]) -> list[str]:
    """A warning if methods had different numbers of trials; the ``fixed`` ones had one."""
    counts = {label: len(result.trials) for label, result in search_results.items()} | dict.fromkeys(fixed, 1)
    if len(set(counts.values())) < 2:
        return []
    tried = ", ".join(f"{label} {count}" for label, count in counts.items())
    return [
        f"warning: the methods had different numbers of trials ({tried}): more trials find better settings, so give all"
        " methods as many before you compare them"
    ]


def warnings(search_results: Mapping[str, SearchResult], fixed: Sequence[str] = ()) -> list[str]:
    """A warning for each best value at an end of its grid, with all methods that have it, and for unequal searches."""
    found: dict[str, list[str]] = {}
    for label, result in search_results.items():
        for path in result.at_ends():
            how = (
                f"near the {result.end(path)} of its range; a value beyond may be better: widen the range"
                if path in result.ranges
                else f"the {result.end(path)} of its grid; a value beyond may be better: extend the grid, finished runs"
                " are not repeated"
            )
            text = f"the best {short_path(path)}, {format_setting(result.best.point[path])}, is {how}"
            found.setdefault(text, []).append(label)
    at_ends = [f"warning: {', '.join(labels)}: {text}" for text, labels in found.items()]
    return at_ends + _unequal_searches(search_results, fixed)


def values(search_results: Mapping[str, SearchResult]) -> dict[str, Any]:
    """The search as JSON values."""
    return {
        label: {
            "metric": result.metric,
            "lower_is_better": result.lower_is_better,
            "best": dict(result.best.point),
            "at_end": result.at_ends(),
            "trials": [{"point": dict(t.point), "value": t.value, "rounds": t.rounds} for t in result.trials],
            "ranges": {path: dataclasses.asdict(within) for path, within in result.ranges.items()},
        }
        for label, result in search_results.items()
    }
