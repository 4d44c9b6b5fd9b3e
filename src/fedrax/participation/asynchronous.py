"""Clients that work at their own pace: who begins between two steps of the server, and when its upload arrives.

An event-driven simulation of FedBuff's server (Nguyen et al. 2022, Algorithm 1), of its times alone. Which upload
belongs to which step follows from how long clients take, whatever they compute; so a round of the simulator is what
begins between two steps of the server, and each upload is told how many steps later it arrives.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from fedrax.data.readers.csv_parquet import read_columns
from fedrax.errors import FedraxError
from fedrax.participation.policies import Asynchronous

LONGEST = 1000
"""Steps of the server after a run's last one for which uploads are followed that were begun in it."""
MOST = 1_000_000
"""Rounds of a run: all arrivals are known before the first one."""
MAX_SECONDS = 1e15
"""The longest that a client may take: of their sums a float still tells milliseconds apart, or nearly so."""


@dataclass(frozen=True)
class Arrivals:
    """Of R rounds: the clients that begin in each, and the steps of the server that pass until each one's upload."""

    cohorts: list[np.ndarray]
    """int64, sorted."""
    delays: list[np.ndarray]
    """int32, in the same order; 0: it arrives before the server's next step. An upload that has not arrived more than
    ``LONGEST`` steps after the run's last one counts as arriving then."""
    clock: np.ndarray
    """float64 [R]; seconds from the start at which the server takes the step that ends the round."""

    @property
    def longest_awaited(self) -> int:
        """The longest delay among the uploads that arrive within the run: no step takes the others."""
        within = [own[r + own < len(self.delays)] for r, own in enumerate(self.delays)]
        return max((int(own.max()) for own in within if len(own)), default=0)


def arrivals(
    participation: Asynchronous, durations: list[np.ndarray], rounds: int, buffer: int, rng: np.random.Generator
) -> Arrivals:
    """``concurrency`` clients at work at any time; the server steps whenever ``buffer`` uploads have arrived.

    A client that has finished is replaced at once by one drawn uniformly from those that are neither at work nor
    waiting in the buffer, which starts from the newest model. Those that finish at one time do so in the order in which
    they began. Another number of rounds leaves all earlier ones as they are, but for delays that are cut. durations:
    see :func:`read_durations`.
    """
    at_once, num_clients = participation.concurrency, len(durations)
    if rounds > MOST:
        raise FedraxError(f"a run with a trace of durations has at most {MOST:,} rounds, not {rounds:,}")
    if at_once + buffer - 1 > num_clients:
        raise FedraxError(
            f"{at_once} clients at work and a buffer of {buffer} uploads take {at_once + buffer - 1} clients or more:"
            f" there are {num_clients}"
        )
    seconds = [cycle(own.tolist()) for own in durations]
    begun: list[list[tuple[int, int]]] = [[] for _ in range(rounds)]
    clock, engaged, waiting, unknown = np.zeros(rounds), set(), [], 0
    heap: list[tuple[float, int, int, int]] = []
    """When it ends, the order of its beginning, who is at work, and since which step of the server."""

    def begin(now: float, step: int, order: int) -> int:
        client = next(c for c in _draws(rng, num_clients) if c not in engaged)
        engaged.add(client)
        heapq.heappush(heap, (now + next(seconds[client]), order, client, step))
        return int(step < rounds)

    step = 0
    for order in range(at_once):
        unknown += begin(0.0, step, order)
    order = at_once
    while step < rounds or unknown:
        if step > rounds + LONGEST:  # clients that are never heard of again are such
            for *_, client, since in heap:
                if since < rounds:
                    begun[since].append((client, step - since))
            break
        now, _, client, since = heapq.heappop(heap)
        if since < rounds:
            begun[since].append((client, step - since))
            unknown -= 1
        waiting.append(client)
        if len(waiting) == buffer:
            if step < rounds:
                clock[step] = now
            step += 1
            engaged.difference_update(waiting)
            waiting.clear()
        unknown += begin(now, step, order)
        order += 1
    pairs = [np.array(sorted(round), np.int64).reshape(-1, 2) for round in begun]
    return Arrivals([p[:, 0] for p in pairs], [p[:, 1].astype(np.int32) for p in pairs], clock)


def _draws(rng: np.random.Generator, num_clients: int) -> Iterator[int]:
    """Clients, drawn uniformly for ever."""
    while True:
        yield int(rng.integers(num_clients))


def read_durations(participation: Asynchronous, num_clients: int) -> list[np.ndarray]:
    """The seconds that each client takes, time after time: float64, in the order of the file."""
    path = participation.trace
    client, seconds = read_columns(path, "the trace of durations", ["client", "seconds"])
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
        raise FedraxError(f"the trace of durations {path} does not say how long client {missing[0]} takes")
    order = np.argsort(owners, kind="stable")
    return np.split(values[order], np.cumsum(np.bincount(owners, minlength=num_clients))[:-1])
