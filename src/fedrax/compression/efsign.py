"""EF-signSGD: sign compression of uploads with error feedback."""

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
    """A tree compressed to the signs of its entries and their mean magnitude."""

    signs: Signs
    scale: Array
    """Mean magnitude of the entries, a scalar."""

    def dense(self) -> Tree:
        """Decompress: each entry is plus or minus the scale."""
        return tree.scale(self.scale, self.signs.values())


@hyperparameters
class EFSign(ErrorFeedback):
    """EF-signSGD: a client uploads the signs of its update, one bit an entry, and one scale, with error feedback.

    With the error e_i, the update u and w = e_i + u of d entries, the client uploads C(w) = (|w|_1 / d) sign(w) and
    sets e_i <- w - C(w). Karimireddy, Rebjock, Stich and Jaggi (2019), Algorithm 1, where u is the update of all local
    steps of a round. See :class:`ErrorFeedback` for what the update is.

    Example:
        >>> method = fedrax.compression.EFSign(inner=fedrax.FedAvg())
        >>> sent = method.compress({"w": jnp.array([3.0, -1.0])})
        >>> sent.dense()["w"].tolist()
        [2.0, -2.0]
    """

    inner: Algorithm = FedAvg()
    compressed_type: ClassVar[type] = ScaledSigns

    def compress(self, values: Tree) -> ScaledSigns:
        """Return the signs and the mean magnitude of all entries."""
        leaves = jax.tree.leaves(values)
        total = sum((jnp.sum(jnp.abs(leaf)) for leaf in leaves), jnp.zeros((), leaves[0].dtype))
        return ScaledSigns(Signs.of(values), total / sum(leaf.size for leaf in leaves))
