"""Uploads of one bit a number, with the rest remembered (EF-signSGD)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.compression.error_feedback import ErrorFeedback
from fedrax.compression.packing import Signs
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm
from fedrax.tree import Tree


class ScaledSigns(NamedTuple):
    """Signs of a tree's numbers, and their mean magnitude."""

    signs: Signs
    scale: Array

    def dense(self) -> Tree:
        """The whole tree: plus or minus the scale."""
        return tree.scale(self.scale, self.signs.values())


@hyperparameters
class EFSign(ErrorFeedback):
    """Of each client's update the signs go up, a bit each, and one scale; what is left is added to its next update.

    With the rest e_i and the update u, w = e_i + u and d its numbers: (|w|_1 / d) sign(w) goes up and e_i <- w less
    that. Karimireddy, Rebjock, Stich and Jaggi (2019), Algorithm 1, with an update of many local steps for u. See
    :class:`fedrax.compression.error_feedback.ErrorFeedback` for what the update is.

    Example:
        >>> method = fedrax.compression.EFSign(inner=fedrax.FedAvg())
        >>> sent = method.compressed({"w": jnp.array([3.0, -1.0])})
        >>> sent.dense()["w"].tolist()
        [2.0, -2.0]
    """

    inner: Algorithm = FedAvg()
    travels_as: ClassVar[type] = ScaledSigns

    def compressed(self, values: Tree) -> ScaledSigns:
        """Signs, and the mean magnitude."""
        leaves = jax.tree.leaves(values)
        total = sum((jnp.sum(jnp.abs(leaf)) for leaf in leaves), jnp.zeros((), leaves[0].dtype))
        return ScaledSigns(Signs.of(values), total / sum(leaf.size for leaf in leaves))
