"""A run's ledger: who took part how often, what that has cost, and in which round a budget ends.

Who takes part is decided by the seed and by nobody's data. So where nothing is hidden, each client has spent what its
own participations cost, and the number of the run is that of the client who took part most. A round that touches no
data costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrax.privacy.accounting import Accountant


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent: for no ``unit`` of data more than (``epsilon``, ``delta``)."""

    epsilon: float
    """Sound; inf where nothing protects a release."""
    delta: float
    unit: str
    """Whose presence or data the number is about: a "client" or a "sample"."""
    neighbors: str
    """Whether it is there, "presence", or has other data, "replacement"."""
    by: str
    """The accountant whose bound is the smallest."""
    count: int
    """Rounds, or participations of the client with the most of them, that were counted."""
    epsilon_paper: float | None = None
    """What the method's paper claims, where it claims something else."""

    empty_place: bool = False
    """Whether the place of a client that is not there stays empty, where draws of a fixed size would fill it."""

    @property
    def about(self) -> str:
        """What the number is about, in words."""
        return f"{self.neighbors} of a {self.unit}" + (", its place left empty" if self.empty_place else "")

    def __str__(self) -> str:
        said = f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.about}; {self.by})"
        return said if self.epsilon_paper is None else f"{said}, epsilon {self.epsilon_paper:.4g} by the paper"


class Ledger:
    """Counts the participations of a run's clients, and the epsilon spent by them.

    Args:
        accountant: Computes epsilon from the counts.
        sizes: Samples of each client, int [clients].

    Example:
        >>> accountant = fedrax.privacy.Accountant([fedrax.privacy.Release(noise=2.0)], delta=1e-5)
        >>> ledger = fedrax.privacy.Ledger(accountant, np.array([10, 20]))
        >>> ledger.spend(np.array([1]))["epsilon"] == accountant.epsilon(1)
        True
    """

    def __init__(self, accountant: Accountant, sizes: np.ndarray):
        self.accountant, self.sizes = accountant, sizes
        self.counts = np.zeros(len(sizes), np.int32)
        """Rounds that each client took part in."""
        self.rounds = 0
        self.epsilon_paper: float | None = 0.0 if accountant.has_paper else None
        """What the method's paper claims, for the client that it claims the most of; None where it claims nothing."""

    @property
    def count(self) -> int:
        """What the accountant counts: rounds, or those of the client that took part most."""
        return self.rounds if self.accountant.by_rounds else int(self.counts.max())

    def spend(self, clients: np.ndarray) -> dict[str, Any]:
        """Enter the clients of one round.

        Args:
            clients: The numbers of the clients that took part, int [cohort].

        Returns:
            The entries of the round's event: ``epsilon``, and ``epsilon_paper`` where a paper claims one. Each is None
            where it is not finite.
        """
        np.add.at(self.counts, clients, 1)
        self.rounds += 1
        self._claim(clients)
        epsilon, paper = self.accountant.epsilon(self.count), self.epsilon_paper
        said: dict[str, Any] = {"epsilon": epsilon if math.isfinite(epsilon) else None}
        return said if paper is None else said | {"epsilon_paper": paper if math.isfinite(paper) else None}

    @property
    def spent(self) -> PrivacySpent:
        """The account as it is now."""
        of, count = self.accountant, self.count
        epsilon, by = of.bound(count)
        return PrivacySpent(epsilon, of.delta, of.unit, of.neighbors, by, count, self.epsilon_paper, of.empty_place)

    def _claim(self, clients: np.ndarray) -> None:
        """Take the paper's claim for ``clients`` in: for the others it is as it was."""
        if self.epsilon_paper is not None and len(clients):
            pairs = np.unique(np.stack([self.counts[clients], self.sizes[clients]]), axis=1).T.tolist()
            claims = [self.accountant.epsilon_paper(count, size) or 0.0 for count, size in pairs]
            self.epsilon_paper = max(self.epsilon_paper, *claims)

    def last_round(self, budget: float | None, rounds: int, cohort: Callable[[int], np.ndarray]) -> int:
        """The number of rounds that a budget allows, from the beginning of the run, whatever the ledger holds.

        Args:
            budget: The largest epsilon; None for no budget.
            rounds: Rounds that are planned.
            cohort: Gives the clients of a round, which counts from 0.

        Returns:
            The number of rounds, at most ``rounds``.
        """
        if budget is None:
            return rounds
        most = self.accountant.counts_within(budget, max(rounds, 1))
        if self.accountant.by_rounds or most >= rounds:
            return min(most, rounds)
        counts = np.zeros_like(self.counts)
        for r in range(rounds):
            mine = cohort(r)
            counts[mine] += 1
            if len(mine) and counts[mine].max() > most:
                return r
        return rounds

    def restore(self, counts: np.ndarray, rounds: int) -> None:
        """Restore the counts of a checkpoint.

        Args:
            counts: Participations of each client, int [clients].
            rounds: Completed rounds.
        """
        self.counts, self.rounds = np.array(counts, np.int32), rounds
        self._claim(np.arange(len(counts)))
