"""The zoo: small models of the federated learning literature, each a frozen configuration.

    model = LeNet().build(input_shape=(32, 32, 3), num_outputs=10)

Every model is a body of layers that compute features and a dense layer "output" on top of them; the layers and the
output are its blocks. Parameters are nested dictionaries of arrays and start as PyTorch's layers do, uniform in
±1/sqrt(fan_in). Integers and bytes are read as the numbers they are.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import PositiveInt, check
from fedrax.contract.model import Model, Params
from fedrax.errors import FedraxError, known_fields_only
from fedrax.models.convolutional import VGG11, LeNet5, ResNet18, ResNet20, ResNet50, TinyNN
from fedrax.models.layers import (
    ACTIVATIONS,
    conv2d,
    dense,
    dropout,
    flatten,
    images,
    init_conv,
    init_dense,
    init_output,
    max_pool,
    output,
    to_features,
)
from fedrax.models.lstm import init_lstm, lstm
from fedrax.models.network_parts import image_shape
from fedrax.models.polynomial import Polynomial
from fedrax.models.text_networks import SentencePairs, Tweets
from fedrax.models.trace_regression import TraceRegression

Shape = tuple[int, ...]
InitBody = Callable[[Array], Params]
Block = Callable[..., Array]  # (params, x, key=None) -> x
Start = Literal["pytorch", "glorot", "he"]
"""Uniform in ±1/sqrt(fan_in); or normal with variance 2/(fan_in + fan_out) or 2/fan_in, biases zero."""


@dataclass(frozen=True)
class Linear:
    """One dense layer on the flattened input."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        return _model("linear", math.prod(input_shape), num_outputs, lambda key: {}, [])


@dataclass(frozen=True)
class Logistic:
    """Softmax regression: one dense layer on the flattened input, started at zero."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        linear = Linear().build(input_shape, num_outputs)

        def init(key: Array) -> Params:
            return jax.tree.map(jnp.zeros_like, linear.init(key))

        return replace(linear, init=init, name="logistic")


@dataclass(frozen=True)
class MLP:
    """Dense layers with an activation after each, on the flattened input."""

    hidden: tuple[PositiveInt, ...] = (200, 200)
    activation: Literal["relu", "tanh", "gelu", "elu", "sigmoid"] = "relu"
    start: Start = "pytorch"
    """Distribution of the starting parameters."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        sizes = [math.prod(input_shape), *self.hidden]
        return _started(_model("mlp", sizes[-1], num_outputs, *_dense_layers(sizes, self.activation)), self.start)


@dataclass(frozen=True)
class TwoNN:
    """The "2NN" of McMahan et al. (2017), section 3: two hidden layers of 200 units with ReLU."""

    start: Start = "pytorch"
    """Distribution of the starting parameters."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        sizes = [math.prod(input_shape), 200, 200]
        return _started(_model("2nn", 200, num_outputs, *_dense_layers(sizes, "relu")), self.start)


def _started(model: Model, start: Start) -> Model:
    """``model`` with dense layers that start as ``start`` says."""
    if start == "pytorch":
        return model
    draw = {"glorot": jax.nn.initializers.glorot_normal, "he": jax.nn.initializers.he_normal}[start]()

    def init(key: Array) -> Params:
        params = model.init(key)
        params["output"]["weight"] = params["output"]["weight"].T  # drawn as a dense layer's, then turned round
        leaves, structure = jax.tree.flatten(params)
        keys = jax.random.split(key, len(leaves))
        drawn = [jnp.zeros_like(x) if x.ndim < 2 else draw(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        params = jax.tree.unflatten(structure, drawn)
        params["output"]["weight"] = params["output"]["weight"].T
        return params

    return replace(model, init=init)


@dataclass(frozen=True)
class LeNet:
    """5x5 convolutions with ReLU, each pooled 2x2, then dense layers with ReLU, on [H, W] or [H, W, C]."""

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    hidden: tuple[PositiveInt, ...] = (512, 128)

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
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
            return max_pool(jax.nn.relu(conv2d(params["conv1"], images(x))))

        def conv2(params: Params, x: Array, key: Array | None = None) -> Array:
            return to_features(max_pool(jax.nn.relu(conv2d(params["conv2"], x))))

        return _model("lenet", sizes[-1], num_outputs, init, [conv1, conv2, *dense_layers])


@dataclass(frozen=True)
class CNN:
    """Two 3x3 convolutions with ReLU, one 2x2 pooling, one dense layer with ReLU, on [H, W] or [H, W, C].

    The architecture of pfl-research's CIFAR-10 benchmark, with dropout after the pooling and after the
    dense layer; dropout acts only where the loss is given a key.
    """

    channels: tuple[PositiveInt, PositiveInt] = (32, 64)
    hidden: PositiveInt = 128
    dropout: tuple[float, float] = (0.25, 0.5)

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        height, width, channels_in = image_shape("cnn", input_shape, smallest=6)
        if not all(0 <= rate < 1 for rate in self.dropout):
            raise FedraxError(f"dropout rates must lie in [0, 1), not {self.dropout}.")
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
            return jax.nn.relu(conv2d(params["conv1"], images(x)))

        def conv2(params: Params, x: Array, key: Array | None = None) -> Array:
            return drop(0, to_features(max_pool(jax.nn.relu(conv2d(params["conv2"], x)))), key)

        def dense1(params: Params, x: Array, key: Array | None = None) -> Array:
            return drop(1, jax.nn.relu(dense(params["dense1"], x)), key)

        def drop(place: int, x: Array, key: Array | None) -> Array:
            return dropout(x, self.dropout[place], None if key is None else jax.random.split(key)[place])

        return _model("cnn", self.hidden, num_outputs, init, [conv1, conv2, dense1])


@dataclass(frozen=True)
class LSTM:
    """One LSTM layer over a sequence [T, F]; its last hidden state feeds the output layer."""

    hidden: PositiveInt = 128

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        """Build the model for samples of ``input_shape`` and ``num_outputs`` outputs."""
        if len(input_shape) != 2:
            hint = "; of words or characters, as numbers, tweets makes the features" if len(input_shape) == 1 else ""
            raise FedraxError(f"lstm reads sequences of shape (steps, features), not {tuple(input_shape)}{hint}.")
        return _model(
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


def _check_first(cls: Any) -> None:
    """Have ``cls`` look at its fields before it builds: a word that it does not know would be taken for another."""
    build = cls.build

    @functools.wraps(build)
    def checked(self: Any, *shapes: Any, **named: Any) -> Model:
        check(self)
        return build(self, *shapes, **named)

    cls.build = checked


for _class in MODELS.values():
    known_fields_only(_class)
    _check_first(_class)


def _model(name: str, num_features: int, num_outputs: int, init_body: InitBody, layers: list[Block]) -> Model:
    """A body of layers with a dense layer "output" on top; it reads the flattened input where there are none."""
    if num_features < 1 or num_outputs < 1:
        raise FedraxError(f"{name} needs positive sizes, not {num_features} features, {num_outputs} outputs.")

    def init(key: Array) -> Params:
        body_key, output_key = jax.random.split(key)
        return init_body(body_key) | {"output": init_output(output_key, num_features, num_outputs)}

    def features(params: Params, x: Array, key: Array | None = None) -> Array:
        x = _numbers(params, x)
        for layer in layers:
            x = layer(params, x, key)
        return flatten(x)

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        return top(params, features(params, x, key))

    def top(params: Params, x: Array, key: Array | None = None) -> Array:
        return output(params["output"], flatten(x))

    first, *others = *layers, top

    def bottom(params: Params, x: Array, key: Array | None = None) -> Array:
        return first(params, _numbers(params, x), key)

    return Model(init, apply, features, name, (bottom, *others), reads_amounts=True)


def _numbers(params: Params, x: Array) -> Array:
    """Integers as numbers of the parameters' type: no model of the zoo reads tokens."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(params["output"]["weight"].dtype)


def _dense_layers(sizes: list[int], activation: str) -> tuple[InitBody, list[Block]]:
    """Dense layers "dense1", "dense2", ... of these sizes, an activation after each; the first flattens its input."""
    if min(sizes) < 1:
        raise FedraxError(f"layer sizes must be positive, not {sizes}.")
    activate = ACTIVATIONS[activation]
    shapes = {f"dense{i}": shape for i, shape in enumerate(pairwise(sizes), 1)}

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(sizes))
        return {name: init_dense(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=False)}

    def layer(name: str) -> Block:
        return lambda params, x, key=None: activate(dense(params[name], flatten(x)))

    return init, [layer(name) for name in shapes]
