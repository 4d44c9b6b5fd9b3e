"""Who takes part in which round, and how much of the work each does.

Everything here is drawn on the host from counters (seed, stream, round), so any round can be drawn on its own:
a resumed run, another algorithm or another number of devices sees the same cohorts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np

from fedrax.errors import FedraxError
from fedrax.participation.asynchronous import Arrivals, arrivals, read_durations
from fedrax.participation.availability import check_list, read_trace
from fedrax.participation.policies import Asynchronous, Availability, FixedList, Poisson, Turns, WeightedBySamples
from fedrax.simulation.settings import Script, Settings

_COHORT, _STRAGGLER, _ARRIVALS, _TURNS = 1, 2, 3, 4


def generator(seed: int, stream: int, round: int) -> np.random.Generator:
    """An independent generator for each (seed, stream, round)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (stream << 40) | round], np.uint64)))


class Sampler:
    """Draws cohorts and stragglers."""

    def __init__(self, settings: Settings, sizes: np.ndarray, script: Script | None = None):
        if settings.cohort_size == Settings.cohort_size:
            settings = replace(settings, cohort_size=min(Settings.cohort_size, len(sizes)))
        self.settings, self.sizes, self.num_clients = settings, sizes, len(sizes)
        self.given = None if script is None or script.cohorts is None else [np.asarray(c) for c in script.cohorts]
        self.trace: list[np.ndarray] | None = None
        self.from_file: list[np.ndarray] = []
        """What the settings name a file for."""
        if self.given is not None:
            self._check_given(self.given)
        elif settings.cohort_size > self.num_clients:
            raise FedraxError(
                f"cannot sample {settings.cohort_size} clients a round: there are {self.num_clients}: set cohort_size"
                f" to {self.num_clients} at most"
            )
        elif isinstance(settings.participation, Availability):
            self.trace = self.from_file = read_trace(settings.participation, self.num_clients)
        elif isinstance(settings.participation, FixedList):
            self.trace = [check_list(settings.participation.clients, self.num_clients)]
        elif isinstance(settings.participation, Turns):
            order = generator(settings.seed, _TURNS, 0).permutation(self.num_clients)
            self.trace = np.split(order, range(settings.cohort_size, self.num_clients, settings.cohort_size))
        self.arrivals: Arrivals | None = None
        if self.given is None and isinstance(settings.participation, Asynchronous):
            self.from_file = read_durations(settings.participation, self.num_clients)
            numbers, rng = (settings.rounds, settings.cohort_size), generator(settings.seed, _ARRIVALS, 0)
            self.arrivals = arrivals(settings.participation, self.from_file, *numbers, rng)
        self.empty = np.flatnonzero(sizes == 0)
        if len(self.empty):
            raise FedraxError(f"client {self.empty[0]} has no samples ({len(self.empty)} such clients)")

    def _check_given(self, cohorts: list[np.ndarray]) -> None:
        if len(cohorts) < self.settings.rounds:
            raise FedraxError(f"{len(cohorts)} cohorts are given for {self.settings.rounds} rounds")
        for r, cohort in enumerate(cohorts):
            numbers = cohort.ndim == 1 and cohort.size and cohort.dtype.kind in "iu"
            inside = numbers and cohort.min() >= 0 and cohort.max() < self.num_clients
            if not inside or len(np.unique(cohort)) != cohort.size:
                raise FedraxError(
                    f"the given cohort of round {r} must hold different clients from 0 to {self.num_clients - 1}, at"
                    " least one"
                )

    @property
    def largest(self) -> int:
        """The most clients any round can have."""
        if self.given is not None:
            return max(len(cohort) for cohort in self.given[: self.settings.rounds])
        if self.arrivals is not None:
            return max(len(cohort) for cohort in self.arrivals.cohorts)
        if self.trace is not None:
            return min(self.settings.cohort_size, max(len(row) for row in self.trace))
        return self._largest_by_chance if self.by_chance else self.settings.cohort_size

    @property
    def by_chance(self) -> bool:
        """Whether each client joins independently of the others."""
        return self.given is None and isinstance(self.settings.participation, Poisson)

    @property
    def _unequal(self) -> bool:
        """Whether some clients are likelier than others."""
        return isinstance(self.settings.participation, WeightedBySamples)

    @cached_property
    def _chances(self) -> np.ndarray:
        """Of each client to be the first that is drawn, where some are likelier."""
        return self.sizes / self.sizes.sum()

    @property
    def expected(self) -> float | None:
        """The S that was asked for, where a round that is drawn may have fewer clients or more."""
        may_vary = isinstance(self.settings.participation, Poisson | Asynchronous | Availability | Turns)
        return float(self.settings.cohort_size) if may_vary and self.given is None else None

    @property
    def delays(self) -> dict[str, np.ndarray]:
        """``delay``, int32 [R, S], where uploads arrive late."""
        if self.arrivals is None:
            return {}
        made = np.zeros((self.settings.rounds, self.largest), np.int32)
        for row, own in zip(made, self.arrivals.delays, strict=True):
            row[: len(own)] = own
        return {"delay": made}

    @property
    def clock(self) -> np.ndarray | None:
        """Simulated seconds at which each round ends, [R]; None where nothing says how long clients take."""
        return None if self.arrivals is None else self.arrivals.clock

    def _size_by_chance(self, rng: np.random.Generator) -> int:
        """Of a Poisson cohort; drawn first, so that a round's size is known without its clients."""
        return int(rng.binomial(self.num_clients, self.settings.cohort_size / self.num_clients))

    @cached_property
    def _largest_by_chance(self) -> int:
        """Room for every round's cohort: of one size for all seeds, unless one draws what happens once in 1e12 rounds.

        P(more than k) <= exp(-S) (e S / k)^k for k > S, Chernoff's bound. The sizes themselves are looked at too, so
        that no cohort is ever cut.
        """
        mean, k = self.settings.cohort_size, self.settings.cohort_size + 1
        while k < self.num_clients and k * (np.log(mean / k) + 1) - mean > np.log(1e-12):
            k += 1
        drawn = (self._size_by_chance(generator(self.settings.seed, _COHORT, r)) for r in range(self.settings.rounds))
        return max(min(k, self.num_clients), *drawn)

    @property
    def most_clients(self) -> int:
        """Different clients that take part in all rounds together, of almost any seed.

        Exactly that where cohorts are given. Where each client is as likely as another, five deviations above the mean:
        (1 - S / N)^R of them never come, and that one does not makes it no likelier that another does not either.
        """
        rounds, clients = self.settings.rounds, self.num_clients
        if self.given is not None:
            return len(np.unique(np.concatenate(self.given[:rounds])))
        if self.trace is not None or self.arrivals is not None or self._unequal:
            return rounds * self.largest
        absent = (1 - self.settings.cohort_size / clients) ** rounds
        likely = int(clients * (1 - absent) + 5 * np.sqrt(clients * absent * (1 - absent))) + 1
        return min(likely, rounds * self.largest)

    @property
    def varying(self) -> bool:
        """Whether rounds can differ in their number of clients."""
        if self.given is not None:
            return len({len(cohort) for cohort in self.given[: self.settings.rounds]}) > 1
        if self.by_chance or self.arrivals is not None:
            return True
        return self.trace is not None and len({min(len(row), self.settings.cohort_size) for row in self.trace}) > 1

    def cohort(self, round: int) -> np.ndarray:
        """The clients of a round, int64 [S], sorted unless given; of a Poisson cohort maybe none."""
        if self.given is not None:
            return self.given[round].astype(np.int64)
        rng, size = generator(self.settings.seed, _COHORT, round), self.settings.cohort_size
        if self.arrivals is not None:
            return self.arrivals.cohorts[round]
        if self.trace is not None:
            return self.cohort_among(round, self.trace[round % len(self.trace)])
        if self.by_chance:  # a uniform draw of a binomial number: the same as a coin for each client
            size = self._size_by_chance(rng)
        if self._unequal:
            return np.sort(rng.choice(self.num_clients, size, replace=False, p=self._chances))
        return np.sort(rng.choice(self.num_clients, size, replace=False))

    def cohort_among(self, round: int, clients: np.ndarray) -> np.ndarray:
        """The clients of a round where only ``clients`` (sorted) can be asked; with all of them, those of a draw
        without replacement.
        """
        rng, size = generator(self.settings.seed, _COHORT, round), min(self.settings.cohort_size, len(clients))
        return np.sort(rng.choice(clients, size, replace=False))

    def work(self, round: int, size: int) -> np.ndarray:
        """The share of the local work each client of the cohort does: float [S] in (0, 1].

        Of S clients so many are slow; where each joins by a coin of its own, each is slow by another one, for nothing
        of a client may then depend on who else came.
        """
        rng, share = generator(self.settings.seed, _STRAGGLER, round), np.ones(size)
        if self.by_chance:
            slow = np.flatnonzero(rng.random(size) < self.settings.stragglers)
        else:
            slow = rng.choice(max(size, 1), int(np.floor(self.settings.stragglers * size + 0.5)), replace=False)
        share[slow] = 1 - rng.random(len(slow))
        return share
