"""Indices of the largest entries of a vector against a stable sort."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.compression.topk import largest


def expected(values: np.ndarray, k: int) -> np.ndarray:
    return np.sort(np.argsort(-np.abs(values.astype(float)), kind="stable")[:k])


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_topk_agrees_with_a_stable_sort(dtype: str) -> None:
    """Vectors with distinct entries, many ties, zeros only, and the smallest and largest numbers of the dtype."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        edge = [float(jnp.finfo(dtype).tiny), float(jnp.finfo(dtype).max), np.inf, -np.inf, 0.0, -0.0, 5e-8, -2.0]
        drawn = [rng.normal(size=97), rng.integers(-3, 4, 97), np.zeros(97), np.ones(97), rng.choice(edge, 97)]
        vectors = jnp.asarray(np.stack(drawn), dtype)
        for k in (1, 2, 48, 96, 97):
            desired = [expected(np.asarray(vector), k) for vector in vectors]
            np.testing.assert_array_equal(jax.jit(jax.vmap(lambda v, k=k: largest(v, k)))(vectors), desired)
            np.testing.assert_array_equal([largest(vector, k) for vector in vectors], desired)


def test_nan_is_the_largest() -> None:
    """As in ``jax.lax.top_k``, so that divergence is not hidden."""
    np.testing.assert_array_equal(largest(jnp.array([1.0, jnp.nan, 3.0, jnp.inf]), 2), [1, 3])
