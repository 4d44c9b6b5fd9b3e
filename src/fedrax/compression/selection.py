"""The largest numbers of a vector, found without sorting it.

XLA's CPU backend sorts all of a vector for its largest k. Magnitudes of floats are in the order of their bits, read as
whole numbers: bit by bit the k-th largest is found, in as many passes that only count, as long as the vector.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def largest(values: Array, k: int) -> Array:
    """Where the k numbers [d] of largest magnitude are, int32 [k], ascending; of equal ones those that come first.

    k: from 1 to d.
    """
    bits = jnp.finfo(values.dtype).bits
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.dtype(f"int{bits}"))

    def with_bit(i: Array, least: Array) -> Array:
        trial = least | (jnp.ones_like(least) << jnp.asarray(bits - 2 - i, least.dtype))
        return jnp.where((magnitudes >= trial).sum(dtype=jnp.int32) >= k, trial, least)

    least = lax.fori_loop(jnp.int32(0), jnp.int32(bits - 1), with_bit, jnp.zeros((), magnitudes.dtype))
    above, equal = magnitudes > least, magnitudes == least
    room = k - above.sum(dtype=jnp.int32)
    first = lambda equal: equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room)  # noqa: E731
    equal = lax.cond(equal.sum(dtype=jnp.int32) > room, first, lambda equal: equal, equal)
    return jnp.nonzero(above | equal, size=k)[0].astype(jnp.int32)
