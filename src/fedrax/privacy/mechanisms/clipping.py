"""How the length of what a client sends is bounded."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.config.hyperparameters import Fraction, NonNegative, Positive, hyperparameters
from fedrax.privacy.mechanisms.noise import shortened
from fedrax.tree import Tree


@hyperparameters
class Flat:
    """u min(1, C / |u|), the length |u| taken over everything that a client sends.

    Example:
        >>> clipped, within = fedrax.privacy.Flat()({"w": jnp.array([3.0, 4.0])}, 1.0)
        >>> bool(jnp.allclose(clipped["w"], jnp.array([0.6, 0.8]))), bool(within)
        (True, False)
    """

    bound: Positive = 1.0
    """C."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the update within ``bound``, whether it was there already)."""
        return shortened(update, bound)


@hyperparameters
class PerLeaf:
    """Each of the L leaves to a length of C / sqrt(L), so that all together are within C (McMahan et al. 2018).

    For networks with layers of very different gradients.

    Example:
        >>> clipped, within = fedrax.privacy.PerLeaf()({"w": jnp.array([3.0, 4.0]), "b": jnp.zeros(1)}, 2**0.5)
        >>> bool(jnp.allclose(clipped["w"], jnp.array([0.6, 0.8]))), bool(within)
        (True, False)
    """

    bound: Positive = 1.0
    """C."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the update within ``bound``, whether each of its leaves was)."""
        leaves, structure = jax.tree.flatten(update)
        cut = [shortened(leaf, bound / len(leaves) ** 0.5) for leaf in leaves]
        return structure.unflatten([leaf for leaf, _ in cut]), jnp.all(jnp.array([within for _, within in cut]))


@hyperparameters
class Adaptive:
    """As :class:`Flat`, with C led to a quantile of the clients' lengths (Andrew et al. 2021, Algorithm 1).

    Each client also sends b_i = 1 if |u_i| <= C, else 0; their mean is noised to b, and C <- C exp(-lr (b - quantile)).
    The noise on the sum of b_i - 1/2 has standard deviation ``count_noise``, and that on the updates is raised so that
    both together give away what the stated noise multiplier z allows: z_update^-2 = z^-2 - (2 count_noise)^-2.

    Example:
        >>> clip = fedrax.privacy.Adaptive(count_noise=2.0)
        >>> bool(clip.multiplier(1.0) > 1.0)
        True
    """

    bound: Positive = 0.1
    """C in the first round."""
    quantile: Fraction = 0.5
    """The share of clients to be left as they are."""
    lr: NonNegative = 0.2
    """How fast C moves."""
    count_noise: Positive = 2.0
    """Standard deviation of the noise on the count; a twentieth of the cohort in the paper."""

    def __call__(self, update: Tree, bound: Any) -> tuple[Tree, Array]:
        """(the update within ``bound``, whether it was there already)."""
        return shortened(update, bound)

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
"""Ways by name."""
