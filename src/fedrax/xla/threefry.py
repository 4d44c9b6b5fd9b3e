"""Threefry random bits with all rounds unrolled, on CPUs.

Matches ``random_bits`` with keys of JAX's default kind. JAX lowers Threefry for CPUs to a loop over five groups of
rounds, each of which reads and writes every number. With all twenty rounds written out XLA makes one pass over the
output, in registers. The bits are the same. It does not apply to small arrays (`Limits.random_bits`), other kinds of
keys, and ``jax_threefry_partitionable=False``.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from fedrax.xla.options import limits
from fedrax.xla.tracing import equations_in, sub_jaxprs

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ROUNDS = 20
KEY_DTYPE = "key<fry>"
"""The type of JAX's keys of its default kind."""


def threefry(key: Any, first: Array, second: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of a counter's two words, all its rounds written out.

    key: two words, uint32, in a shape that broadcasts with the counters'.
    """
    keys = key[0], key[1], key[0] ^ key[1] ^ np.uint32(_PARITY)
    first, second = first + keys[0], second + keys[1]
    for group in range(_ROUNDS // 4):
        for by in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ ((second << np.uint32(by)) | (second >> np.uint32(32 - by)))
        first = first + keys[(group + 1) % 3]
        second = second + keys[(group + 2) % 3] + np.uint32(group + 1)
    return first, second


def lower_random_bits(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """The rule for ``random_bits``: as ``jax.random.bits``, of keys of JAX's default kind."""
    (keys,), width, shape = inputs, equation.params["bit_width"], tuple(equation.params["shape"])
    size = math.prod(shape)
    if not is_threefry(keys) or width > 32 or size >= 2**32 or keys.size * size < limits().random_bits:
        return None
    bits = _bits_of_keys(jax.random.key_data(keys).reshape(-1, 2), size)
    return bits.astype(f"uint{width}").reshape(*keys.shape, *shape)


def is_threefry(keys: Any) -> bool:
    """Whether an array of keys, or its shape, is of JAX's default kind, and each bit follows from its place alone."""
    return str(keys.dtype) == KEY_DTYPE and bool(jax.config.values["jax_threefry_partitionable"])


def is_unbatchable(equation: core.JaxprEqn) -> bool:
    """Whether under ``vmap`` it is not what it is by itself, or fails: most generators take one key for all then."""
    inside = (e for function in sub_jaxprs(equation) for e in equations_in(function))
    return any(map(_is_unbatchable_primitive, (equation, *inside)))


def _is_unbatchable_primitive(equation: core.JaxprEqn) -> bool:
    name = equation.primitive.name
    if name == "random_bits":
        return str(equation.invars[0].aval.dtype) != KEY_DTYPE  # type: ignore[attr-defined]
    return name in ("rng_bit_generator", "rng_uniform") or "callback" in name or "ffi" in name


def counter_bits(words: Array, first: Array, count: int) -> Array:
    """[count] bits of width 32, from the place ``first`` on, of the key with these two words."""
    return _bits(words[None], first, count)[0]


def _bits_of_keys(words: Array, size: int) -> Array:
    """[K, size] of the words [K, 2] of K keys.

    In a loop of two steps, which writes them to memory. XLA would recompute them for each use, such as four times
    in the gradient of a pooling after dropout, and minds no barrier there.
    """
    if len(words) == 1:
        half = -(-size // 2)
        firsts = jnp.arange(2, dtype=jnp.uint32) * half
        return lax.map(lambda first: _bits(words, first, half), firsts).reshape(1, -1)[:, :size]
    half = -(-len(words) // 2)
    halves = jnp.concatenate([words, words[: 2 * half - len(words)]]).reshape(2, half, 2)
    return lax.map(lambda words: _bits(words, jnp.uint32(0), size), halves).reshape(2 * half, size)[: len(words)]


def _bits(words: Array, first: Array, count: int) -> Array:
    """[K, count], from the place ``first`` on."""
    left, right = threefry((words[:, :1], words[:, 1:]), jnp.uint32(0), first + lax.iota(jnp.uint32, count)[None])
    return left ^ right
