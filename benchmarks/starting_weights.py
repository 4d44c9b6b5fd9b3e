"""Initial weights of the workloads, with PyTorch's names and layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

Weights = dict[str, np.ndarray]


def uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> np.ndarray:
    bound = 1.0 / np.sqrt(fan_in)
    return rng.uniform(-bound, bound, shape).astype(np.float32)


def layers(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> Weights:
    """A weight of the given shape (outputs first) and a bias for each layer."""
    weights = {}
    for name, shape in shapes.items():
        fan_in = int(np.prod(shape[1:]))
        weights[f"{name}.weight"] = uniform(rng, shape, fan_in)
        weights[f"{name}.bias"] = uniform(rng, shape[:1], fan_in)
    return weights


def mlp_weights(rng: np.random.Generator, widths: tuple[int, ...] = (784, 200, 200, 10)) -> Weights:
    return layers(rng, {f"fc{i}": (widths[i], widths[i - 1]) for i in range(1, len(widths))})


def softmax_weights(rng: np.random.Generator) -> Weights:
    return {"fc.weight": np.zeros((10, 60), np.float32), "fc.bias": np.zeros(10, np.float32)}


def convolutional_weights(rng: np.random.Generator) -> Weights:
    return layers(
        rng,
        {"c1": (32, 3, 5, 5), "c2": (64, 32, 5, 5), "fc1": (512, 1600), "fc2": (128, 512), "fc3": (10, 128)},
    )


def lstm_weights(rng: np.random.Generator) -> Weights:
    hidden, inputs = 128, 50
    shapes = {
        "lstm.weight_ih_l0": (4 * hidden, inputs),
        "lstm.weight_hh_l0": (4 * hidden, hidden),
        "lstm.bias_ih_l0": (4 * hidden,),
        "lstm.bias_hh_l0": (4 * hidden,),
    }
    recurrent = {name: uniform(rng, shape, hidden) for name, shape in shapes.items()}
    return recurrent | layers(rng, {"fc": (2, hidden)})


def norm(name: str, channels: int) -> Weights:
    return {f"{name}.weight": np.ones(channels, np.float32), f"{name}.bias": np.zeros(channels, np.float32)}


def without_bias(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Weights:
    return {f"{name}.weight": uniform(rng, shape, int(np.prod(shape[1:])))}


def normed_convolutional_weights(rng: np.random.Generator) -> Weights:
    weights = {}
    for i, (inputs, outputs) in enumerate(pairwise((3, 32, 64, 128))):
        weights |= layers(rng, {f"convs.{i}": (outputs, inputs, 3, 3)}) | norm(f"norms.{i}", outputs)
    return weights | layers(rng, {"fc": (10, 128)})


def residual_weights(rng: np.random.Generator) -> Weights:
    weights = without_bias(rng, "stem", (16, 3, 3, 3)) | norm("stem_norm", 16)
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        block = f"blocks.{i}"
        weights |= without_bias(rng, f"{block}.conv1", (outputs, inputs, 3, 3)) | norm(f"{block}.norm1", outputs)
        weights |= without_bias(rng, f"{block}.conv2", (outputs, outputs, 3, 3)) | norm(f"{block}.norm2", outputs)
        if inputs != outputs:
            weights |= without_bias(rng, f"{block}.shortcut", (outputs, inputs, 1, 1))
            weights |= norm(f"{block}.shortcut_norm", outputs)
    return weights | layers(rng, {"fc": (10, 64)})


def gru_weights(rng: np.random.Generator) -> Weights:
    hidden = 128
    shapes = {"weight_ih": (3 * hidden, hidden), "weight_hh": (3 * hidden, hidden)}
    shapes |= {"bias_ih": (3 * hidden,), "bias_hn": (hidden,)}
    embedding = {"embedding.weight": rng.standard_normal((90, hidden)).astype(np.float32)}
    recurrent = {f"gru.{name}": uniform(rng, shape, hidden) for name, shape in shapes.items()}
    return embedding | recurrent | layers(rng, {"fc": (90, hidden)})


def transformer_weights(rng: np.random.Generator) -> Weights:
    width = 128
    weights = layers(rng, {"patches": (width, 3, 4, 4)})
    weights["positions"] = (0.02 * rng.standard_normal((64, width))).astype(np.float32)
    for i in range(4):
        block = f"blocks.{i}"
        weights |= norm(f"{block}.norm1", width) | norm(f"{block}.norm2", width)
        weights[f"{block}.self_attn.in_proj_weight"] = uniform(rng, (3 * width, width), width)
        weights[f"{block}.self_attn.in_proj_bias"] = np.zeros(3 * width, np.float32)
        weights |= layers(
            rng,
            {
                f"{block}.self_attn.out_proj": (width, width),
                f"{block}.linear1": (2 * width, width),
                f"{block}.linear2": (width, 2 * width),
            },
        )
    return weights | norm("norm", width) | layers(rng, {"fc": (10, width)})


def separable_weights(rng: np.random.Generator) -> Weights:
    weights = without_bias(rng, "stem", (32, 3, 3, 3)) | norm("stem_norm", 32)
    for i, (inputs, outputs) in enumerate(pairwise((32, 64, 128, 128, 256, 256))):
        block = f"blocks.{i}"
        weights |= without_bias(rng, f"{block}.depthwise", (inputs, 1, 3, 3)) | norm(f"{block}.norm1", inputs)
        weights |= without_bias(rng, f"{block}.pointwise", (outputs, inputs, 1, 1)) | norm(f"{block}.norm2", outputs)
    return weights | layers(rng, {"fc": (10, 256)})


def small_convolutional_weights(rng: np.random.Generator) -> Weights:
    return layers(
        rng, {"convs.0": (32, 3, 3, 3), "convs.1": (64, 32, 3, 3), "fc1": (128, 14 * 14 * 64), "fc2": (10, 128)}
    )


WEIGHTS: dict[str, Callable[[np.random.Generator], Weights]] = {
    "W1": mlp_weights,
    "W2": softmax_weights,
    "W3": convolutional_weights,
    "W4": lstm_weights,
    "W5": normed_convolutional_weights,
    "W6": residual_weights,
    "W7": gru_weights,
    "W8": transformer_weights,
    "W9": separable_weights,
    "W10": partial(mlp_weights, widths=(30, 64, 64, 5)),
    "W11": small_convolutional_weights,
}
