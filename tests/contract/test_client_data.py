"""Data of a client's local training: its message, its samples and the index of a local step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD, tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import ClientOutput, Cohort
from fedrax.contract.client_data import TrainState
from fedrax.contract.task import Batch
from fedrax.models import Model, from_nnx
from fedrax.simulation.setup import prepare
from fedrax.xla import Options, equations_in, use_options
from tests.simulation.problems import FEDERATION, LOCAL, TASK, make_federation, run

PLANS = ["scan", "vmap", "loop", "debug"]


def test_message_modified_in_place_does_not_reach_other_clients():
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
def test_local_step_index_is_an_array_on_every_plan(plan: str):
    """It can index an array, and every local step has its own random key."""

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


def test_client_may_take_no_local_step():
    @hyperparameters
    class OptionalTraining(FedAvg):
        def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
            steps = jnp.where(data.assignment.client % 2 == 0, 0, 2)
            result = self.local.run(data.with_steps(steps), message, mean_gradient=True)
            return ClientOutput(upload=tree.sub(result.params, message), info=result.info)

    made = run(OptionalTraining(LocalSGD(lr=0.05, batch_size=2)), rounds=4)
    assert all(np.isfinite(event["train_loss"]) for event in made.events) and made.stopped != "diverged"


@hyperparameters
class WithoutTheLast(FedAvg):
    """FedAvg on all samples of a client except the last."""

    def client(self, message: Any, state: Any, data: Any) -> ClientOutput:
        result = self.local.run(data.with_samples(data.samples, data.size - 1), message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)


@pytest.mark.parametrize("local", [LocalSGD(batch_size=2, order="stored"), LocalSGD(blocks=2, steps=6)])
def test_with_samples_excludes_samples_beyond_the_size(local: LocalSGD):
    """Each sample changes one weight of the model, so that the changed weights identify the used samples."""
    rows = np.eye(8, dtype=np.float32)
    federation = fedrax.Federation.from_arrays(rows, np.ones(8, np.float32), np.arange(8) // 4)
    task = fedrax.regression(Model(lambda key: jnp.zeros(8), lambda params, x, key=None: x @ params))
    moved = run(WithoutTheLast(local), federation, task=task, rounds=1, cohort_size=2).params != 0
    stored = federation.train.x.argmax(1)
    assert moved[stored].reshape(2, 4).tolist() == 2 * [[True, True, True, False]]


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("plan", ["scan", "vmap", "debug"])
def test_all_samples_contain_no_sample_of_other_clients(plan: str):
    """Sums over clients of different sizes."""

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


EQUAL = make_federation((12, 12, 12, 12))
MICROBATCHES = {
    "even": LocalSGD(steps=3, batch_size=4, microbatches=2),
    "uneven": LocalSGD(epochs=1, batch_size=5, microbatches=3, momentum=0.5),
    "fewer than asked for": LocalSGD(epochs=1, batch_size=10, microbatches=7, reduction="sum"),
    "single samples": LocalSGD(steps=2, batch_size=3, microbatches=3, order="stored", weight_decay=0.1),
    "drawn": LocalSGD(steps=2, batch_size=6, microbatches=4, order="replacement"),
    "full": LocalSGD(steps=2, batch_size="full", microbatches=3),
    "blocks": LocalSGD(steps=3, blocks=2, microbatches=4),
}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("federation", [FEDERATION, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("name", MICROBATCHES)
def test_microbatches_do_not_change_the_steps(name: str, federation: fedrax.Federation):
    local = dataclasses.replace(MICROBATCHES[name], lr=0.05)
    whole = dataclasses.replace(local, microbatches=1)
    for plan in ("scan", "vmap") if name == "uneven" else ("scan",):
        parts, expected = (run(FedAvg(each), federation, rounds=2, plan=plan) for each in (local, whole))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts.params, expected.params)
        for actual, desired in zip(parts.events, expected.events, strict=True):
            assert actual["gradients"] == desired["gradients"]
            assert actual["train_loss"] == pytest.approx(desired["train_loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*MultiSteps restarts")
def test_microbatches_equal_multisteps_of_optax():
    """One step with microbatches, and one update of ``optax.MultiSteps`` after the same microbatches."""
    rule = fedrax.optim.Optax(optax.MultiSteps(optax.sgd(0.1), 3).gradient_transformation())
    steps = LocalSGD(steps=3, batch_size=2, order="stored", optimizer=rule)
    one = LocalSGD(lr=0.1, steps=1, batch_size=6, microbatches=3, order="stored")
    parts, expected = (run(FedAvg(local), EQUAL, rounds=1).params for local in (one, steps))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), parts, expected)


@pytest.mark.parametrize(
    "method",
    [
        fedrax.algorithms.FedSGD,
        fedrax.algorithms.MimeSVRG,
        fedrax.algorithms.QFedAvg,
        lambda local: fedrax.Scaffold(local, option="I"),
    ],
    ids=["FedSGD", "MimeSVRG", "QFedAvg", "Scaffold"],
)
def test_full_gradients_are_computed_in_microbatches(method: Any):
    """No matrix product of the program has the number of rows of a client."""
    local = LocalSGD(lr=0.05, steps=1, batch_size=4, microbatches=2)
    if method is fedrax.algorithms.FedSGD:
        local = LocalSGD(batch_size="full", microbatches=4)

    def rows(local: LocalSGD) -> set[int]:
        traced = prepare(method(local=local), TASK, EQUAL, fedrax.Settings(cohort_size=2)).traced.program
        products = [e for e in equations_in(traced) if e.primitive.name == "dot_general"]
        return {size for e in products for v in e.invars for size in v.aval.shape}

    assert 12 in rows(dataclasses.replace(local, microbatches=1)) and 12 not in rows(local)


def test_memory_is_that_of_the_activations_of_one_microbatch():
    """A sample has 40 kB of activations in each of several layers, some of which the backward pass reads."""

    def apply(scale: Any, x: Any, key: Any = None) -> Any:
        hidden = jnp.tanh(scale * jnp.outer(x.sum(1), jnp.linspace(0, 1, 10_000)))
        return jnp.tanh(scale * hidden)[:, :3]

    task = fedrax.classification(Model(lambda key: jnp.ones(()), apply))

    def peak(microbatches: int) -> int:
        local = LocalSGD(steps=1, batch_size=12, microbatches=microbatches)
        with use_options(Options(disabled=frozenset({"microbatch"}))):
            return prepare(FedAvg(local), task, EQUAL, fedrax.Settings(cohort_size=2)).traced.peak_bytes

    assert peak(12) < peak(1) / 6


class Normalized(nnx.Module):
    """A dense layer after batch norm."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.out(self.norm(x))


def test_batch_norm_is_applied_to_each_microbatch():
    """Statistics and gradients of a batch in two microbatches are those of two batches."""
    task = fedrax.classification(from_nnx(Normalized))
    x, y = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32), np.arange(6) % 3
    facts = {"round": 0, "num_clients": 1, "cohort_size": 1}
    variables = task.init(jax.random.key(0))

    def of(rows: slice, statistics: Any, size: int | None = None) -> Any:
        data = fedrax.ClientData.alone(task, x, y, jax.random.key(1), **facts)
        batch = Batch(jnp.asarray(x[rows]), jnp.asarray(y[rows]))
        data = data.with_carried(TrainState(statistics))
        return data.loss_and_gradient(variables.params, batch, None, jax.random.key(2), "mean", size)

    first = of(slice(0, 3), variables.statistics)
    second = of(slice(3, 6), first[2])
    expected = *jax.tree.map(lambda a, b: (a + b) / 2, first[:2], second[:2]), second[2]
    found = of(slice(0, 6), variables.statistics, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_invalid_microbatches_raise_a_clear_error():
    with pytest.raises(FedraxError, match=r"local.microbatches = 5 is more than the samples of a batch"):
        run(FedAvg(LocalSGD(batch_size=4, microbatches=5)))
    inner = FedAvg(LocalSGD(steps=2, batch_size=4, microbatches=2))
    with pytest.raises(FedraxError, match=r"in parts by itself: set its microbatch"):
        run(fedrax.privacy.SampleDP(inner=inner))
