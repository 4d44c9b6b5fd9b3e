"""Polynomials: Proposition 1, the tuning points of E.2, and Theorem 1's speed-up in the number of clients."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from fedrax import Episode, FedAvg, Federation, LocalSGD, Settings, sweep
from fedrax.contract.task import objective
from fedrax.data import Natural, as_samples, load
from fedrax.data.dataset import Dataset
from fedrax.models import Polynomial
from fedrax.report.curves import PALETTE, save_curves
from fedrax.simulation.results.result import Result
from papers.losac.running import spread, write_table

HETEROGENEITY = (1, 2, 4, 8)
LINE = np.linspace(-60, 60, 1_200_001)
"""Where Proposition 1 is checked; beyond, the fourth powers decide."""
STEPS, RATIOS = (0.1, 0.01, 0.001), (5.0, 10.0, 15.0)
"""eta and gamma / eta of E.2."""
INTERVAL = 8
"""I of E.2."""
CLIENTS, NOISES = (2, 4, 8, 16, 32), (0.5, 5.0)
"""N and sigma of the speed-up; sigma is the standard deviation of the noise in a gradient."""
RATES = tuple(0.02 * 2.0**-k for k in range(7))
"""eta of the speed-up: the best for each N and sigma is taken."""
GOAL = 1.0
"""Squared norm of the gradient, averaged over the rounds so far, that the speed-up counts rounds to."""
ROUNDS, EVERY = 500, 2
"""Rounds of the speed-up, and between two measurements of x."""


def kappa(h: float) -> float:
    """The constant of Proposition 1 as printed (E.1)."""
    x = (-18 + np.sqrt(18**2 + 480 * h)) / 24
    return float(9 * x**2 + 10 * h * x + 25 * h**2 / 3 + 45 * h + 100)


def excess(h: float, c: float) -> float:
    """Largest |f_i'| - 2 |f'| on the line, for the client with the term c H x^2."""
    client = 4 * LINE**3 - 9 * LINE**2 + 2 * c * h * LINE + 1
    mean = 4 * LINE**3 - 9 * LINE**2 - h * LINE + 1
    return float((np.abs(client) - 2 * np.abs(mean)).max())


def proposition1(arguments: argparse.Namespace) -> None:
    """Check |f_i'| <= 2 |f'| + kappa(H) at 1.2 million points, for the printed kappa."""
    rows = []
    for h in (1, 2, 4, 8, 16, 32):
        first, second = excess(h, 1), excess(h, -2)
        holds = "yes" if max(first, second) <= kappa(h) else "no"
        rows.append([f"{h}", f"{first:.2f}", f"{second:.2f}", f"{kappa(h):.2f}", holds])
    note = (
        f"The largest |f_i'(x)| - 2 |f'(x)| over {len(LINE):,} points x in [{LINE[0]:g}, {LINE[-1]:g}] for both "
        "clients of the quartic pair, and kappa(H) as printed. The proof's x_2 is a root of -12 x^2 + 18 x + 10 H with "
        "the sign of 18 wrong; the printed kappa is checked as it stands."
    )
    columns = ["H", "client 1", "client 2", "kappa(H)", "holds"]
    write_table(arguments, "proposition1", "EPISODE, Proposition 1", note, columns, rows)


def points(arguments: argparse.Namespace) -> None:
    """E.2: both methods at the nine pairs of eta and gamma / eta, for every H."""
    pairs = list(itertools.product(STEPS, RATIOS))
    settings = Settings(rounds=arguments.rounds or 500, cohort_size=2, eval_every=arguments.rounds or 500)
    rows = []
    for h in HETEROGENEITY:
        dataset = load("quartic_pair", heterogeneity=float(h))
        federation = Federation.from_dataset(dataset, Natural(), seed=0)
        task = objective(Polynomial().build((4,), 1))
        minimum = float(np.asarray(dataset.truth).item())
        for name in ("EPISODE", "CELGC"):
            made = [method(name, eta, ratio) for eta, ratio in pairs]
            found = sweep(made, task, federation, arguments.seeds, settings, mode="vectorized", progress=False)
            apart = [[abs(path(result, [settings.rounds])[0] - minimum) for result in results] for results in found]
            means = [float(np.mean(one)) for one in apart]
            best = int(np.argmin(means))
            chosen = f"{pairs[best][0]:g}, {pairs[best][1]:g}"
            shown = [f"{mean:.4f}" if np.isfinite(mean) else "diverged" for mean in means]
            rows.append([f"{h}", name, *shown, chosen, spread(apart[best], ".4f")])
    note = (
        f"Distance |x - x*| after {settings.rounds} rounds of I = {INTERVAL}, mean over {len(arguments.seeds)} seeds, "
        "at the nine points (eta, gamma / eta) of E.2, from x = 1. The paper does not print which point it shows: "
        "EPISODE arrives at every H, CELGC fails to as H grows."
    )
    columns = ["H", "method", *(f"{eta:g}, {ratio:g}" for eta, ratio in pairs), "best point", "distance there"]
    write_table(arguments, "points", "EPISODE, the tuning points of E.2", note, columns, rows)


def path(result: Result, rounds: Iterable[int]) -> list[float]:
    """x after these rounds; infinite if the run diverged."""
    if result.stopped == "diverged":
        return [np.inf for _ in rounds]
    measured = dict(result.metric("x"))
    return [measured[round] for round in rounds]


def method(name: str, eta: float, ratio: float) -> Episode | FedAvg:
    """EPISODE or CELGC with gamma = ratio times eta."""
    local = LocalSGD(lr=eta, steps=INTERVAL, batch_size=1, order="replacement")
    if name == "EPISODE":
        return Episode(local=local, gamma=ratio * eta)
    return FedAvg(local=dataclasses.replace(local, clip=ratio * eta))


def many_clients(clients: int, noise: float, h: float = 1.0, samples: int = 1000) -> Dataset:
    """The quartic pair, each for half of the clients, with gradient noise of standard deviation ``noise``."""
    pair = np.array([[1, h, -3, 1], [1, -2 * h, -3, 1]], float)
    x = np.repeat(pair[np.arange(clients) % 2], samples, axis=0)
    uniform = (2 * np.arange(samples) + 1) / samples - 1
    x[:, 0] += np.tile(uniform * noise * np.sqrt(3), clients)
    train, test = (as_samples(rows.astype(np.float32), np.zeros(len(rows), np.float32)) for rows in (x, pair))
    return Dataset("quartic", train, test, None, train_clients=np.repeat(np.arange(clients), samples))


def speedup(arguments: argparse.Namespace) -> None:
    """Theorem 1: rounds until the mean squared gradient is below a goal, over N, for several sigma."""
    rounds, rows, lines = arguments.rounds or ROUNDS, [], {}
    every = min(rounds, EVERY)
    for noise in NOISES:
        reached = []
        for clients in CLIENTS:
            federation = Federation.from_dataset(many_clients(clients, noise), Natural(), seed=0)
            task = objective(Polynomial().build((4,), 1))
            settings = Settings(rounds=rounds, cohort_size=clients, eval_every=every)
            made = [method("EPISODE", eta, 5.0) for eta in RATES]
            found = sweep(made, task, federation, arguments.seeds, settings, mode="vectorized", progress=False)
            x = np.array([[[1.0, *path(one, range(every, rounds + 1, every))] for one in results] for results in found])
            square = (4 * x**3 - 9 * x**2 - x + 1) ** 2  # of f' at H = 1
            average = (np.cumsum(square, -1) / np.arange(1, x.shape[-1] + 1)).mean(1)  # [rates, rounds]
            times = np.where((average <= GOAL).any(-1), every * (average <= GOAL).argmax(-1), rounds + 1)
            best = int(times.argmin())
            reached.append(int(times[best]) if times[best] <= rounds else None)
            ratio = f"{reached[0] / reached[-1]:.1f}" if reached[0] and reached[-1] else "-"
            shown = f"{reached[-1]}" if reached[-1] else f"over {rounds}"
            rows.append([f"{noise:g}", f"{clients}", shown, f"{RATES[best]:.2g}", ratio, f"{clients / CLIENTS[0]:g}"])
        lines[noise] = reached
    note = (
        f"Rounds of I = {INTERVAL} until the mean over the rounds so far (every {every} rounds) of |f'(x)|^2 "
        f"(mean over {len(arguments.seeds)} seeds) is below {GOAL:g}, at the best eta of {len(RATES)} (a factor of "
        "two apart), gamma / eta = 5, from x = 1; the quartic pair at H = 1, half of the clients each. Speed-up: over "
        "N = 2; Theorem 1 gives N / 2 where noise decides, and none where it does not."
    )
    columns = ["sigma", "N", "rounds", "best eta", "speed-up", "linear"]
    write_table(arguments, "speedup", "EPISODE, Theorem 1 (speed-up in N)", note, columns, rows)
    save_curves(draw(lines), arguments.results / "speedup")


def draw(lines: dict[float, list[int | None]]) -> Figure:
    """Rounds over N for each sigma, both on logarithmic scales."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (noise, reached) in enumerate(lines.items()):
        kept = [(n, rounds) for n, rounds in zip(CLIENTS, reached, strict=True) if rounds]
        if kept:
            axes.loglog(*zip(*kept, strict=True), "o-", color=PALETTE[i], label=f"sigma = {noise:g}")
            ideal = [kept[0][1] * kept[0][0] / n for n, _ in kept]
            axes.loglog([n for n, _ in kept], ideal, ":", color=PALETTE[i])
    axes.set_xticks(CLIENTS, map(str, CLIENTS))
    axes.xaxis.minorticks_off()
    axes.set_xlabel("clients N")
    axes.set_ylabel("rounds to the goal (dotted: linear)")
    if axes.get_lines():
        axes.legend(frameon=False)
    axes.grid(color="0.92", linewidth=0.7)
    return figure
