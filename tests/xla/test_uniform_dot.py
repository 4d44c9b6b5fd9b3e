"""Products with a constant-valued factor, which XLA's CPU backend may compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedrax.xla.pipeline import optimize
from fedrax.xla.tracing import equations_in

X = np.random.default_rng(0).normal(size=(1024, 4, 16))
ONES = jnp.ones((16, 2))


def largest(x: Any) -> Any:
    return (x * x).max(1)


def in_loop(x: Any, s: Any) -> Any:
    filled = jnp.full((16, 2), s)
    return lax.scan(lambda total, x: (total + largest(x) @ filled, None), jnp.zeros((256, 2)), x.reshape(4, 256, 4, 16))


FUNCTIONS: dict[str, Callable] = {
    "a constant": lambda x, s: largest(x) @ ONES,
    "a number for all": lambda x, s: largest(x) @ jnp.broadcast_to(s, (16, 2)),
    "made of one": lambda x, s: largest(x) @ jnp.exp(jnp.zeros((16, 2)) + s / 2).T.reshape(16, 2),
    "the left factor": lambda x, s: jnp.full((2, 16), s) @ largest(x).T,
    "a vector": lambda x, s: largest(x) @ jnp.full(16, s),
    "over two axes": lambda x, s: jnp.tensordot(x * x, jnp.full((3, 4, 16), s), ((1, 2), (1, 2))),
    "of a batch": lambda x, s: jnp.einsum("bnk,bkj->jbn", x.max(1).reshape(8, 128, 16), jnp.full((8, 16, 3), s)),
    "of a batch, first": lambda x, s: jnp.einsum("bkj,bnk->bjn", jnp.full((8, 16, 3), s), x.max(1).reshape(8, 128, 16)),
    "both": lambda x, s: jnp.full((3, 16), s) @ ONES,
    "called": lambda x, s: jax.jit(lambda x, w: largest(x) @ w)(x, jnp.full((16, 2), s)),
    "computed twice": lambda x, s: jax.checkpoint(lambda x, w: largest(x) @ w)(x, jnp.full((16, 2), s)),
    "a branch": lambda x, s: lax.cond(s > 1, lambda x, w: largest(x) @ w, lambda x, w: x.max(1) @ w, x, s * ONES),
    "a loop": in_loop,
    "of a call": lambda x, s: largest(x) @ jax.jit(lambda s: jnp.full((16, 2), s))(s),
}


@pytest.mark.slow(keep=8)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.bfloat16])
def test_results_agree_with_uncompiled_ones(name: str, dtype: Any):
    function = FUNCTIONS[name]
    with jax.enable_x64():  # float32 constants, and float64 numbers computed here
        x, s = jnp.asarray(X, dtype), jnp.asarray(1.25, dtype)
        with jax.disable_jit():
            expected = jax.tree.map(np.asarray, function(x.astype(jnp.float64), s.astype(jnp.float64)))
        found = jax.jit(optimize(function))(x, s)
        tolerance = {jnp.float32: 1e-5, jnp.float64: 1e-12, jnp.bfloat16: 2**-7}[dtype]  # two roundings to 8 bits
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a.astype(jnp.float64), b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow(keep=6)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_product_is_left(name: str):
    made = jax.make_jaxpr(optimize(FUNCTIONS[name]))(jnp.float32(X), jnp.float32(1.25))
    assert not [e for e in equations_in(made) if e.primitive.name == "dot_general"]


def test_gradients_of_means():
    """The cotangent of a mean of outputs is a constant."""
    w = np.random.default_rng(1).normal(size=(16, 2))
    gradient = jax.grad(lambda w, x: (largest(x) @ w).mean())
    found = jax.jit(optimize(gradient))(jnp.float32(w), jnp.float32(X))
    np.testing.assert_allclose(found, np.tile((X**2).max(1).mean(0)[:, None] / 2, 2), rtol=1e-5)


@pytest.mark.parametrize("held", [jax.jit(jnp.matmul), jax.checkpoint(jnp.matmul)])
def test_function_called_with_constant_and_other_factors(held: Callable):
    """JAX has one program of the function for both calls."""

    def both(x: Any, w: Any) -> Any:
        return held(largest(x), ONES) + 2 * held(largest(x), w)

    w = jnp.arange(32.0).reshape(16, 2)
    with jax.disable_jit():
        expected = both(jnp.float32(X), w)
    np.testing.assert_allclose(jax.jit(optimize(both))(jnp.float32(X), w), expected, rtol=1e-5)
    left = [e for e in equations_in(jax.make_jaxpr(optimize(both))(X, w)) if e.primitive.name == "dot_general"]
    assert len(left) == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda x, s: largest(x) @ jnp.arange(32.0).reshape(16, 2),
        lambda x, s: largest(x) @ jnp.where(jnp.eye(16, 2) > 0, s, 1),
        lambda x, s: largest(x) @ lax.pad(jnp.full((14, 2), s), jnp.float32(0), [(1, 1, 0), (0, 0, 0)]),
        lambda x, s: largest(x) @ lax.fori_loop(0, 3, lambda i, w: w + jnp.eye(16, 2), jnp.full((16, 2), s)),
        lambda x, s: x.reshape(-1, 1) @ jnp.full((1, 1), s),
    ],
    ids=["different entries", "selected entries", "padded", "changed in a loop", "single entry"],
)
def test_other_products_are_unchanged(other: Callable):
    fast = optimize(other)
    made = jax.make_jaxpr(fast)(jnp.float32(X), jnp.float32(2))
    assert [e for e in equations_in(made) if e.primitive.name == "dot_general"]
    with jax.disable_jit():
        expected = other(jnp.float32(X), jnp.float32(2))
    np.testing.assert_allclose(jax.jit(fast)(jnp.float32(X), jnp.float32(2)), expected, rtol=1e-5)
