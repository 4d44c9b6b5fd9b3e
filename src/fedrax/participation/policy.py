"""The protocol of participation policies: how the clients of each round are sampled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from fedrax.privacy.accounting import CohortSampling

if TYPE_CHECKING:
    from fedrax.participation.asynchronous import Arrivals

COHORT, STRAGGLERS, ARRIVALS, SHUFFLE, CANDIDATES = 1, 2, 3, 4, 5
"""Streams of random numbers: cohorts, stragglers, asynchronous arrivals, the order of :class:`RoundRobin`, and the
clients that are asked for their loss."""


def generator(seed: int, stream: int, round: int) -> np.random.Generator:
    """An independent NumPy generator for each (seed, stream, round)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (stream << 40) | round], np.uint64)))


@dataclass(frozen=True, eq=False)
class Population:
    """The clients that a policy samples from, and the settings of the run that matter for it.

    Example:
        >>> population = fedrax.participation.Population(np.array([5, 3, 8]), cohort_size=2, rounds=10, seed=0)
        >>> population.num_clients
        3
    """

    sizes: np.ndarray
    """Number of training samples of each client, int [N]."""
    cohort_size: int
    """S, the number of clients to sample in a round."""
    rounds: int
    """R, the number of rounds of the run."""
    seed: int
    """The seed of the run."""
    weights: Literal["uniform", "samples"] = "uniform"
    """Aggregation weights, as in ``Settings``."""

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return len(self.sizes)

    @property
    def shares(self) -> np.ndarray:
        """The aggregation weights p_i among all clients, float [N], which sum to one."""
        return self.cohort_shares(np.arange(self.num_clients))

    def cohort_shares(self, clients: np.ndarray) -> np.ndarray:
        """The aggregation weights among some clients.

        Args:
            clients: client numbers, int [S].

        Returns:
            Weights that sum to one, float [S].
        """
        parts = self.sizes[clients].astype(float) if self.weights == "samples" else np.ones(len(clients))
        return parts / parts.sum()

    def generator(self, stream: int, round: int = 0) -> np.random.Generator:
        """Random numbers that depend on the run's seed, a stream and a round only.

        Args:
            stream: a number of the policy's choice; numbers below 16 are reserved.
            round: the round, from 0.

        Returns:
            A NumPy generator; the same arguments give the same numbers.
        """
        return generator(self.seed, stream, round)


class CohortSizes(NamedTuple):
    """How many clients the rounds of a run have, known before the first round.

    Example:
        >>> fedrax.participation.CohortSizes(largest=10, varying=True, expected=8.0).largest
        10
    """

    largest: int
    """The most clients that any round can have: arrays of a compiled round have this size."""
    varying: bool = False
    """Whether rounds differ in their number of clients."""
    expected: float | None = None
    """The size that methods are told in place of a round's actual one; None: the actual one. Differentially private
    methods divide by it where the actual size is random."""
    distinct: int | None = None
    """The most different clients that participate in the whole run; None: ``rounds * largest``. Memory for client
    states is reserved for so many."""


@dataclass(frozen=True)
class ParticipationPolicy(ABC):
    """Base class of participation policies: which clients form the cohort of a round.

    A policy is a frozen dataclass whose fields are its settings; ``Settings.participation`` takes an object of it. Only
    ``sample`` must be defined. What a policy needs beyond its fields (a file that it has read, the last loss of each
    client) is its *state*: ``init`` makes it before the first round, ``sample`` reads it, and ``observe`` returns the
    next one. A policy that defines ``observe`` is *adaptive*: it is told what the clients of each round reported, and
    its rounds are run one at a time. Its state must then be a pytree of NumPy arrays, which checkpoints contain. No
    privacy guarantee holds for an adaptive policy, since what it samples depends on the clients' data: private methods
    raise.

    A policy that defines ``clients_to_ask`` is adaptive, too: before a round, these clients receive the current model
    and reply with their loss, and ``observe_losses`` puts the losses into the state that ``sample`` reads. The messages
    are part of the bytes in events. A policy that defines ``inclusion`` knows the probability of each client to be in
    the cohort, and the inverses weight the uploads.

    Cohorts should be drawn from the generator that ``sample`` receives. It depends on the seed and the round only, so
    that a resumed run and other algorithms see the same cohorts.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Largest(fedrax.participation.ParticipationPolicy):
        ...     def sample(self, state, round, population, rng):
        ...         return np.argsort(-population.sizes)[: population.cohort_size]
        >>> fedrax.Settings(participation=Largest()).participation
        Largest()
    """

    independent: ClassVar[bool] = False
    """Whether each client is sampled independently of all others, as under Poisson sampling. Then stragglers are drawn
    independently, too."""
    uses_sample_counts: ClassVar[bool] = True
    """Whether cohorts depend on the clients' numbers of samples. The server then learns about them, which methods that
    protect single samples do not cover: they raise."""

    @property
    def adaptive(self) -> bool:
        """Whether cohorts depend on reports: whether ``observe`` or ``clients_to_ask`` is defined."""
        return type(self).observe is not ParticipationPolicy.observe or self.asks

    @property
    def asks(self) -> bool:
        """Whether clients are asked for their loss before a round, i.e. ``clients_to_ask`` is defined."""
        return type(self).clients_to_ask is not ParticipationPolicy.clients_to_ask

    @property
    def unbiased(self) -> bool:
        """Whether inverse probabilities weight the uploads, i.e. ``inclusion`` is defined."""
        return type(self).inclusion is not ParticipationPolicy.inclusion

    def init(self, population: Population) -> Any:
        """The state before the first round; None by default.

        Args:
            population: the clients of the run.

        Returns:
            Anything that ``sample`` needs; a pytree of NumPy arrays where the policy is adaptive.
        """
        return None

    @abstractmethod
    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The clients of a round.

        Args:
            state: what ``init`` or the last ``observe`` returned.
            round: the round, from 0.
            population: the clients of the run.
            rng: random numbers of this round.

        Returns:
            Different client numbers, int [S]; their order does not matter.
        """

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> Any:
        """The state after a round, from what its clients reported.

        Args:
            state: the state before the round.
            round: the round, from 0.
            clients: the clients of the round, int [S], in ascending order.
            info: what each of them reported, by name, float [S] each, in the order of ``clients``: "loss", the mean
                loss along the local steps, for methods with local steps; "upload_norm", the Euclidean norm of the
                upload (of the last phase); and the other entries of the method's info.

        Returns:
            The next state.
        """
        return state

    def clients_to_ask(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The clients that are asked for their loss before the cohort of a round is sampled; by default none.

        Args:
            state: what ``init`` or the last ``observe`` returned.
            round: the round, from 0.
            population: the clients of the run.
            rng: random numbers of this round, independent of those of ``sample``.

        Returns:
            Different client numbers, int [d].
        """
        return np.zeros(0, int)

    def observe_losses(self, state: Any, round: int, clients: np.ndarray, losses: np.ndarray) -> Any:
        """The state with the answers of the clients that were asked, from which the cohort is sampled.

        Args:
            state: the state before the round.
            round: the round, from 0.
            clients: the clients that were asked, int [d], sorted.
            losses: the mean loss of the current global model on the training samples of each, float [d].

        Returns:
            The state for ``sample`` and ``observe``.
        """
        return state

    def inclusion(self, state: Any, round: int, population: Population) -> np.ndarray | None:
        """The probability pi_i of each client to be in the cohort of a round; None, the default: it is not used.

        With it, the aggregation weight of a client is p_i / pi_i, with p_i from ``population.shares``, in place of its
        share of the cohort. The sum of the weighted uploads is then an unbiased estimate of the weighted mean over all
        clients (Horvitz and Thompson 1952), and so are the losses in events.

        Args:
            state: the state that ``sample`` receives.
            round: the round, from 0.
            population: the clients of the run.

        Returns:
            Probabilities above 0, float [N], or None.
        """
        return None

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """How many clients rounds have; by default always ``cohort_size``.

        Args:
            state: what ``init`` returned.
            population: the clients of the run.

        Returns:
            Upper bounds for the whole run.
        """
        return CohortSizes(population.cohort_size)

    def sampling(self, population: Population) -> CohortSampling:
        """How cohorts are drawn, for privacy amplification by sampling; by default nothing is amplified.

        Args:
            population: the clients of the run.

        Returns:
            The kind of draw and its rate, see :class:`fedrax.privacy.accounting.CohortSampling`.
        """
        return CohortSampling("refilled")

    def arrivals(self, state: Any) -> Arrivals | None:
        """When uploads arrive, where clients work asynchronously; None: at the end of their round.

        Args:
            state: what ``init`` returned.

        Returns:
            The arrivals of all rounds, or None.
        """
        return None

    def trace_data(self, state: Any) -> Sequence[np.ndarray]:
        """The contents of the file that the policy's field ``trace`` names; empty without one.

        A resumed run is compared by these contents, not by the path.

        Args:
            state: what ``init`` returned.

        Returns:
            Arrays.
        """
        return ()


def sample_among(rng: np.random.Generator, clients: Any, size: int) -> np.ndarray:
    """``size`` of ``clients`` (int64 array, or N for all of 0 to N - 1), uniformly without replacement, sorted."""
    return np.sort(rng.choice(clients, size, replace=False))
