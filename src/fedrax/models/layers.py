"""Dense layers, activations, and PyTorch's default initialisation, shared by the zoo."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

Activation = Callable[[Array], Array]

ACTIVATIONS: dict[str, Activation] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
    "sigmoid": jax.nn.sigmoid,
}


def uniform_fan_in(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Uniform in ±1/sqrt(fan_in), as PyTorch's default layers start; in JAX's default float type."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def init_layer(key: Array, shape: tuple[int, ...]) -> dict[str, Array]:
    """Weight of this shape and bias of its last axis; all axes but the last are fan-in.

    (inputs, outputs) for a dense layer, (height, width, channels in, channels out) for a convolution.
    """
    weight_key, bias_key = jax.random.split(key)
    fan_in = math.prod(shape[:-1])
    return {
        "weight": uniform_fan_in(weight_key, shape, fan_in),
        "bias": uniform_fan_in(bias_key, shape[-1:], fan_in),
    }


def dense(layer: dict[str, Array], x: Array) -> Array:
    """x [..., inputs] -> x @ weight + bias [..., outputs]."""
    return x @ layer["weight"] + layer["bias"]


def flatten(x: Array) -> Array:
    """[B, ...] -> [B, F]."""
    return x.reshape(x.shape[0], -1)
