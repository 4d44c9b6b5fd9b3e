"""Proximal operators prox_{t Psi}(x) = argmin_z Psi(z) + |z - x|^2 / (2t) of convex regularizers Psi.

Each object is called as ``prox(x, t)`` with a pytree ``x`` and a learning rate ``t`` and returns a pytree of the same
shapes. Source: LoSAC, Eq. 14-16; Parikh and Boyd 2014 for the closed forms.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.errors import FedraxError
from fedrax.tree import Tree


def _soft_threshold(x: Array, threshold: Array | float) -> Array:
    """sign(x) max(|x| - threshold, 0)."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - threshold, 0).astype(x.dtype)


@hyperparameters
class L1:
    """Soft thresholding: Psi = weight * |x|_1.

    Example:
        >>> fedrax.optim.L1(weight=1.0)(jnp.array([3.0, -0.1]), 0.5).tolist()
        [2.5, -0.0]
    """

    weight: NonNegative = 1e-3
    """Weight of the L1 norm."""

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        """Return prox_{t Psi}(x) for a pytree ``x``."""
        return jax.tree.map(lambda leaf: _soft_threshold(leaf, t * self.weight), x)


@hyperparameters
class ElasticNet:
    """Elastic net: Psi = l1 * |x|_1 + l2 / 2 * |x|^2.

    Example:
        >>> fedrax.optim.ElasticNet(l1=1.0, l2=2.0)(jnp.array([3.0]), 0.5).tolist()
        [1.25]
    """

    l1: NonNegative = 1e-3
    """Weight of the L1 norm."""
    l2: NonNegative = 1e-3
    """Weight of the squared Euclidean norm."""

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        """Return prox_{t Psi}(x) for a pytree ``x``."""
        return jax.tree.map(lambda leaf: (_soft_threshold(leaf, t * self.l1) / (1 + t * self.l2)).astype(leaf.dtype), x)


@hyperparameters
class NuclearNorm:
    """Singular value thresholding: Psi = weight * sum of singular values, of every leaf that is a matrix.

    Example:
        >>> found = fedrax.optim.NuclearNorm(weight=1.0)(jnp.eye(2), 0.5)
        >>> found.diagonal().tolist()
        [0.5, 0.5]
    """

    weight: NonNegative = 1e-3
    """Weight of the nuclear norm."""

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        """Return prox_{t Psi}(x) for a pytree ``x``."""

        def matrix(leaf: Array) -> Array:
            if leaf.ndim != 2:
                return leaf
            u, s, vt = jnp.linalg.svd(leaf, full_matrices=False)
            return (u * _soft_threshold(s, t * self.weight)) @ vt

        return jax.tree.map(matrix, x)


@hyperparameters
class Box:
    """Projection onto a box: Psi = 0 inside [low, high] in every coordinate, infinite outside.

    Example:
        >>> fedrax.optim.Box(low=0.0, high=1.0)(jnp.array([-2.0, 0.5]), 0.1).tolist()
        [0.0, 0.5]
    """

    low: float = -1.0
    """Lower bound of every coordinate."""
    high: float = 1.0
    """Upper bound of every coordinate."""

    def __call__(self, x: Tree, t: Array | float) -> Tree:
        """Return prox_{t Psi}(x) for a pytree ``x``."""
        return jax.tree.map(lambda leaf: jnp.clip(leaf, self.low, self.high).astype(leaf.dtype), x)

    def check(self) -> None:
        """Raise FedraxError where ``low`` exceeds ``high``."""
        if self.low > self.high:
            raise FedraxError(f"Box.low must not exceed Box.high, got {self.low} and {self.high}")


Prox = L1 | ElasticNet | NuclearNorm | Box
"""The annotation of a field that holds a proximal operator."""
