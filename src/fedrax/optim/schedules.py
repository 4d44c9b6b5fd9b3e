"""Factors that multiply step sizes (and clipping thresholds, which move with them) as rounds go by.

Rounds are counted from 0: the first one has the step size itself. (Events count from 1.)
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import Fraction, NonNegative, NonNegativeInt, PositiveInt, hyperparameters


@hyperparameters
class Constant:
    """The same step size in every round."""

    def __call__(self, round: Array) -> Array | float:
        return 1.0


@hyperparameters
class StepDecay:
    """Multiply by ``factor`` when so many rounds are over as each of the ``milestones`` says.

    With 100, from round 101 of the events on.
    """

    factor: Fraction = 0.1
    milestones: tuple[NonNegativeInt, ...] = ()

    def __call__(self, round: Array) -> Array:
        passed = sum((round >= milestone for milestone in self.milestones), jnp.zeros((), jnp.int32))
        return jnp.asarray(self.factor, float) ** passed


@hyperparameters
class ExponentialDecay:
    """Multiply by ``factor`` after every round."""

    factor: Fraction = 0.99

    def __call__(self, round: Array) -> Array:
        return jnp.asarray(self.factor, float) ** round


@hyperparameters
class InverseDecay:
    """1 / (1 + rate * round), where the first round is 0."""

    rate: NonNegative = 0.01

    def __call__(self, round: Array) -> Array:
        return 1 / (1 + self.rate * round)


@hyperparameters
class CosineDecay:
    """Half a cosine from 1 to ``final`` over ``rounds`` rounds, ``final`` afterwards."""

    rounds: PositiveInt = 100
    final: Fraction = 0.0

    def __call__(self, round: Array) -> Array:
        progress = jnp.minimum(jnp.asarray(round, float) / self.rounds, 1.0)
        return self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


Schedule = Constant | StepDecay | ExponentialDecay | InverseDecay | CosineDecay
