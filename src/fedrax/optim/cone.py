"""Projection onto a cone of non-negative inner products: GradMA's quadratic program (Luo et al. 2023, Eq. 5 and 8).

Given p and columns M_1..M_m, p~ is the nearest vector to p with <p~, M_k> >= 0 for every k: the projection of p onto
a convex cone. Its dual has one multiplier z_k >= 0 for each column, p~ = p + sum_k z_k M_k, and needs the vectors only
through their inner products: min over z >= 0 of z' G z / 2 + b' z with G = M' M and b = M' p. No d x d matrix is
formed.

The cone depends only on the directions of the columns, so they are normalized first. A column is ignored if it depends
linearly on others to within rounding: the sine of its angle to their span is below 5e-3 in float32 and 6e-6 in float64,
or 3e-3 and 1e-7 with at most three columns. Inner products of nearly dependent columns lose digits:
:func:`project_to_cone` then computes those of p~ itself and solves a second time (iterative refinement).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.tree import Tree, sum_over_blocks

_MAX_ENUMERATED = 3
"""Up to this many columns every active set is tried, which needs no loop; the number of sets is 2^m."""
_ROUNDING = 8
"""Assumed rounding error of an inner product of unit vectors, in units of the machine epsilon."""
_REFINED_BELOW = 0.01
"""Squared sine between active columns below which the solution is refined; above, it loses at most one digit."""


def multipliers(gram: Array, inner: Array) -> Array:
    """Solve the dual problem: z >= 0 [m] such that p + sum_k z_k M_k is the projection of p onto the cone.

    The solution is exact to rounding. With linearly dependent columns it is one of several.

    Args:
        gram: inner products <M_j, M_k>, [m, m].
        inner: inner products <M_k, p>, [m].

    Returns:
        The multipliers z; zero for a column of norm zero, which is no constraint.
    """
    return _solve(gram, inner).z


class _Solution(NamedTuple):
    """The multipliers and their conditioning."""

    z: Array
    """Multipliers, [m]."""
    sine: Array
    """The smallest squared sine of the angle between an active column and the span of the others; 1 for none."""


def _solve(gram: Array, inner: Array) -> _Solution:
    """The solution for columns of any norms, by that for normalized columns."""
    inverse = _inverse_norms(gram)
    slopes = inner * inverse
    size = jnp.max(jnp.abs(slopes), initial=0)
    slopes = slopes / jnp.where(size > 0, size, 1)
    z, sine = (_enumerate_active_sets if len(inner) <= _MAX_ENUMERATED else _active_set_method)(_cosines(gram), slopes)
    return _Solution(z * inverse * size, sine)


def _inverse_norms(gram: Array) -> Array:
    """1 / |M_k|, [m]; zero where the norm is zero."""
    norm = jnp.sqrt(jnp.diagonal(gram))
    return jnp.where(norm > 0, 1 / jnp.where(norm > 0, norm, 1), 0)


def _cosines(gram: Array) -> Array:
    """Inner products of the normalized columns, [m, m]."""
    inverse = _inverse_norms(gram)
    return gram * inverse[:, None] * inverse


def _dependence_threshold(dtype: jnp.dtype) -> float:
    """Squared sine of a column to the span of others below which it counts as linearly dependent."""
    return 8 * _ROUNDING * float(jnp.finfo(dtype).eps)


def _enumerate_active_sets(gram: Array, inner: Array) -> _Solution:
    """The solution of the active set that violates the optimality conditions least; the smallest one of ties."""
    m = len(inner)
    sets = [chosen for size in range(m + 1) for chosen in combinations(range(m), size)]
    active = jnp.array([[k in chosen for k in range(m)] for chosen in sets], bool)
    z, sine = jax.vmap(_solve_active, (None, None, 0))(gram, -inner, active)
    slack = inner + jnp.sum(z[:, :, None] * gram, axis=1)
    violation = -jnp.min(jnp.where(active, z, slack), axis=1, initial=0)
    violation = jnp.where(sine > _dependence_threshold(inner.dtype), violation, jnp.inf)
    # Rounding errors decide between nearly equal violations, and XLA may compute them differently for each use:
    # without the barrier the multipliers may come from different sets.
    z, sine, violation = jax.lax.optimization_barrier((z, sine, violation))
    best = jnp.argmin(violation)
    return _Solution(jnp.maximum(z[best], 0), sine[best])


def _solve_active(gram: Array, slopes: Array, active: Array) -> _Solution:
    """Solve sum_k <M_j, M_k> z_k = slopes_j for the active columns; z is zero for the others.

    Gauss-Jordan elimination, whose pivots are the squared sines to the span of the previous columns.
    """
    m, identity = len(slopes), jnp.eye(len(slopes), dtype=slopes.dtype)
    table = jnp.where(active[:, None] & active, gram, identity)
    table = jnp.concatenate([table, jnp.where(active, slopes, 0)[:, None]], axis=1)
    sine = jnp.ones((), slopes.dtype)
    for i in range(m):
        # Without the barrier, XLA may compute a small pivot twice, with results that differ much.
        table = jax.lax.optimization_barrier(table)
        pivot = table[i, i]
        sine = jnp.minimum(sine, pivot)
        row = table[i] / jnp.where(pivot > _dependence_threshold(slopes.dtype), pivot, 1)
        table = (table - table[:, i, None] * row).at[i].set(row)
    return _Solution(table[:, m], sine)


class _ActiveSetState(NamedTuple):
    """Loop state of the active-set method."""

    table: Array
    """Tableau [m + 1, m + 1]: [[G, b], [b', 0]] swept on the active columns. In its last column, active columns have
    minus their multiplier and the others their slack <p~, M_k>; its diagonal has the squared sines of the others."""
    active: Array
    """bool [m], the active set."""
    unswept: Array
    """bool [m], the active columns on which the restarted tableau has not been swept yet."""
    z: Array
    """Multipliers [m], non-negative in every step."""
    steps: Array
    """Number of steps, int32."""
    finished: Array
    """Whether the solution is found, bool."""


def _active_set_method(gram: Array, inner: Array) -> _Solution:
    """Lawson and Hanson's active-set method (1974, chapter 23) on a tableau.

    Adding a column to the active set is one sweep of the tableau, a rank-one update. Removing one restarts the tableau,
    because undoing a sweep on a small pivot would keep its rounding errors. The objective decreases with every column
    added, so that no active set occurs twice; the bound on the steps is for rounding errors. (LAPACK's factorizations
    are not used, because their threads compete for the cores where each core is a device.)
    """
    m = len(inner)
    eps = float(jnp.finfo(inner.dtype).eps)
    table = jnp.block([[gram, inner[:, None]], [inner[None], jnp.zeros((1, 1), inner.dtype)]])

    def step(at: _ActiveSetState) -> _ActiveSetState:
        last, diagonal = at.table[:m, m], jnp.diagonal(at.table)[:m]
        ready = ~at.unswept.any()
        target = jnp.where(at.active, -last, 0)
        leaving = at.active & (target <= 0)
        blocked = ready & leaving.any()
        # The first multiplier that reaches zero on the way from z to the target leaves the active set.
        fall = at.z - target
        share = jnp.where(leaving, at.z / jnp.where(fall > 0, fall, 1), jnp.inf)
        z = jnp.where(ready, at.z - jnp.where(blocked, share.min(), 1) * fall, at.z)
        # If the target is reached, the column with the largest violation is added.
        violation = jnp.where(~at.active & (diagonal > eps ** (2 / 3)), -last, 0)
        # Rounding errors grow with the square root of the inverse Gram matrix, which the diagonal has.
        rounding = _ROUNDING * eps * jnp.sqrt(jnp.where(at.active, -diagonal, 1).max())
        finished = ready & ~blocked & (violation.max() <= rounding)

        out, into = share.argmin(), jnp.where(ready, violation.argmax(), at.unswept.argmax())
        remaining = at.active.at[out].set(False)
        return _ActiveSetState(
            table=jnp.where(blocked, table, jnp.where(finished, at.table, _sweep(at.table, into))),
            active=jnp.where(blocked, remaining, at.active.at[into].set(at.active[into] | ~finished)),
            unswept=jnp.where(blocked, remaining, at.unswept.at[into].set(False)),
            z=jnp.where(blocked, z.at[out].set(0), z),
            steps=at.steps + ready,
            finished=finished,
        )

    none = jnp.zeros(m, bool)
    start = _ActiveSetState(table, none, none, jnp.zeros_like(inner), jnp.int32(0), jnp.bool_(False))
    end = jax.lax.while_loop(lambda at: ~at.finished & (at.steps < 8 * m), step, start)
    inverse = jnp.where(end.active, -jnp.diagonal(end.table)[:m], 1)
    return _Solution(end.z, 1 / jnp.max(inverse))


def _sweep(table: Array, k: Array) -> Array:
    """Exchange variable k of the tableau with its slack."""
    pivot = table[k, k]
    row, column = table[k] / pivot, table[:, k]
    swept = table - jnp.outer(column, row)
    return swept.at[k].set(row).at[:, k].set(row).at[k, k].set(-1 / pivot)


@checked_arguments
def project_to_cone(p: Tree, parts: Sequence[Tree], columns: Callable[..., tuple], by_leaf: bool = False) -> Tree:
    """Project a vector onto the cone of vectors with non-negative inner products with given columns.

    Args:
        p: The vector, a pytree.
        parts: Pytrees of the shapes of ``p``.
        columns: Makes the columns from matching entries of the parts, entry by entry, so that a column such as the
            difference of two parts is never written to memory.
        by_leaf: Project every leaf on its own, instead of all leaves as one vector.

    Returns:
        The projection, a pytree of the shapes of ``p``.

    Raises:
        FedraxError: a part has another tree structure than ``p``.

    Example:
        >>> p, column = jnp.array([-1.0, 2.0]), jnp.array([1.0, 0.0])
        >>> fedrax.optim.project_to_cone(p, [column], lambda c: (c,)).tolist()
        [0.0, 2.0]
    """
    leaves, structure = jax.tree.flatten(p)
    if any(jax.tree.structure(part) != structure for part in parts):
        raise FedraxError(f"project_to_cone needs parts of the tree structure of p, {structure}")
    entries = list(zip(leaves, *(jax.tree.leaves(part) for part in parts), strict=True))
    products = _gathered([_products(columns, *arrays) for arrays in entries], by_leaf)
    gram, inner = products[:, 1:, 1:], products[:, 1:, 0]
    # Without the barrier, XLA fuses the solver into the update and repeats it for every entry of the vector.
    z, sine = jax.lax.optimization_barrier(jax.vmap(_solve)(gram, inner))

    def of_leaf(z: Array, k: int) -> Array:
        return z[k if by_leaf else 0]

    constants = jax.lax.stop_gradient((entries, gram, z, sine))

    def refine(_: Array, z: Array) -> Array:
        entries, gram, _, sine = constants
        slopes = [_slopes(columns, of_leaf(z, k), *arrays) for k, arrays in enumerate(entries)]
        refined = jax.vmap(_refined)(gram, z, _gathered(slopes, by_leaf))
        return jnp.where(sine[:, None] < _REFINED_BELOW, refined, z)

    # A loop of at most one iteration, not a cond: vmap would compute both branches. It refines z and not p~, so that p~
    # is written to memory once.
    needed = (sine < _REFINED_BELOW).any().astype(jnp.int32)
    z = _with_derivative_of(z, jax.lax.fori_loop(0, needed, refine, constants[2]))
    projected = [
        _projected(columns, of_leaf(z, k), *arrays).astype(arrays[0].dtype) for k, arrays in enumerate(entries)
    ]
    return jax.tree.unflatten(structure, projected)


@jax.custom_jvp
def _with_derivative_of(z: Array, refined: Array) -> Array:
    """``refined`` with the derivative of z, from which it differs by rounding: a loop has none in reverse mode."""
    return refined


@_with_derivative_of.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]


def _gathered(of_leaves: list[Array], by_leaf: bool) -> Array:
    """Values of all leaves stacked, [leaves, ...], or summed, [1, ...]."""
    stacked = jnp.stack(of_leaves)
    return stacked if by_leaf else stacked.sum(0, keepdims=True)


def _projected(columns: Callable[..., tuple], z: Array, leaf: Array, *others: Array) -> Array:
    """A leaf of the projection p~ = p + sum_k z_k M_k."""
    return leaf + sum(z[j] * column for j, column in enumerate(columns(*others)))


def _products(columns: Callable[..., tuple], *arrays: Array) -> Array:
    """Inner products of p and the columns, [1 + m, 1 + m], for one leaf."""

    def of_block(first: Array, *others: Array) -> Array:
        rows = jnp.stack([first, *columns(*others)])
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    return sum_over_blocks(of_block, *(a.reshape(-1) for a in arrays))


def _slopes(columns: Callable[..., tuple], z: Array, *arrays: Array) -> Array:
    """Inner products of p~ with the columns, [m], computed from p~ and not from inner products, for one leaf."""

    def of_block(*blocks: Array) -> Array:
        rows = jnp.stack(columns(*blocks[1:]))
        return jnp.matmul(rows, _projected(columns, z, *blocks), precision=jax.lax.Precision.HIGHEST)

    return sum_over_blocks(of_block, *(a.reshape(-1) for a in arrays))


def _refined(gram: Array, z: Array, slopes: Array) -> Array:
    """One step of iterative refinement: make the inner products ``slopes`` of p~ with the active columns zero."""
    inverse = _inverse_norms(gram)
    return jnp.maximum(z + _solve_active(_cosines(gram), -slopes * inverse, z > 0).z * inverse, 0)
