"""Table 2 and the figures from the curves of stored runs, and the runs of Figures 5 to 7, 21 and 22."""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedrax.data import load
from fedrax.report.curves import DASHES, PALETTE, save_curves
from papers.gradma.partition import DirichletWorkers
from papers.gradma.search import AXES, METHODS, Cell, Point, Runs, best_point
from papers.losac.running import spread, write_table

NAMES = {"mnist": "MNIST", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tiny_imagenet": "Tiny-ImageNet"}
"""The data sets of the tables."""
OWN = {"GradMA-W": 5, "GradMA-S": 4, "GradMA": 6}
"""The paper's own methods, and the numbers of their colors in every figure."""
GROUPS = {
    "GradMA-W (Figures 1, 9, 11)": ("FedAvg", "FedProx", "FedMLB", "MOON", "Scaffold", "GradMA-W"),
    "GradMA-S (Figures 2, 12, 14)": ("FedAvgM", "MIFA", "MIFAM", "GradMA-S"),
    "GradMA (Figures 3, 15, 17)": ("FedProxM", "FedMLBM", "MOONM", "FedDyn", "MimeLite", "GradMA"),
    "ablation (Figures 4, 18, 19)": tuple(OWN),
}
"""The paper's groups of methods, a figure each."""
BETAS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
"""Values of beta1 and beta2 in Figures 5 and 21."""
COARSE = (0.0, 0.5, 0.9)
"""Those whose pairs run first, so that an interrupted command has covered the whole map."""
MEMORIES = AXES["memory"][1]
OMEGAS, WORKERS = (1.0, 0.1, 0.01), 100
"""The partitions of Figure 8."""
TWICE = ("Scaffold", "MimeLite")
"""Methods of which a round sends twice as much, which the paper counts twice in Table 2."""


def name_of(arguments: argparse.Namespace) -> str:
    """Name of the command's files in results/."""
    return f"{arguments.what}-{arguments.data}"


def finish(arguments: argparse.Namespace, title: str, note: str, columns: list[str], rows: list[list[str]]) -> None:
    """Write the command's table."""
    write_table(arguments, name_of(arguments), title, note, columns, rows)


def rounds_to(curve: Sequence[tuple[int, float]], accuracy: float) -> int | None:
    """First evaluated round with at least this accuracy in percent."""
    return next((round for round, reached in curve if reached >= accuracy), None)


def table2(arguments: argparse.Namespace, runs: Runs, file: Path) -> None:
    """Rounds to an accuracy at each method's best point, and the curves of all groups."""
    with file.open() as rows:
        printed = [row for row in csv.DictReader(rows) if row["data"] == arguments.data]
    cells = list(dict.fromkeys(Cell(int(row["S"]), float(row["omega"])) for row in printed))
    table, seeds = [], runs.seeds() or arguments.seeds
    for row in printed:
        cell, method, goal = Cell(int(row["S"]), float(row["omega"])), row["method"], float(row["accuracy"])
        point = best_point(runs, cell, method, seeds)
        curves = [c for seed in seeds if (c := runs.curve(cell, method, point, seed))]
        reached = [rounds for curve in curves if (rounds := rounds_to(curve, goal)) is not None]
        factor = 2 if method in TWICE else 1
        ours = spread([factor * rounds for rounds in reached], ".0f") if curves else "not run"
        mean = factor * sum(reached) / len(reached) if reached else None
        gap = f"{mean - float(row['rounds']):+.0f}" if mean is not None and row["rounds"] else "-"
        reach = f"{len(reached)} of {len(curves)}"
        table.append([method, f"({cell.cohort}, {cell.omega:g})", f"{goal:g}", row["rounds"] or "-", ours, gap, reach])
    note = (
        "Rounds to a test accuracy at the best points of Table 1; paper: its Table 2, page 7 ('-': not reached; the "
        f"row of GradMA is lost in the text at hand). We evaluate every {runs.table['run']['eval_every']} rounds, the "
        f"paper every round. {' and '.join(TWICE)} count twice, because a round of theirs sends twice as much. "
        "Reached: how many of the runs with a curve; the mean is over these."
    )
    columns = ["", "(S, omega)", "accuracy %", "paper", "ours", "gap", "reached"]
    title = f"GradMA, Table 2 ({NAMES[arguments.data]})"
    finish(arguments, title, note, columns, table)
    if (figure := draw_groups(runs, cells, seeds)) is not None:
        save_curves(figure, arguments.results / f"curves-{arguments.data}")


def draw_groups(runs: Runs, cells: Sequence[Cell], seeds: Sequence[int]) -> Figure | None:
    """A row for each group and a column for each cell with curves: mean accuracy over the seeds; None without any."""

    def curves(cell: Cell, method: str) -> list[Sequence[tuple[int, float]]]:
        point = best_point(runs, cell, method, seeds)
        return [curve for seed in seeds if (curve := runs.curve(cell, method, point, seed))]

    found = {(cell, method): curves(cell, method) for cell in cells for of in GROUPS.values() for method in of}
    columns = [cell for cell in cells if any(found[cell, method] for of in GROUPS.values() for method in of)]
    groups = {name: of for name, of in GROUPS.items() if any(found[cell, one] for cell in columns for one in of)}
    if not groups:
        return None
    figure = Figure(figsize=(max(5, 2.9 * len(columns)) + 1.5, 2.3 * len(groups)), layout="constrained")
    grid = figure.subplots(len(groups), len(columns), squeeze=False, sharex=True, sharey="col")
    for line, (group, methods) in zip(grid, groups.items(), strict=True):
        for axes, cell in zip(line, columns, strict=True):
            for method in methods:
                draw_curve(axes, found[cell, method], method, OWN[method] if method in OWN else methods.index(method))
            axes.set_title(f"S = {cell.cohort}, omega = {cell.omega:g}", fontsize="small")
            style(axes)
        line[0].set_ylabel(f"{group}\ntest accuracy %", fontsize="small")
        names = {one.get_label(): one for axes in line for one in axes.get_lines()}
        line[-1].legend(names.values(), names.keys(), loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("communication rounds")
    return figure


def draw_curve(axes, curves: Sequence[Sequence[tuple[int, float]]], label: str, i: int) -> None:
    """Draw the mean of several curves, if there is one."""
    kept = [np.array(curve) for curve in curves if curve]
    if kept:
        mean = np.mean([curve[:, 1] for curve in kept], 0)
        dash = DASHES[i // len(PALETTE)]
        axes.plot(kept[0][:, 0], mean, dash, color=PALETTE[i % len(PALETTE)], linewidth=1.1, label=label)


def style(axes) -> None:
    """Grid and frame as in the other figures."""
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def steps_of(runs: Runs, cell: Cell, seeds: Sequence[int]) -> Point:
    """Local and server learning rate of GradMA-S at its best point of Table 1."""
    return best_point(runs, cell, "GradMA-S", seeds)[:2]


def betas(arguments: argparse.Namespace, table1: Runs, runs: Runs, cells: Sequence[Cell]) -> None:
    """Figures 5 and 21: highest accuracy of GradMA-S for 36 pairs (beta1, beta2), with Table 1's MIFA and MIFAM."""
    before = table1.seeds() or arguments.seeds
    if not arguments.only_write:
        coarse = list(itertools.product(COARSE, COARSE))
        fine = [pair for pair in itertools.product(BETAS, BETAS) if pair not in coarse]
        for pairs, cell in itertools.product((coarse, fine), cells):
            for seed in arguments.seeds:
                runs.run(cell, "GradMA-S", [(*steps_of(table1, cell, before), *pair) for pair in pairs], seed)
    kept = runs.seeds() or arguments.seeds
    rows, pictures, most = [], {}, 0
    for cell in cells:
        mean, name = np.full((len(BETAS), len(BETAS)), np.nan), f"({cell.cohort}, {cell.omega:g})"
        for (i, beta1), (j, beta2) in itertools.product(enumerate(BETAS), enumerate(BETAS)):
            tops = tops_of(runs, cell, "GradMA-S", (*steps_of(table1, cell, before), beta1, beta2), kept)
            mean[i, j], most = np.mean(tops) if tops else np.nan, max(most, len(tops))
        if np.isnan(mean).all():
            continue
        pictures[f"S = {cell.cohort}, omega = {cell.omega:g}"] = mean
        others = {of: tops_of(table1, cell, of, best_point(table1, cell, of, before), kept) for of in ("MIFA", "MIFAM")}
        ahead = max((sum(tops) / len(tops) for tops in others.values() if tops), default=np.nan)
        for beta1, line in zip(BETAS, mean, strict=True):
            if np.isnan(line).all():
                continue
            above = np.nanmax(line[1:]) if not np.isnan(line[1:]).all() else np.nan
            best = f"{BETAS[int(np.nanargmax(line))]:g}"
            gains = [number(gain, "+.2f") for gain in (above - line[0], line[0] - ahead)]
            rows.append([name, f"{beta1:g}", *(number(one, ".2f") for one in line), best, *gains])
        rows += [[name, of, spread(tops, ".2f"), *["-"] * (len(BETAS) + 2)] for of, tops in others.items()]
    note = (
        "Top test accuracy in % of GradMA-S for each beta1 (rows) and beta2 (columns), mean over "
        f"{most} seed{'s' if most != 1 else ''}; m = 100, local and server steps of the best point of Table 1. The "
        "paper draws the same as a picture without numbers and says that beta2 > 0 is mostly better than 0, and that "
        "GradMA-S with beta2 = 0 is ahead of MIFA and MIFAM for every beta1. Their rows: best points of Table 1, with "
        "the same seeds. Gain: the best beta2 > 0 of a row less beta2 = 0; lead: beta2 = 0 less the better of MIFA and "
        f"MIFAM. Runs on {' and '.join(runs.machines())}."
    )
    columns = ["(S, omega)", "beta1", *(f"beta2 = {beta:g}" for beta in BETAS), "best beta2", "gain", "lead"]
    finish(arguments, "GradMA, Figures 5 and 21 (beta1, beta2)", note, columns, rows)
    if pictures:
        save_curves(draw_betas(pictures), arguments.results / name_of(arguments))


def number(value: float, form: str) -> str:
    """A number, or - for one that is missing."""
    return "-" if np.isnan(value) else f"{value:{form}}"


def tops_of(runs: Runs, cell: Cell, method: str, point: Point, seeds: Sequence[int]) -> list[float]:
    """Highest accuracies of a method's stored runs at a point."""
    tops = [runs.top(cell, method, point, seed) for seed in seeds]
    return [top for top in tops if top is not None]


def seeds_with(runs: Runs, cell: Cell, point: Point, seeds: Sequence[int]) -> list[int]:
    """Seeds with which GradMA-S has been run at a point."""
    return [seed for seed in seeds if runs.stored(cell, "GradMA-S", point, seed) is not None]


def draw_betas(pictures: dict[str, np.ndarray]) -> Figure:
    """A map of accuracies for each cell, of the values of beta1 and beta2 that were run."""
    figure = Figure(figsize=(4.4 * len(pictures), 3.6), layout="constrained")
    for axes, (title, mean) in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures.items(), strict=True):
        known = ~np.isnan(mean)
        lines, columns = (np.flatnonzero(known.any(axis)) for axis in (1, 0))
        shown = mean[np.ix_(lines, columns)]
        image = axes.imshow(shown, origin="lower", cmap="viridis", aspect="auto")
        figure.colorbar(image, ax=axes, label="top test accuracy %")
        middle = (np.nanmin(shown) + np.nanmax(shown)) / 2
        for (i, j), value in np.ndenumerate(shown):
            color = "white" if value < middle else "black"
            axes.text(j, i, number(value, ".1f"), ha="center", va="center", color=color, fontsize="small")
        axes.set_xticks(range(len(columns)), [f"{BETAS[j]:g}" for j in columns])
        axes.set_yticks(range(len(lines)), [f"{BETAS[i]:g}" for i in lines])
        axes.set_xlabel("beta2")
        axes.set_ylabel("beta1")
        axes.set_title(title, fontsize="medium")
    return figure


def memory(arguments: argparse.Namespace, table1: Runs, runs: Runs, cells: Sequence[Cell]) -> None:
    """Figures 6, 7 and 22: GradMA-S with a memory of m clients; m = 0 is FedAvgM."""
    points = {cell: best_point(table1, cell, "GradMA-S", table1.seeds() or arguments.seeds) for cell in cells}
    if not arguments.only_write:
        for seed, cell, m in itertools.product(arguments.seeds, cells, MEMORIES):
            runs.run(cell, "GradMA-S", [(*points[cell], m)], seed)
    figure = Figure(figsize=(4.4 * len(cells) + 1, 3.2), layout="constrained")
    rows = []
    for axes, cell in zip(figure.subplots(1, len(cells), squeeze=False)[0], cells, strict=True):
        for i, m in enumerate(MEMORIES):
            point = (*points[cell], m)
            seeds = seeds_with(runs, cell, point, runs.seeds())
            tops = [runs.top(cell, "GradMA-S", point, seed) or 0.0 for seed in seeds]
            usual = [runs.usual(cell, "GradMA-S", point, seed) for seed in seeds]
            shown = [spread(values, ".2f") for values in (tops, usual)]
            rows.append([f"({cell.cohort}, {cell.omega:g})", f"{m}", *shown, f"{len(seeds)}"])
            draw_curve(axes, [runs.curve(cell, "GradMA-S", point, seed) for seed in seeds], f"m = {m}", i)
        axes.set_title(f"S = {cell.cohort}, omega = {cell.omega:g}", fontsize="medium")
        axes.set_xlabel("communication rounds")
        axes.set_ylabel("test accuracy %")
        style(axes)
    figure.axes[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    note = (
        "Top test accuracy in % of GradMA-S and its mean over the second half of the run, mean ± standard deviation "
        "over the seeds run, for memories of m clients; m = 0 is FedAvgM. Steps and betas of the best point of Table "
        "1. The paper draws curves and bars without numbers: at omega = 0.01 m = 0 is far behind, at omega = 0.1 level "
        "on MNIST, and accuracy does not rise steadily with m."
    )
    columns = ["(S, omega)", "m", "top", "second half", "seeds"]
    finish(arguments, "GradMA, Figures 6, 7 and 22 (memory)", note, columns, rows)
    save_curves(figure, arguments.results / name_of(arguments))


def partitions(arguments: argparse.Namespace) -> None:
    """Figure 8: the rows of each class at each worker."""
    names = [name for name in NAMES if name in arguments.partitions]
    figure = Figure(figsize=(3.4 * len(OMEGAS), 2.6 * len(names)), layout="constrained")
    grid, rows = figure.subplots(len(names), len(OMEGAS), squeeze=False), []
    for line, name in zip(grid, names, strict=True):
        dataset = load(name, arguments.data_dir)
        for axes, omega in zip(line, OMEGAS, strict=True):
            indices, offsets = DirichletWorkers(WORKERS, omega).assign(dataset, 0)
            owner = np.repeat(np.arange(WORKERS), np.diff(offsets))
            counts = np.zeros((WORKERS, dataset.num_classes or 0), int)
            np.add.at(counts, (owner, dataset.train.y[indices]), 1)
            worker, label = counts.nonzero()
            axes.scatter(worker, label, s=60 * counts[worker, label] / counts.max(), color=PALETTE[0], linewidths=0)
            axes.set_title(f"{NAMES[name]}, omega = {omega:g}", fontsize="small")
            axes.set_xlabel("worker", fontsize="small")
            axes.set_ylabel("class", fontsize="small")
            sizes = counts.sum(1)
            classes = (counts > 0).sum(1)
            shown = [f"{(sizes == 2).sum()}", f"{int(np.median(sizes)):,}", f"{sizes.max():,}", f"{classes.mean():.1f}"]
            rows.append([NAMES[name], f"{omega:g}", *shown])
    note = (
        f"The rows of each class at each of {WORKERS} workers, seed 0: the size of a point is their number, relative "
        "to the largest of a panel. The paper draws the same pictures without numbers."
    )
    columns = ["data", "omega", "workers with two rows", "median rows", "largest", "classes a worker"]
    write_table(arguments, "partitions", "GradMA, Figure 8 (partitions)", note, columns, rows)
    save_curves(figure, arguments.results / "partitions")


MEMORY_AXES = {"GradMA-S": (*METHODS["GradMA-S"], "memory")}
"""The axes of the runs of `memory`."""
