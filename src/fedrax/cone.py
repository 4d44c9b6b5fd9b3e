"""The nearest vector with non-negative inner products: GradMA's quadratic program (Luo et al. 2023, Eq. 5 and 8).

Given p and columns M_1..M_m, p~ is the nearest vector to p with <p~, M_k> >= 0 for every k: p projected onto a
convex cone. Its dual has one multiplier z_k >= 0 a column, p~ = p + sum_k z_k M_k, and needs the vectors only
through their inner products: min over z >= 0 of z' G z / 2 + b' z with G = M' M and b = M' p. Nothing of size
d x d is formed.

The cone knows the columns by their directions alone, so they are scaled to length one first. A column that
depends on others to within rounding (a sine below about 1e-3 in float32, 1e-7 in float64) adds nothing to them.
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


def multipliers(gram: Array, inner: Array) -> Array:
    """z >= 0 [m], such that p + sum_k z_k M_k is the nearest vector to p in the cone.

    gram: [m, m], <M_j, M_k>. inner: [m], <M_k, p>. A column of length zero constrains nothing and gets zero.
    Exact to rounding; the z of dependent columns is one of several.
    """
    length = jnp.sqrt(jnp.diagonal(gram))
    inverse = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    cosines = gram * inverse[:, None] * inverse
    slopes = inner * inverse
    size = jnp.max(jnp.abs(slopes), initial=0)
    slopes = slopes / jnp.where(size > 0, size, 1)
    solve = _try_all if len(inner) <= _ENUMERATED else _pivot
    return solve(cosines, slopes) * inverse * size


def _dependent(dtype: jnp.dtype) -> float:
    """The squared sine between a column and the span of others below which it counts as one of them."""
    return 8 * _NOISE * float(jnp.finfo(dtype).eps)


def _try_all(gram: Array, inner: Array) -> Array:
    """Of all sets of columns taken as equalities the one that breaks no condition, or breaks it least."""
    m = len(inner)
    g = [[gram[j, k] for k in range(m)] for j in range(m)]
    b = [inner[k] for k in range(m)]
    best, least = [jnp.zeros_like(inner[0])] * m, jnp.max(-inner, initial=0)  # no column at all
    for size in range(1, m + 1):
        for chosen in combinations(range(m), size):
            z, independent = _equalities(g, b, chosen)
            slack = [b[j] + sum(g[j][k] * z[k] for k in chosen) for j in range(m) if j not in chosen]
            broken = jnp.maximum(0, -jnp.stack([*(z[k] for k in chosen), *slack]).min())
            better = independent & (broken < least)
            least = jnp.where(better, broken, least)
            best = [jnp.where(better, z[k] if k in chosen else 0, best[k]) for k in range(m)]
    return jnp.maximum(jnp.stack(best), 0)


def _equalities(g: list, b: list, chosen: tuple[int, ...]) -> tuple[dict[int, Array], Array]:
    """z on the chosen columns with <p~, M_k> = 0 for each of them, and whether these are independent.

    Gaussian elimination written out; its pivots are the squared sines to the columns before.
    """
    a = {j: {k: g[j][k] for k in chosen} for j in chosen}
    right = {j: -b[j] for j in chosen}
    independent = jnp.bool_(True)
    for i, j in enumerate(chosen):
        sound = a[j][j] > _dependent(right[j].dtype)
        independent &= sound
        a[j][j] = jnp.where(sound, a[j][j], 1)
        for row in chosen[i + 1 :]:
            factor = a[row][j] / a[j][j]
            right[row] = right[row] - factor * right[j]
            a[row] = {k: a[row][k] - factor * a[j][k] for k in chosen}
    z: dict[int, Array] = {}
    for j in reversed(chosen):
        z[j] = (right[j] - sum(a[j][k] * z[k] for k in z)) / a[j][j]
    return z, independent


class _Tableau(NamedTuple):
    """Where the search for the equalities stands."""

    table: Array
    """[m + 1, m + 1]: [[G, b], [b', 0]] swept on the columns taken as equalities. For those its last column is
    minus their multipliers, for the others the slack <p~, M_k>; the diagonal is the others' squared sine."""
    chosen: Array
    """bool [m]: taken as equalities."""
    z: Array
    """Multipliers, feasible at all times."""
    noise: Array
    """Rounding errors in the table: they grow with the square root of the chosen columns' inverse."""
    pivots: Array
    finished: Array


def _pivot(gram: Array, inner: Array) -> Array:
    """Lawson and Hanson's active-set method (1974, chapter 23), a principal pivot at a time.

    Each pivot is a rank-one update of the tableau. The objective falls with every column taken in, so no set
    comes twice; the bound on the pivots is for rounding's sake.
    """
    m = len(inner)
    table = jnp.block([[gram, inner[:, None]], [inner[None], jnp.zeros((1, 1), inner.dtype)]])
    noise = jnp.asarray(_NOISE * jnp.finfo(inner.dtype).eps, inner.dtype)
    start = _Tableau(table, jnp.zeros(m, bool), jnp.zeros_like(inner), noise, jnp.int32(0), jnp.bool_(False))

    def step(t: _Tableau) -> _Tableau:
        last, squared_sines = t.table[:m, m], jnp.diagonal(t.table)[:m]
        target = jnp.where(t.chosen, -last, 0)
        leaving = t.chosen & (target <= 0)
        blocked = leaving.any()
        # On the way from z to the target the first multiplier to reach zero leaves.
        fall = t.z - target
        share = jnp.where(leaving, t.z / jnp.where(fall > 0, fall, 1), jnp.inf)
        z = t.z - jnp.where(blocked, share.min(), 1) * fall
        # With the target reached, the column whose condition is broken most comes in.
        limit = jnp.maximum(8 * t.noise, _dependent(inner.dtype))
        broken = jnp.where(~t.chosen & (squared_sines > limit), -last, 0)
        index = jnp.where(blocked, share.argmin(), broken.argmax())
        table = _sweep(t.table, index, jnp.where(blocked, -1, 1).astype(inner.dtype))
        finished = ~blocked & (broken.max() <= t.noise)
        moved = _Tableau(
            table,
            t.chosen.at[index].set(~blocked),
            z.at[index].set(jnp.where(blocked, 0, z[index])),
            jnp.maximum(t.noise, noise * jnp.sqrt(jnp.abs(jnp.diagonal(table)[:m]).max())),
            t.pivots + 1,
            finished,
        )
        stay = t._replace(z=z, finished=finished)
        return jax.tree.map(lambda a, b: jnp.where(finished, a, b), stay, moved)

    end = jax.lax.while_loop(lambda t: ~t.finished & (t.pivots < 8 * m), step, start)
    return _polish(gram, inner, end)


def _sweep(table: Array, k: Array, sign: Array) -> Array:
    """Exchange variable k of the tableau with its slack; sign: 1 when its column comes in, -1 when it leaves."""
    pivot = table[k, k]
    row, column = table[k] / pivot, table[:, k]
    swept = table - jnp.outer(column, row)
    return swept.at[k].set(sign * row).at[:, k].set(sign * row).at[k, k].set(-1 / pivot)


def _polish(gram: Array, inner: Array, end: _Tableau) -> Array:
    """The multipliers of the set found, computed anew from the inner products: many pivots add up roundings.

    Of the two the ones that break the conditions less: near dependence the anew computed ones can be worse.
    """
    both = end.chosen[:, None] & end.chosen
    matrix = jnp.where(both, gram, jnp.eye(len(inner), dtype=inner.dtype))
    right = jnp.where(end.chosen, -inner, 0)
    factor = jax.scipy.linalg.cho_factor(matrix)
    z = jax.scipy.linalg.cho_solve(factor, right)
    z = jnp.maximum(z + jax.scipy.linalg.cho_solve(factor, right - matrix @ z), 0)

    def broken(z: Array) -> Array:
        slack = inner + gram @ z
        return jnp.abs(jnp.where(z > 0, slack, jnp.minimum(slack, 0))).max()

    return jnp.where(jnp.isfinite(z).all() & (broken(z) <= broken(end.z)), z, end.z)


def project(p: Tree, parts: Sequence[Tree], columns: Callable[..., tuple], by_leaf: bool = False) -> Tree:
    """p~: p projected onto the cone of vectors with non-negative inner products with some columns.

    parts: trees of p's shapes. columns: makes the columns of matching entries of the parts, entry by entry, so
    that a column which is a difference of two parts, say, is never written to memory. by_leaf: project every leaf
    by itself, instead of all as one vector.
    """
    leaves, structure = jax.tree.flatten(p)
    others = [jax.tree.leaves(part) for part in parts]
    products = jnp.stack([_products(columns, *arrays) for arrays in zip(leaves, *others, strict=True)])
    if not by_leaf:
        products = products.sum(0, keepdims=True)
    # The barrier: XLA would solve the program anew for every entry of the vector.
    z = jax.lax.optimization_barrier(jax.vmap(multipliers)(products[:, 1:, 1:], products[:, 1:, 0]))

    def moved(k: int, leaf: Array, *pieces: Array) -> Array:
        mine = z[k if by_leaf else 0]
        return (leaf + sum(mine[j] * column for j, column in enumerate(columns(*pieces)))).astype(leaf.dtype)

    return jax.tree.unflatten(
        structure, [moved(k, *arrays) for k, arrays in enumerate(zip(leaves, *others, strict=True))]
    )


def _products(columns: Callable[..., tuple], *arrays: Array) -> Array:
    """Inner products of the first array and the columns made of the others, with each other: [1 + m, 1 + m]."""

    def of(first: Array, *others: Array) -> Array:
        rows = jnp.stack([first, *columns(*others)])
        return jnp.matmul(rows, rows.T, precision=jax.lax.Precision.HIGHEST)

    return sum_over_blocks(of, *(a.reshape(-1) for a in arrays))
