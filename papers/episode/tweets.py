"""Figures 8 and 9: tweets in silos of users."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedrax.report.curves import PALETTE, save_curves
from papers.episode.runs import Kept
from papers.episode.text import VALIDATION, legend_below, mean_curve, seconds_of, style
from papers.losac.running import spread, write_table

HERE = Path(__file__).parent
SIMILARITIES = (20, 10, 0)
"""Percentage of a silo's users that are drawn at random."""
GRID = (0.01, 0.03, 0.1, 0.3, 1.0)
"""The paper's values of eta and of gamma."""


def sent140(arguments: argparse.Namespace) -> None:
    """Figures 8 and 9: three methods at three similarities of the silos, over steps and simulated time."""
    kept = Kept(HERE / "sent140.toml", arguments.results / "sent140.jsonl", arguments.rounds, arguments.data_dir)
    methods = [entry["label"] for entry in kept.table["compare"]]
    wanted = [method for method in methods if not arguments.methods or method in arguments.methods]
    changes = {percent: {"partition": {"percent": float(percent)}} for percent in SIMILARITIES}
    if not arguments.only_write:
        for seed, percent, method in itertools.product(arguments.seeds, SIMILARITIES, wanted):
            kept.run(f"s = {percent} %", changes[percent], method, seed)
    found = {
        (percent, method): [
            record
            for seed in arguments.seeds
            if (record := kept.get(f"s = {percent} %", changes[percent], method, seed)) is not None
        ]
        for percent, method in itertools.product(SIMILARITIES, methods)
    }
    steps = kept.table["run"]["rounds"] * kept.table["algorithm"]["local"]["steps"]
    measured = [
        record["seconds"] / steps / 8 for (_, name), ones in found.items() if name == methods[0] for record in ones
    ]
    step = float(np.median(measured)) if measured else 0.0
    rows = []
    for (percent, method), records in found.items():
        ends = [record for record in records if not record["diverged"]]
        accuracy = [100 * record["test_accuracy"][-1] for record in ends]
        row = {"method": method, "I": "1" if method == methods[0] else "4"}
        seconds = [float(seconds_of(row, record, step)[-1]) for record in ends]
        clipped = [record["clipped"] for record in ends if record["clipped"] is not None]
        shown = [spread([record["train_loss"][-1] for record in ends], ".4f"), spread(accuracy, ".2f")]
        shown += [spread(clipped, ".0f"), spread(seconds, ".1f"), f"{len(records) - len(ends)} of {len(records)}"]
        rows.append([f"{percent}", method, *shown])
    note = (
        f"Training loss and test accuracy after {steps} local steps, mean ± standard deviation over the seeds run, on "
        "a subset of the tweets and with a smaller network than the paper's (`sent140.toml`). The paper draws curves "
        "without numbers: EPISODE nearly at NaiveParallelClip, CELGC further below as s falls. Seconds: simulated as "
        f"in Table 2, with {1000 * step:.1f} ms a local step. Runs on {kept.machines()}."
    )
    columns = ["s %", "method", "training loss", "test accuracy %", "clipped %", "simulated seconds", "diverged"]
    write_table(arguments, "sent140", "EPISODE, Figures 8 and 9 (Sentiment140, small)", note, columns, rows)
    save_curves(draw_silos(found, methods, step), arguments.results / "sent140")


def draw_silos(found: Mapping[tuple[int, str], list[dict[str, Any]]], methods: Sequence[str], step: float) -> Figure:
    """A column for each similarity: training loss and accuracy over local steps, and accuracy over time."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.subplots(3, len(SIMILARITIES), sharey="row")
    for column, percent in enumerate(SIMILARITIES):
        for i, method in enumerate(methods):
            records = found[percent, method]
            for line, metric in enumerate(("train_loss", "test_accuracy", "test_accuracy")):
                curve = mean_curve(records, metric)
                if curve is not None:
                    row = {"method": method, "I": "1" if i == 0 else "4"}
                    x = seconds_of(row, records[0], step) if line == 2 else curve[0] * int(row["I"])
                    grid[line][column].plot(x, curve[1], color=PALETTE[i], label=method)
        grid[0][column].set_title(f"s = {percent} %", fontsize="medium")
        left = column == 0
        style(grid[0][column], "local steps", "training loss" if left else "")
        style(grid[1][column], "local steps", "test accuracy" if left else "")
        style(grid[2][column], "simulated seconds", "test accuracy" if left else "")
    legend_below(figure, grid[0])
    return figure


def tuning(arguments: argparse.Namespace) -> None:
    """H: eta and gamma for CELGC at s = 10 %, by validation accuracy."""
    kept = Kept(
        HERE / "sent140.toml",
        arguments.results / "sent140-tuning.jsonl",
        arguments.rounds,
        arguments.data_dir,
        VALIDATION,
    )
    rows, found = [], {}
    for gamma, eta in itertools.product(GRID, GRID):
        changes = {
            "algorithm": {"local": {"lr": eta}},
            "compare": [{"name": "fedavg", "label": "CELGC", "local": {"clip": gamma}}],
        }
        name = f"gamma = {gamma:g}, eta = {eta:g}"
        record = kept.get(name, changes, "CELGC", 0) if arguments.only_write else kept.run(name, changes, "CELGC", 0)
        if record is not None:
            found[gamma, eta] = record["test_accuracy"][-1]
            loss, clipped = record["test_loss"][-1], record["clipped"]
            rows.append([f"{gamma:g}", f"{eta:g}", f"{100 * found[gamma, eta]:.2f}", f"{loss:.4f}", f"{clipped:.0f}"])
    best = max(found, key=lambda point: found[point])
    note = (
        f"CELGC at s = 10 %, measured on {100 * VALIDATION:g} % of the training rows, one seed: the paper's grid (H). "
        f"Best: gamma = {best[0]:g}, eta = {best[1]:g}. Runs on {kept.machines()}."
    )
    columns = ["gamma", "eta", "validation accuracy %", "validation loss", "steps clipped %"]
    write_table(arguments, "sent140-tuning", "EPISODE, step size and clipping on tweets (H)", note, columns, rows)
