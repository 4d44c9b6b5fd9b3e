"""Cohorts and stragglers of a run, from a participation policy or from given sequences.

Everything is drawn on the host from counters (seed, stream, round), so that each round is drawn independently of the
others: a resumed run, another algorithm or another number of devices has the same cohorts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedrax.errors import FedraxError
from fedrax.participation.asynchronous import Arrivals
from fedrax.participation.policy import (
    CANDIDATES,
    COHORT,
    STRAGGLERS,
    CohortSizes,
    ParticipationPolicy,
    Population,
    generator,
    sample_among,
)
from fedrax.privacy.accounting import CohortSampling


class _Reports(dict[str, np.ndarray]):
    """What clients reported; reading anything else raises an error that lists it."""

    def __missing__(self, name: str) -> np.ndarray:
        raise FedraxError(f"clients do not report info[{name!r}] to the policy, but {', '.join(self)}")


class CohortSampler:
    """Draws the cohorts and stragglers of a run.

    Args:
        policy: which clients are sampled.
        population: the clients, and the settings of the run.
        stragglers: the share of each cohort that does only part of its local work.
        given: the cohort of each round, instead of the policy.
    """

    def __init__(
        self,
        policy: ParticipationPolicy,
        population: Population,
        stragglers: float = 0.0,
        given: Sequence[Any] | np.ndarray | None = None,
    ):
        self.policy, self.population, self.stragglers = policy, population, stragglers
        self.given = None if given is None else [np.asarray(cohort) for cohort in given]
        self.state: Any = None
        """The policy's state; that of an adaptive policy after ``observed`` rounds."""
        self.observed = 0
        """Number of rounds that an adaptive policy has observed."""
        if self.given is not None:
            self._check_given(self.given)
        elif population.cohort_size > self.num_clients:
            raise FedraxError(
                f"cannot sample {population.cohort_size} clients a round: there are {self.num_clients}: set cohort_size"
                f" to {self.num_clients} at most"
            )
        else:
            self.state = self._canonical(policy.init(population))
        if len(empty := np.flatnonzero(self.sizes == 0)):
            raise FedraxError(f"client {empty[0]} has no samples ({len(empty)} such clients)")

    def _check_given(self, cohorts: list[np.ndarray]) -> None:
        """Raise FedraxError for too few cohorts, only empty ones, or one with invalid or duplicate clients."""
        if len(cohorts) < self.rounds:
            raise FedraxError(f"{len(cohorts)} cohorts are given for {self.rounds} rounds")
        for r, cohort in enumerate(cohorts):
            if not self._is_cohort(np.sort(cohort)):
                raise FedraxError(
                    f"the given cohort of round {r} must hold different clients from 0 to {self.num_clients - 1}"
                )
        if not any(cohort.size for cohort in cohorts[: self.rounds]):
            raise FedraxError("none of the given cohorts holds a client")

    def _is_cohort(self, cohort: np.ndarray) -> bool:
        """Whether a sorted array has distinct clients from 0 to N - 1."""
        if cohort.ndim != 1 or not cohort.size:
            return cohort.ndim == 1
        inside = cohort.dtype.kind in "iu" and cohort[0] >= 0 and cohort[-1] < self.num_clients
        return bool(inside and (cohort[1:] > cohort[:-1]).all())

    def _canonical(self, state: Any) -> Any:
        """The state of an adaptive policy as arrays with dtypes that checkpoints preserve."""
        if not self.adaptive:
            return state
        return jax.tree.map(lambda a: np.asarray(a, jax.dtypes.canonicalize_dtype(np.asarray(a).dtype)), state)

    @property
    def sizes(self) -> np.ndarray:
        """Number of training samples of each client, int [N]."""
        return self.population.sizes

    @property
    def num_clients(self) -> int:
        """N, the number of clients."""
        return self.population.num_clients

    @property
    def rounds(self) -> int:
        """R, the number of rounds."""
        return self.population.rounds

    @property
    def adaptive(self) -> bool:
        """Whether cohorts depend on what clients reported in earlier rounds."""
        return self.given is None and self.policy.adaptive

    @property
    def asks(self) -> bool:
        """Whether clients are asked for their loss before a round."""
        return self.given is None and self.policy.asks

    @property
    def unbiased(self) -> bool:
        """Whether inverse probabilities weight the uploads."""
        return self.given is None and self.policy.unbiased

    @property
    def independent(self) -> bool:
        """Whether each client is sampled independently of the others."""
        return self.given is None and self.policy.independent

    @property
    def sampling(self) -> CohortSampling:
        """How cohorts are drawn, for privacy amplification by sampling."""
        return CohortSampling() if self.given is not None else self.policy.sampling(self.population)

    @property
    def uses_sample_counts(self) -> bool:
        """Whether cohorts depend on the clients' numbers of samples."""
        return self.given is None and self.policy.uses_sample_counts

    @cached_property
    def cohort_sizes(self) -> CohortSizes:
        """How many clients the rounds have."""
        if self.given is None:
            return self.policy.cohort_sizes(self.state, self.population)
        cohorts = self.given[: self.rounds]
        sizes = {len(cohort) for cohort in cohorts}
        return CohortSizes(max(sizes), len(sizes) > 1, None, len(np.unique(np.concatenate(cohorts))))

    @property
    def largest(self) -> int:
        """The most clients that any round can have."""
        return self.cohort_sizes.largest

    @property
    def varying(self) -> bool:
        """Whether rounds differ in their number of clients."""
        return self.cohort_sizes.varying

    @property
    def expected(self) -> float | None:
        """The expected cohort size if methods use it instead of the actual one."""
        return self.cohort_sizes.expected

    @property
    def most_clients(self) -> int:
        """An upper bound on the number of different clients in a run, for almost every seed."""
        found = self.cohort_sizes.distinct
        return self.rounds * self.largest if found is None else found

    @property
    def trace_data(self) -> Sequence[np.ndarray]:
        """The contents of the file that the policy names; empty without one."""
        return () if self.given is not None else self.policy.trace_data(self.state)

    @property
    def arrivals(self) -> Arrivals | None:
        """Delays of uploads under asynchronous participation, otherwise None."""
        return None if self.given is not None else self.policy.arrivals(self.state)

    @property
    def delays(self) -> dict[str, np.ndarray]:
        """``delay``, int32 [R, S], under asynchronous participation; otherwise empty."""
        arrivals = self.arrivals
        if arrivals is None:
            return {}
        delays = np.zeros((self.rounds, self.largest), np.int32)
        for row, own in zip(delays, arrivals.delays, strict=True):
            row[: len(own)] = own
        return {"delay": delays}

    @property
    def clock(self) -> np.ndarray | None:
        """Simulated time of the end of each round in seconds, [R]; None without a trace of durations."""
        arrivals = self.arrivals
        return None if arrivals is None else arrivals.clock

    def _generator(self, stream: int, round: int) -> np.random.Generator:
        """Random numbers of a round for one purpose."""
        return generator(self.population.seed, stream, round)

    def cohort(self, round: int) -> np.ndarray:
        """The clients of a round, int64 [S], sorted unless given; possibly none under Poisson sampling."""
        if self.given is not None:
            return self.given[round].astype(np.int64)
        if self.adaptive and round != self.observed:
            raise FedraxError(
                f"{self._name} samples round {round + 1} from what clients reported in earlier rounds, so its cohort is"
                " known only during the run: choose another participation"
            )
        drawn = np.asarray(self.policy.sample(self.state, round, self.population, self._generator(COHORT, round)))
        cohort = np.sort(drawn)
        if not self._is_cohort(cohort) or len(cohort) > self.largest:
            raise FedraxError(
                f"{self._name}.sample must return at most {self.largest} different clients from 0 to"
                f" {self.num_clients - 1}, and returned {drawn.tolist()} in round {round + 1}"
            )
        if len(cohort) < self.largest and not self.varying:
            raise FedraxError(
                f"{self._name}.sample must return {self.largest} clients, and returned {len(cohort)} in round"
                f" {round + 1}: return CohortSizes with varying=True from cohort_sizes"
            )
        return cohort.astype(np.int64)

    @property
    def _name(self) -> str:
        """The policy's class name, for messages."""
        return type(self.policy).__name__

    def clients_to_ask(self, round: int) -> np.ndarray:
        """The clients that are asked for their loss before a round, int64 [d], sorted."""
        rng = self._generator(CANDIDATES, round)
        asked = np.asarray(self.policy.clients_to_ask(self.state, round, self.population, rng))
        if not self._is_cohort(np.sort(asked)):
            raise FedraxError(
                f"{self._name}.clients_to_ask must return different clients from 0 to {self.num_clients - 1}, and"
                f" returned {asked.tolist()} in round {round + 1}"
            )
        return np.sort(asked).astype(np.int64)

    def observe_losses(self, round: int, clients: np.ndarray, losses: np.ndarray) -> None:
        """Update the policy with the losses of the clients that were asked."""
        self.state = self._canonical(self.policy.observe_losses(self.state, round, clients, losses))

    def weights(self, round: int, cohort: np.ndarray) -> np.ndarray:
        """The aggregation weights of a cohort, float64 [S]: shares of it, or inverse-probability weights."""
        if not self.unbiased:
            return self.population.cohort_shares(cohort)
        inclusion = np.asarray(self.policy.inclusion(self.state, round, self.population), float)
        valid = inclusion.shape == (self.num_clients,) and bool(((inclusion > 0) & (inclusion <= 1)).all())
        if not valid:
            raise FedraxError(
                f"{self._name}.inclusion must return a probability above 0 for each of {self.num_clients} clients"
            )
        return self.population.shares[cohort] / inclusion[cohort]

    def observe(self, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> None:
        """Update an adaptive policy with the reports of a round, see :meth:`ParticipationPolicy.observe`."""
        self.state = self._canonical(self.policy.observe(self.state, round, clients, _Reports(info)))
        self.observed = round + 1

    def skip(self, round: int) -> None:
        """Go on to the next round without reports."""
        self.observed = round + 1

    def restore(self, state: Any, rounds: int) -> None:
        """Set the state of an adaptive policy after ``rounds`` rounds."""
        self.state, self.observed = jax.tree.map(np.asarray, state), rounds

    def cohort_among(self, round: int, clients: np.ndarray) -> np.ndarray:
        """A uniform sample of at most S of ``clients`` (sorted); for all clients equal to the cohort of ``Uniform``."""
        return sample_among(self._generator(COHORT, round), clients, min(self.population.cohort_size, len(clients)))

    def work(self, round: int, size: int) -> np.ndarray:
        """The fraction of its local work that each client of a cohort of ``size`` does, float [S] in (0, 1].

        A fixed share of the cohort are stragglers. If clients are sampled independently, each is a straggler
        independently, too: privacy accounting requires that a client's work is independent of the other clients.
        """
        rng, share = self._generator(STRAGGLERS, round), np.ones(size)
        if self.independent:
            slow = np.flatnonzero(rng.random(size) < self.stragglers)
        else:
            slow = rng.choice(max(size, 1), int(np.floor(self.stragglers * size + 0.5)), replace=False)
        share[slow] = 1 - rng.random(len(slow))
        return share

    def for_rounds(self, rounds: int) -> CohortSampler:
        """A sampler of the same policy with seed 0 and ``rounds`` rounds, at most the number of given cohorts."""
        if self.given is not None:
            rounds = min(rounds, self.rounds)
        population = replace(self.population, seed=0, rounds=rounds)
        return CohortSampler(self.policy, population, self.stragglers, self.given)
