"""Settings, traits and client data mean the same on every executor."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

import fedrax
from fedrax import FedAvg, LocalSGD, Scaffold, Upcycled, classification, sweep
from fedrax.contract import Traits, Variables
from fedrax.contract.client_data import ClientData, TrainState
from fedrax.contract.task import Batch
from fedrax.models import from_linen
from fedrax.simulation import Script
from fedrax.simulation.setup import prepare
from tests.simulation.problems import FEDERATION, LOCAL, SIZES, TASK, assert_close, assert_identical, run

# -- sweeps --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_vectorized_runs_honor_all_settings():
    """Training data, metrics per client, and fine-tuned models are evaluated in both modes."""
    methods = [Scaffold(local=LocalSGD(lr=lr, steps=2, batch_size=2)) for lr in (0.05, 0.1)]
    options: Any = {"rounds": 2, "cohort_size": 3, "eval_every": 2}
    options |= {"eval_train": True, "per_client": True, "finetune": 1, "stragglers": 0.4, "weights": "uniform"}
    together, in_turn = (
        sweep(methods, TASK, FEDERATION, **options, mode=mode) for mode in ("vectorized", "sequential")
    )
    for (one,), (other,) in zip(together, in_turn, strict=True):
        actual, desired = one.events[-1], other.events[-1]
        assert actual.keys() == desired.keys()
        for name in actual.keys() - {"seconds"}:
            np.testing.assert_allclose(actual[name], desired[name], rtol=1e-4, err_msg=name)
    assert any("train_finetuned" in name for name in together[0][0].events[-1])
    assert any(name.startswith("train_loss") for name in together[0][0].events[-1])


# -- requirements --------------------------------------------------------------------------------------------------


def test_unused_samples_with_stored_order_are_warned_of():
    """Every round begins with the first sample again."""
    twelve = np.full(3, 12)
    stored = partial(fedrax.LocalSGD, batch_size=4, order="stored")
    with pytest.warns(fedrax.FedraxWarning, match="local.steps = 2 use 8 samples, and the others of the 12"):
        stored(steps=2).check_sizes(twelve)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for local in (stored(steps=3), stored(epochs=1), stored(), fedrax.LocalSGD(steps=1, batch_size=4)):
            local.check_sizes(twelve)


def test_union_of_traits():
    none, every = Traits(), Traits(True, True, 3, True, True, True, True)
    assert none | every == every | none == every
    for name in ("uniform_weights", "fixed_cohort", "features", "blocks", "per_sample_losses", "no_statistics"):
        one = Traits(**{name: True})
        assert one | none == none | one == one | one == one
        assert getattr(Traits(largest_cohort=2) | one, name)
    assert (Traits(largest_cohort=5) | Traits(largest_cohort=2)).largest_cohort == 2
    assert (Traits(largest_cohort=5) | none).largest_cohort == 5


def test_wrappers_inherit_the_traits_of_the_inner_method():
    with pytest.raises(fedrax.FedraxError, match="uniform aggregation weights only"):
        run(Upcycled(fedrax.compression.Quantized(Scaffold(local=LOCAL))), weights="samples", rounds=1)


# -- devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda method: method, Upcycled, lambda m: Upcycled(fedrax.compression.TopK(m))])
def test_work_of_wrapped_methods_is_balanced_by_their_local_steps(wrap: Any):
    """A fixed number of steps costs the same for all clients, epochs in proportion to the samples."""
    settings = fedrax.Settings(rounds=1, cohort_size=6, devices=2)
    for local, by_samples in ((LOCAL, False), (LocalSGD(epochs=1), True)):
        planner = prepare(wrap(FedAvg(local=local)), TASK, FEDERATION, settings).planner
        counts = planner.block(0, 1, 1).count[0]
        assert planner.by_samples is by_samples
        assert by_samples or abs(int(counts[0]) - int(counts[1])) == 0


# -- ClientData.alone ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffle", "stored", "replacement"])
def test_client_data_alone_equals_the_client_of_a_simulation(order: Any):
    client, seed, rounds = 3, 4, 2
    method = FedAvg(local=LocalSGD(lr=0.05, epochs=2, batch_size=5, order=order))
    result = run(method, script=Script(cohorts=[[client]] * rounds), rounds=rounds, seed=seed, trajectory=True)
    params = prepare(method, TASK, FEDERATION, fedrax.Settings(seed=seed, cohort_size=1)).params
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # noqa: E731
    rows = slice(FEDERATION.offsets[client], FEDERATION.offsets[client + 1])
    x, y = (a[rows] for a in FEDERATION.train)
    with jax.default_matmul_precision("highest"):
        for r in range(rounds):
            round_key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), r)
            key = jax.random.fold_in(round_key, client)
            data = ClientData.alone(TASK, x, y, key, round=r, num_clients=len(SIZES), cohort_size=1)
            loss, gradient = data.full_gradient(params)
            expected = jax.value_and_grad(lambda p: TASK.loss(p, Batch(x, y), jax.random.key(0)).mean())(params)
            jax.tree.map(near, (loss, gradient), expected)
            output = method.client(params, (), data)
            params = fedrax.tree.add(params, method.receive(output.upload))
            jax.tree.map(near, params, result.trajectory[r])
            assert float(output.info["gradients"]) == 2 * SIZES[client] if order != "replacement" else True


# -- running statistics --------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Batch norm between two layers."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        """Logits."""
        x = nn.BatchNorm(momentum=0.8, use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(3)(jax.nn.softplus(x))


NORM_TASK = classification(from_linen(Network(), FEDERATION.train[0][:1]))
WHOLE_BATCHES = FedAvg(local=LocalSGD(lr=0.05, epochs=1, batch_size=4))
OPTIONS: Any = {"task": NORM_TASK, "cohort_size": 3, "rounds": 2, "eval_every": 2, "devices": 1}


@pytest.fixture(scope="module")
def norm_result() -> fedrax.Result:
    """The run with plan scan on one device, to which others are compared."""
    return run(WHOLE_BATCHES, **OPTIONS)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["vmap", "loop", "debug"])
def test_statistics_agree_on_every_plan(norm_result: fedrax.Result, plan: str):
    other = run(WHOLE_BATCHES, **OPTIONS, plan=plan)
    assert_close(other, norm_result, 1e-4)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, other.statistics, norm_result.statistics)
    np.testing.assert_allclose(other.events[-1]["test_loss"], norm_result.events[-1]["test_loss"], rtol=1e-4)


def test_statistics_in_resumed_runs_and_sweeps(norm_result: fedrax.Result, tmp_path: Any):
    run(WHOLE_BATCHES, **OPTIONS | {"rounds": 1}, directory=tmp_path)
    resumed = run(WHOLE_BATCHES, **OPTIONS, directory=tmp_path, resume=True)
    jax.tree.map(np.testing.assert_array_equal, resumed.statistics, norm_result.statistics)
    jax.tree.map(np.testing.assert_array_equal, resumed.params, norm_result.params)
    options = {name: value for name, value in OPTIONS.items() if name != "task"}
    ((together,),) = sweep([WHOLE_BATCHES], NORM_TASK, FEDERATION, **options, mode="vectorized")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), together.statistics, norm_result.statistics)
    np.testing.assert_allclose(together.events[-1]["test_loss"], norm_result.events[-1]["test_loss"], rtol=1e-4)
    assert_identical(run(WHOLE_BATCHES, **OPTIONS), norm_result)


@pytest.mark.slow
def test_statistics_of_one_client_are_those_of_its_batches():
    """As by the module's own calls, and by ClientData.alone with TrainState."""
    start = NORM_TASK.init(jax.random.key(2))
    batches = np.array([[0, 2, 4], [1, 3, 5]])
    script = Script(cohorts=[[3]], batches=batches[None, None])
    local = LocalSGD(lr=0.1, steps=2, batch_size=3)
    result = run(FedAvg(local=local), task=NORM_TASK, script=script, rounds=1, params=start, devices=1)
    x, y = (np.asarray(a)[FEDERATION.offsets[3] : FEDERATION.offsets[4]] for a in FEDERATION.train)
    params, statistics = start
    for rows in batches:

        def loss(params: Any, rows: Any = rows, statistics: Any = statistics) -> Any:
            found = NORM_TASK.loss_and_statistics(
                Variables(params, statistics), Batch(x[rows], y[rows]), jax.random.key(0)
            )
            return found[0].mean(), found[1]

        gradient, statistics = jax.grad(loss, has_aux=True)(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(near, result.params, params)
    jax.tree.map(near, result.statistics, statistics)
    alone = ClientData.alone(NORM_TASK, x, y, jax.random.key(0), round=0, num_clients=8, cohort_size=1)
    alone = alone.with_carried(TrainState(start.statistics))
    alone.assignment = alone.assignment._replace(batches=jax.numpy.asarray(batches))
    jax.tree.map(near, local.run(alone, start.params).params, params)
    jax.tree.map(near, alone.carried.statistics, statistics)
    jax.tree.map(near, alone.carried.params, params)
