"""Availability traces: which clients can be sampled in each round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fedrax.data.readers.table_files import read_csv_columns
from fedrax.errors import FedraxError
from fedrax.participation.policy import CohortSizes, ParticipationPolicy, Population, sample_among

MAX_ROUNDS = 1_000_000
"""Limit of the rounds of a trace: each one takes memory, also if it has no client."""


@dataclass(frozen=True)
class Availability(ParticipationPolicy):
    """Sample the cohort uniformly from the clients that a trace lists as available in the round.

    The trace is a CSV file with columns ``round`` (from 0) and ``client``; it repeats after its last round. A round
    with fewer than S available clients takes all of them; a round that the trace does not name has no client and
    changes nothing.

    Example:
        >>> fedrax.participation.Availability("availability.csv").trace
        'availability.csv'
    """

    trace: Path
    """The CSV file."""
    uses_sample_counts: ClassVar[bool] = False

    def init(self, population: Population) -> list[np.ndarray]:
        """The available clients of each round of the trace."""
        return read_trace(self, population.num_clients)

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """S of the available clients."""
        available = state[round % len(state)]
        return sample_among(rng, available, min(population.cohort_size, len(available)))

    def cohort_sizes(self, state: Any, population: Population) -> CohortSizes:
        """S clients, and fewer where fewer are available."""
        sizes = {min(population.cohort_size, len(available)) for available in state}
        return CohortSizes(max(sizes), len(sizes) > 1, float(population.cohort_size))

    def trace_data(self, state: Any) -> Sequence[np.ndarray]:
        """The available clients of each round."""
        return state


def read_trace(participation: Availability, num_clients: int) -> list[np.ndarray]:
    """The available clients of each round of a trace file, sorted; raises FedraxError for a malformed one."""
    path = participation.trace
    table = read_csv_columns(path, "the availability trace", ["round", "client"])
    if not all(kind.is_integer() for kind in table.dtypes) or sum(table.null_count().row(0)):
        raise FedraxError(f"the availability trace {path} must hold whole numbers only")
    rounds, clients = np.unique(table.to_numpy(), axis=0).T
    inside = len(rounds) and rounds.min() >= 0 and rounds.max() < MAX_ROUNDS
    if not inside or clients.min() < 0 or clients.max() >= num_clients:
        raise FedraxError(
            f"the availability trace {path} must name rounds 0 to {MAX_ROUNDS - 1} and clients 0 to {num_clients - 1}"
        )
    return np.split(clients, np.searchsorted(rounds, np.arange(1, rounds.max() + 1)))
