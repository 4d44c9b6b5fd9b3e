"""User-defined methods in every order of wrappers and on every executor."""

from __future__ import annotations

import dataclasses
from functools import cache, partial, reduce
from itertools import pairwise, permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, LocalSGD, LoSAC, Scaffold, Upcycled, tree
from fedrax.compression import Quantized
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Batch
from fedrax.simulation import Result, Script
from tests.simulation.problems import LOCAL, TASK, assert_close, make_federation, run
from tests.slow import slow_cases
from tests.wrappers.own_methods import (
    CountsRounds,
    NoisyServer,
    NoisyUploads,
    PerSample,
    Ridge,
    SecureAggregation,
    SignDirections,
)

PLANS = ["vmap", "loop", "debug"]
FEDERATION = make_federation(test_rows=0)
FEDAVG = FedAvg(local=LOCAL)
WITHOUT_EFFECT = {"clip": 1e30, "sigma": 0.0}


def short(method: Algorithm, **options: Any) -> Result:
    """Two rounds of two clients on one device."""
    defaults = {"rounds": 2, "cohort_size": 2, "devices": 1, "plan": "scan"}
    return run(method, FEDERATION, **(defaults | options))


@cache
def compiled(method: Algorithm) -> Result:
    """The run with plan scan, to which other plans are compared."""
    return short(method)


def flat_parameters(result: Result) -> np.ndarray:
    """Parameters as one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)])


# -- noise ---------------------------------------------------------------------------------------------------------

NOISY = partial(NoisyUploads, clip=0.05, sigma=0.01)
ORDERS = list(permutations([NOISY, Upcycled, Quantized]))


def name_of(order: tuple) -> str:
    """Names of the wrappers from outermost to innermost."""
    return "-".join("NoisyUploads" if wrap is NOISY else wrap.__name__ for wrap in order)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("order", [pytest.param(order) for order in ORDERS], ids=name_of)
def test_orders_of_wrappers_agree_on_plans(order: tuple):
    """Each order runs on plan scan and another one; every plan has some order."""
    method = reduce(lambda inner, wrap: wrap(inner), reversed(order), FEDAVG)
    plan = PLANS[ORDERS.index(order) % len(PLANS)]
    assert_close(short(method, plan=plan, rounds=1), short(method, rounds=1))


def test_order_of_noise_and_quantization_determines_the_bytes():
    """Noise inside is quantized with the update; noise cannot be added to quantized levels."""
    inside, plain = (compiled(m).events[-1]["bytes_up"] for m in (Quantized(NOISY(FEDAVG)), Quantized(FEDAVG)))
    assert inside == plain


METHODS = {"FedAvg": FEDAVG, "Scaffold": Scaffold(local=LOCAL)}
WRAPS = {"NoisyUploads": partial(NoisyUploads, **WITHOUT_EFFECT), "CountsRounds": CountsRounds}
WRAPPED_METHODS = [
    ("NoisyUploads", "Scaffold"),
    ("CountsRounds", "FedAvg"),
    ("NoisyUploads", "FedAvg"),
    ("CountsRounds", "Scaffold"),
]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("wrap", "method"), slow_cases(WRAPPED_METHODS, 2))
def test_wrappers_without_effect_are_bitwise_identities(wrap: str, method: str):
    inside = METHODS[method]
    one, other = (short(m, trajectory=True, rounds=3) for m in (inside, WRAPS[wrap](inside)))
    for actual, desired in zip(one.trajectory, other.trajectory, strict=True):
        jax.tree.map(np.testing.assert_array_equal, actual, desired)


def test_nested_wrappers_draw_independent_noise():
    still, options = partial(NoisyUploads, clip=1e30), {"script": Script(cohorts=[[2]]), "rounds": 1}
    base = flat_parameters(short(FEDAVG, **options))
    outer = flat_parameters(short(still(FEDAVG, sigma=1.0), **options)) - base
    both = flat_parameters(short(still(still(FEDAVG, sigma=1.0), sigma=1.0), **options)) - base
    inner = flat_parameters(short(still(still(FEDAVG, sigma=1.0), sigma=0.0), **options)) - base
    np.testing.assert_allclose(both, outer + inner, atol=1e-5)
    assert np.abs(outer - inner).min() > 1e-3 and abs(np.corrcoef(outer, inner)[0, 1]) < 0.6


def test_noise_has_its_norm_and_updates_are_clipped():
    script = Script(cohorts=[[2]] * 60)
    clipped = short(NoisyUploads(FEDAVG, clip=1e-3, sigma=0.0), script=script, rounds=3, trajectory=True).trajectory
    steps = [float(tree.norm(tree.sub(b, a))) for a, b in pairwise(clipped)]
    np.testing.assert_allclose(steps, 1e-3, rtol=1e-4)
    noisy = short(NoisyUploads(FEDAVG, clip=1e-6, sigma=0.5), script=script, rounds=60, trajectory=True).trajectory
    drawn = np.concatenate([np.ravel(leaf) for a, b in pairwise(noisy) for leaf in jax.tree.leaves(tree.sub(b, a))])
    assert abs(drawn.std() / 0.5 - 1) < 0.1 and abs(drawn.mean()) < 4 * 0.5 / np.sqrt(len(drawn))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", PLANS)
def test_server_noise_is_the_same_on_every_plan(plan: str):
    method = NoisyServer(local=LOCAL)
    assert_close(short(method, plan=plan), compiled(method))
    assert np.abs(flat_parameters(compiled(method)) - flat_parameters(compiled(FEDAVG))).max() > 0.01


# -- masks ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("plan", ["scan", "vmap"])
def test_masks_cancel_exactly_with_full_participation(plan: str):
    everyone = {"cohort_size": FEDERATION.num_clients, "rounds": 1, "plan": plan}
    masked, open_ = (short(SecureAggregation(local=LOCAL, masks=masks), **everyone) for masks in (True, False))
    jax.tree.map(np.testing.assert_array_equal, masked.params, open_.params)
    np.testing.assert_allclose(flat_parameters(masked), flat_parameters(short(FEDAVG, **everyone)), atol=1e-5)


def test_sum_without_one_client_is_masked():
    missing = {"script": Script(cohorts=[[0, 1, 2, 3, 4, 5, 6]]), "rounds": 1}
    assert np.abs(flat_parameters(short(SecureAggregation(local=LOCAL), **missing))).max() > 1.0


# -- losses, gradients, directions ---------------------------------------------------------------------------------


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("local", [LOCAL, LocalSGD(lr=0.05, steps=2, blocks=2), LocalSGD(lr=0.05, batch_size="full")])
def test_loss_and_gradient_hooks_apply_to_all_kinds_of_steps(local: LocalSGD):
    """An L2 term equals weight decay; the sum of per-sample gradients with a large bound is the gradient."""
    if local.blocks is None:  # blocks of different sizes weigh their samples equally, but weight decay is per block
        decayed = short(FedAvg(local=dataclasses.replace(local, weight_decay=0.3)))
        np.testing.assert_allclose(
            flat_parameters(short(Ridge(FedAvg(local=local), 0.3))), flat_parameters(decayed), rtol=1e-4, atol=1e-6
        )
    single = short(PerSample(FedAvg(local=local), clip=1e30))
    np.testing.assert_allclose(
        flat_parameters(single), flat_parameters(short(FedAvg(local=local))), rtol=1e-4, atol=1e-6
    )


def test_clipped_per_sample_gradients_agree_with_numpy():
    batches, clip = np.array([0, 2, 3]).reshape(1, 1, 1, 3), 0.4
    local = LocalSGD(lr=0.5, steps=1, batch_size=3)
    result = short(PerSample(FedAvg(local=local), clip=clip), script=Script(cohorts=[[1]], batches=batches), rounds=1)
    x, y = (np.asarray(a)[FEDERATION.offsets[1] + batches.ravel()] for a in FEDERATION.train)
    start, total = TASK.init(jax.random.key(0)), 0.0
    for i in range(3):
        one = Batch(x[i : i + 1], y[i : i + 1])
        gradient = jax.grad(lambda p, one=one: TASK.loss(p, one, jax.random.key(0))[0])(start)
        flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradient)])
        total = total + flat * min(1, clip / np.linalg.norm(flat))
    np.testing.assert_allclose(flat_parameters(result), -0.5 * total / 3, rtol=1e-5)  # it starts at zero


def test_direction_hooks():
    steps = flat_parameters(short(SignDirections(FEDAVG), script=Script(cohorts=[[1]]), rounds=1)) / LOCAL.lr
    np.testing.assert_allclose(steps, np.round(steps), atol=1e-4)
    assert np.abs(np.round(steps)).max() == LOCAL.steps


@pytest.mark.slow
@pytest.mark.parametrize("plan", slow_cases(["vmap", "loop"]))
def test_all_hooks_together(plan: str):
    method = Ridge(PerSample(SignDirections(CountsRounds(Scaffold(local=LOCAL))), clip=0.5, sigma=0.1))
    assert_close(short(method, plan=plan, rounds=1), short(method, rounds=1))


# -- states of wrappers --------------------------------------------------------------------------------------------


INNER = {"Scaffold": METHODS["Scaffold"], "LoSAC": LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))}
EXTRAPOLATED = [("Scaffold", "both"), ("LoSAC", "none"), ("Scaffold", "none"), ("LoSAC", "both")]


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(("method", "extrapolate"), EXTRAPOLATED)
def test_upcycled_around_and_inside_wrappers_with_states(method: str, extrapolate: Any):
    inner = INNER[method]
    upcycled = partial(Upcycled, a=0.3, extrapolate=extrapolate)
    plain = short(upcycled(inner))
    around, inside = (
        short(upcycled(CountsRounds(CountsRounds(inner)))),
        short(CountsRounds(upcycled(CountsRounds(inner)))),
    )
    for other in (around, inside):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), other.params, plain.params)
    assert around.server.own == 2 and around.server.inner.own == 2
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), around.server.inner.inner, plain.server)
    for client in range(FEDERATION.num_clients):
        state = inside.client_state(client)
        assert int(state.own) == int(state.inner.own) <= 2
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), state.inner.inner, plain.client_state(client))
    assert jnp.sum(jnp.stack([inside.client_state(c).own for c in range(8)])) == 4
