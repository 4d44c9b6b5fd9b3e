"""Functions whose derivative PyTorch takes for another than JAX where there is none, or JAX's is not a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def absolute(x: Array) -> Array:
    """The derivative at zero is zero; JAX's is one."""
    return x * jnp.sign(x) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.abs(x)


def power_of_absolute(x: Array, exponent: float) -> Array:
    """|x|^exponent, whose derivative at zero is zero, whatever the exponent."""
    if exponent < 0:
        return absolute(x) ** exponent
    return jnp.where(x == 0, 0, jnp.abs(jnp.where(x == 0, 1, x)) ** exponent)


def rooted(total: Array, root: Callable[[Array], Array]) -> Array:
    """A root, whose derivative at zero is zero."""
    return jnp.where(total == 0, 0, root(jnp.where(total == 0, 1, total)))


def between(x: Array, low: float, high: float) -> Array:
    """x within limits; at them the derivative is zero, as in PyTorch's activations."""
    return jnp.where(x <= low, jnp.asarray(low, x.dtype), jnp.where(x >= high, jnp.asarray(high, x.dtype), x))


def angle(x: Array) -> Array:
    """Of real numbers zero or half a turn, and the derivative zero everywhere."""
    if jnp.iscomplexobj(x):
        return jnp.angle(x)
    return jnp.where(jnp.isnan(x), x, jnp.where(x < 0, jnp.asarray(jnp.pi, x.dtype), 0))


def arctan2(y: Any, x: Any) -> Array:
    """The derivative where both are zero is zero."""
    none = (y == 0) & (x == 0)
    return jnp.where(none, lax.stop_gradient(jnp.arctan2(y, x)), jnp.arctan2(jnp.where(none, 1, y), x))


def copysign(x: Any, other: Any) -> Array:
    """The derivative is zero where x is."""
    length = absolute(jnp.asarray(x))
    return jnp.where(jnp.signbit(other), -length, length)


def fmax(x: Array, other: Array) -> Array:
    """The derivative of two that are the same is the first one's."""
    return jnp.where((x >= other) | jnp.isnan(other), x, other)


def fmin(x: Array, other: Array) -> Array:
    """The derivative of two that are the same is the first one's."""
    return jnp.where((x <= other) | jnp.isnan(other), x, other)


def i0(x: Array) -> Array:
    """The Bessel function, which is level at zero."""
    return jnp.exp(absolute(x)) * jax.scipy.special.i0e(x)


@jax.custom_jvp
def with_gradient_of(x: Array, other: Array) -> Array:
    """x, with the derivative of ``other``."""
    return x


@with_gradient_of.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0], tangents[1]
