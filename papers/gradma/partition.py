"""How the authors divide a training set among the workers."""

from dataclasses import dataclass

import numpy as np

from fedrax.data import Dataset, Partition
from fedrax.data.dataset import generator
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class DirichletWorkers:
    """Each class is divided over the workers in proportions drawn from Dir(omega, ..., omega).

    As in the authors' program every worker gets two rows of random classes first, so that none is left without: at
    omega = 0.01 almost half of 100 workers have no more. Sizes are as uneven as labels.
    """

    clients: int = 100
    """Number of workers."""
    omega: float = 0.1
    """Concentration; smaller is more heterogeneous."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """The rows of each worker; all rows are dealt."""
        labels, classes = dataset.train.y, dataset.num_classes
        if classes is None or labels.ndim != 1 or not 1 <= self.clients <= len(labels) // 4:
            raise FedraxError(f"{len(labels)} rows of {dataset.name!r} cannot be dealt to {self.clients} workers.")
        rng = generator(seed, "partition")
        order = rng.permutation(len(labels))
        first, rest = order[: 2 * self.clients], order[2 * self.clients :]
        owner = np.empty(len(labels), np.int64)
        owner[first] = np.repeat(np.arange(self.clients), 2)
        for c in range(classes):
            rows = rest[labels[rest] == c]
            share = rng.dirichlet(np.full(self.clients, self.omega))
            edges = (np.cumsum(share)[:-1] * len(rows)).astype(np.int64)
            owner[rows] = np.searchsorted(edges, np.arange(len(rows)), side="right")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.clients))])
        return Partition(np.argsort(owner, kind="stable"), offsets.astype(np.int64))
