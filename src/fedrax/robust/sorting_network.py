"""Sorting the columns of a matrix with a sorting network.

XLA's CPU backend sorts columns one by one with scalar comparisons. In a sorting network (Batcher's odd-even mergesort)
all columns go through the same comparisons, so that each comparison is a vectorized minimum and maximum of rows.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_MAX_ROWS = 2048
"""Above, ``jnp.sort`` is used: the network has O(log^2 K) steps over all K rows."""
_BLOCK_BYTES = 400_000
"""Bytes of columns that are sorted together, so that they stay in the cache for all steps."""
_KEY_TYPES = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def sort_columns(x: Array, block_bytes: int = _BLOCK_BYTES) -> Array:
    """Sort x [K, ...] along the first axis, as ``jnp.sort``: ascending, NaN last."""
    rows = len(x)
    if jax.default_backend() != "cpu" or x.dtype not in _KEY_TYPES or not 2 <= rows <= _MAX_ROWS or x.size == 0:
        return jnp.sort(x, axis=0)
    flat = x.reshape(rows, -1)
    number = -(-flat.nbytes // block_bytes)
    width = -(-flat.shape[1] // number)
    flat = jnp.pad(flat, ((0, 0), (0, number * width - flat.shape[1])))

    def block(i: Array, out: Array) -> Array:
        columns = lax.dynamic_slice_in_dim(flat, i * width, width, 1)
        return lax.dynamic_update_slice_in_dim(out, _sorted(columns), i * width, 1)

    out = lax.fori_loop(0, number, block, flat)
    return out[:, : x.size // rows].reshape(x.shape)


def _sorted(x: Array) -> Array:
    """Sort x [K, width] by its bits as integers: they have a total order, unlike floats with NaN."""
    kind = _KEY_TYPES[x.dtype]

    def ordered(bits: Array) -> Array:
        """Reverse the order of negative numbers; this is its own inverse."""
        return bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & np.iinfo(kind).max)

    keys = ordered(lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), kind))
    partners = _network(len(x))
    rows = jnp.asarray(partners)
    is_lower = jnp.asarray(partners >= np.arange(len(x)))[..., None]

    def compare(step: Array, keys: Array) -> Array:
        others = keys[rows[step]]
        return jnp.where(is_lower[step], jnp.minimum(keys, others), jnp.maximum(keys, others))

    keys = lax.fori_loop(0, len(partners), compare, keys)
    return lax.bitcast_convert_type(ordered(keys), x.dtype)


@lru_cache(32)
def _network(rows: int) -> np.ndarray:
    """Batcher's network: the row that each row is compared with in each step, int [steps, rows]; itself for none.

    It is the network of the next power of two: its additional rows would be infinite and never move.
    """
    full = 1 << (rows - 1).bit_length()
    row, steps = np.arange(full), []
    merged = 1
    while merged < full:  # runs of this many rows are sorted
        distance = merged
        while distance:
            offset = distance % merged
            lower = (row >= offset) & ((row - offset) // distance % 2 == 0) & (row + distance < rows)
            lower &= row // (2 * merged) == (row + distance) // (2 * merged)
            partner = row.copy()
            partner[row[lower]], partner[row[lower] + distance] = row[lower] + distance, row[lower]
            steps.append(partner[:rows])
            distance //= 2
        merged *= 2
    return np.stack(steps)
