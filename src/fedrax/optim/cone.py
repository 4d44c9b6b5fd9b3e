"""The nearest vector with non-negative inner products: GradMA's quadratic program (Luo et al. 2023, Eq. 5 and 8).

Given p and columns M_1..M_m, p~ is the nearest vector to p with <p~, M_k> >= 0 for every k: p projected onto a
convex cone. Its dual has one multiplier z_k >= 0 a column, p~ = p + sum_k z_k M_k, and needs the vectors only
through their inner products: min over z >= 0 of z' G z / 2 + b' z with G = M' M and b = M' p. Nothing of size
d x d is formed.

The cone knows the columns by their directions alone, so they are scaled to length one first. A column that
depends on others to within rounding (its sine to their span is below 5e-3 in float32 and 6e-6 in float64, with at
most three columns below 3e-3 and 1e-7) adds nothing to them. Inner products lose digits where columns are nearly
dependent: :func:`project_to_cone` takes p~'s own and solves once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.tree import Tree, sum_over_blocks

_ENUMERATED = 3
"""Up to this many columns every set of them is tried; it takes no loop."""
_NOISE = 8
"""Rounding errors of an inner product of vectors of length one, in units of the last place."""
_NEARLY = 0.01
"""The squared sine between active columns below which the solution is refined: above it, it lost a digit at most."""


def multipliers(gram: Array, inner: Array) -> Array:
    """z >= 0 [m], such that p + sum_k z_k M_k is the nearest vector to p in the cone.

    gram: [m, m], <M_j, M_k>. inner: [m], <M_k, p>. A column of length zero constrains nothing and gets zero.
    Exact to rounding; the z of dependent columns is one of several.
    """
    return _solve(gram, inner).z


class _Solution(NamedTuple):
    """The multipliers, and how well their columns determine them."""

    z: Array
    """[m]."""
    sine: Array
    """The least squared sine between a column taken as an equality and the span of others; 1 where there is none."""


def _solve(gram: Array, inner: Array) -> _Solution:
    """The multipliers of columns of any lengths."""
    inverse = _inverse_lengths(gram)
    slopes = inner * inverse
    size = jnp.max(jnp.abs(slopes), initial=0)
    slopes = slopes / jnp.where(size > 0, size, 1)
    z, sine = (_try_all if len(inner) <= _ENUMERATED else _search)(_cosines(gram), slopes)
    return _Solution(z * inverse * size, sine)


def _inverse_lengths(gram: Array) -> Array:
    """1 / |M_k|, or zero where there is no length: [m]."""
    length = jnp.sqrt(jnp.diagonal(gram))
    return jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)


def _cosines(gram: Array) -> Array:
    """The inner products of the columns at length one: [m, m]."""
    inverse = _inverse_lengths(gram)
    return gram * inverse[:, None] * inverse


def _dependent(dtype: jnp.dtype) -> float:
    """The squared sine between a column and the span of others below which it counts as one of them."""
    return 8 * _NOISE * float(jnp.finfo(dtype).eps)


def _try_all(gram: Array, inner: Array) -> _Solution:
    """Of all sets of columns taken as equalities the one that breaks no condition, or breaks it least.

    Of several the first, which is one of the smallest.
    """
    m = len(inner)
    sets = [chosen for size in range(m + 1) for chosen in combinations(range(m), size)]
    taken = jnp.array([[k in chosen for k in range(m)] for chosen in sets], bool)
    z, sine = jax.vmap(_equalities, (None, None, 0))(gram, -inner, taken)
    slack = inner + jnp.sum(z[:, :, None] * gram, axis=1)
    broken = -jnp.min(jnp.where(taken, z, slack), axis=1, initial=0)
    broken = jnp.where(sine > _dependent(inner.dtype), broken, jnp.inf)
    # Which of several equals is the best is a matter of rounding errors, and XLA may round anew for every use: without
    # the barrier each multiplier may come from another set.
    z, sine, broken = jax.lax.optimization_barrier((z, sine, broken))
    best = jnp.argmin(broken)
    return _Solution(jnp.maximum(z[best], 0), sine[best])


def _equalities(gram: Array, slopes: Array, taken: Array) -> _Solution:
    """z on the columns taken, zero elsewhere, with sum_k <M_j, M_k> z_k = slopes_j for each of them.

    Gauss and Jordan's elimination; its pivots are the squared sines to the columns before.
    """
    m, none = len(slopes), jnp.eye(len(slopes), dtype=slopes.dtype)
    table = jnp.where(taken[:, None] & taken, gram, none)
    table = jnp.concatenate([table, jnp.where(taken, slopes, 0)[:, None]], axis=1)
    sine = jnp.ones((), slopes.dtype)
    for i in range(m):
        # The barrier: a small pivot computed twice is two numbers that are far apart.
        table = jax.lax.optimization_barrier(table)
        pivot = table[i, i]
        sine = jnp.minimum(sine, pivot)
        row = table[i] / jnp.where(pivot > _dependent(slopes.dtype), pivot, 1)
        table = (table - table[:, i, None] * row).at[i].set(row)
    return _Solution(table[:, m], sine)


class _Search(NamedTuple):
    """Where the search for the equalities stands."""

    table: Array
    """[m + 1, m + 1]: [[G, b], [b', 0]] swept on the columns taken as equalities. For those its last column is
    minus their multipliers, for the others the slack <p~, M_k>; the diagonal is the others' squared sine."""
    chosen: Array
    """bool [m]: taken as equalities."""
    unswept: Array
    """bool [m]: those of them on which the table, begun anew, has still to be swept."""
    z: Array
    """Multipliers, none negative at any time."""
    steps: Array
    finished: Array


def _search(gram: Array, inner: Array) -> _Solution:
    """Lawson and Hanson's active-set method (1974, chapter 23) on a tableau.

    A column that comes in is one sweep, a rank-one update. When one leaves, the table is begun anew: undoing a sweep
    on a small pivot would leave its rounding errors behind. The objective falls with every column taken in, so no
    set comes twice; the bound on the steps is for rounding's sake. (No library's factorization: with a device a core,
    LAPACK's own threads would fight over the cores.)
    """
    m = len(inner)
    eps = float(jnp.finfo(inner.dtype).eps)
    table = jnp.block([[gram, inner[:, None]], [inner[None], jnp.zeros((1, 1), inner.dtype)]])

    def step(at: _Search) -> _Search:
        last, diagonal = at.table[:m, m], jnp.diagonal(at.table)[:m]
        ready = ~at.unswept.any()
        target = jnp.where(at.chosen, -last, 0)
        leaving = at.chosen & (target <= 0)
        blocked = ready & leaving.any()
        # On the way from z to the target the first multiplier to reach zero leaves.
        fall = at.z - target
        share = jnp.where(leaving, at.z / jnp.where(fall > 0, fall, 1), jnp.inf)
        z = jnp.where(ready, at.z - jnp.where(blocked, share.min(), 1) * fall, at.z)
        # With the target reached, the column whose condition is broken most comes in.
        broken = jnp.where(~at.chosen & (diagonal > eps ** (2 / 3)), -last, 0)
        # Rounding errors grow with the square root of the chosen columns' inverse, which the diagonal holds.
        noise = _NOISE * eps * jnp.sqrt(jnp.where(at.chosen, -diagonal, 1).max())
        finished = ready & ~blocked & (broken.max() <= noise)

        out, into = share.argmin(), jnp.where(ready, broken.argmax(), at.unswept.argmax())
        stays = at.chosen.at[out].set(False)
        return _Search(
            table=jnp.where(blocked, table, jnp.where(finished, at.table, _sweep(at.table, into))),
            chosen=jnp.where(blocked, stays, at.chosen.at[into].set(at.chosen[into] | ~finished)),
            unswept=jnp.where(blocked, stays, at.unswept.at[into].set(False)),
            z=jnp.where(blocked, z.at[out].set(0), z),
            steps=at.steps + ready,
            finished=finished,
        )

    none = jnp.zeros(m, bool)
    start = _Search(table, none, none, jnp.zeros_like(inner), jnp.int32(0), jnp.bool_(False))
    end = jax.lax.while_loop(lambda at: ~at.finished & (at.steps < 8 * m), step, start)
    inverse = jnp.where(end.chosen, -jnp.diagonal(end.table)[:m], 1)
    return _Solution(end.z, 1 / jnp.max(inverse))


def _sweep(table: Array, k: Array) -> Array:
    """Exchange variable k of the tableau with its slack."""
    pivot = table[k, k]
    row, column = table[k] / pivot, table[:, k]
    swept = table - jnp.outer(column, row)
    return swept.at[k].set(row).at[:, k].set(row).at[k, k].set(-1 / pivot)


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

    Example:
        >>> p, column = jnp.array([-1.0, 2.0]), jnp.array([1.0, 0.0])
        >>> fedrax.optim.project_to_cone(p, [column], lambda c: (c,)).tolist()
        [0.0, 2.0]
    """
    leaves, structure = jax.tree.flatten(p)
    entries = list(zip(leaves, *(jax.tree.leaves(part) for part in parts), strict=True))
    products = _gathered([_products(columns, *arrays) for arrays in entries], by_leaf)
    gram, inner = products[:, 1:, 1:], products[:, 1:, 0]
    # The barrier: XLA would solve the program anew for every entry of the vector.
    z, sine = jax.lax.optimization_barrier(jax.vmap(_solve)(gram, inner))
    of_leaf = lambda z, k: z[k if by_leaf else 0]  # noqa: E731

    given = jax.lax.stop_gradient((entries, gram, z, sine))

    def refined(_: Array, z: Array) -> Array:
        entries, gram, _, sine = given
        slopes = [_slopes(columns, of_leaf(z, k), *arrays) for k, arrays in enumerate(entries)]
        better = jax.vmap(_refined)(gram, z, _gathered(slopes, by_leaf))
        return jnp.where(sine[:, None] < _NEARLY, better, z)

    # Not a condition, of which vmap would take both sides; and of z alone, so that p~ is not written to memory twice.
    z = _rounded_as(z, jax.lax.fori_loop(0, (sine < _NEARLY).any().astype(jnp.int32), refined, given[2]))
    moved = [_moved(columns, of_leaf(z, k), *arrays).astype(arrays[0].dtype) for k, arrays in enumerate(entries)]
    return jax.tree.unflatten(structure, moved)


@jax.custom_jvp
def _rounded_as(z: Array, refined: Array) -> Array:
    """``refined``, which is z but for rounding errors, with the derivative of z: a loop has none in reverse mode."""
    return refined


@_rounded_as.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]


def _gathered(of_leaves: list[Array], by_leaf: bool) -> Array:
    """What each leaf says, [leaves, ...], or their sum, [1, ...]."""
    stacked = jnp.stack(of_leaves)
    return stacked if by_leaf else stacked.sum(0, keepdims=True)


def _moved(columns: Callable[..., tuple], z: Array, leaf: Array, *others: Array) -> Array:
    """A leaf of p~."""
    return leaf + sum(z[j] * column for j, column in enumerate(columns(*others)))


def _products(columns: Callable[..., tuple], *arrays: Array) -> Array:
    """Inner products of the first array and the columns made of the others, with each other: [1 + m, 1 + m]."""

    def of(first: Array, *others: Array) -> Array:
        rows = jnp.stack([first, *columns(*others)])
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    return sum_over_blocks(of, *(a.reshape(-1) for a in arrays))


def _slopes(columns: Callable[..., tuple], z: Array, *arrays: Array) -> Array:
    """Inner products of p~, itself and not by its parts, with the columns: [m]."""

    def of(*pieces: Array) -> Array:
        rows = jnp.stack(columns(*pieces[1:]))
        return jnp.matmul(rows, _moved(columns, z, *pieces), precision=jax.lax.Precision.HIGHEST)

    return sum_over_blocks(of, *(a.reshape(-1) for a in arrays))


def _refined(gram: Array, z: Array, slopes: Array) -> Array:
    """z, corrected so that the columns taken as equalities have no inner product with p~ any more.

    Solved from products, these are off by rounding errors over the columns' sine.
    """
    inverse = _inverse_lengths(gram)
    return jnp.maximum(z + _equalities(_cosines(gram), -slopes * inverse, z > 0).z * inverse, 0)
