"""Programs in the style of other users: rewritten correctly or left unchanged."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from fedrax.xla.cse import eliminate_common_subexpressions
from fedrax.xla.equivalence import is_jax_derivative
from fedrax.xla.microbatch import replay_trace
from fedrax.xla.per_example import analyze_per_example
from fedrax.xla.pipeline import optimize, optimize_forward
from fedrax.xla.precision import with_operand_format
from fedrax.xla.tracing import equations_in, run_cached

CLOSE = {"rtol": 2e-5, "atol": 1e-6}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * jnp.cos(0.3) + jnp.sin(0.5),
        lambda x: x + jnp.sum(2.0) + jnp.max(3.0),
        lambda x: nn.avg_pool(x, (7, 7)).sum() + x,
        lambda x: lax.conv_general_dilated(
            x, np.ones((5, 5, 3, 2), np.float32), (1, 1), [(8, 8)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
    ],
    ids=["sines of numbers", "sums of numbers", "windows larger than images", "kernels of NumPy"],
)
def test_values_are_unchanged(function: Any):
    x = jax.random.normal(jax.random.key(0), (2, 4, 4, 3))
    np.testing.assert_allclose(jax.jit(optimize(function))(x), function(x), **CLOSE)


def test_random_numbers_with_a_local_jax_setting():
    def masked(key: Any) -> Any:
        with jax.threefry_partitionable(False):
            return jax.random.bernoulli(key, 0.5, (64, 128))

    key = jax.random.key(0)
    np.testing.assert_array_equal(jax.jit(optimize(masked))(key), masked(key))


def test_large_float64_convolutions_do_not_use_patches():
    with jax.enable_x64(True):
        x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float64) for shape in ((16, 112, 112, 64), (7, 7, 64, 64)))
        small = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.float64), jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float64)
        convolved = lambda x, k: lax.conv_general_dilated(  # noqa: E731
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        names = [e.primitive.name for e in equations_in(jax.make_jaxpr(optimize(convolved))(x, kernel))]
        assert names == ["conv_general_dilated"]
        names = [e.primitive.name for e in equations_in(jax.make_jaxpr(optimize(convolved))(*small))]
        assert "conv_general_dilated" not in names


def test_backward_passes_with_different_callbacks_are_not_merged():
    def layer(strength: float) -> Any:
        made = jax.custom_vjp(lambda x: x + 0)

        def backward(_: Any, g: Any) -> Any:
            call = lambda g: np.float32(strength) * np.asarray(g)  # noqa: E731
            return (jax.pure_callback(call, jax.ShapeDtypeStruct(g.shape, g.dtype), g),)

        made.defvjp(lambda x: (x + 0, None), backward)
        return made

    layers = [layer(k) for k in (1.0, 2.0, 3.0, 4.0)]

    def loss(x: Any) -> Any:
        for one in layers:
            x = jnp.tanh(one(x) * 0.9)
        return x.sum()

    x = jnp.linspace(-1, 1, 5)
    np.testing.assert_allclose(jax.grad(optimize_forward(loss))(x), jax.grad(loss)(x), rtol=1e-5)
    both = jax.make_jaxpr(lambda x: layers[0](x) + layers[1](x))(x)
    twice = lambda x: jax.core.eval_jaxpr(eliminate_common_subexpressions(both).jaxpr, both.consts, x)[0].sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(twice)(x), np.full(5, 3.0))


def long_kernel(w: Any, x: Any) -> Any:
    """A one-dimensional convolution with 200 taps of one sample [L]."""
    h = jnp.exp(w["a"] * x)[None, :, None]
    y = lax.conv_general_dilated(h, w["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return (y**2).sum()


def test_overflow_of_a_sample_does_not_affect_others():
    """Bounds of per-sample privacy depend on it."""
    w = {"a": jnp.float32(1), "k": 0.01 * jax.random.normal(jax.random.key(0), (200, 1, 2))}
    x = jax.random.normal(jax.random.key(1), (8, 400)).at[3, 7].set(1e4)
    found = jax.jit(optimize(jax.vmap(jax.grad(long_kernel), (None, 0)), per_example=True))(w, x)
    expected = jax.vmap(jax.grad(long_kernel), (None, 0))(w, x)
    others = np.arange(8) != 3
    assert not np.isfinite(found["k"][3]).all() and np.isfinite(found["k"][others]).all()
    np.testing.assert_allclose(found["k"][others], expected["k"][others], rtol=2e-5, atol=1e-4)


def test_references_in_loops():
    def total(x: Any) -> Any:
        seen = jax.new_ref(jnp.zeros(()))

        def step(i: Any, h: Any) -> Any:
            seen[...] += jnp.sin(h).sum()
            return jnp.cos(h)

        last = lax.fori_loop(0, 3, step, x)
        return last.sum() + seen[...]

    x = jnp.linspace(0, 1, 5000)
    np.testing.assert_allclose(jax.jit(optimize(total))(x), jax.jit(total)(x), rtol=1e-5)


def test_sums_of_int8_in_loops():
    masks = jnp.ones((12, 4, 3), jnp.int8)
    count = lambda masks: lax.scan(  # noqa: E731
        lambda n, m: (n + m.sum(1, dtype=m.dtype), None), jnp.zeros(4, jnp.int8), masks
    )[0]
    np.testing.assert_array_equal(jax.jit(optimize(count))(masks), count(masks))


# -- custom derivatives ---------------------------------------------------------------------------------------------


def straight_through() -> Any:
    made = jax.custom_jvp(jnp.sign)
    made.defjvps(lambda t, y, x: t * (jnp.abs(x) <= jnp.abs(x).mean()))
    return made


@pytest.mark.parametrize("function", [straight_through(), jax.nn.relu], ids=["custom", "JAX's"])
def test_custom_derivatives_of_jax_functions(function: Any):
    """A custom rule that reads all samples, inside a function of JAX."""
    closed = jax.make_jaxpr(lambda x: function(x) + 0)(jnp.ones((4, 3)))
    (own,) = [e for e in equations_in(closed) if e.primitive.name == "custom_jvp_call"]
    assert is_jax_derivative(own) == (function is jax.nn.relu)

    def losses(w: Any, batch: Any, key: Any) -> Any:
        return (function(batch @ w) ** 2).sum(1)

    apart = analyze_per_example(losses, jnp.ones((3, 2)), jnp.ones((8, 3)), jax.random.key(0))
    assert (apart is not None) == (function is jax.nn.relu)


# -- recurrent networks ---------------------------------------------------------------------------------------------


def recurrent(w: Any, x: Any, between: Any, each: Any) -> Any:
    """A scan over x [T, B, F]; ``between(x of a step, its own array)``."""
    step = lambda h, xs: (jnp.tanh(between(*xs) @ w["x"] + h @ w["h"]), None)  # noqa: E731
    return (lax.scan(step, jnp.zeros((x.shape[1], w["h"].shape[0])), (x, each))[0] ** 2).sum()


@pytest.fixture
def weights() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {"x": 0.1 * jax.random.normal(keys[0], (256, 512)), "h": 0.05 * jax.random.normal(keys[1], (512, 512))}


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_dropout_before_a_product_in_a_loop(weights: Any, kind: str):
    """Most random generators use one key for all lanes under vmap, so that all steps would have one mask."""

    def dropped(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0)

    x = jax.random.normal(jax.random.key(1), (6, 4, 256))
    loss = lambda w: recurrent(w, x, dropped, jax.random.split(jax.random.key(2, impl=kind), 6))  # noqa: E731
    found, expected = jax.jit(optimize(jax.grad(loss)))(weights), jax.grad(loss)(weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_callbacks_before_a_product_in_a_loop(weights: Any):
    """They cannot be vectorized over the steps."""

    def called(x: Any, _: Any) -> Any:
        return jax.pure_callback(lambda a: 2 * np.asarray(a), jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    x = jax.random.normal(jax.random.key(1), (6, 4, 256))
    loss = lambda w: recurrent(w, x, called, jnp.zeros(6))  # noqa: E731
    found, expected = jax.jit(optimize(jax.grad(loss)))(weights), jax.grad(loss)(weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_networks_before_a_product_stay_in_the_loop():
    """Vectorizing all frames would need memory for all, and the gradient would repeat the work."""
    kernel, w = jnp.ones((3, 3, 3, 8)) / 30, {"x": jnp.ones((2048, 512)) / 1e3, "h": jnp.ones((512, 512)) / 1e3}

    def seen(frame: Any, _: Any) -> Any:
        frame = frame.reshape(2, 16, 16, 3)
        y = lax.conv_general_dilated(frame, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y).reshape(2, -1)

    x = jax.random.normal(jax.random.key(1), (10, 2, 16 * 16 * 3))
    closed = jax.make_jaxpr(optimize(lambda w: recurrent(w, x, seen, jnp.zeros(10))))(w)
    largest = max(v.aval.size for e in equations_in(closed) for v in e.outvars if hasattr(v.aval, "size"))
    assert largest < 10 * 2 * 16 * 16 * 8


# -- attention ------------------------------------------------------------------------------------------------------


def test_enlarging_product_before_attention():
    """Both it and the scores are large products, and one is within the region that begins with the other."""

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(5)(nn.MultiHeadDotProductAttention(num_heads=8, qkv_features=256)(x).mean(1))

    x = jax.random.normal(jax.random.key(0), (16, 400, 16))
    network = Network()
    params = network.init(jax.random.key(1), x[:1])
    found = jax.jit(optimize(optimize_forward(network.apply)))(params, x)
    np.testing.assert_allclose(found, network.apply(params, x), rtol=1e-4, atol=1e-5)


# -- constants ------------------------------------------------------------------------------------------------------


def test_constants_of_a_program():
    """JAX can embed them in a program whose text does not show them."""
    tables = [jnp.arange(3.0), 10 * jnp.arange(3.0)]
    with jax.enable_checks(False):
        name = "jax_use_simplified_jaxpr_constants"
        if not hasattr(jax.config, name):
            pytest.skip("this JAX has no such setting")
        before = getattr(jax.config, name)
        jax.config.update(name, True)
        try:
            found = [run_cached(lambda x, table=table: jnp.sin(x) + table, jnp.zeros(3)) for table in tables]
        finally:
            jax.config.update(name, before)
    np.testing.assert_array_equal(found, tables)


@jax.custom_vjp
def at_first(x: Any, factors: Any) -> Any:
    """Its derivative indexes an array by a traced number, as integrators index their times."""
    return x * factors[0]


at_first.defvjp(lambda x, factors: (at_first(x, factors), factors), lambda f, g: (g * f[jnp.argmin(g)], 0 * f))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("around", [optimize, optimize_forward, replay_trace], ids=["fast", "in loops", "as traced"])
@pytest.mark.parametrize("sine", [False, True], ids=["alone", "beside a rewritten operation"])
def test_constants_indexed_by_derivatives(around: Any, sine: bool):
    def function(x: Any) -> Any:
        y = at_first(x, jnp.array([2.0, 3.0]))
        return jnp.broadcast_to((jnp.sin(y) if sine else y).sum(), (1,))

    x = jnp.linspace(1, 2, 5000)
    gradient = lambda f: jax.jit(jax.grad(lambda x: f(x).sum()))(x)  # noqa: E731
    np.testing.assert_allclose(gradient(around(function)), gradient(function), **CLOSE)


def test_preferred_dtypes_of_products():
    """As requested, not those of the operands."""
    product = lambda x, w: jnp.einsum("bi,ij->bj", x, w, preferred_element_type=jnp.bfloat16)  # noqa: E731
    assert with_operand_format(product, "bfloat16")(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype == jnp.bfloat16
