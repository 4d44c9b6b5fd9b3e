"""PyTorch's recurrent operators: LSTM, GRU and plain RNN, with several layers and two directions."""

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
"""(projected input [B, gates * hidden], state, hidden weight, hidden bias) -> state, a tuple (h, ...)."""


def _lstm_step(inputs: Array, state: Any, weight: Array, bias: Array | None) -> Any:
    """One step of an LSTM; the state is (h, c)."""
    h, c = state
    i, f, g, o = jnp.split(inputs + linear(h, weight, bias), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def _gru_step(inputs: Array, state: Any, weight: Array, bias: Array | None) -> Any:
    """One step of a GRU; the state is (h,)."""
    (h,) = state
    reset, update, new = jnp.split(inputs, 3, axis=-1)
    hidden_reset, hidden_update, hidden_new = jnp.split(linear(h, weight, bias), 3, axis=-1)
    z = jax.nn.sigmoid(update + hidden_update)
    n = jnp.tanh(new + jax.nn.sigmoid(reset + hidden_reset) * hidden_new)
    return ((1 - z) * n + z * h,)


def _plain_step(activation: Callable[[Array], Array]) -> Cell:
    """One step of a plain RNN; the state is (h,)."""
    return lambda inputs, state, weight, bias: (activation(inputs + linear(state[0], weight, bias)),)


def _over_time(cell: Cell, x: Array, start: Any, weights: Sequence[Array], backwards: bool) -> tuple[Array, Any]:
    """(outputs [T, B, hidden], last state) of one direction of one layer over x [T, B, F]."""
    input_weight, hidden_weight, *biases = weights
    input_bias, hidden_bias = biases or (None, None)

    def step(state: Any, inputs: Array) -> tuple[Any, Array]:
        state = cell(inputs, state, hidden_weight, hidden_bias)
        return state, state[0]

    last, outputs = lax.scan(step, start, linear(x, input_weight, input_bias), reverse=backwards)
    return outputs, last


def _recurrent(cell: Cell) -> Callable[..., Any]:
    """The operator of a recurrent network with the given cell."""

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
        """(outputs, last states...); states are [layers * directions, B, hidden]."""
        if not isinstance(params, Sequence):
            raise FedraxError("packed sequences are not supported: pad them and mask the padding")
        num_params = 4 if has_biases else 2
        num_runs = num_layers * (2 if bidirectional else 1)
        if len(params) != num_params * num_runs:
            raise FedraxError("LSTMs with projections are not supported: unset proj_size")
        outputs = x.swapaxes(0, 1) if batch_first else x
        lasts = []
        for layer in range(num_layers):
            by_direction = []
            for direction in range(2 if bidirectional else 1):
                k = layer * (2 if bidirectional else 1) + direction
                start = tuple(jnp.asarray(state[k], x.dtype) for state in states)
                weights = params[num_params * k : num_params * (k + 1)]
                hidden_states, last = _over_time(cell, outputs, start, weights, direction == 1)
                by_direction.append(hidden_states)
                lasts.append(last)
            outputs = jnp.concatenate(by_direction, axis=-1) if bidirectional else by_direction[0]
            if layer < num_layers - 1:
                outputs = dropout(context, outputs, p, train)
        last_states = tuple(jnp.stack(states) for states in zip(*lasts, strict=True))
        return (outputs.swapaxes(0, 1) if batch_first else outputs, *last_states)

    return run


def _recurrent_with_one_state(cell: Cell) -> Callable[..., Any]:
    """As `_recurrent`, for cells whose state is h only: PyTorch passes it without a tuple."""
    run = _recurrent(cell)

    def run_with_state(context: Context, x: Array, state: Array, *rest: Any) -> tuple[Array, ...]:
        return run(context, x, (state,), *rest)

    return run_with_state


operator("lstm.input")(_recurrent(_lstm_step))
operator("gru.input")(_recurrent_with_one_state(_gru_step))
operator("rnn_tanh.input")(_recurrent_with_one_state(_plain_step(jnp.tanh)))
operator("rnn_relu.input")(_recurrent_with_one_state(_plain_step(jax.nn.relu)))


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
