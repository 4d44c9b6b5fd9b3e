"""Keyed pseudo-random permutations whose entries are computed one at a time, without a table.

Shuffling a client's samples by sorting random numbers needs a table as long as the largest client. Here a keyed
bijection of {0, ..., 2^b - 1} (multiplications by odd numbers, xor-shifts and additions, all invertible modulo 2^b) is
iterated until its value is below n ("cycle walking"; Black and Rogaway 2002). This gives a permutation of
{0, ..., n - 1} for any n, which may be known only at run time, with work proportional to the number of entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

_ROUNDS = 8
"""Rounds of the bijection. With 4, the distribution of orders of a few samples is visibly not uniform."""


def _mix(x: Array) -> Array:
    """A 32-bit hash finalizer with Ettinger's lowbias32 constants: every input bit affects every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def bits(words: Array, counter: Array | int, stream: int = 0) -> Array:
    """Random uint32 in the shape of ``counter`` from a key's two words, uint32 [2]."""
    x = _mix(jnp.uint32(counter) * jnp.uint32(0x9E3779B9) + words[0])
    return _mix(x ^ (words[1] + jnp.uint32((stream * 0x85EBCA6B) & 0xFFFFFFFF)))


def uniform_index(words: Array, counter: Array | int, n: Array | int, stream: int = 0) -> Array:
    """Independent uniform int32 from {0, ..., n - 1}, one for each ``counter``; the bias is below n / 2^32."""
    return (bits(words, counter, stream) % jnp.uint32(n)).astype(jnp.int32)


@jax.jit  # its hundreds of operations are traced once and not in every program
def shuffled_index(words: Array, epoch: Array | int, index: Array, n: Array | int) -> Array:
    """Entries ``index`` of a random permutation of {0, ..., n - 1}, int32 in the shape of ``index``.

    Args:
        words: The two words of the key, uint32 [2].
        epoch: Number of the permutation.
        index: Entries to compute, in {0, ..., n - 1}; larger ones give some valid value.
        n: Length of the permutation, which may be traced.
    """
    n = jnp.maximum(jnp.uint32(n), 1)
    mask = n - 1
    for shift in (1, 2, 4, 8, 16):
        mask |= mask >> shift
    half = jnp.maximum(jax.lax.population_count(mask) >> 1, 1)
    keys = bits(words, jnp.uint32(epoch) * (2 * _ROUNDS) + jnp.arange(2 * _ROUNDS, dtype=jnp.uint32), stream=1)

    def bijection(x: Array) -> Array:
        for i in range(_ROUNDS):
            x = (x * (keys[2 * i] | 1) + keys[2 * i + 1]) & mask
            x ^= x >> half
        return x

    def step(x: Array) -> Array:
        return jnp.where(x >= n, bijection(x), x)

    # Iteration from a value below n returns below n; from a larger value it might cycle forever.
    start = jnp.minimum(jnp.uint32(index), n - 1)
    return jax.lax.while_loop(lambda x: jnp.any(x >= n), step, bijection(start)).astype(jnp.int32)
