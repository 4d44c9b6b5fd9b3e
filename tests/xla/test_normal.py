"""Normal random numbers: bits against published ones, quantiles against SciPy, and derived draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedrax import FedraxError
from fedrax.xla.flops import count_equations
from fedrax.xla.normal import _leaf, _log, _quantile, _uniform, normal_noise
from fedrax.xla.threefry import threefry


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(z) for z in normal_noise(jax.random.key(seed), [jnp.zeros(shape) for shape in shapes])]


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_bits_agree_with_published_ones(counter: tuple, key: tuple, block: tuple):
    """Known answers of the Random123 library."""
    first, second = threefry(jnp.array(key, jnp.uint32), *(jnp.uint32(word) for word in counter))
    assert (int(first), int(second)) == block


def test_uniform_numbers_are_precise_near_zero():
    words = np.array([0, 1, 2, 1 << 8, 1 << 31, 0xFFFFFFFE, 0xFFFFFFFF], np.uint32)
    low = np.array([0, 5, 0x7FFFFFFF, 77, 3, 0x7FFFFFFF, 0x7FFFFFFF], np.uint32)
    q = np.asarray(_uniform(jnp.asarray(words), jnp.asarray(low)), float)
    np.testing.assert_allclose(q, ((words >> 1) + (low + 0.5) / 2**31) / 2**31, rtol=2e-7)
    assert q[0] == 2.0**-63 and q.max() <= 1


def test_quantiles_agree_with_scipy():
    q = np.concatenate([np.logspace(-63, 0, 40_001, base=2), 1 - np.logspace(-24, -1, 2001, base=2)]).astype(np.float32)
    expected = -stats.norm.ppf(q.astype(float) / 2)
    np.testing.assert_allclose(np.asarray(jax.jit(_quantile)(q)), expected, rtol=1e-6, atol=1e-8)
    assert expected.max() > 9
    np.testing.assert_allclose(_log(jnp.asarray(q)), np.log(q.astype(float)), rtol=1e-6, atol=1e-7)


def test_draws_are_normal():
    (z,) = drawn(0, (1000, 1000))
    moments = np.array([np.mean(z.astype(float) ** k) for k in (1, 2, 3, 4)])
    spread = np.sqrt(np.array([1, 2, 15, 96]) / z.size)
    assert (np.abs(moments - [0, 1, 0, 3]) < 4.4 * spread).all()
    assert stats.kstest(z.ravel(), "norm").pvalue > 1e-5
    tails = [(np.abs(z) > t).sum() for t in (3, 4)]
    for count, t in zip(tails, (3, 4), strict=True):
        mean = z.size * 2 * stats.norm.sf(t)
        assert stats.poisson.cdf(count, mean) > 1e-5 and stats.poisson.sf(count - 1, mean) > 1e-5


def test_draws_of_leaves_keys_and_neighbors_are_independent():
    n = 200_000
    rows = [*drawn(1, (n,), (n // 2, 2)), *drawn(2, (n,)), *drawn(1 << 31, (n,))]
    rows = [row.ravel() for row in rows]
    pairs = [(a, b) for i, a in enumerate(rows) for b in rows[:i]]
    pairs += [(rows[0][:-lag], rows[0][lag:]) for lag in (1, 2, n // 2)]
    for a, b in pairs:
        for of in (lambda v: v, np.abs):
            assert abs(np.corrcoef(of(a), of(b))[0, 1]) < 4.9 / np.sqrt(len(a))


def test_draws_do_not_depend_on_the_compilation():
    keys = jax.random.split(jax.random.key(3), 3)
    like = {"a": jnp.zeros((4, 5)), "b": jnp.zeros(()), "c": jnp.zeros((0, 2))}
    together = jax.jit(jax.vmap(lambda key: normal_noise(key, like)))(keys)
    for i, key in enumerate(keys):
        for a, b in zip(jax.tree.leaves(normal_noise(key, like)), jax.tree.leaves(together), strict=True):
            assert a.dtype == jnp.float32
            np.testing.assert_allclose(a, b[i], rtol=1e-6)
    other = normal_noise(jax.random.key(3, impl="rbg"), like)
    assert jax.tree.map(jnp.shape, other) == jax.tree.map(jnp.shape, like)


def test_many_leaves_are_drawn_by_one_loop():
    """Ends of leaves and of iterations never coincide."""
    small = [(3, 5), (4096,), (4097,), (), (0,), (100, 99), (1,), (2, 3, 4), (8192,)]
    shapes = [*small[:4], (513, 512), *small[4:]]  # one that is drawn separately
    key = jax.random.key(7)
    draw = lambda key, shapes: normal_noise(key, [jnp.zeros(shape) for shape in shapes])  # noqa: E731
    found = jax.jit(draw, static_argnums=1)(key, tuple(shapes))
    words = jax.random.bits(key, (2,), jnp.uint32)
    for i, (z, shape) in enumerate(zip(found, shapes, strict=True)):
        assert z.shape == shape
        np.testing.assert_allclose(z, jax.jit(_leaf, static_argnums=(0, 2))(shape, words, i), rtol=1e-6)
    lengths = [count_equations(jax.make_jaxpr(draw, static_argnums=1)(key, tuple(small * times))) for times in (1, 4)]
    assert lengths[1] - lengths[0] <= 3 * len(small) * 3  # a slice and a shape


def test_array_larger_than_the_counter_is_rejected():
    with pytest.raises(FedraxError, match="split the array"):
        jax.eval_shape(
            lambda key: normal_noise(key, jax.ShapeDtypeStruct((1 << 16, 1 << 16), jnp.float32)), jax.random.key(0)
        )
