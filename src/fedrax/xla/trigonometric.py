"""Sines and cosines as polynomials, on CPUs.

- Before: ``sin`` or ``cos`` of at least `Limits.sine_numbers` float32 or half-precision numbers.
- After: a polynomial after Cody-Waite range reduction, with an error of at most two units in the last place.
- Why: XLA:CPU calls a library function for each number; polynomials are vectorized.
- Not for: other dtypes, and arguments beyond 10,000, for which the library is called (decided at run time).
"""

from __future__ import annotations

import math
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_half_precision
from fedrax.xla.normal import horner
from fedrax.xla.options import limits

_HALF_PI = (1.5703125, 0.0004837512969970703, 7.549533620476723e-08, 2.5633440682570896e-12)
"""Pi / 2 as a sum. The first three terms have eleven bits each, so that their products with integers of up to thirteen
bits are exact (Cody and Waite 1980)."""
_MAX_ARGUMENT = 1e4
"""Largest argument: multiples of pi / 2 up to it are integers of at most thirteen bits."""
# With z = r^2, |r| <= pi / 4: sin r = r + r z P(z) and cos r = 1 - z / 2 + z^2 Q(z), constant first, with a relative
# error of at most 4e-9.
_SINE = (-0.166666552, 0.00833215937, -0.000195151209)
_COSINE = (0.0416666456, -0.00138873141, 2.44329713e-05)


def lower_sin(inputs: list[Array], equation: core.JaxprEqn, ahead: int = 0) -> Array | None:
    """Rule for ``sin`` of x + ahead pi / 2; ``cos`` is ahead = 1."""
    (x,) = inputs
    if is_half_precision(x.dtype):
        found = lower_sin([x.astype(jnp.float32)], equation, ahead)
        return None if found is None else found.astype(x.dtype)
    if x.dtype != jnp.float32 or math.prod(x.shape) < limits().sine_numbers:
        return None
    near = jnp.max(jnp.abs(x)) <= _MAX_ARGUMENT  # False if x contains NaN
    return lax.cond(near, partial(_polynomial, ahead=ahead), (lax.sin, lax.cos)[ahead], x)


lower_cos = partial(lower_sin, ahead=1)
"""Rule for ``cos``."""


def _polynomial(x: Array, ahead: int) -> Array:
    """sin(x + ahead pi / 2) for |x| <= `_MAX_ARGUMENT`."""
    multiple = jnp.round(x * (2 / math.pi))
    r = x
    for term in _HALF_PI:
        r = r - multiple * term
    quadrant, z = multiple.astype(jnp.int32) + ahead, r * r
    sine = r + r * z * horner(_SINE, z)
    cosine = 1 - z / 2 + z * z * horner(_COSINE, z)
    found = jnp.where(quadrant & 1 == 0, sine, cosine)
    return jnp.where(quadrant & 2 == 0, found, -found)
