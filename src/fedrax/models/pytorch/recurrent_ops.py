"""PyTorch's recurrent layers: LSTM, GRU and plain ones, of several layers and both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax.errors import FedraxError
from fedrax.models.pytorch.layer_ops import dropout
from fedrax.models.pytorch.operators import Context, linear, operator

Cell = Callable[[Array, Any, Array, Array | None], Any]
"""(what the input adds [B, gates * hidden], state, hidden weight, hidden bias) -> state; states are tuples of h, ..."""


def _lstm_step(inputs: Array, state: Any, weight: Array, bias: Array | None) -> Any:
    h, c = state
    i, f, g, o = jnp.split(inputs + linear(h, weight, bias), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_step(inputs: Array, state: Any, weight: Array, bias: Array | None) -> Any:
    (h,) = state
    reset, update, new = jnp.split(inputs, 3, axis=-1)
    hidden_reset, hidden_update, hidden_new = jnp.split(linear(h, weight, bias), 3, axis=-1)
    z = jax.nn.sigmoid(update + hidden_update)
    n = jnp.tanh(new + jax.nn.sigmoid(reset + hidden_reset) * hidden_new)
    return ((1 - z) * n + z * h,)


def _plain_step(activation: Callable[[Array], Array]) -> Cell:
    return lambda inputs, state, weight, bias: (activation(inputs + linear(state[0], weight, bias)),)


def _over_time(cell: Cell, x: Array, start: Any, weights: Sequence[Array], backwards: bool) -> tuple[Array, Any]:
    """One direction of one layer over x [T, B, F]: (outputs [T, B, hidden], the last state)."""
    input_weight, hidden_weight, *biases = weights
    input_bias, hidden_bias = biases or (None, None)

    def step(state: Any, inputs: Array) -> tuple[Any, Array]:
        state = cell(inputs, state, hidden_weight, hidden_bias)
        return state, state[0]

    last, outputs = lax.scan(step, start, linear(x, input_weight, input_bias), reverse=backwards)
    return outputs, last


def _recurrent(cell: Cell) -> Callable[..., Any]:
    def run(
        context: Context,
        x: Array,
        states: Sequence[Array],
        params: Any,
        has_biases: bool,
        num_layers: int,
        p: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Array, ...]:
        """(outputs, last states...), states [layers * directions, B, hidden]."""
        if not isinstance(params, Sequence):
            raise FedraxError("packed sequences are not supported: pad them and mask what does not count")
        each = 4 if has_biases else 2
        runs = num_layers * (2 if bidirectional else 1)
        if len(params) != each * runs:
            raise FedraxError("LSTMs with projections (proj_size) are not supported")
        outputs = x.swapaxes(0, 1) if batch_first else x
        lasts = []
        for layer in range(num_layers):
            found = []
            for direction in range(2 if bidirectional else 1):
                k = layer * (2 if bidirectional else 1) + direction
                start = tuple(jnp.asarray(state[k], x.dtype) for state in states)
                made, last = _over_time(cell, outputs, start, params[each * k : each * (k + 1)], direction == 1)
                found.append(made)
                lasts.append(last)
            outputs = jnp.concatenate(found, axis=-1) if bidirectional else found[0]
            if layer < num_layers - 1:
                outputs = dropout(context, outputs, p, train)
        ends = tuple(jnp.stack(parts) for parts in zip(*lasts, strict=True))
        return (outputs.swapaxes(0, 1) if batch_first else outputs, *ends)

    return run


def _single(cell: Cell) -> Callable[..., Any]:
    """The same for layers of one state, which PyTorch gives by itself."""
    run = _recurrent(cell)

    def of_one(context: Context, x: Array, state: Array, *rest: Any) -> tuple[Array, ...]:
        return run(context, x, (state,), *rest)

    return of_one


operator("lstm.input")(_recurrent(_lstm_step))
operator("gru.input")(_single(_gru_step))
operator("rnn_tanh.input")(_single(_plain_step(jnp.tanh)))
operator("rnn_relu.input")(_single(_plain_step(jax.nn.relu)))


@operator("lstm_cell")
def _lstm_cell(x, state, input_weight, hidden_weight, input_bias=None, hidden_bias=None) -> Any:
    return _lstm_step(linear(x, input_weight, input_bias), tuple(state), hidden_weight, hidden_bias)


@operator("gru_cell")
def _gru_cell(x, h, input_weight, hidden_weight, input_bias=None, hidden_bias=None) -> Array:
    return _gru_step(linear(x, input_weight, input_bias), (h,), hidden_weight, hidden_bias)[0]


@operator("rnn_tanh_cell")
def _rnn_tanh_cell(x, h, input_weight, hidden_weight, input_bias=None, hidden_bias=None) -> Array:
    return jnp.tanh(linear(x, input_weight, input_bias) + linear(h, hidden_weight, hidden_bias))


@operator("rnn_relu_cell")
def _rnn_relu_cell(x, h, input_weight, hidden_weight, input_bias=None, hidden_bias=None) -> Array:
    return jax.nn.relu(linear(x, input_weight, input_bias) + linear(h, hidden_weight, hidden_bias))
