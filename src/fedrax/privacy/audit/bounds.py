"""Privacy audits: lower confidence bounds on epsilon from an adversary's tests.

From many runs: the error rates of a test between two neighboring federations, with Clopper-Pearson confidence bounds
(1934), bound epsilon from below. From one run: a private method limits how many of the canaries, each included by a
fair coin, can be guessed correctly (Steinke, Nasr and Jagielski 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import beta, binom, chi2, kstest, norm

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError

CONFIDENCE = 0.95
"""Default confidence of the bounds."""
_MOST_MU = 30.0
"""Upper limit of reported lower bounds on mu."""
_THRESHOLD_QUANTILES = np.concatenate([[0.001, 0.003, 0.01], np.linspace(0.02, 0.98, 49), [0.99, 0.997, 0.999]])
"""Quantiles of the observations that serve as thresholds."""
_MAX_DEVIATIONS = 3.5
"""Standard deviations above which two variances, or a distribution and the normal one, count as different."""


# -- one run ---------------------------------------------------------------------------------------------------------


@checked_arguments
def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of ``correct`` or more correct guesses against an (epsilon, delta) method.

    P <= P[B >= v] + 2 m delta max_i P[v - i <= B < v] / i, with B binomial of r guesses and e^eps / (1 + e^eps)
    (Steinke, Nasr and Jagielski 2023).

    Args:
        canaries: m, canaries that were in or out by fair coins.
        guesses: r, canaries that the attacker guessed about.
        correct: v, guesses that were right.
        epsilon: The epsilon to test.
        delta: The delta to test.

    Returns:
        An upper bound on the p-value.

    Example:
        >>> round(fedrax.privacy.one_run_p_value(canaries=10, guesses=2, correct=2, epsilon=0.0, delta=0.0), 6)
        0.25
    """
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, chance))
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, chance))  # v-1, v-2, ...
    worst = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * worst)


@checked_arguments
def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float = 0.0, confidence: float = CONFIDENCE
) -> float:
    """A lower bound on epsilon from the guesses of one run (Steinke, Nasr and Jagielski 2023).

    Args:
        canaries: m, canaries that were in or out by fair coins.
        guesses: r, canaries that the attacker guessed about.
        correct: Guesses that were right.
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of the bound.

    Returns:
        The largest epsilon that is ruled out; 0 where none is.

    Raises:
        FedraxError: The numbers do not satisfy correct <= guesses <= canaries.

    Example:
        >>> fedrax.privacy.one_run_epsilon(canaries=100, guesses=20, correct=10)
        0.0
        >>> fedrax.privacy.one_run_epsilon(canaries=100, guesses=20, correct=20) > 1
        True
    """
    if not 0 <= correct <= guesses <= canaries:
        raise FedraxError(
            f"guesses must satisfy correct <= guesses <= canaries, got {correct}, {guesses} and {canaries}"
        )
    refuted = lambda epsilon: one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence  # noqa: E731
    return _largest(refuted)


@checked_arguments
def guess_membership(scores: np.ndarray, share: float) -> np.ndarray:
    """Guess which canaries were in the data.

    Args:
        scores: One score for each canary, float [m]; high where it seems to be in.
        share: The share of canaries to guess about, half of them in. It must be fixed before the run.

    Returns:
        The guesses, int [m]: 1 (in), -1 (out) or 0 (no guess).

    Example:
        >>> fedrax.privacy.guess_membership(np.array([0.1, 0.9, 0.5, 0.4]), share=0.5).tolist()
        [-1, 1, 0, 0]
    """
    count = max(1, round(share * len(scores) / 2))
    order, guesses = np.argsort(scores, kind="stable"), np.zeros(len(scores), int)
    guesses[order[:count]], guesses[order[len(scores) - count :]] = -1, 1
    return guesses


# -- many runs -------------------------------------------------------------------------------------------------------


class DistinguishingBound(NamedTuple):
    """Lower bounds from a test between two neighboring federations, with many runs of each."""

    epsilon: float
    """Lower bound on epsilon of any mechanism."""
    mu: float
    """Lower bound on mu of a Gaussian mechanism (Dong, Roth and Su 2022): the larger of the bounds from error rates and
    from the distance of the means."""
    runs: int
    """Runs per hypothesis that the bounds are computed from."""


@checked_arguments
def distinguish(
    one: np.ndarray, other: np.ndarray, delta: float, confidence: float = CONFIDENCE
) -> DistinguishingBound:
    """Lower bounds on epsilon and mu from an adversary's observations under two neighboring federations.

    The first half of the runs selects a direction and a threshold, and the second half tests them, so that the
    confidence holds for all bounds together, however the test was selected.

    For a Gaussian mechanism the best test is a threshold along one direction (the likelihood ratio). Projected onto it,
    the observations of the two hypotheses have normal distributions whose means are mu standard deviations apart. If
    the projections pass a test of normality, mu is also bounded by the means and variances of the second half, which
    takes fewer runs than error rates.

    Args:
        one: Observations under the first hypothesis, float [runs, numbers].
        other: Observations under the second hypothesis, float [runs, numbers].
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of all bounds together.

    Returns:
        The bounds on epsilon and mu, and the number of runs used.

    Raises:
        FedraxError: A hypothesis has fewer than 40 runs, or an observation is not finite.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> one, other = rng.normal(size=(400, 1)), rng.normal(size=(400, 1)) + 4
        >>> fedrax.privacy.distinguish(one, other, delta=1e-5).mu > 1
        True
    """
    check_runs(min(len(one), len(other)))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise FedraxError("observations of some runs are not finite: lower local.lr")
    parts = [np.array_split(np.asarray(seen, float), [len(seen) // 4, len(seen) // 2]) for seen in (one, other)]
    (fit_a, pick_a, test_a), (fit_b, pick_b, test_b) = parts
    level = (1 - confidence) / 6  # union bound: two error rates for each of two bounds, mean and variance for the third
    directions = _directions(fit_a, fit_b)
    along = max(directions, key=lambda d: _mean_distance_bound(pick_a @ d, pick_b @ d, level))
    tests = [
        (_error_rate_bounds(pick_a @ d, pick_b @ d, t, level, delta), d, t)
        for d, t in _tests(directions, pick_a, pick_b)
    ]

    def proven(bound: int) -> float:
        _, direction, threshold = max(tests, key=lambda test: test[0][bound])
        return _error_rate_bounds(test_a @ direction, test_b @ direction, threshold, level, delta)[bound]

    mu = max(proven(1), _mean_distance_bound(test_a @ along, test_b @ along, level))
    return DistinguishingBound(proven(0), mu, min(len(test_a), len(test_b)))


@checked_arguments
def provable_epsilon(
    runs: int, epsilon: float, delta: float, gaussian: bool = False, confidence: float = CONFIDENCE
) -> float:
    """The lower bound on epsilon that `distinguish` would give for the best attack, if a guarantee holds exactly.

    Args:
        runs: Runs per hypothesis that the bound is computed from (``DistinguishingBound.runs``).
        epsilon: The epsilon of the guarantee. The best attack has as few errors as it allows.
        delta: The delta of the guarantee, at which epsilon is bounded.
        gaussian: Whether the mechanism is Gaussian, so that the distance of the means gives a bound.
        confidence: The confidence of the bound.

    Returns:
        The bound, of expected numbers of errors.

    Example:
        >>> few, many = (fedrax.privacy.provable_epsilon(runs, epsilon=2.0, delta=1e-5) for runs in (100, 1000))
        >>> 0 < few < many < 2
        True
    """
    level = (1 - confidence) / 6
    if gaussian:
        mu = _largest(lambda mu: epsilon_of_mu(mu, delta) <= epsilon, _MOST_MU)
        return epsilon_of_mu(mu - float(norm.isf(level)) * math.sqrt(2 / runs), delta)
    factor, bounds = math.exp(min(epsilon, 500.0)), [0.0]
    for first in np.geomspace(1e-6, 0.5, 200):
        second = max(0.0, 1 - delta - factor * first, (1 - delta - first) / factor)  # as many errors at least
        most = [float(beta.ppf(1 - level, rate * runs + 1, runs - rate * runs)) for rate in (first, second)]
        bounds += [math.log(gain) for a, b in (most, most[::-1]) if (gain := (1 - delta - b) / a) > 0]
    return max(bounds)


@checked_arguments
def provable_one_run_epsilon(
    canaries: int, guesses: int, epsilon: float, delta: float, confidence: float = CONFIDENCE
) -> float:
    """The lower bound on epsilon that `one_run_epsilon` would give for the best attack, if a guarantee holds exactly.

    Args:
        canaries: m, canaries that were in or out by fair coins.
        guesses: r, canaries that the attacker guesses about.
        epsilon: The epsilon of the guarantee: a share of e^eps / (1 + e^eps) of the guesses is right at most.
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of the bound.

    Returns:
        The bound for the expected number of right guesses, rounded.

    Example:
        >>> fedrax.privacy.provable_one_run_epsilon(canaries=30, guesses=10, epsilon=17.0, delta=1e-3) < 2
        True
    """
    right = round(guesses / (1 + math.exp(-epsilon)))
    return one_run_epsilon(canaries, guesses, right, delta, confidence)


def _tests(directions: list[np.ndarray], pick_a: np.ndarray, pick_b: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """All pairs of a direction and a threshold; thresholds are quantiles of the projected observations."""
    for direction in directions:
        seen = np.concatenate([pick_a @ direction, pick_b @ direction])
        for threshold in np.quantile(seen, _THRESHOLD_QUANTILES):
            yield direction, float(threshold)


MAX_RUNS = 1_000_000
"""Largest number of runs per hypothesis."""


def check_runs(runs: int) -> None:
    """Raise FedraxError unless the number of runs per hypothesis can give a bound."""
    if not 40 <= runs <= MAX_RUNS:
        raise FedraxError(f"an audit needs 40 to {MAX_RUNS:,} runs per hypothesis, not {runs}")


def _directions(one: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
    """Candidate directions [numbers] for telling the hypotheses apart.

    They are the difference of the means, the same divided by each entry's variance, and by the covariance matrix if
    there are enough runs. The last two find entries without noise and noise that was used twice.
    """
    gap = other.mean(0) - one.mean(0)
    noise = np.concatenate([one - one.mean(0), other - other.mean(0)])
    variance = noise.var(0)
    directions = [gap, gap / (variance + 1e-9 * variance.max() + 1e-30)]
    if 4 * len(gap) <= len(noise):
        directions.append(np.linalg.solve(np.diag(1e-9 * variance + 1e-30) + np.atleast_2d(np.cov(noise.T)), gap))
    return [direction / (np.linalg.norm(direction) or 1.0) for direction in directions]


def _error_rate_bounds(
    low: np.ndarray, high: np.ndarray, threshold: float, level: float, delta: float
) -> tuple[float, float]:
    """Lower bounds (epsilon, mu) from the Clopper-Pearson bounds at ``level`` on the error rates of a threshold."""
    errors = ((low > threshold).sum(), len(low)), ((high <= threshold).sum(), len(high))
    first, second = (float(beta.ppf(1 - level, e + 1, n - e)) if e < n else 1.0 for e, n in errors)
    gains = [(1 - delta - b) / a for a, b in ((first, second), (second, first))]
    epsilon = max([0.0, *(math.log(gain) for gain in gains if gain > 0)])
    return epsilon, max(0.0, float(norm.ppf(1 - first) - norm.ppf(second)))


def _mean_distance_bound(low: np.ndarray, high: np.ndarray, level: float) -> float:
    """A lower bound on the distance of the means in standard deviations; 0 unless both look normal with equal variance.

    The bounds on the difference of the means and on the variance fail with probability ``level`` each.
    """
    gap, free = float(high.mean() - low.mean()), len(low) + len(high) - 2
    squares = [float(((seen - seen.mean()) ** 2).sum()) for seen in (low, high)]
    if gap <= 0 or not math.isfinite(gap):
        return 0.0
    if max(squares) <= 1e-12 * gap**2:  # no noise
        return _MOST_MU
    same_variance = (
        abs(math.log(squares[0] / squares[1])) < _MAX_DEVIATIONS * math.sqrt(4 / len(low))
        if min(squares) > 0
        else False
    )
    if not (same_variance and all(map(_is_normal, (low, high)))):
        return 0.0
    most = math.sqrt(sum(squares) / float(chi2.ppf(level, free)))
    error = float(norm.isf(level)) * math.sqrt(1 / len(low) + 1 / len(high))
    return min(_MOST_MU, max(0.0, gap / most - error))


def _is_normal(seen: np.ndarray) -> bool:
    """Whether a Kolmogorov-Smirnov test does not reject normality."""
    return kstest((seen - seen.mean()) / seen.std(), norm.cdf).pvalue > norm.sf(_MAX_DEVIATIONS)


@checked_arguments
def epsilon_of_mu(mu: float, delta: float) -> float:
    """The epsilon of a Gaussian mechanism with noise multiplier 1 / mu.

    A lower bound on mu thus gives a lower bound on epsilon (Dong, Roth and Su 2022).

    Args:
        mu: The distance of the means of the two hypotheses, in standard deviations of the noise.
        delta: The delta at which epsilon is stated.

    Returns:
        Epsilon; 0 where mu is not positive, and at most 500.

    Example:
        >>> fedrax.privacy.epsilon_of_mu(0.0, delta=1e-5)
        0.0
        >>> fedrax.privacy.epsilon_of_mu(1.0, delta=1e-5) < fedrax.privacy.epsilon_of_mu(2.0, delta=1e-5)
        True
    """
    if mu <= 0:
        return 0.0
    spent = lambda e: float(norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu))  # noqa: E731
    return _largest(lambda epsilon: spent(epsilon) > delta, 500.0)


def _largest(holds: Callable[[float], bool], most: float = 100.0) -> float:
    """The largest number up to ``most`` that satisfies ``holds``, which is monotone, by bisection."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
