"""Losses, metrics and preprocessing against NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.contract.task import Batch, Task, binary_classification, classification, regression, rescale
from fedrax.errors import FedraxError
from fedrax.models import CNN, MLP, Linear, Logistic, Model

KEY = jax.random.key(0)


def identity_model():
    """A model whose outputs are its inputs times one parameter with value 1."""
    return Model(lambda key: {"gain": jnp.ones(())}, lambda p, x, key=None: p["gain"] * x)


def test_cross_entropy_and_accuracy():
    logits = np.random.default_rng(0).normal(size=(6, 4)) * 5
    labels = np.array([0, 1, 2, 3, 0, 1])
    with jax.enable_x64(True):
        task = classification(identity_model())
        params, batch = task.init(KEY), Batch(jnp.asarray(logits), jnp.asarray(labels))
        losses, accuracy = task.loss(params, batch, KEY), task.metrics["accuracy"](params, batch)
        gradient = jax.grad(lambda x: task.loss(params, Batch(x, batch.y), KEY).sum())(batch.x)
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(losses, -np.log(softmax[range(6), labels]), rtol=1e-12)
    np.testing.assert_allclose(gradient, softmax - np.eye(4)[labels], atol=1e-14)
    np.testing.assert_array_equal(accuracy, logits.argmax(1) == labels)


def test_cross_entropy_of_huge_logits_is_finite():
    task = classification(identity_model())
    batch = Batch(jnp.array([[1e4, -1e4], [-1e4, 1e4]]), jnp.array([0, 0]))
    np.testing.assert_allclose(task.loss(task.init(KEY), batch, KEY), [0, 2e4])


@pytest.mark.parametrize("shape", [(5,), (5, 1)])
def test_binary_classification(shape):
    logits, labels = np.array([-3.0, -0.1, 0.2, 5.0, 100.0]), np.array([0, 1, 1, 0, 0])
    task = binary_classification(identity_model())
    batch = Batch(jnp.asarray(logits.reshape(shape)), jnp.asarray(labels))
    expected = np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0) - logits * labels
    np.testing.assert_allclose(task.loss(task.init(KEY), batch, KEY), expected, rtol=1e-5)
    np.testing.assert_array_equal(task.metrics["accuracy"](task.init(KEY), batch), [1, 0, 1, 0, 0])


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_regression(shape):
    task = regression(identity_model())
    batch = Batch(jnp.array([1.0, 2.0, 3.0]).reshape(shape), jnp.array([1, 0, 5]))
    for values in (task.loss(task.init(KEY), batch, KEY), task.metrics["mse"](task.init(KEY), batch)):
        np.testing.assert_allclose(values, [0, 4, 4])


@pytest.mark.parametrize("kind", [binary_classification, regression])
def test_one_output_is_required(kind):
    task = kind(Linear().build((4,), 2))
    with pytest.raises(FedraxError, match="one output"):
        task.loss(task.init(KEY), Batch(jnp.ones((3, 4)), jnp.ones(3)), KEY)


def test_scaling_of_bytes_and_floats():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 3), np.uint8)
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.1, 0.2, 0.3])
    scaled = rescale(mean.tolist(), std.tolist())(jnp.asarray(images))
    np.testing.assert_allclose(scaled, (images / 255 - mean) / std, rtol=1e-5, atol=1e-6)
    gray = rescale(0.1307, 0.3081)(jnp.asarray(images[..., 0]))
    np.testing.assert_allclose(gray, (images[..., 0] / 255 - 0.1307) / 0.3081, rtol=1e-5, atol=1e-6)
    floats = jnp.ones((2, 3))
    assert rescale(0.5, 0.5)(floats) is floats


def test_invalid_scaling_is_rejected():
    with pytest.raises(FedraxError, match="positive"):
        rescale(0.0, 0.0)
    with pytest.raises(FedraxError, match="3 channels"):
        rescale([0.1, 0.2, 0.3], 1.0)(jnp.zeros((2, 4, 4, 1), jnp.uint8))


@pytest.mark.parametrize("raw", ["uint8", "float32", "float64"])
def test_float64_parameters_get_float64_inputs(raw):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6))
    with jax.enable_x64(True):
        task = classification(MLP((5,)).build((6,), 3), rescale(0.3, 0.7))
        params = task.init(KEY)
        batch = Batch(jnp.asarray(pixels, raw), jnp.array([0, 1, 2, 0], jnp.int32))
        losses, gradients = jax.jit(jax.value_and_grad(lambda p: task.loss(p, batch, KEY).mean()))(params)
        values = [losses, task.metrics["accuracy"](params, batch), task.features(params, batch.x)]
        assert {leaf.dtype.name for leaf in [*values, *jax.tree.leaves(gradients)]} == {"float64"}
        if raw == "uint8":  # without rounding to float32
            exact = (pixels / 255 - 0.3) / 0.7 @ params["dense1"]["weight"] + params["dense1"]["bias"]
            np.testing.assert_allclose(values[2], np.maximum(exact, 0), rtol=1e-13, atol=1e-15)


def test_half_precision_parameters_are_kept():
    task = classification(Logistic().build((6,), 3))
    params = jax.tree.map(lambda v: v.astype(jnp.bfloat16), task.init(KEY))
    batch = Batch(jnp.zeros((2, 6), jnp.uint8), jnp.zeros(2, int))
    mean = lambda params: task.loss(params, batch, KEY).mean()  # noqa: E731
    found = jax.grad(mean)(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.bfloat16)}
    assert mean(params).dtype == jnp.float32  # losses are accumulated


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "uint32", "bool"])
def test_integers_reach_the_model_unchanged_and_booleans_as_numbers(dtype):
    seen = []

    def apply(params, x, key=None):
        seen.append(x)
        return params["w"] * jnp.ones((x.shape[0], 2))

    task = classification(Model(lambda key: {"w": jnp.ones(())}, apply))
    x = np.array([[1, 0, 100]]).astype(dtype)
    task.loss(task.init(KEY), Batch(x, jnp.zeros(1, int)), KEY)
    assert seen[0].dtype == ("float32" if dtype == "bool" else dtype)
    np.testing.assert_array_equal(seen[0], x)


def test_zoo_models_convert_integers_to_floats():
    x, y = np.array([[3, 200], [7, 0]], np.uint8), jnp.array([0, 1])
    task = classification(MLP((5,)).build((2,), 2))
    params = task.init(KEY)
    assert task.outputs is not None
    np.testing.assert_array_equal(task.outputs(params, x), task.outputs(params, x.astype(np.float32)))
    scaled = classification(MLP((5,)).build((2,), 2), rescale())
    np.testing.assert_allclose(
        scaled.loss(params, Batch(x, y), KEY), task.loss(params, Batch(x / np.float32(255), y), KEY), rtol=1e-5
    )


def numpy_losses(logits, labels):
    shifted = logits - logits.max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - np.take_along_axis(shifted, labels[..., None], -1)[..., 0]


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "uint32"])
@pytest.mark.parametrize("positions", [(7,), (3, 2)])
def test_losses_are_averaged_over_the_positions_of_a_sample(positions, dtype):
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(4, *positions, 5)).astype(np.float32), rng.integers(0, 5, (4, *positions))
    task, batch = classification(identity_model()), Batch(logits, labels.astype(dtype))
    expected = numpy_losses(logits, labels).reshape(4, -1).mean(1)
    np.testing.assert_allclose(task.loss(task.init(KEY), batch, KEY), expected, rtol=1e-5)
    accuracy = (logits.argmax(-1) == labels).reshape(4, -1).mean(1)
    np.testing.assert_allclose(task.metrics["accuracy"](task.init(KEY), batch), accuracy, rtol=1e-6)


@pytest.mark.parametrize(("padding", "dtype"), [(-1, "int32"), (-100, "int8"), (255, "uint8"), (2, "int32")])
def test_padded_positions_are_ignored(padding, dtype):
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=(4, 6, 3)).astype(np.float32), rng.integers(0, 2, (4, 6))
    padded = rng.random((4, 6)) < 0.4
    padded[0], padded[1] = True, False
    labels = np.where(padded, padding, labels)
    task, batch = classification(identity_model(), padding=padding), Batch(logits, labels.astype(dtype))
    params = task.init(KEY)
    kept, count = ~padded, np.maximum((~padded).sum(1), 1)
    expected = (numpy_losses(logits, np.where(padded, 0, labels)) * kept).sum(1) / count
    losses, gradient = jax.value_and_grad(lambda x: task.loss(params, Batch(x, batch.y), KEY).sum())(batch.x)
    np.testing.assert_allclose(losses, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(task.evaluation_loss(params, batch), expected, rtol=1e-5)
    assert expected[0] == 0 and not gradient[padded].any() and gradient[kept].any()
    accuracy = ((logits.argmax(-1) == labels) & kept).sum(1) / count
    np.testing.assert_allclose(task.metrics["accuracy"](params, batch), accuracy, rtol=1e-6)
    other = np.where(padded[..., None], 1e3, logits)  # for any outputs there
    np.testing.assert_allclose(task.loss(params, Batch(other, batch.y), KEY), expected, rtol=1e-5)


def test_losses_are_averaged_over_the_targets_of_a_sample():
    rng = np.random.default_rng(0)
    outputs, targets = (rng.normal(size=(4, 3)).astype(np.float32) for _ in range(2))
    squared = regression(identity_model())
    losses = squared.loss(squared.init(KEY), Batch(outputs, targets), KEY)
    np.testing.assert_allclose(losses, ((outputs - targets) ** 2).mean(1), rtol=1e-5)
    labels = (targets > 0).astype(np.int32)
    logistic = binary_classification(identity_model())
    expected = np.log1p(np.exp(np.where(labels == 1, -outputs, outputs))).mean(1)
    np.testing.assert_allclose(logistic.loss(logistic.init(KEY), Batch(outputs, labels), KEY), expected, rtol=1e-5)
    accuracy = logistic.metrics["accuracy"](logistic.init(KEY), Batch(outputs, labels))
    np.testing.assert_allclose(accuracy, ((outputs > 0) == labels).mean(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "outputs", "labels", "message"),
    [
        (classification, (4, 3), np.zeros((4, 2), np.int32), r"\[B, ..., classes\] for integer labels"),
        (classification, (4, 2, 3), np.zeros(4, np.int32), r"not outputs of shape \(4, 2, 3\) for int32 labels"),
        (classification, (4, 3), np.zeros(4, np.float32), "float32 labels"),
        (regression, (4, 3), np.zeros((4, 2), np.float32), r"outputs of shape \(2,\) per sample"),
        (regression, (4,), np.zeros((4, 4), np.float32), r"outputs of shape \(4,\) per sample"),
        (binary_classification, (4, 3), np.zeros((4, 1), np.int32), "outputs of shape .* per sample"),
    ],
)
def test_inconsistent_outputs_and_labels_raise_a_clear_error(kind, outputs, labels, message):
    task = kind(identity_model())
    for function in (task.loss, lambda p, b, key: task.evaluation_loss(p, b)):
        with pytest.raises(FedraxError, match=message):
            function(task.init(KEY), Batch(np.zeros(outputs, np.float32), labels), KEY)


def test_padding_must_be_a_label():
    with pytest.raises(FedraxError, match="padding must fit into 32 bits"):
        classification(identity_model(), padding=2**31)


def test_blocks_features_and_outputs_start_from_stored_samples():
    model = CNN(channels=(2, 3), hidden=4).build((8, 8, 1), 3)
    task = classification(model, rescale(0.3, 0.7))
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)
    y = np.array([0, 1, 2, 0, 1])
    params = task.init(KEY)
    assert task.blocks is not None and task.outputs is not None and task.features is not None
    assert task.loss_of_outputs is not None and task.loss_and_statistics is None
    for key in (None, KEY):
        outputs, lower = x, None
        for block in task.blocks:
            lower, outputs = outputs, block(params, outputs, key)
        np.testing.assert_allclose(lower, task.features(params, x, key), rtol=1e-5, atol=1e-6)
        losses = task.evaluation_loss(params, Batch(x, y)) if key is None else task.loss(params, Batch(x, y), key)
        np.testing.assert_allclose(task.loss_of_outputs(outputs, y), losses, rtol=1e-5)
        if key is None:
            np.testing.assert_allclose(outputs, task.outputs(params, x), rtol=1e-5, atol=1e-6)
    assert not jnp.allclose(task.loss(params, Batch(x, y), KEY), task.evaluation_loss(params, Batch(x, y)))


def test_user_defined_tasks_require_only_a_loss():
    task = Task(init=lambda key: jnp.zeros(2), loss=lambda params, batch, key: (batch.x - params).sum(-1) ** 2)
    batch = Batch(jnp.ones((3, 2)), jnp.zeros(3))
    np.testing.assert_allclose(task.evaluation_loss(task.init(KEY), batch), [4, 4, 4])
    assert (task.outputs, task.blocks, task.loss_of_outputs, task.loss_and_statistics) == (None,) * 4


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
    assert classification(identity_model()).features is None
