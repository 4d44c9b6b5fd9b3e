"""Robust aggregation rules, which replace the mean of the cohort's uploads where some clients may be malicious.

A rule is called as ``rule(cohort)`` with the stacked uploads of a cohort and returns a tree in the shapes of one
upload. Norms and distances are those of whole uploads. A user-defined rule is a class of hyper-parameters with this
``__call__``; if it ignores aggregation weights, its ``uniform_weights`` is True.
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


def weighted_sum(uploads: Tree, weights: Array) -> Tree:
    """sum_k weights_k u_k of stacked uploads [K, ...]."""
    return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1, precision=_HIGHEST), uploads)


def _order_statistics_mean(cohort: Cohort, weights_of: Callable[[Array, Array], Array]) -> Tree:
    """Weighted sum of each coordinate's order statistics; ``weights_of``: (rank [K], number of uploads n) -> [K]."""
    weights = weights_of(jnp.arange(len(cohort.clients)), jnp.sum(cohort.real))

    def coordinates(u: Array) -> Array:
        ordered = sort_columns(jnp.where(expand_rows(cohort.real, u), u, jnp.inf))  # padding rows come last
        weighted = ordered * expand_rows(weights, u).astype(u.dtype)
        return jnp.sum(jnp.where(expand_rows(weights > 0, u), weighted, 0), axis=0)

    return jax.tree.map(coordinates, cohort.uploads)


def expand_rows(values: Array, like: Array) -> Array:
    """``values`` [K] with unit axes appended, to broadcast against ``like`` [K, ...]."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


def norms(uploads: Tree) -> Array:
    """Norms |u_k| of stacked uploads, [K], without overflow or underflow of the squares."""
    leaves = [u for u in jax.tree.leaves(uploads) if u.size]
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(u).reshape(len(u), -1), axis=1) for u in leaves]), axis=0)
    limit = min(float(jnp.finfo(u.dtype).max) for u in leaves) ** 0.8  # the inverse of the maximum would be denormal
    unit = jnp.where(largest > 0, jnp.minimum(largest, limit), 1)
    return unit * jax.vmap(tree.norm)([u / expand_rows(unit, u) for u in leaves])


def center_on_median_norm(cohort: Cohort) -> tuple[Tree, Tree]:
    """(upload of median norm, uploads minus that upload [K, ...]).

    Entries are clipped to the largest magnitude whose square does not overflow, and NaN counts as that magnitude: a
    malicious upload stays far away, and distances between other uploads stay finite and precise.
    """
    leaves = jax.tree.leaves(cohort.uploads)
    largest = min(float(jnp.finfo(u.dtype).max) for u in leaves)
    limit = math.sqrt(largest / (64 * len(cohort.clients) * max(sum(u[0].size for u in leaves), 1)))
    bounded = jax.tree.map(lambda u: jnp.where(jnp.isnan(u), limit, jnp.clip(u, -limit, limit)), cohort.uploads)
    order = jnp.argsort(jnp.where(cohort.real, norms(bounded), jnp.inf))
    row = order[(jnp.sum(cohort.real) - 1) // 2]
    center = jax.tree.map(lambda u: u[row], bounded)
    return center, jax.tree.map(lambda u, c: u - c, bounded, center)


def squared_distances(cohort: Cohort) -> Array:
    """Squared distances |u_j - u_k|^2, [K, K], from inner products; centering first reduces cancellation."""

    def gram(u: Array) -> Array:
        flat = u.reshape(len(u), -1)
        return jnp.matmul(flat, flat.T, precision=_HIGHEST)

    products = jnp.asarray(sum(gram(u) for u in jax.tree.leaves(center_on_median_norm(cohort)[1])))
    products = (products + products.T) / 2  # exactly symmetric
    squares = jnp.diagonal(products)
    return jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)


@hyperparameters
class Median:
    """Coordinate-wise median; the mean of the two middle values of an even number (Yin et al. 2018, Def. 1).

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Median())
        >>> method.rule.uniform_weights
        True
    """

    @property
    def uniform_weights(self) -> bool:
        """True: the rule ignores aggregation weights."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""

        def weights(rank: Array, n: Array) -> Array:
            return 0.5 * (rank == (n - 1) // 2) + 0.5 * (rank == n // 2)

        return _order_statistics_mean(cohort, weights)


@hyperparameters
class TrimmedMean:
    """Coordinate-wise mean without the floor(trim n) smallest and largest values (Yin et al. 2018, Def. 2).

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.TrimmedMean(trim=0.1))
        >>> method.rule.trim
        0.1
    """

    trim: Annotated[float, Bound(ge=0, lt=0.5)] = 0.2
    """beta, fraction of the values removed at each end."""

    @property
    def uniform_weights(self) -> bool:
        """True: the rule ignores aggregation weights."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""

        def weights(rank: Array, n: Array) -> Array:
            cut = jnp.floor(self.trim * n + 1e-4)  # 0.2 * 5 may be just below 1 in float32
            cut = jnp.minimum(cut, (n - 1) // 2)
            return ((rank >= cut) & (rank < n - cut)) / (n - 2 * cut)

        return _order_statistics_mean(cohort, weights)


@hyperparameters
class NormBound:
    """The mean of uploads that are clipped to the norm ``bound`` (Sun et al. 2019).

    An upload with an infinite entry or NaN counts as zero.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.NormBound(bound=5.0))
        >>> method.rule.bound
        5.0
    """

    bound: Positive = 1.0
    """Maximum Euclidean norm of an upload."""

    @property
    def uniform_weights(self) -> bool:
        """False: the rule uses aggregation weights."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        lengths = norms(cohort.uploads)
        finite = jnp.isfinite(lengths)
        factors = jnp.where(lengths > self.bound, self.bound / jnp.where(lengths > 0, lengths, 1), 1)
        uploads = jax.tree.map(lambda u: jnp.where(expand_rows(finite, u), u, 0), cohort.uploads)
        return weighted_sum(uploads, cohort.weights * jnp.where(finite, factors, 0))


@hyperparameters
class GeometricMedian:
    """argmin_z sum_k p_k |z - u_k|, by the smoothed Weiszfeld algorithm (RFA; Pillutla, Kakade and Harchaoui 2022).

    Iterates z <- sum_k b_k u_k / sum_k b_k with b_k = p_k / max(nu, |z - u_k|). The initial z is a clipped mean: the
    distance of each upload to the upload of median norm is clipped to the median distance. From the plain mean, the
    iterations need not recover from a single malicious upload of very large norm.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.GeometricMedian(iterations=4))
        >>> method.rule.iterations
        4
    """

    iterations: PositiveInt = 8
    """Number of Weiszfeld iterations."""
    nu: Positive = 1e-6
    """Smoothing constant nu, a lower bound of distances."""

    @property
    def uniform_weights(self) -> bool:
        """False: the rule uses aggregation weights."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        weights, count = cohort.weights, jnp.sum(cohort.real)
        center, centered = center_on_median_norm(cohort)

        def mean(factors: Array) -> Tree:
            total = jnp.sum(factors)
            return weighted_sum(centered, factors / jnp.where(total > 0, total, 1))

        def weiszfeld_step(_: Array, z: Tree) -> Tree:
            distances = norms(jax.tree.map(lambda u, z: u - z, centered, z))
            return mean(weights / jnp.maximum(self.nu, distances))

        lengths = norms(centered)
        median = jnp.sort(jnp.where(cohort.real, lengths, jnp.inf))[count // 2 - (count == 1)]
        clipping = jnp.where(lengths > median, median / jnp.where(lengths > 0, lengths, 1), 1)
        start = weighted_sum(centered, weights * clipping / jnp.maximum(jnp.sum(weights), self.nu))
        return tree.add(center, jax.lax.fori_loop(0, self.iterations, weiszfeld_step, start))


@hyperparameters
class Krum:
    """Krum and multi-Krum (Blanchard et al. 2017, section 4).

    The score of an upload is the sum of its squared distances to the n - f - 2 nearest of the n uploads, at least one.
    The rule returns the mean of the ``keep`` uploads of lowest score. Its guarantee needs n > 2 f + 2.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Krum(attackers=2, keep=3))
        >>> method.rule.attackers
        2
    """

    attackers: NonNegativeInt = 1
    """f, an upper bound of the number of malicious uploads in a round."""
    keep: PositiveInt = 1
    """m of multi-Krum, the number of uploads that are averaged; 1 is Krum."""

    @property
    def uniform_weights(self) -> bool:
        """True: the rule ignores aggregation weights."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        """Aggregate the uploads of a cohort."""
        real, count = cohort.real, jnp.sum(cohort.real)
        rows = jnp.arange(len(real))
        pair = real[:, None] & real[None] & (rows[:, None] != rows[None])
        distances = jnp.sort(jnp.where(pair, squared_distances(cohort), jnp.inf), axis=1)
        near = rows < jnp.maximum(count - self.attackers - 2, 1)
        scores = jnp.sum(jnp.where(near & jnp.isfinite(distances), distances, 0), axis=1)
        # Mutually nearest uploads have equal scores: the lower client number, and so the earlier row, comes first.
        best = jnp.argsort(jnp.where(real, scores, jnp.inf))
        chosen = best[: self.keep]  # selected before summing, so that NaN elsewhere has no effect
        among = jnp.arange(len(chosen)) < count
        uploads = jax.tree.map(lambda u: u[chosen], cohort.uploads)
        return weighted_sum(uploads, among / jnp.maximum(jnp.sum(among), 1))


Rule = Median | TrimmedMean | NormBound | GeometricMedian | Krum
"""Built-in robust rules."""
