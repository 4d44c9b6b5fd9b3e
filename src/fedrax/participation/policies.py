"""Synchronous policies without files: uniform, weighted, Poisson and round-robin sampling, and a fixed list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedrax.errors import FedraxError
from fedrax.participation.asynchronous import Asynchronous
from fedrax.participation.availability import Availability
from fedrax.participation.importance_sampling import ImportanceSampling
from fedrax.participation.oort import Oort
from fedrax.participation.policy import (
    COHORT,
    SHUFFLE,
    CohortSizes,
    ParticipationPolicy,
    Population,
    sample_among,
)
from fedrax.participation.power_of_choice import PowerOfChoice
from fedrax.privacy.accounting import CohortSampling


@dataclass(frozen=True)
class Uniform(ParticipationPolicy):
    """Sample the cohort uniformly without replacement.

    Example:
        >>> fedrax.Settings(cohort_size=20, participation=fedrax.participation.Uniform()).cohort_size
        20
    """

    uses_sample_counts: ClassVar[bool] = False

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """S of N clients."""
        return sample_among(rng, population.num_clients, population.cohort_size)

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """S clients in every round."""
        return CohortSizes(population.cohort_size, distinct=_distinct(population, population.cohort_size))

    def sampling(self, population: Population) -> CohortSampling:
        """A fixed size without replacement."""
        return CohortSampling("fixed", population.cohort_size / population.num_clients)


@dataclass(frozen=True)
class WeightedBySamples(ParticipationPolicy):
    """Sample the cohort without replacement, with probabilities in proportion to the clients' sample counts.

    Example:
        >>> fedrax.Settings(participation=fedrax.participation.WeightedBySamples()).participation
        WeightedBySamples()
    """

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """S of N clients."""
        chances = population.sizes / population.sizes.sum()
        return np.sort(rng.choice(population.num_clients, population.cohort_size, replace=False, p=chances))


@dataclass(frozen=True)
class Poisson(ParticipationPolicy):
    """Poisson sampling: each client participates with probability S / N, independently of clients and rounds.

    S, ``cohort_size``, is the expected number of clients; a round may have none. The tightest privacy amplification is
    proven for this sampling.

    Example:
        >>> fedrax.Settings(cohort_size=20, participation=fedrax.participation.Poisson()).participation
        Poisson()
    """

    independent: ClassVar[bool] = True
    uses_sample_counts: ClassVar[bool] = False

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """A uniform sample of binomial size, which has the same distribution as independent Bernoulli draws."""
        return sample_among(rng, population.num_clients, self._size(population, rng))

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """S clients in expectation, and a bound on the size of every cohort."""
        largest = self._largest(population)
        return CohortSizes(largest, True, float(population.cohort_size), _distinct(population, largest))

    def sampling(self, population: Population) -> CohortSampling:
        """Poisson sampling with probability S / N."""
        return CohortSampling("poisson", population.cohort_size / population.num_clients)

    @staticmethod
    def _size(population: Population, rng: np.random.Generator) -> int:
        """The size of a round's cohort, the first draw of the generator: it is needed without the clients, too."""
        return int(rng.binomial(population.num_clients, population.cohort_size / population.num_clients))

    def _largest(self, population: Population) -> int:
        """A size that no cohort of the run exceeds, equal for almost every seed, to avoid recompilation.

        P(more than k) <= exp(-S) (e S / k)^k for k > S, Chernoff's bound, is below 1e-12 at the size found. The sizes
        of this run's rounds are drawn as well, so that no cohort exceeds it.
        """
        mean, k = population.cohort_size, population.cohort_size + 1
        while k < population.num_clients and k * (np.log(mean / k) + 1) - mean > np.log(1e-12):
            k += 1
        drawn = (self._size(population, population.generator(COHORT, r)) for r in range(population.rounds))
        return max(min(k, population.num_clients), *drawn)


@dataclass(frozen=True)
class RoundRobin(ParticipationPolicy):
    """All clients in a fixed order: shuffled once, then S in each round, and from the start after the last one.

    The rounds of a client are as far apart as possible. The last cohort of a pass is smaller if S does not divide N.

    Example:
        >>> fedrax.Settings(participation=fedrax.participation.RoundRobin()).participation
        RoundRobin()
    """

    uses_sample_counts: ClassVar[bool] = False

    def init(self, population: Population) -> list[np.ndarray]:
        """The cohorts of one pass over all clients."""
        order = population.generator(SHUFFLE).permutation(population.num_clients)
        return np.split(order, range(population.cohort_size, population.num_clients, population.cohort_size))

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The next cohort of the pass."""
        return np.sort(state[round % len(state)])

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """S clients, and fewer in the last round of a pass."""
        sizes = {len(cohort) for cohort in state}
        return CohortSizes(max(sizes), len(sizes) > 1, float(population.cohort_size))

    def sampling(self, population: Population) -> CohortSampling:
        """No amplification: the cohorts are known in advance."""
        return CohortSampling()


@dataclass(frozen=True)
class FixedList(ParticipationPolicy):
    """Sample the cohort uniformly from a list of clients; all of them if the list is no longer than the cohort.

    Example:
        >>> fedrax.Settings(participation=fedrax.participation.FixedList((0, 3, 4))).participation.clients
        (0, 3, 4)
    """

    clients: tuple[int, ...]
    """Client numbers."""
    uses_sample_counts: ClassVar[bool] = False

    def init(self, population: Population) -> np.ndarray:
        """The list, checked and sorted."""
        clients, most = self.clients, population.num_clients
        if not clients or len(set(clients)) < len(clients) or min(clients) < 0 or max(clients) >= most:
            raise FedraxError(f"FixedList.clients must hold different clients from 0 to {most - 1}")
        return np.sort(np.array(clients, np.int64))

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """S of the list's clients."""
        return sample_among(rng, state, min(population.cohort_size, len(state)))

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """S clients, or all of the list."""
        return CohortSizes(min(population.cohort_size, len(state)))

    def sampling(self, population: Population) -> CohortSampling:
        """A fixed size without replacement, among the list's clients."""
        return CohortSampling("fixed", min(1.0, population.cohort_size / len(self.clients)))


def _distinct(population: Population, largest: int) -> int:
    """Number of different clients in a run under uniform sampling: the mean plus five standard deviations.

    A client is absent from all rounds with probability (1 - S / N)^R, and these events are negatively correlated.
    """
    clients = population.num_clients
    absent = (1 - population.cohort_size / clients) ** population.rounds
    bound = int(clients * (1 - absent) + 5 * np.sqrt(clients * absent * (1 - absent))) + 1
    return min(bound, population.rounds * largest)


Participation = (
    Uniform
    | WeightedBySamples
    | Poisson
    | Availability
    | FixedList
    | RoundRobin
    | Asynchronous
    | PowerOfChoice
    | Oort
    | ImportanceSampling
    | ParticipationPolicy
)
"""Any participation policy: those of the library, or an own subclass of :class:`ParticipationPolicy`."""
UNIFORM = Uniform()
"""The default policy."""
