"""Privacy ledger of a run: participations of each client, epsilon spent, and the last round within a budget.

Participation depends on the seed and not on data. Without amplification by sampling, each client has spent the epsilon
of its own participations, and the run's epsilon is that of the client with the most participations. A round without
clients costs nothing.
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
    """The (``epsilon``, ``delta``) guarantee of a run for each ``unit`` of data."""

    epsilon: float
    """Sound upper bound; inf if a release has no noise."""
    delta: float
    """The delta of the guarantee."""
    unit: str
    """Unit of privacy: a "client" or a "sample"."""
    neighbors: str
    """Neighboring federations differ in the "presence" of one unit or in the "replacement" of its data."""
    by: str
    """Name of the accounting method with the smallest bound."""
    count: int
    """Rounds composed, or the largest number of participations of a client."""
    epsilon_paper: float | None = None
    """Epsilon that the method's paper claims, if it differs."""

    empty_place: bool = False
    """Whether the guarantee is for cohorts in which an absent client is not replaced by another."""
    seen: str = "public"
    """The strongest adversary of the guarantee: the "server", or the "public", which sees models only."""
    amplified: str = "none"
    """Sampling that amplifies the guarantee: of cohorts, "poisson" or "fixed"; "batches" of samples; "none"."""

    @property
    def about(self) -> str:
        """The neighboring relation for messages."""
        return f"{self.neighbors} of a {self.unit}" + (", its place left empty" if self.empty_place else "")

    @property
    def assumptions(self) -> str:
        """Against whom the guarantee holds, and which sampling it counts on, for messages."""
        against = "also against the server" if self.seen == "server" else "against all but the server, which adds noise"
        return f"{against}; {_AMPLIFIED[self.amplified]}"

    def __str__(self) -> str:
        text = f"epsilon {self.epsilon:.4g} at delta {self.delta:g} ({self.about}; {self.assumptions}; {self.by})"
        return text if self.epsilon_paper is None else f"{text}, epsilon {self.epsilon_paper:.4g} by the paper"


_AMPLIFIED = {
    "poisson": "amplified by Poisson sampling of cohorts",
    "fixed": "amplified by uniform sampling of cohorts",
    "batches": "amplified by Poisson sampling of batches",
    "none": "not amplified by sampling",
}
NOT_COVERED = (
    "not covered: metrics, numbers of samples, statistics of the data computed before training, other runs on the data"
    " such as those of a search, adversaries who know the seed"
)
"""What the epsilon of a simulation does not bound, for messages."""


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
        """Participations of each client, int [clients]."""
        self.rounds = 0
        """Completed rounds."""
        self.epsilon_paper: float | None = 0.0 if accountant.has_paper else None
        """Largest epsilon over clients that the method's paper claims; None if it claims none."""

    @property
    def count(self) -> int:
        """The count for the accountant: rounds, or the largest number of participations of a client."""
        return self.rounds if self.accountant.by_rounds else int(self.counts.max())

    def spend(self, clients: np.ndarray) -> dict[str, Any]:
        """Record the cohort of one round.

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
        entries: dict[str, Any] = {"epsilon": epsilon if math.isfinite(epsilon) else None}
        return entries if paper is None else entries | {"epsilon_paper": paper if math.isfinite(paper) else None}

    @property
    def spent(self) -> PrivacySpent:
        """The guarantee of the rounds recorded so far."""
        epsilon, by = self.accountant.bound(self.count)
        return self._spent(epsilon, by, self.count)

    @property
    def guarantee(self) -> str:
        """What epsilon bounds, for messages: the neighboring relation, the adversary, the sampling and delta."""
        nothing = self._spent(0.0, "", 0)
        return f"{nothing.about}; {nothing.assumptions}; delta {nothing.delta:g}"

    def _spent(self, epsilon: float, by: str, count: int) -> PrivacySpent:
        """The guarantee with an epsilon."""
        of = self.accountant
        facts = (of.delta, of.unit, of.neighbors, by, count, self.epsilon_paper, of.empty_place, of.seen, of.amplified)
        return PrivacySpent(epsilon, *facts)

    def _claim(self, clients: np.ndarray) -> None:
        """Update ``epsilon_paper`` by the claims for ``clients``."""
        if self.epsilon_paper is not None and len(clients):
            pairs = np.unique(np.stack([self.counts[clients], self.sizes[clients]]), axis=1).T.tolist()
            claims = [self.accountant.epsilon_paper(count, size) or 0.0 for count, size in pairs]
            self.epsilon_paper = max(self.epsilon_paper, *claims)

    def last_round(self, budget: float | None, rounds: int, cohort: Callable[[int], np.ndarray]) -> int:
        """The number of rounds from the start of the run that a budget allows, whatever has been recorded.

        Args:
            budget: The largest epsilon; None for no budget.
            rounds: Rounds that are planned.
            cohort: Returns the clients of a round, counted from 0.

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
            clients = cohort(r)
            counts[clients] += 1
            if len(clients) and counts[clients].max() > most:
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
