"""Figures 2, 5 and 6: loss against training time, at the best points of Tables 1 and 3; and what mu and lambda_m do.

Figure 2 is two panels of Figure 5 that need no FEMNIST. In the time of a round an upcycled method does two iterations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax import Federation, FedProx, FedraxError, LocalSGD, Settings, classification, files, simulate, sweep
from fedrax.algorithms import upcycle
from fedrax.algorithms.upcycled import Upcycled
from fedrax.models import Logistic
from fedrax.optim.schedules import InverseTimeDecay
from fedrax.report import curves
from papers.losac.running import spread, write_table
from papers.upcycled import report
from papers.upcycled.grid import METHODS, Point, federation_of, sweep_points

FIGURES = {"figure5": ("table1", 90), "figure6": ("table3", 30)}
"""The table whose best points a figure's curves are of, and the share of stragglers."""
SETS = ("iid", "0_0", "0.5_0.5", "1_1")
MEASURED = 20
"""How often a run's loss is measured, at even distances."""
TABLES = ("-coarse", "")
"""Endings of the names of the tables with best points."""
Curves = dict[str, np.ndarray]
"""Losses [seeds, MEASURED] of the method and of the upcycled one."""


def figure(arguments: argparse.Namespace) -> None:
    """Every curve that is missing, then the table and the picture."""
    table, stragglers = FIGURES[arguments.what]
    sets, methods = arguments.data or SETS, arguments.methods or list(METHODS)
    points = best_points(arguments.results, table)
    found: dict[tuple[str, str], Curves] = {}
    for data, method in itertools.product(sets, methods):
        if (data, method) not in points:
            print(f"{data}, {method}: not in results/{table}.md or {table}-coarse.md", flush=True)
            continue
        began = time.monotonic()
        losses = measured(arguments, data, method, points[data, method], stragglers)
        if losses is not None:
            found[data, method] = losses
            print(f"{data}, {method}: {time.monotonic() - began:.0f} s", flush=True)
    if not found:
        raise FedraxError(f"there is no best point in {arguments.results}/{table}.md: run {table} first")
    write(arguments, table, stragglers, found, points)


def best_points(results: Path, table: str) -> dict[tuple[str, str], tuple[Point, Point]]:
    """(plain, upcycled) by set and method, from a table's columns; the finer search where there are two."""
    found = {}
    for ending in TABLES:
        for folder in (Path(__file__).with_name("results"), results):
            place = folder / f"{table}{ending}.md"
            lines = place.read_text().splitlines() if place.is_file() else []
            rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
            names: list[str] = []
            for row in rows:
                if row[0] == "set":
                    names = row
                elif "best" in names and "best, upcycled" in names:
                    cells = [row[names.index(name)] for name in ("best", "best, upcycled")]
                    found[row[0], row[1]] = (point_of(cells[0]), point_of(cells[1]))
    return found


def point_of(text: str) -> Point:
    """A point from its text, "lr 0.1, beta 0.995 (end), a 0.7"."""
    parts = re.findall(r"([a-z][a-z ]*?) ([0-9.e+-]+)(?: \(end\))?(?:,|$)", text)
    return {"a": 0.0} | {axis.strip(): float(value) for axis, value in parts}


def measured(
    arguments: argparse.Namespace, data: str, method: str, points: tuple[Point, Point], stragglers: int
) -> Curves | None:
    """Test loss (a personal method's of its own models) at the plain and at the upcycled point, kept in a file."""
    facts = {"seeds": arguments.seeds, "rounds": arguments.rounds, "points": list(points)}
    place = arguments.out / f"curves {data} {stragglers} {method}.json".replace(" ", "-")
    if not place.exists():
        if arguments.only_write:
            return None
        federation = federation_of(data, "test", arguments.data_dir)
        losses = run(method, list(points), federation, stragglers, arguments.seeds, arguments.rounds)
        files.write_text(place, json.dumps(facts | {"losses": losses}) + "\n")
    kept = files.read_json(place)
    if any(kept.get(key) != json.loads(json.dumps(value)) for key, value in facts.items()):
        raise FedraxError(f"{place} holds another run: choose another --out.")
    return {way: np.array(losses, float) for way, losses in zip(("plain", "upcycled"), kept["losses"], strict=True)}


def run(
    method: str, points: list[Point], federation: Federation, stragglers: int, seeds: list[int], rounds: int
) -> list[list[list[float | None]]]:
    """Losses [points, seeds, MEASURED]; None after a run has diverged."""
    every = max(1, rounds // MEASURED)
    results = sweep_points(METHODS[method], points, federation, stragglers, seeds, rounds, eval_every=every)
    at = range(every, rounds + 1, every)
    loss = lambda event: event.get("test_personal_loss", event.get("test_loss"))  # noqa: E731
    of = lambda result: {event["round"]: loss(event) for event in result.events}  # noqa: E731
    return [[[of(result).get(r) for r in at] for result in runs] for runs in results]


def write(
    arguments: argparse.Namespace,
    table: str,
    stragglers: int,
    found: dict[tuple[str, str], Curves],
    points: dict[tuple[str, str], tuple[Point, Point]],
) -> None:
    """Losses at a quarter, half and the end of the time, and the picture."""
    rows = []
    for (data, method), losses in found.items():
        plain, up = losses["plain"], losses["upcycled"]
        at = [plain.shape[1] * k // 4 - 1 for k in (1, 2, 4)]
        cells = []
        for k in at:
            cells += [spread(plain[:, k].tolist(), ".4f"), spread(up[:, k].tolist(), ".4f")]
        gain = up[:, -1] - plain[:, -1]
        lower = int((np.nanmean(up, 0) < np.nanmean(plain, 0)).sum())
        difference = spread(gain.tolist(), "+.4f").replace("± +", "± ")
        rows.append([data, method, *cells, difference, f"{lower} of {plain.shape[1]}"])
    quarter, half = arguments.rounds // 4, arguments.rounds // 2
    columns = ["set", "method"]
    for r in (quarter, half, arguments.rounds):
        columns += [f"loss, round {r}", "upcycled"]
    columns += ["upcycled - plain", "upcycled lower"]
    note = (
        f"The figure prints curves, no numbers. Test loss over all test rows, {len(arguments.seeds)} seeds, mean ± "
        f"standard deviation, {stragglers} % stragglers; in the time of a round an upcycled method does two "
        f"iterations. At the points with the best accuracy over devices of `{table}.md` and `{table}-coarse.md`. "
        "pFedMe: the devices' own models. 'upcycled lower': at how many of the evaluations."
    )
    number = arguments.what[-1]
    title = f"Upcycled-FL, Figure {number} (convergence, {stragglers} % stragglers)"
    write_table(arguments, arguments.what, title, note, columns, rows, report.wins(found))
    panels = {data: {m: losses for (of, m), losses in found.items() if of == data} for data, _ in found}
    drawn = report.draw_pairs(panels, arguments.rounds, "rounds (of time)", list(METHODS))
    curves.save_curves(drawn, arguments.results / arguments.what)


# -- Theorem 5.6 and Corollary 5.8 ------------------------------------------------------------------------------------

MUS, RATIOS = (0.1, 1.0, 10.0), (0.0, 0.1, 1.0, 3.0, 10.0, 100.0)
"""mu, and lambda_m / mu; of Eq. 6, a = mu / (mu + lambda_m). A ratio of 0 is a = 1."""
GROWTHS = (0.0, 0.02, 0.1, 0.5)
"""lambda_m / mu grows with m such that a decays as 1 / (1 + rate m); the first is constant."""
LR = 0.01
ITERATIONS = (10, 20, 40, 80, 160)
"""M, rounds of two iterations."""


def theorem(arguments: argparse.Namespace) -> None:
    """Upcycled-FedProx over mu and lambda_m; the squared gradient norm over M for constant and growing lambda_m."""
    rows, sections = [], []
    sets = arguments.data or ("0.5_0.5", "1_1")
    for data in sets:
        federation = federation_of(data, "test", arguments.data_dir)
        for mu in MUS:
            made = [proximal(mu, ratio, 0.0) for ratio in RATIOS] + [fedprox(mu)]
            losses = final_losses(made, federation, arguments.seeds, arguments.rounds)
            cells = [spread(values, ".4f") for values in losses]
            rows.append([data, f"{mu:g}", *cells])
        sections += growing(arguments, data, federation)
    columns = ["set", "mu", *(f"lambda/mu = {ratio:g}" for ratio in RATIOS), "FedProx"]
    note = (
        "Theorem 5.6: mu and lambda_m control the rate of Upcycled-FedProx; its bound falls as lambda_m / mu grows, "
        f"which is as a = mu / (mu + lambda_m) goes to 0, FedProx without the extra move. Training loss after "
        f"{arguments.rounds} rounds of two iterations, ten local epochs at step size {LR:g}, all devices, no "
        "stragglers; mean ± standard deviation over seeds."
    )
    more = [
        "",
        "## Corollary 5.8: growing lambda_m",
        "",
        "min over m of |grad f|^2 at mu = 1 after M rounds, where a starts at 0.9 and decays as 1 / (1 + rate m), "
        "which is lambda_m growing linearly; the corollary's rate is 1 / sqrt(M).",
        "",
        "| set | rate | " + " | ".join(f"M = {m}" for m in ITERATIONS) + " | exponent |",
        "|" + "---|" * (len(ITERATIONS) + 3),
        *sections,
    ]
    write_table(arguments, arguments.what, "Upcycled-FL, Theorem 5.6: mu and lambda_m", note, columns, rows, more)


def fedprox(mu: float) -> Upcycled:
    """FedProx as an upcycled method that does not move."""
    return upcycle(FedProx(local=_local(), mu=mu), a=0.0, schedule=InverseTimeDecay(rate=0.0))


def proximal(mu: float, ratio: float, rate: float) -> Upcycled:
    """Upcycled-FedProx with lambda_m / mu, and a decaying at a rate."""
    inner = FedProx(local=_local(), mu=mu)
    return upcycle(inner, a=1 / (1 + ratio), schedule=InverseTimeDecay(rate=rate))


def _local() -> LocalSGD:
    return LocalSGD(lr=LR, epochs=10, batch_size=32)


def final_losses(made: list[Upcycled], federation: Federation, seeds: list[int], rounds: int) -> list[list[float]]:
    """Training losses of each method's seeds after the last round."""
    task = classification(Logistic().build(federation.train.x.shape[1:], federation.num_classes or 1))
    settings = Settings(
        rounds=rounds, cohort_size=federation.num_clients, weights="samples", eval_every=rounds, eval_train=True
    )
    results = sweep(made, task, federation, seeds, settings, mode="vectorized")
    return [[result.events[-1]["train_loss"] for result in runs] for runs in results]


def growing(arguments: argparse.Namespace, data: str, federation: Federation) -> list[str]:
    """Rows of the smallest squared gradient norm so far after M rounds."""
    x = np.c_[np.asarray(federation.train.x, float), np.ones(len(federation.train.y))]
    y = np.asarray(federation.train.y)
    rounds = [m for m in ITERATIONS if m <= 2 * arguments.rounds]
    task = classification(Logistic().build(federation.train.x.shape[1:], federation.num_classes or 1))
    rows = []
    for rate in GROWTHS:
        method = proximal(1.0, 1 / 9, rate)
        found = []
        for seed in arguments.seeds:
            norms = squared_norms(method, task, federation, x, y, seed, max(rounds))
            found.append([min(norms[:m]) for m in rounds])
        means = np.mean(found, 0)
        slope = np.polyfit(np.log(rounds), np.log(means), 1)[0] if len(rounds) > 1 else float("nan")
        cells = [spread([f[k] for f in found], ".2e") for k in range(len(rounds))]
        cells += ["-"] * (len(ITERATIONS) - len(rounds))
        rows.append(f"| {data} | {rate:g} | " + " | ".join(cells) + f" | {slope:+.2f} |")
    return rows


def squared_norms(
    method: Upcycled, task: Any, federation: Federation, x: np.ndarray, y: np.ndarray, seed: int, rounds: int
) -> list[float]:
    """|grad f|^2 over all training rows after each round, computed here."""
    norms = []
    options: dict[str, Any] = {"cohort_size": federation.num_clients, "weights": "samples", "seed": seed}
    result = simulate(
        method, task, federation, rounds=rounds, trajectory=True, eval_every=rounds, progress=False, **options
    )
    for params in result.trajectory:
        w = matrix(params)
        z = x @ w
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        norms.append(float(np.sum((x.T @ p / len(y)) ** 2)))
    return norms


def matrix(params: Any) -> np.ndarray:
    """Weights and the bias as one matrix [features + 1, classes]."""
    leaves = {np.ndim(leaf): np.asarray(leaf, float) for leaf in jax.tree.leaves(params)}
    return np.vstack([leaves[2].T, leaves[1][None]])  # stored as [classes, features]
