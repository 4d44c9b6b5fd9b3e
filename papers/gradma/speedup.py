"""Corollary 1: the mean squared gradient over the number S of sampled workers, on a quadratic problem."""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from matplotlib.figure import Figure

from fedrax import FedAvg, Federation, LocalSGD, Settings, sweep
from fedrax.algorithms import GradMA, GradMAS
from fedrax.contract.model import Model
from fedrax.contract.task import objective
from fedrax.data import Natural, as_samples
from fedrax.data.dataset import Dataset
from fedrax.optim.server import SGD
from fedrax.report.curves import PALETTE, save_curves
from papers.losac.running import spread, write_table

WORKERS, DIMENSION, STEPS = 40, 48, 5
"""N, d and I; the corollary wants a memory m of at most d."""
ROUNDS = 400
EVERY = 5
"""Rounds between two measurements of the gradient."""
COHORTS = (2, 5, 10, 20)
CURVATURES = np.linspace(0.1, 1, DIMENSION).astype(np.float32)
"""Of every f_i; the largest is L = 1."""


def quadratic() -> Model:
    """f_i(x) = 1/2 sum_j h_j (x_j - a_j)^2 for a sample a; the metric is |f'(x)|^2, with ``truth`` the mean of a."""

    def apply(params: dict[str, Array], x: Array, key: Array | None = None) -> Array:
        return 0.5 * jnp.sum(CURVATURES * (params["x"] - x) ** 2, -1)

    def measures(params: dict[str, Array], truth: Any) -> dict[str, Any]:
        return {"square": jnp.sum((CURVATURES * (params["x"] - truth)) ** 2)}

    init = lambda key: {"x": jnp.zeros(DIMENSION, jnp.float32)}  # noqa: E731
    return Model(init, apply, name="quadratic", measures=measures, loss="value", reads_amounts=True)


def workers(spread: float = 3.0) -> Dataset:
    """One sample per worker, N(1, spread^2) in each dimension, so that gradients of workers are exact."""
    a = np.random.default_rng(0).normal(1, spread, (WORKERS, DIMENSION)).astype(np.float32)
    y = np.zeros(WORKERS, np.float32)
    samples = as_samples(a, y)
    return Dataset("quadratic", samples, samples, None, train_clients=np.arange(WORKERS), truth=a.mean(0))


def speedup(arguments: argparse.Namespace) -> None:
    """Mean over T rounds of |f'(x_t)|^2 at Corollary 1's learning rates."""
    rounds, rows, lines = arguments.rounds or ROUNDS, [], {}
    dataset = workers()
    federation = Federation.from_dataset(dataset, Natural(), seed=0)
    task = objective(quadratic(), truth=dataset.truth)
    for name in ("FedAvg", "GradMA-S", "GradMA"):
        means = []
        for cohort in COHORTS:
            local = LocalSGD(lr=1 / (rounds**0.5 * STEPS), steps=STEPS, batch_size=1)
            server = (cohort / STEPS) ** 0.5
            chosen = {
                "FedAvg": FedAvg(local=local, server_optimizer=SGD(lr=server)),
                "GradMA-S": GradMAS(local=local, server_lr=server),
                "GradMA": GradMA(local=local, server_lr=server),
            }[name]
            settings = Settings(rounds=rounds, cohort_size=cohort, eval_every=min(rounds, EVERY))
            (results,) = sweep([chosen], task, federation, arguments.seeds, settings, progress=False)
            squares = [float(np.mean([value for _, value in result.metric("square")])) for result in results]
            means.append(float(np.mean(squares)))
            fall = f"{means[0] / means[-1]:.2f}"
            rows.append([name, f"{cohort}", spread(squares, ".2f"), fall, f"{(cohort / COHORTS[0]) ** 0.5:.2f}"])
        lines[name] = means
    note = (
        f"The mean over T = {rounds} rounds (each {EVERY}th) of |f'(x_t)|^2 with Corollary 1's steps (local "
        f"1 / (sqrt(T) L I), server sqrt(S / I)), I = {STEPS}, both betas 0.5, on a quadratic problem of {WORKERS} "
        f"workers and {DIMENSION} dimensions with exact gradients, mean ± standard deviation over the seeds. The "
        "corollary bounds it by a constant over sqrt(S T): as many times smaller as the last column says, which is "
        "linear speed-up in rounds."
    )
    columns = ["method", "S", "mean squared gradient", f"smaller than at S = {COHORTS[0]} by", "sqrt(S) says"]
    write_table(arguments, "speedup", "GradMA, Corollary 1 (speed-up in S)", note, columns, rows)
    save_curves(draw(lines), arguments.results / "speedup")


def draw(lines: dict[str, list[float]]) -> Figure:
    """Mean squared gradient over S, both on logarithmic scales."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, means) in enumerate(lines.items()):
        axes.loglog(COHORTS, means, "o-", color=PALETTE[i], label=name)
    first = next(iter(lines.values()))[0]
    axes.loglog(COHORTS, [first * (COHORTS[0] / s) ** 0.5 for s in COHORTS], ":", color="0.4", label="1 / sqrt(S)")
    axes.set_xticks(COHORTS, map(str, COHORTS))
    axes.xaxis.minorticks_off()
    axes.set_xlabel("sampled workers S")
    axes.set_ylabel("mean squared gradient")
    axes.legend(frameon=False)
    axes.grid(color="0.92", linewidth=0.7)
    return figure
