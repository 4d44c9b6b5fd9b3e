"""Normal noise as ``jax.random.normal`` draws it, the same numbers, in the time that a processor needs for it.

On CPUs JAX runs the rounds of Threefry (Salmon et al. 2011) as a loop over arrays in memory. Here they are laid out, so
that XLA computes each number in registers from its place to its end: noise for a model is then no dearer than a pass
over it. On accelerators JAX's own form is as fast.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def normal(key: Array, shape: tuple[int, ...]) -> Array:
    """float32 numbers [shape] of mean 0 and deviation 1: ``jax.random.normal(key, shape)``, but for rounding."""
    known = jax.random.key_impl(key) == "threefry2x32" and jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if jax.default_backend() != "cpu" or not known or math.prod(shape) >= 2**32:
        return jax.random.normal(key, shape, jnp.float32)
    mantissa = _bits(jax.random.key_data(key), shape) >> 9
    unit = lax.bitcast_convert_type(mantissa | jnp.uint32(0x3F800000), jnp.float32) - 1  # [0, 1)
    low = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(np.sqrt(2)) * lax.erf_inv(jnp.maximum(low, unit * (np.float32(1) - low) + low))


def _bits(words: Array, shape: tuple[int, ...]) -> Array:
    """uint32 [shape]: both words of Threefry-2x32 of each number's place, one over the other."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    places = jnp.zeros(shape, jnp.uint32)
    for axis, stride in enumerate(strides):
        places += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    keys = words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY)
    first, second = jnp.full(shape, keys[0]), places + keys[1]
    for group in range(5):
        for turn in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ ((second << turn) | (second >> (32 - turn)))
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return first ^ second
