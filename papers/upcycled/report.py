"""What the commands of Upcycled-FL share: the paper's numbers, tables, and pictures of pairs of curves."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
from matplotlib.lines import Line2D

from fedrax.report import curves
from papers.losac.running import markdown, spread

ROUNDS, SEEDS = 80, [0, 1, 2, 3]
DASHES = {"upcycled": "-", "plain": "--"}
Pair = Mapping[str, np.ndarray]
"""Losses [seeds, evaluations] of the method and of the upcycled one, at even distances."""


def final_cells(losses: Mapping[str, np.ndarray]) -> list[str]:
    """Final losses of a method, of the upcycled one and of half the rounds, and the upcycled one minus the others."""
    final = {way: values[:, -1] for way, values in losses.items()}
    gains = [(final["upcycled"] - final[way]).tolist() for way in ("plain", "half")]
    cells = [spread(final[way].tolist(), ".4f") for way in ("plain", "upcycled", "half")]
    return [*cells, *(spread(gain, "+.4f").replace("± +", "± ") for gain in gains)]


def wins(found: Mapping[tuple[str, str], Mapping[str, np.ndarray]], over: str = "plain") -> list[str]:
    """A second table: in how many cases of each set the upcycled loss ends lower or higher by more than the spread."""
    rows = []
    for data in dict.fromkeys(data for data, _ in found):
        gains = [losses["upcycled"][:, -1] - losses[over][:, -1] for (of, _), losses in found.items() if of == data]
        clear = [gain.mean() / max(gain.std(ddof=1) if len(gain) > 1 else 0.0, 1e-12) for gain in gains]
        rows.append([data, str(len(gains)), str(sum(c < -1 for c in clear)), str(sum(c > 1 for c in clear))])
    heading = f"## Upcycled against {over}"
    return ["", heading, "", *markdown("set|methods|lower by more than the spread|higher by more than it", rows)]


def printed(stragglers: int) -> dict[tuple[str, str], dict[str, str]]:
    """Rows of Table 1 or 3 by set and method."""
    with Path(__file__).with_name("tables_printed.csv").open() as file:
        return {(r["data"], r["method"]): r for r in csv.DictReader(file) if int(r["stragglers"]) == stragglers}


def draw_pairs(
    panels: Mapping[str, Mapping[str, Pair]], rounds: int, xlabel: str, methods: list[str]
) -> matplotlib.figure.Figure:
    """A panel for each set, of the losses of its methods; solid lines are upcycled. A method has one color."""
    width = 1 + 3.6 * max(2, len(panels))
    figure = matplotlib.figure.Figure(figsize=(width, 4.2), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    shown = [method for method in methods if any(method in found for found in panels.values())]
    for axes, (title, found) in zip(grid, panels.items(), strict=True):
        for method, pair in found.items():
            for way, dash in DASHES.items():
                mean = pair[way].mean(0)
                at = rounds / len(mean) * np.arange(1, len(mean) + 1)
                style: dict[str, Any] = {"color": curves.PALETTE[methods.index(method)], "linewidth": 1.3}
                axes.plot(at, mean, linestyle=dash, **style)
        axes.set_title(title)
        axes.set_xlabel(xlabel)
        ends = [value for pair in found.values() for losses in pair.values() for value in losses.mean(0)]
        axes.set_yscale("log" if np.nanmax(ends) > 10 * np.nanmin(ends) else "linear")
        axes.grid(color="0.92", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("test loss")
    handles = [Line2D([], [], color=curves.PALETTE[methods.index(method)]) for method in shown]
    handles += [Line2D([], [], color="0.3", linestyle=dash) for dash in DASHES.values()]
    figure.legend(handles, [*shown, *DASHES], loc="outside lower center", ncols=int(width / 1.6), frameon=False)
    return figure
