"""Figures 3 and 4 as printed: all seven methods at the paper's noise, on the four published sets; and Table 5.

The accuracy against epsilon, at many noise levels and of three methods, is in :mod:`papers.upcycled.figures`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedrax import FedAvg, FedraxError, files, simulate
from fedrax.algorithms import upcycle
from fedrax.algorithms.feddyn import FedDyn
from fedrax.algorithms.pfedme import PFedMe
from fedrax.contract.algorithm import Algorithm
from fedrax.optim.server import SGD, Yogi
from fedrax.report import curves
from papers.losac.running import spread, write_table
from papers.upcycled import private, report
from papers.upcycled.convergence import SETS
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
        points = [", ".join(f"{k} {v:.3g}" for k, v in ways[way][0].items()) for way in ("plain", "upcycled")]
        rows.append([data, method, *report.final_cells(losses_of(ways)), *points])
    of = FIGURES[arguments.what]
    note = (
        f"The figure prints curves of the loss and no numbers. Test loss after the last of {arguments.rounds} "
        f"iterations at the paper's noise, {len(arguments.seeds)} seeds, mean ± standard deviation, at the points "
        "with the smallest test loss; pFedMe: the devices' own models. All devices take part in each round; upcycled "
        f"methods take half of the rounds with {of.share:g} of the plain ones' {of.level}. 'half the rounds' is the "
        "method itself with the noise, the rounds and so the epsilon of the upcycled one."
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
    losses = {case: losses_of(ways) for case, ways in found.items()}
    more = report.wins(losses) + report.wins(losses, "half")
    write_table(arguments, arguments.what, title, note, columns, rows, more)
    panels = {data: {m: losses_of(ways) for (of, m), ways in found.items() if of == data} for data, _ in found}
    drawn = report.draw_pairs(panels, arguments.rounds, "iterations", list(METHODS))
    curves.save_curves(drawn, arguments.results / arguments.what)


def losses_of(ways: dict[str, tuple[Point, np.ndarray]]) -> dict[str, np.ndarray]:
    """The losses of each way."""
    return {way: losses for way, (_, losses) in ways.items()}


# -- Table 5 ----------------------------------------------------------------------------------------------------------


def table5(arguments: argparse.Namespace) -> None:
    """Time of a run with output perturbation on Syn(iid): of a method over FedAvg's, and of the upcycled one over its.

    The three are timed in turn, seed by seed, so that other work on the machine affects them alike.
    """
    of, rows = FIGURES["figure3-methods"], []
    federation = federation_for(of, "iid", "test", arguments.data_dir)
    task = of.task(federation)

    def timed(method: str, upcycled: bool, seed: int) -> float:
        rounds = arguments.rounds // 2 if upcycled else arguments.rounds
        points = [p for p in points_of(of, method, upcycled) if p["lr"] == 0.1 and p.get("a", 0.5) == 0.5]
        options: dict[str, Any] = {"cohort_size": federation.num_clients, "eval_every": rounds, "progress": False}
        began = time.perf_counter()
        simulate(at(of, method, points[0]), task, federation, rounds=rounds, seed=seed, **options)
        return time.perf_counter() - began

    for method in arguments.methods or list(METHODS):
        turn = (("FedAvg", False), (method, False), (method, True))
        for one in turn:
            timed(*one, arguments.seeds[0])  # compiles
        seconds = np.array([[timed(*one, seed) for one in turn] for seed in arguments.seeds])
        over, ratio = (seconds[:, k] / seconds[:, k - 1] for k in (1, 2))
        mean, deviation = PRINTED_SECONDS[method]
        paper = mean / PRINTED_SECONDS["FedAvg"][0]
        shown = ["1" if method == "FedAvg" else spread(over.tolist(), ".2f"), spread(ratio.tolist(), ".2f")]
        rows.append([method, f"{mean:.2f} ± {deviation:.2f}", f"{paper:.2f}", *shown])
        print(f"{method}: {seconds.mean(0).round(3).tolist()} s", flush=True)
    columns = ["method", "paper, s", "over FedAvg's", "ours over FedAvg's", "upcycled / plain"]
    note = (
        f"Time of {arguments.rounds} iterations with output perturbation on Syn(iid), all devices, compiled before, as "
        f"ratios of runs that follow each other, mean ± standard deviation over {len(arguments.seeds)} seeds: FedAvg, "
        "the method, the upcycled method, which does as many iterations in half of the rounds. "
        "The paper's are of a GPU with PyTorch; its upcycled row is not legible in the text at hand."
    )
    write_table(arguments, arguments.what, "Upcycled-FL, Table 5: training time", note, columns, rows)
