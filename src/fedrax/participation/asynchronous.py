"""Asynchronous clients: which start between two server steps, and when their uploads arrive.

An event-driven simulation of the times of FedBuff's server (Nguyen et al. 2022, Algorithm 1). Which upload belongs to
which server step follows from how long clients take, whatever they compute. A round of the simulator is therefore the
set of clients that start between two server steps, and each upload has a delay: the number of server steps until it
arrives.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedrax.config.hyperparameters import PositiveInt
from fedrax.data.readers.table_files import read_csv_columns
from fedrax.errors import FedraxError
from fedrax.participation.policy import ARRIVALS, CohortSizes, ParticipationPolicy, Population

MAX_DELAY = 1000
"""Server steps after the last round for which the simulation continues; uploads that arrive later get the delay of
arriving then. No server step uses them."""
MAX_ROUNDS = 1_000_000
"""Limit of the rounds of a run with a trace of durations: all arrivals are computed before the first round."""
MAX_SECONDS = 1e15
"""Limit of a client's duration: float64 still resolves about a tenth of a second in sums of such numbers."""


@dataclass(frozen=True)
class Arrivals:
    """The clients that start in each of R rounds, and the delays of their uploads.

    Example:
        >>> one = np.array([0])
        >>> fedrax.participation.Arrivals([one, one], [one + 1, one + 5], np.array([0.5, 2.0])).longest_delay_in_run
        1
    """

    cohorts: list[np.ndarray]
    """The clients that start in each round, int64, sorted."""
    delays: list[np.ndarray]
    """The delay of each one's upload in server steps, int32, in the same order; 0: it arrives before the next server
    step. An upload that has not arrived ``MAX_DELAY`` steps after the last round counts as arriving then."""
    clock: np.ndarray
    """Simulated seconds from the start at which the server step of each round is taken, float64 [R]."""

    @property
    def longest_delay_in_run(self) -> int:
        """The longest delay among the uploads that arrive within the run; no server step uses the others."""
        within = [own[r + own < len(self.delays)] for r, own in enumerate(self.delays)]
        return max((int(own.max()) for own in within if len(own)), default=0)


class _Schedule(NamedTuple):
    """The trace and the arrivals, computed before the first round."""

    durations: list[np.ndarray]
    """Seconds that each client takes, one array a client."""
    arrivals: Arrivals


@dataclass(frozen=True)
class Asynchronous(ParticipationPolicy):
    """Clients work at their own pace, for methods whose uploads may arrive late (FedBuff).

    ``concurrency`` clients work at any time: one that finishes is replaced at once by another that is drawn uniformly.
    A round is a server step, on the next ``cohort_size`` uploads to arrive. The trace is a CSV file with columns
    ``client`` and ``seconds``, the time from a client's start to the arrival of its upload; several lines of a client
    are used in order and repeat. Events have the simulated ``clock``.

    Example:
        >>> fedrax.participation.Asynchronous("durations.csv", concurrency=50).concurrency
        50
    """

    trace: Path
    """The CSV file."""
    concurrency: PositiveInt = 20
    """M, the number of clients that work at any time."""
    uses_sample_counts: ClassVar[bool] = False

    def init(self, population: Population) -> _Schedule:
        """The trace, and the arrivals of all rounds."""
        durations, rng = read_durations(self.trace, population.num_clients), population.generator(ARRIVALS)
        return _Schedule(durations, arrivals(self, durations, population.rounds, population.cohort_size, rng))

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The clients that start in the round."""
        return state.arrivals.cohorts[round]

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """The largest number of clients that start in a round; the expected size is the buffer's."""
        largest = max(len(cohort) for cohort in state.arrivals.cohorts)
        return CohortSizes(largest, True, float(population.cohort_size))

    def arrivals(self, state: Any) -> Arrivals:
        """The arrivals of all rounds."""
        return state.arrivals

    def trace_data(self, state: Any) -> Sequence[np.ndarray]:
        """The durations of each client."""
        return state.durations


def arrivals(
    participation: Asynchronous, durations: list[np.ndarray], rounds: int, buffer: int, rng: np.random.Generator
) -> Arrivals:
    """Simulate ``concurrency`` clients at any time; the server steps whenever ``buffer`` uploads have arrived.

    A client that has finished is replaced at once by one that is drawn uniformly from those that are neither working
    nor in the buffer, and which starts from the newest model. Clients that finish at the same time do so in the order
    in which they started. A longer run has the same first rounds, except for delays that were cut.

    Args:
        participation: the policy.
        durations: seconds that each client takes, see :func:`read_durations`.
        rounds: R, the number of server steps.
        buffer: uploads that the server waits for.
        rng: draws the clients.

    Returns:
        The cohorts, delays and times of all rounds.
    """
    concurrency, num_clients = participation.concurrency, len(durations)
    if rounds > MAX_ROUNDS:
        raise FedraxError(f"a run with a trace of durations has at most {MAX_ROUNDS:,} rounds, not {rounds:,}")
    if concurrency + buffer - 1 > num_clients:
        raise FedraxError(
            f"concurrency {concurrency} with a buffer of {buffer} uploads needs {concurrency + buffer - 1} clients or"
            f" more: there are {num_clients}"
        )
    seconds = [cycle(own.tolist()) for own in durations]
    delays: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    """For each round the clients that start in it, with the delays of their uploads."""
    clock, busy, buffered, pending = np.zeros(rounds), set(), [], 0
    """``busy``: clients that work or whose upload is in the buffer. ``pending``: uploads without a known delay."""
    heap: list[tuple[float, int, int, int]] = []
    """Working clients: the time of the end, the order of the start, the client, and the server step of the start."""

    def start(now: float, step: int, order: int) -> int:
        client = next(c for c in _draws(rng, num_clients) if c not in busy)
        busy.add(client)
        heapq.heappush(heap, (now + next(seconds[client]), order, client, step))
        return int(step < rounds)

    step = 0
    for order in range(concurrency):
        pending += start(0.0, step, order)
    order = concurrency
    while step < rounds or pending:
        if step > rounds + MAX_DELAY:  # some clients may take longer than the whole run
            for *_, client, started in heap:
                if started < rounds:
                    delays[started].append((client, step - started))
            break
        now, _, client, started = heapq.heappop(heap)
        if started < rounds:
            delays[started].append((client, step - started))
            pending -= 1
        buffered.append(client)
        if len(buffered) == buffer:
            if step < rounds:
                clock[step] = now
            step += 1
            busy.difference_update(buffered)
            buffered.clear()
        pending += start(now, step, order)
        order += 1
    pairs = [np.array(sorted(round), np.int64).reshape(-1, 2) for round in delays]
    return Arrivals([p[:, 0] for p in pairs], [p[:, 1].astype(np.int32) for p in pairs], clock)


def _draws(rng: np.random.Generator, num_clients: int) -> Iterator[int]:
    """An endless sequence of uniformly drawn clients."""
    while True:
        yield int(rng.integers(num_clients))


def read_durations(path: Path, num_clients: int) -> list[np.ndarray]:
    """The seconds that each client takes, float64, in the order of the file; raises FedraxError for a malformed one."""
    client, seconds = read_csv_columns(path, "the trace of durations", ["client", "seconds"])
    numbers = client.dtype.is_integer() and seconds.dtype.is_numeric() and not client.null_count()
    if not numbers or seconds.null_count():
        raise FedraxError(f"the trace of durations {path} must hold whole numbers of clients and numbers of seconds")
    owners, values = client.to_numpy(), seconds.to_numpy().astype(float)
    if not ((values > 0) & (values <= MAX_SECONDS)).all():
        raise FedraxError(f"the trace of durations {path} must hold seconds above 0, up to {MAX_SECONDS:g}")
    if len(owners) and (owners.min() < 0 or owners.max() >= num_clients):
        raise FedraxError(f"the trace of durations {path} must name clients 0 to {num_clients - 1}")
    missing = np.setdiff1d(np.arange(num_clients), owners)
    if len(missing):
        raise FedraxError(f"the trace of durations {path} has no line for client {missing[0]}")
    order = np.argsort(owners, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(owners, minlength=num_clients))[:-1])
