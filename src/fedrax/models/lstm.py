"""An LSTM layer whose weight gradient is one matrix product after the backward scan, not one in each time step."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.models.layers import uniform_fan_in


def init_lstm(key: Array, num_inputs: int, hidden: int) -> dict[str, Array]:
    """Parameters as PyTorch's, with two biases; the order of gates is input, forget, cell, output."""
    shapes = {
        "input_weight": (num_inputs, 4 * hidden),
        "hidden_weight": (hidden, 4 * hidden),
        "input_bias": (4 * hidden,),
        "hidden_bias": (4 * hidden,),
    }
    keys = jax.random.split(key, len(shapes))
    return {name: uniform_fan_in(k, shape, hidden) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def lstm(layer: dict[str, Array], x: Array) -> Array:
    """The last hidden state [B, hidden] of an LSTM over x [B, T, F] with initial state zero."""
    bias = layer["input_bias"] + layer["hidden_bias"]
    return _recurrence(x.swapaxes(0, 1), layer["input_weight"], layer["hidden_weight"], bias)


@jax.custom_vjp
def _recurrence(x: Array, input_weight: Array, hidden_weight: Array, bias: Array) -> Array:
    """The last hidden state, from x [T, B, F], input_weight [F, 4 hidden], hidden_weight [hidden, 4 hidden], bias."""
    return _forward(x, input_weight, hidden_weight, bias)[0]


def _forward(x: Array, input_weight: Array, hidden_weight: Array, bias: Array):
    """Forward pass: the last hidden state and the residuals of the backward pass."""

    def step(state, inputs_t):
        h, c = state
        i, f, g, o = jnp.split(inputs_t + h @ hidden_weight, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        new_c = f * c + i * g
        tanh_c = jnp.tanh(new_c)
        return (o * tanh_c, new_c), (h, c, i, f, g, o, tanh_c)

    inputs = x @ input_weight + bias
    zeros = jnp.zeros_like(inputs[0, :, : len(hidden_weight)])
    (h, _), saved = lax.scan(step, (zeros, zeros), inputs)
    return h, (x, input_weight, hidden_weight, bias, saved)


def _backward(residuals, h_grad: Array) -> tuple[Array, ...]:
    """Gradients with respect to x, the weights and the bias."""
    x, input_weight, hidden_weight, bias, saved = residuals
    # Transposed once: without the barrier, XLA:CPU moves the transposition into the loop.
    transposed = lax.optimization_barrier(hidden_weight.T)

    def step(grads, saved_t):
        dh, dc = grads
        _, c, i, f, g, o, tanh_c = saved_t
        dc = dc + dh * o * (1 - tanh_c * tanh_c)
        di, df, dg, do = dc * g, dc * c, dc * i, dh * tanh_c
        gates = [di * i * (1 - i), df * f * (1 - f), dg * (1 - g * g), do * o * (1 - o)]
        gates = jnp.concatenate(gates, axis=-1)
        return (gates @ transposed, dc * f), gates

    _, gates = lax.scan(step, (h_grad, jnp.zeros_like(h_grad)), saved, reverse=True)
    inputs = jnp.concatenate([x, saved[0]], axis=-1).reshape(-1, len(input_weight) + len(hidden_weight))
    flat = gates.reshape(-1, gates.shape[-1])
    weights = lax.optimization_barrier(inputs.T) @ flat
    grads = gates @ input_weight.T, weights[: len(input_weight)], weights[len(input_weight) :], flat.sum(0)
    return tuple(grad.astype(a.dtype) for grad, a in zip(grads, (x, input_weight, hidden_weight, bias), strict=True))


_recurrence.defvjp(_forward, _backward)
