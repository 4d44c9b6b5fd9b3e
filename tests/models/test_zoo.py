"""Models of the zoo: shapes, sizes, initialization, float types, and errors for invalid inputs."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedrax.errors import FedraxError
from fedrax.models import (
    CNN,
    LSTM,
    MLP,
    MODELS,
    VGG11,
    LeNet,
    Linear,
    Logistic,
    Model,
    ResNet18,
    ResNet20,
    SentencePairs,
    TraceRegression,
    TwoNN,
)

OTHERS = {"trace_regression", "polynomial", "tinynn", "lenet5", "vgg11", "resnet18", "resnet20", "resnet50"}
OTHERS |= {"sentence_pairs", "tweets"}  # tested in other modules
NETWORKS = sorted(set(MODELS) - OTHERS)
INPUTS = {"lstm": (6, 5), "lenet": (18, 20, 3), "cnn": (8, 9, 3)}  # the other models accept any input


@cache
def build(name, num_outputs=4):
    return compiled(MODELS[name]().build(INPUTS.get(name, (3, 4)), num_outputs))


def compiled(model):
    """The model with jitted functions, because op-by-op execution dominates the time of the tests."""
    return Model(jax.jit(model.init), jax.jit(model.apply), jax.jit(model.features), model.name)


def inputs(name, batch=2):
    shape = (batch, *INPUTS.get(name, (3, 4)))
    return jnp.asarray(np.random.default_rng(0).normal(size=shape))


def untyped(cls, **fields):
    """Options with types that a type checker would reject."""
    return cls(**fields)


def size(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_the_last_layer_of_the_features(name):
    model = build(name)
    params, x = model.init(jax.random.key(0)), inputs(name)
    features = model.features(params, x)
    assert features.shape == (2, params["output"]["weight"].shape[1])
    outputs = model.apply(params, x)
    assert outputs.shape == (2, 4)
    np.testing.assert_allclose(
        outputs, features @ params["output"]["weight"].T + params["output"]["bias"], rtol=1e-5, atol=1e-6
    )


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_blocks_compose_to_the_model(name):
    model, whole = MODELS[name]().build(INPUTS.get(name, (3, 4)), 4), build(name)
    params, x = whole.init(jax.random.key(0)), inputs(name)
    assert model.blocks is not None
    expected = {"linear": 1, "logistic": 1, "2nn": 3, "mlp": 3, "lenet": 5, "cnn": 4, "lstm": 2}
    assert len(model.blocks) == expected[name]
    for key in (None, jax.random.key(1)):
        h = x
        for block in model.blocks:
            h = jax.jit(block)(params, h, key)
        np.testing.assert_allclose(h, whole.apply(params, x, key), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NETWORKS)
def test_samples_of_a_batch_are_independent(name):
    model = build(name)
    params, x = model.init(jax.random.key(0)), inputs(name, batch=3)
    others_changed = model.apply(params, x.at[1:].set(7.0))
    np.testing.assert_allclose(model.apply(params, x)[0], others_changed[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_float64_stays_float64(name):
    with jax.enable_x64(True):
        model = build(name)
        params, x = model.init(jax.random.key(0)), inputs(name)
        gradients = jax.jit(jax.grad(lambda p: (model.apply(p, x, jax.random.key(1)) ** 2).sum()))(params)
        leaves = [model.apply(params, x), *jax.tree.leaves((params, gradients))]
        assert {leaf.dtype.name for leaf in leaves} == {"float64"}


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_stays_float32(name):
    model = build(name)
    params, x = model.init(jax.random.key(0)), inputs(name).astype("float32")
    assert {leaf.dtype.name for leaf in [model.apply(params, x), *jax.tree.leaves(params)]} == {"float32"}


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_has_a_gradient(name):
    model = build(name)
    params, x = model.init(jax.random.key(0)), inputs(name, batch=8)
    gradients = jax.jit(jax.grad(lambda p: jnp.square(model.apply(p, x) - 1).sum()))(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.any(leaf != 0), path


def test_numbers_of_parameters_agree_with_the_literature():
    def start(config, shape):
        return jax.eval_shape(config.build(shape, 10).init, jax.random.key(0))

    assert size(start(TwoNN(), (28, 28))) == 199_210  # McMahan et al. (2017), section 3
    assert size(start(Logistic(), (60,))) == 610
    lenet = start(LeNet(), (32, 32, 3))
    assert jax.tree.map(jnp.shape, lenet) == {
        "conv1": {"weight": (5, 5, 3, 32), "bias": (32,)},
        "conv2": {"weight": (5, 5, 32, 64), "bias": (64,)},
        "dense1": {"weight": (1600, 512), "bias": (512,)},
        "dense2": {"weight": (512, 128), "bias": (128,)},
        "output": {"weight": (10, 128), "bias": (10,)},
    }
    cnn = start(CNN(), (32, 32, 3))
    assert size(cnn) == (27 * 32 + 32) + (288 * 64 + 64) + (14 * 14 * 64 * 128 + 128) + 1290
    assert size(start(LSTM(), (25, 50))) == 4 * 128 * (50 + 128 + 2) + 1290


@pytest.mark.slow(keep=3)
@pytest.mark.parametrize("name", sorted({*NETWORKS} - {"logistic"}))
def test_initialization_is_uniform_within_one_over_root_fan_in(name):
    shapes = {"lstm": (6, 5), "lenet": (16, 16, 3), "cnn": (6, 6, 3)}
    params = jax.jit(MODELS[name]().build(shapes.get(name, (40,)), 30).init)(jax.random.key(0))
    for layer_name, layer in params.items():
        weight = layer["hidden_weight" if layer_name == "lstm" else "weight"]
        outputs = layer["bias" if "bias" in layer else "hidden_bias"].size
        bound = 1 / math.sqrt(weight.size // outputs)
        for leaf in layer.values():
            assert float(jnp.abs(leaf).max()) <= bound
        assert float(jnp.abs(weight).max()) > 0.95 * bound
        assert abs(float(weight.mean())) < 0.1 * bound


def test_logistic_starts_at_zero_and_linear_does_not():
    key = jax.random.key(0)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(Logistic().build((5,), 3).init(key)))
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(Linear().build((5,), 3).init(key)))


def test_initialization_depends_on_the_seed_only():
    init = build("mlp").init
    first, again, other = (init(jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, again)))
    assert not any(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, other)))


@pytest.mark.parametrize(("model", "side"), [(LeNet(), 16), (CNN(), 6)])
def test_gray_images_need_no_channel_axis(model, side):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, side, side)), jnp.float32)
    gray, one_channel = (compiled(model.build(shape, 3)) for shape in ((side, side), (side, side, 1)))
    params = gray.init(jax.random.key(0))
    np.testing.assert_array_equal(gray.apply(params, x), one_channel.apply(params, x[..., None]))


def test_lenet_agrees_with_numpy():
    x = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32")
    model = compiled(LeNet(channels=(4, 5), hidden=(7,)).build((16, 16, 3), 3))
    params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))

    def convolve_relu_pool(x, layer):  # [B, H, W, C]
        height, width = x.shape[1] - 4, x.shape[2] - 4
        y = np.zeros((x.shape[0], height, width, layer["bias"].size))
        for i in range(height):
            for j in range(width):
                y[:, i, j] = np.tensordot(x[:, i : i + 5, j : j + 5], layer["weight"], 3) + layer["bias"]
        return np.maximum(y, 0).reshape(x.shape[0], height // 2, 2, width // 2, 2, -1).max((2, 4))

    y = convolve_relu_pool(convolve_relu_pool(x, params["conv1"]), params["conv2"])
    y = y.transpose(0, 3, 1, 2).reshape(2, -1)
    y = np.maximum(y @ params["dense1"]["weight"] + params["dense1"]["bias"], 0)
    expected = y @ params["output"]["weight"].T + params["output"]["bias"]
    np.testing.assert_allclose(model.apply(params, x), expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_applied_only_with_a_key():
    model = build("cnn")
    params, x = model.init(jax.random.key(0)), inputs("cnn")
    without, first, second = (model.apply(params, x, key) for key in (None, *jax.random.split(jax.random.key(1))))
    assert not jnp.allclose(first, second)
    assert not jnp.allclose(first, without)
    plain = compiled(CNN(dropout=(0.0, 0.0)).build(INPUTS["cnn"], 4))
    np.testing.assert_array_equal(plain.apply(params, x, jax.random.key(1)), without)


def test_configurations_are_hashable_values():
    assert hash(MLP(hidden=(3,))) == hash(MLP(hidden=(3,)))
    assert MLP() != MLP(activation="tanh")


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: LeNet().build((8, 8, 3), 10), "at least 16x16"),
        (lambda: LeNet().build((784,), 10), "images"),
        (lambda: CNN().build((2, 2), 10), "at least 6x6"),
        (lambda: CNN(dropout=(1.0, 0.5)).build((8, 8), 10), "dropout"),
        (lambda: LSTM().build((784,), 10), "sequences"),
        (lambda: MLP(activation="rellu").build((4,), 2), "'relu'"),  # type: ignore[arg-type]
        (lambda: MLP(hidden=(5, 0)).build((4,), 2), "hidden must hold items that must be at least 1"),
        (lambda: untyped(MLP, hiden=(5,)), "unknown field of MLP: 'hiden'; did you mean 'hidden'"),
        (
            lambda: untyped(MLP, initialization="xavier").build((4,), 2),
            "initialization must be one of 'pytorch', 'glorot', 'he'",
        ),
        (lambda: untyped(ResNet18, stem="big").build((32, 32, 3), 2), "stem must be one of 'small', 'large'"),
        (lambda: untyped(ResNet20, norm="layer").build((8, 8, 3), 2), "norm must be one of"),
        (lambda: VGG11(width=0).build((32, 32, 3), 2), "width must be at least 1"),
        (lambda: untyped(SentencePairs, activation="gelu").build((2, 5), 3, ("a",)), "must be one of 'none', 'relu'"),
        (lambda: TraceRegression(deviation=math.nan).build((3, 3), 1), "deviation must be a finite number"),
        (lambda: Linear().build((4,), 0), "positive"),
    ],
)
def test_impossible_models_are_rejected(build_it, message):
    with pytest.raises(FedraxError, match=message) as caught:
        build_it()
    assert "\n" not in str(caught.value)
