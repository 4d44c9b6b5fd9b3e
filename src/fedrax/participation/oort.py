"""Sampling by statistical and system utility, after Oort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedrax.config.hyperparameters import Fraction, NonNegative, Positive
from fedrax.errors import FedraxError
from fedrax.participation.asynchronous import read_durations
from fedrax.participation.policy import ParticipationPolicy, Population
from fedrax.participation.power_of_choice import reported


class _Reports(NamedTuple):
    """What is known of the clients, [N] each."""

    loss: np.ndarray
    """The last reported loss; 0 before the first report."""
    last: np.ndarray
    """The round of the last participation, from 1; 0: none."""
    seconds: np.ndarray
    """Mean duration of the local work; 1 without a trace."""


@dataclass(frozen=True)
class Oort(ParticipationPolicy):
    """Sampling by utility with exploration and a deadline, after Oort (Lai et al. 2021, Algorithm 1).

    The utility of client i in round r, which last took part in round l_i, is
    U_i = (n_i L_i + sqrt(0.1 ln(r) / l_i)) (T / t_i)^alpha, the last factor only for t_i > T. n_i is its number of
    samples, L_i the mean loss that it last reported, t_i its mean duration in ``trace``, and T the ``deadline``. The
    paper has the root mean square of sample losses in place of L_i, which clients do not report here.

    A share e of the cohort, max(``exploration`` ``exploration_decay``^(r - 1), ``least_exploration``), are clients that
    have not taken part, drawn with probabilities in proportion to 1 / t_i. The others are drawn with probabilities in
    proportion to U_i among the clients whose utility is at least ``cutoff`` times that of the K-th best, for K of them.
    The deadline lowers the utility of slow clients and does not end a round. The paper's pacer, which adapts T, and its
    limit of participations are left out.

    Example:
        >>> policy = fedrax.participation.Oort("seconds.csv", deadline=30.0)
        >>> fedrax.Settings(cohort_size=5, participation=policy).participation.deadline
        30.0
    """

    trace: Path | None = None
    """CSV file with columns ``client`` and ``seconds``, as for :class:`Asynchronous`; the mean of a client's lines is
    its duration. By default all clients are equally fast."""
    deadline: Positive | None = None
    """T in seconds, for which ``trace`` is needed; None: durations do not change the utility."""
    penalty: NonNegative = 2.0
    """alpha, the exponent of the penalty of clients that are slower than the deadline."""
    exploration: Fraction = 0.9
    """The share of clients in the first cohort that have not taken part."""
    exploration_decay: Fraction = 0.98
    """Factor of this share per round."""
    least_exploration: Fraction = 0.2
    """The smallest share."""
    cutoff: Fraction = 0.95
    """Utility of admitted clients relative to that of the K-th best."""

    def init(self, population: Population) -> _Reports:
        """No reports, and the durations of the trace."""
        if self.deadline is not None and self.trace is None:
            raise FedraxError("a deadline needs the clients' durations: set trace to a CSV file of them")
        n, seconds = population.num_clients, np.ones(population.num_clients)
        if self.trace is not None:
            seconds = np.array([own.mean() for own in read_durations(self.trace, n)])
        return _Reports(np.zeros(n), np.zeros(n, np.int32), seconds)

    def utility(self, state: Any, round: int, population: Population) -> np.ndarray:
        """U of each client; without meaning for those that have not taken part.

        Args:
            state: the reports.
            round: the round, from 0.
            population: the clients of the run.

        Returns:
            Utilities, float [N].
        """
        staleness = np.sqrt(0.1 * np.log(round + 1) / np.maximum(state.last, 1))
        utility = population.sizes * np.maximum(state.loss, 0.0) + staleness
        if self.deadline is not None:
            late = state.seconds > self.deadline
            utility = np.where(late, utility * (self.deadline / state.seconds) ** self.penalty, utility)
        return utility

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """New clients by their speed, the others by their utility."""
        size, new = population.cohort_size, np.flatnonzero(state.last == 0)
        share = max(self.exploration * self.exploration_decay**round, self.least_exploration)
        known = population.num_clients - len(new)
        explored = max(min(int(share * size + 0.5), len(new)), size - known)
        chosen = _draw(rng, new, 1 / state.seconds[new], explored)
        old, best = np.flatnonzero(state.last > 0), size - explored
        if best:
            utility = self.utility(state, round, population)[old]
            admitted = utility >= self.cutoff * np.sort(utility)[-best]
            chosen = np.concatenate([chosen, _draw(rng, old[admitted], utility[admitted], best)])
        return np.sort(chosen)

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> _Reports:
        """The reports with those of the cohort."""
        loss, last = state.loss.copy(), state.last.copy()
        loss[clients], last[clients] = reported(info, "loss", "Oort"), round + 1
        return state._replace(loss=loss, last=last)

    def trace_data(self, state: Any) -> Sequence[np.ndarray]:
        """The durations."""
        return () if self.trace is None else (state.seconds,)


def _draw(rng: np.random.Generator, clients: np.ndarray, parts: np.ndarray, size: int) -> np.ndarray:
    """``size`` of ``clients`` one after another without replacement, with probabilities in proportion to ``parts``."""
    if not size:
        return np.zeros(0, int)
    parts = np.maximum(parts, np.finfo(float).tiny)  # utilities of zero: any of them
    return rng.choice(clients, size, replace=False, p=parts / parts.sum())
