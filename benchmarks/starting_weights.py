"""Initial weights of the workloads, with PyTorch's names and layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from benchmarks.workloads import Workload

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


def residual_blocks(rng: np.random.Generator, widths: Sequence[int]) -> Weights:
    """A stem, and residual blocks of these widths."""
    weights = without_bias(rng, "stem", (widths[0], 3, 3, 3)) | norm("stem_norm", widths[0])
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        block = f"blocks.{i}"
        weights |= without_bias(rng, f"{block}.conv1", (outputs, inputs, 3, 3)) | norm(f"{block}.norm1", outputs)
        weights |= without_bias(rng, f"{block}.conv2", (outputs, outputs, 3, 3)) | norm(f"{block}.norm2", outputs)
        if inputs != outputs:
            weights |= without_bias(rng, f"{block}.shortcut", (outputs, inputs, 1, 1))
            weights |= norm(f"{block}.shortcut_norm", outputs)
    return weights


def residual_weights(rng: np.random.Generator) -> Weights:
    return residual_blocks(rng, (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)) | layers(rng, {"fc": (10, 64)})


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


def dropped_convolutional_weights(
    rng: np.random.Generator, side: int, widths: tuple[int, int], hidden: int, classes: int
) -> Weights:
    (a, b), flat = widths, (side // 2 - 2) ** 2 * widths[1]
    return layers(
        rng, {"convs.0": (a, 3, 3, 3), "convs.1": (b, a, 3, 3), "fc1": (hidden, flat), "fc2": (classes, hidden)}
    )


def pooled_convolutional_weights(
    rng: np.random.Generator, side: int, widths: tuple[int, int], hidden: int, classes: int
) -> Weights:
    (a, b), flat = widths, (side // 4) ** 2 * widths[1]
    return layers(
        rng, {"convs.0": (a, 1, 5, 5), "convs.1": (b, a, 5, 5), "fc1": (hidden, flat), "fc2": (classes, hidden)}
    )


def resnet18_weights(rng: np.random.Generator, width: int, side: int, classes: int) -> Weights:
    widths = [width, *(width << stage for stage in range(4) for _ in range(2))]
    return residual_blocks(rng, widths) | layers(rng, {"fc": (classes, width << 3)})


def causal_weights(
    rng: np.random.Generator, width: int, tokens: int, symbols: int, rank: int = 0, **of: int
) -> Weights:
    weights = {"embedding.weight": rng.standard_normal((symbols, width)).astype(np.float32)}
    weights["positions"] = (0.02 * rng.standard_normal((tokens, width))).astype(np.float32)
    for i in range(of["layers"]):
        block = f"blocks.{i}"
        shapes = {f"{block}.{name}": (width, width) for name in ("query", "key", "value", "out")}
        shapes |= {f"{block}.linear1": (4 * width, width), f"{block}.linear2": (width, 4 * width)}
        weights |= layers(rng, shapes) | norm(f"{block}.norm1", width) | norm(f"{block}.norm2", width)
        for name in ("query", "value") if rank else ():
            weights[f"{block}.{name}_adapter.a"] = uniform(rng, (rank, width), width)
            weights[f"{block}.{name}_adapter.b"] = np.zeros((width, rank), np.float32)
    return weights | norm("norm", width) | layers(rng, {"fc": (symbols, width)})


def character_lstm_weights(rng: np.random.Generator, hidden: int, embedding: int, tokens: int, symbols: int) -> Weights:
    weights = {"embedding.weight": rng.standard_normal((symbols, embedding)).astype(np.float32)}
    for i, inputs in enumerate((embedding, hidden)):
        weights[f"lstm.weight_ih_l{i}"] = uniform(rng, (4 * hidden, inputs), hidden)
        weights[f"lstm.weight_hh_l{i}"] = uniform(rng, (4 * hidden, hidden), hidden)
        weights[f"lstm.bias_ih_l{i}"] = uniform(rng, (4 * hidden,), hidden)
        weights[f"lstm.bias_hh_l{i}"] = np.zeros(4 * hidden, np.float32)
    return weights | layers(rng, {"fc": (symbols, hidden)})


NETWORKS: dict[str, Callable[..., Weights]] = {
    "DroppedConvNet": dropped_convolutional_weights,
    "PooledConvNet": pooled_convolutional_weights,
    "ResNet18": resnet18_weights,
    "CausalTransformer": causal_weights,
    "CharacterLSTM": character_lstm_weights,
}
"""Of the networks with sizes that the workload sets."""


def starting_weights(workload: Workload, rng: np.random.Generator) -> Weights:
    """The workload's starting weights."""
    if workload.network:
        return NETWORKS[workload.network](rng, **workload.sizes)
    return WEIGHTS[workload.name](rng)


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
