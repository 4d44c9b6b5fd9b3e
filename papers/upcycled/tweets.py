"""``sent140`` and ``figure8``: stand-ins for Sent140's column of Tables 1 and 3 and for Figure 8.

The paper's 52 devices are users with 621 tweets each, which are not available: here a device has the tweets of several
users of a subset, and the network is small, so that all runs take minutes on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedrax import Federation, FedraxError, Settings, Task, classification, files, sweep
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Samples, load
from fedrax.models import Tweets
from fedrax.privacy import ObjectivePerturbation
from fedrax.report import curves
from papers.episode.silos import UserSilos
from papers.losac.running import spread, write_table
from papers.upcycled import noise, private, report
from papers.upcycled.grid import METHODS, Point, final, sweep_points

ROUNDS, SEEDS = 16, [0, 1]
"""80 and 4 in the paper."""
VECTORS = Path("glove", "glove.6B.50d.subset.txt")
DEVICES, PERCENT = 52, 50.0
"""Number of devices, and percentage of their users drawn at random; the others are sorted by their share of positive
tweets.
"""
LEAST = 8
"""Fewest training tweets of a user whose tweets are used."""
HIDDEN = 8
"""Units of the LSTM in each direction; 256 in the paper."""
STEPS, EXTRAPOLATIONS = (0.1, 0.3), (0.0, 0.5)
FIXED: dict[str, Point] = {
    "FedAvg": {},
    "FedAvgM": {"beta": 0.6},
    "FedProx": {"mu": 0.1},
    "SCAFFOLD": {},
    "FedDyn": {"alpha": 0.1},
    "pFedMe": {"lambda": 1.0, "inner lr": 1.0},
    "FedYogi": {"server lr": 0.1},
}
"""Settings of the tables' methods that are not tuned here."""
TABLES = {"1": 90, "3": 30}
"""Share of stragglers."""
PRINTED = {"output": {"sigma / tau": 0.027, "tau": 10.0}, "objective": {"alpha": 15.0}}
NOISE = {
    "output": dataclasses.replace(private.FIGURES["figure3"], printed=PRINTED["output"], share=0.2 / 0.27),
    "objective": dataclasses.replace(
        private.FIGURES["figure4"],
        printed=PRINTED["objective"],
        share=2.0,
        wrap=lambda inner, point: ObjectivePerturbation(inner, point["alpha"], "none"),
    ),
}
"""Appendix F.1: sigma is 0.27, and 0.2 upcycled; alpha 15, and 30. tau is that of the authors' program. Theorem 6.3
does not apply to this network, and no guarantee is claimed.
"""
PRIVATE_STEPS = (0.3,)


def built(data_dir: str | None) -> tuple[Task, Federation]:
    """The network over frozen word vectors, and the users."""
    dataset = load("sent140", data_dir)
    users = np.asarray(dataset.train_clients)
    many = np.bincount(users)[users] >= LEAST
    train = Samples(dataset.train.x[many], dataset.train.y[many])
    dataset = dataclasses.replace(dataset, train=train, train_clients=users[many])
    federation = Federation.from_dataset(dataset, UserSilos(DEVICES, PERCENT), 0)
    vectors = Path(data_dir or os.environ.get("FEDRAX_DATA", ""), VECTORS)
    network = Tweets(hidden=HIDDEN, layers=1, bidirectional=True, vectors=vectors)
    return classification(network.build(federation.train.x.shape[1:], 2, federation.vocabulary)), federation


def kept(arguments: argparse.Namespace, name: str, points: list[Point], run: Any) -> Any:
    """What ``run(points)`` found, from a file if it is there; None if it is not and nothing is to be run."""
    facts = {"seeds": arguments.seeds, "rounds": arguments.rounds, "points": points, "hidden": HIDDEN}
    place = arguments.out / f"sent140 {name}.json".replace(" ", "-")
    if not place.exists():
        if arguments.only_write:
            return None
        began = time.monotonic()
        files.write_text(place, json.dumps(facts | {"found": run(points)}) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    read = files.read_json(place)
    if any(read.get(key) != value for key, value in facts.items()):
        raise FedraxError(f"{place} holds another run: choose another --out.")
    return read["found"]


def settings_of(federation: Federation) -> str:
    """The stand-in, for the note of a table."""
    return (
        f"A stand-in: {federation.num_clients} devices with {federation.sizes.min()} to {federation.sizes.max()} "
        "training tweets (the paper's are users with 621 on average), which are those of several users, "
        f"{PERCENT:g} % of whom are drawn at random and the others sorted by their share of positive tweets; a "
        f"bidirectional LSTM of {HIDDEN} units over frozen word vectors of 50 numbers (paper: 256 and 300)."
    )


# -- Tables 1 and 3 ---------------------------------------------------------------------------------------------------


def table(arguments: argparse.Namespace) -> None:
    """Every sweep that is missing, then the table."""
    task, federation = built(arguments.data_dir)
    rows = []
    for (number, stragglers), method in itertools.product(TABLES.items(), arguments.methods or list(METHODS)):
        points = [{"lr": lr, **FIXED[method], "a": a} for lr, a in itertools.product(STEPS, EXTRAPOLATIONS)]

        def run(points: list[Point], method: str = method, stragglers: int = stragglers) -> list[dict[str, Any]]:
            rounds, seeds = arguments.rounds, arguments.seeds
            options: dict[str, Any] = {"task": task, "eval_every": rounds}
            swept = sweep_points(METHODS[method], points, federation, stragglers, seeds, rounds, **options)
            return [final([r.events[-1] if r.stopped == "rounds" else {} for r in runs]) for runs in swept]

        found = kept(arguments, f"{stragglers} {method}", points, run)
        if found is not None:
            rows.append(row_of(number, method, stragglers, list(zip(points, found, strict=True))))
    if not rows:
        raise FedraxError(f"there are no sweeps of sent140 below {arguments.out} yet: leave --only-write out")
    write_accuracies(arguments, federation, rows)


def row_of(number: str, method: str, stragglers: int, found: list[tuple[Point, dict[str, list[float]]]]) -> list[str]:
    """The paper's accuracies and ours over all test rows, at the points that are best by it."""
    paper = report.printed(stragglers)["sent140", method]
    cells, best = [number, method], []
    for way, upcycled in (("plain", False), ("upcycled", True)):
        ones = [(values["samples"], point["lr"]) for point, values in found if (point["a"] > 0) == upcycled]
        best.append(max(ones, key=lambda one: np.mean(one[0])))
        cells += [f"{paper[way]} ± {paper[way + '_deviation']}", spread(best[-1][0], ".2f")]
    (plain, lr), (up, up_lr) = best
    cells.append(f"{float(paper['upcycled']) - float(paper['plain']):+.2f}")
    cells.append(spread(np.subtract(up, plain).tolist(), "+.2f").replace("± +", "± "))
    return [*cells, f"{lr:g}", f"{up_lr:g}"]


def write_accuracies(arguments: argparse.Namespace, federation: Federation, rows: list[list[str]]) -> None:
    """Printed beside measured."""
    labels = np.asarray(federation.test[1])  # type: ignore[index]
    larger = np.bincount(labels).max() / len(labels)
    fixed = ", ".join(f"{k} {v:g} ({m})" for m, point in FIXED.items() for k, v in point.items())
    note = (
        f"{settings_of(federation)} Test accuracy in % over all {len(labels):,} test rows ({100 * larger:.2f} have the "
        f"larger class) after {arguments.rounds} rounds (upcycled, twice as many iterations), {len(arguments.seeds)} "
        "seeds, mean ± standard deviation; of pFedMe the global model. Table 1 has 90 % stragglers, Table 3 30 %. "
        f"Tuned by this accuracy is the step size, in {{{', '.join(f'{lr:g}' for lr in STEPS)}}}; a is "
        f"{EXTRAPOLATIONS[-1]:g}, and fixed are {fixed}."
    )
    columns = ["table", "method", "paper", "ours", "paper, upcycled", "ours, upcycled", "paper's gain", "our gain"]
    columns += ["lr", "lr, upcycled"]
    write_table(arguments, arguments.what, "Upcycled-FL, Tables 1 and 3 (Sent140, stand-in)", note, columns, rows)


# -- Figure 8 ---------------------------------------------------------------------------------------------------------


def figure8(arguments: argparse.Namespace) -> None:
    """Every sweep that is missing, then the table and the picture."""
    if arguments.rounds % (2 * noise.MEASURED):
        raise FedraxError(f"--rounds: take a multiple of {2 * noise.MEASURED}, not {arguments.rounds}")
    task, federation = built(arguments.data_dir)
    found = {}
    for name, method in itertools.product(NOISE, arguments.methods or list(private.METHODS)):
        of, ways = NOISE[name], {}
        parts = (("plain", 1.0, 1, None), ("half", of.share, 2, 0.0), ("upcycled", of.share, 2, EXTRAPOLATIONS[-1]))
        for way, share, divisor, a in parts:
            fixed = of.printed | {of.level: share * of.printed[of.level]} | ({} if a is None else {"a": a})

            def run(points: list[Point], method: str = method, name: str = name, divisor: int = divisor) -> list[Any]:
                rounds = arguments.rounds // divisor
                made = [noise.at(NOISE[name], method, point) for point in points]
                return private_losses(made, task, federation, arguments.seeds, rounds)

            points = [fixed | {"lr": lr} for lr in PRIVATE_STEPS]
            losses = kept(arguments, f"{name} {method} {way}", points, run)
            if losses is not None:
                array = np.array(losses, float)
                best = int(np.nan_to_num(array[:, :, -1].mean(1), nan=np.inf).argmin())
                ways[way] = (points[best], array[best])
        if len(ways) == len(parts):
            found[name, method] = ways
    if not found:
        raise FedraxError(f"there are no sweeps of figure8 below {arguments.out} yet: leave --only-write out")
    write_figure8(arguments, federation, found)


def private_losses(
    made: list[Algorithm], task: Task, federation: Federation, seeds: list[int], rounds: int
) -> list[list[list[float | None]]]:
    """Test losses [points, seeds, noise.MEASURED], all devices in every round."""
    every = rounds // noise.MEASURED
    settings = Settings(
        rounds=rounds, cohort_size=federation.num_clients, weights="uniform", eval_every=every, delta=private.DELTA
    )
    results = sweep(made, task, federation, seeds, settings, mode="vectorized")
    return [[noise.loss_of(run.events, rounds) for run in runs] for runs in results]


def write_figure8(
    arguments: argparse.Namespace, federation: Federation, found: dict[tuple[str, str], dict[str, Any]]
) -> None:
    """Final losses, and the curves."""
    rows = []
    for (name, method), ways in found.items():
        cells = report.final_cells(noise.losses_of(ways))
        rows.append([name, method, *cells, *(f"{ways[way][0]['lr']:g}" for way in ("plain", "upcycled"))])
    note = (
        f"{settings_of(federation)} The figure prints curves of the loss and no numbers. Test loss over all test rows "
        f"after the last of {arguments.rounds} iterations, {len(arguments.seeds)} seeds, mean ± standard deviation. "
        "Noise as in Appendix F.1: sigma 0.27, and 0.2 upcycled; alpha 15, and 30; tau = 10. All devices take part in "
        "each round, upcycled methods in half of the rounds; 'half the rounds' is the method itself with the noise and "
        f"the rounds of the upcycled one. Step sizes tried: "
        f"{', '.join(f'{lr:g}' for lr in PRIVATE_STEPS)}."
    )
    columns = ["perturbation", "method", "plain", "upcycled", "half the rounds", "upcycled - plain"]
    columns += ["upcycled - half the rounds", "lr", "lr, upcycled"]
    losses = {case: noise.losses_of(ways) for case, ways in found.items()}
    more = report.wins(losses) + report.wins(losses, "half")
    write_table(
        arguments, arguments.what, "Upcycled-FL, Figure 8 (Sent140, private, stand-in)", note, columns, rows, more
    )
    panels = {
        f"{name} perturbation": {m: noise.losses_of(ways) for (of, m), ways in found.items() if of == name}
        for name, _ in found
    }
    drawn = report.draw_pairs(panels, arguments.rounds, "iterations", list(METHODS))
    curves.save_curves(drawn, arguments.results / arguments.what)


COMMANDS = {"sent140": table, "figure8": figure8}
