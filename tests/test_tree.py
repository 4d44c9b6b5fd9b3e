"""Vector algebra on trees against NumPy, for leaves of all kinds of shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import tree

SHAPES = [(), (1,), (0,), (3, 0), (7,), (30_000,), (100, 33), (5, 5, 3, 8), (3, 20_000)]
"""Scalars, empty arrays, and sizes beyond which rows are summed blockwise."""
LARGEST = np.finfo(np.float32).max


def leaf(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inner_products(shape):
    a, b, c = leaf(shape, 0), leaf(shape, 1), leaf((4,), 2)
    expected = np.sum(a.astype(float) * b) + np.sum(c.astype(float) ** 2)
    found = jax.jit(tree.dot)({"a": jnp.asarray(a), "c": jnp.asarray(c)}, {"a": jnp.asarray(b), "c": jnp.asarray(c)})
    size = np.linalg.norm(a) * np.linalg.norm(b) + 1
    assert found.dtype == jnp.float32 and abs(float(found) - expected) < 1e-6 * size


def test_norms_of_fused_expressions():
    a, b = ({name: leaf(shape, k) for name, shape in (("a", (40, 5000)), ("b", (0,)))} for k in (0, 1))
    found = jax.jit(lambda a, b: tree.norm_of(lambda x, y: x - 2 * y, a, b))(a, b)
    np.testing.assert_allclose(found, np.linalg.norm(a["a"] - 2 * b["a"]), rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nonfinite_entries_are_detected_at_every_position(shape):
    values = np.sign(leaf(shape, 0)) * LARGEST
    all_finite = jax.jit(tree.all_finite)
    assert all_finite({"a": jnp.asarray(values), "count": jnp.int32(3), "b": jnp.ones(2)})
    for place in {0, values.size // 2, values.size - 1} if values.size else ():
        for bad in (np.nan, np.inf, -np.inf):
            spoilt = values.copy().reshape(-1)
            spoilt[place] = bad
            assert not all_finite({"a": jnp.asarray(spoilt.reshape(shape)), "b": jnp.ones(2)})


def test_low_precision_dtypes_are_checked():
    assert tree.all_finite(jnp.ones(3, jnp.bfloat16)) and not tree.all_finite(jnp.array([1, jnp.nan], jnp.bfloat16))
    assert tree.all_finite({"count": jnp.int32(1)})
