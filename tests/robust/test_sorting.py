"""Sorting of columns by a network against NumPy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.robust.sorting_network import sort_columns


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 33, 64, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_columns_rise(rows: int, dtype: Any) -> None:
    """Several blocks of them, equal numbers, infinities and NaN among them; each keeps its bits."""
    rng = np.random.default_rng(rows)
    x = rng.integers(-9, 9, (rows, 7, 31)).astype(dtype)
    x[rng.random(x.shape) < 0.1] = np.inf
    x[rng.random(x.shape) < 0.1] = -np.inf
    x[rng.random(x.shape) < 0.05] = np.nan
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            jax.jit(sort_columns, static_argnames="block_bytes")(x, block_bytes=5_000), np.sort(x, axis=0)
        )


def test_every_order_of_ones_and_zeros() -> None:
    """A network that sorts these sorts everything (Knuth's principle); twelve rows, all 4,096 of them."""
    x = ((np.arange(4096)[None] >> np.arange(12)[:, None]) & 1).astype(np.float32)
    np.testing.assert_array_equal(sort_columns(jnp.asarray(x)), np.sort(x, axis=0))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (4,), (3000, 2)])
def test_other_shapes(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    np.testing.assert_array_equal(sort_columns(jnp.asarray(x)), np.sort(x, axis=0))
