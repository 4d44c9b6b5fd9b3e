"""Privacy accounting: a sound epsilon of a run at a given delta, with amplification by client sampling where proven.

A *count* is the number of rounds if client sampling amplifies (:attr:`Accountant.by_rounds`), otherwise the number of
participations of one client. Gaussian mechanisms without sampling compose exactly (Balle and Wang 2018). Sampled ones
are bounded by dp-accounting by Rényi divergences (Mironov et al. 2019; Wang et al. 2019 without replacement) and by
privacy loss distributions (Doroshenko et al. 2022); the smaller bound is used.
"""

from __future__ import annotations

import bisect
import dataclasses
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from typing import Any, Literal, NamedTuple

import numpy as np

from fedrax.errors import FedraxError
from fedrax.privacy.printed_bounds import moments_epsilon
from fedrax.privacy.releases import Release

Amplification = Literal["auto", "none", "poisson", "fixed"]
"""Amplification by client sampling: "auto" for what is proven, "none", or the kind of sampling that is claimed."""
MAX_COUNT = 10**9
"""Largest count that budgets are searched to."""
_ORDERS = (1.25, 1.5, 1.75, *range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)
_INTEGER_ORDERS = tuple(order for order in _ORDERS if order == int(order))
_COMPOSED_COUNTS = (10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 25, 28, 30, 32, 35, 40, 45, 50, 55, 60, 65, 70, 80, 90)
"""Counts of each decade at which privacy loss distributions are composed; other counts use the next larger one."""
_MIN_NOISE = 1e-100
"""Smallest noise multiplier, and inverse of the largest, whose square is a finite float."""
_MAX_PLD_EPSILON = 1e3
"""Epsilon of one count above which privacy loss distributions are not computed: they give no useful bound."""
_MAX_HALVED_COUNT = 1000
"""Counts up to which distributions are composed from those of half the count, which are cached from earlier rounds."""


@dataclass(frozen=True)
class CohortSampling:
    """How the cohort of a round is sampled.

    Example:
        >>> fedrax.privacy.CohortSampling("poisson", rate=0.1).claimed("none").drawn
        'known'
    """

    drawn: Literal["poisson", "fixed", "known", "refilled"] = "known"
    """"poisson": each client independently; "fixed": a uniform subset of fixed size; "known": cohorts that the
    adversary knows, without amplification; "refilled": the same, but another client replaces an absent one."""
    rate: float = 1.0
    """Sampling rate: the (expected) fraction of the clients in a round, for "poisson" and "fixed"."""

    def claimed(self, amplification: Amplification) -> CohortSampling:
        """The sampling that the accountant may use.

        Args:
            amplification: "auto" for this sampling, "none" for no amplification, else the kind of sampling claimed.

        Returns:
            This sampling, or one without amplification.

        Raises:
            FedraxError: Another kind of sampling is claimed.
        """
        if amplification == "none":
            return CohortSampling("refilled" if self.replaces_absent else "known")
        if amplification not in ("auto", self.drawn):
            known = {"poisson": "by Poisson sampling", "fixed": "at a fixed size"}
            how = known.get(self.drawn, "in a way that does not amplify")
            raise FedraxError(
                f"amplification {amplification!r} does not hold: cohorts are sampled {how}; leave it at 'auto'"
            )
        return self

    @property
    def replaces_absent(self) -> bool:
        """Whether another client replaces an absent one in the cohort."""
        return self.drawn == "refilled" or (self.drawn == "fixed" and self.rate < 1)


class EpsilonBound(NamedTuple):
    """An upper bound on epsilon."""

    epsilon: float
    """The bound."""
    by: str
    """Name of the accounting method."""


class _Sampled(NamedTuple):
    """``times`` Gaussian mechanisms a count, on a Poisson sample with sampling rate ``rate``."""

    rate: float
    noise: float
    times: int = 1


class Accountant:
    """The epsilon at ``delta`` of ``releases`` that each client of a cohort makes in every round.

    Client sampling amplifies only if the adversary of all releases is the "public", because the server knows the
    cohort, and only for the unit "client", because the rest of a client's data may reveal that it was sampled. Sampling
    of a fixed size does not amplify releases that depend on client state (:attr:`Release.remembers`). ``unit`` and
    ``neighbors`` state the neighboring relation; if releases differ in them, it is the weaker one: samples rather than
    clients, replacement rather than presence.

    Args:
        releases: The releases of a client in each of its rounds.
        delta: The delta of the guarantee, between 0 and 1.
        cohorts: How cohorts are sampled.

    Raises:
        FedraxError: delta is outside of (0, 1), a noise multiplier is too small or too large, or the package
            dp-accounting is missing.

    Example:
        >>> accountant = fedrax.privacy.Accountant([fedrax.privacy.Release(noise=2.0)], delta=1e-5)
        >>> accountant.epsilon(1) < accountant.epsilon(10)
        True
    """

    def __init__(self, releases: Sequence[Release], delta: float, cohorts: CohortSampling = CohortSampling()):
        if not 0 < delta < 1:
            raise FedraxError(f"delta must lie between 0 and 1, not {delta}")
        invalid = next((r.noise for r in releases if r.noise and not _MIN_NOISE <= r.noise <= 1 / _MIN_NOISE), None)
        if invalid is not None:
            size = "small" if invalid < 1 else "large"
            raise FedraxError(f"a noise of {invalid:g} is too {size} to be accounted for")
        self.releases, self.delta = tuple(releases), float(delta)
        self.unit: str = "sample" if any(r.unit == "sample" for r in releases) else "client"
        same = len({(r.unit, r.neighbors) for r in releases}) == 1
        self.neighbors: str = releases[0].neighbors if same else "replacement"
        self._public = all(r.seen == "public" for r in releases) and self.unit == "client"
        self.empty_place = self._public and cohorts.replaces_absent and any(r.remembers for r in releases)
        """Whether the guarantee is for cohorts in which an absent client is not replaced (see `Release.remembers`)."""
        self.cohorts = CohortSampling() if self.empty_place else cohorts
        independent = all(r.apart == 1 for r in releases)
        proven = self.cohorts.drawn == "fixed" or (self.cohorts.drawn == "poisson" and self.neighbors == "presence")
        self.by_rounds = self._public and independent and self.cohorts.rate < 1 and proven
        self._plain, self._sampled = self._terms()

    @property
    def seen(self) -> str:
        """The strongest adversary of the guarantee: the "server" if all it sees has noise, otherwise the "public"."""
        return "server" if all(release.seen == "server" for release in self.releases) else "public"

    @property
    def amplified(self) -> str:
        """The sampling that amplifies the guarantee: of cohorts, "poisson" or "fixed"; "batches"; or "none"."""
        return self.cohorts.drawn if self.by_rounds else "batches" if self._sampled else "none"

    @property
    def protects(self) -> bool:
        """Whether there is any finite epsilon."""
        return all(release.noise > 0 for release in self.releases)

    def epsilon(self, count: int) -> float:
        """A sound upper bound on epsilon, nondecreasing in ``count``.

        Args:
            count: Rounds where :attr:`by_rounds` is set, else participations of one client.

        Returns:
            The bound at the accountant's delta; inf where a release has no noise.
        """
        return self.bound(count).epsilon

    @lru_cache(maxsize=4096)  # noqa: B019 - an accountant lives as long as its run
    def bound(self, count: int) -> EpsilonBound:
        """The smallest bound on epsilon, and the method that gives it."""
        if count == 0:
            return EpsilonBound(0.0, "no release")
        if not self.protects:
            return EpsilonBound(math.inf, "no noise")
        bounds = [EpsilonBound(_gaussian(self._plain / math.sqrt(count), self.delta), "analytic Gaussian")]
        if self.by_rounds and self.cohorts.drawn == "fixed" and self.neighbors == "replacement":
            bounds.append(EpsilonBound(self._renyi(count), "RDP"))
        elif self._sampled:
            bounds = bounds if self.by_rounds else []
            bounds += [EpsilonBound(self._renyi(count), "RDP"), EpsilonBound(self._losses(count), "PLD")]
        return min(bounds)

    @property
    def has_paper(self) -> bool:
        """Whether the paper of a method claims another epsilon."""
        return any(r.paper_noise is not None or r.paper_epsilon is not None for r in self.releases)

    def epsilon_paper(self, count: int, samples: int) -> float | None:
        """The epsilon that the methods' papers claim, which need not be sound.

        Gaussian releases are composed as in Theorem 6.2 of Upcycled-FL, others as in Theorem 6.3, with the noise or
        epsilon that the paper claims for each release; see :mod:`fedrax.privacy.printed_bounds`.

        Args:
            count: Participations of the client.
            samples: Samples of the client.

        Returns:
            The claimed epsilon; inf if a theorem does not hold for so few samples; None if no paper claims another
            value than :meth:`epsilon`.
        """
        if not self.has_paper:
            return None
        kappa, pure = 0.0, 0.0
        for release in self.releases:
            noise = float(release.noise) if release.paper_noise is None else samples * float(release.paper_noise)
            if count and samples < release.paper_samples:
                pure = math.inf
            elif release.paper_epsilon is not None:
                pure += count * release.times * float(release.paper_epsilon) / samples
            elif count:
                kappa += math.inf if noise == 0 else count * release.times / (2 * noise**2)
        return pure + moments_epsilon(kappa, self.delta)

    # -- inverse computations ---------------------------------------------------------------------------------------

    def counts_within(self, epsilon: float, most: int = MAX_COUNT) -> int:
        """The largest count whose epsilon is at most ``epsilon``.

        Args:
            epsilon: The budget.
            most: The largest count to consider.

        Returns:
            The count, between 0 and ``most``.
        """
        enough = 1
        while enough < most and self.epsilon(enough) <= epsilon:
            enough = min(2 * enough, most)
        return bisect.bisect_right(range(1, enough + 1), epsilon, key=self.epsilon)

    def scaled(self, factor: float) -> Accountant:
        """This accountant with the noise of every release multiplied by ``factor``.

        Args:
            factor: The factor on the noise multipliers.

        Returns:
            A new accountant, without the claims of papers.
        """
        sound = {"paper_noise": None, "paper_epsilon": None, "paper_samples": 0.0}
        grown = [dataclasses.replace(r, noise=r.noise * factor, **sound) for r in self.releases]
        return Accountant(grown, self.delta, self.cohorts)

    def factor_for(self, epsilon: float, count: int) -> float:
        """The factor on all noise multipliers for which ``count`` gives ``epsilon``.

        Args:
            epsilon: The epsilon to reach.
            count: Rounds or participations, as in :meth:`epsilon`.

        Returns:
            The factor, accurate to 0.1 % and never too small.

        Raises:
            FedraxError: A release has no noise, or no factor reaches ``epsilon``.
        """
        if not self.protects:
            raise FedraxError("a noise of 0 cannot be scaled: set the method's noise to any value above 0")
        if count == 0:
            return 0.0
        brentq = importlib.import_module("scipy.optimize").brentq

        @lru_cache
        def excess(step: float) -> float:
            """log(epsilon with noise times e^step) minus the log of the target."""
            reached = self.scaled(math.exp(step)).epsilon(count)
            return min(50.0, math.log(max(reached, 1e-20) / epsilon))

        low, high = -1.0, 1.0
        while excess(high) > 0:
            low, high = high, 2 * high
            if high > 32:
                raise FedraxError(f"no noise brings {count} rounds to epsilon = {epsilon:g} at delta = {self.delta:g}")
        while excess(low) <= 0:
            low, high = 2 * low, low
        step = brentq(excess, low, high, xtol=2e-4)
        while excess(step) > 0:
            step += 2e-4
        return math.exp(step)

    # -- parts ---------------------------------------------------------------------------------------------------

    def _noise(self, release: Release) -> float:
        """The noise multiplier with respect to the accountant's neighboring relation.

        A replacement is a removal and an addition, which at most doubles the sensitivity to presence. Replacing a
        sample is a special case of replacing its client's data.
        """
        halved = release.neighbors == "presence" and (release.unit, release.neighbors) != (self.unit, self.neighbors)
        return float(release.noise) / (2 if halved else 1)

    def _terms(self) -> tuple[float, list[_Sampled]]:
        """For one count: the joint noise multiplier of all releases without sampling, and the sampled ones."""
        if not self.protects:
            return 0.0, []
        by_batch = lambda r: r.batches == "poisson" and (r.unit, self.neighbors) == ("sample", "presence")  # noqa: E731
        unsampled = [(self._noise(r), r.times) for r in self.releases if not by_batch(r)]
        precision = sum(times / noise**2 for noise, times in unsampled)
        plain = math.inf if precision == 0 else precision**-0.5
        if self._public and self.neighbors == "presence" and self.cohorts.replaces_absent:
            # An absent client is replaced by another, so that a sum changes by up to two clients. With this sensitivity
            # the bound of Poisson sampling holds for sampling of a fixed size (Zhu, Dong and Wang 2022).
            plain /= 2
        if self.by_rounds:
            return plain, [_Sampled(self.cohorts.rate, plain)]
        return plain, [_Sampled(r.rate, self._noise(r), r.times) for r in self.releases if by_batch(r)]

    @cached_property
    def _renyi_of_one(self) -> tuple[tuple[float, ...], np.ndarray]:
        """(orders, Rényi divergences of one count)."""
        dp = _package()
        if self.by_rounds and self.cohorts.drawn == "fixed" and self.neighbors == "replacement":
            scale = 10**6  # the rate as a fraction, rounded up
            event = dp.SampledWithoutReplacementDpEvent(
                scale, min(scale, math.ceil(self.cohorts.rate * scale)), dp.GaussianDpEvent(self._plain)
            )
            accountant = dp.rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
            return _ORDERS, accountant.compose(event).rdp
        accountant = dp.rdp.RdpAccountant(_INTEGER_ORDERS)
        for term in self._sampled:
            accountant.compose(dp.PoissonSampledDpEvent(term.rate, dp.GaussianDpEvent(term.noise)), term.times)
        if not self.by_rounds and math.isfinite(self._plain):
            accountant.compose(dp.GaussianDpEvent(self._plain))
        return _INTEGER_ORDERS, accountant.rdp

    def _renyi(self, count: int) -> float:
        """Epsilon by Rényi divergences."""
        orders, divergences = self._renyi_of_one
        return float(_package().rdp.compute_epsilon(orders, count * divergences, self.delta)[0])

    def _losses(self, count: int) -> float:
        """Epsilon by privacy loss distributions, at the smallest composed count that is at least ``count``."""
        single = self._renyi(1)
        if single > _MAX_PLD_EPSILON:
            return math.inf
        return self._losses_at(next_composed_count(count), min(max(single / 500, 1e-4), 1.0))

    @lru_cache(maxsize=512)  # noqa: B019
    def _losses_at(self, count: int, interval: float) -> float:
        """Epsilon of ``count`` counts by privacy loss distributions discretized at ``interval``."""
        distribution = self._composed(count, interval)
        if not self.by_rounds and math.isfinite(self._plain):
            distribution = distribution.compose(_loss_distribution(interval, self._plain / math.sqrt(count)))
        return float(distribution.get_epsilon_for_delta(self.delta))

    @lru_cache(maxsize=256)  # noqa: B019
    def _composed(self, count: int, interval: float) -> Any:
        """The privacy loss distribution of the sampled releases of ``count`` counts."""
        if count == 1:
            parts = [_loss_distribution(interval, t.noise, t.rate).self_compose(t.times) for t in self._sampled]
            return reduce(lambda a, b: a.compose(b), parts)
        if count > _MAX_HALVED_COUNT:
            return self._composed(1, interval).self_compose(count)
        half = count // 2
        return self._composed(half, interval).compose(self._composed(count - half, interval))


def about_replacement(releases: Sequence[Release]) -> tuple[Release, ...]:
    """The releases with respect to replacement: removal and addition at most double the sensitivity to presence."""
    share = {"presence": 0.5, "replacement": 1.0}
    return tuple(dataclasses.replace(r, noise=r.noise * share[r.neighbors], neighbors="replacement") for r in releases)


def next_composed_count(count: int) -> int:
    """The smallest count of at least ``count`` at which privacy loss distributions are composed."""
    if count <= 10:
        return count
    decade = 10 ** (len(str(count)) - 2)
    return next((c * decade for c in _COMPOSED_COUNTS if c * decade >= count), 100 * decade)


def _loss_distribution(interval: float, noise: float, rate: float = 1.0) -> Any:
    """The privacy loss distribution of a Gaussian mechanism with Poisson sampling."""
    pld = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    return pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=interval)


@lru_cache(maxsize=4096)
def _gaussian(noise: float, delta: float) -> float:
    """The smallest epsilon of the Gaussian mechanism with this noise multiplier (Balle and Wang 2018, Theorem 8).

    It equals dp-accounting's ``get_epsilon_gaussian``, which is too slow to be called in every round.
    """
    if math.isinf(noise):
        return 0.0
    log_phi = importlib.import_module("scipy.special").log_ndtr

    def excess(epsilon: float) -> float:
        """log(delta at ``epsilon``) minus the log of the target."""
        first = float(log_phi(0.5 / noise - epsilon * noise))
        second = epsilon + float(log_phi(-0.5 / noise - epsilon * noise))
        return (first + math.log(-math.expm1(second - first)) if second < first else -math.inf) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(importlib.import_module("scipy.optimize").brentq(excess, 0.0, high, xtol=1e-12))


@lru_cache(maxsize=1)
def _package() -> Any:
    """The package dp-accounting, or FedraxError if it is not installed."""
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise FedraxError("epsilon needs the package dp-accounting: pip install 'fedrax[privacy]'") from error
