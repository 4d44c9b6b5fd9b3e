"""Properties of q-FedAvg, Scaffnew, signSGD, FedLion and Ditto."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, simulate
from fedrax.algorithms import FedLion, FedSGD, QFedAvg, Scaffnew, SignSGD
from fedrax.algorithms.scaffnew import geometric
from fedrax.algorithms.signsgd import majority
from fedrax.compression.packing import TernarySigns
from fedrax.config.hyperparameters import check
from fedrax.contract import Batch
from fedrax.personalization import Ditto
from fedrax.privacy import ClientDP
from fedrax.privacy.mechanisms.clipping import Flat
from fedrax.robust import Robust
from fedrax.robust.rules import NormBound
from fedrax.simulation import Script
from tests import reference
from tests.algorithms.problems import make_problem

PROBLEM = make_problem("quadratic")
LOCAL = LocalSGD(lr=0.05, steps=3, batch_size="full")


def run(method: Any, **settings: Any) -> Any:
    """Run with full participation."""
    defaults = {"rounds": 60, "cohort_size": 7, "devices": 1, "eval_every": 1000}
    return simulate(method, PROBLEM.task, PROBLEM.federation, **(defaults | settings))


def test_qfedavg_lowers_the_worst_loss_and_the_spread_of_losses():
    spread, worst = [], []
    for q in (0.0, 2.0):
        params = run(QFedAvg(LOCAL, q=q)).params
        bounds = PROBLEM.federation.offsets
        x, y = PROBLEM.federation.train
        losses = PROBLEM.task.loss(params, Batch(x, y), jax.random.key(0))
        means = [float(np.mean(losses[i:j])) for i, j in itertools.pairwise(bounds)]
        spread.append(np.std(means))
        worst.append(max(means))
    assert spread[1] < 0.9 * spread[0]
    assert worst[1] < 0.95 * worst[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_scaffnew_numbers_of_steps_are_geometric(p: float):
    """Mean and first probabilities are within five standard errors of 20,000 draws."""
    draws = np.asarray(jax.jit(jax.vmap(lambda k: geometric(k, p)))(jax.random.split(jax.random.key(0), 20_000)))
    assert draws.min() == 1
    assert abs(draws.mean() - 1 / p) <= 5 * np.sqrt((1 - p) / p**2 / len(draws))
    for k in (1, 2, 3):
        chance = p * (1 - p) ** (k - 1)
        assert abs((draws == k).mean() - chance) <= 5 * np.sqrt(chance * (1 - chance) / len(draws))


def test_scaffnew_clients_of_a_cohort_take_the_same_number_of_steps():
    """``local_steps`` is a mean over the cohort, thus a whole number if all clients take the same number."""
    method = Scaffnew(LocalSGD(lr=0.01, batch_size=2), p=0.15)
    steps = [event["local_steps"] for event in run(method, rounds=8, cohort_size=3).events]
    assert all(abs(s - round(s)) < 1e-5 for s in steps)
    assert len({round(s) for s in steps}) > 3
    other = [event["local_steps"] for event in run(method, rounds=8, cohort_size=3, seed=1).events]
    assert steps != other


def test_scaffnew_h_sums_to_zero_for_any_cohort():
    result = run(Scaffnew(LocalSGD(lr=0.05, batch_size=2), p=0.4), rounds=6, cohort_size=3, dtype="float64")
    controls = np.array([result.client_state(i).control["w"] for i in range(7)])
    assert np.abs(controls).max() > 1e-2
    np.testing.assert_allclose(controls.sum(0), 0, atol=1e-13)


def test_signsgd_tied_votes_do_not_move_parameters():
    """Two clients have opposite gradients; a third one decides. A coordinate moves by eta or not at all."""
    x = np.array([[1.0, 1.0, 1.0, 1.0], [1.0, -1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    y = np.array([1.0, -1.0, 1.0])
    federation = Federation.from_arrays(x, y, offsets=np.arange(4), shuffle=False)
    settings: dict[str, Any] = {"rounds": 1, "devices": 1}
    method = SignSGD(LocalSGD(lr=0.25, batch_size="full"))
    two = simulate(method, PROBLEM.task, federation, script=Script(cohorts=[[0, 1]]), **settings)
    np.testing.assert_array_equal(two.params["w"], [0, 0.25, 0, 0.25])
    three = simulate(method, PROBLEM.task, federation, script=Script(cohorts=[[0, 1, 2]]), **settings)
    np.testing.assert_array_equal(three.params["w"], [0.25] * 4)


@pytest.mark.parametrize("voters", [2, 6, 50, 1000, 30_000])
@pytest.mark.parametrize("length", [1.0, 0.003])
def test_signsgd_majority_for_vectors_of_any_length(voters: int, length: float):
    """Means are summed in either order: a tie is zero, and a majority of one vote decides."""
    rng, half = np.random.default_rng(voters), voters // 2
    positive = np.concatenate([[half] * 5, [half + 1, half - 1, 0, voters], rng.integers(0, voters + 1, 50)])
    votes = np.where(rng.permuted(np.arange(voters) < positive[:, None], axis=1), length, -length)
    share = np.float32(1 / voters)
    sums = np.cumsum(votes.astype(np.float32) * share, axis=1, dtype=np.float32)[:, -1]
    found = majority({"w": jax.numpy.asarray(sums)}, jax.numpy.asarray(voters))["w"]
    np.testing.assert_array_equal(found, np.sign(2 * positive - voters))


def test_compressed_signs_have_the_same_majority():
    plain = SignSGD(LocalSGD(lr=0.25, batch_size="full"))
    for method in (ClientDP(plain, clip=Flat(0.1), noise=0.0), Robust(plain, rule=NormBound(0.1))):
        one, other = (run(m, rounds=3, cohort_size=5) for m in (plain, method))
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(("steps", "bytes_of_steps"), [(1, 2), (7, 2), (8, 4), (127, 4), (128, 8)])
def test_fedlion_uploads_sums_of_signs_in_the_smallest_integer_type(steps: int, bytes_of_steps: int):
    """Four parameters: the upload also contains a float momentum, the broadcast message x and m."""
    method = FedLion(LocalSGD(lr=1e-3, steps=steps, batch_size="full"))
    event = run(method, rounds=1, cohort_size=1).events[-1]
    assert (event["bytes_up"], event["bytes_down"]) == (bytes_of_steps + 16, 32)


def test_fedlion_step_moves_every_parameter_by_eta():
    """Without momentum the step is the sign of the gradient; a parameter with zero gradient does not move."""
    x, y = np.array([[1.0, -2.0, 0.0, 3.0]]), np.array([1.0])
    federation = Federation.from_arrays(x, y, offsets=np.arange(2), shuffle=False)
    method = FedLion(LocalSGD(lr=0.25, steps=1, batch_size="full"), beta1=0.0, beta2=0.0)
    result = simulate(method, PROBLEM.task, federation, rounds=1, cohort_size=1, devices=1)
    np.testing.assert_array_equal(result.params["w"], [0.25, -0.25, 0, 0.25])
    np.testing.assert_array_equal(result.server.momentum["w"], [-1, 2, 0, -3])


@pytest.mark.parametrize("abstain", [False, True])
def test_signsgd_votes_of_four_parameters_take_one_byte(abstain: bool):
    event = run(SignSGD(LocalSGD(lr=0.1), abstain=abstain), rounds=1).events[-1]
    assert (event["bytes_up"], event["bytes_down"]) == (7, 7 * 16)  # seven clients


@pytest.mark.parametrize("shape", [(1,), (5,), (2, 3), (7, 11)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ternary_signs_are_packed_without_loss(shape: tuple[int, ...], dtype: str):
    drawn = np.random.default_rng(0).integers(-1, 2, shape)
    values = {"a": jax.numpy.asarray(3.5 * drawn, dtype), "b": jax.numpy.asarray([-0.0, 1e-30], "float32")}
    packed = TernarySigns.of(values)
    assert packed.packed.size == -(-(drawn.size + 2) // 5) and packed.packed.dtype == np.uint8
    unpacked = packed.values()
    assert unpacked["a"].dtype == dtype
    np.testing.assert_array_equal(unpacked["a"].astype(int), drawn)
    np.testing.assert_array_equal(unpacked["b"], [0, 1])


def test_signsgd_clients_without_a_gradient_abstain():
    """A word that one of five clients has is learned; a parameter that no client uses does not move."""
    x = np.array([[1.0, 0.0, 0.0, 0.0]] * 4 + [[1.0, 1.0, 0.0, 0.0]])
    federation = Federation.from_arrays(x, np.full(5, -1.0), offsets=np.arange(6), shuffle=False)
    settings: dict[str, Any] = {"rounds": 1, "cohort_size": 5, "devices": 1}
    local = LocalSGD(lr=0.25, batch_size="full")
    printed, ours = (simulate(SignSGD(local, abstain=a), PROBLEM.task, federation, **settings) for a in (False, True))
    np.testing.assert_array_equal(ours.params["w"], [-0.25, -0.25, 0, 0])
    np.testing.assert_array_equal(printed.params["w"], [-0.25] * 4)  # clients without a gradient vote as well


@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
def test_signsgd_abstentions_are_the_same_on_every_plan(plan: str):
    x = np.eye(4)[[0, 1, 2, 0, 1]]
    federation = Federation.from_arrays(x, np.array([1.0, -1.0, 1.0, 1.0, 1.0]), offsets=np.arange(6), shuffle=False)
    method = SignSGD(LocalSGD(lr=0.5, batch_size="full"))
    result = simulate(method, PROBLEM.task, federation, rounds=1, cohort_size=5, devices=1, plan=plan)
    np.testing.assert_array_equal(result.params["w"], [0.5, 0, 0.5, 0])  # the second one is a tie


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Scaffnew(LocalSGD(steps=3)), "Scaffnew draws the number of local steps"),
        (Scaffnew(LocalSGD(clip=0.1)), "unset local.clip"),
        (Scaffnew(p=0.0), "Scaffnew.p must be greater than 0"),
        (FedLion(LocalSGD(momentum=0.9)), "which are counted: set beta1 and beta2"),
        (FedLion(LocalSGD(weight_decay=0.1)), "which are counted: unset local.weight_decay"),
        (SignSGD(LocalSGD(momentum=0.9)), "SignSGD takes one step a round, the server's: set beta"),
        (SignSGD(LocalSGD(clip=0.9)), "the server's: unset local.clip"),
        (Ditto(FedAvg(LOCAL), lam=-1.0), "Ditto.lam must be at least 0"),
        (QFedAvg(LOCAL, q=-0.5), "QFedAvg.q must be at least 0"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_invalid_values_raise_a_clear_error(method: Any, message: str):
    with pytest.raises(FedraxError, match=message):
        check(method)


def test_ditto_personal_steps_are_independent_of_the_global_method_at_lambda_zero():
    """With lambda = 0, v_i is plain gradient descent."""
    own = LocalSGD(lr=0.05, steps=2, batch_size="full")
    result = run(Ditto(FedSGD(), lam=0.0, own_steps=own), rounds=2, cohort_size=7, dtype="float64")
    client, w = PROBLEM.clients(reference.Local())[3], np.zeros(4)
    for _ in range(4):
        w = w - 0.05 * client.full_gradient(w)
    np.testing.assert_allclose(result.client_state(3).own["w"], w, rtol=1e-10)
