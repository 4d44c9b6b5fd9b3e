"""Sums of 16-bit numbers are rounded once, against float32."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.xla.pipeline import optimize

X = np.random.default_rng(0).normal(1, 1, (32, 12, 12, 8))
WORDS = np.random.default_rng(1).integers(0, 4, X.shape[:-1])


def bias(x: Any) -> Any:
    return jax.vjp(lambda b: x + b, jnp.zeros(8, x.dtype))[1](x)[0]


def table(x: Any) -> Any:
    return jax.vjp(lambda t: t[WORDS], jnp.zeros((4, 8), x.dtype))[1](x)[0]


def counted(x: Any) -> Any:
    return jnp.zeros((2, 4, 8), x.dtype).at[:, WORDS].add(x, mode="drop")


def pooled(x: Any) -> Any:
    return nn.avg_pool(x, (12, 12), (1, 1), "SAME")


def sequential(x: Any) -> Any:
    return jax.lax.scan(lambda total, part: (total, bias(part)), 0, x.reshape(2, 16, 12, 12, 8))[1]


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("function", [bias, table, counted, pooled, sequential, jax.vmap(bias)])
def test_sums_are_rounded_once(function: Any, dtype: Any):
    short = jnp.asarray(X, dtype)
    expected, found = function(short.astype(jnp.float32)), jax.jit(optimize(function))(short)
    assert found.dtype == dtype
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2 * float(jnp.finfo(dtype).eps), atol=1e-3)


def test_maximum_of_an_empty_array():
    f = lambda x: jnp.max(x, axis=1, initial=0.0)  # noqa: E731
    np.testing.assert_array_equal(jax.jit(optimize(f))(jnp.zeros((1, 0))), [0])
