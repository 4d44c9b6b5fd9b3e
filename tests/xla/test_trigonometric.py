"""Sines and cosines of large arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.extend import core

from fedrax.xla.pipeline import optimize
from tests.xla.agreement import assert_same, double_precision, draw, gradients

__all__ = ["double_precision"]
BOTH = pytest.mark.parametrize("name", ["sin", "cos"])


def compiled(function: Callable, *args: object) -> str:
    return jax.jit(optimize(function)).lower(*args).as_text()


@pytest.mark.slow(keep=4)
@BOTH
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 30.0, 1e3, 9999.0, 1e6, 1e30])
def test_error_is_at_most_two_units_in_the_last_place(name: str, scale: float) -> None:
    x = (np.random.default_rng(0).uniform(-1, 1, (64, 4096)) * scale).astype(np.float32)
    found = jax.jit(optimize(getattr(jnp, name)))(x)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, getattr(np, name)(x.astype(np.float64)), rtol=2.4e-7, atol=1e-38)


@BOTH
def test_multiples_of_a_quarter_turn(name: str) -> None:
    """One of both is almost zero, and depends on the rounding of the argument."""
    x = (np.arange(-4096, 4096) * np.pi / 2).astype(np.float32)
    found, expected = jax.jit(optimize(getattr(jnp, name)))(x), getattr(np, name)(x.astype(np.float64))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-10)


@pytest.mark.slow(keep=4)
@BOTH
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38])
def test_nonfinite_entries_become_nan_and_do_not_affect_others(name: str, odd: float) -> None:
    x = draw(np.random.default_rng(1), (4096,))
    x[17] = odd
    found, expected = jax.jit(optimize(getattr(jnp, name)))(x), jax.jit(getattr(jnp, name))(x)
    np.testing.assert_allclose(found, expected, rtol=2.4e-7)


@pytest.mark.slow(keep=4)
@BOTH
@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16, np.float16])
def test_values_and_gradients_of_every_type(name: str, dtype: type) -> None:
    x = jnp.asarray(3 * draw(np.random.default_rng(2), (8, 1024)), dtype)
    one = getattr(jnp, name)
    expected, found = (jax.jit(f(gradients(lambda x: one(one(x) * 3), 3)))(x) for f in (lambda f: f, optimize))
    digits = {2: 0.02, 4: 2e-6, 8: 1e-14}[jnp.dtype(dtype).itemsize]
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(np.float64(b), np.float64(a), atol=digits * np.abs(np.float64(a)).max())


def test_network_of_sines_in_loops_and_for_vectorized_clients() -> None:
    """With small weights, so that layers do not amplify rounding errors tenfold."""
    rng = np.random.default_rng(4)
    weights, x = draw(rng, (3, 32, 32)) / np.float32(32**0.5), 5 * draw(rng, (2, 128, 32))

    def loss(weights: Array, x: Array) -> Array:
        return jnp.square(jax.lax.scan(lambda h, w: (jnp.sin(2 * h @ w), None), x, weights)[0]).mean()

    def of_clients(weights: Array, x: Array) -> tuple:
        return jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0))(weights, x)

    assert_same(of_clients, weights, x)


@BOTH
def test_small_arrays_are_unchanged(name: str) -> None:
    one = getattr(jnp, name)
    left = {4095: True, 4096: False}
    for size, as_it_is in left.items():
        assert ("stablehlo.case" not in compiled(one, np.zeros(size, np.float32))) == as_it_is


def test_checkpoints_with_constants_are_rewritten():
    mask = jnp.tril(jnp.ones((8, 8), jnp.float32))
    attend = jax.jit(lambda w, x: jnp.sin(jnp.tile(x @ w, (64, 1)) * jnp.tile(mask, (64, 1))))
    f = lambda w, x: (jax.checkpoint(attend)(w, x) ** 2).sum()  # noqa: E731
    w, x = (jax.random.normal(jax.random.key(k), (8, 8), jnp.float32) for k in range(2))
    found = jax.make_jaxpr(optimize(f))(w, x)
    assert "cond" in str(found) and "cond" not in str(jax.make_jaxpr(f)(w, x))
    np.testing.assert_allclose(core.jaxpr_as_fun(found)(w, x)[0], f(w, x), rtol=1e-5)
