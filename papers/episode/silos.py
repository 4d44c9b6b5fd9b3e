"""The paper's partition of users among silos (appendix H)."""

from dataclasses import dataclass

import numpy as np

from fedrax.data import Dataset, Partition
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class UserSilos:
    """Each silo gets ``percent`` % of its users at random; the others are sorted by their share of positive tweets.

    Users are not split. Silos differ by at most one user, and have all tweets of their users.
    """

    clients: int = 8
    """Number of silos."""
    percent: float = 10.0
    """Percentage s of users drawn at random."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Rows of each silo."""
        users = dataset.train_clients
        if users is None:
            raise FedraxError(f"{dataset.name!r} has no users to divide into silos.")
        if not 0 <= self.percent <= 100:
            raise FedraxError(f"percent is 0 to 100, not {self.percent}.")
        names, of = np.unique(users, return_inverse=True)
        if not 1 <= self.clients <= len(names):
            raise FedraxError(f"{len(names)} users of {dataset.name!r} cannot be divided into {self.clients} silos.")
        share = np.bincount(of, dataset.train.y) / np.bincount(of)
        order = np.random.default_rng(seed).permutation(len(names))
        mixed = round(len(names) * self.percent / 100)
        drawn, rest = order[:mixed], order[mixed:]
        silos, of_drawn = np.arange(self.clients), even(mixed, self.clients)
        silo = np.empty(len(names), np.int64)
        silo[drawn] = np.repeat(silos, of_drawn)
        silo[rest[np.argsort(share[rest], kind="stable")]] = np.repeat(silos, even(len(names), self.clients) - of_drawn)
        owner = silo[of]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.clients))])
        return Partition(np.argsort(owner, kind="stable"), offsets.astype(np.int64))


def even(total: int, parts: int) -> np.ndarray:
    """Sizes that sum to ``total`` and differ by at most one."""
    return total // parts + (np.arange(parts) < total % parts)
