"""Every method over messages of Flower gives what the simulator gives, and sends as many bytes as it counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.common.serde import message_from_proto, message_to_proto

from fedrax import Algorithm, Result, Settings, classification, simulate, tree
from fedrax.data import Federation
from fedrax.experiments.methods import algorithms
from fedrax.flower import LocalGrid, client_app, federate
from fedrax.flower.travelling import needs_start
from fedrax.models import Logistic
from fedrax.privacy.mechanisms.perturbation import ObjectivePerturbation
from fedrax.simulation.cohorts import Sampler

SIZES = (3, 7, 4, 12, 6, 5)
ROUNDS, COHORT = 4, 3
TASK = classification(Logistic().build((4,), 3))
START = jax.tree.map(lambda a: a + 0.1 * np.random.default_rng(1).normal(size=a.shape), TASK.init(jax.random.key(0)))


class Serialized(LocalGrid):
    """Messages pass as the bytes that a network would carry."""

    def _answer(self, message: Message) -> Message:
        there = message_from_proto(message_to_proto(message))
        return message_from_proto(message_to_proto(super()._answer(there)))


def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of six clients, and whose they are."""
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    x = rng.normal(size=(len(owner), 4)).astype(np.float32)
    return x, (x @ rng.normal(size=(4, 3))).argmax(1), owner


X, Y, OWNER = samples()
FEDERATION = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)


def own(context: Context) -> Any:
    """A client's rows."""
    mine = int(context.node_config["partition-id"]) == OWNER
    return X[mine], Y[mine]


def cohort(r: int) -> list[int]:
    """The clients of a round."""
    settings = Settings(rounds=ROUNDS, cohort_size=COHORT)
    return Sampler(settings, np.array(SIZES)).cohort(r).tolist()


def example(kind: type[Algorithm]) -> Algorithm:
    """The method with a step size at which nothing diverges."""
    if kind is ObjectivePerturbation:
        return ObjectivePerturbation(guarantee="none")
    algorithm = kind()
    local = getattr(algorithm, "local", None)
    if local is None:
        return algorithm
    return dataclasses.replace(algorithm, local=dataclasses.replace(local, lr=0.02))  # type: ignore[call-arg]


def deployed(algorithm: Algorithm, grid: Any = None, **changes: Any) -> Result:
    """A short run over messages."""
    grid = grid or Serialized(client_app(algorithm, TASK, own, seed=0), len(SIZES))
    settings = {"rounds": ROUNDS, "cohort_size": COHORT, "test": (X, Y), "seed": 0, "timeout": 30.0}
    return federate(grid, algorithm, TASK, clients=len(SIZES), **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", algorithms().values(), ids=algorithms().keys())
def test_gives_what_the_simulator_gives(kind: type[Algorithm]):
    algorithm = example(kind)
    settings = {"rounds": ROUNDS, "cohort_size": COHORT, "plan": "scan", "devices": 1, "amplification": "none"}
    there = simulate(algorithm, TASK, FEDERATION, params=START, **settings)  # type: ignore[arg-type]
    here = deployed(algorithm, params=START)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), here.server, there.server)
    assert len(here.events) == ROUNDS
    met: set[int] = set()
    for r, (ours, theirs) in enumerate(zip(here.events, there.events, strict=True)):
        met |= set(cohort(r)) if needs_start(algorithm, START, ()) else set()
        theirs["bytes_down"] += len(met) * tree.num_bytes(START)  # who has not taken part is sent the start, too
        for name in theirs.keys() - {"seconds"}:
            if "personal" not in name:  # which are of the clients' own data, see below
                np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=2e-5, err_msg=name)
