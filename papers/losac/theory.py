"""What Lemma 1 and Theorem 3 say, measured on a strongly convex problem.

Softmax regression with weight decay on the bundled digits, sorted by label on twenty clients. The problem has a unique
minimum, which Newton's method finds, and gradients of blocks in closed form, here in NumPy.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

import fedrax
from fedrax.data import Shards, load
from fedrax.models import Logistic
from fedrax.report import curves
from papers.losac.running import spread, write_table

CLIENTS, COHORT, STEPS, BLOCKS = 20, 5, 5, 5
DECAY = 0.1
"""Weight decay: the modulus of strong convexity."""
ETA = 0.02
"""Step size of Lemma 1; the printed reading's is divided by M, the factor by which its steps are longer."""
AT = (0, 10, 30, 100, 300, 1000)
"""Rounds after which the variance is measured."""
HORIZONS, LOCAL_STEPS = (10, 20, 40, 80, 160), (1, 2, 4, 8, 16)
ETAS = tuple(0.4 / 2**k for k in range(12))
"""Theorem 3 chooses the step size by R and T."""
SEEDS = (0, 1, 2)


class Problem(NamedTuple):
    """The federation, its task, and each client's rows with a 1 for the bias."""

    federation: fedrax.Federation
    task: fedrax.Task
    x: list[np.ndarray]
    y: list[np.ndarray]


@cache
def problem() -> Problem:
    """The digits, sorted by label."""
    dataset = load("digits")
    federation = fedrax.Federation.from_dataset(dataset, Shards(CLIENTS, 1), 0)
    task = fedrax.classification(Logistic().build(dataset.train.x.shape[1:], 10))
    ends = np.cumsum([0, *federation.sizes])
    rows = [slice(a, b) for a, b in itertools.pairwise(ends)]
    x, y = np.asarray(federation.train.x, float).reshape(ends[-1], -1), np.asarray(federation.train.y)
    return Problem(federation, task, [np.c_[x[r], np.ones(len(x[r]))] for r in rows], [y[r] for r in rows])


def local(steps: int = STEPS, eta: float = ETA) -> fedrax.LocalSGD:
    """Steps on one of M blocks, mean losses."""
    return fedrax.LocalSGD(lr=eta, steps=steps, blocks=BLOCKS, weight_decay=DECAY)


METHODS: dict[str, Callable[[], fedrax.Algorithm]] = {
    "FedAvg": lambda: fedrax.FedAvg(local=local()),
    "SCAFFOLD": lambda: fedrax.Scaffold(local=local()),
    "LoSAC (printed)": lambda: fedrax.LoSAC(local=local(eta=ETA / BLOCKS), reading="printed"),
    "LoSAC (consistent)": lambda: fedrax.LoSAC(local=local(), reading="consistent"),
}


def flat(params: Any) -> np.ndarray:
    """Parameters as a matrix [pixels + 1, classes], the bias last."""
    by_rank = {np.ndim(leaf): np.asarray(leaf, float) for leaf in jax.tree.leaves(params)}
    weight = by_rank[2] if by_rank[2].shape[1] == 10 else by_rank[2].T
    return np.vstack([weight, by_rank[1][None]])


def gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Of the mean cross entropy over rows, with weight decay."""
    z = x @ w
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y) + DECAY * w


def block_gradients(w: np.ndarray, client: int) -> np.ndarray:
    """g_ij [M, pixels + 1, classes]: M times the block's share of the client's gradient."""
    given = problem()
    x, y = given.x[client], given.y[client]
    cuts = np.arange(BLOCKS + 1) * len(y) // BLOCKS
    parts = [(slice(a, b), BLOCKS * (b - a) / len(y)) for a, b in itertools.pairwise(cuts)]
    return np.stack([share * (gradient(w, x[r], y[r]) - DECAY * w) + DECAY * w for r, share in parts])


def objective(w: np.ndarray) -> float:
    """f: the mean of the clients' losses."""
    given, values = problem(), []
    for x, y in zip(given.x, given.y, strict=True):
        z = x @ w
        top = z.max(1)
        values.append(np.mean(np.log(np.exp(z - top[:, None]).sum(1)) + top - z[np.arange(len(y)), y]))
    return float(np.mean(values) + DECAY / 2 * np.sum(w**2))


@cache
def minimum() -> float:
    """f at its minimum, by gradient descent with Nesterov's momentum until the gradient is 1e-9."""
    given = problem()
    w = v = np.zeros((given.x[0].shape[1], 10))
    full = lambda w: np.mean([gradient(w, x, y) for x, y in zip(given.x, given.y, strict=True)], axis=0)  # noqa: E731
    smooth = DECAY + 0.5 * max(np.linalg.norm(x, 2) ** 2 / len(x) for x in given.x)
    root = np.sqrt(DECAY / smooth)
    for _ in range(100_000):
        slope = full(v)
        if np.linalg.norm(slope) < 1e-9:
            break
        after = v - slope / smooth
        v, w = after + (1 - root) / (1 + root) * (after - w), after
    return objective(v)


# -- Lemma 1 ----------------------------------------------------------------------------------------------------------


def directions(result: fedrax.Result, label: str) -> np.ndarray:
    """The first search direction of every client and block, [N, M, ...], at the state after a run."""
    w, found = flat(result.params), []
    for client in range(CLIENTS):
        g = block_gradients(w, client)
        if label == "SCAFFOLD":
            g = g - flat(result.client_state(client).control) + flat(result.server.control)
        elif label.startswith("LoSAC"):
            table = result.client_state(client).block_gradients
            kept = np.stack([flat(jax.tree.map(lambda a, j=j: a[j], table.rows)) for j in range(BLOCKS)])
            g = g - kept + flat(result.server.gradient_sum) / CLIENTS
        found.append(g)
    return np.stack(found)


def variance(d: np.ndarray) -> tuple[float, float]:
    """(over clients and blocks, over a client's blocks): mean squared distance from the mean."""
    square = lambda e: float(np.mean(np.sum(e**2, axis=(-2, -1))))  # noqa: E731
    return square(d - d.mean((0, 1))), square(d - d.mean(1, keepdims=True))


def lemma1(arguments: argparse.Namespace) -> int:
    """The variance of the search direction along a run, and of its gradient's distance from the minimum."""
    rows, drawn = [], {}
    seeds = arguments.seeds or SEEDS
    rounds = [r for r in AT if not arguments.rounds or r <= arguments.rounds]
    for label, make in METHODS.items():
        whole: dict[int, list[tuple[float, float]]] = {}
        for seed in seeds:
            for r in rounds:
                result = simulated(make(), r, seed)
                whole.setdefault(r, []).append(variance(directions(result, label)))
        first = np.mean([v for v, _ in whole[rounds[0]]])
        drawn[label] = [float(np.mean([v for v, _ in whole[r]])) for r in rounds]
        for r in rounds:
            cells = [spread([v[k] for v in whole[r]], ".3e") for k in (0, 1)]
            rows.append([label, str(r), *cells, f"{drawn[label][rounds.index(r)] / first:.1e}"])
    columns = ["method", "round", "over clients and blocks", "over a client's blocks", "of the first"]
    note = (
        "Lemma 1: the variance of the search direction vanishes as x converges. Mean squared distance of the first "
        "direction of a round from its mean over all clients and blocks, and from its mean over the client's blocks. "
        f"Softmax regression on the digits, {CLIENTS} clients sorted by label, S = {COHORT}, T = {STEPS}, M = "
        f"{BLOCKS}, weight decay {DECAY:g}, eta = {ETA:g} (printed reading: {ETA / BLOCKS:g}), float64; mean ± "
        "standard deviation over seeds."
    )
    write_table(arguments, "lemma1", "LoSAC, Lemma 1: variance of the search direction", note, columns, rows)
    curves.save_curves(_variances(rounds, drawn), arguments.results / "lemma1")
    return 0


def simulated(method: fedrax.Algorithm, rounds: int, seed: int) -> fedrax.Result:
    """A run in float64."""
    given = problem()
    settings: dict[str, Any] = {"cohort_size": COHORT, "seed": seed, "dtype": "float64", "eval_every": rounds or 1}
    return fedrax.simulate(method, given.task, given.federation, rounds=rounds, progress=False, **settings)


def _variances(rounds: list[int], drawn: dict[str, list[float]]) -> Figure:
    sketch = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = sketch.subplots()
    for i, (label, values) in enumerate(drawn.items()):
        axes.plot(np.maximum(rounds, 1), values, color=curves.PALETTE[i], marker="o", markersize=3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("communication rounds")
    axes.set_ylabel("variance of the direction")
    axes.grid(color="0.92", linewidth=0.7)
    axes.legend(frameon=False, fontsize="small")
    return sketch


# -- Theorem 3 --------------------------------------------------------------------------------------------------------


def theorem3(arguments: argparse.Namespace) -> int:
    """f(x^R) - f* at the best step size of a grid, for several R and T; its exponents by least squares."""
    rows = []
    seeds = list(arguments.seeds or SEEDS)
    horizons = [r for r in HORIZONS if not arguments.rounds or r <= arguments.rounds]
    for reading in ("printed", "consistent"):
        by_rounds = {r: best_error(reading, r, STEPS, seeds) for r in horizons}
        by_steps = {t: best_error(reading, horizons[-1] // 2 or 1, t, seeds) for t in LOCAL_STEPS}
        for what, fixed, found in (
            ("R", f"T = {STEPS}", by_rounds),
            ("T", f"R = {horizons[-1] // 2 or 1}", by_steps),
        ):
            slope = exponent(found)
            for value, (errors, eta) in found.items():
                scaled = f"{value * np.mean(errors):.3g}"
                rows.append([reading, what, fixed, str(value), spread(errors, ".3e"), scaled, f"{eta:.3g}", slope])
    columns = ["reading", "varied", "fixed", "value", "f(x) - f*", "times the value", "best eta", "exponent"]
    note = (
        "Theorem 3 bounds the error by a multiple of 1 / (R T), if eta is chosen for R and T; a bound holds where the "
        "error times the value does not grow, which an exponent of -1 or less says. f(x) - f* after the last round at "
        f"the step size of a grid of {len(ETAS)} with the smallest mean error. Problem as in `lemma1.md`."
    )
    write_table(arguments, "theorem3", "LoSAC, Theorem 3: rate in R and T", note, columns, rows)
    return 0


def best_error(
    reading: Literal["printed", "consistent"], rounds: int, steps: int, seeds: list[int]
) -> tuple[list[float], float]:
    """(errors of the seeds, step size) of the step size with the smallest mean error."""
    given = problem()
    made = [fedrax.LoSAC(local=local(steps, eta), reading=reading) for eta in ETAS]
    settings = fedrax.Settings(rounds=rounds, cohort_size=COHORT, dtype="float64", eval_every=rounds)
    results = fedrax.sweep(made, given.task, given.federation, seeds, settings, mode="vectorized", progress=False)
    errors = [
        [objective(flat(r.params)) - minimum() if r.stopped == "rounds" else np.inf for r in runs] for runs in results
    ]
    best = int(np.argmin(np.mean(np.nan_to_num(errors, nan=np.inf), axis=1)))
    return errors[best], ETAS[best]


def exponent(found: dict[int, tuple[list[float], float]]) -> str:
    """Slope of log error against log value."""
    if len(found) < 2:
        return "-"
    slope = np.polyfit(np.log(list(found)), np.log([np.mean(errors) for errors, _ in found.values()]), 1)[0]
    return f"{slope:+.2f}"
