"""Robust rules: what the server takes in place of the mean of the cohort's uploads, where some clients may lie.

Each is called as ``rule(cohort)`` in a phase that stacks uploads, and returns a tree of an upload's shapes. Norms and
distances run over a whole upload. One of your own is a class of hyper-parameters that is called so; where it counts
heads, let it have ``uniform_weights`` true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.compiled.sorting import rising
from fedrax.contract.algorithm import Cohort
from fedrax.contract.fields import Bound
from fedrax.contract.hyperparameters import Count, Positive, Whole, hyperparameters
from fedrax.tree import Tree

_HIGHEST = jax.lax.Precision.HIGHEST


def weighted(uploads: Tree, weights: Array) -> Tree:
    """sum_k weights_k u_k."""
    return jax.tree.map(lambda u: jnp.tensordot(weights.astype(u.dtype), u, 1, precision=_HIGHEST), uploads)


def _by_rank(cohort: Cohort, shares: Callable[[Array, Array], Array]) -> Tree:
    """Each coordinate's numbers in rising order, times ``shares`` of (rank [K], uploads n), and added up."""
    share = shares(jnp.arange(len(cohort.clients)), jnp.sum(cohort.real))

    def coordinates(u: Array) -> Array:
        over = lambda row: row.reshape(-1, *[1] * (u.ndim - 1))  # noqa: E731
        ordered = rising(jnp.where(over(cohort.real), u, jnp.inf))  # rows that hold none come last
        return jnp.sum(jnp.where(over(share > 0), ordered * over(share).astype(u.dtype), 0), axis=0)

    return jax.tree.map(coordinates, cohort.uploads)


def squared_distances(uploads: Tree) -> Array:
    """|u_j - u_k|^2, [K, K].

    From inner products of what is left when the uploads' mean is taken off, so that little of them cancels.
    """

    def gram(u: Array) -> Array:
        flat = u.reshape(len(u), -1)
        flat = flat - flat.mean(0)
        return jnp.matmul(flat, flat.T, precision=_HIGHEST)

    products = jnp.asarray(sum(gram(u) for u in jax.tree.leaves(uploads)))
    products = (products + products.T) / 2  # alike both ways to the last bit
    squares = jnp.diagonal(products)
    return jnp.maximum(squares[:, None] + squares[None] - 2 * products, 0)


def norms(uploads: Tree) -> Array:
    """|u_k|, [K]."""
    return jax.vmap(tree.norm)(uploads)


@hyperparameters
class Median:
    """The median of each coordinate; of an even number the mean of the two in the middle (Yin et al. 2018, Def. 1)."""

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        def shares(rank: Array, n: Array) -> Array:
            return 0.5 * (rank == (n - 1) // 2) + 0.5 * (rank == n // 2)

        return _by_rank(cohort, shares)


@hyperparameters
class TrimmedMean:
    """The mean of each coordinate without its floor(trim n) least and as many greatest (Yin et al. 2018, Def. 2)."""

    trim: Annotated[float, Bound(ge=0, lt=0.5)] = 0.2
    """beta: the share taken off at either end."""

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        def shares(rank: Array, n: Array) -> Array:
            cut = jnp.floor(self.trim * n + 1e-4)  # 0.2 of 5 in float32 may come out below 1
            return ((rank >= cut) & (rank < n - cut)) / (n - 2 * cut)

        return _by_rank(cohort, shares)


@hyperparameters
class NormBound:
    """The mean of the uploads, each shortened to length ``bound`` where it is longer (Sun et al. 2019)."""

    bound: Positive = 1.0

    @property
    def uniform_weights(self) -> bool:
        """Any weights will do."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        lengths = norms(cohort.uploads)
        factors = jnp.where(lengths > self.bound, self.bound / jnp.where(lengths > 0, lengths, 1), 1)
        return weighted(cohort.uploads, cohort.weights * factors)


@hyperparameters
class GeometricMedian:
    """argmin_z sum_k p_k |z - u_k|, by the smoothed Weiszfeld algorithm (RFA; Pillutla, Kakade and Harchaoui 2022).

    From the weighted mean, z <- sum_k b_k u_k / sum_k b_k with b_k = p_k / max(nu, |z - u_k|), ``iterations`` times.
    """

    iterations: Count = 8
    nu: Positive = 1e-6
    """The shortest distance that is told from none."""

    @property
    def uniform_weights(self) -> bool:
        """Any weights will do."""
        return False

    def __call__(self, cohort: Cohort) -> Tree:
        uploads, weights = cohort.uploads, cohort.weights

        def nearer(_: Array, z: Tree) -> Tree:
            distances = norms(jax.tree.map(lambda u, center: u - center, uploads, z))
            factors = weights / jnp.maximum(self.nu, distances)
            return weighted(uploads, factors / jnp.sum(factors))

        return jax.lax.fori_loop(0, self.iterations, nearer, weighted(uploads, weights))


@hyperparameters
class Krum:
    """The upload whose n - f - 2 nearest others are nearest, or the mean of the ``keep`` best (multi-Krum).

    n uploads, at most f of them lies; distances are squared and added up (Blanchard et al. 2017, section 4). The proof
    needs n > 2 f + 2; with fewer than one neighbour left, one is counted.
    """

    attackers: Whole = 1
    """f."""
    keep: Count = 1
    """m of multi-Krum."""

    @property
    def uniform_weights(self) -> bool:
        """It counts heads."""
        return True

    def __call__(self, cohort: Cohort) -> Tree:
        real, count = cohort.real, jnp.sum(cohort.real)
        places = jnp.arange(len(real))
        pair = real[:, None] & real[None] & (places[:, None] != places[None])
        distances = jnp.sort(jnp.where(pair, squared_distances(cohort.uploads), jnp.inf), axis=1)
        near = places < jnp.maximum(count - self.attackers - 2, 1)
        scores = jnp.sum(jnp.where(near & jnp.isfinite(distances), distances, 0), axis=1)
        # Two that are each other's nearest score alike: then the client's number decides, in every order of the rows.
        best = jnp.lexsort((cohort.clients, jnp.where(real, scores, jnp.inf)))
        chosen = (jnp.argsort(best) < jnp.minimum(self.keep, count)).astype(scores.dtype)
        return weighted(cohort.uploads, chosen / jnp.sum(chosen))


Rule = Median | TrimmedMean | NormBound | GeometricMedian | Krum
"""Robust rules by name."""
