"""The zoo: small models of the federated learning literature, each a frozen configuration.

    model = LeNet().build(input_shape=(32, 32, 3), num_outputs=10)

Every model is a body that computes features and a dense layer "output" on top of them. Parameters are
nested dictionaries of arrays and start as PyTorch's layers do, uniform in ±1/sqrt(fan_in).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.errors import FedraxError
from fedrax.models.layers import ACTIVATIONS, dense, flatten, init_layer
from fedrax.models.model import Model, Params

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Linear:
    """One dense layer on the flattened input."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        return _model(
            "linear", math.prod(input_shape), num_outputs, lambda key: {}, lambda params, x, key: flatten(x)
        )


@dataclass(frozen=True)
class Logistic:
    """Softmax regression, started at zero."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        linear = Linear().build(input_shape, num_outputs)
        return Model(
            lambda key: jax.tree.map(jnp.zeros_like, linear.init(key)),
            linear.apply,
            linear.features,
            "logistic",
        )


@dataclass(frozen=True)
class MLP:
    """Dense layers with an activation between them, on the flattened input."""

    hidden: tuple[int, ...] = (200, 200)
    activation: Literal["relu", "tanh", "gelu", "elu", "sigmoid"] = "relu"

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        sizes = [math.prod(input_shape), *self.hidden]
        return _model("mlp", sizes[-1], num_outputs, *_dense_stack(sizes, self.activation))


@dataclass(frozen=True)
class TwoNN:
    """ "2NN" of McMahan et al. (2017): two hidden layers of 200 units with ReLU."""

    def build(self, input_shape: Shape, num_outputs: int) -> Model:
        return MLP(hidden=(200, 200)).build(input_shape, num_outputs)


def _dense_stack(sizes: list[int], activation: str):
    """init(key) and body(params, x, key) of dense layers "dense1", "dense2", ... of these sizes."""
    if activation not in ACTIVATIONS:
        raise FedraxError(f"There is no activation {activation!r}; there are {', '.join(ACTIVATIONS)}.")
    names = [f"dense{i}" for i in range(1, len(sizes))]

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(names)) if names else []
        return {n: init_layer(k, s) for n, k, s in zip(names, keys, itertools.pairwise(sizes))}

    def body(params: Params, x: Array, key: Array | None) -> Array:
        x = flatten(x)
        for name in names:
            x = ACTIVATIONS[activation](dense(params[name], x))
        return x

    return init, body


def _model(name: str, num_features: int, num_outputs: int, init_body: Callable, body: Callable) -> Model:
    """A body with a dense layer on top."""

    def init(key: Array) -> Params:
        body_key, output_key = jax.random.split(key)
        return init_body(body_key) | {"output": init_layer(output_key, (num_features, num_outputs))}

    def apply(params: Params, x: Array, key: Array | None = None) -> Array:
        return dense(params["output"], body(params, x, key))

    def features(params: Params, x: Array, key: Array | None = None) -> Array:
        return body(params, x, key)

    return Model(init, apply, features, name)


MODELS: dict[str, type] = {"linear": Linear, "logistic": Logistic, "2nn": TwoNN, "mlp": MLP}
