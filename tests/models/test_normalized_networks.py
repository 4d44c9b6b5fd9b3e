"""Networks with normalization: against NumPy, their published sizes, and in a task."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax import FedraxError, classification
from fedrax.contract import Batch
from fedrax.models import MODELS, VGG11, LeNet5, ResNet18, ResNet20, ResNet50, TinyNN, composable_layers

RNG = np.random.default_rng(0)
KEY = jax.random.key(3)


def normal(*shape):
    return RNG.normal(1, 2, shape).astype(np.float32)


def relu(x):
    return np.maximum(x, 0)


def test_tinynn_with_batch_norm_agrees_with_numpy():
    model, x = TinyNN("batch").build((3, 4), 5), normal(6, 3, 4)
    variables = jax.jit(model.init)(KEY)
    assert model.train is not None
    outputs, moved = jax.jit(model.train)(variables, x, KEY)
    h, h_eval = x.reshape(6, 12), x.reshape(6, 12)
    for layer in ("layer1", "layer2"):
        weights = jax.tree.map(np.asarray, variables.params[layer])
        z, z_eval = (a @ weights["dense"]["weight"] + weights["dense"]["bias"] for a in (h, h_eval))
        mean, var = z.mean(0), z.var(0)
        running = moved[layer]["norm"]
        np.testing.assert_allclose(running["mean"], 0.1 * mean, atol=1e-5)
        np.testing.assert_allclose(running["var"], 0.9 + 0.1 * z.var(0, ddof=1), rtol=1e-4)
        h, h_eval = relu((z - mean) / np.sqrt(var + 1e-5)), relu(z_eval / np.sqrt(1 + 1e-5))
    top = jax.tree.map(np.asarray, variables.params["output"])
    np.testing.assert_allclose(outputs, h @ top["weight"].T + top["bias"], atol=1e-4)
    np.testing.assert_allclose(model.apply(variables, x), h_eval @ top["weight"].T + top["bias"], atol=1e-4)


def test_group_norm_agrees_with_numpy():
    part, x = composable_layers.norm("group", 6, groups=3), normal(2, 4, 5, 6)
    params = {"scale": normal(6), "bias": normal(6)}
    y, statistics = part.apply(params, {}, jnp.asarray(x), composable_layers.Mode(True, None))
    grouped = x.reshape(2, 20, 3, 2)
    z = (grouped - grouped.mean((1, 3), keepdims=True)) / np.sqrt(grouped.var((1, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, z.reshape(x.shape) * params["scale"] + params["bias"], atol=1e-5)
    assert statistics == {}
    with pytest.raises(FedraxError, match="6 channels into 4 groups"):
        composable_layers.norm("group", 6, groups=4)


def test_convolution_with_padding_and_stride_agrees_with_numpy():
    part, x = composable_layers.conv(2, 3, side=3, stride=2, padding=1), normal(1, 5, 4, 2)
    params, _ = part.init(KEY)
    y, _ = part.apply(params, {}, jnp.asarray(x), composable_layers.Mode(False, None))
    padded, weight = np.pad(x[0], ((1, 1), (1, 1), (0, 0))), np.asarray(params["weight"])
    want = [[np.tensordot(padded[i : i + 3, j : j + 3], weight, 3) for j in (0, 2)] for i in (0, 2, 4)]
    np.testing.assert_allclose(y[0], np.array(want) + np.asarray(params["bias"]), atol=1e-5)


def test_shortcut_without_parameters_subsamples_and_pads_channels():
    x = normal(1, 4, 4, 2)
    y, _ = ResNet20()._shortcut(2, 5, 2).apply({}, {}, jnp.asarray(x), composable_layers.Mode(False, None))
    np.testing.assert_array_equal(y[..., :2], x[:, ::2, ::2])
    assert y.shape == (1, 2, 2, 5)
    assert not y[..., 2:].any()


def test_large_stem_pools_three_by_three():
    part, x = ResNet50(stem="large", norm="none")._stem(3, 2), normal(1, 13, 12, 3)
    params, _ = part.init(KEY)
    y, _ = part.apply(params, {}, jnp.asarray(x), composable_layers.Mode(False, None))
    first, _ = composable_layers.conv(3, 2, 7, 2, 3).apply(
        params["conv"]["conv"], {}, jnp.asarray(x), composable_layers.Mode(False, None)
    )
    padded = np.pad(relu(np.asarray(first)[0]), ((1, 1), (1, 1), (0, 0)))
    want = [[padded[i : i + 3, j : j + 3].max((0, 1)) for j in (0, 2, 4)] for i in (0, 2, 4, 6)]
    np.testing.assert_allclose(y[0], want, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [  # number of parameters of PyTorch's networks with 10 outputs
        (ResNet18("batch"), (32, 32, 3), 11_173_962),
        (ResNet20("batch"), (32, 32, 3), 269_722),
        (ResNet50("batch", stem="large"), (64, 64, 3), 23_528_522),
        (VGG11("batch"), (32, 32, 3), 9_220_480 + 2 * 2752 + 65_664 + 1290),
        (TinyNN(), (28, 28, 1), 178_110),
        (LeNet5("none"), (32, 32, 3), 2_432 + 51_264 + 819_712 + 65_664 + 1290),
    ],
)
def test_networks_have_their_published_numbers_of_parameters(model, shape, size):
    variables = jax.eval_shape(model.build(shape, 10).init, KEY)
    params = getattr(variables, "params", variables)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == size


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("model", [LeNet5(), ResNet18("group", 4, width=4)])
def test_blocks_features_and_training_are_consistent(model):
    made, x = model.build((16, 16, 3), 4), normal(3, 16, 16, 3)
    task = classification(made)
    variables = jax.jit(made.init)(KEY)

    @jax.jit
    def all_of_it(variables, x, key):
        h = x
        for block in made.blocks:
            h = block(variables, h, key)
        return h, made.apply(variables, x, key), made.features(variables, x, key)

    chained, outputs, features = all_of_it(variables, x, KEY)
    np.testing.assert_allclose(chained, outputs, atol=1e-4)
    top = getattr(variables, "params", variables)["output"]
    np.testing.assert_allclose(features @ top["weight"].T + top["bias"], outputs, atol=1e-4)
    losses = jax.jit(task.evaluation_loss)(variables, Batch(x, np.array([0, 1, 2])))
    alone = jax.jit(task.evaluation_loss)(variables, Batch(x[:1], np.array([0])))
    np.testing.assert_allclose(losses[0], alone[0], rtol=1e-4)  # in evaluation samples are independent


def test_impossible_inputs_are_rejected():
    for name in ("lenet5", "vgg11", "resnet20"):
        with pytest.raises(FedraxError, match=f"{name} takes images"):
            MODELS[name]().build((7,), 10)
    with pytest.raises(FedraxError, match="dropout rate"):
        LeNet5(dropout=1.0).build((16, 16), 10)
