"""PyTorch's operators of complex numbers and Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.pytorch.operators import OPERATORS, operator

OPERATORS |= {
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([x.real, x.imag], axis=-1),
    "complex": lax.complex,
    "polar": lambda length, angle: lax.complex(length * jnp.cos(angle), length * jnp.sin(angle)),
    "real": jnp.real,
    "imag": jnp.imag,
    "resolve_conj": lambda x: x,
    "resolve_neg": lambda x: x,
} | dict.fromkeys(("conj", "_conj", "conj_physical", "_conj_physical"), jnp.conj)


def _along_axes(transform: Callable, x: Array, dims: Sequence[int]) -> Array:
    """A one-dimensional transform along each of the axes."""
    for dim in dims:
        x = transform(x, axis=dim)
    return x


def _normalized(x: Array, sizes: Sequence[int], normalization: int) -> Array:
    """x divided by 1, sqrt(n) or n for the normalization 0, 1 or 2, where n is the product of the sizes."""
    count = math.prod(sizes)
    return x if normalization == 0 else x / (math.sqrt(count) if normalization == 1 else count)


@operator("_fft_r2c")
def _real_to_complex(x: Array, dim: Sequence[int], normalization: int, onesided: bool) -> Array:
    *others, last = dim
    first = jnp.fft.rfft(x, axis=last) if onesided else jnp.fft.fft(x, axis=last)
    return _normalized(_along_axes(jnp.fft.fft, first, others), [x.shape[d] for d in dim], normalization)


@operator("_fft_c2c")
def _complex_to_complex(x: Array, dim: Sequence[int], normalization: int, forward: bool) -> Array:
    sizes = [x.shape[d] for d in dim]
    if forward:
        return _normalized(_along_axes(jnp.fft.fft, x, dim), sizes, normalization)
    return _normalized(_along_axes(jnp.fft.ifft, x, dim) * math.prod(sizes), sizes, normalization)


@operator("_fft_c2r")
def _complex_to_real(x: Array, dim: Sequence[int], normalization: int, last_dim_size: int) -> Array:
    *others, last = dim
    sizes = [*(x.shape[d] for d in others), last_dim_size]
    inverse = jnp.fft.irfft(_along_axes(jnp.fft.ifft, x, others), last_dim_size, axis=last)
    return _normalized(inverse * math.prod(sizes), sizes, normalization)
