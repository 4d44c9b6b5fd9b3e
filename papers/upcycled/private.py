"""Figures 3 and 4: private methods with output and objective perturbation, their grids and compiled sweeps."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrax import (
    FedAvg,
    Federation,
    FedProx,
    FedraxError,
    LocalSGD,
    Result,
    Scaffold,
    Settings,
    Task,
    classification,
    files,
    sweep,
)
from fedrax.algorithms import upcycle
from fedrax.contract import binary_classification
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Dataset, Samples
from fedrax.models import Logistic
from fedrax.optim.server import SGD
from fedrax.privacy import ObjectivePerturbation, OutputPerturbation
from fedrax.privacy.accounting import Accountant
from papers.upcycled.grid import DATA, Point, federation_of

SETS = ("iid", "0.5_0.5", "own 0_0", "own 1_1")
"""The four sets of the figures: published ones if available, otherwise those of our generator."""
DELTA = 1e-4
MU = 0.5
"""mu of FedProx in the caption of Figure 4."""
STEPS = 63
"""Local steps of SCAFFOLD: ten epochs of a client of Syn(iid) with the mean number of samples."""
EXTRAPOLATIONS = (0.0, 0.1, 0.5, 0.9)
"""Extrapolation coefficients a of `upcycle`; 0 is the method itself with half of the rounds."""
SERVER_STEPS = (0.3, 0.6, 1.0, 1.5, 2.5)
"""Server learning rates of FedAvg with half of the rounds, without upcycling."""
MEASURED = 8
"""Number of evaluations of a run, equally spaced."""


def _fedavg(point: Point) -> Algorithm:
    return FedAvg(local=_local(point), server_optimizer=SGD(lr=point.get("server lr", 1.0)))


def _fedprox(point: Point) -> Algorithm:
    return FedProx(local=_local(point), mu=MU)


def _scaffold(point: Point) -> Algorithm:
    """A fixed number of plain steps, so that everything a client uploads follows from its noisy model: c_i is divided
    by the number of steps, and epochs would reveal the number of samples.
    """
    return Scaffold(local=LocalSGD(lr=point["lr"], steps=STEPS, batch_size=32))


def _local(point: Point) -> LocalSGD:
    return LocalSGD(lr=point["lr"], epochs=10, batch_size=32, momentum=0.5)


METHODS: dict[str, Callable[[Point], Algorithm]] = {"FedAvg": _fedavg, "FedProx": _fedprox, "SCAFFOLD": _scaffold}
LEVELED = tuple(METHODS)
"""The methods that are run at many noise levels."""
KINDS: dict[str, dict[str, tuple[float, ...]]] = {
    "plain": {},
    "upcycled": {"a": EXTRAPOLATIONS},
    "server step": {"server lr": SERVER_STEPS},
}
"""Kinds of runs of a method, with their tuned settings; only the first one has all rounds, the others half."""


def kinds_of(method: str) -> list[str]:
    """Kinds for a method; server learning rates are tuned for FedAvg only."""
    return [kind for kind in KINDS if kind != "server step" or method == "FedAvg"]


@dataclasses.dataclass(frozen=True)
class Figure:
    """Mechanism and grid of a figure."""

    number: int
    mechanism: str
    wrap: Callable[[Algorithm, Point], Algorithm]
    level: str
    """Name of the noise parameter."""
    levels: tuple[float, ...]
    """Levels of the plain methods with all rounds."""
    share: float
    """Level of all others relative to it, as in the paper."""
    axes: dict[str, tuple[float, ...]]
    """Other tuned settings."""
    printed: Point
    """Level of plain methods in the paper, with accompanying settings."""

    def points(self, kind: str) -> list[Point]:
        """All points of a kind's grid."""
        factor = 1.0 if kind == "plain" else self.share
        axes = self.axes | {self.level: tuple(factor * level for level in self.levels)} | KINDS[kind]
        return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]

    def at(self, method: str, point: Point) -> Algorithm:
        """The private method at a point."""
        private = self.wrap(METHODS[method](point), point)
        return upcycle(private, a=point["a"]) if "a" in point else private

    def task(self, federation: Federation) -> Task:
        """Softmax of both classes as published, or a single logit, to which Theorem 6.3 applies."""
        shape = federation.train.x.shape[1:]
        return (
            classification(Logistic().build(shape, 2))
            if self.number == 3
            else binary_classification(Logistic().build(shape, 1))
        )


def _output(inner: Algorithm, point: Point) -> Algorithm:
    return OutputPerturbation(inner, tau=point["tau"], sigma=point["sigma / tau"] * point["tau"])


def _objective(inner: Algorithm, point: Point) -> Algorithm:
    """Theorem 6.3 applies to losses with a proximal term: of the three methods, to FedProx."""
    return ObjectivePerturbation(inner, point["alpha"], "paper" if isinstance(inner, FedProx) else "none")


FIGURES = {
    "figure3": Figure(
        3,
        "output perturbation",
        _output,
        "sigma / tau",
        (0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
        0.8,
        {"lr": (0.03, 0.1, 0.3, 1.0), "tau": (1.0, 10.0)},
        {"sigma / tau": 0.1, "tau": 10.0},
    ),
    "figure4": Figure(
        4,
        "objective perturbation",
        _objective,
        "alpha",
        (1.0, 3.0, 10.0, 30.0, 100.0),
        2.0,
        {"lr": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)},
        {"alpha": 10.0},
    ),
}
"""sigma is 1 and 0.8, alpha 10 and 20; tau = 10 is from the authors' program and not printed in the paper."""


class Found(NamedTuple):
    """Measurements of a grid on test rows, over all points; NaN if a run diverged."""

    points: list[Point]
    loss: np.ndarray
    """[points, seeds, MEASURED]."""
    accuracy: np.ndarray
    """In percent, with the same shape."""

    def best(self, by: str, **fixed: float) -> int:
        """The point with the best final mean over seeds among those at ``fixed``; by "loss" or "accuracy"."""
        final = getattr(self, by)[:, :, -1].mean(1)
        worth = np.nan_to_num(-final if by == "loss" else final, nan=-np.inf)
        allowed = [i for i, point in enumerate(self.points) if all(point[k] == v for k, v in fixed.items())]
        return max(allowed, key=lambda i: worth[i])

    def only(self, allowed: Callable[[Point], bool]) -> Found:
        """The allowed points."""
        kept = [i for i, point in enumerate(self.points) if allowed(point)]
        return Found([self.points[i] for i in kept], self.loss[kept], self.accuracy[kept])


def spent(algorithm: Algorithm, rounds: int, sizes: np.ndarray, delta: float = DELTA) -> tuple[float, float]:
    """(epsilon, epsilon of the paper) of clients that take part in ``rounds`` rounds; the latter is a mean over
    clients.
    """
    accountant = Accountant(algorithm.releases(), delta)
    claims = [accountant.epsilon_paper(rounds, int(size)) for size in sizes]
    return accountant.epsilon(rounds), float(np.mean([np.nan if claim is None else claim for claim in claims]))


def federation_for(figure: Figure, data: str, part: str, data_dir: str | None) -> Federation:
    """As for the tables; for Theorem 6.3 feature rows are scaled to at most length 1."""
    return federation_of(data, part, data_dir, unit_rows if figure.number == 4 else None)


def unit_rows(dataset: Dataset) -> Dataset:
    """Divide each row of features by its length if that is above 1."""
    cut = lambda x: x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1).astype(x.dtype)  # noqa: E731
    parts = {name: Samples(cut(part.x), part.y) for name, part in (("train", dataset.train), ("test", dataset.test))}
    return dataclasses.replace(dataset, **parts)


def measured(
    what: str,
    data: str,
    method: str,
    kind: str,
    part: str,
    *,
    out: Path,
    seeds: list[int],
    rounds: int,
    data_dir: str | None,
    only_kept: bool = False,
) -> Found | None:
    """Measurements of a grid, stored in a separate file; None if there is none and ``only_kept``."""
    figure = FIGURES[what]
    rounds = rounds if kind == "plain" else rounds // 2
    facts = {"points": figure.points(kind), "seeds": seeds, "rounds": rounds, "data": list(DATA[data])}
    place = out / f"{what} {data} {part} {method} {kind}.json".replace(" ", "-")
    if not place.exists():
        if only_kept:
            return None
        found = _run(figure, method, facts["points"], federation_for(figure, data, part, data_dir), seeds, rounds)
        files.write_text(place, json.dumps(facts | found) + "\n")
    kept = files.read_json(place)
    if any(kept.get(key) != json.loads(json.dumps(value)) for key, value in facts.items()):
        raise FedraxError(f"{place} holds another sweep: choose another --out.")
    return Found(facts["points"], np.array(kept["loss"], float), np.array(kept["accuracy"], float))


def _run(
    figure: Figure, method: str, points: list[Point], federation: Federation, seeds: list[int], rounds: int
) -> dict[str, Any]:
    """Losses and accuracies of the grid."""
    results = sweep_all_clients(figure, [figure.at(method, point) for point in points], federation, seeds, rounds)

    def curves(metric: str, factor: float) -> list[list[list[float | None]]]:
        of_run = lambda run: {e["round"]: factor * e[metric] for e in run.events if metric in e}  # noqa: E731
        at = [rounds // MEASURED * (k + 1) for k in range(MEASURED)]
        return [[[rounded(of_run(run).get(r)) for r in at] for run in runs] for runs in results]

    return {"loss": curves("test_loss", 1), "accuracy": curves("test_accuracy", 100)}


def sweep_all_clients(
    figure: Figure, algorithms: list[Algorithm], federation: Federation, seeds: list[int], rounds: int
) -> Sequence[Sequence[Result]]:
    """Run all algorithms in one compiled program with full participation and without stragglers."""
    settings = Settings(
        rounds=rounds,
        cohort_size=federation.num_clients,
        weights="uniform",
        eval_every=rounds // MEASURED,
        delta=DELTA,
    )
    return sweep(algorithms, figure.task(federation), federation, seeds, settings, mode="vectorized")


def rounded(value: float | None) -> float | None:
    """Rounded to six digits."""
    return None if value is None else float(f"{value:.6g}")
