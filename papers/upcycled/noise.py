"""Figures 3 and 4 as printed: all seven methods at the paper's noise, on the four published sets; and Table 5.

The accuracy against epsilon, at many noise levels and of three methods, is in :mod:`papers.upcycled.figures`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import matplotlib.figure
import numpy as np

from fedrax import FedAvg, FedraxError, files, simulate
from fedrax.algorithms import upcycle
from fedrax.algorithms.feddyn import FedDyn
from fedrax.algorithms.pfedme import PFedMe
from fedrax.contract.algorithm import Algorithm
from fedrax.optim.server import SGD, Yogi
from fedrax.report import curves
from papers.losac.running import spread
from papers.upcycled import private, report
from papers.upcycled.convergence import SETS, up_wins
from papers.upcycled.grid import Point
from papers.upcycled.private import MEASURED, Figure, federation_for, rounded

FIGURES = {"figure3-methods": private.FIGURES["figure3"], "figure4-methods": private.FIGURES["figure4"]}
EXTRAPOLATIONS = (0.0, 0.1, 0.5)
"""a of `upcycle`; 0 is the method itself, with half of the rounds."""
PRINTED_SECONDS = {
    "FedAvg": (147.50, 6.69),
    "FedAvgM": (147.47, 7.49),
    "FedProx": (139.91, 10.81),
    "SCAFFOLD": (153.88, 12.70),
    "FedDyn": (181.49, 17.60),
    "pFedMe": (467.42, 12.87),
    "FedYogi": (153.53, 13.72),
}
"""Table 5's row of the baselines; the upcycled row is not legible in the text at hand."""


def _fedavgm(point: Point) -> Algorithm:
    return FedAvg(local=private._local(point), server_optimizer=SGD(momentum=point["beta"]))


def _feddyn(point: Point) -> Algorithm:
    return FedDyn(local=private._local(point), alpha=point["dual"])


def _pfedme(point: Point) -> Algorithm:
    plain = dataclasses.replace(private._local(point), momentum=None)
    return PFedMe(local=plain, lam=point["lambda"], inner_lr=0.1, inner_steps=5)


def _fedyogi(point: Point) -> Algorithm:
    return FedAvg(local=private._local(point), server_optimizer=Yogi(lr=point["server lr"]))


METHODS: dict[str, tuple[Callable[[Point], Algorithm], dict[str, tuple[float, ...]]]] = {
    "FedAvg": (private._fedavg, {}),
    "FedAvgM": (_fedavgm, {"beta": (0.5, 0.9)}),
    "FedProx": (private._fedprox, {}),
    "SCAFFOLD": (private._scaffold, {}),
    "FedDyn": (_feddyn, {"dual": (0.1, 1.0, 10.0)}),
    "pFedMe": (_pfedme, {"lambda": (0.1, 1.0)}),
    "FedYogi": (_fedyogi, {"server lr": (0.01, 0.1, 1.0)}),
}
"""The tables' methods, and what is tuned of them besides the local step and a. FedDyn's alpha is called dual here."""


def points_of(of: Figure, method: str, upcycled: bool) -> list[Point]:
    """The grid of a method at the paper's noise."""
    level = of.share * of.printed[of.level] if upcycled else of.printed[of.level]
    axes = {"lr": of.axes["lr"], **METHODS[method][1], **({"a": EXTRAPOLATIONS} if upcycled else {})}
    fixed = of.printed | {of.level: level}
    return [fixed | dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def at(of: Figure, method: str, point: Point) -> Algorithm:
    """The private method at a point."""
    made = of.wrap(METHODS[method][0](point), point)
    return upcycle(made, a=point["a"]) if "a" in point else made


def measured(arguments: argparse.Namespace, data: str, method: str) -> dict[str, Any] | None:
    """Losses [points, seeds, MEASURED] of the plain and of the upcycled method, kept in a file."""
    of = FIGURES[arguments.what]
    facts = {"seeds": arguments.seeds, "rounds": arguments.rounds}
    facts["points"] = [points_of(of, method, upcycled) for upcycled in (False, True)]
    place = arguments.out / f"{arguments.what} {data} {method}.json".replace(" ", "-")
    if not place.exists():
        if arguments.only_write:
            return None
        federation = federation_for(of, data, "test", arguments.data_dir)
        losses = []
        for points, rounds in zip(facts["points"], (arguments.rounds, arguments.rounds // 2), strict=True):
            algorithms = [at(of, method, point) for point in points]
            results = private.sweep_all_clients(of, algorithms, federation, arguments.seeds, rounds)
            losses.append([[loss_of(run.events, rounds) for run in runs] for runs in results])
        files.write_text(place, json.dumps(facts | {"losses": losses}) + "\n")
    kept = files.read_json(place)
    if any(kept.get(key) != json.loads(json.dumps(value)) for key, value in facts.items()):
        raise FedraxError(f"{place} holds another sweep: choose another --out.")
    return kept


def loss_of(events: list[dict[str, Any]], rounds: int) -> list[float | None]:
    """Test loss at even distances, a personal method's of the devices' own models."""
    found = {e["round"]: e.get("test_personal_loss", e.get("test_loss")) for e in events}
    return [rounded(found.get(rounds // MEASURED * (k + 1))) for k in range(MEASURED)]


def chosen(kept: dict[str, Any]) -> dict[str, tuple[Point, np.ndarray]]:
    """The point with the smallest final mean loss of each way, and its losses [seeds, MEASURED]."""
    found = {}
    ways = {"plain": (0, lambda p: True), "half": (1, lambda p: p["a"] == 0), "upcycled": (1, lambda p: p["a"] > 0)}
    for way, (part, allowed) in ways.items():
        losses = np.array(kept["losses"][part], float)
        final = np.nan_to_num(losses[:, :, -1].mean(1), nan=np.inf)
        indices = [i for i, point in enumerate(kept["points"][part]) if allowed(point)]
        best = min(indices, key=lambda i: final[i])
        found[way] = (kept["points"][part][best], losses[best])
    return found


def figure(arguments: argparse.Namespace) -> None:
    """Every sweep that is missing, then the table and the picture."""
    if arguments.rounds % (2 * MEASURED):
        raise FedraxError(f"--rounds: take a multiple of {2 * MEASURED}, not {arguments.rounds}")
    found = {}
    for data, method in itertools.product(arguments.data or SETS, arguments.methods or list(METHODS)):
        began = time.monotonic()
        kept = measured(arguments, data, method)
        if kept is not None:
            found[data, method] = chosen(kept)
            print(f"{data}, {method}: {time.monotonic() - began:.0f} s", flush=True)
    if not found:
        raise FedraxError(f"there are no sweeps of {arguments.what} below {arguments.out} yet: leave --only-write out")
    rows = []
    for (data, method), ways in found.items():
        losses = {way: values for way, (_, values) in ways.items()}
        final = {way: values[:, -1] for way, values in losses.items()}
        gains = [final["upcycled"] - final[way] for way in ("plain", "half")]
        text = [spread(gain.tolist(), "+.4f").replace("± +", "± ") for gain in gains]
        cells = [spread(final[way].tolist(), ".4f") for way in ("plain", "upcycled", "half")]
        points = [", ".join(f"{k} {v:.3g}" for k, v in ways[way][0].items()) for way in ("plain", "upcycled")]
        rows.append([data, method, *cells, *text, *points])
    of = FIGURES[arguments.what]
    wins = [
        sum(up_wins({"plain": w[way][1], "upcycled": w["upcycled"][1]}) for w in found.values())
        for way in ("plain", "half")
    ]
    note = (
        f"The figure prints curves of the loss and no numbers. Test loss after the last of {arguments.rounds} "
        f"iterations at the paper's noise, {len(arguments.seeds)} seeds, mean ± standard deviation, at the points "
        "with the smallest test loss; pFedMe: the devices' own models. All devices take part in each round; upcycled "
        f"methods take half of the rounds with {of.share:g} of the plain ones' {of.level}. 'half the rounds' is the "
        "method itself with the noise, the rounds and so the epsilon of the upcycled one. The upcycled loss is lower "
        f"than the plain one by more than the spread in {wins[0]} of {len(found)} cases, and than that of half the "
        f"rounds in {wins[1]}."
    )
    columns = [
        "set",
        "method",
        "plain",
        "upcycled",
        "half the rounds",
        "upcycled - plain",
        "upcycled - half the rounds",
    ]
    columns += ["chosen, plain", "chosen, upcycled"]
    title = f"Upcycled-FL, Figure {of.number} ({of.mechanism}, seven methods at the paper's noise)"
    report.write(arguments, title, note, columns, rows)
    curves.save_curves(draw(arguments, found), arguments.results / arguments.what)


def draw(
    arguments: argparse.Namespace, found: dict[tuple[str, str], dict[str, tuple[Point, np.ndarray]]]
) -> matplotlib.figure.Figure:
    """A panel for each set: loss against iterations, solid lines upcycled."""
    sets = list(dict.fromkeys(data for data, _ in found))
    sketch = matplotlib.figure.Figure(figsize=(1 + 3.6 * len(sets), 4.2), layout="constrained")
    grid = sketch.subplots(1, len(sets), squeeze=False)[0]
    at_iteration = arguments.rounds / MEASURED * np.arange(1, MEASURED + 1)
    for axes, data in zip(grid, sets, strict=True):
        for i, method in enumerate(METHODS):
            for way, dash in (("plain", "--"), ("upcycled", "-")):
                if (data, method) in found:
                    losses = found[data, method][way][1]
                    style: dict[str, Any] = {"color": curves.PALETTE[i], "linewidth": 1.3, "linestyle": dash}
                    axes.plot(at_iteration, losses.mean(0), label=f"{method}, {way}", **style)
        axes.set_title(data)
        axes.set_xlabel("iterations")
        axes.set_yscale("log")
        axes.grid(color="0.92", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel("test loss")
    handles = {label: line for axes in grid for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    sketch.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    return sketch


# -- Table 5 ----------------------------------------------------------------------------------------------------------


def table5(arguments: argparse.Namespace) -> None:
    """Seconds of a run with output perturbation on Syn(iid), of the method and of the upcycled one."""
    of, rows = FIGURES["figure3-methods"], []
    federation = federation_for(of, "iid", "test", arguments.data_dir)
    task = of.task(federation)
    for method in arguments.methods or list(METHODS):
        seconds = {}
        for upcycled, rounds in ((False, arguments.rounds), (True, arguments.rounds // 2)):
            points = [p for p in points_of(of, method, upcycled) if p["lr"] == 0.1 and p.get("a", 0.5) == 0.5]
            made = at(of, method, points[0])
            options: dict[str, Any] = {"cohort_size": federation.num_clients, "eval_every": rounds, "progress": False}
            took = []
            for seed in [arguments.seeds[0], *arguments.seeds]:  # the first run compiles
                began = time.perf_counter()
                simulate(made, task, federation, rounds=rounds, seed=seed, **options)
                took.append(time.perf_counter() - began)
            seconds[upcycled] = took[1:]
        ratio = statistics.mean(seconds[True]) / statistics.mean(seconds[False])
        mean, deviation = PRINTED_SECONDS[method]
        paper = mean / PRINTED_SECONDS["FedAvg"][0]
        rows.append([method, f"{mean:.2f} ± {deviation:.2f}", f"{paper:.2f}", *timed(seconds), f"{ratio:.2f}"])
    first = float(rows[0][3].split(" ")[0])
    for row in rows:
        row.insert(4, f"{float(row[3].split(' ')[0]) / first:.2f}")
    columns = ["method", "paper, s", "over FedAvg's", "ours, s", "over FedAvg's", "upcycled, s", "upcycled / plain"]
    note = (
        f"Seconds of {arguments.rounds} iterations with output perturbation on Syn(iid), all devices, warm (compiled "
        f"before), mean ± standard deviation over {len(arguments.seeds)} runs. An upcycled method does as many "
        "iterations in half of the rounds. The paper's are of a GPU with PyTorch; its upcycled row is not legible in "
        "the text at hand."
    )
    report.write(arguments, "Upcycled-FL, Table 5: training time", note, columns, rows)


def timed(seconds: dict[bool, list[float]]) -> list[str]:
    """Plain and upcycled seconds as text."""
    return [spread(seconds[upcycled], ".3f") for upcycled in (False, True)]
