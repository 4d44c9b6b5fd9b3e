"""The benchmarks' problems in fedrax: federations, models, initial parameters."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.runners import jax_models
from benchmarks.workloads import Arrays, Workload
from fedrax.data import Federation
from fedrax.data.federation import aligned_array
from fedrax.models import LSTM, LeNet, Logistic, Model, TwoNN, freeze, from_linen
from fedrax.tree import leaf_names

# PyTorch's names of the layers -> the zoo's
LAYERS = {
    "W1": {"fc1": "dense1", "fc2": "dense2", "fc3": "output"},
    "W2": {"fc": "output"},
    "W3": {"c1": "conv1", "c2": "conv2", "fc1": "dense1", "fc2": "dense2", "fc3": "output"},
    "W4": {"fc": "output"},
}
LSTM_ARRAYS = {
    "weight_ih_l0": "input_weight",
    "weight_hh_l0": "hidden_weight",
    "bias_ih_l0": "input_bias",
    "bias_hh_l0": "hidden_bias",
}


def plain_problem(workload: Workload, initial: dict[str, np.ndarray]) -> tuple[Model, dict[str, Any]]:
    """The network of W1 to W4 as plain functions, without the model zoo, and its initial parameters."""
    params = jax_models.parameters(workload, initial)
    apply = jax_models.MODELS[workload.name]
    return Model(lambda key: params, lambda params, x, key=None: apply(params, x), name="plain"), params


def problem(workload: Workload, initial: dict[str, np.ndarray]) -> tuple[Model, dict[str, Any]]:
    """The workload's model, from the model zoo or a Flax module, and its initial parameters, the trained ones."""
    model, params = model_of(workload), parameters_of(workload, initial)
    some = parameters_of(workload, {name: value for name, value in initial.items() if workload.is_trained(name)})
    trained = set(leaf_names(some))
    if trained == set(leaf_names(params)):
        return model, params
    model = freeze(model, params, trained.__contains__)
    return model, model.init(jax.random.key(0))


def model_of(workload: Workload) -> Model:
    """The workload's model from fedrax's zoo, or its Flax module."""
    if workload.name not in LAYERS:
        from benchmarks.runners import linen_models  # takes seconds, so only for these workloads

        return from_linen(linen_models.module_of(workload), linen_models.sample_input(workload))
    return {
        "W1": TwoNN().build((784,), 10),
        "W2": Logistic().build((60,), 10),
        "W3": LeNet(channels=(32, 64), hidden=(512, 128)).build((32, 32, 3), 10),
        "W4": LSTM(hidden=128).build((25, 50), 2),
    }[workload.name]


def parameters_of(workload: Workload, initial: dict[str, np.ndarray]) -> dict[str, Any]:
    """PyTorch's weights as parameters of the zoo or of Flax.

    The zoo flattens channels first, as PyTorch does; only its output layers have the same order of axes.
    """
    if workload.name not in LAYERS:
        from benchmarks.runners import linen_models

        return linen_models.parameters(initial)
    params: dict[str, Any] = {}
    for name, value in initial.items():
        layer, array = name.split(".")
        if layer == "lstm":
            array = LSTM_ARRAYS[array]
        layer = LAYERS[workload.name].get(layer, layer)
        if layer != "output":
            value = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value.T
        params.setdefault(layer, {})[array] = np.ascontiguousarray(value)
    return params


def federation_of(arrays: Arrays) -> Federation:
    """The workload's arrays (images with channels last), in stored order."""
    return Federation.from_arrays(
        arrays.x,
        arrays.y,
        offsets=arrays.offsets,
        test=(arrays.x_test, arrays.y_test),
        shuffle=False,
    )


def random_images(clients: int, samples: int, classes: int) -> Federation:
    """Random bytes as 28x28 images, ``samples`` for each client.

    Only the cost matters, so a few thousand images are repeated; each copy has separate memory.
    """
    rng = np.random.default_rng(0)
    x = aligned_array(np.empty((clients * samples, 28, 28), np.uint8))
    some = rng.integers(0, 256, (min(len(x), 5000), 28, 28), np.uint8)
    for start in range(0, len(x), len(some)):
        x[start : start + len(some)] = some[: len(x) - start]
    y = rng.integers(0, classes, len(x), dtype=np.int32)
    offsets = np.arange(clients + 1) * samples
    test = x[:500], y[:500]
    return Federation.from_arrays(x, y, offsets=offsets, test=test, num_classes=classes, pixels=True, shuffle=False)
