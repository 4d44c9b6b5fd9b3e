"""Numbers that methods read and report in a round have the precision of the run."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fedrax import (
    Algorithm,
    ClientData,
    ClientOutput,
    Cohort,
    FedAvg,
    FedraxError,
    LocalSGD,
    Scaffold,
    hyperparameters,
    tree,
)
from fedrax.contract import Positive
from fedrax.contract.algorithm import Info
from fedrax.personalization import Ditto
from fedrax.tree import Tree
from tests.simulation.problems import run


class Server(NamedTuple):
    params: Tree


@hyperparameters
class ScaledByParticipation(Algorithm):
    """Scales local learning rate and server step by the share of participating clients."""

    lr: Positive = 0.1

    def init(self, params: Tree, num_clients: int) -> Server:
        return Server(jax.tree.map(lambda a: a + 1, params))

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        share = self.lr * data.cohort_size / data.num_clients
        return ClientOutput(upload=tree.scale(-share, message))

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        assert cohort.expected is not None
        share = self.lr * cohort.size / cohort.expected
        return Server(tree.add_scaled(server.params, share, cohort.mean)), {}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "debug"])
def test_losses_have_the_precision_of_the_run(plan: str) -> None:
    """At zero parameters the cross entropy of three classes is ln 3."""
    zeros = {"output": {"weight": np.zeros((3, 4)), "bias": np.zeros(3)}}
    event = run(FedAvg(LocalSGD(steps=1)), rounds=1, plan=plan, dtype="float64", params=zeros).events[0]
    np.testing.assert_allclose(event["train_loss"], math.log(3), rtol=1e-14)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "debug"])
def test_cohort_sizes_have_the_precision_of_the_run(plan: str) -> None:
    """In a float64 run a float32 size would round every product with it."""
    result = run(ScaledByParticipation(), rounds=2, plan=plan, dtype="float64")
    for last in map(np.asarray, jax.tree.leaves(result.params)):
        factor = (1 - 0.1 * 0.1 * 3 / 8) ** 2
        first = np.round(last / factor - 1, 7)  # initial parameters are drawn in float32
        assert last.dtype == np.float64
        if not first.any():  # biases start at zero
            np.testing.assert_allclose(last, factor, rtol=1e-14)


@hyperparameters
class SeveralModels(ScaledByParticipation):
    """Broadcasts several models."""

    local: LocalSGD = LocalSGD()

    def broadcast(self, server: Server) -> Tree:
        return jax.tree.map(lambda a: a[None].repeat(2, 0), server.params)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        return ClientOutput(upload=tree.row(message, 0))


@pytest.mark.parametrize(
    "strict", [{"jax_numpy_rank_promotion": "raise"}, {"jax_numpy_dtype_promotion": "strict"}], ids=str
)
def test_runs_allow_dtype_promotion_if_the_caller_forbids_it(strict: dict[str, str]) -> None:
    usual = {name: jax.config.values[name] for name in strict}
    expected = run(Scaffold(), rounds=2).events[-1]
    try:
        for name, value in strict.items():
            jax.config.update(name, value)
        found = run(Scaffold(), rounds=2).events[-1]
    finally:
        for name, value in usual.items():
            jax.config.update(name, value)
    assert found["train_loss"] == expected["train_loss"]


def test_ditto_rejects_broadcasts_of_several_models() -> None:
    with pytest.raises(FedraxError, match="Ditto needs a broadcast message with the parameters"):
        run(Ditto(SeveralModels()), rounds=1)
