"""The data: a table with one row per patient and a column that names the clinic, which is the client.

The names of the columns are keys of [data] in experiment.toml, so that another table needs no change here.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedrax import FedraxError
from fedrax.data import Dataset, Samples


def read(
    path: Path | str, client: str, label: str, classes: Sequence[str], features: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, k], class numbers [n] and names of clinics [n] of the rows of a CSV file.

    Args:
        path: The file; its first line names the columns.
        client: The column that names the clinic.
        label: The column to predict.
        classes: The values of this column; their order numbers them.
        features: The columns of the k features, which are numbers.
    """
    with open(path, newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(file)
        columns = table.fieldnames or ()
        for key, name in (("client", client), ("label", label), *(("features", name) for name in features)):
            if name not in columns:
                raise FedraxError(f"data.{key}: {path} has no column {name!r}; it has {', '.join(columns)}")
        rows = list(table)
    for line, row in enumerate(rows, 2):
        if row[label] not in classes:
            found = ", ".join(sorted({str(row[label]) for row in rows})[:20])
            raise FedraxError(f"data.classes: row {line} of {path} has {label} = {row[label]!r}; values: {found}")
        for name in features:
            if not is_number(row[name]):
                raise FedraxError(
                    f"data.features: row {line} of {path} has {name} = {row[name]!r}, which is no number: leave the"
                    ' column out, or read the table with the data set "csv", which encodes text and fills gaps'
                )
    x = np.array([[float(row[name]) for name in features] for row in rows], np.float32)
    y = np.array([classes.index(row[label]) for row in rows], np.int32)
    return x, y, np.array([row[client] for row in rows])


def is_number(text: str | None) -> bool:
    """Whether a cell contains a number."""
    try:
        return text is not None and bool(np.isfinite(float(text)))
    except ValueError:
        return False


def split(y: np.ndarray) -> np.ndarray:
    """Which of the rows of a clinic are test samples: every fifth.

    This is for independent rows. Hold out whole patients or recordings if they have several rows each.
    """
    return np.arange(len(y)) % 5 == 0


def load(path: Path, client: str, label: str, classes: tuple[str, ...], features: tuple[str, ...]) -> Dataset:
    """The data set of the simulation. The arguments are keys of [data] in experiment.toml."""
    x, y, names = read(path, client, label, classes, features)
    clinics, numbers = np.unique(names, return_inverse=True)
    test = np.zeros(len(y), bool)
    for clinic in range(len(clinics)):
        rows = np.flatnonzero(numbers == clinic)
        test[rows] = split(rows)
    return Dataset(
        "clinics",
        train=Samples(x[~test], y[~test]),
        test=Samples(x[test], y[test]),
        num_classes=len(classes),
        train_clients=numbers[~test],
        test_clients=numbers[test],
        class_names=classes,
        feature_names=features,
        client_names=tuple(map(str, clinics)),
    )
