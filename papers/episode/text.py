"""Table 3 on sentence pairs, and Figures 1, 6 and 7 and Table 2 from its runs."""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedrax.experiments.comparison import merge_tables
from fedrax.report.curves import DASHES, PALETTE, legend_columns, save_curves
from papers.episode.runs import Kept
from papers.losac.running import spread, write_table

HERE = Path(__file__).parent
STEPS, EPOCHS = 240, 12.5
"""Local steps of each client, and the epochs that they are; the paper has 25."""
GAMMAS, THRESHOLDS = (0.01, 0.03, 0.1), (0.1, 0.333, 1.0, 3.333, 10.0)
"""The paper's grid of gamma and gamma / eta (E.3)."""
VALIDATION = 0.1
"""Share of the training rows on which the grid is measured."""
BANDWIDTH, LATENCY = 1e9, 1e-3
"""Bits a second between a client and the server, and seconds of an exchange, in the simulated times."""
EXCHANGES = {"EPISODE": 2, "EPISODE (unclipped)": 2}
"""Exchanges of a round, where it is not one; EPISODE also computes one gradient more."""


def row_changes(steps: int, percent: float) -> dict[str, Any]:
    """Changes by a row of the table: I, rounds and similarity; learning rates are halved at 60 and 80 % of the rounds,
    and a run is evaluated six times.
    """
    rounds = STEPS // steps
    schedule = {"boundaries_and_scales": [[rounds * 3 // 5, 0.5], [rounds * 4 // 5, 0.5]]}
    return {
        "partition": {"percent": float(percent)},
        "run": {"rounds": rounds, "eval_every": max(1, rounds // 6)},
        "algorithm": {"local": {"steps": steps, "schedule": schedule}},
    }


def printed_rows() -> list[dict[str, str]]:
    """Table 3 as printed."""
    with (HERE / "table3_printed.csv").open() as file:
        return list(csv.DictReader(file))


def setting_of(row: Mapping[str, str]) -> str:
    """Name of a setting in the stored lines."""
    return f"I = {row['I']}, s = {row['similarity']} %"


def tuning(arguments: argparse.Namespace) -> None:
    """E.3: gamma and gamma / eta for CELGC at I = 4 and s = 50 %, by validation accuracy."""
    kept = Kept(
        HERE / "table3.toml", arguments.results / "tuning.jsonl", arguments.rounds, arguments.data_dir, VALIDATION
    )
    rows, found = [], {}
    for gamma, threshold in itertools.product(GAMMAS, THRESHOLDS):
        name, changes = f"gamma = {gamma:g}, gamma / eta = {threshold:g}", grid_changes(gamma, threshold)
        record = kept.get(name, changes, "CELGC", 0) if arguments.only_write else kept.run(name, changes, "CELGC", 0)
        if record is not None:
            found[gamma, threshold] = record["test_accuracy"][-1], -record["test_loss"][-1]
            shown = [
                f"{100 * record['test_accuracy'][-1]:.2f}",
                f"{record['test_loss'][-1]:.4f}",
                f"{record['clipped']:.0f}",
            ]
            rows.append([f"{gamma:g}", f"{threshold:g}", f"{gamma / threshold:.3g}", *shown])
    best = [max(found, key=lambda point: found[point][of]) for of in (0, 1)]
    by_accuracy, by_loss = (f"gamma = {gamma:g}, gamma / eta = {threshold:g}" for gamma, threshold in best)
    note = (
        f"CELGC at I = 4 and s = 50 % after {EPOCHS:g} epochs, measured on {100 * VALIDATION:g} % of the training "
        "rows, one seed: the paper's rule and grid (E.3); it does not print what it chose. Best by accuracy, as the "
        f"rule says: {by_accuracy}; by loss: {by_loss}. Runs on {kept.machines()}."
    )
    columns = ["gamma", "gamma / eta", "eta", "validation accuracy %", "validation loss", "steps clipped %"]
    write_table(arguments, "tuning", "EPISODE, step size and clipping on sentence pairs (E.3)", note, columns, rows)


def grid_changes(gamma: float, threshold: float) -> dict[str, Any]:
    """Changes by a point of the grid, where ``threshold`` is gamma / eta."""
    changes = merge_tables(row_changes(4, 50), {"algorithm": {"local": {"lr": gamma / threshold, "clip": gamma}}})
    return changes | {"compare": [{"name": "fedavg", "label": "CELGC", "local": {"clip": gamma}}]}


def table3(arguments: argparse.Namespace) -> None:
    """Table 3, and the tables and figures from its runs."""
    kept = Kept(HERE / "table3.toml", arguments.results / "table3.jsonl", arguments.rounds, arguments.data_dir)
    printed = printed_rows()
    if not arguments.only_write:
        chosen = arguments.settings
        wanted = [row for row in printed if not arguments.methods or row["method"] in arguments.methods]
        wanted = [row for row in wanted if not chosen or f"{row['I']},{row['similarity']}" in chosen]
        for seed, row in itertools.product(arguments.seeds, wanted):
            kept.run(setting_of(row), changes_of(row), row["method"], seed)
    write_table3(arguments, kept, printed)
    write_times(arguments, kept, printed)


def changes_of(row: Mapping[str, str]) -> dict[str, Any]:
    """Changes by a printed row; NaiveParallelClip has one similarity, because the mean of its batches does not depend
    on it.
    """
    return row_changes(int(row["I"]), 30 if row["similarity"] == "100" else float(row["similarity"]))


def records_of(kept: Kept, row: Mapping[str, str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Stored runs of a row."""
    found = [kept.get(setting_of(row), changes_of(row), row["method"], seed) for seed in seeds]
    return [record for record in found if record is not None]


def write_table3(arguments: argparse.Namespace, kept: Kept, printed: list[dict[str, str]]) -> None:
    """Losses and accuracies with the printed ones, and curves."""
    rows = []
    for row in printed:
        records = records_of(kept, row, arguments.seeds)
        ends = [record for record in records if not record["diverged"]]
        accuracy = [100 * record["test_accuracy"][-1] for record in ends]
        loss = [record["train_loss"][-1] for record in ends]
        clipped = [record["clipped"] for record in ends if record["clipped"] is not None]
        ours = [spread(loss, ".4f"), spread(accuracy, ".2f"), spread(clipped, ".0f")]
        diverged = f"{len(records) - len(ends)} of {len(records)}" if records else "not run"
        gap = f"{np.mean(accuracy) - float(row['accuracy']):+.1f}" if accuracy else "-"
        rows.append(
            [
                row["I"],
                row["similarity"],
                row["method"],
                row["loss"],
                ours[0],
                row["accuracy"],
                *ours[1:2],
                gap,
                ours[2],
                diverged,
            ]
        )
    note = (
        f"Training loss and test accuracy after {EPOCHS:g} epochs, mean ± standard deviation over the seeds run. "
        "Printed: the paper's Table 3, with a network of 2,048 units and 550,000 pairs; ours has 24 units and 9,842 "
        "pairs (`table3.toml`), so that rankings can be compared and numbers cannot. Clipped: % of rounds (EPISODE) or "
        f"steps. Runs on {kept.machines()}."
    )
    columns = [
        "I",
        "s %",
        "method",
        "printed loss",
        "training loss",
        "printed accuracy %",
        "test accuracy %",
        "gap",
        "clipped %",
        "diverged",
    ]
    write_table(arguments, "table3", "EPISODE, Table 3 (sentence pairs, small)", note, columns, rows)
    save_curves(draw_figure1(kept, printed, arguments.seeds), arguments.results / "table3-figure1")
    save_curves(draw_figure7(kept, printed, arguments.seeds), arguments.results / "table3-figure7")


def seconds_of(row: Mapping[str, str], record: Mapping[str, Any], step: float) -> np.ndarray:
    """Simulated seconds at each evaluation of a run, with eight concurrent clients."""
    exchanges, rounds = EXCHANGES.get(row["method"], 1), np.array(record["rounds"])
    gradients = int(row["I"]) + (exchanges - 1)
    bits = 8 * 1e6 * record["megabytes"] / record["rounds"][-1] / 8  # of a client in a round
    return rounds * (gradients * step + bits / BANDWIDTH + exchanges * LATENCY)


def write_times(arguments: argparse.Namespace, kept: Kept, printed: list[dict[str, str]]) -> None:
    """Table 2: simulated time to three accuracies."""
    naive = records_of(kept, printed[0], arguments.seeds)
    if not naive:
        return
    end = float(np.mean([record["test_accuracy"][-1] for record in naive]))
    step = float(np.median([record["seconds"] / STEPS / 8 for record in naive]))
    goals = [end * part / 82.4 for part in (70, 75, 80)]
    with (HERE / "table2_printed.csv").open() as file:
        minutes = {(r["I"], r["similarity"], r["method"]): list(r.values())[3:] for r in csv.DictReader(file)}
    rows = []
    for row in printed:
        key = (row["I"], row["similarity"], row["method"])
        if key not in minutes:
            continue
        cells = []
        for goal, paper in zip(goals, minutes[key], strict=True):
            times = []
            for record in records_of(kept, row, arguments.seeds):
                at = np.array(record["test_accuracy"]) >= goal
                times += [float(seconds_of(row, record, step)[at.argmax()])] if at.any() else []
            cells += [paper or "-", spread(times, ".0f")]
        rows.append([*key, *cells])
    shown = ", ".join(f"{100 * goal:.1f}" for goal in goals)
    note = (
        f"Seconds to a test accuracy of {shown} %, the same parts of NaiveParallelClip's final accuracy as the printed "
        f"70, 75 and 80 %. Simulated: eight clients at the same time, {1000 * step:.1f} ms a local step (measured: "
        "NaiveParallelClip's runs, evaluations included), the bytes that a client sends and receives in a round at "
        f"{BANDWIDTH / 1e9:g} Gbit/s, {1000 * LATENCY:g} ms an exchange. A run is measured six times, which is the "
        "resolution. Printed: minutes on eight V100. "
        f"Runs on {kept.machines()}."
    )
    columns = ["I", "s %", "method", "printed 70 %", "ours", "printed 75 %", "ours", "printed 80 %", "ours"]
    write_table(arguments, "table2", "EPISODE, Table 2 (running time, simulated)", note, columns, rows)
    save_curves(draw_figure6(kept, printed, arguments.seeds, step), arguments.results / "table2-figure6")


Curve = tuple[np.ndarray, np.ndarray]


def mean_curve(records: Sequence[Mapping[str, Any]], metric: str) -> Curve | None:
    """(rounds, mean over the runs that did not diverge); None if there is none."""
    whole = [record for record in records if not record["diverged"]]
    if not whole:
        return None
    return np.array(whole[0]["rounds"]), np.mean([record[metric] for record in whole], 0)


def style(axes, x: str, y: str) -> None:
    """Labels, grid and frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw_figure1(kept: Kept, printed: list[dict[str, str]], seeds: Sequence[int]) -> Figure:
    """I over epochs and rounds, and similarity over epochs: training loss at the top, accuracy at the bottom."""
    figure = Figure(figsize=(12, 6), layout="constrained")
    grid = figure.subplots(2, 3)
    shown = [row for row in printed if row["method"] in ("NaiveParallelClip", "CELGC", "EPISODE")]
    parts = ([r for r in shown if r["similarity"] in ("30", "100")], [r for r in shown if r["I"] in ("1", "4")])
    for column, (rows, by_rounds) in enumerate(((parts[0], False), (parts[0], True), (parts[1], False))):
        for row in rows:
            dash, color = line_of(row)
            for axes, metric in zip(grid[:, column], ("train_loss", "test_accuracy"), strict=True):
                curve = mean_curve(records_of(kept, row, seeds), metric)
                if curve is not None:
                    x = curve[0] if by_rounds else EPOCHS * curve[0] / curve[0][-1]
                    axes.plot(x, curve[1], dash, color=color, label=f"{row['method']}, {setting_of(row)}")
        style(grid[0][column], "", "training loss")
        style(grid[1][column], "communication rounds" if by_rounds else "epochs", "test accuracy")
    legend_below(figure, grid[1])
    return figure


SETTINGS = (("1", "100"), ("2", "30"), ("4", "30"), ("8", "30"), ("16", "30"), ("4", "10"), ("4", "50"))
"""(I, similarity) of the rows that Figures 1 and 6 draw, in the order of their colors."""


def line_of(row: Mapping[str, str]) -> tuple[str, str]:
    """(dash pattern, color) of a row: the dash tells the method, the color I and the similarity."""
    dash = DASHES[("EPISODE", "CELGC", "NaiveParallelClip").index(row["method"])]
    return dash, PALETTE[SETTINGS.index((row["I"], row["similarity"]))]


def legend_below(figure: Figure, with_lines: Sequence[Axes]) -> None:
    """One legend for all axes below the figure; each label once."""
    lines = {line.get_label(): line for axes in with_lines for line in axes.get_lines()}
    if lines:
        across = legend_columns(figure, list(lines))
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=across, frameon=False)


def draw_figure7(kept: Kept, printed: list[dict[str, str]], seeds: Sequence[int]) -> Figure:
    """All methods at I = 4 and s = 30 %."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    pair = figure.subplots(1, 2)
    rows = [row for row in printed if (row["I"], row["similarity"]) in (("4", "30"), ("1", "100"))]
    for axes, metric, name in zip(
        pair, ("train_loss", "test_accuracy"), ("training loss", "test accuracy"), strict=True
    ):
        for i, row in enumerate(rows):
            curve = mean_curve(records_of(kept, row, seeds), metric)
            if curve is not None:
                axes.plot(
                    EPOCHS * curve[0] / curve[0][-1], curve[1], color=PALETTE[i % len(PALETTE)], label=row["method"]
                )
        style(axes, "epochs", name)
    pair[1].legend(fontsize="x-small", frameon=False)
    return figure


def draw_figure6(kept: Kept, printed: list[dict[str, str]], seeds: Sequence[int], step: float) -> Figure:
    """Accuracy over simulated time: by I at s = 30 %, and by similarity at I = 4."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    shown = [row for row in printed if row["method"] in ("NaiveParallelClip", "CELGC", "EPISODE")]
    parts = ([r for r in shown if r["similarity"] in ("30", "100")], [r for r in shown if r["I"] in ("1", "4")])
    pair = figure.subplots(1, 2)
    for axes, rows in zip(pair, parts, strict=True):
        for row in rows:
            records = records_of(kept, row, seeds)
            curve = mean_curve(records, "test_accuracy")
            if curve is not None:
                seconds = seconds_of(row, records[0], step)
                dash, color = line_of(row)
                axes.plot(seconds, curve[1], dash, color=color, label=f"{row['method']}, {setting_of(row)}")
        style(axes, "simulated seconds", "test accuracy")
    legend_below(figure, pair)
    return figure
