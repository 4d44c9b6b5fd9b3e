"""Losses, metrics and preprocessing against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.contract.task import Batch, binary, classification, regression, scale
from fedrax.errors import FedraxError
from fedrax.models import MLP, Linear, Logistic, Model

KEY = jax.random.key(0)


def outputs_are_inputs():
    """A model whose outputs are its inputs, times one parameter of value one."""
    return Model(lambda key: {"gain": jnp.ones(())}, lambda p, x, key=None: p["gain"] * x)


def test_cross_entropy_and_accuracy():
    logits = np.random.default_rng(0).normal(size=(6, 4)) * 5
    labels = np.array([0, 1, 2, 3, 0, 1])
    with jax.enable_x64(True):
        task = classification(outputs_are_inputs())
        params, batch = task.init(KEY), Batch(jnp.asarray(logits), jnp.asarray(labels))
        losses, accuracy = task.loss(params, batch, KEY), task.metrics["accuracy"](params, batch)
        gradient = jax.grad(lambda x: task.loss(params, Batch(x, batch.y), KEY).sum())(batch.x)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(losses, -np.log(softmax[range(6), labels]), rtol=1e-12)
    np.testing.assert_allclose(gradient, softmax - np.eye(4)[labels], atol=1e-14)
    np.testing.assert_array_equal(accuracy, logits.argmax(1) == labels)


def test_cross_entropy_survives_huge_logits():
    task = classification(outputs_are_inputs())
    batch = Batch(jnp.array([[1e4, -1e4], [-1e4, 1e4]]), jnp.array([0, 0]))
    np.testing.assert_allclose(task.loss(task.init(KEY), batch, KEY), [0, 2e4])


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_binary(shape):
    logits, labels = np.array([-3.0, -0.1, 0.2, 5.0, 100.0]), np.array([0, 1, 1, 0, 0])
    task = binary(outputs_are_inputs())
    batch = Batch(jnp.asarray(logits.reshape(shape)), jnp.asarray(labels))
    expected = np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0) - logits * labels
    np.testing.assert_allclose(task.loss(task.init(KEY), batch, KEY), expected, rtol=1e-5)
    np.testing.assert_array_equal(task.metrics["accuracy"](task.init(KEY), batch), [1, 0, 1, 0, 0])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_regression(shape):
    task = regression(outputs_are_inputs())
    batch = Batch(jnp.array([1.0, 2.0, 3.0]).reshape(shape), jnp.array([1, 0, 5]))
    for values in (task.loss(task.init(KEY), batch, KEY), task.metrics["mse"](task.init(KEY), batch)):
        np.testing.assert_allclose(values, [0, 4, 4])


@pytest.mark.parametrize("kind", [binary, regression])
def test_one_output_is_needed(kind):
    task = kind(Linear().build((4,), 2))
    with pytest.raises(FedraxError, match="one output"):
        task.loss(task.init(KEY), Batch(jnp.ones((3, 4)), jnp.ones(3)), KEY)


def test_scale_of_bytes_and_of_floats():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), np.uint8)
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.1, 0.2, 0.3])
    scaled = scale(mean.tolist(), std.tolist())(jnp.asarray(images))
    np.testing.assert_allclose(scaled, (images / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    grey = scale(0.1307, 0.3081)(jnp.asarray(images[..., 0]))
    np.testing.assert_allclose(grey, (images[..., 0] / 255 - 0.1307) / 0.3081, rtol=1e-5, atol=1e-6)
    floats = jnp.ones((2, 3))
    assert scale(0.5, 0.5)(floats) is floats


def test_scale_refuses_what_cannot_be():
    with pytest.raises(FedraxError, match="positive"):
        scale(0.0, 0.0)
    with pytest.raises(FedraxError, match="3 channels"):
        scale([0.1, 0.2, 0.3], 1.0)(jnp.zeros((2, 4, 4, 1), jnp.uint8))


@pytest.mark.parametrize("raw", ["uint8", "float32", "float64"])
def test_float64_parameters_get_float64_inputs(raw):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6))
    with jax.enable_x64(True):
        task = classification(MLP((5,)).build((6,), 3), scale(0.3, 0.7))
        params = task.init(KEY)
        batch = Batch(jnp.asarray(pixels, raw), jnp.array([0, 1, 2, 0], jnp.int32))
        losses, gradients = jax.jit(jax.value_and_grad(lambda p: task.loss(p, batch, KEY).mean()))(params)
        values = [losses, task.metrics["accuracy"](params, batch), task.features(params, batch.x)]
        assert {leaf.dtype.name for leaf in [*values, *jax.tree.leaves(gradients)]} == {"float64"}
        if raw == "uint8":  # not rounded to float32 on the way
            exact = (pixels / 255 - 0.3) / 0.7 @ params["dense1"]["weight"] + params["dense1"]["bias"]
            np.testing.assert_allclose(values[2], np.maximum(exact, 0), rtol=1e-13, atol=1e-15)


def test_half_precision_parameters_stay_half():
    task = classification(Logistic().build((6,), 3))
    params = jax.tree.map(lambda v: v.astype(jnp.bfloat16), task.init(KEY))
    batch = Batch(jnp.zeros((2, 6), jnp.uint8), jnp.zeros(2, int))
    assert task.loss(params, batch, KEY).dtype == jnp.bfloat16


def test_bytes_are_divided_by_default_and_integers_are_left_alone():
    seen = []

    def apply(params, x, key=None):
        seen.append(x)
        return params["w"] * jnp.ones((x.shape[0], 2))

    task = classification(Model(lambda key: {"w": jnp.ones(())}, apply))
    for x in (jnp.array([[255, 51]], jnp.uint8), jnp.array([[255, 51]], jnp.int32)):
        task.loss(task.init(KEY), Batch(x, jnp.zeros(1, int)), KEY)
    np.testing.assert_allclose(seen[0], [[1.0, 0.2]], rtol=1e-6)
    assert seen[1].dtype == jnp.int32
    assert seen[1].tolist() == [[255, 51]]


def test_tasks_are_static_arguments():
    task, other = (classification(Logistic().build((6,), 3)) for _ in range(2))
    calls = []

    @partial(jax.jit, static_argnums=0)
    def trace_once(task, x):
        calls.append(task)
        return x

    for each in (task, other, task):
        trace_once(each, jnp.ones(()))
    assert calls == [task, other]
    assert task.name == "classification/logistic"
    assert classification(outputs_are_inputs()).features is None
