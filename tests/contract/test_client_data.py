"""What a client's local training reads: its message, its samples and the index of a local step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, LocalSGD, tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput, Cohort
from fedrax.models import Model
from tests.simulation.problems import FEDERATION, LOCAL, run

PLANS = ["scan", "vmap", "loop", "debug"]


def test_changing_the_message_in_one_client_does_not_reach_others():
    @hyperparameters
    class Moved(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            message["output"] = tree.scale(1.5, message["output"])
            return super().client(message, state, data)

    one, *others = [run(Moved(LOCAL), plan=plan, rounds=1).params["output"] for plan in PLANS]
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), one, other)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", PLANS)
def test_the_index_of_a_local_step_is_an_array_on_every_plan(plan: str):
    """It selects a row of an array, and every local step has its own random key."""

    @hyperparameters
    class Slowing(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            def direction(gradient: Any, x: Any, step: Any, memory: Any) -> Any:
                drawn = jax.random.normal(step.key("noise"))
                return tree.scale(1 / (1 + step.index.astype(jnp.float32)), gradient), memory.at[step.index].set(drawn)

            result = self.local.run(data, message, direction, memory=jnp.zeros(3))
            drawn = jnp.sort(result.memory)
            info = {"apart": jnp.min(drawn[1:] - drawn[:-1]), "sum": result.memory.sum()}
            return ClientOutput(upload=tree.sub(result.params, message), info={**result.info, **info})

    made = run(Slowing(LOCAL), plan=plan, rounds=2)
    assert all(event["apart"] > 0 for event in made.events)
    assert made.events[0]["sum"] != pytest.approx(made.events[1]["sum"])
    assert made.events[0]["sum"] == pytest.approx(run(Slowing(LOCAL), rounds=2).events[0]["sum"], rel=1e-5)


def test_a_client_may_take_no_local_step():
    @hyperparameters
    class Chance(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            steps = jnp.where(data.assignment.client % 2 == 0, 0, 2)
            result = self.local.run(data.with_steps(steps), message, mean_gradient=True)
            return ClientOutput(upload=tree.sub(result.params, message), info=result.info)

    made = run(Chance(LocalSGD(lr=0.05, batch_size=2)), rounds=4)
    assert all(np.isfinite(event["train_loss"]) for event in made.events) and made.stopped != "diverged"


@hyperparameters
class WithoutTheLast(FedAvg):
    """FedAvg on all samples of a client except the last."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data.with_samples(data.samples, data.size - 1), message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)


@pytest.mark.parametrize("local", [LocalSGD(batch_size=2, order="stored"), LocalSGD(blocks=2, steps=6)])
def test_with_samples_and_size_excludes_the_remaining_samples(local: LocalSGD):
    """Each sample changes one weight of the model, so the weights that changed name the samples that were used."""
    rows = np.eye(8, dtype=np.float32)
    federation = fedrax.Federation.from_arrays(rows, np.ones(8, np.float32), np.arange(8) // 4)
    task = fedrax.regression(Model(lambda key: jnp.zeros(8), lambda params, x, key=None: x @ params))
    moved = run(WithoutTheLast(local), federation, task=task, rounds=1, cohort_size=2).params != 0
    stored = federation.train.x.argmax(1)
    assert moved[stored].reshape(2, 4).tolist() == 2 * [[True, True, True, False]]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "debug"])
def test_all_samples_are_those_of_the_client_alone(plan: str):
    """The sum over clients of different sizes contains no sample of another client."""

    class Sums(NamedTuple):
        params: Any
        sums: Any

    @hyperparameters
    class Counting(FedAvg):
        def init(self, params: Any, n: int) -> Any:
            return Sums(params, jnp.zeros(()))

        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            batch, real = data.all_samples()
            rows = batch.x.reshape(len(real), -1).sum(1)
            return ClientOutput(upload=tree.zeros_like(message), total={"x": jnp.sum(jnp.where(real, rows, 0))})

        def server(self, server: Any, cohort: Cohort) -> Any:
            return server._replace(sums=cohort.total["x"]), {}

    cohort = [4, 1, 3]
    found = run(Counting(LOCAL), rounds=1, plan=plan, devices=1, script=fedrax.simulation.Script(cohorts=[cohort]))
    rows = [row for c in cohort for row in range(FEDERATION.offsets[c], FEDERATION.offsets[c + 1])]
    np.testing.assert_allclose(found.server.sums, np.asarray(FEDERATION.train[0])[rows].sum(), rtol=1e-5)
