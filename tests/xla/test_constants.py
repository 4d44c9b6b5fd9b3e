"""Large constants are inputs of compiled programs, wherever a program contains them."""

import gc
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedrax import xla
from fedrax.xla import constants

LARGE = np.random.default_rng(0).normal(size=(300, 300)).astype(np.float32)
SMALL = np.arange(300, dtype=np.float32)
X = jnp.linspace(0.0, 1.0, 300)


def product(x: Array) -> Array:
    return x @ LARGE + SMALL


@jax.custom_jvp
def with_derivative(x: Array) -> Array:
    return product(x)


with_derivative.defjvp(lambda xs, ts: (product(xs[0]), ts[0] @ jnp.asarray(LARGE)))


@jax.custom_vjp
def with_gradient(x: Array) -> Array:
    return product(x)


with_gradient.defvjp(lambda x: (product(x), None), lambda _, g: (g @ LARGE.T,))

CASES: dict[str, Callable[[Array], Array]] = {
    "plain": product,
    "called twice": lambda x: product(product(x)),
    "in a call": lambda x: jax.jit(product)(x),
    "in a call of a call": lambda x: jax.jit(lambda x: 2 * jax.jit(product)(x))(x),
    "in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(product(x)), x),
    "in a scan": lambda x: jax.lax.scan(lambda x, i: (jnp.tanh(product(x)), x.sum() * i), x, jnp.arange(3))[0],
    "in a branch": lambda x: jax.lax.cond(x[0] > 0, product, lambda x: x, x),
    "with a derivative": with_derivative,
    "with a gradient": with_gradient,
    "gradient": jax.grad(lambda x: jnp.sin(with_gradient(with_derivative(x))).sum()),
    "checkpoint": jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(product(x)))(x).sum()),
    "over a batch": lambda x: jax.vmap(product)(jnp.stack([x, 2 * x])),
    "output": lambda x: jnp.asarray(LARGE) + x[0],
}


@pytest.mark.parametrize("name", CASES)
def test_large_constants_are_inputs(name: str):
    compiled = xla.jit(CASES[name])
    np.testing.assert_allclose(compiled(X), jax.jit(CASES[name])(X), rtol=1e-6, atol=1e-6)
    text = compiled.lower(X).as_text()
    assert max(map(len, text.splitlines())) < 20_000, "the program contains the constant"
    assert len(compiled.lower(X).args_info[0][0]) >= 1
    np.testing.assert_array_equal(compiled.lower(X).compile()(X), compiled(X))


def test_program_without_large_constants_is_unchanged():
    compiled = xla.jit(lambda x: x + SMALL)
    assert compiled.lower(X).as_text() == jax.jit(lambda x: x + SMALL).lower(X).as_text()


def test_donated_arguments_are_donated():
    compiled = xla.jit(lambda a, x: (a + product(x), x), donate_argnums=(0,))
    given = jnp.zeros(300)
    found, _ = compiled(given, X)
    assert given.is_deleted() and not X.is_deleted()
    np.testing.assert_allclose(found, product(X), rtol=1e-6, atol=1e-6)


def test_constants_are_freed_with_their_owner():
    def large() -> int:
        jax.clear_caches()
        gc.collect()
        return sum(array.shape == LARGE.shape for array in jax.live_arrays())

    def run() -> None:
        owned, x = jnp.asarray(LARGE), jax.device_put(X, jax.devices()[0])
        for scale in (1, 2):
            xla.jit(lambda x, scale=scale: scale * (x @ owned))(x)

    before = large()
    run()
    assert large() == before


def test_programs_share_copies_of_constants_until_their_owner_is_deleted():
    before, owned = len(constants._copies), LARGE.copy()
    assert constants._place(owned, None) is constants._place(owned, None)
    assert len(constants._copies) == before + 1
    del owned
    assert len(constants._copies) == before


def test_cpu_devices_share_the_memory_of_a_constant():
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    for array in (LARGE, jnp.asarray(LARGE)):
        placed = constants._place(array, everywhere)
        assert len(placed.addressable_shards) == len(jax.devices()) > 1
        assert len({shard.data.unsafe_buffer_pointer() for shard in placed.addressable_shards}) == 1
        np.testing.assert_array_equal(placed, LARGE)


def test_shapes_and_devices_have_separate_programs():
    compiled = xla.jit(product)
    for x in (X, jnp.stack([X, X]), jnp.stack([X, X, X])):
        np.testing.assert_allclose(compiled(x), np.asarray(x) @ LARGE + SMALL, rtol=1e-5, atol=1e-5)
    for device in jax.devices():
        found = compiled(jax.device_put(X, device))
        assert found.devices() == {device}
        np.testing.assert_allclose(found, product(X), rtol=1e-6, atol=1e-6)
