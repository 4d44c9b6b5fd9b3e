"""Reports about clipping, noise and epsilon."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification
from fedrax.contract import Batch, Model
from fedrax.participation import WeightedBySamples
from fedrax.privacy import Accountant, Adaptive, ClientDP, CohortSampling, Flat, Release, SampleDP
from tests.reported.problems import FEDERATION, LOCAL, START, run

pytest.importorskip("dp_accounting")
BATCHES = LocalSGD(lr=0.5, steps=1, batch_size=10)


def normal(z: float) -> float:
    """Distribution function of the standard normal distribution."""
    return math.erfc(-z / math.sqrt(2)) / 2


def gaussian_delta(epsilon: float, noise: float) -> float:
    """delta of the Gaussian mechanism at epsilon (Balle and Wang 2018, Theorem 8)."""
    a, b = 1 / (2 * noise), epsilon * noise
    return normal(a - b) - math.exp(epsilon) * normal(-a - b)


def sampled_delta(epsilon: float, noise: float, rate: float) -> float:
    """delta of a Poisson-sampled Gaussian mechanism at epsilon, the larger one of both directions, by quadrature."""
    z = np.linspace(-12 * noise, 12 * noise + 1, 200_001)
    without = np.exp(-(z**2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi))
    there = rate * np.exp(-((z - 1) ** 2) / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi)) + (1 - rate) * without
    gaps = (there - math.exp(epsilon) * without, without - math.exp(epsilon) * there)
    return max(float(np.maximum(gap, 0).sum() * (z[1] - z[0])) for gap in gaps)


def clipped_mean(losses: Any, w: Any, x: np.ndarray, y: np.ndarray, clip: float) -> Any:
    """Mean of the clipped per-sample gradients, sample by sample."""
    total = jax.tree.map(jnp.zeros_like, w)
    for i in range(len(y)):
        g = jax.grad(lambda w, i=i: losses(w, x[i : i + 1], y[i : i + 1])[0])(w)
        norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(g)))
        total = jax.tree.map(lambda t, leaf, norm=norm: t + leaf * min(1, clip / norm), total, g)
    return jax.tree.map(lambda t: t / len(y), total)


def tied_words(p: Any, x: Any, key: Any = None) -> Any:
    """The embedding is also the output layer."""
    return p["embedding"][x[:, 0]] @ p["embedding"].T


def tied_layers(p: Any, x: Any, key: Any = None) -> Any:
    """The same dense layer twice."""
    return jnp.tanh(jnp.tanh(x @ p["dense"]) @ p["dense"])


@pytest.mark.parametrize("apply", [tied_words, tied_layers])
def test_uses_of_a_shared_parameter_are_clipped_together(apply: Any):
    rng = np.random.default_rng(1)
    params = {"embedding" if apply is tied_words else "dense": rng.normal(size=(4, 4))}
    x = rng.integers(0, 4, (10, 1)) if apply is tied_words else rng.normal(size=(10, 4))
    y = rng.integers(0, 4, 10)
    task = classification(Model(lambda key: params, apply, name=apply.__name__))
    federation = Federation.from_arrays(x, y, [0] * 10, num_classes=4)
    method = SampleDP(FedAvg(local=BATCHES), clip=0.4, noise=0.0)
    result = run(method, federation, task=task, rounds=1, cohort_size=1)
    with jax.enable_x64(True):

        def losses(p: Any, x: Any, y: Any) -> Any:
            return task.loss(p, Batch(jnp.asarray(x), jnp.asarray(y)), jax.random.key(0))

        mean = clipped_mean(losses, jax.tree.map(jnp.asarray, params), x, y, 0.4)
    for name in params:
        np.testing.assert_allclose(result.params[name], params[name] - 0.5 * np.asarray(mean[name]), rtol=1e-6)


def test_noise_on_the_count_must_leave_room_for_the_updates():
    clip = Adaptive(count_noise=0.5)
    with pytest.raises(FedraxError, match=r"count_noise must be above 0\.5"):
        run(ClientDP(FedAvg(local=LOCAL), clip=clip, noise=1.0))
    wider = Adaptive(count_noise=0.51)
    updates = float(wider.multiplier(1.0))
    assert updates**-2 + (2 * 0.51) ** -2 == pytest.approx(1.0, rel=1e-4)


def test_cohorts_by_numbers_of_samples_are_not_amplified():
    method, rounds = ClientDP(FedAvg(local=LOCAL), clip=Flat(1.0), noise=4.0), 3
    spent = run(method, rounds=rounds, cohort_size=1, participation=WeightedBySamples(), delta=1e-3).spent
    assert spent is not None and 1 <= spent.count <= rounds
    # another client replaces an absent one, so that a sum changes by two clients
    assert gaussian_delta(spent.epsilon, 4.0 / 2 / math.sqrt(spent.count)) == pytest.approx(1e-3, rel=1e-3)
    with pytest.raises(FedraxError, match="sampled by numbers of samples"):
        run(SampleDP(FedAvg(local=BATCHES), noise=1.0, rate=0.5), participation=WeightedBySamples())


@pytest.mark.parametrize("delta", [1e-3, 1e-4, 1e-6])
def test_a_small_epsilon_is_neither_zero_nor_far_too_large(delta: float):
    noise, rate = 1.0, 105 / 100_000
    release = Release(noise=noise, seen="public")
    epsilon = Accountant([release], delta, CohortSampling("poisson", rate)).epsilon(1)
    assert sampled_delta(epsilon, noise, rate) <= delta * (1 + 1e-6)  # sound
    assert epsilon == 0.0 or sampled_delta(0.8 * epsilon - 1e-3, noise, rate) > delta  # and almost exact
    assert (epsilon == 0.0) == (sampled_delta(0.0, noise, rate) < delta)  # the total variation distance is 0.0004


def test_a_batch_without_samples_is_noise_alone():
    rare = SampleDP(FedAvg(local=LocalSGD(lr=0.5, steps=4, batch_size=5)), clip=1.0, noise=0.0, rate=1e-9)
    result = run(rare, FEDERATION)
    np.testing.assert_array_equal(result.params, START)
    noisy = run(SampleDP(rare.inner, clip=1.0, noise=2.0, rate=1e-9), FEDERATION)
    moved = np.asarray(noisy.params) - START
    assert 0.1 < moved.std() < 2.5 and np.isfinite(moved).all()  # about 0.5 * 2 / 5 * sqrt(4 * 2 / 2) = 0.4
