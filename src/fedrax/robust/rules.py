"""Robust rules: what the server takes in place of the mean of the cohort's uploads, where some clients may lie.

Each is called as ``rule(cohort)`` in a phase that stacks uploads, and returns a tree of an upload's shapes. Norms and
distances run over a whole upload. One of your own is a class of hyper-parameters that is called so; where it counts
heads, let it have ``uniform_weights`` true.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.annotations import Bound
from fedrax.config.hyperparameters import NonNegativeInt, Positive, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Cohort
from fedrax.robust.sorting_network import sort_columns
from fedrax.tree import Tree

_HIGHEST = jax.lax.Precision.HIGHEST


def weighted(uploads: Tree, weights: Array) -> Tree:
    """sum_k weights_k u_k."""
    return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1, precision=_HIGHEST), uploads)


def _by_rank(cohort: Cohort, shares: Callable[[Array, Array], Array]) -> Tree:
    """Each coordinate's numbers in rising order, times ``shares`` of (rank [K], uploads n), and added up."""
    share = shares(jnp.arange(len(cohort.clients)), jnp.sum(cohort.real))

    def coordinates(u: Array) -> Array:
        ordered = sort_columns(jnp.where(_rows(cohort.real, u), u, jnp.inf))  # rows that hold none come last
        return jnp.sum(jnp.where(_rows(share > 0, u), ordered * _rows(share, u).astype(u.dtype), 0), axis=0)

    return jax.tree.map(coordinates, cohort.uploads)


def _rows(values: Array, like: Array) -> Array:
    """``values`` [K], to be used with ``like`` [K, ...]."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def norms(uploads: Tree) -> Array:
    """|u_k|, [K], of any numbers whose length is one."""
    leaves = [u for u in jax.tree.leaves(uploads) if u.size]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(u).reshape(len(u), -1), axis=1) for u in leaves]), axis=0)
    most = min(float(jnp.finfo(u.dtype).max) for u in leaves) ** 0.8  # whose inverse is not rounded to zero
    unit = jnp.where(largest > 0, jnp.minimum(largest, most), 1)
    return unit * jax.vmap(tree.norm)([u / _rows(unit, u) for u in leaves])


def from_the_middle(cohort: Cohort) -> tuple[Tree, Tree]:
    """(The upload whose length is in the middle, how far each is from it [K, ...]).

    What is no number, or too large to be squared, counts as the largest that can: a lie stays far away, and neither
    makes a distance between others infinite nor takes its digits.
    """
    leaves = jax.tree.leaves(cohort.uploads)
    largest = min(float(jnp.finfo(u.dtype).max) for u in leaves)
    limit = math.sqrt(largest / (64 * len(cohort.clients) * max(sum(u[0].size for u in leaves), 1)))
    bounded = jax.tree.map(lambda u: jnp.where(jnp.isnan(u), limit, jnp.clip(u, -limit, limit)), cohort.uploads)
    order = jnp.lexsort((cohort.clients, jnp.where(cohort.real, norms(bounded), jnp.inf)))
    place = order[(jnp.sum(cohort.real) - 1) // 2]
    middle = jax.tree.map(lambda u: u[place], bounded)
    return middle, jax.tree.map(lambda u, m: u - m, bounded, middle)


def squared_distances(cohort: Cohort) -> Array:
    """|u_j - u_k|^2, [K, K], from inner products of the centered vectors, which reduces cancellation."""

    def gram(u: Array) -> Array:
        flat = u.reshape(len(u), -1)
        return jnp.matmul(flat, flat.T, precision=_HIGHEST)

    products = jnp.asarray(sum(gram(u) for u in jax.tree.leaves(from_the_middle(cohort)[1])))
    products = (products + products.T) / 2  # alike both ways to the last bit
    squares = jnp.diagonal(products)
    return jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)


@hyperparameters
class Median:
    """The median of each coordinate; of an even number the mean of the two in the middle (Yin et al. 2018, Def. 1).

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Median())
        >>> method.rule.uniform_weights
        True
    """

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""

        def shares(rank: Array, n: Array) -> Array:
            return 0.5 * (rank == (n - 1) // 2) + 0.5 * (rank == n // 2)

        return _by_rank(cohort, shares)


@hyperparameters
class TrimmedMean:
    """The mean of each coordinate without its floor(trim n) least and as many greatest (Yin et al. 2018, Def. 2).

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.TrimmedMean(trim=0.1))
        >>> method.rule.trim
        0.1
    """

    trim: Annotated[float, Bound(ge=0, lt=0.5)] = 0.2
    """beta: the share taken off at either end."""

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""

        def shares(rank: Array, n: Array) -> Array:
            cut = jnp.floor(self.trim * n + 1e-4)  # 0.2 of 5 in float32 may come out below 1
            cut = jnp.minimum(cut, (n - 1) // 2)
            return ((rank >= cut) & (rank < n - cut)) / (n - 2 * cut)

        return _by_rank(cohort, shares)


@hyperparameters
class NormBound:
    """The mean of the uploads, each shortened to length ``bound`` where it is longer (Sun et al. 2019).

    One that holds what is no number, or none that is finite, counts as zero.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.NormBound(bound=5.0))
        >>> method.rule.bound
        5.0
    """

    bound: Positive = 1.0
    """Maximum Euclidean norm of an upload."""

    @property
    def uniform_weights(self) -> bool:
        """Any weights will do."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        lengths = norms(cohort.uploads)
        sound = jnp.isfinite(lengths)
        factors = jnp.where(lengths > self.bound, self.bound / jnp.where(lengths > 0, lengths, 1), 1)
        uploads = jax.tree.map(lambda u: jnp.where(_rows(sound, u), u, 0), cohort.uploads)
        return weighted(uploads, cohort.weights * jnp.where(sound, factors, 0))


@hyperparameters
class GeometricMedian:
    """argmin_z sum_k p_k |z - u_k|, by the smoothed Weiszfeld algorithm (RFA; Pillutla, Kakade and Harchaoui 2022).

    z <- sum_k b_k u_k / sum_k b_k with b_k = p_k / max(nu, |z - u_k|), ``iterations`` times, from the mean of the
    uploads, those shortened that are farther than the median from the one of median length: from the plain mean, a
    single lie can be so long that these steps do not lead back.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.GeometricMedian(iterations=4))
        >>> method.rule.iterations
        4
    """

    iterations: PositiveInt = 8
    """Number of Weiszfeld iterations."""
    nu: Positive = 1e-6
    """The shortest distance that is told from none."""

    @property
    def uniform_weights(self) -> bool:
        """Any weights will do."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        weights, count = cohort.weights, jnp.sum(cohort.real)
        middle, away = from_the_middle(cohort)

        def mean(factors: Array) -> Tree:
            total = jnp.sum(factors)
            return weighted(away, factors / jnp.where(total > 0, total, 1))

        def nearer(_: Array, z: Tree) -> Tree:
            distances = norms(jax.tree.map(lambda u, center: u - center, away, z))
            return mean(weights / jnp.maximum(self.nu, distances))

        lengths = norms(away)
        median = jnp.sort(jnp.where(cohort.real, lengths, jnp.inf))[count // 2 - (count == 1)]
        shortened = jnp.where(lengths > median, median / jnp.where(lengths > 0, lengths, 1), 1)
        start = weighted(away, weights * shortened / jnp.maximum(jnp.sum(weights), self.nu))
        return tree.add(middle, jax.lax.fori_loop(0, self.iterations, nearer, start))


@hyperparameters
class Krum:
    """The upload whose n - f - 2 nearest others are nearest, or the mean of the ``keep`` best (multi-Krum).

    n uploads, at most f of them lies; distances are squared and added up (Blanchard et al. 2017, section 4). The proof
    needs n > 2 f + 2; with fewer than one neighbor left, one is counted.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Krum(attackers=2, keep=3))
        >>> method.rule.attackers
        2
    """

    attackers: NonNegativeInt = 1
    """f."""
    keep: PositiveInt = 1
    """m of multi-Krum."""

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        real, count = cohort.real, jnp.sum(cohort.real)
        places = jnp.arange(len(real))
        pair = real[:, None] & real[None] & (places[:, None] != places[None])
        distances = jnp.sort(jnp.where(pair, squared_distances(cohort), jnp.inf), axis=1)
        near = places < jnp.maximum(count - self.attackers - 2, 1)
        scores = jnp.sum(jnp.where(near & jnp.isfinite(distances), distances, 0), axis=1)
        # Two that are each other's nearest score alike: then the client's number decides, in every order of the rows.
        best = jnp.lexsort((cohort.clients, jnp.where(real, scores, jnp.inf)))
        chosen = best[: self.keep]  # of those not chosen nothing counts, whatever they hold
        among = jnp.arange(len(chosen)) < count
        uploads = jax.tree.map(lambda u: u[chosen], cohort.uploads)
        return weighted(uploads, among / jnp.maximum(jnp.sum(among), 1))


Rule = Median | TrimmedMean | NormBound | GeometricMedian | Krum
"""Robust rules by name."""
