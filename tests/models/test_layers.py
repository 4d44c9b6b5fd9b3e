"""Layers with hand-written gradients against plain JAX, in both float types and under vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.models import layers
from fedrax.models.lstm import init_lstm, lstm

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


@pytest.mark.slow(keep=2)
@pytest.mark.parametrize(("batch", "steps", "inputs", "hidden"), [(3, 6, 4, 5), (1, 1, 2, 3)])
def test_lstm_and_its_gradients(batch, steps, inputs, hidden, dtype):
    layer = init_lstm(jax.random.key(0), inputs, hidden)
    x = normal(1, (batch, steps, inputs), dtype)
    assert_same(value_and_vjp(lstm, layer, x), value_and_vjp(lstm_reference, layer, x), dtype)


@pytest.mark.slow(keep=1)
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


@pytest.mark.slow(keep=4)
@pytest.mark.parametrize("batch", [1, 12, 40])
@pytest.mark.parametrize("side_by_side", [False, True])
def test_output_layer_and_its_gradients(batch, side_by_side, dtype):
    """Small batches have an explicit weight gradient, larger ones a matrix product."""
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
