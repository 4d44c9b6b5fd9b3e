"""What the server does with the cohort's mean update Delta = sum_i p_i Delta_i.

The adaptive rules follow Reddi et al. 2021 (Adaptive Federated Optimization, Algorithm 2): no bias correction,
v starts at tau^2, and tau is added outside the square root. optax's rules of the same names differ: adam and yogi
correct the biases and start v at 0 and 1e-6, adagrad adds its eps inside the root and starts v at 0.1. So do Flower's:
their v starts at 0, and the step of FedAdam, there alone, is corrected for the biases.
:class:`Optax` brings any of optax's optimizers, applied to the pseudo-gradient -Delta.
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
    """x <- x + lr * Delta; with momentum (FedAvgM): m <- momentum * m - Delta, x <- x - lr * m."""

    lr: Positive = 1.0
    """Server step size eta_g."""
    momentum: Decay | None = None
    """beta of FedAvgM."""
    schedule: Schedule = Constant()

    def init(self, params: Tree) -> Tree:
        """The momentum buffer, zero, or nothing."""
        return () if self.momentum is None else tree.zeros_like(params)

    def step(self, params: Tree, state: Tree, delta: Tree, round: Array) -> tuple[Tree, Tree]:
        """(parameters, state) after one server step on the mean update ``delta``."""
        lr = self.lr * self.schedule(round)
        if self.momentum is None:
            return tree.add_scaled(params, lr, delta), state
        state = jax.tree.map(lambda m, d: (self.momentum * m - d).astype(m.dtype), state, delta)
        return tree.add_scaled(params, -lr, state), state


class Moments(NamedTuple):
    """First and second moment of the mean updates."""

    m: Tree
    v: Tree


def _adaptive(rule: Any, params: Tree, state: Moments, delta: Tree, second: Any, round: Array) -> tuple[Tree, Moments]:
    """m <- b1 m + (1 - b1) Delta; v <- second(v, Delta^2); x <- x + lr m / (sqrt(v) + tau)."""
    lr = rule.lr * rule.schedule(round)
    m = jax.tree.map(lambda m, d: (rule.b1 * m + (1 - rule.b1) * d).astype(m.dtype), state.m, delta)
    v = jax.tree.map(lambda v, d: second(v, d * d).astype(v.dtype), state.v, delta)
    params = jax.tree.map(lambda x, m, v: (x + lr * m / (jnp.sqrt(v) + rule.tau)).astype(x.dtype), params, m, v)
    return params, Moments(m, v)


def _moments(params: Tree, tau: Any) -> Moments:
    return Moments(tree.zeros_like(params), jax.tree.map(lambda x: jnp.full_like(x, tau**2), params))


@hyperparameters
class Adagrad:
    """FedAdagrad: v <- v + Delta^2."""

    lr: Positive = 0.1
    b1: Decay = 0.0
    tau: Positive = 1e-3
    schedule: Schedule = Constant()

    def init(self, params: Tree) -> Moments:
        """m = 0, v = tau^2."""
        return _moments(params, self.tau)

    def step(self, params: Tree, state: Moments, delta: Tree, round: Array) -> tuple[Tree, Moments]:
        """(parameters, state) after one server step."""
        return _adaptive(self, params, state, delta, lambda v, d2: v + d2, round)


@hyperparameters
class Adam:
    """FedAdam: v <- b2 v + (1 - b2) Delta^2."""

    lr: Positive = 0.1
    b1: Decay = 0.9
    b2: Decay = 0.99
    tau: Positive = 1e-3
    schedule: Schedule = Constant()

    def init(self, params: Tree) -> Moments:
        """m = 0, v = tau^2."""
        return _moments(params, self.tau)

    def step(self, params: Tree, state: Moments, delta: Tree, round: Array) -> tuple[Tree, Moments]:
        """(parameters, state) after one server step."""
        return _adaptive(self, params, state, delta, self.second_moment, round)

    def second_moment(self, v: Array, d2: Array) -> Array:
        """v after a mean update whose square is ``d2``."""
        return self.b2 * v + (1 - self.b2) * d2


@hyperparameters
class Yogi(Adam):
    """FedYogi: as FedAdam, with v <- v - (1 - b2) Delta^2 sign(v - Delta^2)."""

    def second_moment(self, v: Array, d2: Array) -> Array:
        """v after a mean update whose square is ``d2``."""
        return v - (1 - self.b2) * d2 * jnp.sign(v - d2)


if TYPE_CHECKING:
    ServerOptimizer = SGD | Adagrad | Adam | Yogi | Optax | Any
else:
    ServerOptimizer = Annotated[SGD | Adagrad | Adam | Yogi | Optax, Converter(as_optimizer)]
"""The annotation of a field that holds a server optimizer; a gradient transformation is stored as :class:`Optax`."""
