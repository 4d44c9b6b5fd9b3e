"""Random arrays drawn in one loop equal those of the function, and programs become smaller."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from fedrax.xla.batch_rng import batch_random_draws
from fedrax.xla.tracing import equations_in

KEY = jax.random.key(3)


def number_of_draws(function, *args) -> int:
    """Number of equations that draw random bits."""
    compiled = jax.make_jaxpr(function)(*args)
    return sum(equation.primitive.name == "random_bits" for equation in equations_in(compiled))


def number_of_loops(function, *args) -> int:
    return sum(equation.primitive.name == "scan" for equation in equations_in(jax.make_jaxpr(function)(*args)))


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        if jnp.issubdtype(one.dtype, jnp.floating):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)
        else:
            np.testing.assert_array_equal(one, other)


class Deep(nn.Module):
    """Kernels of many shapes with different initializers."""

    @nn.compact
    def __call__(self, x):
        for i, width in enumerate((3, 5, 8)):
            x = nn.relu(nn.GroupNorm(1)(nn.Conv(width, (3, 3))(x)))
            x = nn.Conv(width, (1, i + 1), kernel_init=nn.initializers.normal(0.02))(x)
        x = x.reshape(len(x), -1)
        for width in (40, 9, 300):
            x = nn.Dense(width, kernel_init=nn.initializers.glorot_uniform(), bias_init=nn.initializers.uniform())(x)
        return nn.Dense(2, kernel_init=nn.initializers.orthogonal())(x)


def linen(key):
    return Deep().init(key, jnp.zeros((1, 7, 7, 1)))


def of_equinox(key):
    return eqx.filter(eqx.nn.MLP(5, 3, 11, depth=4, key=key), eqx.is_array)


def of_nnx(key):
    class Stack(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(4, 6, rngs=rngs)
            self.second = nnx.Conv(3, 5, (3, 3), rngs=rngs)
            self.third = nnx.Linear(120, 90, rngs=rngs)
            self.last = nnx.LSTMCell(3, 7, rngs=rngs)

    return nnx.state(Stack(nnx.Rngs(key)), nnx.Param)


def plain(key):
    """Numbers of several distributions, with their own bounds, one of which is used twice."""
    keys = jax.random.split(key, 9)
    low = [jax.random.uniform(k, (n, 3), minval=-n, maxval=n) for n, k in zip((1, 4, 9000), keys[:3], strict=True)]
    normal = [0.1 * n * jax.random.normal(k, (n,)) + n for n, k in zip((1, 8192, 8193), keys[3:6], strict=True)]
    coins = [jax.random.bernoulli(k, 0.3, (n,)) for n, k in zip((2, 5, 7), keys[6:], strict=True)]
    return low, normal, coins, normal[1] * normal[1], low[2].sum()


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize("draw", [linen, of_equinox, of_nnx, plain], ids=lambda draw: draw.__name__)
def test_draws_are_unchanged(draw) -> None:
    together = batch_random_draws(draw)
    assert number_of_loops(together, KEY) > number_of_loops(draw, KEY)
    assert number_of_draws(together, KEY) <= number_of_draws(draw, KEY) - 3
    for key in (KEY, jax.random.key(2**33 + 5)):
        assert_same(jax.jit(together)(key), jax.jit(draw)(key))


def test_arrays_with_the_same_distribution_share_a_loop() -> None:
    def normal(key):
        return [jax.random.normal(jax.random.fold_in(key, n), (n, 2)) for n in range(1, 12)]

    assert (number_of_loops(batch_random_draws(normal), KEY), number_of_draws(batch_random_draws(normal), KEY)) == (
        1,
        0,
    )
    assert_same(jax.jit(batch_random_draws(normal))(KEY), normal(KEY))


def test_drawn_keys_and_scalars() -> None:
    def scaled(key):
        keys = jax.random.split(key, 4)
        scale = jax.random.uniform(keys[3])  # a scalar that is not a constant
        return [scale * jax.random.normal(k, (n,)) for n, k in zip((5, 6, 7), keys[:3], strict=True)]

    assert number_of_loops(batch_random_draws(scaled), KEY) == 1
    assert_same(jax.jit(batch_random_draws(scaled))(KEY), scaled(KEY))


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_other_key_types_are_unchanged(impl: str) -> None:
    def draw(key):
        return [jax.random.normal(k, (n,)) for n, k in zip((3, 4, 5), jax.random.split(key, 3), strict=True)]

    key = jax.random.key(0, impl=impl)
    assert number_of_loops(batch_random_draws(draw), key) == number_of_loops(draw, key)
    assert_same(batch_random_draws(draw)(key), draw(key))


def test_functions_with_effects_are_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    def draw(key):
        jax.debug.print("drawing")
        return [jax.random.normal(k, (n,)) for n, k in zip((3, 4, 5), jax.random.split(key, 3), strict=True)]

    assert_same(jax.jit(batch_random_draws(draw))(KEY), draw(KEY))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("drawing") == 2


def test_other_bit_widths_and_few_arrays_are_unchanged() -> None:
    short = lambda key: [jax.random.normal(key, (n,), jnp.bfloat16) for n in (3, 4, 5)]  # noqa: E731
    few = lambda key: [jax.random.normal(key, (n,)) for n in (3, 4)]  # noqa: E731
    for draw in (short, few):
        assert number_of_loops(batch_random_draws(draw), KEY) == 0
        assert_same(jax.jit(batch_random_draws(draw))(KEY), jax.jit(draw)(KEY))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", ["signs", "sparse", "finite", "clamped", "bounds", "geometric", "callbacks"])
def test_draws_selected_by_a_condition(name: str) -> None:
    of = jax.random
    half = lambda _: np.float32(0.5)  # noqa: E731
    ask = lambda k: jax.pure_callback(half, jax.ShapeDtypeStruct((), jnp.float32), of.key_data(k))  # noqa: E731
    draw = {
        "signs": lambda k, n: jnp.where(of.bernoulli(k, 0.5, (n,)), 1.0, -1.0),
        "sparse": lambda k, n: jnp.where((u := of.uniform(k, (n,))) < 0.5, u, 0.0),
        "finite": lambda k, n: jnp.nan_to_num(of.normal(k, (n,))),
        "clamped": lambda k, n: lax.clamp(-1.0, of.normal(k, (n,)), 1.0),
        "bounds": lambda k, n: lax.clamp(of.uniform(k, (n,)), jnp.full((n,), 0.5), jnp.ones(n)),
        "geometric": lambda k, n: of.geometric(k, 0.3, (n,)),
        "callbacks": lambda k, n: ask(k) * of.normal(k, (n,)),
    }[name]
    every = lambda key: [draw(k, n) for n, k in zip((4, 7, 9000), of.split(key, 3), strict=True)]  # noqa: E731
    assert_same(jax.jit(batch_random_draws(every))(KEY), jax.jit(every)(KEY))
