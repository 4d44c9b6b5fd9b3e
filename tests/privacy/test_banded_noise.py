"""Banded noise (DP-FTRL): its covariance over rounds, its sensitivity, and the participation it requires."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

import fedrax
from fedrax import FedAvg, FedraxError, LocalSGD, Settings
from fedrax.participation import RoundRobin
from fedrax.privacy.accounting import Accountant, CohortSampling
from fedrax.privacy.mechanisms.client_level import ClientDP, band_coefficients
from fedrax.privacy.mechanisms.clipping import Adaptive, Flat
from fedrax.privacy.releases import Release
from fedrax.simulation.settings import cohort_sampler
from tests.privacy.observed import zero_task
from tests.simulation.problems import run

C, Z, BANDS, ROUNDS, NUMBERS = 0.8, 1.5, 3, 6, 2000
TASK = zero_task(NUMBERS)
PRIVATE = ClientDP(FedAvg(local=LocalSGD(lr=0.1, steps=1, batch_size=2)), clip=Flat(C), noise=Z, bands=BANDS)


def federation(clients: int) -> fedrax.Federation:
    """Clients with two samples each."""
    rows = 2 * clients
    return fedrax.Federation.from_arrays(np.ones((rows, 1), np.float32), np.zeros(rows), np.repeat(range(clients), 2))


def factor(rounds: int, bands: int) -> np.ndarray:
    """The banded matrix C, by whose inverse the noise is correlated."""
    coefficients = [1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128][:bands]
    return np.sum([c * np.eye(rounds, k=-j) for j, c in enumerate(coefficients)], axis=0)


def test_factor_without_bands_is_the_square_root_of_prefix_sums():
    root = factor(5, 5)
    np.testing.assert_allclose(root @ root, np.tri(5), atol=1e-12)
    np.testing.assert_allclose(band_coefficients(5), root[:, 0])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("clients", [6, 5])
def test_covariance_of_noise_over_rounds(clients: int):
    """Noise of the sum divided by the requested cohort size; with 5 clients every third cohort has one client."""
    settings = {"rounds": ROUNDS, "cohort_size": 2, "participation": RoundRobin(), "trajectory": True}
    result = run(PRIVATE, federation(clients), task=TASK, **settings)
    path = np.stack([np.asarray(params["w"]) for params in result.trajectory])
    noise = np.diff(path, axis=0, prepend=0.0) * 2
    inverse = np.linalg.inv(factor(ROUNDS, BANDS))
    expected = (Z * C) ** 2 * inverse @ inverse.T
    variance = np.diag(expected)
    uncertain = np.sqrt((np.outer(variance, variance) + expected**2) / NUMBERS)
    assert np.all(np.abs(noise @ noise.T / NUMBERS - expected) < 4.5 * uncertain)
    assert expected[0, 1] < -4.5 * uncertain[0, 1]  # independent noise would fail


def test_sensitivity_of_a_client_is_accounted():
    """sup |C u| over separated rounds and updates of length 1 (of one sign, the worst case for C >= 0)."""
    rounds, (release,) = 9, PRIVATE.releases()
    assert (release.seen, release.apart) == ("public", BANDS)
    for times in (1, 2, 3):
        chosen = [np.isin(np.arange(rounds), some) for some in combinations(range(rounds), times)]
        apart = [mask for mask in chosen if times == 1 or np.diff(np.flatnonzero(mask)).min() >= BANDS]
        worst = max(float(np.linalg.norm(factor(rounds, BANDS) @ mask)) for mask in apart)
        counted = Accountant([release], 1e-5).epsilon(times)
        assert counted == pytest.approx(Accountant([Release(Z / worst)], 1e-5).epsilon(1), rel=1e-6)


def test_banded_noise_is_not_amplified():
    accountant = Accountant(PRIVATE.releases(), 1e-5, CohortSampling("poisson", 0.1))
    assert not accountant.by_rounds
    assert accountant.epsilon(1) == Accountant(PRIVATE.releases(), 1e-5).epsilon(1)


def test_prefix_sums_have_less_noise_than_with_independent_noise():
    """At the same epsilon, for a client that takes part once."""
    rounds = 64
    inverse = np.linalg.inv(sum(c * np.eye(rounds, k=-j) for j, c in enumerate(band_coefficients(rounds))))
    sums = np.tri(rounds) @ inverse * np.linalg.norm(band_coefficients(rounds))
    assert np.square(sums).sum(1).max() < 0.2 * rounds


def test_cyclic_participation():
    sampler = cohort_sampler(Settings(rounds=9, cohort_size=4, participation=RoundRobin()), np.full(10, 2))
    cohorts = [sampler.cohort(r) for r in range(9)]
    assert sorted(np.concatenate(cohorts[:3])) == list(range(10))
    assert [len(cohort) for cohort in cohorts[:3]] == [4, 4, 2]
    for r in range(6):
        np.testing.assert_array_equal(cohorts[r], cohorts[r + 3])


def test_unsupported_settings_are_rejected():
    with pytest.raises(FedraxError, match=r"at least 3 rounds apart, but client \d participates in rounds"):
        run(PRIVATE, federation(6), task=TASK, rounds=6, cohort_size=2)
    with pytest.raises(FedraxError, match="at least 3 rounds apart"):
        run(PRIVATE, federation(4), task=TASK, rounds=6, cohort_size=2, participation=RoundRobin())
    for other in (ClientDP(bands=2, at="client"), ClientDP(bands=2, clip=Adaptive(count_noise=9.0))):
        with pytest.raises(FedraxError, match="bands above 1 need at = 'server'"):
            run(other, federation(6), task=TASK, rounds=2, cohort_size=2)
    scaffold = ClientDP(fedrax.Scaffold(local=LocalSGD(lr=0.1, steps=1, batch_size=2)), bands=2)
    with pytest.raises(
        FedraxError, match="one vector with the shapes of the parameters; Scaffold uploads something else"
    ):
        run(scaffold, federation(6), task=TASK, rounds=2, cohort_size=2, participation=RoundRobin())
