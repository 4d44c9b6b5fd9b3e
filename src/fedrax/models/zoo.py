"""Small models of the federated learning literature, each a frozen dataclass of its hyperparameters.

    model = LeNet().build(input_shape=(32, 32, 3), num_outputs=10)

A model is a body of layers that computes features, and a dense layer "output" on top. The layers and the output are
the model's blocks. Parameters are nested dictionaries of arrays. They are initialized as PyTorch's layers are, uniform
in ±1/sqrt(fan_in). Integer inputs are converted to floating-point numbers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.arguments import checked_fields
from fedrax.config.hyperparameters import PositiveInt
from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError
from fedrax.models.architecture import Architecture, Shape
from fedrax.models.composable_layers import image_shape
from fedrax.models.convolutional import VGG11, LeNet5, ResNet18, ResNet20, ResNet50, TinyNN
from fedrax.models.layers import (
    ACTIVATIONS,
    add_channel_axis,
    conv2d,
    dense,
    dropout,
    flatten,
    init_conv,
    init_dense,
    init_output,
    max_pool,
    output,
    to_features,
)
from fedrax.models.lstm import init_lstm, lstm
from fedrax.models.polynomial import Polynomial
from fedrax.models.text_networks import SentencePairs, Tweets
from fedrax.models.trace_regression import TraceRegression

InitBody = Callable[[Array], Params]
Block = Callable[..., Array]  # (params, x, key=None) -> x
Initialization = Literal["pytorch", "glorot", "he"]
"""Initialization: "pytorch" is uniform in ±1/sqrt(fan_in); "glorot" and "he" are normal with variance
2/(fan_in + fan_out) and 2/fan_in, and biases are zero."""


@dataclass(frozen=True)
class Linear(Architecture):
    """Linear model: one dense layer on the flattened input.

    Example:
        >>> model = fedrax.models.Linear().build(input_shape=(60,), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        610
    """

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        return _build_model("linear", math.prod(input_shape), num_outputs, lambda key: {}, [])


@dataclass(frozen=True)
class Logistic(Architecture):
    """Softmax regression: one dense layer on the flattened input, initialized to zero.

    Example:
        >>> model = fedrax.models.Logistic().build(input_shape=(60,), num_outputs=10)
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((2, 60))).shape
        (2, 10)
    """

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        linear = Linear().build(input_shape, num_outputs)

        def init(key: Array) -> Params:
            return jax.tree.map(jnp.zeros_like, linear.init(key))

        return replace(linear, init=init, name="logistic")


@dataclass(frozen=True)
class MLP(Architecture):
    """Multilayer perceptron on the flattened input.

    Example:
        >>> model = fedrax.models.MLP(hidden=(32,)).build(input_shape=(28, 28, 1), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        25450
    """

    hidden: tuple[PositiveInt, ...] = (200, 200)
    """Units of each hidden layer."""
    activation: Literal["relu", "tanh", "gelu", "elu", "sigmoid"] = "relu"
    """Activation after each hidden layer."""
    initialization: Initialization = "pytorch"
    """Initialization of the parameters: "pytorch" is uniform in ±1/sqrt(fan_in), "glorot" and "he" are normal."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        sizes = [math.prod(input_shape), *self.hidden]
        return _with_initialization(
            _build_model("mlp", sizes[-1], num_outputs, *_dense_layers(sizes, self.activation)), self.initialization
        )


@dataclass(frozen=True)
class TwoNN(Architecture):
    """The "2NN" of McMahan et al. (2017), section 3: two hidden layers of 200 units with ReLU.

    The first layer reads the flattened input.

    Example:
        >>> model = fedrax.models.TwoNN().build(input_shape=(28, 28, 1), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        199210
    """

    initialization: Initialization = "pytorch"
    """Initialization of the parameters: "pytorch" is uniform in ±1/sqrt(fan_in), "glorot" and "he" are normal."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        sizes = [math.prod(input_shape), 200, 200]
        layers = _dense_layers(sizes, "relu")
        return _with_initialization(_build_model("2nn", 200, num_outputs, *layers), self.initialization)


def _with_initialization(model: Model, initialization: Initialization) -> Model:
    """``model`` with another initialization of its dense layers."""
    if initialization == "pytorch":
        return model
    draw = {"glorot": jax.nn.initializers.glorot_normal, "he": jax.nn.initializers.he_normal}[initialization]()

    def init(key: Array) -> Params:
        params = model.init(key)
        # The output weight is drawn in the layout of a hidden layer, with fan-in as its first axis.
        params["output"]["weight"] = params["output"]["weight"].T
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [jnp.zeros_like(x) if x.ndim < 2 else draw(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(structure, drawn)
        params["output"]["weight"] = params["output"]["weight"].T
        return params

    return replace(model, init=init)


@dataclass(frozen=True)
class LeNet(Architecture):
    """Convolutional network for images: two 5x5 convolutions with ReLU and 2x2 max pooling, then dense layers.

    Inputs are images [H, W] or [H, W, C] of at least 16x16 pixels.

    Example:
        >>> model = fedrax.models.LeNet().build(input_shape=(28, 28, 1), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        643850
    """

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    """Channels of the two convolutions."""
    hidden: tuple[PositiveInt, ...] = (512, 128)
    """Units of each hidden dense layer, with ReLU."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        height, width, channels_in = image_shape("lenet", input_shape, smallest=16)
        first, second = self.channels
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        sizes = [second * rows * columns, *self.hidden]
        init_layers, dense_layers = _dense_layers(sizes, "relu")

        def init(key: Array) -> Params:
            keys = jax.random.split(key, 3)
            conv1 = init_conv(keys[0], (5, 5, channels_in, first))
            conv2 = init_conv(keys[1], (5, 5, first, second))
            return {"conv1": conv1, "conv2": conv2} | init_layers(keys[2])

        def conv1(params: Params, x: Array, key: Array | None = None) -> Array:
            return max_pool(jax.nn.relu(conv2d(params["conv1"], add_channel_axis(x))))

        def conv2(params: Params, x: Array, key: Array | None = None) -> Array:
            return to_features(max_pool(jax.nn.relu(conv2d(params["conv2"], x))))

        return _build_model("lenet", sizes[-1], num_outputs, init, [conv1, conv2, *dense_layers])


@dataclass(frozen=True)
class CNN(Architecture):
    """Convolutional network for images: two 3x3 convolutions with ReLU, 2x2 max pooling and one hidden dense layer.

    The architecture of pfl-research's CIFAR-10 benchmark. Inputs are images [H, W] or [H, W, C] of at least 6x6 pixels.

    Example:
        >>> model = fedrax.models.CNN().build(input_shape=(32, 32, 3), num_outputs=10)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        1626442
    """

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    """Channels of the two convolutions."""
    hidden: PositiveInt = 128
    """Units of the hidden dense layer, with ReLU."""
    dropout: tuple[float, float] = (0.25, 0.5)
    """Dropout rates after the pooling and after the hidden layer, used in training only."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        height, width, channels_in = image_shape("cnn", input_shape, smallest=6)
        if not all(0 <= rate < 1 for rate in self.dropout):
            raise FedraxError(f"dropout rates must be in [0, 1), not {self.dropout}")
        first, second = self.channels
        num_pooled = second * ((height - 4) // 2) * ((width - 4) // 2)

        def init(key: Array) -> Params:
            keys = jax.random.split(key, 3)
            return {
                "conv1": init_conv(keys[0], (3, 3, channels_in, first)),
                "conv2": init_conv(keys[1], (3, 3, first, second)),
                "dense1": init_dense(keys[2], num_pooled, self.hidden),
            }

        def conv1(params: Params, x: Array, key: Array | None = None) -> Array:
            return jax.nn.relu(conv2d(params["conv1"], add_channel_axis(x)))

        def conv2(params: Params, x: Array, key: Array | None = None) -> Array:
            return drop(0, to_features(max_pool(jax.nn.relu(conv2d(params["conv2"], x)))), key)

        def dense1(params: Params, x: Array, key: Array | None = None) -> Array:
            return drop(1, jax.nn.relu(dense(params["dense1"], x)), key)

        def drop(index: int, x: Array, key: Array | None) -> Array:
            return dropout(x, self.dropout[index], None if key is None else jax.random.split(key)[index])

        return _build_model("cnn", self.hidden, num_outputs, init, [conv1, conv2, dense1])


@dataclass(frozen=True)
class LSTM(Architecture):
    """One LSTM layer over a sequence [T, F], whose last hidden state is the input of the output layer.

    Example:
        >>> model = fedrax.models.LSTM().build(input_shape=(128, 9), num_outputs=6)
        >>> sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))
        71942
    """

    hidden: PositiveInt = 128
    """Units of the LSTM."""

    def _build(self, input_shape: Shape, num_outputs: int) -> Model:
        if len(input_shape) != 2:
            hint = ": for texts as token numbers, use the model tweets" if len(input_shape) == 1 else ""
            raise FedraxError(f"lstm takes sequences of shape (steps, features), not {tuple(input_shape)}{hint}")
        return _build_model(
            "lstm",
            self.hidden,
            num_outputs,
            lambda key: {"lstm": init_lstm(key, input_shape[1], self.hidden)},
            [lambda params, x, key=None: lstm(params["lstm"], x)],
        )


MODELS: dict[str, type] = {
    "linear": Linear,
    "logistic": Logistic,
    "2nn": TwoNN,
    "mlp": MLP,
    "lenet": LeNet,
    "cnn": CNN,
    "lstm": LSTM,
    "trace_regression": TraceRegression,
    "polynomial": Polynomial,
    "tinynn": TinyNN,
    "lenet5": LeNet5,
    "vgg11": VGG11,
    "resnet18": ResNet18,
    "resnet20": ResNet20,
    "resnet50": ResNet50,
    "sentence_pairs": SentencePairs,
    "tweets": Tweets,
}


for _class in MODELS.values():
    checked_fields(_class)


def _build_model(name: str, num_features: int, num_outputs: int, init_body: InitBody, layers: list[Block]) -> Model:
    """A model that applies ``layers`` one after the other and a dense layer "output" to their flattened outputs."""
    if num_features < 1 or num_outputs < 1:
        raise FedraxError(f"{name} needs positive sizes, not {num_features} features and {num_outputs} outputs")

    def init(key: Array) -> Params:
        body_key, output_key = jax.random.split(key)
        return init_body(body_key) | {"output": init_output(output_key, num_features, num_outputs)}

    def features(params: Params, x: Array, key: Array | None = None) -> Array:
        x = _as_float(params, x)
        for layer in layers:
            x = layer(params, x, key)
        return flatten(x)

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        return output_block(params, features(params, x, key))

    def output_block(params: Params, x: Array, key: Array | None = None) -> Array:
        return output(params["output"], flatten(x))

    first, *others = *layers, output_block

    def first_block(params: Params, x: Array, key: Array | None = None) -> Array:
        return first(params, _as_float(params, x), key)

    return Model(init, apply, features, name, (first_block, *others), reads_amounts=True)


def _as_float(params: Params, x: Array) -> Array:
    """x with integers converted to the parameters' dtype."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(params["output"]["weight"].dtype)


def _dense_layers(sizes: list[int], activation: str) -> tuple[InitBody, list[Block]]:
    """Dense layers "dense1", "dense2", ... of the given sizes with activations; the first flattens its input."""
    if min(sizes) < 1:
        raise FedraxError(f"layer sizes must be positive, not {sizes}")
    activate = ACTIVATIONS[activation]
    shapes = {f"dense{i}": shape for i, shape in enumerate(pairwise(sizes), 1)}

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(sizes))
        return {name: init_dense(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=False)}

    def layer(name: str) -> Block:
        return lambda params, x, key=None: activate(dense(params[name], flatten(x)))

    return init, [layer(name) for name in shapes]
