"""Sorting of columns by a sorting network against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.robust.sorting_network import sort_columns


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 33, 64, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_columns_are_sorted(rows: int, dtype: Any) -> None:
    """Several blocks, with ties, infinities and NaN; bit patterns are kept."""
    rng = np.random.default_rng(rows)
    x = rng.integers(-9, 9, (rows, 7, 31)).astype(dtype)
    x[rng.random(x.shape) < 0.1] = np.inf
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[rng.random(x.shape) < 0.05] = np.nan
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            jax.jit(sort_columns, static_argnames="block_bytes")(x, block_bytes=5_000), np.sort(x, axis=0)
        )


def test_all_zero_one_columns_are_sorted() -> None:
    """By the 0-1 principle (Knuth), a network that sorts all 4,096 columns of zeros and ones sorts any column."""
    x = ((np.arange(4096)[None] >> np.arange(12)[:, None]) & 1).astype(np.float32)
    np.testing.assert_array_equal(sort_columns(jnp.asarray(x)), np.sort(x, axis=0))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (4,), (3000, 2)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(sort_columns(jnp.asarray(x)), np.sort(x, axis=0))
