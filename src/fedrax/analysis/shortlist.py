"""The methods among which the advice chooses, each with the settings to try it at."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from fedrax.algorithms.episode import Episode
from fedrax.algorithms.fedavg import FedAvg, FedProx
from fedrax.algorithms.fedcm import FedCM
from fedrax.algorithms.feddyn import FedDyn
from fedrax.algorithms.gradma import GradMA, GradMAS
from fedrax.algorithms.losac import LoSAC
from fedrax.algorithms.scaffold import Scaffold
from fedrax.algorithms.upcycled import Upcycled
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.local_training import LocalSGD
from fedrax.optim.server import SGD

RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Values of ``local.lr``."""
BLOCKS = 5
"""LoSAC's M."""
Point = dict[str, float]
"""A value for ``local.lr`` and for the method's second number, where it has one."""


@dataclass(frozen=True)
class Method:
    """A method: what makes it of its local steps and a second number, and the values of the second one."""

    make: Callable[[LocalSGD, float, int], Algorithm]
    """Of the local steps, the second number, and how many clients a server may remember."""
    second: str = ""
    values: tuple[float, ...] = (0.0,)
    price: str = ""
    """What it costs beside FedAvg, in words."""

    def points(self) -> list[Point]:
        """All points of the grid."""
        return [
            {"local.lr": rate} | ({self.second: value} if self.second else {})
            for rate, value in itertools.product(RATES, self.values)
        ]

    def at(self, point: Point, local: LocalSGD, memory: int) -> Algorithm:
        """The algorithm of a point, with these local steps but for their size."""
        return self.make(dataclasses.replace(local, lr=point["local.lr"]), point.get(self.second, 0.0), memory)


METHODS: dict[str, Method] = {
    "FedAvg": Method(lambda local, *_: FedAvg(local=local)),
    "FedAvgM": Method(
        lambda local, lr, _: FedAvg(local=local, server_optimizer=SGD(lr=lr, momentum=0.9)),
        "server_optimizer.lr",
        (0.1, 0.3, 1.0),
    ),
    "FedProx": Method(lambda local, mu, _: FedProx(local=local, mu=mu), "mu", (0.01, 0.1, 1.0)),
    "Upcycled FedAvg": Method(lambda local, a, _: Upcycled(FedAvg(local=local), a=a), "a", (0.2, 0.5, 0.9)),
    "SCAFFOLD": Method(
        lambda local, *_: Scaffold(local=local), price="twice the bytes, and a model kept by each client"
    ),
    "FedDyn": Method(
        lambda local, alpha, _: FedDyn(local=local, alpha=alpha),
        "alpha",
        (0.01, 0.1, 1.0),
        "a model kept by each client",
    ),
    "FedCM": Method(lambda local, alpha, _: FedCM(local=local, alpha=alpha), "alpha", (0.1, 0.3), "two models down"),
    "EPISODE": Method(
        lambda local, g, _: Episode(local=local, gamma=g * local.lr), "gamma / lr", (0.3, 3.0), "two exchanges a round"
    ),
    "LoSAC": Method(
        lambda local, *_: LoSAC(
            local=dataclasses.replace(local, blocks=BLOCKS, batch_size=LocalSGD.batch_size), reading="consistent"
        ),
        price=f"twice the bytes, and {BLOCKS} models kept by each client",
    ),
    "GradMA-S": Method(
        lambda local, _, memory: GradMAS(local=local, memory=memory),
        price="a model kept by the server for each client (memory = N)",
    ),
    "GradMA": Method(
        lambda local, _, memory: GradMA(local=local, memory=memory),
        price="up to three gradients a step, and a model kept by the server for each client (memory = N)",
    ),
}
