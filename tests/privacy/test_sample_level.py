"""Sample-level privacy: DP-SGD in local steps, its batches and its noise."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD, hyperparameters, tree
from fedrax.privacy.mechanisms.noise import with_noise
from fedrax.privacy.mechanisms.sample_level import SampleDP
from fedrax.privacy.releases import Release
from tests import reference
from tests.algorithms.problems import make_problem
from tests.privacy.observed import OTHER_PLANS, assert_gaussian, extreme_data, sent_by, zero_task
from tests.simulation.problems import CLASSES, FEATURES, LOCAL, run
from tests.slow import slow_cases

C, Z, B, LR = 0.8, 1.5, 4, 0.5
WIDE = zero_task(1000)
NUMBERED = fedrax.Task(
    init=lambda key: {"w": jnp.zeros(40)},
    loss=lambda params, batch, key: (params["w"] * (batch.x == jnp.arange(40.0))).sum(-1),
)
"""A task in which the gradient of sample j is the j-th unit vector."""


def federation(sizes: tuple[int, ...]) -> fedrax.Federation:
    """Samples that are numbered within their client."""
    x = np.concatenate([np.arange(n) for n in sizes]).astype(np.float32)[:, None]
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return fedrax.Federation.from_arrays(x, np.zeros(len(x), np.float32), offsets=offsets, shuffle=False)


def updates_by_round(
    algorithm: fedrax.Algorithm, task: fedrax.Task, sizes: tuple[int, ...], **options: Any
) -> np.ndarray:
    """Change of the parameters in each round of one client: [rounds, d]."""
    path = run(algorithm, federation(sizes), task=task, cohort_size=1, trajectory=True, **options).trajectory
    return np.diff([np.asarray(params["w"]) for params in path], axis=0, prepend=0.0)


def private(steps: int = 1, **fields: Any) -> SampleDP:
    """DP-SGD with a few steps."""
    return SampleDP(FedAvg(local=LocalSGD(lr=LR, steps=steps, batch_size=B)), **{"clip": C, "noise": Z, **fields})


@hyperparameters
class OneKeyForAllSteps(SampleDP):
    """Broken: all steps have the same noise."""

    def _rule(self, data, *how):
        exact = SampleDP(self.inner, self.clip, 0.0, microbatch=self.microbatch)._rule(data, *how)

        def rule(losses, params, batch, weights, key):
            loss, gradient = exact(losses, params, batch, weights, key)
            return loss, with_noise(data.key("noise"), gradient, self.noise * self.clip)

        return rule


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("rate", [None, 0.3])
def test_noise_of_every_step_is_independent(rate: float | None):
    noise = updates_by_round(private(steps=4, rate=rate), WIDE, (5, 7, 6), rounds=4)
    assert_gaussian(noise, LR * Z * C * 2 / B)  # four steps: twice the standard deviation of one


def test_same_noise_in_all_steps_is_detected():
    noise = updates_by_round(OneKeyForAllSteps(private(steps=4).inner, C, Z), WIDE, (5, 7, 6), rounds=4)
    with pytest.raises(AssertionError):
        assert_gaussian(noise, LR * Z * C * 2 / B)


@pytest.mark.slow
def test_gradients_of_poisson_batches_are_counted_by_their_mean():
    """Of batches of ``local`` the batch size is counted."""
    sizes = (40, 20)
    numbered = federation(sizes)
    for rate, expected in ((0.3, 2 * 0.3 * sum(sizes)), (None, 2 * B * len(sizes))):
        result = fedrax.simulate(
            private(steps=2, rate=rate), NUMBERED, numbered, rounds=3, cohort_size=2, progress=False
        )
        assert result.events[-1]["gradients"] == pytest.approx(3 * expected, abs=1)


@pytest.mark.parametrize("plan", slow_cases(OTHER_PLANS, 2), ids=str)
@pytest.mark.parametrize("rate", slow_cases([None, 0.4]))
def test_plans_and_devices_agree(rate: float | None, plan: dict):
    algorithm = private(steps=2, rate=rate, microbatch=3)
    base, other = run(algorithm, rounds=2), run(algorithm, rounds=2, **plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), other.params, base.params)


def test_poisson_batches_include_samples_independently():
    rate, sizes, rounds = 0.3, (40, 25), 300
    path = updates_by_round(private(noise=0.0, rate=rate, clip=1.0), NUMBERED, sizes, rounds=rounds)
    drawn = np.round(path * -B / LR)
    np.testing.assert_allclose(path, drawn * -LR / B, atol=1e-5)
    assert set(np.unique(drawn)) == {0.0, 1.0}
    both = drawn[:, :25]  # samples that both clients have
    assert abs(both.mean() - rate) < 4.5 * np.sqrt(rate * (1 - rate) / both.size)
    counts = both.sum(1)  # binomial, because inclusions are independent
    assert abs(counts.var() / (25 * rate * (1 - rate)) - 1) < 4.5 * np.sqrt(2 / rounds)
    worst = np.abs(np.corrcoef(both.T) - np.eye(25)).max()
    assert worst < 5.5 / np.sqrt(rounds)
    assert drawn[:, 25:].any()  # the larger client takes part too


def test_a_batch_without_samples_is_noise_alone():
    path = updates_by_round(private(noise=0.0, rate=0.02), NUMBERED, (3, 4), rounds=6)
    assert np.isfinite(path).all() and (path == 0).all(1).any()


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("microbatch", [1, 3, 100])
def test_clipped_gradients_agree_with_numpy(microbatch: int):
    problem, local = make_problem(), {"lr": 0.3, "steps": 4, "batch_size": B}
    algorithm = SampleDP(FedAvg(local=LocalSGD(order="stored", **local)), clip=0.4, noise=0.0, microbatch=microbatch)
    result = fedrax.simulate(
        algorithm, problem.task, problem.federation, params=problem.params, dtype="float64", rounds=1, cohort_size=7
    )
    total = np.zeros_like(problem.x0)
    for client in problem.clients(reference.Local(**local)):
        x = problem.x0
        for t in range(4):
            rows = client.batches()[t % len(client.batches())]
            gradients = problem.problem.gradients(x, client.a[rows], client.b[rows])
            shortened = [g * min(1, 0.4 / np.linalg.norm(g)) for g in gradients]
            x = x - 0.3 * np.sum(shortened, axis=0) / B
        total += x - problem.x0
    np.testing.assert_allclose(reference.join(problem.problem, result.params), problem.x0 + total / 7, atol=1e-6)


@pytest.mark.slow
def test_without_noise_and_with_a_large_bound_it_is_the_inner_method():
    """Except for the last batch of an epoch, whose sum is divided by B even if it is smaller."""
    local = LocalSGD(lr=0.05, steps=3, batch_size=1)
    for inner in (FedAvg(local=local), fedrax.Scaffold(local=local)):
        plain, wrapped = run(inner, rounds=2), run(SampleDP(inner, clip=1e6, noise=0.0), rounds=2)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), wrapped.params, plain.params)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(row=arrays(np.float32, FEATURES, elements=st.floats(width=32)), place=st.integers(0, 4))
def test_influence_of_a_sample_on_a_step_is_bounded(row: np.ndarray, place: int):
    ordinary = extreme_data()[0].astype(np.float32)
    without, other = STEP_UPDATE(ordinary), ordinary.copy()
    other[place] = row
    assert tree.norm(tree.sub(STEP_UPDATE(other), without)) <= 2 * C * LR / B * (1 + 1e-4)


STEP_UPDATE = jax.jit(lambda x: sent_by(private(noise=0.0, rate=1.0), x, jnp.arange(5) % CLASSES)[0][0])
"""Update of one step on all five samples."""


def test_releases():
    shuffled = Release(noise=Z / 2, times=4, unit="sample", neighbors="replacement", batches="shuffled")
    assert private(steps=4).releases() == (shuffled,)
    assert private(rate=0.25).releases() == (Release(noise=Z, unit="sample", batches="poisson", rate=0.25),)


def assert_rejected(algorithm: fedrax.Algorithm, match: str, **options: Any) -> None:
    """Assert that the algorithm is rejected."""
    with pytest.raises(FedraxError, match=match):
        run(algorithm, rounds=1, **options)


def test_uncounted_gradients_are_rejected():
    asks = {
        "all of a client's data": (fedrax.Scaffold(local=LOCAL, option="I"), fedrax.algorithms.Mime(local=LOCAL)),
        "besides those of its local steps": (fedrax.Episode(local=LOCAL), fedrax.algorithms.NaiveParallelClip()),
        "local steps of personal parameters": (
            fedrax.personalization.Personalized(FedAvg(local=LOCAL), ("*bias",), alternate=LOCAL),
        ),
        "a second gradient in a step": (fedrax.algorithms.PFedMe(local=LocalSGD(lr=0.005, steps=2)),),
    }
    for words, methods in asks.items():
        for method in methods:
            assert_rejected(SampleDP(method), f"one gradient in each local step, and this one also asks for .*{words}")


def test_noiseless_steps_before_noisy_ones_are_rejected():
    """Personal parameters would be exact, and change the gradients of all other samples."""
    outside = fedrax.personalization.Personalized(SampleDP(FedAvg(local=LOCAL)), ("*bias",), alternate=LOCAL)
    assert_rejected(outside, "use samples without the noise of SampleDP")


def test_local_work_that_cannot_be_counted_is_rejected():
    assert_rejected(SampleDP(FedAvg()), "needs a fixed number of local steps")
    assert_rejected(SampleDP(FedAvg(local=LocalSGD(steps=2, batch_size="full"))), "set local.batch_size to a number")
    assert_rejected(SampleDP(FedAvg(local=LocalSGD(steps=2, reduction="sum"))), "local.reduction to 'mean'")
    assert_rejected(SampleDP(FedAvg(local=LOCAL), rate=0.0), "rate must be greater than 0")
    assert_rejected(SampleDP(FedAvg(local=LOCAL)), "uniform aggregation weights", weights="samples")


def test_repeated_samples_in_a_batch_are_rejected():
    """Copies would be clipped separately, while the noise covers one."""
    twice = dataclasses.replace(LOCAL, order="replacement")
    assert_rejected(SampleDP(FedAvg(local=twice)), "a sample occurs at most once: set local.order")
    run(SampleDP(FedAvg(local=twice), rate=0.5), rounds=1)


def test_scripted_steps_and_batches_are_rejected():
    """The ledger counts the steps and batches of ``local``."""
    method = SampleDP(FedAvg(local=dataclasses.replace(LOCAL, order="stored")))
    steps = np.full((1, 3), 50)
    for script in (
        fedrax.simulation.Script(steps=steps),
        fedrax.simulation.Script(batches=np.zeros((1, 3, 3, 4), int)),
    ):
        assert_rejected(
            method, "accounts for the steps and batches of local, but a script", script=script, cohort_size=3
        )
    run(method, rounds=1, script=fedrax.simulation.Script(cohorts=[[1, 2]]), cohort_size=2)


def test_batch_losses_are_rejected():
    whole = fedrax.Task(
        init=lambda key: {"w": jnp.zeros(3)}, loss=lambda params, batch, key: (params["w"] ** 2).sum() + batch.x.mean()
    )
    with pytest.raises(FedraxError, match="one number for each sample"):
        updates_by_round(private(), whole, (4, 4), rounds=1)
