"""The data: a table with one row per patient and a column that names the clinic, which is the client."""

import csv
from pathlib import Path

import numpy as np

from fedrax.data import Dataset, Samples

FEATURES = ("age", "pressure", "glucose", "activity")
CLASSES = ("no", "yes")


def read(path: Path | str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features [n, 4], class numbers [n] and clinics [n] of the rows of a CSV file."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    x = np.array([[float(row[name]) for name in FEATURES] for row in rows], np.float32)
    y = np.array([CLASSES.index(row["ill"]) for row in rows], np.int32)
    return x, y, np.array([int(row["clinic"]) for row in rows])


def split(y: np.ndarray) -> np.ndarray:
    """Which of the rows of a clinic are test samples: every fifth."""
    return np.arange(len(y)) % 5 == 0


def load(path: Path) -> Dataset:
    """The data set of the simulation. ``path`` is a key of [data] in experiment.toml."""
    x, y, clinics = read(path)
    test = np.zeros(len(y), bool)
    for clinic in np.unique(clinics):
        rows = np.flatnonzero(clinics == clinic)
        test[rows] = split(rows)
    return Dataset(
        "clinics",
        train=Samples(x[~test], y[~test]),
        test=Samples(x[test], y[test]),
        num_classes=len(CLASSES),
        train_clients=clinics[~test],
        test_clients=clinics[test],
        class_names=CLASSES,
        feature_names=FEATURES,
    )
