"""Proximal operators prox_{t Psi}(x) = argmin_z Psi(z) + |z - x|^2 / (2t) of convex regularizers Psi.

Each object is called as ``prox(x, t)`` on a pytree ``x`` and a step length ``t`` and returns a tree of the same
shape. Source: LoSAC, Eq. 14-16; Parikh and Boyd 2014 for the closed forms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.errors import FedraxError
from fedrax.tree import Tree


def _soft_threshold(x: Array, threshold: Array | float) -> Array:
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0).astype(x.dtype)


@hyperparameters
class L1:
    """Psi = weight * |x|_1."""

    weight: NonNegative = 1e-3

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        return jax.tree.map(lambda leaf: _soft_threshold(leaf, t * self.weight), x)


@hyperparameters
class ElasticNet:
    """Psi = l1 * |x|_1 + l2 / 2 * |x|^2."""

    l1: NonNegative = 1e-3
    l2: NonNegative = 1e-3

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        return jax.tree.map(lambda leaf: (_soft_threshold(leaf, t * self.l1) / (1 + t * self.l2)).astype(leaf.dtype), x)


@hyperparameters
class NuclearNorm:
    """Psi = weight * sum of singular values, of every leaf that is a matrix (other leaves are left alone)."""

    weight: NonNegative = 1e-3

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        def matrix(leaf: Array) -> Array:
            if leaf.ndim != 2:
                return leaf
            u, s, vt = jnp.linalg.svd(leaf, full_matrices=False)
            return (u * _soft_threshold(s, t * self.weight)) @ vt

        return jax.tree.map(matrix, x)


@hyperparameters
class Box:
    """Psi = 0 inside [low, high] for every coordinate, infinite outside."""

    low: float = -1.0
    high: float = 1.0

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        return jax.tree.map(lambda leaf: jnp.clip(leaf, self.low, self.high).astype(leaf.dtype), x)

    def check(self) -> None:
        """``low`` must not exceed ``high``."""
        if self.low > self.high:
            raise FedraxError(f"Box.low must not exceed Box.high, got {self.low} and {self.high}")


Prox = L1 | ElasticNet | NuclearNorm | Box
