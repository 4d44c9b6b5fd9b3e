"""What an attacker's guesses prove: lower bounds on epsilon, with confidence.

From many runs: how often a test tells two neighboring worlds apart bounds epsilon from below (Clopper and Pearson
1934 for the error rates). From one run: of many canaries, each in the data by the flip of a coin, nobody guesses more
than a private method allows (Steinke, Nasr and Jagielski 2023).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from scipy.stats import beta, binom, chi2, kstest, norm

from fedrax.errors import FedraxError

CONFIDENCE = 0.95
_MOST_MU = 30.0
"""A mu beyond which no more is said."""
_SHARES = np.concatenate([[0.001, 0.003, 0.01], np.linspace(0.02, 0.98, 49), [0.99, 0.997, 0.999]])
"""Of what was seen, on one side of the thresholds that are tried."""
_DOUBT = 3.5
"""Deviations from which on two spreads, or a distribution and the normal one, count as different."""


# -- one run ---------------------------------------------------------------------------------------------------------


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """At most the chance that an (epsilon, delta) method lets ``correct`` or more of ``guesses`` be right.

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
        raise FedraxError(f"{correct} right ones of {guesses} guesses about {canaries} canaries cannot be")
    refuted = lambda epsilon: one_run_p_value(canaries, guesses, correct, epsilon, delta) < 1 - confidence  # noqa: E731
    return _largest(refuted)


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
    """What telling two worlds apart, in many runs of each, proves."""

    epsilon: float
    """A lower bound, whatever the mechanism."""
    mu: float
    """A lower bound on mu of a mechanism whose noise is Gaussian (Dong, Roth and Su 2022): the larger one of what error
    rates and the likelihood ratio show."""
    runs: int
    """Of each world, that the bounds rest on."""


def distinguish(
    one: np.ndarray, other: np.ndarray, delta: float, confidence: float = CONFIDENCE
) -> DistinguishingBound:
    """Lower bounds from what an attacker saw of two neighboring worlds.

    The first half of the runs finds the direction and the threshold, the second half is tested by them, so that the
    confidence holds however they were found. Of all bounds together.

    What a Gaussian answer shows is told apart best by a threshold along one direction (the likelihood ratio), and there
    two worlds are two normal distributions, mu deviations apart. Where they look like such, mu is bounded by the means
    and the spread of the second half, which takes fewer runs than error rates do.

    Args:
        one: What was seen of the first world, float [runs, numbers].
        other: What was seen of the second world, float [runs, numbers].
        delta: The delta at which epsilon is bounded.
        confidence: The confidence of all bounds together.

    Returns:
        The bounds on epsilon and mu, and the runs that they rest on.

    Raises:
        FedraxError: A world has fewer than 40 runs, or a number is not finite.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> one, other = rng.normal(size=(400, 1)), rng.normal(size=(400, 1)) + 4
        >>> fedrax.privacy.distinguish(one, other, delta=1e-5).mu > 1
        True
    """
    check_runs(min(len(one), len(other)))
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        raise FedraxError("what was seen of some runs is not finite, and proves nothing: take a smaller local.lr")
    quarters = [np.array_split(np.asarray(world, float), [len(world) // 4, len(world) // 2]) for world in (one, other)]
    (fit_a, pick_a, test_a), (fit_b, pick_b, test_b) = quarters
    level = (1 - confidence) / 6  # two error rates for each of two bounds, a mean and a spread for the third
    directions = _directions(fit_a, fit_b)
    along = max(directions, key=lambda d: _shift(pick_a @ d, pick_b @ d, level))
    tests = [(_worth(pick_a @ d, pick_b @ d, t, level, delta), d, t) for d, t in _tests(directions, pick_a, pick_b)]

    def proven(bound: int) -> float:
        _, direction, threshold = max(tests, key=lambda test: test[0][bound])
        return _worth(test_a @ direction, test_b @ direction, threshold, level, delta)[bound]

    mu = max(proven(1), _shift(test_a @ along, test_b @ along, level))
    return DistinguishingBound(proven(0), mu, min(len(test_a), len(test_b)))


def _tests(directions: list[np.ndarray], pick_a: np.ndarray, pick_b: np.ndarray) -> Iterator[tuple[np.ndarray, float]]:
    """Directions found by the first runs, with thresholds among the second."""
    for direction in directions:
        seen = np.concatenate([pick_a @ direction, pick_b @ direction])
        for threshold in np.quantile(seen, _SHARES):
            yield direction, float(threshold)


MOST_RUNS = 1_000_000


def check_runs(runs: int) -> None:
    """Refuse fewer runs of a world than can prove anything."""
    if not 40 <= runs <= MOST_RUNS:
        raise FedraxError(f"to tell two worlds apart takes 40 to {MOST_RUNS:,} runs of each, not {runs}")


def _directions(one: np.ndarray, other: np.ndarray) -> list[np.ndarray]:
    """Along which the worlds may differ: of their means; with each number, or all together, over their noise.

    The last two find numbers without noise, and noise that was used twice.
    """
    gap = other.mean(0) - one.mean(0)
    inside = np.concatenate([one - one.mean(0), other - other.mean(0)])
    variance = inside.var(0)
    found = [gap, gap / (variance + 1e-9 * variance.max() + 1e-30)]
    if 4 * len(gap) <= len(inside):
        found.append(np.linalg.solve(np.diag(1e-9 * variance + 1e-30) + np.atleast_2d(np.cov(inside.T)), gap))
    return [direction / (np.linalg.norm(direction) or 1.0) for direction in found]


def _worth(low: np.ndarray, high: np.ndarray, threshold: float, level: float, delta: float) -> tuple[float, float]:
    """Lower bounds (epsilon, mu) from a threshold between two worlds, with the error rates' bounds at ``level``."""
    errors = ((low > threshold).sum(), len(low)), ((high <= threshold).sum(), len(high))
    first, second = (float(beta.ppf(1 - level, e + 1, n - e)) if e < n else 1.0 for e, n in errors)
    gains = [(1 - delta - b) / a for a, b in ((first, second), (second, first))]
    epsilon = max([0.0, *(math.log(gain) for gain in gains if gain > 0)])
    return epsilon, max(0.0, float(norm.ppf(1 - first) - norm.ppf(second)))


def _shift(low: np.ndarray, high: np.ndarray, level: float) -> float:
    """A lower bound on how many deviations two normal distributions of one spread lie apart; 0 for any others.

    The mean of what was seen errs by more than its quantile, and the spread is above its own, with ``level`` each.
    """
    gap, free = float(high.mean() - low.mean()), len(low) + len(high) - 2
    squares = [float(((seen - seen.mean()) ** 2).sum()) for seen in (low, high)]
    if gap <= 0 or not math.isfinite(gap):
        return 0.0
    if max(squares) <= 1e-12 * gap**2:  # nothing hides it
        return _MOST_MU
    alike = abs(math.log(squares[0] / squares[1])) < _DOUBT * math.sqrt(4 / len(low)) if min(squares) > 0 else False
    if not (alike and all(map(_is_normal, (low, high)))):
        return 0.0
    most = math.sqrt(sum(squares) / float(chi2.ppf(level, free)))
    error = float(norm.isf(level)) * math.sqrt(1 / len(low) + 1 / len(high))
    return min(_MOST_MU, max(0.0, gap / most - error))


def _is_normal(seen: np.ndarray) -> bool:
    """Whether nothing speaks against it."""
    return kstest((seen - seen.mean()) / seen.std(), norm.cdf).pvalue > norm.sf(_DOUBT)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The epsilon of a Gaussian answer with noise multiplier 1 / mu.

    A lower bound on mu thus gives a lower bound on epsilon (Dong, Roth and Su 2022).

    Args:
        mu: The distance between the two worlds, in standard deviations of the noise.
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
    """The largest number, up to ``most``, for which ``holds``, which holds below some number and not above it."""
    if not holds(0.0):
        return 0.0
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
