"""The authors' partition of a training set among workers."""

from dataclasses import dataclass

import numpy as np

from fedrax.data import Dataset, Partition
from fedrax.errors import FedraxError

STREAM = 5363
"""Offset that the authors add to the seed of a run for its partition."""


@dataclass(frozen=True)
class DirichletWorkers:
    """Each class is divided among the workers in proportions from Dir(omega, ..., omega).

    As in the authors' program, every worker first gets two rows of random classes, so that none is empty: at omega =
    0.01 almost half of 100 workers have no more. Sizes are as heterogeneous as labels. Random numbers are drawn by the
    generator and in the order of that program, so that partitions are equal for equal seeds: which classes share a
    worker changes accuracies at omega = 0.01 by ten points and more.
    """

    clients: int = 100
    """Number of workers."""
    omega: float = 0.1
    """Concentration; smaller is more heterogeneous."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Rows of each worker; all rows are assigned."""
        labels, classes = dataset.train.y, dataset.num_classes
        if classes is None or labels.ndim != 1 or not 1 <= self.clients <= len(labels) // 4:
            raise FedraxError(f"{len(labels)} rows of {dataset.name!r} cannot be dealt to {self.clients} workers.")
        rng = np.random.RandomState(STREAM + seed)
        shares = rng.dirichlet(np.full(self.clients, self.omega), size=classes)
        left = [np.flatnonzero(labels == c).tolist() for c in range(classes)]
        owner = np.empty(len(labels), np.int64)
        for worker in (*range(self.clients), *range(self.clients)):
            label = rng.randint(classes)
            if not left[label]:
                raise FedraxError(f"class {label} of {dataset.name!r} has too few rows for {self.clients} workers.")
            owner[left[label].pop()] = worker
        for rows, share in zip(left, shares, strict=True):
            rng.shuffle(rows)
            edges = (np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            owner[rows] = np.searchsorted(edges, np.arange(len(rows)), side="right")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.clients))])
        return Partition(np.argsort(owner, kind="stable"), offsets.astype(np.int64))
