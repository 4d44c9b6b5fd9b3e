"""Threefry random bits with all rounds unrolled, on CPUs.

- Before: ``random_bits`` with keys of JAX's default kind.
- After: all twenty rounds of Threefry-2x32 as integer operations. The bits are the same.
- Why: JAX lowers Threefry for CPUs to a loop over five groups of rounds, each of which reads and writes every number.
  Of the unrolled rounds XLA makes one pass over the output, in registers.
- Not for: small arrays (`Limits.random_bits`), other kinds of keys, and ``jax_threefry_partitionable=False``.
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
"""Rotations of even and odd groups of four rounds (Salmon et al. 2011)."""
_PARITY = 0x1BD11BDA
"""Constant of the key schedule (Salmon et al. 2011)."""
_ROUNDS = 20
KEY_DTYPE = "key<fry>"
"""Dtype of keys of JAX's default kind."""


def threefry(key: Any, first: Array, second: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), unrolled.

    Args:
        key: two words, uint32, that broadcast with the counters.
        first: first words of the counters, uint32.
        second: second words of the counters, uint32.
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
    """Rule for ``random_bits``: the bits of ``jax.random.bits``; None for other kinds of keys and for few numbers."""
    (keys,), width, shape = inputs, equation.params["bit_width"], tuple(equation.params["shape"])
    size = math.prod(shape)
    if not is_threefry(keys) or width > 32 or size >= 2**32 or keys.size * size < limits().random_bits:
        return None
    bits = _bits_of_keys(jax.random.key_data(keys).reshape(-1, 2), size)
    return bits.astype(f"uint{width}").reshape(*keys.shape, *shape)


def is_threefry(keys: Any) -> bool:
    """Whether keys are of JAX's default kind, with bits that depend on the key and their position alone."""
    return str(keys.dtype) == KEY_DTYPE and bool(jax.config.values["jax_threefry_partitionable"])


def is_unbatchable(equation: core.JaxprEqn) -> bool:
    """Whether an equation fails under ``vmap`` or computes something else: most generators use one key for all rows."""
    inside = (e for function in sub_jaxprs(equation) for e in equations_in(function))
    return any(map(_is_unbatchable_primitive, (equation, *inside)))


def _is_unbatchable_primitive(equation: core.JaxprEqn) -> bool:
    """:func:`is_unbatchable` without sub-jaxprs."""
    name = equation.primitive.name
    if name == "random_bits":
        return str(equation.invars[0].aval.dtype) != KEY_DTYPE  # type: ignore[attr-defined]
    return name in ("rng_bit_generator", "rng_uniform") or "callback" in name or "ffi" in name


def counter_bits(words: Array, first: Array, count: int) -> Array:
    """``count`` 32-bit numbers, from position ``first`` on, of the key with two ``words``."""
    return _bits(words[None], first, count)[0]


def _bits_of_keys(words: Array, size: int) -> Array:
    """Bits [K, size] of K keys with words [K, 2], computed in a loop of two steps.

    A loop writes its result to memory. Otherwise XLA:CPU recomputes the bits for each use, such as four times in the
    gradient of pooling after dropout, and an optimization barrier does not prevent it.
    """
    if len(words) == 1:
        half = -(-size // 2)
        firsts = jnp.arange(2, dtype=jnp.uint32) * half
        return lax.map(lambda first: _bits(words, first, half), firsts).reshape(1, -1)[:, :size]
    half = -(-len(words) // 2)
    halves = jnp.concatenate([words, words[: 2 * half - len(words)]]).reshape(2, half, 2)
    return lax.map(lambda words: _bits(words, jnp.uint32(0), size), halves).reshape(2 * half, size)[: len(words)]


def _bits(words: Array, first: Array, count: int) -> Array:
    """Bits [K, count] of K keys from position ``first`` on."""
    left, right = threefry((words[:, :1], words[:, 1:]), jnp.uint32(0), first + lax.iota(jnp.uint32, count)[None])
    return left ^ right
