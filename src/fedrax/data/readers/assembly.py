"""Shared by the readers: encoding of labels, the test split, and the assembly of rows to a data set."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np

from fedrax.data.dataset import Dataset, Samples, numpy_generator, train_test_split
from fedrax.data.federation import take_rows
from fedrax.errors import FedraxError


def reject_unused_options(reader: Callable[..., Dataset], where: str, **given: object) -> None:
    """Raise FedraxError for options that differ from their defaults and have no effect.

    A ``test_fraction`` of nothing is none: it goes with test rows that are given.
    """
    known = inspect.signature(reader).parameters
    changed = [name for name, value in given.items() if _as_tuple(value) != known[name].default]
    idle = [name for name in changed if name != "test_fraction" or given[name] != 0]
    if idle:
        has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise FedraxError(f"{', '.join(idle)} {has} no effect {where}: leave {it} out.")


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def encode_labels(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Floating targets as float32 and no names, or codes int32 of sorted labels and their names."""
    if y.dtype.kind == "f":
        return to_float32(y, "targets"), ()
    labels, codes = encode_categories(y)
    return codes.astype(np.int32), tuple(str(label) for label in labels)


def encode_categories(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct values in order, and the index of each value; strings of any length."""
    if values.dtype.kind == "O":
        values = np.array([str(value) for value in values], object)
    return np.unique(values, return_inverse=True)


def format_number(value: float) -> str:
    """The name of a class that is a number; unique, and without a fraction for integers."""
    return repr(float(value)).removesuffix(".0")


def to_float32(values: np.ndarray, what: str) -> np.ndarray:
    """Finite numbers as float32; FedraxError for numbers beyond its range."""
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused
        made = values.astype(np.float32)
    if not np.isfinite(made).all():
        raise FedraxError(f"the {what} hold numbers beyond 32-bit floats, {np.abs(values).max():g}: scale them.")
    return made


def split_rows(y: np.ndarray, clients: np.ndarray | None, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows, split within each client, else within each class, else (regression) among all rows."""
    groups = clients if clients is not None else y if y.dtype.kind == "i" else np.zeros(len(y), np.int8)
    return train_test_split(groups, fraction, numpy_generator(seed, "test split"))


def small_split_notes(clients: np.ndarray | None, test: np.ndarray, fraction: float) -> tuple[str, ...]:
    """Note about clients without test rows; ``test`` are the test rows of all clients."""
    if not fraction:
        return ()
    if not len(test):
        whose = "" if clients is None else " of any client"
        note = f"there are too few rows{whose} to keep {fraction:g} of them for the test, which is empty"
        return (f"warning: {note}: raise test_fraction",)
    if clients is None:
        return ()
    count = len(np.unique(clients))
    lacking = count - len(np.unique(clients[test]))
    note = f"{lacking:,} of {count:,} clients have too few rows to keep {fraction:g} of them for the test"
    return (f"{note}, and have no test rows",) if lacking else ()


def make_dataset(
    name: str,
    samples: Samples,
    clients: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    class_names: tuple[str, ...],
    *,
    client_names: tuple[str, ...] = (),
    feature_names: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A data set from the selected rows of one table."""
    return Dataset(
        name,
        take_rows(samples, train),
        take_rows(samples, test),
        len(class_names) or None,
        train_clients=None if clients is None else clients[train],
        test_clients=None if clients is None else clients[test],
        class_names=class_names,
        client_names=client_names,
        feature_names=feature_names,
        notes=notes,
    )
