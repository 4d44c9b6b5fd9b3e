"""Figure 6: deep leakage from gradients for five methods, and variants that its text leaves open.

Binary logistic regression on 100 clients, which all take part with all samples in every step; the attack is gradient
descent on the upload of the first client in the fifth round.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

import fedrax
from fedrax import tree
from fedrax.attacks import as_gradient, candidate_gradients, frobenius, gradient_descent
from fedrax.data import Iid, load
from fedrax.models import Logistic
from fedrax.optim.server import SGD
from fedrax.report import curves
from fedrax.simulation import use_all_cores
from papers.losac.running import spread, write_table

CLIENTS, ROUNDS, STEPS = 100, 5, 5
ETA, ATTACK_ETA, ATTACK_STEPS, FRAMES = 1e-4, 1e-3, 100, 21
SEEDS = (0, 1, 2)
DATA = {"mnist": ("MNIST", 5), "har_inertial": ("HAR", 2)}
"""Name in the paper, and the last of the classes (from 0) that become class 0, by name in the library."""
ESR = {"esr": ("ESR", 0)}
"""The third set, by a command of its own."""
ETAS = {"esr": 1e-3}
"""Learning rates other than ``ETA``."""
LEAKS = {"DSGD": True, "FedAvg": False, "SCAFFOLD": False, "MimeSVRG": True, "LoSAC": False}
"""Whether the printed curves decrease, so that the estimate approaches the true data."""
READINGS = {"printed": 1.0, "sign turned": -1.0, "per step": -1.0 / STEPS}
"""Factors of the change of the model divided by eta. The text says (x_1^+ - x) / eta; with the opposite sign it points
along the gradient, and divided by the number of steps it is the mean gradient, as the text calls it."""


class Choice(NamedTuple):
    """Choices that the paper does not print."""

    reduction: Literal["sum", "mean"] = "sum"
    """Reduction of a client's losses."""
    start: Literal["normal", "uniform"] = "normal"
    """Initial estimate of the data: N(0, 1), or uniform in [0, 1]."""
    labels: Literal["known", "sought"] = "known"
    reading: str = "sign turned"


class Problem(NamedTuple):
    """A data set divided among clients."""

    federation: fedrax.Federation
    task: fedrax.Task
    params: Any
    eta: float = ETA


def problem(name: str, data_dir: str | None, seed: int, samples: int | None = None) -> Problem:
    """Two classes, divided evenly at random; ``samples`` per client, or all."""
    whole = _loaded(name, data_dir)
    rows = None if samples is None else np.random.default_rng(seed).permutation(len(whole.train.y))[: CLIENTS * samples]
    if rows is not None:
        whole = dataclasses.replace(whole, train=type(whole.train)(*(a[rows] for a in whole.train)))
    federation = fedrax.Federation.from_dataset(whole, Iid(CLIENTS), seed)
    return Problem(federation, *_task(name, data_dir), ETAS.get(name, ETA))


@cache
def _loaded(name: str, data_dir: str | None) -> Any:
    whole, last = load(name, data_dir), (DATA | ESR)[name][1]
    halves = [type(part)(part.x, (part.y > last).astype(np.int32)) for part in (whole.train, whole.test)]
    return dataclasses.replace(
        whole, train=halves[0], test=halves[1], num_classes=2, class_names=(), train_clients=None, test_clients=None
    )


@cache
def _task(name: str, data_dir: str | None) -> tuple[fedrax.Task, Any]:
    whole = _loaded(name, data_dir)
    task = fedrax.contract.binary_classification(
        Logistic().build(whole.train.x.shape[1:], 1), whole.preprocess(normalize=False)
    )
    return task, task.init(jax.random.key(0))


def methods(reduction: Literal["sum", "mean"], eta: float = ETA) -> dict[str, fedrax.Algorithm]:
    """The five methods at the paper's learning rate, with full local batches (M = 1)."""
    local = fedrax.LocalSGD(lr=eta, steps=STEPS, batch_size="full", reduction=reduction)
    once = dataclasses.replace(local, steps=1)
    return {
        "DSGD": fedrax.algorithms.FedSGD(local=once, server_optimizer=SGD(lr=eta)),
        "FedAvg": fedrax.FedAvg(local=local),
        "SCAFFOLD": fedrax.Scaffold(local=local),
        "MimeSVRG": fedrax.algorithms.MimeSVRG(local=local),
        "LoSAC": fedrax.LoSAC(local=dataclasses.replace(local, batch_size=10, blocks=1)),
    }


def first_client(given: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Features of the first client as the model reads them, and labels."""
    x, y = (a[: int(given.federation.sizes[0])] for a in given.federation.train)
    return (x.astype(np.float32) / 255 if x.dtype == np.uint8 else x), y


def exchanges(given: Problem, method: fedrax.Algorithm, rounds: int) -> list[Any]:
    """Messages to and from the first client."""
    settings: dict[str, Any] = {"rounds": rounds, "cohort_size": CLIENTS, "weights": "uniform", "eval_every": rounds}
    settings |= {"params": given.params, "record": fedrax.simulation.MessageSelection(clients=(0,))}
    return fedrax.simulate(method, given.task, given.federation, **settings).exchanges


def target(given: Problem, label: str, method: fedrax.Algorithm, seen: list[Any], reading: str) -> tuple[Any, Any]:
    """(parameters, what is taken for the gradient there): the gradient where one is sent, else the model's change."""
    names = ("phase 1, upload, last", "phase 1, upload/params, last")
    one = next(one for one in candidate_gradients(method, seen, given.params) if one.name in names)
    factor = 1.0 if LEAKS[label] else READINGS[reading] / given.eta
    return one.params, tree.scale(factor, one.vector)


def attacked(
    given: Problem, label: str, seen: list[Any], choice: Choice, seed: int, frames: int = FRAMES
) -> np.ndarray:
    """|D^ - D|_F during the attack [frames]."""
    x, y = first_client(given)
    params, gradient = target(given, label, methods(choice.reduction, given.eta)[label], seen, choice.reading)
    rng = np.random.default_rng(seed)
    start = rng.normal(size=x.shape) if choice.start == "normal" else rng.uniform(size=x.shape)
    known = choice.labels == "known"
    found = gradient_descent(ATTACK_ETA, ATTACK_STEPS).invert(
        as_gradient(given.task, params, gradient, choice.reduction),
        x.shape,
        None if known else 2,
        y=y if known else None,
        start=start,
        seed=seed,
        frames=frames,
    )
    return np.asarray([frobenius(frame, x) for frame in found.frames])


def percent(path: np.ndarray) -> float:
    """Change of the distance from start to end in percent."""
    return float(100 * (path[-1] / path[0] - 1))


# -- the commands -------------------------------------------------------------------------------------------------


def figure(arguments: argparse.Namespace) -> int:
    """The figure with summed losses, as elsewhere in the paper, with which MNIST has its shape; and with the mean
    gradient.
    """
    use_all_cores()
    rows, drawn = [], {}
    seeds, rounds = arguments.seeds or SEEDS, arguments.rounds or ROUNDS
    for name, (shown, _) in (ESR if arguments.what == "figure6-esr" else DATA).items():
        paths: dict[tuple[str, str], list[np.ndarray]] = {}
        for seed in seeds:
            given = problem(name, arguments.data_dir, seed)
            for label, method in methods("sum", given.eta).items():
                seen = exchanges(given, method, rounds)
                for reading in ("sign turned", "per step"):
                    path = attacked(given, label, seen, Choice(reading=reading), seed)
                    paths.setdefault((label, reading), []).append(path)
        drawn[shown] = paths
        for label in LEAKS:
            mine, mean = paths[label, "sign turned"], paths[label, "per step"]
            printed = "falls" if LEAKS[label] else "rises"
            cells = [spread([path[k] for path in mine], ".1f") for k in (0, -1)]
            changes = [spread([percent(path) for path in some], "+.2f") for some in (mine, mean)]
            rows.append([shown, label, printed, *cells, changes[0], "-" if LEAKS[label] else changes[1]])
    columns = ["data", "method", "printed", "start", "end", "change %", "change %, divided by T"]
    note = (
        "Figure 6 prints curves, no numbers. |D^ - D|_F after the best matching of samples, before and after 100 steps "
        f"of gradient descent on what the first client sent in round {rounds}: the gradient (DSGD, MimeSVRG), or "
        "(x - x_1^+) over eta; last column: over eta T, the mean gradient. Mean ± standard deviation over seeds."
    )
    write_table(arguments, arguments.what, "LoSAC, Figure 6 (defense against DLG)", note, columns, rows)
    curves.save_curves(draw(drawn), arguments.results / arguments.what)
    return 0


def search(arguments: argparse.Namespace) -> int:
    """All combinations of the choices that the paper does not print, with one seed."""
    use_all_cores()
    rows = []
    seed, rounds = (arguments.seeds or SEEDS)[0], arguments.rounds or ROUNDS
    for name, (shown, _) in DATA.items():
        given = problem(name, arguments.data_dir, seed)
        for reduction in ("sum", "mean"):
            seen = {label: exchanges(given, method, rounds) for label, method in methods(reduction).items()}
            for start, labels, reading in itertools.product(("normal", "uniform"), ("known", "sought"), READINGS):
                choice = Choice(reduction, start, labels, reading)  # type: ignore[arg-type]
                changes = {label: percent(attacked(given, label, seen[label], choice, seed, 2)) for label in LEAKS}
                alike = sum((changes[label] < 0) == falls for label, falls in LEAKS.items())
                cells = [f"{change:+.3g}" for change in changes.values()]
                rows.append([shown, reduction, start, labels, reading, *cells, f"{alike} of {len(LEAKS)}"])
    columns = ["data", "losses", "start", "labels", "reading", *LEAKS, "as printed"]
    note = (
        "Change of |D^ - D|_F over 100 steps in percent, one seed. Reading: (x_1^+ - x) / eta as printed, with its "
        "sign turned, and turned and divided by T. As printed: methods whose curve goes where the paper's does."
    )
    write_table(arguments, "figure6-search", "LoSAC's Figure 6: what the paper does not say", note, columns, rows)
    return 0


def draw(found: dict[str, dict[tuple[str, str], list[np.ndarray]]]) -> Figure:
    """A row for each data set: with the paper's reading of the messages, and with the mean gradient."""
    sketch = Figure(figsize=(9, 3.1 * len(found) + 0.5), layout="constrained")
    grid = sketch.subplots(len(found), 2, squeeze=False, sharex=True, sharey="row")
    titles = {"sign turned": "(x − x₁⁺)/η for the gradient", "per step": "(x − x₁⁺)/(ηT), the mean gradient"}
    for row, (shown, paths) in zip(grid, found.items(), strict=True):
        for axes, (reading, title) in zip(row, titles.items(), strict=True):
            for i, label in enumerate(LEAKS):
                _line(axes, [100 * path / path[0] for path in paths[label, reading]], label, i)
            axes.axhline(100, color="0.45", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
            axes.set_title(f"{shown}: {title}", fontsize="medium")
            axes.grid(color="0.92", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("distance from the data, % of the start's")
    for axes in grid[-1]:
        axes.set_xlabel("steps of the attack")
    handles, labels = grid[0][0].get_legend_handles_labels()
    sketch.legend(handles, labels, loc="outside lower center", ncols=len(LEAKS), frameon=False)
    return sketch


def _line(axes: Any, paths: Sequence[np.ndarray], label: str, i: int) -> None:
    at = np.linspace(0, ATTACK_STEPS, len(paths[0]))
    mean = np.mean(paths, axis=0)
    deviation = [statistics.stdev(values) if len(paths) > 1 else 0.0 for values in zip(*paths, strict=True)]
    axes.plot(at, mean, color=curves.PALETTE[i], linestyle=curves.DASHES[i % 4], linewidth=1.6, label=label)
    axes.fill_between(at, mean - deviation, mean + deviation, color=curves.PALETTE[i], alpha=0.15, linewidth=0)
