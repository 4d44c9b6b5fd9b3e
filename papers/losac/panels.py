"""Figures of several settings side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from fedrax.report import curves
from fedrax.report.runs import MethodRuns


def draw(
    found: Mapping[str, Sequence[MethodRuns]],
    metrics: Mapping[str, str],
    marks: Sequence[float],
    top: float | None = None,
    legend: int = 3,
) -> Figure:
    """A column for each title of ``found``, with the methods' curves over their seeds.

    metrics: two metrics and their axis labels. The first one is at the top, on a logarithmic scale; the second one
    below, from zero, with a dashed line at the column's value in ``marks``. top: upper end of the second axis; all
    columns then have equal axes. legend: methods per line of the legend.
    """
    sketch = Figure(figsize=(2.4 * len(found), 5), layout="constrained")
    grid = sketch.subplots(2, len(found), squeeze=False, sharex=True, sharey="none" if top is None else "row")
    for (above, below), (title, methods), mark in zip(grid.T, found.items(), marks, strict=True):
        for axes, metric in zip((above, below), metrics, strict=True):
            tables = [curves.curve(method, metric) for method in methods]
            limits = curves.table_log_limits(pl.concat(tables)) if axes is above else None
            for i, (method, table) in enumerate(zip(methods, tables, strict=True)):
                axes.plot(table["round"], table["mean"], color=curves.PALETTE[i], linewidth=1.6, label=method.label)
                curves.draw_band(axes, table, "round", curves.PALETTE[i], limits)
            axes.grid(color="0.92", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        above.set_title(title, fontsize="medium")
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter(NullFormatter())
        below.axhline(mark, color="0.45", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
        below.set_ylim(0, top)
        below.set_xlabel("communication rounds")
    for axes, name in zip(grid[:, 0], metrics.values(), strict=True):
        axes.set_ylabel(name)
    handles, labels = grid[0][0].get_legend_handles_labels()
    sketch.legend(handles, labels, loc="outside lower center", ncols=legend, frameon=False)
    return sketch
