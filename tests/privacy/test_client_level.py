"""Client-level privacy: sensitivity, noise, and rejected combinations."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD, Wrapper, hyperparameters
from fedrax.algorithms import upcycle
from fedrax.compression import Quantized, TopK
from fedrax.participation import Poisson
from fedrax.privacy.mechanisms.client_level import ClientDP
from fedrax.privacy.mechanisms.clipping import Adaptive, Flat, PerLeaf
from fedrax.privacy.mechanisms.noise import with_noise
from fedrax.privacy.releases import Release
from fedrax.robust import Robust
from fedrax.simulation.settings import cohort_sampler
from tests import reference
from tests.algorithms.problems import make_problem
from tests.privacy.observed import (
    COHORT,
    FEATURES,
    OTHER_PLANS,
    ROUNDS,
    ZeroUploads,
    assert_bounded,
    assert_gaussian,
    extreme_data,
    noise_of,
    upload_norm,
)
from tests.simulation.problems import FEDERATION, LOCAL, SCAFFOLD, TASK, run
from tests.slow import slow_cases

C, Z = 0.8, 1.5
BLOCKS = LocalSGD(lr=0.02, steps=3, blocks=3)
BOUNDED = {
    "fedavg": ClientDP(FedAvg(local=LOCAL), clip=Flat(C), noise=0.0),
    "fedavg, per leaf": ClientDP(FedAvg(local=LOCAL), clip=PerLeaf(C), noise=0.0),
    "scaffold": ClientDP(SCAFFOLD, clip=Flat(C), noise=0.0),
    "losac, at clients": ClientDP(fedrax.LoSAC(local=BLOCKS), clip=Flat(C), noise=0.0, at="client"),
    "episode": ClientDP(fedrax.Episode(local=LOCAL, gamma=0.1), clip=Flat(C), noise=0.0),
    "mime, per leaf": ClientDP(fedrax.algorithms.Mime(local=LOCAL), clip=PerLeaf(C), noise=0.0),
    "mifa, each": ClientDP(fedrax.algorithms.MIFA(local=LOCAL, memory="server"), clip=Flat(C), noise=0.0, at="client"),
    "quantized": ClientDP(Quantized(FedAvg(local=LOCAL)), clip=Flat(C), noise=0.0),
}
UPLOAD_NORMS = {name: upload_norm(algorithm) for name, algorithm in BOUNDED.items()}


@hyperparameters
class UnprotectedLeaf(ClientDP):
    """Broken: control variates are uploaded without noise."""

    def around_client(self, client, message, state, own, data, last):
        exact = client(message, state, data)
        output, own = super().around_client(client, message, state, own, data, last)
        return output._replace(upload=output.upload._replace(control=exact.upload.control)), own


@hyperparameters
class SameKeyTwice(ClientDP):
    """Broken: both phases of a round have the same noise."""

    def around_client(self, client, message, state, own, data, last):
        output, own = super().around_client(client, message, state, own, data, last)
        twice = with_noise(
            data.dropout_key(0), jax.tree.map(jnp.zeros_like, client(message, state, data).upload), Z * C
        )
        return output._replace(upload=twice), own


@hyperparameters
class OneKeyForAll(ClientDP):
    """Broken: all clients have the same noise."""

    def around_client(self, client, message, state, own, data, last):
        output, own = super().around_client(client, message, state, own, data, last)
        zeros = jax.tree.map(jnp.zeros_like, client(message, state, data).upload)
        return output._replace(upload=with_noise(data.key("noise", shared=True), zeros, Z * C)), own


@hyperparameters
class TooLittleNoise(ClientDP):
    """Broken: the noise is too small by a factor of sqrt(2)."""

    def _per_phase(self, bound: Any) -> tuple[Any, Any]:
        most, deviation = super()._per_phase(bound)
        return most, deviation / 2**0.5


# -- sensitivity ---------------------------------------------------------------------------------------------------


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", BOUNDED)
def test_uploads_of_any_data_are_within_the_bound(name: str):
    for x in extreme_data():
        assert_bounded(UPLOAD_NORMS[name], x, C)
    assert UPLOAD_NORMS[name](1e3 * extreme_data()[0]) > 0.3 * C  # the bound is almost attained


@settings(max_examples=40, deadline=None, derandomize=True)
@given(x=arrays(np.float32, (5, FEATURES), elements=st.floats(width=32)))
def test_uploads_of_adversarial_data_are_within_the_bound(x: np.ndarray):
    for name in ("scaffold", "episode"):
        assert_bounded(UPLOAD_NORMS[name], x, C)


def test_unprotected_leaf_exceeds_the_bound():
    length = upload_norm(UnprotectedLeaf(SCAFFOLD, clip=Flat(C), noise=0.0))
    with pytest.raises(AssertionError):
        assert_bounded(length, 1e6 * extreme_data()[0], C)


INSIDE = {"fedavg": FedAvg(local=LOCAL), "scaffold": SCAFFOLD}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("name", "at"), slow_cases(product(INSIDE, ("server", "client")), [("fedavg", "client"), ("scaffold", "server")])
)
def test_without_noise_and_with_a_large_bound_it_is_the_inner_method(name: str, at: Any):
    inner = INSIDE[name]
    wrapped, plain = run(ClientDP(inner, clip=Flat(1e6), noise=0.0, at=at), rounds=2), run(inner, rounds=2)
    for a, b in zip(jax.tree.leaves(wrapped.server), jax.tree.leaves(plain.server), strict=True):
        np.testing.assert_array_equal(a, b)


# -- the noise -----------------------------------------------------------------------------------------------------


def central(inner: fedrax.Algorithm) -> Wrapper:
    """Noise at the server."""
    return ClientDP(inner, clip=Flat(C), noise=Z)


def local(inner: fedrax.Algorithm) -> Wrapper:
    """Noise at the clients."""
    return ClientDP(inner, clip=Flat(C), noise=Z, at="client")


def assert_same_noise(rows: np.ndarray, others: np.ndarray) -> None:
    """Assert equal noise up to the last digit, because programs round the normal quantile function differently."""
    np.testing.assert_allclose(rows, others, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def at_server() -> np.ndarray:
    """Noise on the sum."""
    return noise_of(central, stacked=False)


@pytest.fixture(scope="module")
def at_clients() -> np.ndarray:
    """Noise on every upload."""
    return noise_of(local, stacked=True)


def test_noise_at_the_server_has_the_scale_of_the_sum_and_is_independent(at_server: np.ndarray):
    assert len(at_server) == ROUNDS * 2 * 2  # rounds, phases, leaves
    assert_gaussian(at_server, Z * C / COHORT)
    other = noise_of(central, stacked=False, seed=1)
    assert abs(np.corrcoef(other.ravel(), at_server.ravel())[0, 1]) < 0.1


def test_noise_of_clients_is_independent(at_clients: np.ndarray):
    assert len(at_clients) == ROUNDS * 2 * 2 * COHORT
    assert_gaussian(at_clients, Z * C)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", slow_cases(OTHER_PLANS, [{"plan": "vmap", "chunk": 2}, {"devices": 1}]), ids=str)
def test_noise_at_clients_is_the_same_for_all_plans_and_devices(at_clients: np.ndarray, options: dict):
    assert_same_noise(noise_of(local, stacked=True, **options), at_clients)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("options", slow_cases(OTHER_PLANS, [{"plan": "loop"}, {"plan": "debug"}]), ids=str)
def test_noise_at_the_server_is_the_same_for_all_plans_and_devices(at_server: np.ndarray, options: dict):
    assert_same_noise(noise_of(central, stacked=False, **options), at_server)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("broken", [SameKeyTwice, OneKeyForAll, TooLittleNoise])
def test_broken_noise_is_detected(broken: type[ClientDP]):
    rows = noise_of(lambda inner: broken(inner, clip=Flat(C), noise=Z, at="client"), stacked=True)
    with pytest.raises(AssertionError):
        assert_gaussian(rows, Z * C)


def test_outer_wrappers_change_the_stream_but_not_the_scale(at_clients: np.ndarray):
    other = noise_of(lambda inner: upcycle(local(inner)), stacked=True)
    assert abs(np.corrcoef(other.ravel(), at_clients.ravel())[0, 1]) < 0.05
    assert_gaussian(other, Z * C)


@pytest.mark.slow
def test_grid_of_noise_and_bounds_is_one_program():
    grid = [ClientDP(FedAvg(local=LOCAL), clip=Flat(c), noise=z) for c in (0.1, 1.0) for z in (0.0, 0.5)]
    together = fedrax.sweep(grid, TASK, FEDERATION, rounds=2, cohort_size=3, mode="vectorized")
    assert "in one program" in together[0][0].plan
    for algorithm, (result,) in zip(grid, together, strict=True):
        alone = run(algorithm, rounds=2)
        for a, b in zip(jax.tree.leaves(result.params), jax.tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)


# -- against NumPy -------------------------------------------------------------------------------------------------

STEPS = {"lr": 0.1, "steps": 3, "batch_size": 4}


def updates(x: np.ndarray, cohort: Any) -> list[np.ndarray]:
    """Updates of the clients from x in plain loops."""
    clients = make_problem().clients(reference.Local(**STEPS))
    return [clients[i].descend(x, reference.Part(i, 1.0, 0)).params - x for i in cohort]


def simulated(algorithm: fedrax.Algorithm, **options: Any) -> tuple[np.ndarray, fedrax.Result]:
    """Parameters after every round in float64."""
    problem = make_problem()
    result = fedrax.simulate(
        algorithm, problem.task, problem.federation, params=problem.params, dtype="float64", trajectory=True, **options
    )
    return np.array([reference.join(problem.problem, params) for params in result.trajectory]), result


def test_clipped_sums_over_the_expected_cohort_agree_with_numpy():
    inner = FedAvg(local=LocalSGD(order="stored", **STEPS))
    options: dict[str, Any] = {"rounds": 5, "cohort_size": 2, "participation": Poisson(), "seed": 3}
    path, result = simulated(ClientDP(inner, clip=Flat(0.25), noise=0.0), **options)
    problem = make_problem()
    sampler = cohort_sampler(fedrax.Settings(**options), problem.federation.sizes)
    x, sizes = problem.x0, set()
    for r, mine in enumerate(path):
        cohort = sampler.cohort(r)
        sizes.add(len(cohort))
        deltas = updates(x, cohort)
        x = x + sum((d * min(1, 0.25 / np.linalg.norm(d)) for d in deltas), np.zeros_like(x)) / 2
        np.testing.assert_allclose(mine, x, atol=1e-6)
    assert len(sizes) > 1
    assert [event["clients"] for event in result.events] == [len(sampler.cohort(r)) for r in range(5)]


def test_clipping_by_leaf_agrees_with_numpy():
    inner = FedAvg(local=LocalSGD(order="stored", **STEPS))
    problem = make_problem()
    path, _ = simulated(ClientDP(inner, clip=PerLeaf(0.3), noise=0.0), rounds=1, cohort_size=7)
    total = np.zeros_like(problem.x0)
    for delta in updates(problem.x0, range(7)):
        leaves = reference.split(problem.problem, delta)
        short = {n: a * min(1, 0.3 / np.sqrt(2) / np.linalg.norm(a)) for n, a in leaves.items()}
        total += reference.join(problem.problem, short)
    np.testing.assert_allclose(path[0], problem.x0 + total / 7, atol=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("at", ["server", "client"])
def test_adaptive_clipping_agrees_with_numpy(at: Any):
    inner = FedAvg(local=LocalSGD(order="stored", **STEPS))
    clip = Adaptive(bound=0.05, quantile=0.7, lr=0.5, count_noise=1e-6)
    path, result = simulated(ClientDP(inner, clip=clip, noise=0.0, at=at), rounds=4, cohort_size=7)
    x, bound = make_problem().x0, 0.05
    for mine, event in zip(path, result.events, strict=True):
        deltas = updates(x, range(7))
        lengths = [np.linalg.norm(d) for d in deltas]
        x = x + sum(d * min(1, bound / n) for d, n in zip(deltas, lengths, strict=True)) / 7
        np.testing.assert_allclose(mine, x, atol=1e-6)
        np.testing.assert_allclose(event["clip_bound"], bound, rtol=1e-5)
        within = np.mean([n <= bound for n in lengths])
        np.testing.assert_allclose(event["within_bound"], within, atol=1e-5)
        bound *= np.exp(-0.5 * (within - 0.7))


def test_count_of_adaptive_clipping_is_accounted():
    """1 / z^2 is the sum of the budgets of the updates, relative to C, and of b - 1/2, relative to 1/2."""
    clip, noise = Adaptive(count_noise=1.3), 2.0
    spent = float(clip.multiplier(noise)) ** -2 + (1.3 / 0.5) ** -2
    np.testing.assert_allclose(spent, noise**-2, rtol=1e-6)


# -- releases and rejections ---------------------------------------------------------------------------------------


def test_releases():
    inner = FedAvg(local=LOCAL)
    assert ClientDP(inner, noise=1.2).releases() == (Release(noise=1.2, seen="public"),)
    assert upcycle(ClientDP(inner, noise=1.2)).releases() == (Release(noise=1.2, seen="public"),)
    assert ClientDP(inner, noise=1.2, at="client").releases() == (Release(noise=0.6, neighbors="replacement"),)
    assert inner.releases() == upcycle(inner).releases() == ()


def test_client_infos_are_removed():
    events = run(ClientDP(fedrax.Episode(local=LOCAL, gamma=0.1)), rounds=1).events
    assert not {"train_loss", "clipped"} & set(events[0])
    assert events[0]["gradients"] > 0


def assert_rejected(algorithm: fedrax.Algorithm, match: str, **options: Any) -> None:
    """Assert that the algorithm is rejected."""
    with pytest.raises(FedraxError, match=match):
        run(algorithm, rounds=1, **options)


def test_uploads_without_noise_are_rejected():
    inner = FedAvg(local=LOCAL)
    assert_rejected(
        ClientDP(fedrax.algorithms.MIFA(local=LOCAL, memory="server")),
        "cannot protect each/output/bias.*send it in upload",
    )
    assert_rejected(ClientDP(inner), "uniform aggregation weights", weights="samples")
    assert_rejected(ClientDP(Robust(inner)), "uses individual uploads")
    for outside in (Quantized, TopK, Robust):
        assert_rejected(outside(ClientDP(inner)), r"changes: put .* inside")
    assert_rejected(Robust(fedrax.algorithms.upcycle(ClientDP(inner))), "the noise of ClientDP is calibrated")
    assert run(Quantized(ClientDP(inner, at="client")), rounds=1).events
    assert_rejected(ClientDP(fedrax.Episode(local=LOCAL), clip=Adaptive()), "set clip to Flat")
    assert_rejected(ClientDP(inner, clip=Adaptive(count_noise=0.4), noise=0.8), "count_noise must be above 0.4")
    assert_rejected(ClientDP(inner, noise=-1.0), "ClientDP.noise must be at least 0")


def test_integer_totals_are_rejected():
    @hyperparameters
    class Counts(FedAvg):
        """Also uploads the number of samples."""

        def client(self, message, state, data):
            return super().client(message, state, data)._replace(total={"samples": data.size})

    assert_rejected(
        ClientDP(Counts(local=LOCAL)), "cannot protect total/samples, which clients of Counts send: .* int32"
    )


def test_zero_uploads_are_zero():
    assert not np.any(noise_of(lambda inner: ClientDP(inner, noise=0.0), stacked=False))
    assert isinstance(ZeroUploads(), fedrax.Algorithm)
