"""``python -m papers.losac WHAT``: run an experiment of the paper's, compare it with the paper, write results/.

Finished runs below --out are kept and not run again, but for those of Figure 6: an interrupted command goes on where it
was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from fedrax import files
from fedrax.report import curves
from fedrax.report.runs import MethodRuns
from papers.arguments import Different, command, count, folders, seed
from papers.ending import in_a_sentence
from papers.losac import figure6, figure6_attacks, figure7, sensitivity, table2, theory
from papers.losac.running import TARGET, final, run, stored, summary, write_table

__all__ = ["main", "stored"]

HERE = Path(__file__).parent
HETEROGENEITY = (0, 25, 50, 75, 100)
STEP_SIZES = (2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 1.28e-2, 2.56e-2, 5.12e-2, 0.1024)
TUNED_AT = 100
CONSTANTS = {"FedADMM": ("rho", (5.0, 50.0, 150.0, 500.0, 1500.0))}
"""Constants that are tuned together with the learning rate."""
UNTUNED = ("FedSaga (printed)",)
"""FedSaga with a smaller server step; the variant with the server step of the other methods is tuned."""


@in_a_sentence("papers.losac")
def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m papers.losac", description=__doc__)
    commands = {
        "table2": table2.mnist,
        "table2-har": table2.har,
        "table2-esr": table2.esr,
        "esr-search": table2.esr_search,
        "losses": table2.losses,
        "block-order": table2.block_order,
        "claims": table2.claims,
        "figure2": figure2,
        **dict.fromkeys(sensitivity.FIGURES, sensitivity.figure),
        "tuned": tuned,
        "figure6": figure6.figure,
        "figure6-esr": figure6.figure,
        "figure6-search": figure6.search,
        "figure6-attacks": figure6_attacks.attacks,
        "figure7": figure7.figure,
        "figure7-search": figure7.search,
        "lemma1": theory.lemma1,
        "theorem3": theory.theorem3,
    }
    parser.add_argument("what", choices=list(commands))
    parser.add_argument("--out", type=Path, help="where runs are kept; by default runs/losac")
    parser.add_argument("--data-dir", help="where data files lie; by default $FEDRAX_DATA")
    where = "tables and pictures; by default beside this command, or with the runs where --rounds or --seeds are given"
    parser.add_argument("--results", type=Path, help=where)
    parser.add_argument("--rounds", type=count, help="fewer rounds than the paper's, to try the command out")
    parser.add_argument("--seeds", type=seed, nargs="+", action=Different, help="other seeds than the file's")
    parser.add_argument("--data", nargs="+", choices=table2.SETS, help="losses, block-order: which sets")
    parser.add_argument("--blocks", type=int, nargs="+", choices=(2, 3, 5), help="losses: which M")
    parser.add_argument("--local-steps", type=int, nargs="+", choices=(2, 4, 6), help="losses, block-order: which T")
    arguments = parser.parse_args()
    arguments.command = command(parser, arguments)
    folders(arguments, "losac", tried=bool(arguments.rounds or arguments.seeds))
    return commands[arguments.what](arguments)


# -- Figure 2 ----------------------------------------------------------------------------------------------------


def figure2(arguments: argparse.Namespace) -> int:
    """All methods at the paper's learning rate for five degrees of heterogeneity; the paper prints no numbers."""
    rows = []
    for percent in HETEROGENEITY:
        out = arguments.out / "figure2" / f"c={percent}"
        methods = run(HERE / "figure2.toml", out, arguments, "--partition.percent", str(percent))
        for method in methods:
            rows.append([f"{percent}", method.label, *summary(method)])
        drawn = curves.draw_curves(methods, TARGET, title=f"LoSAC, Figure 2, c = {percent} %")
        curves.save_curves(drawn, arguments.results / f"figure2-c{percent}")
    columns = ["c %", "method", "rounds to 85 %", "loss", "accuracy %", "diverged"]
    note = "Figure 2 prints curves, no numbers. Mean ± standard deviation over seeds after the last round."
    write_table(arguments, "figure2", "LoSAC, Figure 2 (MNIST, eta = 4e-4)", note, columns, rows)
    return 0


# -- Tuned learning rates -----------------------------------------------------------------------------------------


def tuned(arguments: argparse.Namespace) -> int:
    """Every method of Figure 2 at the best learning rate of a grid, at c = 100 %."""
    tried: dict[str, list[Tried]] = {}
    for lr in STEP_SIZES:
        out = arguments.out / "tuned" / f"lr={lr:g}"
        table = files.read_toml(HERE / "figure2.toml")
        table["algorithm"]["local"]["lr"] = lr
        shown = [entry for entry in table["compare"] if entry["label"] not in UNTUNED]
        table["compare"], constants = with_constants(shown)
        files.write_text(out / "comparison.toml", tomlkit.dumps(table))
        flags = ["--partition.percent", str(TUNED_AT)]
        for method in run(out / "comparison.toml", out, arguments, *flags):
            name, constant = constants[method.label]
            tried.setdefault(name, []).append(Tried(lr, constant, method))
    best = {name: max(found, key=lambda one: score(one.method)) for name, found in tried.items()}
    rows = [[name, settings(name, one), *summary(one.method)] for name, one in best.items()]
    columns = ["method", "best eta", "rounds to 85 %", "loss", "accuracy %", "diverged"]
    grid = ", ".join(f"{lr:g}" for lr in STEP_SIZES)
    note = f"c = {TUNED_AT} %; for each method the eta in {{{grid}}} with the highest mean final accuracy of all seeds."
    for name, (key, values) in CONSTANTS.items():
        note += f" {name}'s {key} is tuned with it, in {{{', '.join(f'{value:g}' for value in values)}}}."
    write_table(arguments, "tuned", "LoSAC's Figure 2 with every method at its own step size", note, columns, rows)
    shown = [MethodRuns(f"{name}, η = {one.lr:g}", one.method.runs) for name, one in best.items()]
    curves.save_curves(curves.draw_curves(shown, TARGET, title="Tuned, c = 100 %"), arguments.results / "tuned")
    return 0


class Tried(NamedTuple):
    """A method with its settings."""

    lr: float
    constant: float | None
    """Value from CONSTANTS; None for a method without."""
    method: MethodRuns


def with_constants(entries: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """([[compare]] with every value of CONSTANTS, label -> (method, value)); the value of the file keeps its label."""
    wider, made = [], {}
    for entry in entries:
        name = entry["label"]
        key, values = CONSTANTS.get(name, ("", (None,)))
        for value in values:
            label = name if value in (None, entry.get(key)) else f"{name}, {key} = {value:g}"
            made[label] = (name, value)
            wider.append(entry | {"label": label} | ({} if value is None else {key: value}))
    return wider, made


def settings(name: str, best: Tried) -> str:
    """Text of the best settings, and which of them are at an end of their grid."""
    edge = lambda value, grid: "" if min(grid) < value < max(grid) else " (end of the grid)"  # noqa: E731
    said = f"{best.lr:g}{edge(best.lr, STEP_SIZES)}"
    if best.constant is None:
        return said
    key, values = CONSTANTS[name]
    return f"{said}, {key} = {best.constant:g}{edge(best.constant, values)}"


def score(method: MethodRuns) -> float:
    """Mean final accuracy over seeds; 0 for a diverged run."""
    _, _, accuracy = final(method)
    return sum(accuracy) / len(method.runs)


if __name__ == "__main__":
    sys.exit(main())
