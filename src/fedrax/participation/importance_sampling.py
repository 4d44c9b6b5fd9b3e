"""Importance sampling of clients with inverse-probability weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from fedrax.config.hyperparameters import Bound
from fedrax.participation.policy import ParticipationPolicy, Population
from fedrax.participation.power_of_choice import reported


@dataclass(frozen=True)
class ImportanceSampling(ParticipationPolicy):
    """Importance sampling with unbiased weights: clients with large updates are sampled more often and count less.

    Client i is in the cohort of S clients with probability pi_i = min(1, c q_i), where c is such that the pi_i sum to
    S, and q_i = (1 - m) p_i v_i / sum_j p_j v_j + m / N. p_i are the aggregation weights, v_i is the norm of the
    client's last upload or its last loss (the mean of the known ones before its first report), and m is ``mixing``. Its
    upload has the weight p_i / pi_i, so that the expectation over cohorts is the weighted mean over all clients,
    whatever the v_i are. For the current norms and m = 0, the variance is minimal among independent draws (Chen,
    Horvath and Richtarik 2020, equation 7); here the norms are those of earlier rounds, which costs no communication.
    Cohorts have exactly S clients, by systematic sampling in random order (Madow 1949).

    Methods must support unequal aggregation weights. Losses in events are unbiased estimates, too, and noisier than the
    mean over a cohort.

    Example:
        >>> policy = fedrax.participation.ImportanceSampling(by="loss")
        >>> fedrax.Settings(cohort_size=5, participation=policy).participation.by
        'loss'
    """

    by: Literal["norm", "loss"] = "norm"
    """v_i: the norm of the client's last upload, or its last mean loss along the local steps."""
    mixing: Annotated[float, Bound(gt=0, le=1)] = 0.1
    """m, the share of uniform sampling, which bounds the weights. 1 is uniform sampling."""

    def init(self, population: Population) -> np.ndarray:
        """v, float [N]; NaN before the first report."""
        return np.full(population.num_clients, np.nan)

    def inclusion(self, state: Any, round: int, population: Population) -> np.ndarray:
        """pi, float [N]."""
        known = ~np.isnan(state)
        values = np.where(known, state, state[known].mean() if known.any() else 1.0).astype(float)
        parts = population.shares * values
        parts = parts / parts.sum() if parts.sum() > 0 else population.shares
        return inclusion_probabilities(
            (1 - self.mixing) * parts + self.mixing / population.num_clients, population.cohort_size
        )

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """S clients, each with its probability."""
        return systematic_sample(self.inclusion(state, round, population), rng)

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> np.ndarray:
        """v with the reports of the cohort."""
        values = state.copy()
        values[clients] = np.abs(reported(info, "upload_norm" if self.by == "norm" else "loss", "importance sampling"))
        return values


def inclusion_probabilities(parts: np.ndarray, size: int) -> np.ndarray:
    """min(1, c q) for positive ``parts`` q [N], with c such that the sum is ``size``, at most N."""
    inclusion, left = np.ones(len(parts)), np.ones(len(parts), bool)
    while left.any():
        inclusion[left] = (size - np.count_nonzero(~left)) * parts[left] / parts[left].sum()
        above = left & (inclusion >= 1)
        if not above.any():
            break
        inclusion[above] = 1
        left &= ~above
    return inclusion


def systematic_sample(inclusion: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A sample without replacement in which client i is with probability ``inclusion[i]``; their sum is its size."""
    sure, others = np.flatnonzero(inclusion >= 1), rng.permutation(np.flatnonzero(inclusion < 1))
    size = round(inclusion.sum()) - len(sure)
    ends = np.cumsum(inclusion[others])
    points = (rng.random() + np.arange(size)) * (ends[-1] / size if size else 0.0)
    return np.sort(np.concatenate([sure, others[np.searchsorted(ends, points, side="right")]]))
