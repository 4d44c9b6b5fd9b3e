"""``python -m papers.gradma WHAT``: GradMA's tables and figures with the paper's values.

table1: highest accuracies in a data set's columns; table2: rounds to an accuracy and all curves, from the runs of
table1; betas: Figures 5 and 21; memory: Figures 6, 7 and 22; partitions: Figure 8; speedup: Corollary 1 on a quadratic
problem; moon: MOON's features on a small problem.

Each run is stored as a line of ``table1-mnist.jsonl`` beside the table and not repeated: an interrupted command
continues, also on another machine. The table is written after each run of a method, from the available runs.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
import time
from pathlib import Path
from typing import Any

from fedrax import FedraxError, files
from papers.arguments import Different, command, count, folders, seed
from papers.ending import in_a_sentence
from papers.gradma import figures, moon, speedup
from papers.gradma.search import AXES, METHODS, Cell, Point, Runs, best_point, work
from papers.losac.running import markdown, spread, written_by

HERE = Path(__file__).parent
SEARCHES = {
    "none": "every method at one point: the file's, the middle of each grid, or that with --local-step",
    "axes": "one axis of the grid after another, keeping the best value",
    "grid": "the whole grid",
    "best": "the best points kept, for the seeds that they lack",
}

HUNDRED = {"rounds": 100, "eval_every": 10}
SMALLER: dict[str, dict[str, Any]] = {
    "cifar10": {"run": HUNDRED, "algorithm": {"local": {"batch_size": 16}}},
    "cifar100": {
        "run": HUNDRED,
        "model": {"width": 16, "dropout": 0.0},
        "algorithm": {"local": {"batch_size": 32}},
    },
    "tiny_imagenet": {"run": HUNDRED, "model": {"width": 4}, "algorithm": {"local": {"batch_size": 16}}},
}
"""What --small changes of an experiment file, so that a run takes minutes on a few cores."""

STUDIED = 10
"""The cohort size of the studies of beta1, beta2 and m."""

Printed = dict[tuple[Cell, str], tuple[float, float]]
"""The paper's mean and deviation, by column and method."""


@in_a_sentence("papers.gradma")
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.gradma", description=__doc__)
    parser.add_argument("what", choices=list(COMMANDS))
    parser.add_argument("--data", choices=list(figures.NAMES), default="mnist", help="which columns of the table")
    parser.add_argument(
        "--small", action="store_true", help="fewer rounds, smaller batches and networks, for few cores; not for mnist"
    )
    parser.add_argument(
        "--search", choices=list(SEARCHES), default="grid", help="; ".join(map(": ".join, SEARCHES.items()))
    )
    first = "the first one is the search's"
    parser.add_argument("--seeds", type=seed, nargs="+", action=Different, default=[0, 1, 2], help=first)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--cells", nargs="+", metavar="S,OMEGA", help="columns, such as 10,0.01 (default: all)")
    parser.add_argument("--local-step", type=float, choices=AXES["local step"][1], help="where the search starts")
    parser.add_argument("--server-step", type=float, choices=AXES["server step"][1], help="likewise")
    again = "run again what was kept without its curve, which Table 2 and the figures need"
    parser.add_argument("--curves", action="store_true", help=again)
    every = list(figures.NAMES)
    parser.add_argument("--partitions", nargs="+", choices=every, default=every, help="data sets of partitions")
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    where = "where the table and its runs go; by default beside this command, or below runs/gradma with --rounds"
    parser.add_argument("--results", type=Path, help=where)
    parser.add_argument("--rounds", type=count, help="fewer rounds than the paper's, to try the command out")
    parser.add_argument("--only-write", action="store_true", help="run nothing, write the table of what there is")
    arguments = parser.parse_args()
    arguments.command = command(parser, arguments)
    folders(arguments, "gradma", tried=bool(arguments.rounds))
    COMMANDS[arguments.what](arguments)
    return 0


def table1(arguments: argparse.Namespace) -> None:
    """Run what is missing, and write the table after each step."""
    runs, cells, wanted = prepare(arguments)
    printed = read_printed(arguments.data)
    if not arguments.only_write:
        for cell, method, points, seed in work(runs, wanted, arguments.methods, arguments.seeds, arguments.search):
            if not runs.missing(cell, method, points, seed):
                continue
            began = time.monotonic()
            runs.run(cell, method, points, seed)
            took, tops = time.monotonic() - began, [runs.top(cell, method, point, seed) for point in points]
            shown = ", ".join(f"{'/'.join(f'{v:g}' for v in p)}: {t:.2f}" for p, t in zip(points, tops, strict=True))
            print(f"{cell}, {method}, seed {seed}, {took:.0f} s: {shown}", flush=True)
            write(arguments, runs, cells, printed)
    print(write(arguments, runs, cells, printed))


def prepare(arguments: argparse.Namespace) -> tuple[Runs, list[Cell], list[Cell]]:
    """Stored runs of Table 1, its columns, and those of --cells."""
    if arguments.small and arguments.data not in SMALLER:
        raise FedraxError(f"--small: {arguments.data} has no smaller budget; {', '.join(SMALLER)} have.")
    cells = list(dict.fromkeys(cell for cell, _ in read_printed(arguments.data)))
    wanted = [cell for cell in cells if arguments.cells is None or f"{cell.cohort},{cell.omega:g}" in arguments.cells]
    if arguments.cells is not None and len(wanted) != len(set(arguments.cells)):
        every = ", ".join(f"{cell.cohort},{cell.omega:g}" for cell in cells)
        raise FedraxError(f"--cells: the table's columns are {every}, not {' '.join(arguments.cells)}.")
    first = {"local step": arguments.local_step, "server step": arguments.server_step}
    chosen = {axis: value for axis, value in first.items() if value is not None}
    return kept(arguments, name_of(arguments), chosen, curves=arguments.curves), cells, wanted


def kept(arguments: argparse.Namespace, name: str, first: dict[str, float] | None = None, **options: Any) -> Runs:
    """Runs in results/NAME.jsonl."""
    changes = SMALLER[arguments.data] if arguments.small else None
    file, lines = HERE / f"{arguments.data}.toml", arguments.results / f"{name}.jsonl"
    return Runs(file, lines, arguments.rounds, arguments.data_dir, first, changes, **options)


def table2(arguments: argparse.Namespace) -> None:
    """Table 2, and the curves of Figures 1 to 4 and 9 to 19, from the runs that ``table1 --curves`` stores."""
    figures.table2(arguments, prepare(arguments)[0], HERE / "table2_printed.csv")


def betas(arguments: argparse.Namespace) -> None:
    """Figures 5 and 21."""
    runs, _, wanted = prepare(arguments)
    wanted = [cell for cell in wanted if cell.cohort == STUDIED]
    figures.betas(arguments, runs, kept(arguments, f"betas-{arguments.data}"), wanted)


def memory(arguments: argparse.Namespace) -> None:
    """Figures 6, 7 and 22."""
    runs, _, wanted = prepare(arguments)
    wanted = [cell for cell in wanted if cell.cohort == STUDIED]
    figures.memory(arguments, runs, kept(arguments, f"memory-{arguments.data}", axes=figures.MEMORY_AXES), wanted)


COMMANDS = {
    "table1": table1,
    "table2": table2,
    "betas": betas,
    "memory": memory,
    "partitions": figures.partitions,
    "speedup": speedup.speedup,
    "moon": moon.moon,
}
"""What the command line can be asked for."""


def name_of(arguments: argparse.Namespace) -> str:
    """Name of the table's files in results/."""
    return f"table1-{arguments.data}" + ("-small" if arguments.small else "")


def read_printed(data: str) -> Printed:
    """Mean and standard deviation in the paper, by column and method."""
    with (HERE / "table1_printed.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["data"] == data]
    cell = lambda row: Cell(int(row["S"]), float(row["omega"]))  # noqa: E731
    return {(cell(row), row["method"]): (float(row["accuracy"]), float(row["deviation"])) for row in rows}


def write(arguments: argparse.Namespace, runs: Runs, cells: list[Cell], printed: Printed) -> str:
    """Write the table of the available runs to results/, for any --seeds."""
    seeds = runs.seeds() or arguments.seeds
    title = f"# GradMA, Table 1 ({figures.NAMES[arguments.data]}{', small' if arguments.small else ''})"
    budget = smaller(arguments) if arguments.small else ""
    note = (
        "Top test accuracy in % over all evaluations of a run, mean ± standard deviation over the seeds run; paper: "
        "its Table 1, page 6; gap: ours - paper; second half: the mean over the evaluations of the second half of the "
        "same runs. The best point is the one with the highest mean top accuracy among those run with all seeds (if "
        "there is none, the first seed's); nearest: the point tried that comes nearest to the paper's number, which is "
        f"no measure of the method but of what the authors may have run. {budget}{runs.rounds} rounds"
        f" of {runs.table['algorithm']['local']['steps']} steps on batches of"
        f" {runs.table['algorithm']['local']['batch_size']}. Runs on {' and '.join(runs.machines())}. "
        f"{written_by(arguments)}"
    )
    columns = "|(S, omega)|paper|ours|gap|second half|seeds|points tried|best point|run on|nearest|nearest point tried"
    every = list(itertools.product(METHODS, cells))
    known = [pair for pair in every if runs.known(pair[1], pair[0], seeds[0])]
    rows = [row_of(runs, cell, method, seeds, *printed[cell, method]) for method, cell in known]
    lines = [title, "", note, "", *markdown(columns, rows)]
    for cell in cells:
        missing = [method for method in METHODS if (method, cell) not in known]
        if missing:
            lines += [
                "",
                f"Not run at {column(cell)}: {'all' if len(missing) == len(METHODS) else ', '.join(missing)}.",
            ]
    tried = [
        row
        for (cell, method), (mean, deviation) in printed.items()
        for row in tried_of(runs, cell, method, seeds, mean, deviation)
    ]
    if tried:
        lines += ["", "## Every point, where more than one was tried", ""]
        lines += markdown("(S, omega)|method|paper|point|top|second half|seeds", tried)
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{name_of(arguments)}.md", text)
    return text


def smaller(arguments: argparse.Namespace) -> str:
    """What is smaller than in the paper."""
    whole, model = files.read_toml(HERE / f"{arguments.data}.toml"), SMALLER[arguments.data].get("model", {})
    network = (
        f", and a network with {' and '.join(f'{key} {value:g}' for key, value in model.items())}" if model else ""
    )
    return f"On a smaller budget than the paper's {whole['run']['rounds']:,} rounds of batches of 64{network}: "


def row_of(runs: Runs, cell: Cell, method: str, seeds: list[int], mean: float, deviation: float) -> list[str]:
    """Row of a method for a column of the paper's table."""
    known, best = runs.known(cell, method, seeds[0]), best_point(runs, cell, method, seeds)
    near, close = nearest(runs, cell, method, seeds, mean)
    seeds = [seed for seed in seeds if runs.stored(cell, method, best, seed)]
    tops = [runs.top(cell, method, best, seed) or 0.0 for seed in seeds]
    usual = sum(runs.usual(cell, method, best, seed) for seed in seeds) / len(seeds)
    ours = spread(tops, ".2f")
    tried = f"{len(known)} of {math.prod(len(AXES[axis][1]) for axis in METHODS[method])}"
    gap = f"{sum(tops) / len(tops) - mean:+.2f}"
    dates = [runs.date(cell, method, best, seed) for seed in seeds]
    on = " to ".join(sorted({min(dates), max(dates)}))
    row = [method, column(cell), f"{mean:.2f} ± {deviation:.2f}", ours, gap, f"{usual:.2f}"]
    return [*row, str(len(tops)), tried, in_words(method, best), on, close, in_words(method, near)]


def nearest(runs: Runs, cell: Cell, method: str, seeds: list[int], printed: float) -> tuple[Point, str]:
    """The point whose mean of highest accuracies is nearest to the printed one, and that mean."""
    tops: dict[Point, list[float]] = {}
    for each in seeds:
        for point, top in runs.known(cell, method, each).items():
            tops.setdefault(point, []).append(top)
    near = min(tops, key=lambda point: abs(sum(tops[point]) / len(tops[point]) - printed))
    return near, spread(tops[near], ".2f") + (f" ({len(tops[near])} seed)" if len(tops[near]) == 1 else "")


def tried_of(runs: Runs, cell: Cell, method: str, seeds: list[int], mean: float, deviation: float) -> list[list[str]]:
    """A row for each tried point of a method; no rows for a single point."""
    tried = {seed: runs.known(cell, method, seed) for seed in seeds}
    rows = []
    for point in sorted({point for known in tried.values() for point in known}):
        of = [seed for seed in seeds if point in tried[seed]]
        tops, usual = [tried[seed][point] for seed in of], [runs.usual(cell, method, point, seed) for seed in of]
        ours = [spread(values, ".2f") for values in (tops, usual)]
        rows.append(
            [column(cell), method, f"{mean:.2f} ± {deviation:.2f}", in_words(method, point), *ours, str(len(of))]
        )
    return rows if len(rows) > 1 else []


def column(cell: Cell) -> str:
    """A column heading as in the paper."""
    return f"({cell.cohort}, {cell.omega:g})"


def in_words(method: str, point: Point) -> str:
    """Text of a point of a method's grid."""
    parts = zip(METHODS[method], point, strict=True)
    return ", ".join(f"{axis.removesuffix(' (GradMA)')} {value:g}" for axis, value in parts)


if __name__ == "__main__":
    sys.exit(main())
