"""Sines and cosines as polynomials, on CPUs.

Matches ``sin`` and ``cos`` of at least `Limits.sine_numbers` float32 or half-precision numbers. XLA:CPU calls a library
function for each number; a polynomial after Cody-Waite reduction is vectorized. It is right to two units of the last
place. Arguments beyond 10,000 are left to the library.
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
"""Pi / 2 as a sum. The first three have eleven digits each, so that their products with whole numbers of up to
thirteen are exact (Cody and Waite 1980)."""
_MAX_ARGUMENT = 1e4
"""Larger arguments, whose multiple of pi / 2 has more digits, are left to the library."""
# With z = r^2, |r| <= pi / 4: sin r = r + r z P(z) and cos r = 1 - z / 2 + z^2 Q(z), the constant first, to a greatest
# relative error of 4e-9.
_SINE = (-0.166666552, 0.00833215937, -0.000195151209)
_COSINE = (0.0416666456, -0.00138873141, 2.44329713e-05)


def lower_sin(inputs: list[Array], equation: core.JaxprEqn, ahead: int = 0) -> Array | None:
    """The rule for ``sin`` of x + ahead pi / 2; cos is ``ahead`` = 1."""
    (x,) = inputs
    if is_half_precision(x.dtype):
        found = lower_sin([x.astype(jnp.float32)], equation, ahead)
        return None if found is None else found.astype(x.dtype)
    if x.dtype != jnp.float32 or math.prod(x.shape) < limits().sine_numbers:
        return None
    near = jnp.max(jnp.abs(x)) <= _MAX_ARGUMENT  # no number is not
    return lax.cond(near, partial(_polynomial, ahead=ahead), (lax.sin, lax.cos)[ahead], x)


lower_cos = partial(lower_sin, ahead=1)
"""The rule for ``cos``."""


def _polynomial(x: Array, ahead: int) -> Array:
    turns = jnp.round(x * (2 / math.pi))
    r = x
    for part in _HALF_PI:
        r = r - turns * part
    quarter, z = turns.astype(jnp.int32) + ahead, r * r
    of_sine = r + r * z * horner(_SINE, z)
    of_cosine = 1 - z / 2 + z * z * horner(_COSINE, z)
    found = jnp.where(quarter & 1 == 0, of_sine, of_cosine)
    return jnp.where(quarter & 2 == 0, found, -found)
