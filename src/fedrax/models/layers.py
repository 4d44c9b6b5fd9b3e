"""Layers of the model zoo as pure functions of their parameters."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.errors import FedraxError

LayerParams = dict[str, Array]
"""Parameters of a layer: "weight" and, for most layers, "bias"."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "elu": jax.nn.elu,
    "sigmoid": jax.nn.sigmoid,
}


def uniform_fan_in(key: Array, shape: tuple[int, ...], fan_in: int) -> Array:
    """Uniform in ±1/sqrt(fan_in), PyTorch's default initialization, in JAX's default float type."""
    bound = 1 / math.sqrt(fan_in)
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def init_dense(key: Array, inputs: int, units: int) -> LayerParams:
    """Weight [inputs, units] and bias [units] of a hidden dense layer."""
    return _init_layer(key, (inputs, units))


def init_output(key: Array, features: int, outputs: int) -> LayerParams:
    """Weight [outputs, features], the transpose of a dense layer's, and bias [outputs]."""
    layer = init_dense(key, features, outputs)
    return layer | {"weight": layer["weight"].T}


def init_conv(key: Array, shape: tuple[int, int, int, int]) -> LayerParams:
    """Weight [height, width, channels in, channels out] and bias [channels out] of a convolution."""
    return _init_layer(key, shape)


def _init_layer(key: Array, shape: tuple[int, ...]) -> LayerParams:
    """Weight of a shape whose last axis is the outputs, and bias."""
    weight_key, bias_key = jax.random.split(key)
    fan_in = math.prod(shape[:-1])
    return {
        "weight": uniform_fan_in(weight_key, shape, fan_in),
        "bias": uniform_fan_in(bias_key, shape[-1:], fan_in),
    }


def dense(layer: LayerParams, x: Array) -> Array:
    """x [..., inputs] -> x @ weight + bias [..., units]."""
    return x @ layer["weight"] + layer["bias"]


def output(layer: LayerParams, x: Array) -> Array:
    """x [B, features] -> x @ weight.T + bias [B, outputs].

    The weight is transposed in comparison with a hidden layer's, because outputs are few: a CPU's matrix product is
    fastest if the long axis is contiguous. A step of softmax regression takes about half the time.
    """
    weight = layer["weight"]
    # Selected by the number of outputs only: the program must not depend on the batch size, see fedrax.xla.microbatch.
    return (_small_product if weight.shape[0] <= _SMALL else _product)(x, weight) + layer["bias"]


_SMALL = 16
"""Up to this many samples and outputs, a sum of outer products is the faster weight gradient on a CPU."""


def _product(x: Array, weight: Array) -> Array:
    """x [B, features] times the transpose of weight [outputs, features]."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _small_product(x: Array, weight: Array) -> Array:
    """As `_product`, with the weight gradient of few samples as a sum of outer products.

    XLA fuses the sum into the update of the weights, which saves a call and a pass over the gradient.
    """
    return _product(x, weight)


def _small_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    """Forward pass of `_small_product`."""
    return _product(x, weight), (x, weight)


def _small_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Gradients of `_small_product` with respect to x and weight."""
    x, weight = residuals
    if len(x) > _SMALL:
        return g @ weight, lax.dot_general(g, x, (((0,), (0,)), ((), ())))
    return g @ weight, sum((jnp.outer(g[b], x[b]) for b in range(1, len(x))), jnp.outer(g[0], x[0]))


_small_product.defvjp(_small_forward, _small_backward)


def flatten(x: Array) -> Array:
    """[B, ...] -> [B, F]."""
    return x.reshape(x.shape[0], -1)


def dropout(x: Array, rate: float, key: Array | None) -> Array:
    """Set entries to zero with probability ``rate`` and scale the others by 1/(1 - rate); without a key, return x."""
    if key is None or rate == 0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0)


# --- Images -------------------------------------------------------------------------------------------


def add_channel_axis(x: Array) -> Array:
    """[B, H, W, C] or grayscale [B, H, W] -> [B, H, W, C]."""
    if x.ndim not in (3, 4):
        raise FedraxError(f"a convolutional model takes images [B, H, W] or [B, H, W, C], not {x.shape}")
    return x if x.ndim == 4 else x[..., None]


def to_features(x: Array) -> Array:
    """[B, H, W, C] -> [B, C * H * W], in PyTorch's order of flattening."""
    return flatten(x.transpose(0, 3, 1, 2))


def conv2d(layer: LayerParams, x: Array, stride: int = 1, padding: int = 0) -> Array:
    """Convolution, with a bias if the layer has one: [B, H, W, C] -> [B, H', W', D]."""
    pads, numbers = [(padding, padding)] * 2, ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x, layer["weight"], (stride, stride), pads, dimension_numbers=numbers)
    return y + layer["bias"] if "bias" in layer else y


def max_pool(x: Array, side: int = 2, padding: int = 0) -> Array:
    """Max pooling, stride 2, without incomplete windows: [B, H, W, C] -> [B, H', W', C]."""
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, side, side, 1), (1, 2, 2, 1), pads)
