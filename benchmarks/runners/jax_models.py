"""Models of W1 to W4 and evaluation in plain JAX, for simulators without a model zoo; the other models are in Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.workloads import Arrays, Workload

Params = dict[str, Any]  # for Flax modules a tree


def parameters(workload: Workload, initial: dict[str, np.ndarray]) -> Params:
    """PyTorch's weights in JAX's layout: inputs before outputs, images with channels last."""
    if workload.name not in MODELS:
        from benchmarks.runners import linen_models  # imported only for these workloads, because it takes seconds

        return linen_models.parameters(initial)
    params = {}
    for name, value in initial.items():
        if value.ndim == 4:
            value = value.transpose(2, 3, 1, 0)
        elif name == "fc1.weight" and workload.name == "W3":
            # The weights expect a flattened [64, 5, 5] image, the input here is a flattened [5, 5, 64] one.
            value = value.reshape(512, 64, 5, 5).transpose(2, 3, 1, 0).reshape(1600, 512)
        elif value.ndim == 2:
            value = value.T
        params[name] = jnp.asarray(value)
    return params


def dense(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"] + params[f"{name}.bias"]


def mlp(params: Params, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(dense(params, "fc1", x))
    x = jax.nn.relu(dense(params, "fc2", x))
    return dense(params, "fc3", x)


def softmax_regression(params: Params, x: jax.Array) -> jax.Array:
    return dense(params, "fc", x)


def convolutional(params: Params, x: jax.Array) -> jax.Array:
    for name in ("c1", "c2"):
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, params[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=layout)
        x = jax.nn.relu(x + params[f"{name}.bias"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return mlp(params, x.reshape(x.shape[0], -1))


def lstm(params: Params, x: jax.Array) -> jax.Array:
    recurrent = params["lstm.weight_hh_l0"]
    bias = params["lstm.bias_ih_l0"] + params["lstm.bias_hh_l0"]
    from_inputs = (x @ params["lstm.weight_ih_l0"] + bias).swapaxes(0, 1)

    def step(carry, from_input):
        hidden, cell = carry
        i, f, g, o = jnp.split(from_input + hidden @ recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(cell), cell), None

    zeros = jnp.zeros((x.shape[0], recurrent.shape[0]), x.dtype)
    (hidden, _), _ = lax.scan(step, (zeros, zeros), from_inputs)
    return dense(params, "fc", hidden)


MODELS: dict[str, Callable[[Params, jax.Array], jax.Array]] = {
    "W1": mlp,
    "W2": softmax_regression,
    "W3": convolutional,
    "W4": lstm,
}


def model_of(workload: Workload) -> Callable[[Params, jax.Array], jax.Array]:
    """The workload's model: (parameters, batch) -> outputs."""
    if workload.name in MODELS:
        return MODELS[workload.name]
    from benchmarks.runners.linen_models import module_of

    return lambda params, x: module_of(workload).apply({"params": params}, x)  # type: ignore


def cross_entropy(logits: jax.Array, y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """The mean over the batch, or over its samples whose ``mask`` is true; labels [B], or [B, T] by position."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1)[..., 0], where=mask)


def evaluate(workload: Workload, params: Params, arrays: Arrays) -> tuple[float, float]:
    """Mean loss and accuracy on the test samples; images with channels last."""
    predict = jax.jit(model_of(workload))
    x, y = arrays.x_test, arrays.y_test
    loss = correct = 0.0
    for start in range(0, len(y), 500):
        labels = y[start : start + 500]
        logits = np.asarray(predict(params, x[start : start + 500]), np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        log_sum = np.log(np.exp(shifted).sum(axis=-1))
        loss += float((log_sum - np.take_along_axis(shifted, labels[..., None], -1)[..., 0]).sum())
        correct += float((logits.argmax(axis=-1) == labels).sum())
    return loss / y.size, correct / y.size
