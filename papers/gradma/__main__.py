"""``python -m papers.gradma table1``: Table 1's MNIST (or CIFAR-10) columns, printed beside the paper's numbers.

Every run is kept below --out and not run again: break the command off when you like, and type it again to go on. The
table is written after each run of a method, from what there is.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import os
import sys
import time
from pathlib import Path

from fedrax import FedraxError, files
from papers.gradma.search import AXES, METHODS, Cell, Runs, best_point, work
from papers.losac.running import processor, spread

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SEARCHES = {
    "none": "every method at the file's settings, the middle of each grid",
    "axes": "one axis of the grid after another, keeping the best value",
    "grid": "the whole grid",
}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.gradma", description=__doc__)
    parser.add_argument("what", choices=["table1"])
    parser.add_argument("--data", choices=["mnist", "cifar10"], default="mnist", help="which columns of the table")
    parser.add_argument("--search", choices=list(SEARCHES), default="grid", help="how much of each grid is tried")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one is the search's")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("runs/gradma"), help="where runs are kept")
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where tables go")
    parser.add_argument("--rounds", type=int, help="fewer rounds than the paper's, to try the command out")
    parser.add_argument("--only-write", action="store_true", help="run nothing, write the table of what there is")
    try:
        table1(parser.parse_args())
    except FedraxError as error:
        print(f"papers.gradma: {error}", file=sys.stderr)
        return 1
    return 0


def table1(arguments: argparse.Namespace) -> None:
    """Run what is missing, and write the table after each step."""
    printed = read_printed(arguments.data)
    cells = list(dict.fromkeys(cell for cell, _ in printed))
    runs = Runs(HERE / f"{arguments.data}.toml", arguments.out / arguments.data, arguments.rounds, arguments.data_dir)
    if not arguments.only_write:
        for cell, method, points, seed in work(runs, cells, arguments.methods, arguments.seeds, arguments.search):
            if all(runs.stored(cell, method, point, seed) for point in points):
                continue
            began = time.monotonic()
            runs.run(cell, method, points, seed)
            took, tops = time.monotonic() - began, [runs.top(cell, method, point, seed) for point in points]
            shown = ", ".join(f"{'/'.join(f'{v:g}' for v in p)}: {t:.2f}" for p, t in zip(points, tops, strict=True))
            print(f"{cell}, {method}, seed {seed}, {took:.0f} s: {shown}", flush=True)
            write(arguments, runs, cells, printed)
    print(write(arguments, runs, cells, printed))


def read_printed(data: str) -> dict[tuple[Cell, str], tuple[float, float]]:
    """Mean and deviation that the paper prints, by column and method."""
    with (HERE / "table1_printed.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["data"] == data]
    cell = lambda row: Cell(int(row["S"]), float(row["omega"]))  # noqa: E731
    return {(cell(row), row["method"]): (float(row["accuracy"]), float(row["deviation"])) for row in rows}


def write(arguments: argparse.Namespace, runs: Runs, cells: list[Cell], printed: dict) -> str:
    """The table of the runs that there are, in results/."""
    columns = ["", "(S, omega)", "paper", "ours", "gap", "seeds", "points tried", "best point"]
    rows = []
    for method in METHODS:
        for cell in cells:
            mean, deviation = printed[cell, method]
            known = runs.known(cell, method, arguments.seeds[0])
            row = [method, f"({cell.cohort}, {cell.omega:g})", f"{mean:.2f} ± {deviation:.2f}"]
            if not known:
                rows.append([*row, "not run", "", "", "", ""])
                continue
            best = best_point(runs, cell, method, arguments.seeds[0])
            found = [runs.top(cell, method, best, seed) for seed in arguments.seeds]
            tops = [top for top in found if top is not None]
            of = 1
            for axis in METHODS[method]:
                of *= len(AXES[axis][1])
            point = ", ".join(
                f"{axis.removesuffix(' (GradMA)')} {value:g}" for axis, value in zip(METHODS[method], best, strict=True)
            )
            gap = f"{sum(tops) / len(tops) - mean:+.2f}"
            ours = spread(tops, ".2f") if len(tops) > 1 else f"{tops[0]:.2f}"
            rows.append([*row, ours, gap, str(len(tops)), f"{len(known)} of {of}", point])
    title = f"# GradMA, Table 1 ({'MNIST' if arguments.data == 'mnist' else 'CIFAR-10'})"
    command = f"python -m papers.gradma table1 --data {arguments.data} --search {arguments.search}"
    command += f" --rounds {arguments.rounds}" if arguments.rounds else ""
    note = (
        "Top test accuracy in % over all evaluations of a run, mean ± standard deviation over the seeds run; paper: "
        "its Table 1, page 6; gap: ours - paper. The best point is that of the first seed with the highest top "
        f"accuracy among the points tried. {runs.rounds} rounds. Search, as far as 'points tried' says: "
        f"{SEARCHES[arguments.search]}. Written by "
        f"`{command}` ({processor()}, {os.cpu_count()} cores, {datetime.date.today().isoformat()})."
    )
    lines = [title, "", note, "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    text = "\n".join(lines) + "\n"
    arguments.results.mkdir(parents=True, exist_ok=True)
    files.write_text(arguments.results / f"table1-{arguments.data}.md", text)
    return text


if __name__ == "__main__":
    sys.exit(main())
