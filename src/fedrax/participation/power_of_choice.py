"""Power-of-choice: the candidates with the largest losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedrax.config.hyperparameters import PositiveInt
from fedrax.errors import FedraxError
from fedrax.participation.policy import ParticipationPolicy, Population


@dataclass(frozen=True)
class PowerOfChoice(ParticipationPolicy):
    """Power-of-choice (Cho, Wang and Joshi 2020): the S candidates with the largest losses.

    In each round, d candidates are drawn without replacement, with probabilities in proportion to their numbers of
    samples, and the S of them with the largest F_i(x) form the cohort. With ``ask`` (pi_pow-d of the paper) the
    candidates receive the current model and reply with their loss on all training samples; without it (pi_rpow-d), the
    loss that each reported when it last took part is used, and clients that have not taken part come first. d = S is
    sampling by numbers of samples; larger d converges faster to a point that favors clients with large losses.

    Example:
        >>> fedrax.Settings(cohort_size=5, participation=fedrax.participation.PowerOfChoice(candidates=15)).cohort_size
        5
    """

    candidates: PositiveInt = 20
    """d, the number of candidates, S or more; all clients if there are fewer."""
    ask: bool = True
    """Whether candidates are asked for the loss of the current model; otherwise the last reported losses are used."""

    @property
    def asks(self) -> bool:
        """Whether candidates are asked."""
        return self.ask

    def init(self, population: Population) -> np.ndarray:
        """The known loss of each client, float [N]: infinite before the first report."""
        if self.candidates < population.cohort_size:
            raise FedraxError(
                f"power-of-choice samples {population.cohort_size} clients among {self.candidates} candidates: set"
                " candidates to the cohort size or more"
            )
        return np.full(population.num_clients, np.inf)

    def _draw(self, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The candidates of a round."""
        chances = population.sizes / population.sizes.sum()
        size = min(self.candidates, population.num_clients)
        return rng.choice(population.num_clients, size, replace=False, p=chances)

    def clients_to_ask(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The candidates."""
        return self._draw(population, rng)

    def observe_losses(self, state: Any, round: int, clients: np.ndarray, losses: np.ndarray) -> np.ndarray:
        """The losses of the candidates; minus infinity for others, which cannot be sampled."""
        answers = np.full_like(state, -np.inf)
        answers[clients] = losses
        return answers

    def sample(self, state: Any, round: int, population: Population, rng: np.random.Generator) -> np.ndarray:
        """The S candidates with the largest losses; among equal ones those that were drawn first."""
        candidates = np.arange(population.num_clients) if self.ask else self._draw(population, rng)
        return candidates[np.argsort(-state[candidates], kind="stable")[: population.cohort_size]]

    def observe(self, state: Any, round: int, clients: np.ndarray, info: Mapping[str, np.ndarray]) -> np.ndarray:
        """The reported losses of the cohort, where they are used."""
        if self.ask:
            return state
        losses = state.copy()
        losses[clients] = reported(info, "loss", "power-of-choice without ask")
        return losses


def reported(info: Mapping[str, np.ndarray], name: str, policy: str) -> np.ndarray:
    """An entry of the clients' reports; raises FedraxError where the method reports none."""
    if name not in info:
        raise FedraxError(f"{policy} needs the clients' {name}, and the method reports {', '.join(info) or 'nothing'}")
    return info[name]
