"""What clients keep between rounds, wherever it lies: a store of rows on the devices, or files of rows on disk.

One vocabulary for all forms. A client that takes part has a **row**, on its **home** device; ``owners`` says whose
each row is, over all devices one after another. Rows hold a :class:`fedrax.simulation.round.Kept`.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fedrax.simulation.round import Kept
from fedrax.simulation.row_file import RowFile
from fedrax.tree import Tree


def rehoused(saved: Tree, saved_owners: np.ndarray, owners: np.ndarray, initial: Kept) -> Tree:
    """Saved rows where this run keeps them: more rounds or other devices give clients other rows."""
    if np.array_equal(saved_owners, owners):
        return saved
    old, new = moves(saved_owners, owners)

    def move(first: Any, rows: np.ndarray) -> np.ndarray:
        table = np.repeat(np.asarray(first)[None], len(owners), 0)
        table[new] = rows[old]
        return table

    return jax.tree.map(move, initial, saved)


def moves(saved_owners: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(old rows, rising, their new rows) of the clients that both name."""
    row_of = {client: row for row, client in enumerate(owners.tolist()) if client >= 0}
    pairs = [(row, row_of[client]) for row, client in enumerate(saved_owners.tolist()) if client in row_of]
    old, new = np.array(pairs, int).reshape(-1, 2).T
    return old, new


def rows_of(store: Tree, homes: dict[int, int], initial: Kept, clients: np.ndarray) -> Kept:
    """What ``clients`` [n] keep, on the host: leaves [n, ...]; the initial where one never took part."""
    there = np.array([client in homes for client in clients.tolist()], bool)
    rows = np.array([homes[client] for client in clients[there].tolist()], int)

    def take(first: Any, table: Any) -> np.ndarray:
        out = np.repeat(np.asarray(first)[None], len(clients), 0)
        if len(rows):
            out[there] = table.read(rows) if isinstance(table, RowFile) else np.asarray(table[rows])
        return out

    return jax.tree.map(take, initial, store)
