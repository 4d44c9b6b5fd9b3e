"""Optimizers of optax on clients and on the server, against plain loops of optax calls."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, FedraxWarning, LocalSGD, Task, simulate, sweep
from fedrax.contract.task import Batch
from fedrax.optim import Optax
from fedrax.privacy import SampleDP
from fedrax.simulation import Script
from tests.simulation.problems import FEDERATION, TASK, assert_close, assert_identical, run
from tests.slow import slow_cases

ROUNDS, STEPS, ROWS, COHORTS = 3, 2, 3, [[1, 3], [3, 5], [1, 3]]
BATCHES = np.random.default_rng(2).integers(0, 5, (ROUNDS, 2, STEPS, ROWS))
OPTIONS: dict[str, Any] = {"script": Script(cohorts=COHORTS, batches=BATCHES), "rounds": ROUNDS, "devices": 1}


def adamw_fedavg(carry: bool, lr: float = 0.05) -> FedAvg:
    """FedAvg with AdamW on the clients."""
    rule = Optax.of(optax.adamw, weight_decay=0.01)
    return FedAvg(local=LocalSGD(lr=lr, steps=STEPS, batch_size=ROWS, optimizer=rule, carry=carry))


ADAMW = optax.adamw(0.05, weight_decay=0.01)


def optax_loop(carry: bool, rule: Any = ADAMW) -> Any:
    """Final parameters in float64."""
    rule, kept = optax.with_extra_args_support(rule), {}
    params = jax.tree.map(lambda a: np.zeros(a.shape), TASK.init(jax.random.key(0)))
    gradient = jax.jit(jax.value_and_grad(lambda p, x, y: TASK.loss(p, Batch(x, y), jax.random.key(0)).mean()))
    for r, cohort in enumerate(COHORTS):
        ends = []
        for k, client in enumerate(cohort):
            x, state = params, kept.get(client) if carry and client in kept else rule.init(params)
            for rows in BATCHES[r, k]:
                at = FEDERATION.offsets[client] + rows
                loss, direction = gradient(x, *(np.asarray(a)[at] for a in FEDERATION.train))
                updates, state = rule.update(direction, state, x, value=loss)
                x = optax.apply_updates(x, updates)
            kept[client] = state
            ends.append(x)
        params = jax.tree.map(lambda *e: sum(e) / len(e), *ends)
    return params


@pytest.mark.parametrize("carry", slow_cases([True, False]), ids=["carried", "reset"])
@pytest.mark.parametrize("plan", slow_cases(["vmap", "loop", "debug"]))
def test_local_adamw_agrees_with_a_plain_loop(plan: str, carry: bool):
    with jax.enable_x64(True):
        expected = optax_loop(carry)
    reference = run(adamw_fedavg(carry), **OPTIONS, dtype="float64")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), reference.params, expected)
    assert_close(run(adamw_fedavg(carry), **OPTIONS, dtype="float64", plan=plan), reference, 1e-12)


LOSS_DEPENDENT = {
    "polyak": lambda: optax.polyak_sgd(0.5),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1)),
}


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("name", LOSS_DEPENDENT)
@pytest.mark.parametrize("plan", ["vmap", "debug"])
def test_optimizers_that_depend_on_the_loss(plan: str, name: str):
    """Their state is carried, because a plateau takes more steps than a round has."""
    with jax.enable_x64(True):
        expected = optax_loop(True, LOSS_DEPENDENT[name]())
    work = LocalSGD(steps=STEPS, batch_size=ROWS, optimizer=Optax(LOSS_DEPENDENT[name]()), carry=True)
    found = run(FedAvg(local=work), **OPTIONS, dtype="float64", plan=plan).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13), found, expected)


def test_optimizers_that_need_the_loss_are_rejected_at_the_server():
    rule = Optax(optax.polyak_sgd())
    private = SampleDP(FedAvg(local=LocalSGD(steps=2, batch_size=2, optimizer=rule)), clip=1.0, noise=1.0)
    for method in (private, FedAvg(server_optimizer=rule)):
        with pytest.raises(FedraxError, match=r"needs more arguments than the gradient .* without a wrapper"):
            run(method)


def test_carried_optimizer_state_survives_an_interruption(tmp_path):
    options = {"cohort_size": 3, "eval_every": 2, "devices": 1}
    run(adamw_fedavg(True), **options, rounds=2, directory=tmp_path)
    assert_identical(
        run(adamw_fedavg(True), **options, directory=tmp_path, resume=True), run(adamw_fedavg(True), **options)
    )


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["scan", "loop", "vmap", "debug"])
def test_finished_and_traced_server_optimizers_agree_on_every_plan(plan: str):
    work, options = LocalSGD(lr=0.05, steps=2, batch_size=2), {"rounds": 2, "cohort_size": 2, "devices": 1}
    finished = FedAvg(local=work, server_optimizer=Optax(optax.adamw(1e-2)))
    traced = FedAvg(local=work, server_optimizer=Optax.of(optax.adamw, learning_rate=1e-2))
    reference = run(finished, **options)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(reference.params)) > 5e-3
    for method in (finished, traced):
        assert_close(run(method, **options, plan=plan), reference)


def test_grid_of_learning_rates_is_one_program():
    work = LocalSGD(lr=0.05, steps=2, batch_size=2)
    rules = [Optax.of(optax.adamw, learning_rate=lr) for lr in (0.01, 0.03, 0.1)]
    methods = [FedAvg(local=work, server_optimizer=rule) for rule in rules]
    options: Any = {"rounds": 2, "cohort_size": 2, "eval_every": 2}
    results = sweep(methods, TASK, FEDERATION, **options, mode="vectorized")
    assert results[0][0].plan.startswith("vectorized: 3 x 1")
    for method, (result,) in zip(methods, results, strict=True):
        alone = run(method, **options, devices=1)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), result.params, alone.params)


def test_options_other_than_floats_are_static():
    """Booleans, integers, schedules and functions, by the names of optax."""
    schedule, mask = optax.linear_schedule(0.1, 0.01, 4), lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
    for made, options in [
        (optax.sgd, {"learning_rate": 0.5, "momentum": 0.9, "nesterov": True}),
        (optax.adamw, {"learning_rate": schedule, "mask": mask, "weight_decay": 0.1}),
        (optax.sgd, {"learning_rate": 1}),
    ]:
        by_name, finished = Optax.of(made, **options), Optax(made(**options))
        found, expected = (run(FedAvg(local=LocalSGD(steps=2), server_optimizer=rule)) for rule in (by_name, finished))
        assert_close(found, expected)


def test_unhashable_option_is_named():
    with pytest.raises(FedraxError, match="the option 'mask' must be hashable"):
        Optax.of(optax.adamw, learning_rate=np.float32(0.1), mask={"weight": True})


@pytest.mark.parametrize("carry", [False, True], ids=["reset", "carried"])
def test_optimizer_noise_is_independent_between_clients_and_rounds(carry: bool):
    """The mean over eight clients is smaller by sqrt(8), the sum over two rounds larger by sqrt(2)."""
    federation = Federation.from_arrays(np.zeros((16, 1)), np.zeros(16), np.arange(16) % 8)
    flat = Task(lambda key: {"w": np.zeros(4000, np.float32)}, lambda p, batch, key: 0 * p["w"].sum() * batch.y)
    rule = Optax(optax.chain(optax.add_noise(1.0, 0.0, key=0), optax.sgd(1.0)))
    method = FedAvg(local=LocalSGD(steps=1, optimizer=rule, carry=carry))
    for cohort, rounds in ((1, 1), (8, 1), (8, 2)):
        made = simulate(method, flat, federation, rounds=rounds, cohort_size=cohort, progress=False).params["w"]
        assert np.std(made) == pytest.approx((rounds / cohort) ** 0.5, rel=0.05)


def test_random_server_optimizer_resumes(tmp_path):
    noisy = Optax(optax.chain(optax.add_noise(0.1, 0.5, key=3), optax.sgd(1.0)))
    method, options = (
        FedAvg(local=LocalSGD(lr=0.05, steps=2), server_optimizer=noisy),
        {"cohort_size": 3, "eval_every": 2},
    )
    run(method, **options, rounds=2, directory=tmp_path)
    assert_identical(
        run(method, **options, rounds=4, directory=tmp_path, resume=True), run(method, **options, rounds=4)
    )


@pytest.mark.filterwarnings("ignore")
def test_optimizer_for_other_tree_structures_raises_a_clear_error():
    ahead = Optax(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    for method in (FedAvg(local=LocalSGD(optimizer=ahead)), FedAvg(server_optimizer=ahead)):
        with pytest.raises(
            FedraxError, match=r"the optimizer \(lookahead\) cannot update the model's parameters .* 'fast'"
        ):
            run(method)


def test_optimizer_with_injected_hyperparameters_is_rejected():
    rule = Optax.of(optax.inject_hyperparams(optax.adamw))
    with pytest.raises(FedraxError, match="keeps its learning rate in its state"):
        run(FedAvg(LocalSGD(lr=0.001, steps=1, optimizer=rule)))


def test_optimizer_that_needs_the_loss_function_is_rejected():
    with pytest.raises(FedraxError, match="needs more arguments than the gradient"):
        run(FedAvg(LocalSGD(steps=1, optimizer=Optax(optax.lbfgs()))))


def multisteps_fedavg(carry: bool) -> FedAvg:
    """One local step per round; the optimizer steps after every second gradient."""
    rule = optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()
    return FedAvg(local=LocalSGD(steps=1, batch_size=3, optimizer=Optax(rule), carry=carry))


def test_accumulated_gradients_lost_between_rounds_are_warned_of():
    everyone = {"rounds": 2, "cohort_size": len(FEDERATION.sizes)}
    start = TASK.init(jax.random.key(0))
    with pytest.warns(FedraxWarning, match=r"MultiSteps restarts in each round, .* or set local.carry to true"):
        lost = run(multisteps_fedavg(carry=False), params=start, **everyone).params
    jax.tree.map(np.testing.assert_array_equal, lost, start)
    kept = run(multisteps_fedavg(carry=True), params=start, **everyone).params
    assert any(np.abs(a - b).max() > 0 for a, b in zip(*map(jax.tree.leaves, (kept, start)), strict=True))


@pytest.mark.parametrize(
    "rule",
    [
        optax.sgd(optax.linear_schedule(0.1, 0.0, 10)),
        optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))),
        optax.masked(optax.sgd(optax.linear_schedule(0.1, 0.0, 10)), mask=True),
    ],
    ids=["sgd", "in a chain", "masked"],
)
def test_schedule_that_restarts_in_each_round_is_warned_of(rule: Any):
    method = FedAvg(local=LocalSGD(steps=2, batch_size=3, optimizer=Optax(rule)))
    with pytest.warns(FedraxWarning, match="schedule of the local optimizer restarts in each round"):
        run(method, rounds=1)


@pytest.mark.parametrize(
    "rule", [optax.adamw(0.1), optax.sgd(0.1, momentum=0.9), optax.yogi(0.1)], ids=["adamw", "momentum", "yogi"]
)
def test_optimizers_without_lasting_state_are_not_warned_of(rule: Any, recwarn: pytest.WarningsRecorder):
    run(FedAvg(local=LocalSGD(steps=2, batch_size=3, optimizer=Optax(rule))), rounds=1)
    assert not [w for w in recwarn if "restarts in each" in str(w.message)]
