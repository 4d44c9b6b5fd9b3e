"""Sections of a report with curves and with metrics over clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from fedrax.metrics import is_share
from fedrax.report.comparison_table import metric_name
from fedrax.report.curves import METRICS, PERSONAL_METRICS
from fedrax.report.report_data import ReportData
from fedrax.report.runs import MethodRuns, last_values, mean_and_deviation, megabytes
from fedrax.report.svg import ChartCurve, ClientQuantiles, chart, shown, spreads, swatch
from fedrax.simulation.results.events import Event, holds

T = TypeVar("T")
X_AXES: dict[str, tuple[str, str, Callable[[Event], float]]] = {
    "round": ("rounds", "communication rounds", lambda event: event["round"]),
    "megabytes": ("megabytes", "traffic of all clients, down and up (MB)", megabytes),
    "gradients": ("gradients", "gradients of single samples, by all clients", lambda event: event["gradients"]),
    "seconds": ("seconds", "seconds, without compilation", lambda event: event["seconds"]),
}
"""The x axes: text of the switch, label of the axis, and the position of an event on it."""
_MOST_CHARTS, _MOST_POINTS, _ALL_POINTS = 8, 300, 40_000
"""Limits of the charts of a page, the points of a curve, and the points of all curves, which keep pages small."""


def hiding_style(methods: int) -> str:
    """CSS rules by which the checkboxes of the legend hide methods."""
    return "".join(f"body:has(#m{i}:not(:checked)) .m{i}{{display:none}}\n" for i in range(methods))


def metrics_of(data: ReportData) -> list[str]:
    """The metrics to draw: the main metric first, then the training loss, other known metrics and the rest."""
    names = dict.fromkeys(key for run in data.runs for event in run.events for key in event if holds(event, key))
    kinds = ("test_", "train_", *(name for name in METRICS if "_" not in name or name == "frobenius_error"))
    found = [name for name in names if name.startswith(kinds) and "_client" not in name]
    found += [name for name in names if name == "epsilon"]
    return sorted(found, key=lambda name: (name != data.metric, name == "train_loss", list(METRICS).count(name) == 0))


def section(data: ReportData) -> str:
    """The legend, the switch of the axes, and a chart for each metric."""
    metrics = metrics_of(data)
    if not metrics:
        return '<p class="note">No round has finished.</p>'
    drawn = metrics[:_MOST_CHARTS]
    most = max(30, min(_MOST_POINTS, _ALL_POINTS // (len(data.methods) * len(drawn) * len(X_AXES))))
    cards = "".join(f'<div class="card">{_charts(data, metric, most)}</div>' for metric in drawn)
    band = any(len(method.runs) > 1 for method in data.methods)
    note = "Lines are means over seeds, bands one standard deviation. " if band else ""
    if any(run.rounds_done > most for run in data.runs):
        note += f"For longer runs about {most} rounds are drawn. "
    if len(metrics) > len(drawn):
        note += f"Not drawn: {', '.join(metrics[_MOST_CHARTS : _MOST_CHARTS + 20])}. "
    hint = '<span class="on-screen">Point at a chart, or use the arrow keys, to see its values; click a name in the'
    hint += " legend to hide a method.</span>"
    return f'{_controls(data)}<div class="pair">{cards}</div><p class="note">{shown(note)}{hint}</p>'


def _controls(data: ReportData) -> str:
    """The switch of the x axis, and the legend."""
    switch = "".join(
        f'<label><input type="radio" name="axis" id="on-{key}"{" checked" * (key == "round")}>{word}</label>'
        for key, (word, _, _) in X_AXES.items()
    )
    legend = "".join(
        f'<label><input type="checkbox" id="m{i}" checked>{swatch(i)}<span>{shown(method.label)}</span></label>'
        for i, method in enumerate(data.methods)
    )
    return f'<div class="controls"><div class="axes">{switch}</div><div class="legend">{legend}</div></div>'


def _charts(data: ReportData, metric: str, most: int) -> str:
    """Charts of a metric against each x axis, one of which is visible."""
    name = (METRICS | PERSONAL_METRICS).get(metric, metric.replace("_", " "))
    made = []
    for key, (_, axis, place) in X_AXES.items():
        curves = [_curve(method, i, metric, place, most) for i, method in enumerate(data.methods)]
        target = data.target if metric == data.metric else None
        share = is_share(metric_name(metric))
        made.append(chart(curves, axis, name, target=target, share=share, css=f"on-{key}"))
    return f"<h3>{shown(name)}</h3>{''.join(made)}"


def _curve(method: MethodRuns, index: int, metric: str, place: Callable[[Event], float], most: int) -> ChartCurve:
    """Means at the rounds that all runs have; the single runs, too, if they differ in their rounds."""
    known = [events for run in method.runs if (events := [e for e in run.events if holds(e, metric)])]
    if not known:
        return ChartCurve(method.label, index, [])
    shared = set.intersection(*({event["round"] for event in events} for events in known))
    by_round = zip(*([e for e in events if e["round"] in shared] for events in known), strict=True)
    points = [
        (_mean([place(event) for event in events]), *mean_and_deviation([float(event[metric]) for event in events]))
        for events in by_round
    ]
    uneven = any(len(events) > len(shared) for events in known)
    runs = [_thinned([(place(e), float(e[metric])) for e in events], most) for events in known] if uneven else []
    return ChartCurve(method.label, index, _thinned(points, most), runs)


def _mean(values: Sequence[float]) -> float:
    """The mean without overflow."""
    return mean_and_deviation(values)[0]


def _thinned(points: Sequence[T], most: int) -> list[T]:
    """About ``most`` of the points at equal distances, with the first and the last."""
    step = -(-len(points) // most) or 1
    thinned = list(points[::step])
    return thinned if not points or (len(points) - 1) % step == 0 else [*thinned, points[-1]]


def spreads_of(data: ReportData) -> list[str]:
    """A chart for each metric that the runs report per client."""
    lasts = [[last_values(run.events) for run in method.runs] for method in data.methods]
    end = "_client_p50"
    names = dict.fromkeys(k.removesuffix(end) for each in lasts for last in each for k in last if k.endswith(end))
    ranked = sorted(names, key=lambda name: ("accuracy" not in name, "loss" in name))
    made = []
    for name in ranked[:6]:
        rows = []
        for i, (method, each) in enumerate(zip(data.methods, lasts, strict=True)):
            found = [_spread_values(last, name) for last in each]
            values = [one for one in found if one is not None]
            if values:
                low, median, high, worst, _ = (_mean(column) for column in zip(*values, strict=True))
                few, many = min(v[4] for v in values), max(v[4] for v in values)
                samples = f"{few:g}" if few == many else f"{few:g} to {many:g}"
                rows.append(ClientQuantiles(method.label, i, low, median, high, worst, samples))
        if rows:
            made.append(spreads(rows, f"{name.replace('_', ' ')} of a client"))
    return made


def _spread_values(last: dict[str, float], name: str) -> tuple[float, ...] | None:
    """(10th percentile, median, 90th percentile, worst client, its number of samples), None if not all are known."""
    keys = [f"{name}_{part}" for part in ("client_p10", "client_p50", "client_p90", "worst_client")]
    if not all(holds(last, key) for key in keys):
        return None
    return (*(float(last[key]) for key in keys), float(last.get(f"{name}_worst_client_samples", 0)))
