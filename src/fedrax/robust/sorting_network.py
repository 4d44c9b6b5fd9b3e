"""Many columns sorted at once, by a network of comparisons.

XLA's CPU backend sorts one column after another, number by number. Where all columns go through the same comparisons
(Batcher's odd-even mergesort), each comparison is one of whole rows, and rows are vectors.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_MOST_ROWS = 2048
"""The network's steps grow with the square of the logarithm of the rows, and every step goes over all of them."""
_CACHED = 400_000
"""Bytes of columns that are sorted together."""
_KEYS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def sort_columns(x: Array) -> Array:
    """x [K, ...] with each column, along the first axis, in rising order as of `jnp.sort`: NaN comes last."""
    rows = len(x)
    if jax.default_backend() != "cpu" or x.dtype not in _KEYS or not 2 <= rows <= _MOST_ROWS or x.size == 0:
        return jnp.sort(x, axis=0)
    flat = x.reshape(rows, -1)
    number = -(-flat.nbytes // _CACHED)
    width = -(-flat.shape[1] // number)
    flat = jnp.pad(flat, ((0, 0), (0, number * width - flat.shape[1])))

    def block(i: Array, out: Array) -> Array:
        columns = lax.dynamic_slice_in_dim(flat, i * width, width, 1)
        return lax.dynamic_update_slice_in_dim(out, _sorted(columns), i * width, 1)

    out = lax.fori_loop(0, number, block, flat)
    return out[:, : x.size // rows].reshape(x.shape)


def _sorted(x: Array) -> Array:
    """[K, width]: as integers, which have no numbers that compare with none."""
    kind = _KEYS[x.dtype]
    ordered = lambda bits: bits ^ ((bits >> (8 * x.dtype.itemsize - 1)) & np.iinfo(kind).max)  # noqa: E731 - its own inverse
    keys = ordered(lax.bitcast_convert_type(jnp.where(jnp.isnan(x), jnp.nan, x), kind))
    partners = _network(len(x))
    places = jnp.asarray(partners)
    least = jnp.asarray(partners >= np.arange(len(x)))[..., None]

    def compare(step: Array, keys: Array) -> Array:
        others = keys[places[step]]
        return jnp.where(least[step], jnp.minimum(keys, others), jnp.maximum(keys, others))

    keys = lax.fori_loop(0, len(partners), compare, keys)
    return lax.bitcast_convert_type(ordered(keys), x.dtype)


@lru_cache(32)
def _network(rows: int) -> np.ndarray:
    """With which row each is compared in each step, itself where with none; int [steps, rows].

    Batcher's network for the next power of two, whose rows beyond the last would hold infinity and never move.
    """
    full = 1 << (rows - 1).bit_length()
    place, steps = np.arange(full), []
    merged = 1
    while merged < full:  # runs of so many rows are sorted
        apart = merged
        while apart:
            lower = (place >= apart % merged) & ((place - apart % merged) // apart % 2 == 0) & (place + apart < rows)
            lower &= place // (2 * merged) == (place + apart) // (2 * merged)
            partner = place.copy()
            partner[place[lower]], partner[place[lower] + apart] = place[lower] + apart, place[lower]
            steps.append(partner[:rows])
            apart //= 2
        merged *= 2
    return np.stack(steps)
