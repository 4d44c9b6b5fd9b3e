"""A data set before it is divided among clients: samples on the host, in their own dtype."""

import zlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedrax.errors import FedraxError


class Samples(NamedTuple):
    """``n`` samples.

    ``x`` has shape [n, ...]: images are uint8 [n, height, width, channels], sequences [n, time, channels],
    features [n, features]. ``y`` has shape [n]: int32 class labels, or floating targets of a regression.
    """

    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples, and what is known about them.

    ``num_classes`` is None for a regression. ``mean`` and ``std`` are per channel (the last axis of x), taken
    after uint8 has been scaled by 1/255; empty means no normalisation. ``train_clients`` and ``test_clients``
    hold the natural client of each row as an integer [n], where the data has such clients.

    Raises FedraxError if shapes disagree, or a label lies outside 0 .. num_classes - 1.
    """

    name: str
    train: Samples
    test: Samples
    num_classes: int | None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    train_clients: np.ndarray | None = None
    test_clients: np.ndarray | None = None
    class_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.train.y) == 0:
            raise FedraxError(f"data set {self.name!r} has no training samples.")
        if self.train.x.shape[1:] != self.test.x.shape[1:]:
            raise FedraxError(
                f"data set {self.name!r}: a training sample has shape {self.train.x.shape[1:]}, "
                f"a test sample {self.test.x.shape[1:]}."
            )
        for part, samples, clients in (
            ("training", self.train, self.train_clients),
            ("test", self.test, self.test_clients),
        ):
            where = f"data set {self.name!r}, {part} part"
            check_samples(samples, self.num_classes, where)
            if clients is not None and (clients.shape != samples.y.shape or clients.dtype.kind not in "iu"):
                raise FedraxError(f"{where}: clients must be one integer for each of {len(samples.y)} rows.")
        if self.num_classes is not None and self.class_names and len(self.class_names) != self.num_classes:
            raise FedraxError(
                f"data set {self.name!r}: {self.num_classes} classes but {len(self.class_names)} class names."
            )
        if len(self.mean) != len(self.std) or any(s <= 0 for s in self.std):
            raise FedraxError(f"data set {self.name!r}: mean and std need a number a channel, std above zero.")


def as_samples(x: np.ndarray, y: np.ndarray) -> Samples:
    """Samples from plain arrays: integer labels become int32 [n], everything else keeps its dtype.

    Raises FedraxError for labels that are not one number a row, or x that holds anything but numbers.
    """
    x, y = np.asarray(x), np.asarray(y)
    if x.dtype.kind not in "buif" or y.dtype.kind not in "buif":
        raise FedraxError(f"samples must be real numbers, not x of dtype {x.dtype} with y of dtype {y.dtype}.")
    if x.ndim < 1 or y.ndim != 1 or len(x) != len(y):
        raise FedraxError(f"x of shape {x.shape} and y of shape {y.shape} are not n samples with n labels.")
    if y.dtype.kind in "bui":
        if len(y) and (y.min() < 0 or y.max() > np.iinfo(np.int32).max):
            raise FedraxError(f"class labels must be 0 or more, found {y.min()} .. {y.max()}.")
        y = y.astype(np.int32, copy=False)
    return Samples(x, y)


def check_samples(samples: Samples, num_classes: int | None, where: str) -> None:
    """Raise FedraxError, its sentence opened by ``where``, unless lengths, dtypes and labels fit."""
    x, y = samples
    if y.ndim != 1 or len(x) != len(y):
        raise FedraxError(f"{where}: x of shape {x.shape} and y of shape {y.shape} do not belong together.")
    if num_classes is None:
        if y.dtype.kind != "f":
            raise FedraxError(f"{where}: regression targets must be floating, not {y.dtype}.")
        return
    if y.dtype != np.int32:
        raise FedraxError(f"{where}: class labels must be int32, not {y.dtype}.")
    if len(y) and (y.min() < 0 or y.max() >= num_classes):
        raise FedraxError(f"{where}: labels must lie in 0 .. {num_classes - 1}, found {y.min()} .. {y.max()}.")


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random stream of its own for each purpose, so that no two uses of one seed share their numbers."""
    if seed < 0:
        raise FedraxError(f"a seed must be 0 or more, not {seed}.")
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def split_test(groups: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Divide rows into training and test rows; ``fraction`` of each group (class or client) is for the test.

    ``groups`` is [n], any sortable dtype; fractions are rounded down, so a group never loses all of its rows.
    Returns two sorted int64 arrays of row numbers. Raises FedraxError unless 0 <= fraction < 1.
    """
    if not 0 <= fraction < 1:
        raise FedraxError(f"the test fraction must lie in [0, 1), not {fraction}.")
    shuffled = rng.permutation(len(groups))
    _, codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    in_test = rank < np.repeat((sizes * fraction).astype(np.int64), sizes)
    return np.sort(order[~in_test]), np.sort(order[in_test])
