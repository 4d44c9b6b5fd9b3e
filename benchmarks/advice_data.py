"""The data that ``benchmarks.advice`` divides among clients: images, measurements, words, tables and points."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np

from fedrax.data import Dataset, load
from fedrax.data.dataset import Samples

ROWS = 4000
"""Training rows that are taken of a larger data set."""
CLIENTS = 20
WORDS = 500
"""Tweets are counts of so many words, the most frequent ones."""
LEAST_TWEETS = 20
"""Of a user who is a client."""


def digits() -> Dataset:
    """scikit-learn's digits, 40 % for the test."""
    return load("digits", test_fraction=0.4)


def first_rows(dataset: Dataset, rows: int = ROWS) -> Dataset:
    """Some of the training rows by chance, always the same."""
    chosen = np.sort(np.random.default_rng(0).permutation(len(dataset.train.y))[:rows])
    owners = None if dataset.train_clients is None else dataset.train_clients[chosen]
    train = Samples(dataset.train.x[chosen], dataset.train.y[chosen])
    return dataclasses.replace(dataset, train=train, train_clients=owners)


def synthetic(alpha: float, beta: float) -> Dataset:
    """FedProx's generator with few devices."""
    return first_rows(load("synthetic", alpha=alpha, beta=beta, test_fraction=0.4, devices=CLIENTS, seed=1))


def turned() -> Dataset:
    """Digits that each client has turned by an angle of its own, 18 degrees from client to client."""
    from scipy.ndimage import rotate

    found, rng = digits(), np.random.default_rng(0)
    owners = [rng.integers(0, CLIENTS, len(part.y)) for part in (found.train, found.test)]

    def turn(part: Samples, owner: np.ndarray) -> Samples:
        angles = 360 / CLIENTS * owner
        images = [
            rotate(image, angle, reshape=False, order=1) for image, angle in zip(part.x[..., 0], angles, strict=True)
        ]
        return Samples(np.stack(images)[..., None].astype(np.float32), part.y)

    train, test = (turn(*pair) for pair in zip((found.train, found.test), owners, strict=True))
    return dataclasses.replace(
        found, name="turned digits", train=train, test=test, train_clients=owners[0], test_clients=owners[1]
    )


def mislabeled() -> Dataset:
    """Digits of which three clients in ten have labels by chance; the test has none of these."""
    found, rng = digits(), np.random.default_rng(0)
    owner = rng.integers(0, CLIENTS, len(found.train.y))
    wrong = owner < 0.3 * CLIENTS
    labels = np.where(wrong, rng.integers(0, 10, len(owner)), found.train.y).astype(found.train.y.dtype)
    return dataclasses.replace(
        found, name="mislabeled digits", train=Samples(found.train.x, labels), train_clients=owner
    )


def tweets() -> Dataset:
    """How often each of the most frequent words is in a tweet; users with enough of them are clients."""
    found = load("sent140")

    def counts(tokens: np.ndarray) -> np.ndarray:
        return np.stack([np.bincount(row[(row > 1) & (row < WORDS + 2)] - 2, minlength=WORDS) for row in tokens])

    train, test = (Samples(counts(part.x).astype(np.float32), part.y) for part in (found.train, found.test))
    return dataclasses.replace(found, train=train, test=test, vocabulary=())


def _table(name: str, x: np.ndarray, y: np.ndarray) -> Dataset:
    """Columns of mean 0 and deviation 1, 40 % for the test."""
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].astype(np.float32), y[order].astype(np.int32)
    test = round(0.4 * len(y))
    mean, std = x[test:].mean(axis=0), x[test:].std(axis=0)
    x = (x - mean) / std
    return Dataset(name, Samples(x[test:], y[test:]), Samples(x[:test], y[:test]), int(y.max()) + 1)


def cancer() -> Dataset:
    """scikit-learn's breast cancer: 569 rows of 30 measurements, benign or not."""
    from sklearn.datasets import load_breast_cancer

    x, y = map(np.asarray, load_breast_cancer(return_X_y=True))
    return _table("breast cancer", x, y)


def clusters() -> Dataset:
    """Eight classes of two clusters each in 30 dimensions, of which 16 tell something."""
    from sklearn.datasets import make_classification

    x, y = make_classification(6000, 30, n_informative=12, n_redundant=4, n_classes=8, class_sep=1.5, random_state=3)
    return _table("clusters", x, y)


def moons() -> Dataset:
    """Two half circles in the plane."""
    from sklearn.datasets import make_moons

    x, y = map(np.asarray, make_moons(3000, noise=0.25, random_state=0))
    return _table("moons", x, y)


def small_pictures() -> Dataset:
    """CIFAR-10's images, each 4x4 pixels averaged."""
    found = first_rows(load("cifar10"))

    def shrink(part: Samples) -> Samples:
        x = part.x.reshape(len(part.y), 8, 4, 8, 4, 3).mean(axis=(2, 4), dtype=np.float32) / 255
        return Samples(((x - np.array(found.mean)) / np.array(found.std)).astype(np.float32), part.y)

    return dataclasses.replace(found, train=shrink(found.train), test=shrink(found.test), mean=(), std=(), pixels=False)


def activity() -> Dataset:
    """561 features of 21 people's movements, with mean 0 and deviation 1; six activities, others' in the test."""
    found = load("har_features")
    mean, std = found.train.x.mean(axis=0), found.train.x.std(axis=0) + 1e-6
    train, test = (Samples((part.x - mean) / std, part.y) for part in (found.train, found.test))
    return dataclasses.replace(found, train=train, test=test)


SETS: dict[str, Callable[[], Dataset]] = {
    "digits": digits,
    "synthetic(0, 0)": partial(synthetic, 0.0, 0.0),
    "synthetic(0.5, 0.5)": partial(synthetic, 0.5, 0.5),
    "synthetic(1, 1)": partial(synthetic, 1.0, 1.0),
    "turned digits": turned,
    "mislabeled digits": mislabeled,
    "breast cancer": cancer,
    "clusters": clusters,
    "moons": moons,
    "MNIST": lambda: first_rows(load("mnist")),
    "CIFAR-10 (8x8)": small_pictures,
    "activity": activity,
    "tweets": tweets,
    "Upcycled-FL (0.5, 0.5)": lambda: load("upcycled_synthetic"),
    "Upcycled-FL (iid)": lambda: load("upcycled_synthetic", variant="iid"),
}
NEED_FILES = ("MNIST", "CIFAR-10 (8x8)", "activity", "tweets", "Upcycled-FL (0.5, 0.5)", "Upcycled-FL (iid)")
"""In $FEDRAX_DATA."""
