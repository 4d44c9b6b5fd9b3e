"""Optimizers of candidate data that evaluate the objective once per step.

A client program with several rounds of local steps is slow to compile, and its derivative three times as slow.
Therefore a compiled attack contains the objective once: the line search of L-BFGS is no inner loop, but each of its
trials is a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrax.tree import Tree


@dataclass(frozen=True)
class GradientDescent:
    """Gradient descent: x <- x - lr grad."""

    lr: float

    def init(self, x: Tree, steps: int) -> Any:
        """The empty state."""
        return ()

    def propose(self, x: Tree, value: Array, gradient: Tree, state: Any, steps: int) -> tuple[Tree, Any]:
        """(the next point, state), from the objective's value and gradient at x."""
        return jax.tree.map(lambda a, g: a - self.lr * g, x, gradient), state


@dataclass(frozen=True)
class SignedAdam:
    """Adam on the sign of the gradient; the learning rate is divided by 10 after 3/8, 5/8 and 7/8 of the steps."""

    lr: float

    def _adam(self, steps: int) -> optax.GradientTransformation:
        """Adam with the schedule for ``steps`` steps."""
        falls = {int(steps * share): 0.1 for share in (3 / 8, 5 / 8, 7 / 8)}
        return optax.adam(optax.piecewise_constant_schedule(self.lr, falls))

    def init(self, x: Tree, steps: int) -> Any:
        """Adam's moments."""
        return self._adam(steps).init(x)

    def propose(self, x: Tree, value: Array, gradient: Tree, state: Any, steps: int) -> tuple[Tree, Any]:
        """(the next point, state), from the objective's value and gradient at x."""
        updates, state = self._adam(steps).update(jax.tree.map(jnp.sign, gradient), state, x)
        return optax.apply_updates(x, updates), state


class _LineSearch(NamedTuple):
    """State of L-BFGS in a line search from ``point``; vectors are flat, [d]."""

    point: Array
    value: Array
    gradient: Array
    direction: Array
    length: Array
    """Step length of the current trial."""
    low: Array
    """Lower end of the bracket of the step length."""
    high: Array
    """Upper end of the bracket."""
    tries: Array
    """Trials on this line."""
    moves: Array
    """Parameter differences [m, d], latest last; unused rows are zero."""
    changes: Array
    """Gradient differences [m, d] of ``moves``."""


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS with a line search for the weak Wolfe conditions by bisection (Lewis and Overton 2013, Algorithm 4.6)."""

    memory: int = 20
    """Number of stored pairs of parameter and gradient differences."""
    decrease: float = 1e-4
    """Constant of the sufficient decrease condition."""
    curvature: float = 0.9
    """Constant of the curvature condition."""
    max_tries: int = 20
    """Trials on one line, after which the search restarts along the negative gradient."""

    def init(self, x: Tree, steps: int) -> _LineSearch:
        """A line search whose first trial is always accepted."""
        flat = ravel_pytree(x)[0]
        zeros, no_pairs = jnp.zeros_like(flat), jnp.zeros((self.memory, flat.size), flat.dtype)
        one, infinity = jnp.ones((), flat.dtype), jnp.full((), jnp.inf, flat.dtype)
        return _LineSearch(flat, infinity, zeros, zeros, one, 0 * one, infinity, jnp.int32(0), no_pairs, no_pairs)

    def propose(self, x: Tree, value: Array, gradient: Tree, line: _LineSearch, steps: int) -> tuple[Tree, _LineSearch]:
        """(the next point, state), from the objective's value and gradient at x."""
        at, unravel = ravel_pytree(x)
        slope = ravel_pytree(gradient)[0]
        before, after = line.gradient @ line.direction, slope @ line.direction
        lower = value <= jnp.where(line.value < jnp.inf, line.value + self.decrease * line.length * before, jnp.inf)
        low_enough = lower & jnp.isfinite(slope).all()
        accepted = low_enough & (after >= self.curvature * before)
        exhausted = line.tries >= self.max_tries
        new = jax.lax.cond(
            accepted | (exhausted & low_enough),
            lambda: self._next_line(line, at, value, slope),
            lambda: jax.lax.cond(exhausted, lambda: self._restart(line), lambda: self._next_trial(line, low_enough)),
        )
        return unravel(new.point + new.length * new.direction), new

    def _next_trial(self, line: _LineSearch, low_enough: Array) -> _LineSearch:
        """The next trial on the line, by doubling the step length or bisecting the bracket."""
        low, high = jnp.where(low_enough, line.length, line.low), jnp.where(low_enough, line.high, line.length)
        length = jnp.where(high < jnp.inf, (low + high) / 2, 2 * low)
        return line._replace(length=length, low=low, high=high, tries=line.tries + 1)

    def _next_line(self, line: _LineSearch, at: Array, value: Array, gradient: Array) -> _LineSearch:
        """A new line search from an accepted point."""
        move, change = at - line.point, gradient - line.gradient
        useful = (move @ change > 0) & (line.value < jnp.inf)
        push = lambda table, row: jnp.where(useful, jnp.roll(table, -1, 0).at[-1].set(row), table)  # noqa: E731
        moves, changes = push(line.moves, move), push(line.changes, change)
        return self._start(line, at, value, gradient, moves, changes)

    def _restart(self, line: _LineSearch) -> _LineSearch:
        """A new line search along the negative gradient, without stored pairs."""
        no_pairs = jnp.zeros_like(line.moves)
        return self._start(line, line.point, line.value, line.gradient, no_pairs, no_pairs)

    def _start(
        self, line: _LineSearch, at: Array, value: Array, gradient: Array, moves: Array, changes: Array
    ) -> _LineSearch:
        """A line search along the L-BFGS direction, or along steepest descent if that is no descent direction."""
        direction = -_times_inverse(moves, changes, gradient)
        falls = direction @ gradient < 0
        length = jnp.linalg.norm(gradient)
        steepest = -gradient / jnp.where(length > 1, length, 1)
        direction = jnp.where(falls & (jnp.abs(moves).sum() > 0), direction, steepest)
        one, infinity = jnp.ones_like(line.length), jnp.full_like(line.length, jnp.inf)
        return _LineSearch(at, value, gradient, direction, one, 0 * one, infinity, jnp.int32(0), moves, changes)


def _times_inverse(moves: Array, changes: Array, vector: Array) -> Array:
    """The inverse Hessian estimate times a vector, by the two-loop recursion (Nocedal 1980)."""
    products = (moves * changes).sum(1)
    weights = jnp.where(products > 0, 1 / jnp.where(products > 0, products, 1), 0)

    def back(vector: Array, pair: tuple) -> tuple[Array, Array]:
        move, change, weight = pair
        share = weight * (move @ vector)
        return vector - share * change, share

    def forth(vector: Array, pair: tuple) -> tuple[Array, None]:
        move, change, weight, share = pair
        return vector + (share - weight * (change @ vector)) * move, None

    vector, shares = jax.lax.scan(back, vector, (moves, changes, weights), reverse=True)
    squared = changes[-1] @ changes[-1]
    vector = vector * jnp.where(squared > 0, products[-1] / jnp.where(squared > 0, squared, 1), 1)
    return jax.lax.scan(forth, vector, (moves, changes, weights, shares))[0]


Optimizer = GradientDescent | SignedAdam | LBFGS
"""The optimizers that `Attack` accepts."""
