"""Clipping rules: how the L2 norm of a client's update is bounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import Fraction, NonNegative, Positive, hyperparameters
from fedrax.privacy.mechanisms.noise import clip_by_norm
from fedrax.tree import Tree


@hyperparameters
class Flat:
    """Clipping by the global norm: u min(1, C / |u|), with |u| over everything that a client sends.

    Example:
        >>> clipped, within = fedrax.privacy.Flat()({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> bool(jnp.allclose(clipped["w"], jnp.array([0.6, 0.8]))), bool(within)
        (True, False)
    """

    bound: Positive = 1.0
    """Clipping bound C."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the clipped update, whether its norm was at most ``bound``)."""
        return clip_by_norm(update, bound)


@hyperparameters
class PerLeaf:
    """Clipping by leaf: each of L leaves to norm C / sqrt(L), in total at most C (McMahan et al. 2018).

    It suits networks whose layers have gradients of very different norms.

    Example:
        >>> clipped, within = fedrax.privacy.PerLeaf()({"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(1)}, 2**0.5)
        >>> bool(jnp.allclose(clipped["w"], jnp.array([0.6, 0.8]))), bool(within)
        (True, False)
    """

    bound: Positive = 1.0
    """Clipping bound C."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the clipped update, whether the norm of every leaf was within its bound)."""
        leaves, structure = jax.tree.flatten(update)
        clipped = [clip_by_norm(leaf, bound / len(leaves) ** 0.5) for leaf in leaves]
        return structure.unflatten([leaf for leaf, _ in clipped]), jnp.all(jnp.array([within for _, within in clipped]))


@hyperparameters
class Adaptive:
    """Global-norm clipping with C adapted to a quantile of the update norms (Andrew et al. 2021, Algorithm 1).

    Each client also sends b_i = 1 if |u_i| <= C, else 0; their mean is noised to b, and C <- C exp(-lr (b - quantile)).
    The noise on the sum of b_i - 1/2 has standard deviation ``count_noise``. The noise on the updates is larger, so
    that both together have the stated noise multiplier z: z_update^-2 = z^-2 - (2 count_noise)^-2.

    Example:
        >>> clip = fedrax.privacy.Adaptive(count_noise=2.0)
        >>> bool(clip.multiplier(1.0) > 1.0)
        True
    """

    bound: Positive = 0.1
    """Clipping bound C of the first round."""
    quantile: Fraction = 0.5
    """Target fraction of clients whose update is not clipped."""
    lr: NonNegative = 0.2
    """Learning rate of the bound."""
    count_noise: Positive = 2.0
    """Standard deviation of the noise on the count; a twentieth of the cohort in the paper."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the clipped update, whether its norm was at most ``bound``)."""
        return clip_by_norm(update, bound)

    def multiplier(self, noise: Any) -> Any:
        """The noise multiplier z_update of the updates.

        Args:
            noise: z, the stated noise multiplier of updates and count together.

        Returns:
            z_update, at least z.
        """
        share = 1 - (noise / (2 * self.count_noise)) ** 2
        return noise / jnp.sqrt(share)


Clipping = Flat | PerLeaf | Adaptive
"""The clipping rules that `ClientDP.clip` accepts."""
