"""What clients keep between rounds, wherever it lies: a store of rows on the devices, or files of rows on disk.

One vocabulary for all forms. A client that takes part has a **row**, on its **home** device; ``owners`` says whose
each row is, over all devices one after another. Rows hold a :class:`fedrax.simulation.round.ClientRecord`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax.simulation.placement.row_file import RowFile
from fedrax.simulation.round import ClientRecord
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS

_PIECE_BYTES = 8 << 20


class ShardedRows:
    """An array of rows that lies on devices, read a few rows at a time: whole on the host it would take as much again.

    It is :class:`fedrax.simulation.persistence.checkpoint.ChunkedArray`.
    """

    def __init__(self, array: jax.Array):
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)
        self._shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)

    def pieces(self, max_bytes: int = _PIECE_BYTES) -> Iterator[np.ndarray]:
        """All rows in order."""
        for shard in self._shards:
            rows = np.asarray(shard.data)  # of a CPU no copy
            step = max(1, max_bytes * len(rows) // max(1, rows.nbytes))
            yield from (rows[first : first + step] for first in range(0, len(rows), step))


def restore_rows(saved: Tree, saved_owners: np.ndarray, owners: np.ndarray, initial: ClientRecord, mesh: Mesh) -> Tree:
    """Saved rows (leaves in pieces) where this run keeps them: more rounds or other devices give clients other rows.

    Each device's rows leave the host's memory before those of the next one are copied to their device.
    """
    (old, new), devices = row_moves(saved_owners, owners), list(mesh.devices.flat)
    each = len(owners) // len(devices)

    def move(first: Any, leaf: Any) -> jax.Array:
        tables, parts = [np.repeat(np.asarray(first)[None], each, 0) for _ in devices], []
        for rows, values in moved_rows(leaf, old, new):
            for d, table in enumerate(tables):
                here = rows // each == d
                table[rows[here] - d * each] = values[here]
        for device in devices:
            parts.append(jax.block_until_ready(jax.device_put(tables.pop(0), device, may_alias=False)))
        shape, sharding = (len(owners), *np.shape(first)), NamedSharding(mesh, P(CLIENT_AXIS))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    return jax.tree.map(move, initial, saved)


def moved_rows(leaf: Any, old: np.ndarray, new: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows ``old`` (rising) of a leaf in pieces become rows ``new``: (those rows, their values), a few at a time."""
    first = 0
    for piece in leaf.pieces():
        mine = slice(*np.searchsorted(old, (first, first + len(piece))))
        yield new[mine], piece[old[mine] - first]
        first += len(piece)


def row_moves(saved_owners: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(old rows, rising, their new rows) of the clients that both name."""
    row_of = {client: row for row, client in enumerate(owners.tolist()) if client >= 0}
    pairs = [(row, row_of[client]) for row, client in enumerate(saved_owners.tolist()) if client in row_of]
    old, new = np.array(pairs, int).reshape(-1, 2).T
    return old, new


def read_rows(store: Tree, homes: dict[int, int], initial: ClientRecord, clients: np.ndarray) -> ClientRecord:
    """What ``clients`` [n] keep, on the host: leaves [n, ...]; the initial where one never took part."""
    there = np.array([client in homes for client in clients.tolist()], bool)
    rows = np.array([homes[client] for client in clients[there].tolist()], int)

    def take(first: Any, table: Any) -> np.ndarray:
        out = np.repeat(np.asarray(first)[None], len(clients), 0)
        if len(rows):
            out[there] = table.read(rows) if isinstance(table, RowFile) else np.asarray(table[rows])
        return out

    return jax.tree.map(take, initial, store)
