"""JAX's random bits, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.xla.pipeline import optimize

KEY = jax.random.key(5)


def assert_same(function, *args, ulps: int = 0):
    """Assert equality, also in a loop and compiled, up to ``ulps`` units in the last place."""
    rewritten = optimize(function)
    assert str(jax.make_jaxpr(rewritten)(*args)) != str(jax.make_jaxpr(function)(*args))
    for found, expected in ((rewritten(*args), function(*args)), (jax.jit(rewritten)(*args), jax.jit(function)(*args))):
        assert found.dtype == expected.dtype
        if ulps:
            np.testing.assert_array_max_ulp(np.asarray(found), np.asarray(expected), ulps)
        else:
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("shape", [(4096,), (4097,), (3, 5, 999), (1, 70_001), (2, 2, 2048, 1)])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16, jnp.uint32])
def test_bits_equal_those_of_jax(shape: tuple[int, ...], dtype):
    assert_same(lambda key: jax.random.bits(key, shape, dtype), KEY)


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("keys", [(2,), (7,), (3, 5), (4096,)])
@pytest.mark.parametrize("size", [1, 33, 2500])
def test_bits_of_many_keys(keys: tuple[int, ...], size: int):
    many = jax.random.split(KEY, keys)
    draw = lambda key: jax.random.bits(key, (size,))  # noqa: E731
    for _ in keys:
        draw = jax.vmap(draw)
    if many.size * size < 4096:
        np.testing.assert_array_equal(optimize(draw)(many), draw(many))
    else:
        assert_same(draw, many)


@pytest.mark.parametrize("draw", [jax.random.uniform, jax.random.normal, jax.random.laplace, jax.random.gumbel])
def test_draws_equal_those_of_jax(draw):
    """Bits are equal; with fast compilation XLA rounds a logarithm differently in different programs."""
    assert_same(lambda key: draw(key, (50, 100)), KEY, ulps=1 if draw is jax.random.laplace else 0)


def test_gradients_have_the_same_draws():
    def loss(w, key):
        kept = jax.random.bernoulli(key, 0.8, (90, 60))
        return jnp.where(kept, jnp.ones((90, 60)) * w, 0).sum() ** 2

    assert_same(jax.grad(loss), jnp.float32(0.3), KEY)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_other_key_types_are_unchanged(kind: str):
    key, draw = jax.random.key(0, impl=kind), lambda key: jax.random.bits(key, (5000,))
    assert str(jax.make_jaxpr(optimize(draw))(key)) == str(jax.make_jaxpr(draw)(key))


def test_small_and_64_bit_draws_are_unchanged():
    with jax.enable_x64(True):
        for draw in (lambda key: jax.random.bits(key, (4095,)), lambda key: jax.random.bits(key, (5000,), jnp.uint64)):
            assert str(jax.make_jaxpr(optimize(draw))(KEY)) == str(jax.make_jaxpr(draw)(KEY))
