"""``python -m papers.episode WHAT``: EPISODE compared with CELGC and others, as tables and figures.

fig3 is the quartic pair of Figure 3, points its nine tuning points; proposition1 and speedup check the theory. snli and
cifar10 run a file at two similarities, for a GPU or with --small; their runs are stored below --out, and an interrupted
command continues. tuning, table3 (with Table 2 and Figures 1, 6 and 7) and sent140 store their runs beside the tables.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedrax import files, sweep
from fedrax.experiments import comparison, experiment
from fedrax.report.curves import PALETTE, draw_curves, save_curves
from fedrax.report.runs import last_values
from papers.arguments import command, count, folders
from papers.ending import in_a_sentence
from papers.episode import synthetic, text, tweets
from papers.losac import running as losac
from papers.losac.running import few_seeds, spread, written_by

HERE = Path(__file__).parent
HETEROGENEITY = (1, 2, 4, 8)
SEEDS = 200
SIMILARITY = {
    "snli": (30, 10),
    "snli_small": (30, 10),
    "cifar10": (50, 70),
    "cifar10_resnet20": (50, 70),
    "cifar10_small": (30, 10),
}
"""Percent, by experiment file; on CIFAR-10 the paper has 50 and 70."""
PRINTED = {
    "snli": (
        Path(__file__).with_name("snli_printed.csv"),
        "Printed: the paper's Table 3, for I = 4, at its own sizes.",
    ),
    "cifar10": (None, "The paper prints curves, no numbers, at similarity 50 and 70 %."),
}
EARLY = 30
"""The rounds that the figure shows."""

Paths = dict[str, np.ndarray]
"""By method: x [seeds, evaluations]."""


@in_a_sentence("papers.episode")
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.episode", description=__doc__)
    commands = {"fig3": fig3, "snli": similarity, "cifar10": similarity, **LISTED}
    parser.add_argument("what", choices=list(commands))
    parser.add_argument("--resnet20", action="store_true", help="cifar10: with a network for one GPU and an hour")
    many = "how many; by default 200 for fig3, the file's for snli and cifar10, and 3 for the others"
    parser.add_argument("--small", action="store_true", help="snli and cifar10: in a size for a few cores")
    parser.add_argument("--seeds", type=count, help=many)
    kept = "where runs of snli and cifar10 are kept; by default runs/episode"
    parser.add_argument("--out", type=Path, help=kept)
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    parser.add_argument("--rounds", type=count, help="fewer rounds than the paper's, to try the command out")
    where = "where table and picture go; by default beside this command, or with the runs where --rounds is given, or"
    where += " --seeds to fig3"
    parser.add_argument("--results", type=Path, help=where)
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="table3 and sent140: rows of these methods only")
    parser.add_argument("--settings", nargs="+", metavar="I,S", help="table3: rows of these I and similarities only")
    parser.add_argument("--only-write", action="store_true", help="run nothing, write the tables of kept runs")
    arguments = parser.parse_args()
    arguments.command = command(parser, arguments)
    fewer = arguments.what == "fig3" and arguments.seeds not in (None, SEEDS)  # the others say how many they have
    folders(arguments, "episode", tried=bool(arguments.rounds or fewer))
    if arguments.what in LISTED:
        arguments.seeds = list(range(arguments.seeds or losac.SEEDS))
    commands[arguments.what](arguments)
    return 0


LISTED = {
    "proposition1": synthetic.proposition1,
    "points": synthetic.points,
    "speedup": synthetic.speedup,
    "tuning": text.tuning,
    "table3": text.table3,
    "sent140-tuning": tweets.tuning,
    "sent140": tweets.sent140,
}
"""Further commands, which take a list of seeds."""


def fig3(arguments: argparse.Namespace) -> None:
    """Run all seeds of a method in one compiled program, for each H."""
    table = files.read_toml(HERE / "fig3.toml")
    rounds, arguments.seeds = arguments.rounds or table["run"]["rounds"], arguments.seeds or SEEDS
    found, minima = {}, {}
    for heterogeneity in HETEROGENEITY:
        table["data"]["heterogeneity"] = float(heterogeneity)
        table["run"]["rounds"] = rounds
        found[heterogeneity], measured, minima[heterogeneity] = run(table, arguments.seeds)
    text = write(arguments, found, measured, minima)
    save_curves(draw(found, measured, minima), arguments.results / "fig3")
    print(text)


def run(table: dict[str, Any], seeds: int) -> tuple[Paths, list[int], float]:
    """x of every method and seed, the evaluated rounds (the first ones and the last), and the minimizer."""
    paths, measured, minimum = {}, [], 0.0
    for method in comparison.from_table(table, "fig3.toml").methods:
        algorithm, task, federation = experiment.build(method)
        rounds, both = method.run.rounds, []
        for stop, every in ((min(EARLY, rounds), 1), (rounds, rounds)):
            settings = dataclasses.replace(method.run, rounds=stop, eval_every=every)
            (results,) = sweep([algorithm], task, federation, range(seeds), settings, mode="vectorized")
            both.append([result.metric("x") for result in results])
        joined = [[(0, method.model.initial), *early, *late] for early, late in zip(*both, strict=True)]
        measured = [round for round, _ in joined[0]]
        paths[method.name] = np.array([[x for _, x in path] for path in joined])
        minimum = float(np.asarray(federation.truth).item())
    return paths, measured, minimum


def write(arguments: argparse.Namespace, found: dict[int, Paths], measured: list[int], minima: dict[int, float]) -> str:
    """Distances from the minimizer, early and at the end."""
    early = len(measured) - 2
    lines = [
        "# EPISODE, Figure 3 (quartic pair)",
        "",
        f"Distance |x - x*| from the minimum of the mean objective, mean ± standard deviation over {arguments.seeds} "
        "seeds. The paper prints curves, no numbers: EPISODE arrives at every H, CELGC fails to as H grows. "
        f"eta = 0.01, gamma / eta = 5, I = 8, from x = 1. {written_by(arguments)}",
        "",
        f"| H | minimum x* | method | after {measured[early]} rounds | after {measured[-1]} rounds | mean x there |",
        "|---|---|---|---|---|---|",
    ]
    for heterogeneity, paths in found.items():
        for method, x in paths.items():
            apart = np.abs(x - minima[heterogeneity])
            cells = [str(heterogeneity), f"{minima[heterogeneity]:.4f}", method]
            cells += [spread(apart[:, at].tolist(), ".4f") for at in (early, -1)]
            lines.append("| " + " | ".join([*cells, f"{x[:, -1].mean():.4f}"]) + " |")
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / "fig3.md", text)
    return text


def similarity(arguments: argparse.Namespace) -> None:
    """Run all methods of a file at similarity 30 and 10 %."""
    name = arguments.what + ("_small" if arguments.small else "_resnet20" if arguments.resnet20 else "")
    chosen = argparse.Namespace(
        **vars(arguments) | {"seeds": list(range(arguments.seeds)) if arguments.seeds else None}
    )
    rows, few = [], ""
    file, remark = PRINTED[arguments.what]
    printed = {(r["similarity"], r["method"]): r["accuracy"] for r in csv.DictReader(file.open())} if file else {}
    for percent in SIMILARITY[name]:
        out = arguments.out / name / f"s={percent}"
        methods = losac.run(HERE / f"{name}.toml", out, chosen, "--partition.percent", str(percent))
        few = few_seeds(methods)
        for method in methods:
            ends = [last_values(one.events) for one in method.runs if one.failure is None]
            cells = [spread([100 * end["test_accuracy"] for end in ends], ".2f")]
            cells += [spread([end["test_loss"] for end in ends], ".4f")]
            clipped = [100 * event["clipped"] for one in method.runs for event in one.events if "clipped" in event]
            cells += [f"{sum(clipped) / len(clipped):.0f}" if clipped else "-", str(len(method.runs) - len(ends))]
            rows.append([f"{percent}", method.label, printed.get((f"{percent}", method.label), "-"), *cells])
        save_curves(
            draw_curves(methods, title=f"{name}, similarity {percent} %"), arguments.results / f"{name}-s{percent}"
        )
    kind = "on the smaller budget of" if arguments.small else "with the settings of"
    lines = [
        f"# EPISODE, {'SNLI' if arguments.what == 'snli' else 'CIFAR-10'}",
        "",
        f"Run {kind} `{name}.toml`. {remark} Ours: mean ± standard deviation over seeds after the last "
        "round; in a round EPISODE clips all steps or none."
        f"{few} {written_by(arguments)}",
        "",
        "| similarity % | method | printed accuracy % | test accuracy % | test loss | rounds clipped % | diverged |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    text = "\n".join(lines) + "\n"
    files.write_text(arguments.results / f"{name}.md", text)
    print(text)


def objective(heterogeneity: int, x: np.ndarray) -> np.ndarray:
    """(f_1 + f_2) / 2."""
    return x**4 - 3 * x**3 - heterogeneity / 2 * x**2 + x


def draw(found: dict[int, Paths], measured: list[int], minima: dict[int, float]) -> Figure:
    """Top: the objective over rounds (mean over seeds, band of one standard deviation); bottom: final values."""
    sketch = Figure(figsize=(3 * len(found), 5.4), layout="constrained")
    grid = sketch.subplots(2, len(found), squeeze=False)
    for column, (heterogeneity, paths) in enumerate(found.items()):
        above, below = grid[0][column], grid[1][column]
        ends = [minima[heterogeneity], 1.0, *(x[:, -1].mean() for x in paths.values())]
        line = np.linspace(min(ends) - 0.6, max(ends) + 0.6, 300)
        below.plot(line, objective(heterogeneity, line), color="0.6", linewidth=1.4)
        for i, (method, x) in enumerate(paths.items()):
            values = objective(heterogeneity, x[:, :-1])
            mean, deviation = values.mean(0), values.std(0)
            above.plot(measured[:-1], mean, color=PALETTE[i], linewidth=1.6, label=method)
            above.fill_between(measured[:-1], mean - deviation, mean + deviation, color=PALETTE[i], alpha=0.15)
            end = x[:, -1]
            below.errorbar(
                end.mean(), objective(heterogeneity, end.mean()), xerr=end.std(), fmt="osd^"[i], color=PALETTE[i]
            )
        lowest = objective(heterogeneity, np.array(minima[heterogeneity]))
        above.axhline(lowest, color="0.45", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1, label="minimum")
        above.set_title(f"H = {heterogeneity}", fontsize="medium")
        above.set_xlabel("communication rounds")
        below.set_xlabel("x")
        if column == 0:
            above.set_ylabel("mean objective")
            below.set_ylabel("mean objective")
        for axes in (above, below):
            axes.grid(color="0.92", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
    sketch.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return sketch


if __name__ == "__main__":
    sys.exit(main())
