"""Table 2: the synthetic data sets, as published and of our generator, and how hard they are."""

from __future__ import annotations

import argparse

import numpy as np

from fedrax.data import Dataset, load
from papers.losac.running import write_table
from papers.upcycled.grid import DATA

PRINTED = {
    "iid": ("6726 (683)", 30, 224, 166),
    "0_0": ("13791 (1395)", 30, 460, 841),
    "0.5_0.5": ("8036 (818)", 30, 268, 410),
    "1_1": ("10493 (1063)", 30, 350, 586),
}
"""Samples with those of the test in parentheses, devices, mean and deviation of samples per device."""
RIDGE, NEWTON = 1e-4, 30
"""The pooled model: weight decay, and Newton steps."""


def table2(arguments: argparse.Namespace) -> None:
    """Printed beside counted, then what makes a set hard for one model."""
    rows = []
    for data in arguments.data or DATA:
        name, options = DATA[data]
        dataset = load(name, arguments.data_dir, **options)
        printed = PRINTED[data.removeprefix("own ")]
        rows.append([data, *facts(dataset, printed)])
    columns = ["set", "samples (test)", "ours", "devices", "ours", "mean", "ours", "deviation", "ours"]
    columns += ["larger class %", "of a device %", "one model, all rows %", "one model, mean over devices %"]
    note = (
        "Samples per device count test rows, too, as the paper's numbers do. 'own' sets are other draws by our "
        "generator. Larger class: its share of all rows, and the mean over devices of the larger class's share of a "
        "device's rows. One model: test accuracy of one logistic regression fitted to all training rows together, "
        "over test rows and as the mean over devices, which is about what a method with one model can reach."
    )
    write_table(arguments, arguments.what, "Upcycled-FL, Table 2: the synthetic data sets", note, columns, rows)


def facts(dataset: Dataset, printed: tuple[str, int, int, int]) -> list[str]:
    """A set's row without its name."""
    owner = np.concatenate([dataset.train_clients, dataset.test_clients])
    y = np.concatenate([dataset.train.y, dataset.test.y])
    sizes = np.bincount(owner)
    ours = [f"{len(y)} ({len(dataset.test.y)})", str(len(sizes)), f"{sizes.mean():.0f}", f"{sizes.std():.0f}"]
    cells = [cell for pair in zip(map(str, printed), ours, strict=True) for cell in pair]
    larger = [np.bincount(y[owner == k], minlength=2).max() / sizes[k] for k in range(len(sizes))]
    right = pooled(dataset)
    devices = [right[dataset.test_clients == k].mean() for k in np.unique(dataset.test_clients)]
    shares = (np.bincount(y).max() / len(y), np.mean(larger), right.mean(), np.mean(devices))
    return [*cells, *(f"{100 * share:.1f}" for share in shares)]


def pooled(dataset: Dataset) -> np.ndarray:
    """Which test rows a logistic regression on all training rows gets right, by Newton's method."""
    x, test = (np.c_[np.asarray(part.x, float), np.ones(len(part.y))] for part in (dataset.train, dataset.test))
    y, w = np.asarray(dataset.train.y, float), np.zeros(x.shape[1])
    for _ in range(NEWTON):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        slope = x.T @ (p - y) / len(y) + RIDGE * w
        curvature = x.T @ (x * (p * (1 - p))[:, None]) / len(y) + RIDGE * np.eye(len(w))
        w = w - np.linalg.solve(curvature, slope)
    return ((test @ w > 0) == np.asarray(dataset.test.y)).astype(float)
