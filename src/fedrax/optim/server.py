"""Server optimizers: steps on the cohort's mean update Delta = sum_i p_i Delta_i.

The adaptive rules are those of Reddi et al. 2021 (Adaptive Federated Optimization, Algorithm 2). They differ from
optax's rules of the same names, see each docstring. Any transformation of optax is a server optimizer too: it is
applied to the pseudo-gradient -Delta, as it is or as :class:`Optax`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.annotations import Converter
from fedrax.config.hyperparameters import Decay, Positive, hyperparameters
from fedrax.optim.optax_adapter import Optax, as_optimizer
from fedrax.optim.schedules import Constant, Schedule
from fedrax.tree import Tree


@hyperparameters
class SGD:
    """Server SGD: x <- x + lr * Delta; with momentum (FedAvgM): m <- momentum * m - Delta, x <- x - lr * m.

    The numbers are those of ``optax.sgd`` on the gradient -Delta.

    Example:
        >>> method = fedrax.FedAvg(server_optimizer=fedrax.optim.SGD(lr=1.0, momentum=0.9))
    """

    lr: Positive = 1.0
    """Server learning rate eta_g."""
    momentum: Decay | None = None
    """Momentum beta of FedAvgM; None for none."""
    schedule: Schedule = Constant()
    """Factor on ``lr`` by round."""

    def init(self, params: Tree) -> Tree:
        """Return the initial state: a momentum buffer of zeros.

        Args:
            params: The model's parameters.

        Returns:
            The buffer, or an empty tuple without momentum.
        """
        return () if self.momentum is None else tree.zeros_like(params)

    def step(self, params: Tree, state: Tree, delta: Tree, round: Array) -> tuple[Tree, Tree]:
        """Take one server step.

        Args:
            params: The global parameters x.
            state: The optimizer's state.
            delta: The mean update Delta.
            round: The round, from 0, for the schedule.

        Returns:
            The parameters and the state after the step.
        """
        lr = self.lr * self.schedule(round)
        if self.momentum is None:
            return tree.add_scaled(params, lr, delta), state
        state = jax.tree.map(lambda m, d: (self.momentum * m - d).astype(m.dtype), state, delta)
        return tree.add_scaled(params, -lr, state), state


class Moments(NamedTuple):
    """First and second moment of the mean updates."""

    m: Tree
    v: Tree


class _AdaptiveOptimizer:
    """Base of the adaptive rules: m <- b1 m + (1 - b1) Delta, v by ``second_moment``, x <- x + lr m / (sqrt(v) + tau).

    Subclasses have the fields and define ``second_moment``.
    """

    if TYPE_CHECKING:
        lr: Any
        b1: Any
        tau: Any
        schedule: Any

    def init(self, params: Tree) -> Moments:
        """Return the initial state: m = 0 and v = tau^2.

        Args:
            params: The model's parameters.

        Returns:
            The moments m and v.
        """
        return Moments(tree.zeros_like(params), jax.tree.map(lambda x: jnp.full_like(x, self.tau**2), params))

    def step(self, params: Tree, state: Moments, delta: Tree, round: Array) -> tuple[Tree, Moments]:
        """Take one server step.

        Args:
            params: The global parameters x.
            state: The optimizer's state.
            delta: The mean update Delta.
            round: The round, from 0, for the schedule.

        Returns:
            The parameters and the state after the step.
        """
        lr = self.lr * self.schedule(round)
        m = jax.tree.map(lambda m, d: (self.b1 * m + (1 - self.b1) * d).astype(m.dtype), state.m, delta)
        v = jax.tree.map(lambda v, d: self.second_moment(v, d * d).astype(v.dtype), state.v, delta)
        params = jax.tree.map(lambda x, m, v: (x + lr * m / (jnp.sqrt(v) + self.tau)).astype(x.dtype), params, m, v)
        return params, Moments(m, v)

    def second_moment(self, v: Array, d2: Array) -> Array:
        """Return v after a mean update.

        Args:
            v: The second moment before.
            d2: Delta^2.

        Returns:
            The second moment after.
        """
        raise NotImplementedError


@hyperparameters
class Adagrad(_AdaptiveOptimizer):
    """FedAdagrad: m <- b1 m + (1 - b1) Delta, v <- v + Delta^2, x <- x + lr m / (sqrt(v) + tau).

    ``optax.adagrad`` differs: it starts v at 0.1, adds its eps inside the square root and has no first moment.

    Example:
        >>> method = fedrax.FedAvg(server_optimizer=fedrax.optim.Adagrad(lr=0.1))
    """

    lr: Positive = 0.1
    """Server learning rate eta_g."""
    b1: Decay = 0.0
    """Decay of the first moment m."""
    tau: Positive = 1e-3
    """Degree of adaptivity: the larger, the nearer to SGD."""
    schedule: Schedule = Constant()
    """Factor on ``lr`` by round."""

    def second_moment(self, v: Array, d2: Array) -> Array:
        """Return v + Delta^2."""
        return v + d2


@hyperparameters
class Adam(_AdaptiveOptimizer):
    """FedAdam: m <- b1 m + (1 - b1) Delta, v <- b2 v + (1 - b2) Delta^2, x <- x + lr m / (sqrt(v) + tau).

    ``optax.adam`` differs: it starts v at 0 and corrects both moments for their bias. Flower's FedAdam starts v at 0
    and corrects its step.

    Example:
        >>> method = fedrax.FedAvg(server_optimizer=fedrax.optim.Adam(lr=0.01))
    """

    lr: Positive = 0.1
    """Server learning rate eta_g."""
    b1: Decay = 0.9
    """Decay of the first moment m."""
    b2: Decay = 0.99
    """Decay of the second moment v."""
    tau: Positive = 1e-3
    """Degree of adaptivity: the larger, the nearer to SGD."""
    schedule: Schedule = Constant()
    """Factor on ``lr`` by round."""

    def second_moment(self, v: Array, d2: Array) -> Array:
        """Return b2 v + (1 - b2) Delta^2."""
        return self.b2 * v + (1 - self.b2) * d2


@hyperparameters
class Yogi(Adam):
    """FedYogi: as :class:`Adam`, with v <- v - (1 - b2) Delta^2 sign(v - Delta^2).

    ``optax.yogi`` differs: it starts v at 1e-6 and corrects both moments for their bias.

    Example:
        >>> method = fedrax.FedAvg(server_optimizer=fedrax.optim.Yogi(lr=0.01))
    """

    def second_moment(self, v: Array, d2: Array) -> Array:
        """Return v - (1 - b2) Delta^2 sign(v - Delta^2)."""
        return v - (1 - self.b2) * d2 * jnp.sign(v - d2)


if TYPE_CHECKING:
    ServerOptimizer = SGD | Adagrad | Adam | Yogi | Optax | Any
else:
    ServerOptimizer = Annotated[SGD | Adagrad | Adam | Yogi | Optax, Converter(as_optimizer)]
"""The annotation of a field that holds a server optimizer; a gradient transformation is stored as :class:`Optax`."""
