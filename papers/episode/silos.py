"""How the paper divides users among silos (appendix H)."""

from dataclasses import dataclass

import numpy as np

from fedrax.data import Dataset, Partition
from fedrax.errors import FedraxError


@dataclass(frozen=True)
class UserSilos:
    """Each silo gets ``percent`` % of its users at random; the others are sorted by their share of positive tweets.

    Users stay whole. Silos have the same number of users up to one, and as many tweets as these have.
    """

    clients: int = 8
    """Number of silos."""
    percent: float = 10.0
    """Percentage s of users drawn at random."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """The rows of each silo."""
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
        rest = order[mixed:]
        silo = np.empty(len(names), np.int64)
        silo[order[:mixed]] = np.arange(mixed) * self.clients // max(mixed, 1)
        silo[rest[np.argsort(share[rest], kind="stable")]] = np.arange(len(rest)) * self.clients // max(len(rest), 1)
        owner = silo[of]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self.clients))])
        return Partition(np.argsort(owner, kind="stable"), offsets.astype(np.int64))
