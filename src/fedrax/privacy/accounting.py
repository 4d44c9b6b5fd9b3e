"""What releases cost together: the epsilon of a run at a stated delta, sound for what the cohorts' draws allow.

A count says how often: rounds where the draw of cohorts amplifies (:attr:`Accountant.by_rounds`), else the rounds that
one client took part in. Gaussian answers alone compose exactly (Balle and Wang 2018). Sampled ones are bounded by
dp-accounting twice, by Rényi divergences (Mironov et al. 2019; Wang et al. 2019 without replacement) and by privacy
loss distributions (Doroshenko et al. 2022), and the smaller bound holds.
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
"""What to take from the draw of cohorts: what is proven for it, nothing, or what one kind of draw gives."""
MOST_COUNTS = 10**9
_ORDERS = (1.25, 1.5, 1.75, *range(2, 33), *range(36, 65, 4), 80, 96, 128, 192, 256)
_WHOLE_ORDERS = tuple(order for order in _ORDERS if order == int(order))
_KNOTS = (10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 25, 28, 30, 32, 35, 40, 45, 50, 55, 60, 65, 70, 80, 90)
"""Of each decade, the counts at which privacy loss distributions are composed; between two the upper one holds."""
_LEAST = 1e-100
"""The least noise, and the inverse of the most, whose square is a number."""
_HOPELESS = 1e3
"""An epsilon of one count above which a privacy loss distribution tells nothing more."""
_HALVED = 1000
"""Counts up to which distributions are composed of those of their halves, which earlier rounds have left behind."""


@dataclass(frozen=True)
class CohortSampling:
    """How the clients of a round are drawn.

    Example:
        >>> fedrax.privacy.CohortSampling("poisson", rate=0.1).claimed("none").drawn
        'known'
    """

    drawn: Literal["poisson", "fixed", "known", "refilled"] = "known"
    """Each client by itself ("poisson"); so many of all ("fixed"); or in a way that hides nobody: all or given ones
    ("known"), or so many that another client would take the place of a missing one ("refilled")."""
    rate: float = 1.0
    """With the first two, the share of the clients, a round."""

    def claimed(self, amplification: Amplification) -> CohortSampling:
        """The sampling that the accountant may use.

        Args:
            amplification: "auto" for this sampling, "none" for no amplification, else the kind of draw that is claimed.

        Returns:
            This sampling, or one without amplification.

        Raises:
            FedraxError: Another kind of draw is claimed.
        """
        if amplification == "none":
            return CohortSampling("refilled" if self.place_is_taken else "known")
        if amplification not in ("auto", self.drawn):
            known = {"poisson": "by Poisson sampling", "fixed": "at a fixed size"}
            how = known.get(self.drawn, "in a way that hides nobody")
            raise FedraxError(
                f"amplification {amplification!r} does not hold: cohorts are drawn {how}; leave it at 'auto'"
            )
        return self

    @property
    def place_is_taken(self) -> bool:
        """Whether another client would come in the place of one that were not there."""
        return self.drawn == "refilled" or (self.drawn == "fixed" and self.rate < 1)


class EpsilonBound(NamedTuple):
    """An upper bound on epsilon, and the accountant that it comes from."""

    epsilon: float
    by: str


class _Sampled(NamedTuple):
    """``times`` Gaussian answers about a sample of which each unit is part with probability ``rate``, a count."""

    rate: float
    noise: float
    times: int = 1


class Accountant:
    """The epsilon of ``releases``, made in every round by each client that takes part, at ``delta``.

    The server that sees an answer knows whose it is: only releases that are all for the "public" are amplified by the
    draw of cohorts, and only about whole clients, since about one sample the draw hides nothing as long as the rest of
    the client's data may give it away. Draws of a fixed size do not amplify what clients remember of their rounds
    (:attr:`Release.remembers`). ``unit`` and ``neighbors`` say what the number is about; releases that differ
    in them are compared in the weaker words: samples rather than clients, replacement rather than presence.

    Args:
        releases: The Gaussian answers that a client gives in each round that it takes part in.
        delta: The delta of the guarantee, between 0 and 1.
        cohorts: How the clients of a round are drawn.

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
        odd = next((r.noise for r in releases if r.noise and not _LEAST <= r.noise <= 1 / _LEAST), None)
        if odd is not None:
            raise FedraxError(f"a noise of {odd:g} is too {'small' if odd < 1 else 'large'} to be accounted for")
        self.releases, self.delta = tuple(releases), float(delta)
        self.unit: str = "sample" if any(r.unit == "sample" for r in releases) else "client"
        same = len({(r.unit, r.neighbors) for r in releases}) == 1
        self.neighbors: str = releases[0].neighbors if same else "replacement"
        self._public = all(r.seen == "public" for r in releases) and self.unit == "client"
        self.empty_place = self._public and cohorts.place_is_taken and any(r.remembers for r in releases)
        """Whether nobody comes in the place of a client that is not there, who would remember it ever after."""
        self.cohorts = CohortSampling() if self.empty_place else cohorts
        alone = all(r.apart == 1 for r in releases)
        proven = self.cohorts.drawn == "fixed" or (self.cohorts.drawn == "poisson" and self.neighbors == "presence")
        self.by_rounds = self._public and alone and self.cohorts.rate < 1 and proven
        self._plain, self._sampled = self._terms()

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
        """The smallest of the bounds, and where it comes from."""
        if count == 0:
            return EpsilonBound(0.0, "no release")
        if not self.protects:
            return EpsilonBound(math.inf, "no noise")
        found = [EpsilonBound(_gaussian(self._plain / math.sqrt(count), self.delta), "analytic Gaussian")]
        if self.by_rounds and self.cohorts.drawn == "fixed" and self.neighbors == "replacement":
            found.append(EpsilonBound(self._renyi(count), "RDP"))
        elif self._sampled:
            found = found if self.by_rounds else []
            found += [EpsilonBound(self._renyi(count), "RDP"), EpsilonBound(self._losses(count), "PLD")]
        return min(found)

    @property
    def has_paper(self) -> bool:
        """Whether a paper claims something else than ``epsilon``."""
        return any(r.paper_noise is not None or r.paper_epsilon is not None for r in self.releases)

    def epsilon_paper(self, count: int, samples: int) -> float | None:
        """The epsilon that the methods' papers claim, which need not be sound.

        Gaussian answers are composed as in Theorem 6.2 of Upcycled-FL, others as in Theorem 6.3, with the noise or the
        epsilon that each release states as its paper's; see :mod:`fedrax.privacy.printed_bounds`.

        Args:
            count: Rounds that the client takes part in.
            samples: Samples of the client.

        Returns:
            The claimed epsilon; inf where a theorem does not hold for so few samples; None where no paper claims
            anything other than :meth:`epsilon`.
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

    # -- inverse questions ---------------------------------------------------------------------------------------

    def counts_within(self, epsilon: float, most: int = MOST_COUNTS) -> int:
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
        """The factor on all noise multipliers with which ``count`` counts have ``epsilon``.

        Args:
            epsilon: The epsilon to reach.
            count: Rounds or participations, as in :meth:`epsilon`.

        Returns:
            The factor, accurate to 0.1 % and never too small.

        Raises:
            FedraxError: A release has no noise, or no factor reaches ``epsilon``.
        """
        if not self.protects:
            raise FedraxError("no factor makes noise of none: give the method a noise above 0, of any size")
        if count == 0:
            return 0.0
        brentq = importlib.import_module("scipy.optimize").brentq

        @lru_cache
        def excess(step: float) -> float:
            """Of log epsilon, with noise times e^step."""
            found = self.scaled(math.exp(step)).epsilon(count)
            return min(50.0, math.log(max(found, 1e-20) / epsilon))

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
        """Its noise multiplier in the accountant's own words of who is a neighbor.

        To replace something is to take it away and to add something, and a sample changes a client: at most twice the
        sensitivity to presence, and at most that to replacement.
        """
        halved = release.neighbors == "presence" and (release.unit, release.neighbors) != (self.unit, self.neighbors)
        return float(release.noise) / (2 if halved else 1)

    def _terms(self) -> tuple[float, list[_Sampled]]:
        """Of one count: the noise multiplier of all unsampled answers as one, and the sampled ones."""
        if not self.protects:
            return 0.0, []
        by_batch = lambda r: r.batches == "poisson" and (r.unit, self.neighbors) == ("sample", "presence")  # noqa: E731
        answers = [(self._noise(r), r.times) for r in self.releases if not by_batch(r)]
        precision = sum(times / noise**2 for noise, times in answers)
        plain = math.inf if precision == 0 else precision**-0.5
        if self._public and self.neighbors == "presence" and self.cohorts.place_is_taken:
            # Who is not there makes room for another, so a sum changes by up to two clients: for draws of a fixed size
            # Zhu, Dong and Wang (2022) then give the bound of Poisson sampling.
            plain /= 2
        if self.by_rounds:
            return plain, [_Sampled(self.cohorts.rate, plain)]
        return plain, [_Sampled(r.rate, self._noise(r), r.times) for r in self.releases if by_batch(r)]

    @cached_property
    def _renyi_of_one(self) -> tuple[tuple[float, ...], np.ndarray]:
        """(orders, divergences of one count)."""
        dp = _package()
        if self.by_rounds and self.cohorts.drawn == "fixed" and self.neighbors == "replacement":
            scale = 10**6  # the rate as a fraction: never below it
            event = dp.SampledWithoutReplacementDpEvent(
                scale, min(scale, math.ceil(self.cohorts.rate * scale)), dp.GaussianDpEvent(self._plain)
            )
            accountant = dp.rdp.RdpAccountant(_ORDERS, dp.NeighboringRelation.REPLACE_ONE)
            return _ORDERS, accountant.compose(event).rdp
        accountant = dp.rdp.RdpAccountant(_WHOLE_ORDERS)
        for term in self._sampled:
            accountant.compose(dp.PoissonSampledDpEvent(term.rate, dp.GaussianDpEvent(term.noise)), term.times)
        if not self.by_rounds and math.isfinite(self._plain):
            accountant.compose(dp.GaussianDpEvent(self._plain))
        return _WHOLE_ORDERS, accountant.rdp

    def _renyi(self, count: int) -> float:
        orders, divergences = self._renyi_of_one
        return float(_package().rdp.compute_epsilon(orders, count * divergences, self.delta)[0])

    def _losses(self, count: int) -> float:
        """By privacy loss distributions, at the next knot from ``count`` on."""
        one = self._renyi(1)
        return math.inf if one > _HOPELESS else self._losses_at(next_knot(count), min(max(one / 500, 1e-4), 1.0))

    @lru_cache(maxsize=512)  # noqa: B019
    def _losses_at(self, count: int, interval: float) -> float:
        whole = self._composed(count, interval)
        if not self.by_rounds and math.isfinite(self._plain):
            whole = whole.compose(_loss_distribution(interval, self._plain / math.sqrt(count)))
        return float(whole.get_epsilon_for_delta(self.delta))

    @lru_cache(maxsize=256)  # noqa: B019
    def _composed(self, count: int, interval: float) -> Any:
        """The privacy loss distribution of the sampled answers of ``count`` counts."""
        if count == 1:
            parts = [_loss_distribution(interval, t.noise, t.rate).self_compose(t.times) for t in self._sampled]
            return reduce(lambda a, b: a.compose(b), parts)
        if count > _HALVED:
            return self._composed(1, interval).self_compose(count)
        half = count // 2
        return self._composed(half, interval).compose(self._composed(count - half, interval))


def about_replacement(releases: Sequence[Release]) -> tuple[Release, ...]:
    """The same releases in words of other data: to replace something is to take it away and to add something."""
    share = {"presence": 0.5, "replacement": 1.0}
    return tuple(dataclasses.replace(r, noise=r.noise * share[r.neighbors], neighbors="replacement") for r in releases)


def next_knot(count: int) -> int:
    """The next count, from ``count`` on, at which privacy loss distributions are composed."""
    if count <= 10:
        return count
    decade = 10 ** (len(str(count)) - 2)
    return next((knot * decade for knot in _KNOTS if knot * decade >= count), 100 * decade)


def _loss_distribution(interval: float, noise: float, rate: float = 1.0) -> Any:
    pld = importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    return pld.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=interval)


@lru_cache(maxsize=4096)
def _gaussian(noise: float, delta: float) -> float:
    """The smallest epsilon of a Gaussian answer with this noise multiplier (Balle and Wang 2018, Theorem 8).

    The value of dp-accounting's ``get_epsilon_gaussian``, which takes too long to be asked in every round.
    """
    if math.isinf(noise):
        return 0.0
    log_phi = importlib.import_module("scipy.special").log_ndtr

    def excess(epsilon: float) -> float:
        """Of log delta at ``epsilon``."""
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
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise FedraxError("epsilon is computed by the package dp-accounting: pip install 'fedrax[privacy]'") from error
