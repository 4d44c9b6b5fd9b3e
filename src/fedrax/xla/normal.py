"""Standard normal noise for privacy mechanisms: fast on CPUs, with tails up to nine standard deviations.

The number at position j of leaf l is computed from the 64 bits that Threefry-2x32 with 20 rounds (Salmon et al. 2011)
gives for the counter (l, j) and two words of a key, so that it does not depend on how the work is divided. One bit is
the sign. The others are q, uniform on (0, 1), as precise near 0 as near 1; the number is the z > 0 with
P[|Z| > z] = q. Its relative error is at most 10^-6, and z reaches 9, where P[|Z| > z] = 2^-63. (``jax.random.normal``
reaches z = 5.4, 2^-24.) About a hundred operations for each number, without loops, tables or branches, which XLA fuses
into a single pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.tree import Tree
from fedrax.xla.batch_rng import MAX_BATCHED_DRAW
from fedrax.xla.threefry import threefry
from fedrax.xla.tracing import INLINE, cpu_passes_apply

# The quantile is u H(w), with u = 1 - q and w = -log(1 - u^2), as Giles (2010) writes the inverse error function. H is
# approximated by minimax polynomials, constant first, with relative errors of at most 3.1e-7 (near) and 4.9e-7 (far).
_CUT = 6.0
"""w from which the polynomial for the tails is used."""
_NEAR_FROM, _FAR_FROM = 3.0, 4.5
"""Centers of the two polynomials."""
_NEAR = (
    2.2960355,
    0.34171855,
    -0.008116989,
    -0.0011849881,
    0.00027723503,
    -1.696213e-05,
    -2.8073898e-06,
    4.8041255e-07,
    1.7386621e-09,
)
"""H as a polynomial in w - 3, for w in [0, 6]."""
_FAR = (
    6.1444125,
    1.4286838,
    0.0004285477,
    -0.0006063813,
    0.0002734955,
    -6.1874525e-05,
    -2.6317026e-05,
    -2.5355854e-07,
    1.3250033e-05,
    -3.5537792e-06,
)
"""H as a polynomial in sqrt(w) - 4.5, for w in [6, 45.5]."""
_LOG = (0.9999998, -0.5000067, 0.33336183, -0.24959344, 0.19873047, -0.17333463, 0.16419992, -0.10102243)
"""log(1 + m) / m for m in [sqrt(1/2) - 1, sqrt(2) - 1], with a relative error of at most 4e-8."""
_ROOT_HALF = 0x3F3504F3
"""Bits of sqrt(1/2) in float32."""
_MIN_LEAVES = 8
"""Fewest small leaves that are drawn in one loop: with fewer, compiling each draw costs less than the loop."""
_CHUNK = 1 << 12
"""Numbers drawn in one step of the loop."""


def normal_noise(key: Array, like: Tree) -> Tree:
    """Independent N(0, 1) numbers, float32, in the shapes of the leaves of ``like``.

    The caller must not use ``key`` for anything else. Raises FedraxError for a leaf of 2^32 numbers or more.
    """
    leaves, structure = jax.tree.flatten(like)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if (largest := max(map(math.prod, shapes), default=0)) >= 2**32:
        raise FedraxError(
            f"an array of {largest} numbers is too large for noise, which would repeat after 2^32: split the array"
        )
    words = jax.random.bits(key, (2,), jnp.uint32)  # works for any kind of key
    small = {i: shape for i, shape in enumerate(shapes) if math.prod(shape) <= MAX_BATCHED_DRAW}
    together = _draw_in_loop(small, words) if len(small) >= _MIN_LEAVES and cpu_passes_apply() else {}
    return structure.unflatten(
        [together[i] if i in together else _leaf(shape, words, np.uint32(i)) for i, shape in enumerate(shapes)]
    )


def _leaf(shape: tuple[int, ...], words: Array, number: Any) -> Array:
    """The noise of leaf ``number``."""
    return _draw(math.prod(shape), words, number, jnp.uint32(0)).reshape(shape)


def _draw_in_loop(shapes: Mapping[int, tuple[int, ...]], words: Array) -> dict[int, Array]:
    """The noise of several leaves, by number, in one loop over chunks, so that the draw is compiled once."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    num_chunks = [-(-size // _CHUNK) for size in sizes]
    number = np.repeat(np.asarray(list(shapes), np.uint32), num_chunks)
    first = np.concatenate([np.arange(n, dtype=np.uint32) * np.uint32(_CHUNK) for n in num_chunks])
    flat = lax.map(lambda chunk: _draw(_CHUNK, words, *chunk), (jnp.asarray(number), jnp.asarray(first))).reshape(-1)
    starts = (np.cumsum(num_chunks) - num_chunks) * _CHUNK
    return {
        i: flat[start : start + size].reshape(shape)
        for (i, shape), start, size in zip(shapes.items(), starts.tolist(), sizes, strict=True)
    }


@partial(jax.jit, static_argnums=0, inline=INLINE)
def _draw(count: int, words: Array, number: Any, start: Array) -> Array:
    """``count`` numbers of leaf ``number`` from position ``start`` on. Inlined; ``jit`` caches the trace."""
    first, second = threefry(words, number, start + lax.iota(jnp.uint32, count))
    return _with_sign(_quantile(_uniform(first, second >> 1)), second)


def _uniform(high: Array, low: Array) -> Array:
    """(floor(high / 2) + (low + 1/2) / 2^31) / 2^31, in (0, 1]."""
    # by way of int32, which CPUs convert to float32 in one instruction
    high, low = (bits.astype(jnp.int32).astype(jnp.float32) for bits in (high >> 1, low))
    return (high + (low + 0.5) * np.float32(2**-31)) * np.float32(2**-31)


def _quantile(q: Array) -> Array:
    """The z >= 0 with P[|Z| > z] = q for Z from N(0, 1)."""
    u = 1 - q
    w = -_log(q * (1 + u))
    near = horner(_NEAR, w - np.float32(_NEAR_FROM))
    far = horner(_FAR, jnp.sqrt(w) - np.float32(_FAR_FROM))
    return u * jnp.where(w < np.float32(_CUT), near, far)


def _log(x: Array) -> Array:
    """Natural logarithm of positive normal numbers, from the exponent and the mantissa in [sqrt(1/2), sqrt(2)].

    It takes a third of the time of XLA's log, which also handles zeros, subnormal and negative numbers.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - np.int32(_ROOT_HALF)) >> np.int32(23)
    rest = lax.bitcast_convert_type(bits - (exponent << np.int32(23)), jnp.float32) - 1
    return exponent.astype(jnp.float32) * np.float32(math.log(2)) + rest * horner(_LOG, rest)


def horner(coefficients: tuple[float, ...], x: Array) -> Array:
    """Evaluate a polynomial by Horner's rule; ``coefficients`` begin with the constant."""
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + np.float32(coefficient)
    return value


def _with_sign(z: Array, bits: Array) -> Array:
    """-z where the lowest bit of ``bits`` is 1, z elsewhere."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(z, jnp.uint32) | (bits << 31), jnp.float32)
