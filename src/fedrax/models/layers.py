"""Layers of the zoo as pure functions, shaped for speed inside compiled loops on a CPU.

Images travel through the convolutional layers as [channels, height, width, batch]. With the batch last,
every shift of an image is a copy of long contiguous runs and every elementwise step fills the vector
registers whatever the number of channels. `to_images` and `to_features` are the way in and out.

Two operations have hand-written gradients: XLA's own convolution is an order of magnitude slower inside
a compiled loop than outside one, and the gradient of a maximum over windows is a scatter.
"""

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
    small = max(x.shape[0], weight.shape[0]) <= _SMALL
    return (_small_product if small else _product)(x, weight) + layer["bias"]


_SMALL = 16
"""Samples and outputs up to which a weight gradient is better written out than computed by a matrix product."""


def _product(x: Array, weight: Array) -> Array:
    """x [B, features] times the transpose of weight [outputs, features]."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())))


@jax.custom_vjp
def _small_product(x: Array, weight: Array) -> Array:
    """The same; its weight gradient is a sum over samples of outer products.

    XLA computes such a sum where it is used: in the update of the weights, without a call and a pass of its own.
    """
    return _product(x, weight)


def _small_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    return _product(x, weight), (x, weight)


def _small_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, weight = residuals
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


def to_images(x: Array) -> Array:
    """[B, H, W, C] or grey [B, H, W] -> [C, H, W, B]."""
    if x.ndim not in (3, 4):
        raise FedraxError(f"a convolutional model reads images [B, H, W] or [B, H, W, C], not {x.shape}.")
    return (x if x.ndim == 4 else x[..., None]).transpose(3, 1, 2, 0)


def to_features(x: Array) -> Array:
    """[C, H, W, B] -> [B, C * H * W], in the order in which PyTorch flattens."""
    return x.reshape(-1, x.shape[-1]).T


def conv2d(x: Array, weight: Array) -> Array:
    """Convolution without padding, stride 1: [C, H, W, B], [h, w, C, D] -> [D, H - h + 1, W - w + 1, B]."""
    return _conv_by_columns(x, weight) if jax.default_backend() == "cpu" else _conv_native(x, weight)


def _conv_native(x: Array, weight: Array) -> Array:
    return lax.conv_general_dilated(x, weight, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN"))


@jax.custom_vjp
def _conv_by_columns(x: Array, weight: Array) -> Array:
    return _conv_forward(x, weight)[0]


def _conv_forward(x: Array, weight: Array) -> tuple[Array, tuple[Array, Array]]:
    height, width, _, channels_out = weight.shape
    shifts = _shifts(x, height, width)  # [h * w, C, H', W', B]
    columns = shifts.reshape(-1, math.prod(shifts.shape[2:]))
    kernel = weight.reshape(-1, channels_out)
    y = lax.dot_general(kernel, columns, (((0,), (0,)), ((), ())))  # kernel' @ columns
    return y.reshape(channels_out, *shifts.shape[2:]), (columns, weight)


def _conv_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    """Two matrix products over the columns of the forward pass.

    Where nobody asks for the gradient of x (a first layer), XLA drops everything that leads to it.
    """
    columns, weight = residuals
    height, width, channels_in, channels_out = weight.shape
    g_rows = g.reshape(channels_out, -1)
    weight_grad = lax.dot_general(columns, g_rows, (((1,), (1,)), ((), ()))).reshape(weight.shape)
    column_grad = weight.reshape(-1, channels_out) @ g_rows
    shift_grads = column_grad.reshape(height, width, channels_in, *g.shape[1:])
    return _add_shifts(shift_grads), weight_grad


_conv_by_columns.defvjp(_conv_forward, _conv_backward)


def _shifts(x: Array, height: int, width: int) -> Array:
    """The height * width windows of x [C, H, W, B] that a kernel's entries see, [h * w, C, H', W', B]."""
    size = (x.shape[0], x.shape[1] - height + 1, x.shape[2] - width + 1, x.shape[3])
    return lax.map(lambda k: lax.dynamic_slice(x, (0, k // width, k % width, 0), size), jnp.arange(height * width))


def _add_shifts(shifts: Array) -> Array:
    """The transpose of `_shifts`: each window [C, H', W', B] of [h, w, ...] is added where it came from."""
    height, width, channels, out_height, out_width, batch = shifts.shape
    x = jnp.zeros((channels, out_height + height - 1, out_width + width - 1, batch), shifts.dtype)
    for i in range(height):
        for j in range(width):
            x = x.at[:, i : i + out_height, j : j + out_width].add(shifts[i, j])
    return x


def bias_relu(x: Array, bias: Array) -> Array:
    """relu(x + bias) for x [C, H, W, B]."""
    return jax.nn.relu(x + bias[:, None, None, None])


def bias_relu_pool(x: Array, bias: Array) -> Array:
    """2x2 max pooling, stride 2, of relu(x + bias): [C, H, W, B] -> [C, H // 2, W // 2, B].

    The maximum comes first: it commutes with the bias and ReLU and leaves them a quarter of the work.
    The gradient goes to the first maximum of each window, row by row, as in PyTorch.
    """
    return bias_relu(_pool(x[:, : x.shape[1] // 2 * 2, : x.shape[2] // 2 * 2]), bias)


@jax.custom_vjp
def _pool(x: Array) -> Array:
    channels, height, width, batch = x.shape
    return x.reshape(channels, height // 2, 2, width // 2, 2, batch).max((2, 4))


def _pool_forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
    y = _pool(x)
    return y, (x, y)


def _pool_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array]:
    x, y = residuals
    first, second, third = x[:, ::2, ::2] == y, x[:, ::2, 1::2] == y, x[:, 1::2, ::2] == y
    top = jnp.stack([jnp.where(first, g, 0), jnp.where(second & ~first, g, 0)], 3)
    rest = ~(first | second)
    bottom = jnp.stack([jnp.where(third & rest, g, 0), jnp.where(~third & rest, g, 0)], 3)
    return (jnp.stack([top, bottom], 2).reshape(x.shape),)


_pool.defvjp(_pool_forward, _pool_backward)
