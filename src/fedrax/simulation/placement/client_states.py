"""Client states in rows: access to them on the devices and on disk, and their transfer at resume.

A client that participates has a **row** on its **home** device. ``owners`` is the client of each row, over all devices
one after another. Rows hold a :class:`fedrax.simulation.round.ClientRecord`.
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
    """An array of rows on the devices, read in chunks, since a copy on the host would need the same memory again.

    Implements :class:`fedrax.simulation.persistence.checkpoint.ChunkedArray`.
    """

    def __init__(self, array: jax.Array):
        self.shape, self.dtype = array.shape, np.dtype(array.dtype)
        self._shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)

    def pieces(self, max_bytes: int = _PIECE_BYTES) -> Iterator[np.ndarray]:
        """Yield all rows in order, in chunks of at most ``max_bytes``."""
        for shard in self._shards:
            rows = np.asarray(shard.data)  # no copy on CPU
            step = max(1, max_bytes * len(rows) // max(1, rows.nbytes))
            yield from (rows[first : first + step] for first in range(0, len(rows), step))


def restore_rows(saved: Tree, saved_owners: np.ndarray, owners: np.ndarray, initial: ClientRecord, mesh: Mesh) -> Tree:
    """Move the rows of a checkpoint to this run's rows, which differ after a change of rounds or devices.

    The rows of one device are freed on the host before those of the next one are copied to their device.
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
    """Yield (new rows, values) of the rows ``old`` (ascending) of a leaf, chunk by chunk."""
    first = 0
    for piece in leaf.pieces():
        mine = slice(*np.searchsorted(old, (first, first + len(piece))))
        yield new[mine], piece[old[mine] - first]
        first += len(piece)


def row_moves(saved_owners: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(old rows, ascending, new rows) of the clients that have a row in both."""
    row_of = {client: row for row, client in enumerate(owners.tolist()) if client >= 0}
    pairs = [(row, row_of[client]) for row, client in enumerate(saved_owners.tolist()) if client in row_of]
    old, new = np.array(pairs, int).reshape(-1, 2).T
    return old, new


def read_rows(store: Tree, homes: dict[int, int], initial: ClientRecord, clients: np.ndarray) -> ClientRecord:
    """Records of ``clients`` [n] on the host, leaves [n, ...]; the initial one where a client never participated."""
    there = np.array([client in homes for client in clients.tolist()], bool)
    rows = np.array([homes[client] for client in clients[there].tolist()], int)

    def take(first: Any, table: Any) -> np.ndarray:
        out = np.repeat(np.asarray(first)[None], len(clients), 0)
        if len(rows):
            out[there] = table.read(rows) if isinstance(table, RowFile) else np.asarray(table[rows])
        return out

    return jax.tree.map(take, initial, store)
