"""The four FedAvg workloads every simulator runs: definitions, arrays, and arithmetic per round.

numpy and the standard library only, because every simulator's own environment imports this file.

Every simulator gets the same arrays, starts from the same weights, trains the same cohort in the same round
and walks each client's samples in stored order, without shuffling. Clients are weighted by their number of
samples; the server averages. All of them must therefore end at the same test loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

WARMUP_ROUNDS = 1  # the first round pays for compilation, actors, lazy imports: it is reported apart


@dataclass(frozen=True)
class Workload:
    """One federated training problem, small enough for any simulator and any machine."""

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
        multiply-add), without the gradient of the first layer's inputs, which nobody needs."""
        return 2 * (3 * sum(self.macs) - self.macs[0])


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
            rounds=50,  # fewer would be over before the fastest simulator's threads are warm
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
    )
}


class Arrays:
    """A workload's arrays: all clients' samples back to back; client ``k`` owns rows
    ``offsets[k]:offsets[k+1]``.

    ``x``: float32, one row a sample (W3: [channels, height, width], or channels last where asked for);
    ``y``: int64 labels; ``cohorts``: int64 [total rounds, cohort], the clients of each round; ``initial``:
    the starting weights by PyTorch's names and in PyTorch's layout; ``source``: where the samples come
    from.
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
    """An array from a ``.npy`` file, read once, straight into memory at a multiple of 64 bytes: frameworks
    that ask for such alignment then need no copy of their own.
    """
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
