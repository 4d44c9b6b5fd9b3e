"""What ``benchmarks.advice`` trains: pairs of data and partition, and ten methods with their grids.

A method's points differ in floats alone, so that all of them, with all seeds, are one compiled program.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedrax import (
    Episode,
    FedAvg,
    FedCM,
    FedDyn,
    Federation,
    FedProx,
    GradMA,
    GradMAS,
    LocalSGD,
    LoSAC,
    Scaffold,
    Task,
    Upcycled,
    classification,
)
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.server_optimizers import SGD
from fedrax.data import (
    Dataset,
    DirichletClasses,
    DirichletClients,
    Iid,
    LogNormal,
    Natural,
    Partitioner,
    Shards,
    Similarity,
    load,
)
from fedrax.models import MLP, Logistic

ROUNDS, STEPS, BATCH, BLOCKS, CLIENTS = 40, 10, 10, 5, 20
TUNING, SCORING = (0, 1), (2, 3, 4)
"""Seeds with which methods are tuned and the rule is made; seeds with which all is scored."""
VALIDATION = 0.2
RATE_OF_DIAGNOSIS = 0.1
"""``local.lr`` of the run along which a pair is diagnosed, fedrax's default."""
RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Values of ``local.lr``."""


@dataclass(frozen=True)
class Pair:
    """A data set, its partition, and the model that is trained."""

    data: str
    partition: Partitioner
    model: Logistic | MLP
    options: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    """The data's name on the page, where its own does not say all."""
    most: int | None = None
    """Training rows to take, the first of a data set in random order."""
    cohort: int = 5
    needs_files: bool = False

    @property
    def name(self) -> str:
        """As the page has it."""
        model = "softmax" if isinstance(self.model, Logistic) else "MLP"
        return f"{self.label or self.data}, {described(self.partition)}, {model}, {self.cohort} a round"

    def build(self) -> tuple[Task, Federation]:
        """The task and the federation."""
        dataset = load(self.data, **self.options)
        if self.most is not None:
            dataset = first_rows(dataset, self.most)
        federation = Federation.from_dataset(dataset, self.partition, seed=0)
        model = self.model.build(dataset.train.x.shape[1:], dataset.num_classes or 1)
        return classification(model, preprocess=federation.preprocess()), federation


def described(partition: Partitioner) -> str:
    """A partition by its name and what is special to it."""
    values = {f.name: getattr(partition, f.name) for f in dataclasses.fields(partition)}  # type: ignore[arg-type]
    special = ("per_client", "percent", "omega", "alpha", "sigma")
    told = ", ".join(f"{name} {values[name]:g}" for name in special if name in values)
    title = "".join(f" {c.lower()}" if c.isupper() else c for c in type(partition).__name__).strip()
    return f"{title} ({told})" if told else title


def first_rows(dataset: Dataset, rows: int) -> Dataset:
    """Some of the training rows by chance, always the same."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(dataset.train.y))[:rows])
    owners = None if dataset.train_clients is None else dataset.train_clients[chosen]
    train = type(dataset.train)(dataset.train.x[chosen], dataset.train.y[chosen])
    return dataclasses.replace(dataset, train=train, train_clients=owners)


_MLP = MLP(hidden=(32,))


def _digits(partition: Partitioner, model: Logistic | MLP = _MLP, **more: Any) -> Pair:
    return Pair("digits", partition, model, {"test_fraction": 0.4}, **more)


def _synthetic(alpha: float, beta: float, **more: Any) -> Pair:
    options = {"alpha": alpha, "beta": beta, "test_fraction": 0.4, "devices": CLIENTS, "seed": 1}
    return Pair("synthetic", Natural(), Logistic(), options, f"synthetic({alpha:g}, {beta:g})", most=4000, **more)


def _mnist(partition: Partitioner, model: Logistic | MLP, **more: Any) -> Pair:
    return Pair("mnist", partition, model, label="MNIST", most=4000, needs_files=True, **more)


PAIRS = (
    _digits(Iid(CLIENTS)),
    _digits(Similarity(CLIENTS, 50)),
    _digits(DirichletClasses(CLIENTS, 1.0)),
    _digits(DirichletClasses(CLIENTS, 0.3)),
    _digits(DirichletClasses(CLIENTS, 0.1)),
    _digits(DirichletClasses(CLIENTS, 0.1), cohort=CLIENTS),
    _digits(Shards(CLIENTS, 2), Logistic()),
    _digits(Shards(CLIENTS, 1)),
    _digits(Shards(CLIENTS, 1), Logistic(), cohort=CLIENTS),
    _digits(Similarity(CLIENTS, 10), Logistic()),
    _digits(LogNormal(CLIENTS, 1.0, min_size=10), Logistic()),
    _digits(DirichletClients(CLIENTS, 0.5, min_size=5)),
    _synthetic(0.0, 0.0),
    _synthetic(0.5, 0.5),
    _synthetic(1.0, 1.0),
    _synthetic(1.0, 1.0, cohort=CLIENTS),
    _mnist(Shards(CLIENTS, 2), Logistic()),
    _mnist(DirichletClasses(CLIENTS, 0.1), Logistic()),
)
"""The rule is made of every second one."""


def local(rate: float) -> LocalSGD:
    """The local steps of all methods but LoSAC."""
    return LocalSGD(lr=rate, steps=STEPS, batch_size=BATCH)


@dataclass(frozen=True)
class Method:
    """A method: what makes it of a step size and a second number, and the values of the second one."""

    make: Callable[[float, float], Algorithm]
    second: str = ""
    values: tuple[float, ...] = (0.0,)
    price: str = ""
    """What it costs beside FedAvg, in words."""

    def points(self) -> list[dict[str, float]]:
        """All points of the grid."""
        return [
            {"local.lr": rate} | ({self.second: value} if self.second else {})
            for rate, value in itertools.product(RATES, self.values)
        ]

    def at(self, point: dict[str, float]) -> Algorithm:
        """The algorithm of a point."""
        return self.make(point["local.lr"], point.get(self.second, 0.0))


def _losac(rate: float, _: float) -> Algorithm:
    return LoSAC(local=LocalSGD(lr=rate, steps=STEPS, blocks=BLOCKS), reading="consistent")


METHODS: dict[str, Method] = {
    "FedAvg": Method(lambda rate, _: FedAvg(local=local(rate))),
    "FedAvgM": Method(
        lambda rate, lr: FedAvg(local=local(rate), server_optimizer=SGD(lr=lr, momentum=0.9)),
        "server_optimizer.lr",
        (0.1, 0.3, 1.0),
    ),
    "FedProx": Method(lambda rate, mu: FedProx(local=local(rate), mu=mu), "mu", (0.01, 0.1, 1.0)),
    "Upcycled FedAvg": Method(lambda rate, a: Upcycled(FedAvg(local=local(rate)), a=a), "a", (0.2, 0.5, 0.9)),
    "SCAFFOLD": Method(
        lambda rate, _: Scaffold(local=local(rate)), price="twice the bytes, and a model kept by each client"
    ),
    "FedDyn": Method(
        lambda rate, alpha: FedDyn(local=local(rate), alpha=alpha),
        "alpha",
        (0.01, 0.1, 1.0),
        "a model kept by each client",
    ),
    "FedCM": Method(lambda rate, alpha: FedCM(local=local(rate), alpha=alpha), "alpha", (0.1, 0.3), "two models down"),
    "EPISODE": Method(
        lambda rate, g: Episode(local=local(rate), gamma=g * rate), "gamma / lr", (0.3, 3.0), "two exchanges a round"
    ),
    "LoSAC": Method(_losac, price=f"twice the bytes, and {BLOCKS} models kept by each client"),
    "GradMA-S": Method(
        lambda rate, _: GradMAS(local=local(rate), memory=CLIENTS),
        price="a model kept by the server for each client (memory = N)",
    ),
    "GradMA": Method(
        lambda rate, _: GradMA(local=local(rate), memory=CLIENTS),
        price="up to three gradients a step, and a model kept by the server for each client (memory = N)",
    ),
}


def definition(pair: Pair, method: str | None) -> str:
    """All that a run depends on, in words (without a method, the diagnosis): what was done is not done again."""
    numbers = (ROUNDS, STEPS, BATCH, BLOCKS, CLIENTS, TUNING, SCORING, VALIDATION, RATE_OF_DIAGNOSIS)
    return repr((numbers, pair, method, METHODS[method].points() if method else None))
