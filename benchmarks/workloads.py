"""FedAvg workloads of all simulators: definitions, arrays, and arithmetic of a round.

Imports only NumPy and the standard library, because the environments of all simulators import this file.

Every simulator reads the same arrays, starts from the same weights, trains the same cohorts in the same rounds and
visits each client's samples in stored order, without shuffling. Aggregation weights are proportional to the numbers of
samples; the server averages. All simulators must therefore end at the same test loss.

The models of W1 to W4 are those of fedrax's model zoo; W5 to W11 are plain Flax Linen modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

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

    @property
    def total_rounds(self) -> int:
        return WARMUP_ROUNDS + self.rounds

    @property
    def flop_per_sample(self) -> int:
        """Matrix products of one training step: forward, gradient of weights, gradient of inputs (2 per
        multiply-add), without the gradient with respect to the inputs, which is not computed.
        """
        return 2 * (3 * sum(self.macs) - self.macs[0])


def convolution(size: int, inputs: int, outputs: int, kernel: int = 3) -> int:
    """Multiply-adds of a convolution with outputs of ``size`` times ``size``."""
    return size * size * outputs * inputs * kernel * kernel


def separable(size: int, inputs: int, outputs: int) -> int:
    """Multiply-adds of a depthwise 3x3 convolution and the 1x1 convolution that follows."""
    return convolution(size, 1, inputs) + convolution(size, inputs, outputs, 1)


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


def steps_per_round(workload: Workload, offsets: np.ndarray, cohorts: np.ndarray) -> float:
    """Mean number of SGD steps of a round, over the whole cohort."""
    batches = -(-np.diff(offsets) // workload.batch)
    return float(batches[cohorts].sum(axis=1).mean()) * workload.epochs
