"""Clients that are there: a fixed list, or a trace of each round's."""

from __future__ import annotations

import numpy as np

from fedrax.data.readers.csv_parquet import read_columns
from fedrax.errors import FedraxError
from fedrax.participation.policies import Availability


def check_list(clients: tuple[int, ...], num_clients: int) -> np.ndarray:
    """The clients of a fixed list, sorted."""
    if not clients or len(set(clients)) < len(clients) or min(clients) < 0 or max(clients) >= num_clients:
        raise FedraxError(f"the list of clients that take part must hold different clients from 0 to {num_clients - 1}")
    return np.sort(np.array(clients, np.int64))


def read_trace(participation: Availability, num_clients: int) -> list[np.ndarray]:
    """The available clients of each round of a trace file."""
    path = participation.trace
    table = read_columns(path, "the availability trace", ["round", "client"])
    if not all(kind.is_integer() for kind in table.dtypes) or sum(table.null_count().row(0)):
        raise FedraxError(f"the availability trace {path} must hold whole numbers only")
    rounds, clients = np.unique(table.to_numpy(), axis=0).T
    if not len(rounds) or rounds.min() < 0 or clients.min() < 0 or clients.max() >= num_clients:
        raise FedraxError(f"the availability trace {path} must name rounds from 0 and clients 0 to {num_clients - 1}")
    named, starts = np.unique(rounds, return_index=True)
    gaps = np.flatnonzero(named != np.arange(len(named)))
    if len(gaps):
        raise FedraxError(f"the availability trace {path} has no client in round {gaps[0]}")
    return np.split(clients, starts[1:])
