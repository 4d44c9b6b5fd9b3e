"""Creates the workloads' arrays from a fixed seed, once, in a cache directory.

W1 uses MNIST from ``$FEDRAX_DATA/mnist`` (the four ``.gz`` files of its home page) or, without it, Gaussian classes of
the same shapes. G1 uses CIFAR-10 from ``$FEDRAX_DATA/cifar10`` or, without it, class templates. The folder's name and
its ``source.txt`` name the source. All other workloads are synthetic.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.starting_weights import starting_weights
from benchmarks.workloads import WORKLOADS, Workload

SEED = 20260601


class Samples(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def ensure_arrays(name: str, directory: Path) -> Path:
    """The folder of workload ``name``'s arrays under ``directory``, created on first use."""
    source = source_of(name)
    home = directory / f"{name}-{source}-{SEED}-{WORKLOADS[name].total_rounds}"
    if not home.exists():
        part = home.with_suffix(f".{os.getpid()}")
        (part / "initial").mkdir(parents=True)
        for array_name, array in make_arrays(WORKLOADS[name]).items():
            np.save(part / f"{array_name}.npy", array, allow_pickle=False)
        (part / "source.txt").write_text(source)
        os.replace(part, home)
    return home


def source_of(name: str) -> str:
    """Where the samples come from: ``synthetic``, for W1 ``mnist`` or ``gaussian``, for G1 possibly ``cifar10``."""
    if name == "W1":
        return "mnist" if mnist_directory() else "gaussian"
    return "cifar10" if name == "G1" and has_cifar10() else "synthetic"


def source_text(source: str | None) -> str:
    """A sentence about the samples of W1 for a page; None for sessions that do not record their source."""
    return {
        "mnist": "W1 uses MNIST.",
        "gaussian": "W1 uses Gaussian classes instead of MNIST, which was not available.",
    }.get(source or "", "The session does not record whether W1 uses MNIST or Gaussian classes.")


def make_arrays(workload: Workload) -> dict[str, np.ndarray]:
    number = int(workload.name[1:].split("-")[0])
    rng = np.random.default_rng([SEED, number] if workload.name[0] == "W" else [SEED, number, 1])
    samples = SAMPLES[workload.name.split("-")[0]](workload, rng)
    cohorts = np.stack(
        [np.sort(rng.choice(workload.clients, workload.cohort, replace=False)) for _ in range(workload.total_rounds)]
    )
    weights = starting_weights(workload, rng)
    return {
        **inputs("x", samples.x),
        "y": samples.y.astype(np.int64),
        "offsets": samples.offsets.astype(np.int64),
        **inputs("x_test", samples.x_test),
        "y_test": samples.y_test.astype(np.int64),
        "cohorts": cohorts,
        **{f"initial/{name}": value for name, value in weights.items()},
    }


def inputs(name: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """The samples under ``name``; images also with channels last, for some simulators."""
    stored = {name: np.ascontiguousarray(x)}
    if x.ndim == 4:
        stored[f"{name}_channels_last"] = np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return stored


# --- samples -----------------------------------------------------------------------------------------------


def shards_by_label(workload: Workload, rng: np.random.Generator) -> Samples:
    """W1: the pathological split of McMahan et al. Sort by label, cut into shards of 30, assign two to each client."""
    directory = mnist_directory()
    x, y, x_test, y_test = read_mnist(directory) if directory else gaussian_classes(rng)
    n = workload.clients
    shards = np.argsort(y, kind="stable").reshape(2 * n, 30)
    rows = shards[rng.permutation(2 * n)].reshape(n, 60)
    for client_rows in rows:
        rng.shuffle(client_rows)
    return Samples(x[rows.ravel()], y[rows.ravel()], np.arange(n + 1) * 60, x_test, y_test)


def synthetic_1_1(workload: Workload, rng: np.random.Generator) -> Samples:
    """W2: synthetic(1,1) of the FedProx paper. Sizes are lognormal with mean about 100 and multiples of the batch size,
    so that there are no incomplete batches; 20 test samples per client.
    """
    raw = rng.lognormal(0.0, 0.8, workload.clients)
    sizes = np.maximum(10, np.round(raw / raw.mean() * 10) * 10).astype(int)
    feature_scale = np.sqrt(np.arange(1, 61, dtype=np.float64) ** -1.2)
    train_x, train_y, test_x, test_y = [], [], [], []
    for size in sizes:
        model_mean, input_mean = rng.normal(0, 1), rng.normal(0, 1)
        w, b = rng.normal(model_mean, 1, (60, 10)), rng.normal(model_mean, 1, 10)
        center = rng.normal(input_mean, 1, 60)
        x = center + rng.standard_normal((size + 20, 60)) * feature_scale
        y = np.argmax(x @ w + b, axis=1)
        train_x.append(x[:size])
        train_y.append(y[:size])
        test_x.append(x[size:])
        test_y.append(y[size:])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return Samples(
        np.concatenate(train_x).astype(np.float32),
        np.concatenate(train_y),
        offsets,
        np.concatenate(test_x).astype(np.float32),
        np.concatenate(test_y),
    )


def image_templates(
    workload: Workload,
    rng: np.random.Generator,
    samples: int = 320,
    classes: int = 10,
    side: int = 32,
    channels: int = 3,
) -> Samples:
    """W3, W5, W6, W8, W9, W11, G1, G2, G6: a smooth template a class and unit noise; so many samples a client, iid;
    2000 test samples.
    """
    train = workload.clients * samples
    y = rng.integers(0, classes, train + 2000)
    templates = rng.standard_normal((classes, channels, 4, 4)).astype(np.float32) * 0.5
    x = rng.standard_normal((train + 2000, channels, side, side)).astype(np.float32)
    x += templates.repeat(side // 4, axis=2).repeat(side // 4, axis=3)[y]
    return Samples(x[:train], y[:train], np.arange(workload.clients + 1) * samples, x[train:], y[train:])


def sized_templates(workload: Workload, rng: np.random.Generator, channels: int = 3) -> Samples:
    """G1, G2, G6: class templates of the network's side and classes."""
    return image_templates(workload, rng, workload.samples, workload.sizes["classes"], workload.sizes["side"], channels)


def cifar10(workload: Workload, rng: np.random.Generator) -> Samples:
    """G1: CIFAR-10 in a random order, 50 training samples a client, all test samples; templates without it."""
    if source_of(workload.name) != "cifar10":
        return sized_templates(workload, rng)
    from fedrax.data import load

    loaded = load("cifar10")
    train, test = loaded.train, loaded.test
    mean, std = np.asarray(loaded.mean, np.float32), np.asarray(loaded.std, np.float32)

    def standardized(x: np.ndarray) -> np.ndarray:
        return ((x / np.float32(255) - mean) / std).transpose(0, 3, 1, 2)

    order = rng.permutation(len(train.y))[: workload.clients * workload.samples]
    offsets = np.arange(workload.clients + 1) * workload.samples
    return Samples(standardized(train.x[order]), train.y[order], offsets, standardized(test.x), test.y)


def noise_sequences(workload: Workload, rng: np.random.Generator) -> Samples:
    """W4: noise sequences whose class is a small drift; 160 samples per client, iid; 2000 test samples."""
    train = workload.clients * 160
    x = rng.standard_normal((train + 2000, 25, 50)).astype(np.float32)
    direction = rng.standard_normal(50).astype(np.float32)
    y = ((x @ direction).mean(axis=1) > 0).astype(np.int64)
    x += 0.3 * (2 * y[:, None, None] - 1) * np.sign(direction)
    return Samples(x[:train], y[:train], np.arange(workload.clients + 1) * 160, x[train:], y[train:])


def markov_chains(workload: Workload, rng: np.random.Generator, samples: int = 64, length: int = 80) -> Samples:
    """W7, G4: 80 symbols of a Markov chain, in which three of the 90 follow each, and the next one as the label; 64
    samples a client, iid; 2000 test samples.
    """
    train = workload.clients * samples
    followers = rng.integers(0, 90, (90, 3))
    symbols = np.empty((train + 2000, length + 1), np.int32)
    symbols[:, 0] = rng.integers(0, 90, len(symbols))
    for step in range(length):
        choices = rng.choice(3, len(symbols), p=(0.7, 0.2, 0.1))
        symbols[:, step + 1] = followers[symbols[:, step], choices]
    x, y = symbols[:, :length], symbols[:, length]
    return Samples(x[:train], y[:train], np.arange(workload.clients + 1) * samples, x[train:], y[train:])


def sized_chains(workload: Workload, rng: np.random.Generator) -> Samples:
    """G4: chains of the network's length."""
    return markov_chains(workload, rng, workload.samples, workload.sizes["tokens"])


def labeled_chains(workload: Workload, rng: np.random.Generator) -> Samples:
    """G3, G5: chains of the network's length, labeled by the next symbol at each position."""
    chains = sized_chains(workload, rng)
    following = lambda x, y: np.concatenate([x[:, 1:], y[:, None]], 1)  # noqa: E731
    return chains._replace(y=following(chains.x, chains.y), y_test=following(chains.x_test, chains.y_test))


def ragged_clients(workload: Workload, rng: np.random.Generator) -> Samples:
    """W10: Gaussian inputs labeled by a random network, 1 to 500 samples per client in geometric progression, iid; 2000
    test samples.
    """
    sizes = np.round(np.geomspace(1, 500, workload.clients)).astype(int)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    train = int(offsets[-1])
    x = rng.standard_normal((train + 2000, 30)).astype(np.float32)
    hidden = np.tanh(x @ rng.standard_normal((30, 20)) / np.sqrt(30))
    y = np.argmax(hidden @ rng.standard_normal((20, 5)), axis=1)
    return Samples(x[:train], y[:train], offsets, x[train:], y[train:])


def has_cifar10() -> bool:
    """Whether ``$FEDRAX_DATA/cifar10`` is there."""
    root = os.environ.get("FEDRAX_DATA")
    return root is not None and (Path(root) / "cifar10").is_dir()


def mnist_directory() -> Path | None:
    """``$FEDRAX_DATA/mnist`` if it has all four files."""
    root = os.environ.get("FEDRAX_DATA")
    directory = Path(root) / "mnist" if root else None
    complete = directory is not None and all((directory / name).is_file() for name in MNIST_FILES)
    return directory if complete else None


MNIST_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_mnist(directory: Path) -> tuple[np.ndarray, ...]:
    """MNIST as flat float32 rows, standardized with the usual mean and deviation: x, y, x_test, y_test."""

    def read(name: str, header: int, shape: tuple[int, ...]) -> np.ndarray:
        size = int(np.prod(shape))
        with gzip.open(directory / name, "rb") as file:
            raw = file.read(header + size + 1)
        if len(raw) != header + size:
            raise ValueError(f"{directory / name} is not MNIST's: expected {header + size} bytes uncompressed")
        return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)

    def images(name: str, count: int) -> np.ndarray:
        return (read(name, 16, (count, 784)).astype(np.float32) / 255.0 - 0.1307) / 0.3081

    def labels(name: str, count: int) -> np.ndarray:
        return read(name, 8, (count,)).astype(np.int64)

    train_x, train_y, test_x, test_y = MNIST_FILES
    return images(train_x, 60000), labels(train_y, 60000), images(test_x, 10000), labels(test_y, 10000)


def gaussian_classes(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Ten Gaussian classes with MNIST's shapes, not exactly balanced, as in MNIST."""
    y = rng.integers(0, 10, 70000)
    means = rng.standard_normal((10, 784)).astype(np.float32) * 0.1
    x = rng.standard_normal((70000, 784)).astype(np.float32)
    x += means[y]
    return x[:60000], y[:60000], x[60000:], y[60000:]


SAMPLES: dict[str, Callable[[Workload, np.random.Generator], Samples]] = {
    "W1": shards_by_label,
    "W2": synthetic_1_1,
    "W3": image_templates,
    "W4": noise_sequences,
    "W5": image_templates,
    "W6": partial(image_templates, samples=64),
    "W7": markov_chains,
    "W8": partial(image_templates, samples=64),
    "W9": partial(image_templates, samples=64),
    "W10": ragged_clients,
    "W11": partial(image_templates, samples=50),
    "G1": cifar10,
    "G2": sized_templates,
    "G3": labeled_chains,
    "G4": sized_chains,
    "G5": labeled_chains,
    "G6": partial(sized_templates, channels=1),
}
