"""Layers of the zoo as pure functions."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.errors import FedraxError

Layer = dict[str, Array]  # "weight" and "bias"

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
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


def init_dense(key: Array, inputs: int, units: int) -> Layer:
    """Weight [inputs, units] and bias [units] of a hidden dense layer."""
    return _init_layer(key, (inputs, units))


def init_output(key: Array, features: int, outputs: int) -> Layer:
    """Weight [outputs, features], a row for each output, and bias [outputs]; a dense layer's start turned round."""
    layer = init_dense(key, features, outputs)
    return layer | {"weight": layer["weight"].T}


def init_conv(key: Array, shape: tuple[int, int, int, int]) -> Layer:
    """Weight [height, width, channels in, channels out] and bias [channels out] of a convolution."""
    return _init_layer(key, shape)


def _init_layer(key: Array, shape: tuple[int, ...]) -> Layer:
    weight_key, bias_key = jax.random.split(key)
    fan_in = math.prod(shape[:-1])
    return {
        "weight": uniform_fan_in(weight_key, shape, fan_in),
        "bias": uniform_fan_in(bias_key, shape[-1:], fan_in),
    }


def dense(layer: Layer, x: Array) -> Array:
    """x [..., inputs] -> x @ weight + bias [..., units]."""
    return x @ layer["weight"] + layer["bias"]


def output(layer: Layer, x: Array) -> Array:
    """x [B, features] -> x @ weight' + bias [B, outputs].

    Outputs are few, so their weight lies the other way round than a hidden layer's: on a CPU a product is fastest
    where the long axis is the contiguous one, and a step of softmax regression takes about half the time.
    """
    weight = layer["weight"]
    # by the outputs alone: of any number of samples it is to be one program, see `fedrax.xla.microbatch`
    return (_small_product if weight.shape[0] <= _SMALL else _product)(x, weight) + layer["bias"]


_SMALL = 16
"""Samples and outputs up to which a weight gradient is better written out than computed by a matrix product."""


def _product(x: Array, weight: Array) -> Array:
    """x [B, features] times the transpose of weight [outputs, features]."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _small_product(x: Array, weight: Array) -> Array:
    """The same; of few samples its weight gradient is a sum of outer products.

    XLA computes such a sum where it is used: in the update of the weights, without a call and a pass of its own.
    """
    return _product(x, weight)


def _small_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x, weight)


def _small_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, weight = residuals
    if len(x) > _SMALL:
        return g @ weight, lax.dot_general(g, x, (((0,), (0,)), ((), ())))
    return g @ weight, sum((jnp.outer(g[b], x[b]) for b in range(1, len(x))), jnp.outer(g[0], x[0]))


_small_product.defvjp(_small_forward, _small_backward)


def flatten(x: Array) -> Array:
    """[B, ...] -> [B, F]."""
    return x.reshape(x.shape[0], -1)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Zeroes entries with probability `rate` and scales the others by 1/(1 - rate); nothing without a key."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


# --- Images -------------------------------------------------------------------------------------------


def images(x: Array) -> Array:
    """[B, H, W, C] or grey [B, H, W] -> [B, H, W, C]."""
    if x.ndim not in (3, 4):
        raise FedraxError(f"a convolutional model reads images [B, H, W] or [B, H, W, C], not {x.shape}.")
    return x if x.ndim == 4 else x[..., None]


def to_features(x: Array) -> Array:
    """[B, H, W, C] -> [B, C * H * W], in the order in which PyTorch flattens."""
    return flatten(x.transpose(0, 3, 1, 2))


def conv2d(layer: Layer, x: Array, stride: int = 1, padding: int = 0) -> Array:
    """Convolution, with a bias where the layer has one: [B, H, W, C] -> [B, H', W', D]."""
    pads, numbers = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, layer["weight"], (stride, stride), pads, dimension_numbers=numbers)
    return y + layer["bias"] if "bias" in layer else y


def max_pool(x: Array, side: int = 2, padding: int = 0) -> Array:
    """``side`` x ``side``, stride 2; what is left at the end is left out: [B, H, W, C] -> [B, H', W', C]."""
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, side, side, 1), (1, 2, 2, 1), pads)
