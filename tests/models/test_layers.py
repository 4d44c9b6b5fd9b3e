"""The layers with hand-written gradients against plain JAX ones, in both float types and under vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedrax.models import layers
from fedrax.models.recurrent import init_lstm, lstm

TOLERANCE = {"float32": {"rtol": 2e-5, "atol": 2e-5}, "float64": {"rtol": 1e-12, "atol": 1e-12}}


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def normal(seed, shape, dtype):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def assert_same(actual, expected, dtype):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype == dtype
        a, b = np.asarray(a), np.asarray(b)
        scale = np.abs(b).max() or 1.0
        np.testing.assert_allclose(a / scale, b / scale, **TOLERANCE[dtype])


def value_and_vjp(f, *args):
    """f and its gradients for a fixed random cotangent."""
    cotangent = normal(9, (y := jax.eval_shape(f, *args)).shape, y.dtype)

    @jax.jit
    def run(*args):
        y, pull = jax.vjp(f, *args)
        return y, pull(cotangent)

    return run(*args)


def conv_reference(x, weight):
    x = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0), weight, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return x.transpose(3, 1, 2, 0)


CONV_SHAPES = [  # x [C, H, W, B], weight [h, w, C, D]
    ((3, 9, 8, 4), (5, 5, 3, 6)),
    ((2, 7, 6, 1), (3, 2, 2, 5)),
    ((1, 5, 5, 3), (5, 5, 1, 2)),
]


@pytest.mark.few(5)
@pytest.mark.parametrize(("x_shape", "weight_shape"), CONV_SHAPES)
@pytest.mark.parametrize("conv", [layers._conv_by_columns, layers._conv_native])
def test_convolution_and_both_gradients(conv, x_shape, weight_shape, dtype):
    x, weight = normal(0, x_shape, dtype), normal(1, weight_shape, dtype)
    assert_same(value_and_vjp(conv, x, weight), value_and_vjp(conv_reference, x, weight), dtype)


@pytest.mark.parametrize(("backend", "native"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_convolution_is_native_off_the_cpu_only(monkeypatch, backend, native):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, weight = (normal(i, shape, "float32") for i, shape in enumerate(CONV_SHAPES[0]))
    jaxpr = jax.make_jaxpr(lambda x, weight: layers.conv2d(x, weight))(x, weight)
    assert ("conv_general_dilated" in str(jaxpr)) == native


def test_convolution_under_vmap_jit_and_scan(dtype):
    x, weight = normal(0, (5, 3, 8, 8, 2), dtype), normal(1, (5, 3, 3, 3, 4), dtype)

    def gradients(conv):
        return jax.grad(lambda x, w: (conv(x, w) ** 2).sum(), argnums=(0, 1))

    mine = jax.jit(jax.vmap(gradients(layers._conv_by_columns)))(x, weight)
    scanned = jax.jit(lambda *xw: lax.map(lambda xw: gradients(layers._conv_by_columns)(*xw), xw))(x, weight)
    reference = jax.jit(jax.vmap(gradients(conv_reference)))(x, weight)
    assert_same(mine, reference, dtype)
    assert_same(scanned, reference, dtype)


def test_convolution_has_second_derivatives(dtype):
    x, weight = normal(0, (2, 5, 5, 2), dtype), normal(1, (3, 3, 2, 3), dtype)

    def gradient_norm(conv):
        loss = lambda x, w: (jnp.tanh(conv(x, w)) ** 2).sum()  # noqa: E731
        return lambda x, w: sum((g**2).sum() for g in jax.grad(loss, argnums=(0, 1))(x, w))

    second, expected = (
        jax.jit(jax.grad(gradient_norm(conv), argnums=(0, 1)))(x, weight)
        for conv in (layers._conv_by_columns, conv_reference)
    )
    assert_same(second, expected, dtype)


def test_first_layer_pays_nothing_for_the_gradient_of_its_input():
    x, weight = normal(0, (8, 12, 12, 16), "float32"), normal(1, (5, 5, 8, 16), "float32")
    product = 2 * 16 * (5 * 5 * 8) * (8 * 8 * 16)  # operations of one of the three matrix products

    def flops(argnums):
        grad = jax.grad(lambda x, w: (layers._conv_by_columns(x, w) ** 2).sum(), argnums=argnums)
        return jax.jit(grad).lower(x, weight).compile().cost_analysis()["flops"]

    assert flops(1) < 2.3 * product < 3 * product <= flops((0, 1))


def pool_reference(x, bias):
    x = jnp.maximum(x + bias[:, None, None, None], 0)
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", [(3, 8, 6, 4), (2, 7, 5, 1), (1, 2, 3, 2)])
def test_pooling_and_its_gradients(shape, dtype):
    x, bias = normal(0, shape, dtype), normal(1, shape[:1], dtype)
    mine, theirs = value_and_vjp(layers.bias_relu_pool, x, bias), value_and_vjp(pool_reference, x, bias)
    assert_same(mine, theirs, dtype)
    batched = jax.jit(jax.vmap(layers.bias_relu_pool))(np.stack([x, -x]), np.stack([bias, bias]))
    assert_same(batched, np.stack([mine[0], jax.jit(layers.bias_relu_pool)(-x, bias)]), dtype)


def test_pooling_sends_ties_to_the_first_maximum():
    windows = {  # the four entries of a window, row by row -> where the gradient goes
        (1, 1, 1, 1): 0,
        (0, 1, 1, 1): 1,
        (0, 0, 1, 1): 2,
        (0, 1, 0, 1): 1,
        (0, 0, 0, 1): 3,
        (1, 0, 0, 1): 0,
    }
    for window, winner in windows.items():
        x = jnp.array(window, jnp.float32).reshape(1, 2, 2, 1)
        gradient = jax.grad(lambda x: 3 * layers.bias_relu_pool(x, jnp.ones(1)).sum())(x)
        np.testing.assert_array_equal(gradient.ravel(), 3 * np.eye(4)[winner])


def test_pooling_keeps_a_nan_visible():
    x = jnp.zeros((1, 2, 2, 1)).at[0, 0, 1, 0].set(jnp.nan)
    assert jnp.isnan(layers.bias_relu_pool(x, jnp.zeros(1))).all()


def lstm_reference(layer, x):
    hidden = layer["hidden_weight"].shape[0]
    h = c = jnp.zeros((x.shape[0], hidden), x.dtype)
    for t in range(x.shape[1]):
        gates = x[:, t] @ layer["input_weight"] + layer["input_bias"]
        gates = gates + h @ layer["hidden_weight"] + layer["hidden_bias"]
        i, f, g, o = (gates[:, k * hidden : (k + 1) * hidden] for k in range(4))
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return h


@pytest.mark.few(2)
@pytest.mark.parametrize(("batch", "steps", "inputs", "hidden"), [(3, 6, 4, 5), (1, 1, 2, 3)])
def test_lstm_and_its_gradients(batch, steps, inputs, hidden, dtype):
    layer = init_lstm(jax.random.key(0), inputs, hidden)
    x = normal(1, (batch, steps, inputs), dtype)
    assert_same(value_and_vjp(lstm, layer, x), value_and_vjp(lstm_reference, layer, x), dtype)


@pytest.mark.few(1)
def test_lstm_under_vmap_over_weights(dtype):
    stacked = jax.vmap(lambda key: init_lstm(key, 3, 4))(jax.random.split(jax.random.key(0), 3))
    x = normal(1, (3, 2, 5, 3), dtype)

    def gradients(run):
        return jax.jit(jax.vmap(jax.grad(lambda layer, x: (run(layer, x) ** 2).sum())))(stacked, x)

    assert_same(gradients(lstm), gradients(lstm_reference), dtype)


def test_dropout_keeps_the_mean_and_needs_a_key():
    x = jnp.ones((200, 200))
    assert layers.dropout(x, 0.5, None) is x
    dropped = layers.dropout(x, 0.25, jax.random.key(0))
    assert set(np.unique(dropped)) == {0.0, np.float32(1 / 0.75)}
    assert abs(float(dropped.mean()) - 1) < 0.02


@pytest.mark.few(4)
@pytest.mark.parametrize("batch", [1, 12, 40])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_output_layer_and_its_gradients(batch, side_by_side, dtype):
    """Few samples have a weight gradient written out; more have a matrix product."""
    lanes = (2,) if side_by_side else ()
    x, weight = normal(0, (*lanes, batch, 7), dtype), normal(1, (*lanes, 5, 7), dtype)
    bias = normal(2, (5,), dtype)

    def ours(x, weight, bias):
        return layers.output({"weight": weight, "bias": bias}, x)

    def plain(x, weight, bias):
        return jnp.einsum("bi,oi->bo", x, weight) + bias

    if side_by_side:
        ours, plain = (jax.vmap(f, (0, 0, None)) for f in (ours, plain))
    assert_same(value_and_vjp(ours, x, weight, bias), value_and_vjp(plain, x, weight, bias), dtype)
