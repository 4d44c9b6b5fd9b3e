"""Figures 3 to 5: cohort size (S) and number of local steps (T), IID and sorted by label.

All are Figure 2's experiment with other constants. The paper's text does not print the values of S and T except T = 2
and T = 8 on HAR, nor the rounds for HAR.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import tomlkit

from fedrax import files
from fedrax.report import curves
from fedrax.report.runs import MethodRuns
from papers.losac.panels import draw
from papers.losac.running import TARGET, few_seeds, run, summary, write_table

FILE = Path(__file__).with_name("figure2.toml")
HAR = "har_features"
RECOMPUTED = "HAR's 561 features are recomputed from its windows; they are not UCI's own."
ESR, ESR_START = {"name": "esr", "classes": 2, "scaling": "range"}, "pytorch"
"""Of the scalings and initializations of ``esr-search`` those with which Table 2 is nearest to the paper."""
DRAWN = "ESR is split by rows at random (2,300 of 11,500 for the test); the paper does not say how."
METRICS = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
COMPARED = ("FedAvg", "FedSaga", "FedCM", "SCAFFOLD", "MimeSVRG", "LoSAC (printed)", "LoSAC (consistent)")
"""MimeSVRG is only compared on MNIST, as in the paper."""
SMALL_SETTINGS = {"rounds": 500, "eval_every": 5}
SMALL_ETA, SMALL_CLIENTS = 1e-4, 100
"""Of HAR and ESR."""


class Panel(NamedTuple):
    """A setting of Figure 2's experiment."""

    percent: int
    """Percentage of the data sorted by label; 0 is IID."""
    cohort: int = 50
    steps: int = 5
    data: str = "MNIST"
    methods: tuple[str, ...] = COMPARED


FIGURES = {
    "figure3": [Panel(percent, cohort) for percent in (0, 100) for cohort in (20, 50, 100)],
    "figure4": [Panel(percent, steps=steps) for percent in (0, 100) for steps in (2, 5, 8)],
    **{
        figure: [
            Panel(100, cohort, steps, data, tuple(label for label in COMPARED if label != "MimeSVRG"))
            for cohort, steps in ((5, 5), (10, 5), (20, 5), (10, 2), (10, 8))
        ]
        for figure, data in (("figure5", "HAR"), ("figure5-esr", "ESR"))
    },
}
TITLES = {
    "figure3": "LoSAC, Figure 3 (MNIST, clients a round)",
    "figure4": "LoSAC, Figure 4 (MNIST, local steps)",
    "figure5": "LoSAC, Figure 5 (HAR, clients a round and local steps)",
    "figure5-esr": "LoSAC, Figure 5 (ESR, clients a round and local steps)",
}


def figure(arguments: argparse.Namespace) -> int:
    """All panels of a figure: a table of final values, and loss and accuracy over rounds."""
    what, rows = arguments.what, []
    found: dict[Panel, list[MethodRuns]] = {}
    for panel in FIGURES[what]:
        found[panel] = measured(panel, arguments)
        setting = [str(panel.percent), str(panel.cohort), str(panel.steps)]
        rows += [[*setting, method.label, *summary(method)] for method in found[panel]]
    columns = ["c %", "S", "T", "method", "rounds to 85 %", "loss", "accuracy %", "diverged"]
    note = "The paper prints curves, no numbers. Mean ± standard deviation over seeds after the last round."
    note += few_seeds([method for methods in found.values() for method in methods])
    for data, remark in (("HAR", RECOMPUTED), ("ESR", DRAWN)):
        note += f" {remark}" if any(panel.data == data for panel in found) else ""
    write_table(arguments, what, TITLES[what], note, columns, rows)
    titled = {title(panel, list(found)): methods for panel, methods in found.items()}
    drawn = draw(titled, METRICS, [TARGET] * len(found), top=1, legend=len(COMPARED))
    curves.save_curves(drawn, arguments.results / what)
    return 0


def measured(panel: Panel, arguments: argparse.Namespace) -> list[MethodRuns]:
    """Methods of a panel; figures with a common panel share its runs."""
    out = arguments.out / "panels" / f"{panel.data},c={panel.percent},S={panel.cohort},T={panel.steps}"
    files.write_text(out / "comparison.toml", tomlkit.dumps(experiment(panel)))
    return run(out / "comparison.toml", out, arguments)


def experiment(panel: Panel) -> dict:
    """Figure 2's table with the constants and methods of a panel."""
    table = files.read_toml(FILE)
    table["partition"]["percent"] = float(panel.percent)
    table["run"]["cohort_size"] = panel.cohort
    table["algorithm"]["local"]["steps"] = panel.steps
    if panel.data != "MNIST":
        table["data"] = {"name": HAR} if panel.data == "HAR" else dict(ESR)
        if panel.data == "ESR":
            table["model"]["initialization"] = ESR_START
        table["partition"]["clients"] = SMALL_CLIENTS
        table["algorithm"]["local"]["lr"] = SMALL_ETA
        table["run"] |= SMALL_SETTINGS
    entries = {entry["label"]: entry for entry in table["compare"]}
    table["compare"] = [entries[label] for label in panel.methods]
    return table


def title(panel: Panel, panels: list[Panel]) -> str:
    """The settings in which a panel differs from those beside it."""
    shown = {
        "percent": {0: "IID", 100: "sorted"}.get(panel.percent, f"c = {panel.percent} %"),
        "cohort": f"S = {panel.cohort}",
        "steps": f"T = {panel.steps}",
    }
    return ", ".join(text for name, text in shown.items() if len({getattr(one, name) for one in panels}) > 1)
