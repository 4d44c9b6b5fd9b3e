"""Curves of a comparison: mean over seeds with a band of one standard deviation, against rounds and megabytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedrax.escaping import escape_matplotlib
from fedrax.files import write_figure
from fedrax.report.runs import MethodRuns, curve, log_limits, needs_log_axis

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""The palette of Okabe and Ito, for any kind of color vision, without yellow, which is too light for lines."""
DASHES = ("-", "--", "-.", ":")
"""Dash patterns, for more methods than colors."""
METRICS = {
    "frobenius_error": "distance from the true matrix",
    "rank": "rank",
    "test_accuracy": "test accuracy",
    "test_mse": "test mean squared error",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "local_loss": "loss along local steps",
}
PERSONAL_METRICS = {
    "test_personal_accuracy": "test accuracy, personal models",
    "train_personal_accuracy": "training accuracy, personal models",
    "test_finetuned_accuracy": "test accuracy, fine-tuned",
    "train_finetuned_accuracy": "training accuracy, fine-tuned",
}
"""Metrics of personal models, drawn in further rows."""
X_AXES = {"round": "communication rounds", "megabytes": "traffic of all clients, down and up (MB)"}


def draw_curves(
    methods: Sequence[MethodRuns], target: float | None = None, metric: str = "test_accuracy", title: str = ""
) -> Figure:
    """A row of axes for each metric that the runs report, against rounds on the left and megabytes on the right."""
    keys = {key for method in methods for run in method.runs for event in run.events for key in event}
    metrics = [key for key in METRICS if key in keys][:2] + [key for key in PERSONAL_METRICS if key in keys]
    figure = Figure(figsize=(10, 0.9 + 3.2 * max(len(metrics), 1)), layout="constrained")
    grid = figure.subplots(max(len(metrics), 1), 2, squeeze=False, sharey="row")
    for axes_row, key in zip(grid, metrics, strict=False):
        tables = [curve(method, key) for method in methods]
        together = pl.concat(tables)
        is_log = "accuracy" not in key and needs_log_axis(together["mean"].to_list())
        limits = table_log_limits(together) if is_log else None
        for axes, x in zip(axes_row, X_AXES, strict=True):
            for i, (method, table) in enumerate(zip(methods, tables, strict=True)):
                _draw(axes, table, x, escape_matplotlib(method.label), i, limits)
            axes.set_xlabel(X_AXES[x])
            if x == "round":
                axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
            axes.grid(color="0.92", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.set_xlim(left=0)
            if key == metric and target is not None:
                axes.axhline(target, color="0.45", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        axes_row[0].set_ylabel((METRICS | PERSONAL_METRICS)[key])
        set_scale(axes_row[0], key, limits)
        if key == metric and target is not None:
            axes_row[1].annotate(  # beside the axes, where no curve can be
                f"target\n{target:g}", (1, target), xycoords=("axes fraction", "data"), xytext=(4, 0),
                textcoords="offset points", ha="left", va="center", fontsize="small", color="0.35",
            )  # fmt: skip
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        across = legend_columns(figure, labels)
        figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False)
    if title:
        figure.suptitle(escape_matplotlib(title), x=0.01, ha="left", fontsize="medium")
    return figure


def legend_columns(figure: Figure, labels: Sequence[str]) -> int:
    """The number of columns of a legend that fit into the figure.

    An inch has about eleven letters at the default font size; the line before a label is about eight letters wide.
    """
    letters = int(11 * figure.get_size_inches()[0])
    return max(1, min(len(labels), 5, letters // (max(map(len, labels)) + 8)))


def _draw(axes: Axes, table: pl.DataFrame, x: str, label: str, index: int, limits: tuple[float, float] | None) -> None:
    """Draw the curve and the band of a method; ``limits``: those of a logarithmic axis."""
    color, dash = PALETTE[index % len(PALETTE)], DASHES[(index // len(PALETTE)) % len(DASHES)]
    marker = "o" if len(table) <= 12 else None
    axes.plot(
        table[x], table["mean"], color=color, linestyle=dash, linewidth=1.8, marker=marker, markersize=3.5, label=label
    )
    draw_band(axes, table, x, color, limits)


def draw_band(axes: Axes, table: pl.DataFrame, x: str, color: str, limits: tuple[float, float] | None = None) -> None:
    """Draw the band between ``low`` and ``high``, on a logarithmic axis no further than to the ends of the axis."""
    low, high = (table[edge] if limits is None else table[edge].clip(*limits) for edge in ("low", "high"))
    axes.fill_between(table[x], low, high, color=color, alpha=0.15, linewidth=0)


def table_log_limits(table: pl.DataFrame) -> tuple[float, float]:
    """The ends of a logarithmic axis for the curves in a table of `curve`."""
    return log_limits(*(table[column].to_list() for column in ("mean", "low", "high")))


def set_scale(axes: Axes, metric: str, limits: tuple[float, float] | None) -> None:
    """Set a logarithmic axis with these ``limits``, if any, and else limits in [0, 1] for accuracies."""
    if limits is not None:
        axes.set_yscale("log")
        axes.set_ylim(*limits)
    elif "accuracy" in metric:
        axes.set_ylim(max(0.0, axes.get_ylim()[0]), min(1.0, axes.get_ylim()[1]))


def save_curves(figure: Figure, path: Path) -> tuple[Path, Path]:
    """Save as ``path``.png and ``path``.svg, each atomically; returns both paths."""
    png, svg = (write_figure(path.with_name(f"{path.name}.{kind}"), figure) for kind in ("png", "svg"))
    return png, svg
