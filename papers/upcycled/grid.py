"""The grids of the seven methods, and the compiled sweeps that run them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedrax import Federation, FedraxError, LocalSGD, Result, Settings, Task, classification, files, sweep
from fedrax.algorithms import upcycle
from fedrax.algorithms.fedavg import FedAvg, FedProx
from fedrax.algorithms.feddyn import FedDyn
from fedrax.algorithms.pfedme import PFedMe
from fedrax.algorithms.scaffold import Scaffold
from fedrax.contract.algorithm import Algorithm
from fedrax.data import Dataset, Natural, Samples, load
from fedrax.data.dataset import numpy_generator, train_test_split
from fedrax.models import Logistic
from fedrax.optim.server import SGD, Yogi

STEPS = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Local learning rates."""
EXTRAPOLATIONS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
"""Extrapolation coefficients a of `upcycle`; 0 is the method without it."""
SERVER_STEPS = (0.3, 0.5, 0.7, 1.0, 1.1, 1.3, 1.5, 1.7, 1.9, 2.5, 3.0, 4.0, 6.0)
"""Server learning rates of FedAvg; 1.1 to 1.9 correspond to `upcycle` with a = 0.1 to 0.9."""
HELD_OUT = 0.2
"""Share of each device's training rows that are held out for the second choice of points."""
TOGETHER = 120
"""Number of points in one program."""

Point = dict[str, float]
Known = list[tuple[Point, dict[str, np.ndarray]]]
"""Points that were run, and what was measured of them."""


def _local(lr: float, momentum: float | None = 0.5) -> LocalSGD:
    return LocalSGD(lr=lr, epochs=10, batch_size=32, momentum=momentum)


def _fedavg(point: Point) -> Algorithm:
    return FedAvg(local=_local(point["lr"]))


def _fedavgm(point: Point) -> Algorithm:
    return FedAvg(local=_local(point["lr"]), server_optimizer=SGD(momentum=point["beta"]))


def _fedprox(point: Point) -> Algorithm:
    return FedProx(local=_local(point["lr"]), mu=point["mu"])


def _scaffold(point: Point) -> Algorithm:
    return Scaffold(local=_local(point["lr"]))


def _feddyn(point: Point) -> Algorithm:
    return FedDyn(local=_local(point["lr"]), alpha=point["alpha"])


def _pfedme(point: Point) -> Algorithm:
    return PFedMe(local=_local(point["lr"], None), lam=point["lambda"], inner_lr=point["inner lr"], inner_steps=5)


def _contracts(point: Point) -> bool:
    """Whether pFedMe's inner and outer steps are contractions."""
    return point["inner lr"] * point["lambda"] < 2 and point["lr"] * point["lambda"] < 1


def _fedyogi(point: Point) -> Algorithm:
    return FedAvg(local=_local(point["lr"]), server_optimizer=Yogi(lr=point["server lr"]))


def _server_step(point: Point) -> Algorithm:
    return FedAvg(local=_local(point["lr"]), server_optimizer=SGD(lr=point["server lr"]))


@dataclasses.dataclass(frozen=True)
class Method:
    """A method and its tuned settings other than the local learning rate and a."""

    make: Callable[[Point], Algorithm]
    axes: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    weights: str = "samples"
    """Aggregation weights; uniform for SCAFFOLD and FedDyn."""
    steps: tuple[float, ...] = STEPS
    upcycled: bool = True
    allowed: Callable[[Point], bool] = lambda point: True
    """Whether a point is valid."""

    @property
    def points(self) -> list[Point]:
        """All points of the grid."""
        axes = {"lr": self.steps, **self.axes, **({"a": EXTRAPOLATIONS} if self.upcycled else {})}
        points = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return [point for point in points if self.allowed(point)]

    def at(self, point: Point) -> Algorithm:
        """The method at a point."""
        return upcycle(self.make(point), a=point["a"]) if self.upcycled else self.make(point)


METHODS = {
    "FedAvg": Method(_fedavg),
    "FedAvgM": Method(_fedavgm, {"beta": (0.3, 0.6, 0.9, 0.95, 0.98, 0.99, 0.995)}),
    "FedProx": Method(_fedprox, {"mu": (0.01, 0.1, 1.0, 10.0, 30.0, 100.0)}),
    "SCAFFOLD": Method(_scaffold, weights="uniform"),
    "FedDyn": Method(_feddyn, {"alpha": (1e-4, 0.001, 0.01, 0.1, 1.0, 10.0, 30.0, 100.0)}, weights="uniform"),
    "pFedMe": Method(
        _pfedme,
        {"lambda": (0.01, 0.1, 1.0, 10.0, 30.0, 100.0), "inner lr": (1e-2, 0.1, 1.0)},
        steps=(1e-4, 1e-3, 1e-2, 0.1, 1.0),
        allowed=_contracts,
    ),
    "FedYogi": Method(
        _fedyogi,
        {"server lr": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)},
        steps=STEPS[:7],
    ),
}
SERVER_STEP = Method(_server_step, {"server lr": SERVER_STEPS}, upcycled=False)
"""FedAvg with a tuned server learning rate, without upcycling."""
EVERY = {**METHODS, "FedAvg, server step": SERVER_STEP}

DATA = {
    **{variant: ("upcycled_synthetic", {"variant": variant}) for variant in ("iid", "0_0", "0.5_0.5", "1_1")},
    "own iid": ("synthetic", {"iid": True, "features": 20, "classes": 2}),
    "own 0_0": ("synthetic", {"alpha": 0.0, "beta": 0.0, "features": 20, "classes": 2}),
    "own 0.5_0.5": ("synthetic", {"alpha": 0.5, "beta": 0.5, "features": 20, "classes": 2}),
    "own 1_1": ("synthetic", {"alpha": 1.0, "beta": 1.0, "features": 20, "classes": 2}),
}
"""The published sets, and equivalent ones of our generator: 30 devices, 20 features, two classes."""


def federation_of(
    data: str, part: str, data_dir: str | None, change: Callable[[Dataset], Dataset] | None = None
) -> Federation:
    """Federation of a set after ``change``; for the part "held out", test rows are held out of the training rows."""
    name, options = DATA[data]
    dataset = load(name, data_dir, **options)
    dataset = dataset if change is None else change(dataset)
    if part == "held out":
        dataset = held_out(dataset)
    return Federation.from_dataset(dataset, Natural(), 0)


def held_out(dataset: Dataset) -> Dataset:
    """The training rows, with a share of each device's rows as test rows."""
    owner = dataset.train_clients
    if owner is None:
        raise FedraxError(f"{dataset.name!r} has no devices.")
    train, test = train_test_split(owner, HELD_OUT, numpy_generator(0, "held out"))
    of = lambda rows: Samples(dataset.train.x[rows], dataset.train.y[rows])  # noqa: E731
    clients = {"train_clients": owner[train], "test_clients": owner[test]}
    return dataclasses.replace(dataset, train=of(train), test=of(test), **clients)


def neighbors(spec: Method, center: Point) -> list[Point]:
    """The points of the grid at most one value away from ``center`` on every axis but a, without extrapolation."""
    axes = {"lr": spec.steps, **spec.axes}
    near = [axes[k][max(0, (i := axes[k].index(center[k])) - 1) : i + 2] for k in axes]
    return [
        point
        for point in spec.points
        if not point.get("a") and all(point[k] in n for k, n in zip(axes, near, strict=True))
    ]


def next_points(spec: Method, known: Known) -> list[Point]:
    """Of the coarse search the points to run next; none at its end.

    First every second value of every axis, without extrapolation; then the neighbors of the best point over devices and
    of that over samples, until both have theirs; then both points, and those with the next smaller step, with every a.
    """
    axes = {"lr": spec.steps, **spec.axes}
    coarse = [
        p for p in spec.points if not p.get("a") and all(p[k] in axes[k][len(axes[k]) % 2 == 0 :: 2] for k in axes)
    ]
    tried = [point for point, _ in known]
    if missing := [point for point in coarse if point not in tried]:
        return missing
    plain = [(point, values) for point, values in known if not point.get("a")]
    best = [max(plain, key=lambda one: one[1][kind_of(one[1]) + over].mean())[0] for over in ("devices", "samples")]
    near = [point for center in best for point in neighbors(spec, center)]
    if missing := [point for k, point in enumerate(near) if point not in tried and point not in near[:k]]:
        return missing
    if not spec.upcycled:
        return []
    smaller = [p | {"lr": spec.steps[max(0, spec.steps.index(p["lr"]) - 1)]} for p in best]
    wanted = [p | {"a": a} for p in (*best, *smaller) for a in EXTRAPOLATIONS]
    return [p for k, p in enumerate(wanted) if p not in tried and p not in wanted[:k] and spec.allowed(p)]


def kind_of(values: dict[str, np.ndarray]) -> str:
    """The models that the paper compares: personal ones for a personalized method."""
    return "personal " if "personal devices" in values else ""


def searched(
    out: Path, data: str, stragglers: int, method: str, part: str, seeds: list[int], rounds: int, data_dir: str | None
) -> Known:
    """As `measured`, of the points of the coarse search alone."""
    points: list[Point] = []
    known: Known = []
    where = (out, data, stragglers, method, part, seeds, rounds, data_dir)
    while more := next_points(EVERY[method], known):
        points += more
        known = measured(*where, points)
    return known


def measured(
    out: Path,
    data: str,
    stragglers: int,
    method: str,
    part: str,
    seeds: list[int],
    rounds: int,
    data_dir: str | None,
    points: list[Point] | None = None,
) -> Known:
    """Final accuracies of all points of a method's grid, {name: [seeds]} in percent, stored in a separate file.

    Missing points are run, several at a time, and added to the file. points: instead of the whole grid.
    """
    spec, place = EVERY[method], place_of(out, data, stragglers, method, part)
    facts = {"seeds": seeds, "rounds": rounds, "data": list(DATA[data])}
    kept = files.read_json(place) if place.exists() else {**facts, "points": [], "found": []}
    if any(kept.get(key) != value for key, value in facts.items()):
        raise FedraxError(f"{place} holds another sweep: choose another --out.")
    wanted = spec.points if points is None else points
    missing = [point for point in wanted if point not in kept["points"]]
    for start in range(0, len(missing), TOGETHER):
        some = missing[start : start + TOGETHER]
        kept["found"] += run(spec, some, federation_of(data, part, data_dir), stragglers, seeds, rounds)
        kept["points"] += some
        files.write_text(place, json.dumps(kept) + "\n")
    found = [kept["found"][kept["points"].index(point)] for point in wanted]
    names = dict.fromkeys(name for values in found for name in values)  # incomplete for a diverged point
    of = lambda values: {name: np.array(values.get(name, [0.0] * len(seeds))) for name in names}  # noqa: E731
    return [(point, of(values)) for point, values in zip(wanted, found, strict=True)]


def kept_points(place: Path) -> list[Point]:
    """The points that a file has."""
    return files.read_json(place)["points"] if place.exists() else []


def has_all(place: Path, method: str) -> bool:
    """Whether a file contains all points of a method's grid."""
    points = kept_points(place)
    return all(point in points for point in EVERY[method].points)


def place_of(out: Path, data: str, stragglers: int, method: str, part: str) -> Path:
    """File of a method's grid."""
    return out / f"{data} {part} {stragglers} {method}.json".replace(" ", "-").replace(",", "")


def run(
    spec: Method, points: list[Point], federation: Federation, stragglers: int, seeds: list[int], rounds: int
) -> list[dict[str, Any]]:
    """The final accuracies of each point."""
    swept = sweep_points(spec, points, federation, stragglers, seeds, rounds, eval_every=rounds, per_client=True)
    return [final([r.events[-1] if r.stopped == "rounds" else {} for r in runs]) for runs in swept]


def sweep_points(
    spec: Method,
    points: list[Point],
    federation: Federation,
    stragglers: int,
    seeds: list[int],
    rounds: int,
    task: Task | None = None,
    **options: Any,
) -> Sequence[Sequence[Result]]:
    """Run all points in one compiled program, with 30 % of the devices in a round; ``options``: further settings.

    task: instead of softmax regression.
    """
    settings = Settings(
        rounds=rounds,
        cohort_size=round(0.3 * federation.num_clients),
        stragglers=stragglers / 100,
        weights=spec.weights,  # type: ignore[arg-type]
    )
    algorithms = [spec.at(point) for point in points]
    return sweep(algorithms, task or logistic(federation), federation, seeds, settings, mode="vectorized", **options)


def logistic(federation: Federation) -> Task:
    """Softmax regression."""
    return classification(Logistic().build(federation.train.x.shape[1:], federation.num_classes or 1))


def final(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Accuracies in percent over devices and over samples, of personal models if there are any; 0 if diverged."""
    names = {"devices": "accuracy_client_mean", "samples": "accuracy"}
    kinds = {"": "test_", "personal ": "test_personal_"}
    return {
        kind + name: [100 * event.get(prefix + metric, 0.0) for event in events]
        for kind, prefix in kinds.items()
        for name, metric in names.items()
        if kind == "" or any(prefix + metric in event for event in events)
    }
