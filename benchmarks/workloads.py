"""FedAvg workloads of all simulators: definitions, arrays, and arithmetic of a round.

Imports only NumPy and the standard library, because the environments of all simulators import this file.

Every simulator reads the same arrays, starts from the same weights, trains the same cohorts in the same rounds and
visits each client's samples in stored order, without shuffling. Aggregation weights are proportional to the numbers of
samples; the server averages. All simulators must therefore end at the same test loss.

The models of W1 to W4 are those of fedrax's model zoo; W5 to W11 and G1 to G6 are plain Flax Linen modules. G1 to G6
are for GPUs. Each of them has a small form, ``G1-small`` and so on, which runs on any CPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

TARGET_ACCURACY = 0.69
"""Of the test images of G1, which pfl-research's benchmark reaches in 1,500 rounds."""
EVALUATE_EVERY = 10
"""Rounds between the evaluations of a whole benchmark."""
WARMUP_ROUNDS = 1  # the first round includes compilation, actors and lazy imports: it is reported separately


@dataclass(frozen=True)
class Workload:
    """A federated training problem that is small enough for any simulator and machine."""

    name: str
    model: str
    data: str
    clients: int
    cohort: int  # clients trained in each round
    epochs: int  # local epochs
    batch: int
    learning_rate: float
    rounds: int  # timed rounds, after the warm-up
    macs: tuple[int, ...]  # multiply-adds of one sample's forward pass, layer by layer
    network: str = ""  # the network's class in the runners; empty: the workload's name chooses it
    sizes: dict[str, Any] = field(default_factory=dict)  # arguments of the network
    samples: int = 0  # of a client, where all have the same number of them
    outputs: int = 0  # numbers that the layers write for one sample, where the least traffic is of interest
    frozen: str = ""  # pattern of the names of weights that are not trained
    frozen_macs: int = 0  # multiply-adds with frozen weights, which need no gradient of weights
    tolerance: float | None = None  # of the test loss, relative, where it is not that of the command

    @property
    def total_rounds(self) -> int:
        return WARMUP_ROUNDS + self.rounds

    @property
    def flop_per_sample(self) -> int:
        """Matrix products of one training step: forward, gradient of weights, gradient of inputs (2 per
        multiply-add), without the gradient with respect to the inputs, which is not computed.
        """
        return 2 * (3 * sum(self.macs) - self.macs[0] - self.frozen_macs)

    def is_trained(self, name: str) -> bool:
        """Whether the weight with PyTorch's name ``name`` is trained."""
        return not (self.frozen and re.fullmatch(self.frozen, name))


def convolution(size: int, inputs: int, outputs: int, kernel: int = 3) -> int:
    """Multiply-adds of a convolution with outputs of ``size`` times ``size``."""
    return size * size * outputs * inputs * kernel * kernel


def separable(size: int, inputs: int, outputs: int) -> int:
    """Multiply-adds of a depthwise 3x3 convolution and the 1x1 convolution that follows."""
    return convolution(size, 1, inputs) + convolution(size, inputs, outputs, 1)


def transformer(layers: int, width: int, tokens: int, symbols: int, rank: int = 0) -> dict[str, Any]:
    """Arithmetic of a causal transformer that predicts each next symbol, with adapters if ``rank`` is positive.

    With adapters all products of the blocks are with frozen weights, or of attention, which has none; the gradient by
    the embedded symbols, which needs the first projections, is then not computed.
    """
    projections, block = 3 * tokens * width**2, tokens * 9 * width**2  # the output, two layers of four times the width
    attention, adapters = 2 * tokens**2 * width, 2 * 2 * tokens * width * rank
    head = tokens * width * symbols
    frozen = layers * (projections + block) if rank else 0
    first = (projections,) if rank else (0, projections)  # without adapters the embedding, which takes no product
    rest = layers * (block + attention + adapters) + (layers - 1) * projections
    written = tokens * width * (1 + layers * 10) + tokens * symbols  # three projections, mixture, output, five widths
    return {"macs": (*first, rest, head), "frozen_macs": frozen, "outputs": written}


def recurrent(hidden: int, embedding: int, steps: int, symbols: int) -> dict[str, Any]:
    """Arithmetic of two LSTM layers over embedded symbols; the last hidden state predicts the next symbol."""
    layer = lambda inputs: steps * 4 * hidden * (inputs + hidden)  # noqa: E731
    written = steps * (embedding + 2 * 6 * hidden) + symbols  # four gates, cell and hidden state
    return {"macs": (0, layer(embedding), layer(hidden), hidden * symbols), "outputs": written}


def residual(width: int, side: int, classes: int) -> dict[str, Any]:
    """Arithmetic of ResNet-18 for small images: four stages of two blocks, each but the first of half the side."""
    macs, outputs = [convolution(side, 3, width)], side * side * width
    for stage in range(4):
        inputs, outs, size = width << max(0, stage - 1), width << stage, side >> stage
        first = convolution(size, inputs, outs) + (convolution(size, inputs, outs, 1) if stage else 0)
        macs.append(first + 3 * convolution(size, outs, outs))
        outputs += (5 if stage else 4) * size * size * outs
    return {"macs": (*macs, (width << 3) * classes), "outputs": outputs + classes}


def two_convolutions(side: int, channels: int, widths: tuple[int, int], hidden: int, classes: int) -> dict[str, Any]:
    """Arithmetic of two 3x3 convolutions without padding, max pooling and two dense layers."""
    (a, b), first, second = widths, side - 2, side - 4
    macs = convolution(first, channels, a), convolution(second, a, b), (second // 2) ** 2 * b * hidden, hidden * classes
    return {"macs": macs, "outputs": first**2 * a + second**2 * b + hidden + classes}


def pooled_convolutions(side: int, widths: tuple[int, int], hidden: int, classes: int) -> dict[str, Any]:
    """Arithmetic of two padded 5x5 convolutions with max pooling after each, and two dense layers."""
    (a, b), half, quarter = widths, side // 2, side // 4
    macs = convolution(side, 1, a, 5), convolution(half, a, b, 5), quarter**2 * b * hidden, hidden * classes
    return {"macs": macs, "outputs": side**2 * a + half**2 * b + hidden + classes}


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1",
            model="2NN 784-200-200-10",
            data="MNIST, sorted by label, two shards of 30 a client",
            clients=1000,
            cohort=50,
            epochs=1,
            batch=12,
            learning_rate=0.05,
            rounds=20,
            macs=(784 * 200, 200 * 200, 200 * 10),
        ),
        Workload(
            name="W2",
            model="softmax regression 60-10",
            data="synthetic(1,1), 20 to 250 samples a client",
            clients=30,
            cohort=30,
            epochs=10,
            batch=10,
            learning_rate=0.01,
            rounds=50,  # fewer would end before the threads of the fastest simulator are warm
            macs=(60 * 10,),
        ),
        Workload(
            name="W3",
            model="conv5x5x32, conv5x5x64, 512, 128, 10",
            data="class templates and noise, 32x32x3",
            clients=100,
            cohort=10,
            epochs=1,
            batch=64,
            learning_rate=0.05,
            rounds=5,
            macs=(28 * 28 * 32 * 75, 10 * 10 * 64 * 800, 1600 * 512, 512 * 128, 128 * 10),
        ),
        Workload(
            name="W4",
            model="LSTM 50-128, 2",
            data="noise sequences of length 25",
            clients=50,
            cohort=10,
            epochs=1,
            batch=32,
            learning_rate=0.05,
            rounds=10,
            macs=(25 * 50 * 512, 25 * 128 * 512, 128 * 2),
        ),
        Workload(
            name="W5",
            model="CNN: conv3x3 of 32, 64, 128, group norm, max pooling; 10",
            data="class templates and noise, 32x32x3, 320 samples a client",
            clients=20,
            cohort=5,
            epochs=1,
            batch=32,
            learning_rate=0.01,  # with 0.05 rounding errors grow into losses 0.8% apart
            rounds=5,
            macs=(convolution(32, 3, 32), convolution(16, 32, 64), convolution(8, 64, 128), 128 * 10),
        ),
        Workload(
            name="W6",
            model="ResNet-20 with group norm",
            data="class templates and noise, 32x32x3, 64 samples a client",
            clients=20,
            cohort=5,
            epochs=1,
            batch=32,
            learning_rate=0.001,  # larger steps amplify rounding errors here too
            rounds=5,
            macs=(
                convolution(32, 3, 16),
                6 * convolution(32, 16, 16),
                convolution(16, 16, 32) + convolution(16, 16, 32, 1) + 5 * convolution(16, 32, 32),
                convolution(8, 32, 64) + convolution(8, 32, 64, 1) + 5 * convolution(8, 64, 64),
                64 * 10,
            ),
        ),
        Workload(
            name="W7",
            model="embedding 90-128, GRU 128-128, 90",
            data="next symbol of Markov chains, sequences of length 80, 64 a client",
            clients=40,
            cohort=8,
            epochs=1,
            batch=32,
            learning_rate=0.5,
            rounds=5,
            macs=(0, 80 * 128 * 384, 80 * 128 * 384, 128 * 90),  # the embedding has no matrix product
        ),
        Workload(
            name="W8",
            model="vision transformer: 64 patches, 4 layers of 128, 4 heads; 10",
            data="class templates and noise, 32x32x3, 64 samples a client",
            clients=20,
            cohort=5,
            epochs=1,
            batch=32,
            learning_rate=0.05,
            rounds=5,
            macs=(64 * 48 * 128, *4 * (64 * 4 * 128 * 128, 2 * 64 * 64 * 128, 64 * 2 * 128 * 256), 128 * 10),
        ),
        Workload(
            name="W9",
            model="depthwise-separable: conv3x3x32, blocks of 64, 128, 128, 256, 256, group norm; 10",
            data="class templates and noise, 32x32x3, 64 samples a client",
            clients=20,
            cohort=5,
            epochs=1,
            batch=32,
            learning_rate=0.05,
            rounds=5,
            macs=(
                convolution(32, 3, 32),
                separable(32, 32, 64),
                separable(16, 64, 128),
                separable(16, 128, 128),
                separable(8, 128, 256),
                separable(8, 256, 256),
                256 * 10,
            ),
        ),
        Workload(
            name="W10",
            model="MLP 30-64-64-5",
            data="classes of a random network, 1 to 500 samples a client",
            clients=17,
            cohort=17,
            epochs=5,
            batch=32,
            learning_rate=0.05,
            rounds=50,  # as W2
            macs=(30 * 64, 64 * 64, 64 * 5),
        ),
        Workload(
            name="W11",
            model="CNN: conv3x3x32, conv3x3x64, max pooling, 128, 10",
            data="class templates and noise, 32x32x3, 50 samples a client",
            clients=1000,
            cohort=50,
            epochs=1,
            batch=10,
            learning_rate=0.01,
            rounds=20,
            macs=(convolution(30, 3, 32), convolution(28, 32, 64), 14 * 14 * 64 * 128, 128 * 10),
        ),
    )
}
ON_A_GPU = ("W11",)
"""pfl-research's CIFAR-10 benchmark without dropout: too much work for most CPUs."""
ON_A_CPU = tuple(name for name in WORKLOADS if name not in ON_A_GPU)

_TRANSFORMER = {"layers": 4, "width": 256, "heads": 4, "tokens": 128, "symbols": 90}
_ADAPTED = {"layers": 4, "width": 768, "heads": 12, "tokens": 128, "symbols": 90, "rank": 8}
_SMALL_TRANSFORMER = {"layers": 2, "width": 16, "heads": 2, "tokens": 8, "symbols": 90}
_NO_TRAINED_BIAS = r"lstm\.bias_hh.*"
"""PyTorch's second bias of a gate, which stays zero: plain SGD would move the sum of two biases twice as far."""
_NEITHER_ADAPTER_NOR_HEAD = r"(?!fc\.|.*_adapter\.).*"

GPU_WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="G1",
            model="CNN with dropout: conv3x3x32, conv3x3x64, max pooling, 128, 10",
            data="CIFAR-10, or class templates and noise of its shapes; 50 samples a client",
            clients=1000,
            cohort=50,
            epochs=1,
            batch=10,
            learning_rate=0.1,
            rounds=20,
            network="DroppedConvNet",
            sizes={"side": 32, "widths": (32, 64), "hidden": 128, "classes": 10},
            samples=50,
            tolerance=0.1,  # every simulator draws other dropout masks
            **two_convolutions(32, 3, (32, 64), 128, 10),
        ),
        Workload(
            name="G2",
            model="ResNet-18 with group norm, 100 classes",
            data="class templates and noise, 32x32x3, 100 samples a client",
            clients=20,
            cohort=10,
            epochs=1,
            batch=20,
            learning_rate=0.001,  # larger steps amplify rounding errors, as in W6
            rounds=5,
            network="ResNet18",
            sizes={"width": 64, "side": 32, "classes": 100},
            samples=100,
            **residual(64, 32, 100),
        ),
        Workload(
            name="G3",
            model="causal transformer: 4 layers of 256, 4 heads, 128 tokens",
            data="each next symbol of Markov chains, 64 samples a client",
            clients=40,
            cohort=20,
            epochs=1,
            batch=16,
            learning_rate=0.05,
            rounds=5,
            network="CausalTransformer",
            sizes=_TRANSFORMER,
            samples=64,
            **transformer(4, 256, 128, 90),
        ),
        Workload(
            name="G4",
            model="embedding 90-8, two LSTM layers of 256, 90",
            data="next symbol of Markov chains, sequences of length 80, 50 a client",
            clients=20,
            cohort=10,
            epochs=1,
            batch=10,
            learning_rate=0.5,
            rounds=5,
            network="CharacterLSTM",
            sizes={"hidden": 256, "embedding": 8, "tokens": 80, "symbols": 90},
            samples=50,
            frozen=_NO_TRAINED_BIAS,
            **recurrent(256, 8, 80, 90),
        ),
        Workload(
            name="G5",
            model="frozen causal transformer: 4 layers of 768, 12 heads, 128 tokens; adapters of rank 8 and the head",
            data="as G3",
            clients=20,
            cohort=10,
            epochs=1,
            batch=16,
            learning_rate=0.05,
            rounds=5,
            network="CausalTransformer",
            sizes=_ADAPTED,
            samples=64,
            frozen=_NEITHER_ADAPTER_NOR_HEAD,
            **transformer(4, 768, 128, 90, rank=8),
        ),
        Workload(
            name="G6",
            model="FEMNIST CNN: conv5x5x32, conv5x5x64, each with max pooling; 512, 62",
            data="class templates and noise, 28x28x1, 60 samples a client",
            clients=200,
            cohort=50,
            epochs=1,
            batch=20,
            learning_rate=0.01,
            rounds=20,
            network="PooledConvNet",
            sizes={"side": 28, "widths": (32, 64), "hidden": 512, "classes": 62},
            samples=60,
            **pooled_convolutions(28, (32, 64), 512, 62),
        ),
    )
}
_FEW = {"clients": 4, "cohort": 3, "batch": 2, "rounds": 2, "samples": 4}
_SMALL: dict[str, dict[str, Any]] = {
    "G1": {"sizes": {"side": 8, "widths": (4, 6), "hidden": 8, "classes": 10}, "tolerance": 0.5}
    | two_convolutions(8, 3, (4, 6), 8, 10),
    "G2": {"sizes": {"width": 8, "side": 8, "classes": 10}} | residual(8, 8, 10),
    "G3": {"sizes": _SMALL_TRANSFORMER} | transformer(2, 16, 8, 90),
    "G4": {"sizes": {"hidden": 16, "embedding": 8, "tokens": 6, "symbols": 90}} | recurrent(16, 8, 6, 90),
    "G5": {"sizes": _SMALL_TRANSFORMER | {"rank": 2}} | transformer(2, 16, 8, 90, rank=2),
    "G6": {"sizes": {"side": 8, "widths": (4, 6), "hidden": 8, "classes": 62}} | pooled_convolutions(8, (4, 6), 8, 62),
}
SMALL_WORKLOADS = {
    f"{name}-small": replace(GPU_WORKLOADS[name], **{"name": f"{name}-small", **_FEW, **sizes})
    for name, sizes in _SMALL.items()
}
"""The networks of G1 to G6 with few and narrow layers, to try the benchmark without a GPU."""
WORKLOADS |= GPU_WORKLOADS | SMALL_WORKLOADS


class Arrays:
    """A workload's arrays: the samples of all clients in order; client ``k`` has rows ``offsets[k]:offsets[k+1]``.

    ``x``: float32, one row a sample (images: [channels, height, width], or channels last on request; W7: int32
    symbols);
    ``y``: int64 labels; ``cohorts``: int64 [total rounds, cohort], the clients of each round; ``initial``:
    the initial weights by PyTorch's names and in PyTorch's layout; ``source``: the origin of the samples.
    """

    def __init__(self, directory: Path | str, channels_last: bool = False) -> None:
        directory = Path(directory)
        images = "_channels_last" if channels_last and (directory / "x_channels_last.npy").exists() else ""
        self.x, self.x_test = (
            read_array(directory / f"x{images}.npy"),
            read_array(directory / f"x_test{images}.npy"),
        )
        self.y, self.y_test = read_array(directory / "y.npy"), read_array(directory / "y_test.npy")
        self.offsets, self.cohorts = (
            read_array(directory / "offsets.npy"),
            read_array(directory / "cohorts.npy"),
        )
        self.initial = {path.stem: read_array(path) for path in sorted(directory.glob("initial/*.npy"))}
        self.source = (directory / "source.txt").read_text()

    def size(self, client: int) -> int:
        return int(self.offsets[client + 1] - self.offsets[client])

    def rows(self, client: int) -> slice:
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))


def read_array(path: Path) -> np.ndarray:
    """An array from a ``.npy`` file in memory aligned to 64 bytes, which frameworks can use without a copy."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        size = int(np.prod(shape)) * dtype.itemsize
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
        data = memory[start : start + size]
        if file.readinto(data.data) != size:
            raise ValueError(f"{path} ends early")
    return data.view(dtype).reshape(shape)


def flop_per_round(workload: Workload, offsets: np.ndarray, cohorts: np.ndarray) -> float:
    """Mean floating-point operations of a round, matrix products only."""
    samples = np.diff(offsets)[cohorts].sum(axis=1).mean()
    return workload.flop_per_sample * float(samples) * workload.epochs


def bytes_per_round(workload: Workload, arrays: Arrays, activation_bytes: int = 4) -> float:
    """The least traffic with a device's memory in a round, if every local step reads what the previous one has written.

    In each step a client's trained weights are read in the forward and in the backward pass, and read and written by
    the update; frozen weights are read twice, by all clients together. What the layers write for a sample is written
    once and read once, and so is its gradient. Weights and their gradients have 32 bits.
    """
    steps = steps_per_round(workload, arrays.offsets, arrays.cohorts)
    samples = np.diff(arrays.offsets)[arrays.cohorts].sum(axis=1).mean() * workload.epochs
    sizes = {True: 0, False: 0}
    for name, value in arrays.initial.items():
        sizes[workload.is_trained(name)] += value.nbytes
    weights = 4 * sizes[True] * steps + 2 * sizes[False] * steps / workload.cohort
    return weights + 4 * activation_bytes * workload.outputs * float(samples)


def steps_per_round(workload: Workload, offsets: np.ndarray, cohorts: np.ndarray) -> float:
    """Mean number of SGD steps of a round, over the whole cohort."""
    batches = -(-np.diff(offsets) // workload.batch)
    return float(batches[cohorts].sum(axis=1).mean()) * workload.epochs
