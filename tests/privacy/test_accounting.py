"""Accountants against closed forms, published values, and a composition in NumPy."""

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

from fedrax import FedraxError
from fedrax.privacy.accounting import Accountant, CohortSampling, next_composed_count
from fedrax.privacy.printed_bounds import objective_perturbation, output_perturbation
from fedrax.privacy.releases import Release

DELTA = 1e-5
PUBLIC = {"seen": "public"}


def delta_of_gaussian(noise: float, epsilon: float) -> float:
    """Balle and Wang (2018), Theorem 8."""
    a, b = 1 / (2 * noise), epsilon * noise
    return norm.cdf(a - b) - np.exp(epsilon) * norm.cdf(-a - b)


def delta_of_mixture(noise: float, rate: float, epsilon: float) -> float:
    """max over both directions of H(mix || N(0)), mix = (1 - q) N(0, noise^2) + q N(1, noise^2), on a fine grid."""
    x = np.linspace(-40 * noise, 1 + 40 * noise, 400_001)
    low = norm.pdf(x, 0, noise)
    mix = (1 - rate) * low + rate * norm.pdf(x, 1, noise)
    gap = lambda p, q: np.maximum(p - np.exp(epsilon) * q, 0).sum() * (x[1] - x[0])  # noqa: E731
    return max(gap(mix, low), gap(low, mix))


def epsilon_of_composition(noise: float, rate: float, count: int, delta: float = DELTA, bins: int = 1 << 18) -> float:
    """``count`` Poisson-sampled Gaussian releases: privacy losses on a grid, composed by a power of their transform."""
    found, span = [], 30.0
    for adding in (False, True):
        x = np.linspace(-25 * noise, 1 + 25 * noise, 1_000_001)
        low = norm.pdf(x, 0, noise)
        mix = (1 - rate) * low + rate * norm.pdf(x, 1, noise)
        loss = np.log1p(rate * np.expm1((2 * x - 1) / (2 * noise**2)))
        loss, mass = (-loss, low) if adding else (loss, mix)
        place = np.clip((loss + span) / (2 * span) * bins, 0, bins - 1)  # to the nearest bin: unbiased
        weights = np.bincount(np.rint(place).astype(int) % bins, mass * (x[1] - x[0]), bins)
        composed = np.fft.irfft(np.fft.rfft(np.roll(weights, -bins // 2)) ** count, bins)
        losses, composed = (np.arange(bins) - bins // 2) * 2 * span / bins, np.roll(composed, bins // 2)
        low_, high = 0.0, span
        for _ in range(50):
            middle = (low_ + high) / 2
            above = losses > middle
            gone = (composed[above] * -np.expm1(middle - losses[above])).sum()
            low_, high = (middle, high) if gone > delta else (low_, middle)
        found.append(high)
    return max(found)


@pytest.mark.parametrize(("noise", "count"), [(0.5, 1), (1.0, 1), (3.0, 17), (20.0, 400)])
def test_gaussian_releases_agree_with_the_closed_form(noise: float, count: int):
    accountant = Accountant([Release(noise)], DELTA)
    epsilon, by = accountant.bound(count)
    assert by == "analytic Gaussian"
    assert delta_of_gaussian(noise / np.sqrt(count), epsilon) == pytest.approx(DELTA, rel=1e-6)


def test_several_releases_per_round_equal_one_with_less_noise():
    several = Accountant([Release(2.0, times=3), Release(5.0)], DELTA).epsilon(4)
    assert several == pytest.approx(Accountant([Release((3 / 4 + 1 / 25) ** -0.5)], DELTA).epsilon(4), rel=1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 4.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_gaussian_releases_agree_with_dp_accounting(noise: float, delta: float):
    desired = dp_accounting.get_epsilon_gaussian(noise, delta)
    assert Accountant([Release(noise)], delta).bound(1)[0] == pytest.approx(desired, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("noise", "batch", "samples", "steps", "published"),
    [
        (1.3, 256, 60000, 15 * 60000 // 256, 1.19),  # MNIST tutorial of TensorFlow Privacy (delta 1e-5)
        (1.1, 256, 60000, 60 * 60000 // 256, 3.01),
        (0.7, 256, 60000, 45 * 60000 // 256, 7.10),
        (4.0, 1, 100, 10000, 1.26),  # Abadi et al. (2016), Section 3.2
    ],
)
def test_published_values_of_sampled_gaussians(noise: float, batch: int, samples: int, steps: int, published: float):
    """The Rényi divergences agree to 1 %; their conversion to epsilon was looser than today's."""
    accountant = Accountant([Release(noise, **PUBLIC)], DELTA, CohortSampling("poisson", batch / samples))
    orders, one = accountant._renyi_of_one
    as_then = np.min(steps * one + np.log(1 / DELTA) / (np.array(orders) - 1))
    assert as_then == pytest.approx(published, rel=0.01)
    assert accountant.epsilon(steps) < as_then


@pytest.mark.parametrize(
    ("noise", "rate", "count"), [(1.0, 0.01, 1000), (1.0, 0.1, 100), (3.0, 0.3, 30), (0.7, 0.02, 1)]
)
def test_sampled_gaussians_agree_with_a_composition_in_numpy(noise: float, rate: float, count: int):
    epsilon = Accountant([Release(noise, **PUBLIC)], DELTA, CohortSampling("poisson", rate)).epsilon(count)
    assert epsilon == pytest.approx(epsilon_of_composition(noise, rate, count), rel=0.01)


def test_local_steps_on_sampled_batches_are_counted():
    """DP-SGD: T steps per round on Poisson batches. Client sampling does not amplify further, even for public
    observers.
    """
    release = Release(1.1, times=20, unit="sample", batches="poisson", rate=0.05, seen="public")
    accountant = Accountant([release], DELTA, CohortSampling("poisson", 0.1))
    assert not accountant.by_rounds and accountant.unit == "sample"
    assert accountant.epsilon(5) == pytest.approx(epsilon_of_composition(1.1, 0.05, 100), rel=0.01)


def test_shuffled_batches_and_releases_to_the_server_are_not_amplified():
    alone = Accountant([Release(2.0, times=3)], DELTA).epsilon(7)
    shuffled = Release(2.0, times=3, unit="sample", batches="shuffled", rate=0.01)
    assert Accountant([shuffled], DELTA).epsilon(7) == pytest.approx(alone)
    assert Accountant([Release(2.0, times=3)], DELTA, CohortSampling("fixed", 0.01)).epsilon(7) == pytest.approx(alone)


def test_replacement_in_a_fixed_cohort_is_exact_for_opposite_updates():
    """One client of two has opposite clipped uploads: the bound is attained, and that of Poisson sampling would be
    exceeded.
    """
    noise, mixed = 2.0, lambda e: delta_of_mixture(1.0, 0.5, e)  # the two are 2 clipping norms apart
    fixed = Accountant([Release(noise, **PUBLIC)], DELTA, CohortSampling("fixed", 0.5)).epsilon(1)
    poisson = Accountant([Release(noise, **PUBLIC)], DELTA, CohortSampling("poisson", 0.5)).epsilon(1)
    assert mixed(fixed) <= DELTA < mixed(0.97 * fixed)
    assert mixed(poisson) > 10 * DELTA


@pytest.mark.parametrize("rate", [0.02, 0.05])
def test_replacement_in_a_cohort_of_fixed_size(rate: float):
    """Wang et al. (2019): at least what one pair of federations shows, and below the bound without sampling."""
    accountant = Accountant([Release(1.5, neighbors="replacement", **PUBLIC)], DELTA, CohortSampling("fixed", rate))
    assert accountant.by_rounds
    epsilon, by = accountant.bound(1)
    assert by == "RDP" and delta_of_mixture(1.5, rate, epsilon) <= DELTA
    assert epsilon < Accountant([Release(1.5)], DELTA).epsilon(1)


def test_amplification_without_proof_is_not_claimed():
    plain = Accountant([Release(1.0, neighbors="replacement")], DELTA).epsilon(9)
    for cohorts in (CohortSampling("poisson", 0.1), CohortSampling("known", 0.1)):
        assert Accountant([Release(1.0, neighbors="replacement", **PUBLIC)], DELTA, cohorts).epsilon(9) == plain
    refilled = Accountant([Release(2.0, **PUBLIC)], DELTA, CohortSampling("refilled")).epsilon(9)
    assert refilled == Accountant([Release(1.0)], DELTA).epsilon(9)
    mixed = [Release(1.0, **PUBLIC), Release(9.0, seen="server")]  # the server knows the cohort
    assert not Accountant(mixed, DELTA, CohortSampling("poisson", 0.1)).by_rounds


def test_releases_with_different_neighboring_relations_use_the_weaker_one():
    """A changed sample is a changed client; replacement is at most one removal and one addition."""
    mixed = Accountant([Release(4.0), Release(3.0, unit="sample", neighbors="replacement")], DELTA)
    assert (mixed.unit, mixed.neighbors) == ("sample", "replacement")
    assert mixed.epsilon(1) == pytest.approx(Accountant([Release((1 / 4 + 1 / 9) ** -0.5)], DELTA).epsilon(1))


def test_more_rounds_never_cost_less():
    accountant = Accountant([Release(1.0, **PUBLIC)], DELTA, CohortSampling("poisson", 0.05))
    costs = [accountant.epsilon(count) for count in range(60)]
    assert costs == sorted(costs) and costs[0] == 0
    knots = [next_composed_count(count) for count in (1, 10, 17, 99, 100, 101, 119, 991, 12345)]
    assert knots == [1, 10, 18, 100, 100, 110, 120, 1000, 13000]


@pytest.mark.parametrize("cohorts", [CohortSampling(), CohortSampling("poisson", 0.02)])
def test_inverse_functions_of_the_accountant(cohorts: CohortSampling):
    accountant = Accountant([Release(1.5, **PUBLIC)], DELTA, cohorts)
    factor = accountant.factor_for(1.0, 50)
    assert 0.995 < accountant.scaled(factor).epsilon(50) <= 1.0 < accountant.scaled(factor / 1.002).epsilon(50)
    count = accountant.counts_within(8.0)
    assert accountant.epsilon(count) <= 8.0 < accountant.epsilon(count + 1)
    assert accountant.counts_within(8.0, most=3) == 3 and accountant.counts_within(1e-9) == 0


def test_without_noise_epsilon_is_infinite():
    accountant = Accountant([Release(0.0), Release(1.0)], DELTA)
    assert accountant.epsilon(0) == 0 and accountant.epsilon(1) == np.inf
    with pytest.raises(FedraxError, match="a noise of 0 cannot be scaled"):
        accountant.factor_for(1.0, 5)


def test_epsilon_of_the_papers_theorems():
    """Examples computed by hand."""
    # 6.2: kappa = 10 * 4 / (2 * 0.25 * 400) = 0.2; 2 sqrt(0.2 ln(1e5)) + 0.2 = 2 * 1.517427 + 0.2
    assert output_perturbation(10, clip=2, sigma=0.5, samples=20, delta=1e-5) == pytest.approx(3.234854, abs=1e-6)
    # kappa = 1 / 2 with noise = n_i sigma / tau = 1
    paper = Accountant([Release(0.25, paper_noise=0.05)], 1e-5).epsilon_paper(1, samples=20)
    assert paper == pytest.approx(2 * np.sqrt(0.5 * 11.512925) + 0.5, rel=1e-7)
    answers = [Release(0.0, paper_epsilon=27.0)]
    assert Accountant(answers, 1e-5).epsilon_paper(3, samples=50) == pytest.approx(1.62)
    # 6.3: each upload (2 * 10 * 1 * 0.1 + 2.8 * 0.25) / (50 * 0.1) = 2.7 / 5
    assert objective_perturbation([10.0, 10.0, 10.0], u1=1, u2=0.25, mu=0.1, samples=50) == pytest.approx(1.62)
    with pytest.raises(FedraxError, match=r"u2 <= n_i mu / 2: 0.25 is above 0.05"):
        objective_perturbation([1.0], u1=1, u2=0.25, mu=0.01, samples=10)


def test_epsilon_of_the_paper_is_below_the_proven_one():
    """One sample can change a clipped model by 2 tau, not by tau / n_i."""
    clip, sigma, samples = 1.0, 0.5, 40
    accountant = Accountant(
        [Release(sigma / (2 * clip), unit="sample", neighbors="replacement", paper_noise=sigma / clip)], DELTA
    )
    paper = accountant.epsilon_paper(3, samples)
    assert paper == pytest.approx(output_perturbation(3, clip, sigma, samples, DELTA))
    assert paper is not None and paper < accountant.epsilon(3) / 20


@pytest.mark.parametrize("claim", ["poisson", "fixed"])
def test_wrong_amplification_is_rejected(claim: str):
    with pytest.raises(
        FedraxError, match=f"'{claim}' does not hold: cohorts are sampled in a way that does not amplify"
    ):
        CohortSampling().claimed(claim)
    with pytest.raises(FedraxError, match="'poisson' does not hold: cohorts are sampled at a fixed size"):
        CohortSampling("fixed", 0.1).claimed("poisson")
    assert CohortSampling("fixed", 0.1).claimed("none") == CohortSampling("refilled")
    assert (
        CohortSampling("fixed", 1.0).claimed("none") == CohortSampling()
        and CohortSampling(claim, 0.1).claimed(claim).rate == 0.1
    )
