"""PyTorch's operators that draw random numbers, with JAX's generator."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.models.pytorch.operators import Context, operator


def _shape(like: Any) -> tuple[int, ...]:
    """The shape of an array, or a size."""
    return like.shape if isinstance(like, Array) else tuple(like)


@operator("randn", "randn_like")
def _randn(context: Context, like: Any, *, dtype: Any = None, **_: Any) -> Array:
    return jax.random.normal(context.random_key("randn"), _shape(like), context.float_type)


@operator("rand", "rand_like")
def _rand(context: Context, like: Any, *, dtype: Any = None, **_: Any) -> Array:
    return jax.random.uniform(context.random_key("rand"), _shape(like), context.float_type)


@operator("uniform")
def _uniform(context: Context, x: Array, low: float = 0.0, high: float = 1.0, *, generator: Any = None) -> Array:
    return jax.random.uniform(context.random_key("uniform"), x.shape, x.dtype, low, high)


@operator("normal_functional")
def _normal_functional(context: Context, x: Array, mean: float = 0.0, std: float = 1.0, **_: Any) -> Array:
    return mean + std * jax.random.normal(context.random_key("normal"), x.shape, x.dtype)


@operator("normal")
def _normal(context: Context, mean: Any, std: Any = 1.0, size: Any = None, **_: Any) -> Array:
    """Normal numbers of given means and standard deviations; ``size`` is given if both are scalars."""
    shape = jnp.broadcast_shapes(jnp.shape(mean), jnp.shape(std)) if size is None else tuple(size)
    return mean + std * jax.random.normal(context.random_key("normal"), shape, context.float_type)


@operator("exponential")
def _exponential(context: Context, x: Array, rate: float = 1.0, *, generator: Any = None) -> Array:
    return jax.random.exponential(context.random_key("exponential"), x.shape, x.dtype) / rate


@operator("bernoulli", "bernoulli.p")
def _bernoulli(context: Context, x: Array, p: Any = None, *, generator: Any = None) -> Array:
    probability = x if p is None else jnp.full(x.shape, p)
    return jax.random.bernoulli(context.random_key("bernoulli"), probability).astype(x.dtype)


@operator("randint")
def _randint(context: Context, high: int, size: Any, *, dtype: Any = None, **_: Any) -> Array:
    return _randint_low(context, 0, high, size, dtype=dtype)


@operator("randint.low")
def _randint_low(context: Context, low: int, high: int, size: Any, *, dtype: Any = None, **_: Any) -> Array:
    return context.cast(jax.random.randint(context.random_key("randint"), tuple(size), low, high), dtype)


@operator("randint_like")
def _randint_like(context: Context, x: Array, high: int, *, dtype: Any = None, **_: Any) -> Array:
    drawn = _randint_low(context, 0, high, x.shape, dtype=dtype)
    return drawn.astype(x.dtype) if dtype is None else drawn


@operator("randperm")
def _randperm(context: Context, n: int, *, dtype: Any = None, **_: Any) -> Array:
    return jax.random.permutation(context.random_key("randperm"), n)


@operator("multinomial")
def _multinomial(
    context: Context, x: Array, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Array:
    """Indices into x [..., n] with probabilities in proportion to x."""
    logits, key = jnp.log(x), context.random_key("multinomial")
    if replacement:
        drawn = jax.random.categorical(key, logits[..., None, :], shape=(*x.shape[:-1], num_samples))
        return drawn.astype(jnp.int32)
    noisy = logits + jax.random.gumbel(key, x.shape, x.dtype)  # Gumbel top-k: sampling without replacement
    return jax.lax.top_k(noisy, num_samples)[1]
