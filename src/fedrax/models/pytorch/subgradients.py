"""Functions with PyTorch's derivatives at points where they are not differentiable, or where JAX's are NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def absolute(x: Array) -> Array:
    """|x|, whose derivative at zero is zero; JAX's is one."""
    return x * jnp.sign(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


def power_of_absolute(x: Array, exponent: float) -> Array:
    """|x|^exponent, whose derivative at zero is zero for every exponent."""
    if exponent < 0:
        return absolute(x) ** exponent
    return jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** exponent)


def root_of(total: Array, root: Callable[[Array], Array]) -> Array:
    """root(total), with a derivative of zero at zero."""
    return jnp.where(total == 0, 0, root(jnp.where(total == 0, 1, total)))


def between(x: Array, low: float, high: float) -> Array:
    """x clipped to [low, high]; the derivative at the limits is zero, as in PyTorch's activations."""
    return jnp.where(x <= low, jnp.asarray(low, x.dtype), jnp.where(x >= high, jnp.asarray(high, x.dtype), x))


def angle(x: Array) -> Array:
    """The angle of complex numbers; of real numbers it is 0 or pi, with derivative zero."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), 0))


def arctan2(y: Any, x: Any) -> Array:
    """arctan2, with a derivative of zero where both arguments are zero."""
    both_zero = (y == 0) & (x == 0)
    return jnp.where(both_zero, lax.stop_gradient(jnp.arctan2(y, x)), jnp.arctan2(jnp.where(both_zero, 1, y), x))


def copysign(x: Any, other: Any) -> Array:
    """copysign, with a derivative of zero where x is zero."""
    magnitude = absolute(jnp.asarray(x))
    return jnp.where(jnp.signbit(other), -magnitude, magnitude)


def fmax(x: Array, other: Array) -> Array:
    """fmax; of equal arguments, only the first has a derivative."""
    return jnp.where((x >= other) | jnp.isnan(other), x, other)


def fmin(x: Array, other: Array) -> Array:
    """fmin; of equal arguments, only the first has a derivative."""
    return jnp.where((x <= other) | jnp.isnan(other), x, other)


def i0(x: Array) -> Array:
    """The modified Bessel function of order zero, with a derivative of zero at zero."""
    return jnp.exp(absolute(x)) * jax.scipy.special.i0e(x)


@jax.custom_jvp
def with_gradient_of(x: Array, other: Array) -> Array:
    """x, with the derivative of ``other``."""
    return x


@with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]
