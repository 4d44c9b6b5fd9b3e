"""Rules that move candidate data, each with one evaluation of the objective a step.

A client's program with several rounds of local steps takes long to compile, and its derivative three times as long.
So the objective stands in a compiled attack once: a line search is not a loop of its own, but a rule that may propose
the next point on the same line.
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
class Descent:
    """x <- x - lr grad."""

    lr: float

    def init(self, x: Tree, steps: int) -> Any:
        """Nothing to remember."""
        return ()

    def propose(self, x: Tree, value: Array, gradient: Tree, state: Any, steps: int) -> tuple[Tree, Any]:
        """(the next point, state), from the objective's value and gradient at x."""
        return jax.tree.map(lambda a, g: a - self.lr * g, x, gradient), state


@dataclass(frozen=True)
class SignedAdam:
    """Adam on the sign of the gradient; the step size falls to a tenth after 3/8, 5/8 and 7/8 of the steps."""

    lr: float

    def _adam(self, steps: int) -> optax.GradientTransformation:
        falls = {int(steps * share): 0.1 for share in (3 / 8, 5 / 8, 7 / 8)}
        return optax.adam(optax.piecewise_constant_schedule(self.lr, falls))

    def init(self, x: Tree, steps: int) -> Any:
        """Adam's moments."""
        return self._adam(steps).init(x)

    def propose(self, x: Tree, value: Array, gradient: Tree, state: Any, steps: int) -> tuple[Tree, Any]:
        """(the next point, state), from the objective's value and gradient at x."""
        updates, state = self._adam(steps).update(jax.tree.map(jnp.sign, gradient), state, x)
        return optax.apply_updates(x, updates), state


class _Line(NamedTuple):
    """L-BFGS on the way along a line from ``point``; vectors are flat."""

    point: Array
    value: Array
    gradient: Array
    direction: Array
    length: Array
    """Of the step that is being tried; the line search has narrowed it to between low and high."""
    low: Array
    high: Array
    tries: Array
    moves: Array
    """[m, d], the latest last; a pair whose product is zero is none."""
    changes: Array
    """[m, d]; of the gradient along the moves."""


@dataclass(frozen=True)
class LBFGS:
    """L-BFGS with a line search for the weak Wolfe conditions by bisection (Lewis and Overton 2013, Algorithm 4.6)."""

    memory: int = 20
    """Pairs of moves and changes of the gradient."""
    decrease: float = 1e-4
    curvature: float = 0.9
    most_tries: int = 20
    """On one line; then the search begins anew along the gradient."""

    def init(self, x: Tree, steps: int) -> _Line:
        """A line of length zero: whatever is found at its end is taken."""
        flat = ravel_pytree(x)[0]
        none, nothing = jnp.zeros_like(flat), jnp.zeros((self.memory, flat.size), flat.dtype)
        one, huge = jnp.ones((), flat.dtype), jnp.full((), jnp.inf, flat.dtype)
        return _Line(flat, huge, none, none, one, 0 * one, huge, jnp.int32(0), nothing, nothing)

    def propose(self, x: Tree, value: Array, gradient: Tree, line: _Line, steps: int) -> tuple[Tree, _Line]:
        """(the next point, state), from the objective's value and gradient at x."""
        at, back = ravel_pytree(x)
        slope = ravel_pytree(gradient)[0]
        before, after = line.gradient @ line.direction, slope @ line.direction
        lower = value <= jnp.where(line.value < jnp.inf, line.value + self.decrease * line.length * before, jnp.inf)
        low_enough = lower & jnp.isfinite(slope).all()
        taken = low_enough & (after >= self.curvature * before)
        tired = line.tries >= self.most_tries
        new = jax.lax.cond(
            taken | (tired & low_enough),
            lambda: self._turn(line, at, value, slope),
            lambda: jax.lax.cond(tired, lambda: self._anew(line), lambda: self._along(line, low_enough)),
        )
        return back(new.point + new.length * new.direction), new

    def _along(self, line: _Line, low_enough: Array) -> _Line:
        """Another point on the line: farther where it still falls steeply, nearer where it had risen."""
        low, high = jnp.where(low_enough, line.length, line.low), jnp.where(low_enough, line.high, line.length)
        length = jnp.where(high < jnp.inf, (low + high) / 2, 2 * low)
        return line._replace(length=length, low=low, high=high, tries=line.tries + 1)

    def _turn(self, line: _Line, at: Array, value: Array, gradient: Array) -> _Line:
        """A new line from a point that was taken."""
        move, change = at - line.point, gradient - line.gradient
        useful = (move @ change > 0) & (line.value < jnp.inf)
        push = lambda table, row: jnp.where(useful, jnp.roll(table, -1, 0).at[-1].set(row), table)  # noqa: E731
        moves, changes = push(line.moves, move), push(line.changes, change)
        return self._start(line, at, value, gradient, moves, changes)

    def _anew(self, line: _Line) -> _Line:
        """Along the gradient, with nothing remembered."""
        nothing = jnp.zeros_like(line.moves)
        return self._start(line, line.point, line.value, line.gradient, nothing, nothing)

    def _start(self, line: _Line, at: Array, value: Array, gradient: Array, moves: Array, changes: Array) -> _Line:
        direction = -_times_inverse(moves, changes, gradient)
        falls = direction @ gradient < 0
        length = jnp.linalg.norm(gradient)
        steepest = -gradient / jnp.where(length > 1, length, 1)
        direction = jnp.where(falls & (jnp.abs(moves).sum() > 0), direction, steepest)
        one, huge = jnp.ones_like(line.length), jnp.full_like(line.length, jnp.inf)
        return _Line(at, value, gradient, direction, one, 0 * one, huge, jnp.int32(0), moves, changes)


def _times_inverse(moves: Array, changes: Array, vector: Array) -> Array:
    """The inverse Hessian's estimate times a vector: the two loops of Nocedal (1980)."""
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


Optimizer = Descent | SignedAdam | LBFGS
