"""``python -m papers.upcycled WHAT``: the synthetic columns of Tables 1 (90 % stragglers) and 3 (30 %), the curves of
Figures 2, 5 and 6 at their best points, the private methods of Figures 3 (output perturbation) and 4 (objective
perturbation), Tables 2 and 5, and what mu and lambda_m do (Theorem 5.6, Corollary 5.8).

Every sweep is stored below --out and not repeated: an interrupted command continues.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedrax import FedraxError, files
from papers.arguments import Different, command, count, folders, seed, writable
from papers.ending import in_a_sentence
from papers.losac.running import markdown, spread, written_by
from papers.upcycled import convergence, data_sets, figures, noise, private, report, tweets
from papers.upcycled.grid import (
    DATA,
    EVERY,
    METHODS,
    Known,
    Point,
    has_all,
    kept_points,
    kind_of,
    measured,
    next_points,
    place_of,
    searched,
)
from papers.upcycled.report import ROUNDS, SEEDS

STRAGGLERS = {"table1": 90, "table3": 30}


@in_a_sentence("papers.upcycled")
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.upcycled", description=__doc__)
    others = {
        **dict.fromkeys(convergence.FIGURES, convergence.figure),
        **dict.fromkeys(noise.FIGURES, noise.figure),
        "table2": data_sets.table2,
        "table5": noise.table5,
        **tweets.COMMANDS,
        "theorem5.6": convergence.theorem,
    }
    parser.add_argument("what", choices=[*STRAGGLERS, *private.FIGURES, *others])
    parser.add_argument("--data", nargs="+", choices=list(DATA), help="which sets")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=seed, nargs="+", action=Different, help="by default 0 to 3; 0 and 1 for tweets")
    of = "of 10 local epochs each, by default 80, 16 for tweets; upcycled, two iterations each"
    parser.add_argument("--rounds", type=count, help=of)
    parser.add_argument("--out", type=Path, help="where sweeps are kept; by default runs/upcycled")
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    search = "tables: the whole grid, or a coarse one and the neighbors of its best points, on test rows alone"
    parser.add_argument("--search", choices=("grid", "coarse"), default="grid", help=search)
    parser.add_argument("--only-write", action="store_true", help="run nothing, write the tables of what there is")
    where = "where tables go; by default beside this command, or with the sweeps where --rounds or --seeds are given"
    parser.add_argument("--results", type=Path, help=where)
    arguments = parser.parse_args()
    arguments.command = command(parser, arguments)
    rounds, seeds = (tweets.ROUNDS, tweets.SEEDS) if arguments.what in tweets.COMMANDS else (ROUNDS, SEEDS)
    arguments.rounds, arguments.seeds = arguments.rounds or rounds, arguments.seeds or seeds
    folders(arguments, "upcycled", tried=(arguments.rounds, arguments.seeds) != (rounds, seeds))
    writable(arguments.out)
    if arguments.what in others:
        others[arguments.what](arguments)
        return 0
    private_ones = arguments.what in private.FIGURES
    arguments.data = arguments.data or list(private.SETS if private_ones else DATA)
    arguments.methods = arguments.methods or list(private.LEVELED if private_ones else METHODS)
    figures.figure(arguments) if private_ones else table(arguments)
    return 0


def table(arguments: argparse.Namespace) -> None:
    """Tables of the published sets and of those of our generator."""
    if arguments.search == "coarse":
        coarse_table(arguments)
        return
    own = [data for data in arguments.data if data.startswith("own ")]
    names = {
        f"{arguments.what}.md": [data for data in arguments.data if data not in own],
        f"{arguments.what}-own.md": own,
    }
    texts = [one_table(arguments, sets, name) for name, sets in names.items() if sets]
    if not any(texts):
        raise FedraxError(f"there are no sweeps of {arguments.what} below {arguments.out} yet: leave --only-write out")
    print("\n".join(filter(None, texts)))


def one_table(arguments: argparse.Namespace, sets: list[str], name: str) -> str:
    """Run missing sweeps, and write the table after each method."""
    stragglers, rows, gains = STRAGGLERS[arguments.what], [], []
    printed = report.printed(stragglers)
    text = ""
    methods = [m for m in EVERY if m in arguments.methods or (m not in METHODS and "FedAvg" in arguments.methods)]
    for data, method in itertools.product(sets, methods):
        if arguments.only_write and not all(kept(arguments, data, method)):
            continue
        began = time.monotonic()
        test, held = (sweep_of(arguments, data, method, part) for part in ("test", "held out"))
        if method in METHODS:
            rows.append(row_of(data, method, test, printed.get((data.removeprefix("own "), method))))
            gains.append(held_out_row(data, method, test, held))
        else:
            gains.append(server_step_row(data, test, held))
        text = written(arguments, rows, gains)
        files.write_text(arguments.results / name, text)
        if not arguments.only_write:
            print(f"{data}, {method}: {time.monotonic() - began:.0f} s", flush=True)
    return text


def coarse_table(arguments: argparse.Namespace) -> None:
    """The coarse search of every method on test rows, and the first part of the table after each."""
    stragglers, rows, text = STRAGGLERS[arguments.what], [], ""
    printed = report.printed(stragglers)
    for data, method in itertools.product(arguments.data, [m for m in METHODS if m in arguments.methods]):
        where = (arguments.out, data, stragglers, method, "test")
        began, how = time.monotonic(), (arguments.seeds, arguments.rounds, arguments.data_dir)
        if arguments.only_write:
            found = measured(*where, *how, kept_points(place_of(*where)))
            if not found or next_points(EVERY[method], found):
                continue
        else:
            found = searched(*where, *how)
        rows.append([*row_of(data, method, found, printed.get((data.removeprefix("own "), method))), str(len(found))])
        print(f"{data}, {method}: {len(found)} points, {time.monotonic() - began:.0f} s", flush=True)
        text = written(arguments, rows, [])
        files.write_text(arguments.results / f"{arguments.what}-coarse.md", text)
    if not text:
        raise FedraxError(f"there are no sweeps of {arguments.what} below {arguments.out} yet: leave --only-write out")
    print(text)


def kept(arguments: argparse.Namespace, data: str, method: str) -> list[bool]:
    """Whether both sweeps of a method have been run at every point."""
    where = (arguments.out, data, STRAGGLERS[arguments.what], method)
    return [has_all(place_of(*where, part), method) for part in ("test", "held out")]


def sweep_of(arguments: argparse.Namespace, data: str, method: str, part: str) -> Known:
    """Sweep of a method's grid on a set."""
    where = (arguments.out, data, STRAGGLERS[arguments.what], method, part)
    return measured(*where, arguments.seeds, arguments.rounds, arguments.data_dir)


def choose(found: Known, upcycled: bool, over: str = "devices") -> int:
    """The point with the highest mean accuracy over devices or samples, with or without extrapolation."""
    allowed = [i for i, (point, _) in enumerate(found) if "a" not in point or (point["a"] > 0) == upcycled]
    return max(allowed, key=lambda i: found[i][1][kind_of(found[0][1]) + over].mean())


def row_of(data: str, method: str, test: Known, printed: dict[str, str] | None) -> list[str]:
    """Values of the paper and of fedrax, chosen on the test rows as in the paper."""
    plain, up = choose(test, False), choose(test, True)
    ours = [test[i][1][kind_of(test[0][1]) + "devices"] for i in (plain, up)]
    samples = [test[choose(test, up, "samples")][1][kind_of(test[0][1]) + "samples"] for up in (False, True)]
    row = [data, method]
    for name, found in zip(("plain", "upcycled"), ours, strict=True):
        paper = f"{printed[name]} ± {printed[name + '_deviation']}" if printed else "-"
        row += [paper, spread(found.tolist(), ".2f")]
    gain = f"{float(printed['upcycled']) - float(printed['plain']):+.2f}" if printed else "-"
    row += [gain, f"{ours[1].mean() - ours[0].mean():+.2f}"]
    row += [spread(s.tolist(), ".2f") for s in samples] + [f"{samples[1].mean() - samples[0].mean():+.2f}"]
    axes = {"lr": EVERY[method].steps, **EVERY[method].axes}
    return [*row, shown(test, plain, axes), shown(test, up, axes)]


def held_out_row(data: str, method: str, test: Known, held: Known) -> list[str]:
    """Test accuracy at points chosen on held-out rows."""
    return [data, method, *chosen(test, held, choose(held, False), choose(held, True))]


def server_step_row(data: str, test: Known, held: Known) -> list[str]:
    """FedAvg with a tuned server learning rate, compared with FedAvg."""
    plain = lambda found: max(  # noqa: E731
        (i for i, (p, _) in enumerate(found) if p["server lr"] == 1), key=lambda i: found[i][1]["devices"].mean()
    )
    return [data, "FedAvg, server step tuned instead", *chosen(test, held, plain(held), choose(held, False))]


def chosen(test: Known, held: Known, plain: int, up: int) -> list[str]:
    """Test accuracies over devices at two points chosen on held-out rows, the gain of the second one, and both over
    samples.
    """
    devices = [test[i][1][kind_of(test[0][1]) + "devices"] for i in (plain, up)]
    samples = [test[i][1][kind_of(test[0][1]) + "samples"].mean() for i in (plain, up)]
    gain = devices[1] - devices[0]
    return [
        *(spread(d.tolist(), ".2f") for d in devices),
        spread(gain.tolist(), "+.2f").replace("± +", "± "),
        *(f"{s:.2f}" for s in samples),
        shown(held, plain),
        shown(held, up),
    ]


def shown(found: Known, index: int, axes: Mapping[str, Sequence[float]] | None = None) -> str:
    """Text of a point; values at an end of their axis are marked unless another value is equally good.

    axes: the grid, where ``found`` has a part of its points only.
    """
    point, values = found[index]
    best, parts = values[kind_of(found[0][1]) + "devices"].mean(), []
    for axis, value in point.items():
        line = {
            p[axis]: v[kind_of(found[0][1]) + "devices"].mean()
            for p, v in found
            if without(p, axis) == without(point, axis)
        }
        grid = axes.get(axis, line) if axes else line
        ends = {min(grid), max(grid)}
        inner = max((mean for other, mean in line.items() if other not in ends), default=0.0)
        edge = axis != "a" and value in ends and best > inner
        if axis != "a" or value:
            parts.append(f"{axis} {value:g}" + (" (end)" if edge else ""))
    return ", ".join(parts)


def without(point: Point, axis: str) -> Point:
    """The other axes of the point."""
    return {name: value for name, value in point.items() if name != axis}


def written(arguments: argparse.Namespace, rows: list[list[str]], gains: list[list[str]]) -> str:
    """Write both tables, with the settings of their runs."""
    stragglers = STRAGGLERS[arguments.what]
    coarse = arguments.search == "coarse"
    searched_by = (
        f"Searched was every second value of each axis, then the neighbors of the best points, then the extrapolations "
        f"there; {sum(len(method.points) for method in METHODS.values()):,} points are in the seven grids. "
        if coarse
        else ""
    )
    lines = [
        f"# Upcycled-FL, Table {arguments.what[-1]} (synthetic sets, {stragglers} % stragglers)",
        "",
        "Test accuracy in % after the last round, averaged over devices, mean ± standard deviation over "
        f"{len(arguments.seeds)} seeds ({arguments.rounds} rounds; upcycled, twice as many iterations). Points are "
        "chosen by this very accuracy, as the paper's grid search does; those of the columns over samples, by accuracy "
        "over all test samples. 'own' sets are our generator's. pFedMe: the "
        "devices' own models. Sets and methods that are not in the table were not run. "
        f"'(end)': the best value lies at the end of its grid. {searched_by}{written_by(arguments)}",
        "",
        *markdown(
            "set|method|paper|ours|paper, upcycled|ours, upcycled|paper's gain|our gain"
            "|over samples|upcycled, over samples|gain over samples|best|best, upcycled"
            + ("|points" if coarse else ""),
            rows,
        ),
    ]
    if coarse:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        "## Chosen on held-out rows",
        "",
        "The same test accuracies at points chosen by runs on 80 % of each device's training rows, measured on the "
        "other 20 %. The gain is over the same seeds. The last method of each set is FedAvg with its server step "
        "chosen from a grid of its own, not upcycled: `upcycle(FedAvg, a)` is FedAvg with server step 1 + a.",
        "",
        *markdown(
            "set|method|plain|upcycled|gain|over samples|upcycled, over samples|chosen|chosen, upcycled",
            gains,
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
