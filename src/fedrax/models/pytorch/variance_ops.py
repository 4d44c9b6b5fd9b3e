"""PyTorch's operators of variances and norms."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.pytorch import subgradients
from fedrax.models.pytorch.operators import axes, operator


@operator("var")
def _var(x: Array, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Array:
    """Variance, by default divided by n - 1."""
    if isinstance(dim, bool):  # var(unbiased)
        dim, unbiased = None, dim
    ddof = int(unbiased) if correction is None else correction
    over = axes(dim, x.ndim)
    first = x[tuple(slice(1) if axis in over else slice(None) for axis in range(x.ndim))]
    return (x - lax.stop_gradient(first)).var(over, ddof=ddof, keepdims=keepdim)  # exactly zero for equal entries


@operator("std")
def _std(x: Array, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None) -> Array:
    variance = _var(x, dim, unbiased, keepdim, correction=correction)
    return subgradients.root_of(variance, jnp.sqrt)


@operator("var_mean")
def _var_mean(x: Array, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *, correction: Any = None):
    over = None if isinstance(dim, bool) else dim
    mean = x.mean(axes(over, x.ndim), keepdims=keepdim)
    return _var(x, dim, unbiased, keepdim, correction=correction), mean


@operator("linalg_vector_norm")
def _norm(x: Array, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Array:
    over: Any = axes(dim, x.ndim)
    if jnp.iscomplexobj(x):
        x = subgradients.root_of(x.real**2 + x.imag**2, jnp.sqrt)
    if ord == 2:
        return subgradients.root_of((x * x).sum(over, keepdims=keepdim), jnp.sqrt)
    if math.isinf(ord):
        return (jnp.max if ord > 0 else jnp.min)(subgradients.absolute(x), over, keepdims=keepdim)
    if ord == 0:
        return (x != 0).sum(over, keepdims=keepdim).astype(x.dtype)
    return subgradients.root_of(
        subgradients.power_of_absolute(x, ord).sum(over, keepdims=keepdim), lambda total: total ** (1 / ord)
    )
