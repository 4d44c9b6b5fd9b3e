"""Assertions that rewritten functions and their gradients equal JAX's up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from fedrax.xla.pipeline import optimize

TOLERANCE = {np.dtype(t): 1e-5 for t in (np.float32, np.complex64)}
TOLERANCE |= {np.dtype(t): 1e-13 for t in (np.float64, np.complex128)}
"""Largest difference relative to the largest value, for sums of up to a thousand terms in another order."""
every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """Enable float64."""
    with jax.enable_x64(True):
        yield


def draw(rng: np.random.Generator, shape: Any, dtype: Any = np.float32) -> np.ndarray:
    return rng.normal(size=tuple(shape)).astype(dtype)


def assert_same(function: Callable, *args: Any) -> None:
    """Assert that ``function`` and its rewritten form have equal outputs up to rounding, of equal dtypes."""
    expected, rewritten = jax.jit(function)(*args), jax.jit(optimize(function))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(rewritten), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=0, atol=TOLERANCE[a.dtype] * np.abs(a).max(initial=1))


def gradients(function: Callable, seed: int) -> Callable:
    """(arguments) -> value, and gradients of its inner product with random numbers."""

    def both(*args: Array) -> tuple:
        y, pull = jax.vjp(function, *args)
        return y, pull(jnp.asarray(draw(np.random.default_rng(seed), y.shape, y.dtype)))

    return both
