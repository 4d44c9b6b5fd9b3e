"""Quantised uploads: short whole numbers on the wire, unbiased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.algorithms.fedavg import FedAvg
from fedrax.contract.algorithm import Algorithm, ClientOutput, summed_dtype
from fedrax.contract.client_data import ClientData
from fedrax.contract.hyperparameters import hyperparameters
from fedrax.contract.wrapper import Wrapper
from fedrax.tree import Tree

_TYPES = {4: jnp.int4, 8: jnp.int8, 16: jnp.int16}


class Quantities(NamedTuple):
    """An array of floats as it travels: ``levels`` times ``scale``."""

    levels: Array
    """Whole numbers in the array's shape."""
    scale: Array
    """One number, float32 at least."""


@hyperparameters
class Quantised(Wrapper):
    """The upload of ``inner`` as whole numbers of ``bits`` bits, rounded at random: up or down, right in the mean.

    Each array u of the upload goes up as q = floor(u / s + U) and s = max |u| / (2^(bits - 1) - 1), where U is uniform
    on [0, 1) for each number, and is received as s q, whose expectation is u. That is the stochastic quantisation of
    QSGD (Alistarh et al. 2017, section 3.1) and FedPAQ (Reisizadeh et al. 2020) on a uniform grid of the largest
    magnitude. Whole numbers in an upload travel as they are, and so does what goes up as ``each`` or ``total``.
    """

    inner: Algorithm = FedAvg()
    bits: Literal[4, 8, 16] = 8
    """Bits of each number; an array takes a scale of four bytes besides."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """``inner``'s upload, quantised."""
        output = client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        keys = jax.random.split(data.stream("quantise"), max(len(leaves), 1))
        quantities = [self._quantised(leaf, key) for leaf, key in zip(leaves, keys, strict=False)]
        return output._replace(upload=structure.unflatten(quantities)), own

    def _quantised(self, u: Array, key: Array) -> Array | Quantities:
        if not jnp.issubdtype(u.dtype, jnp.floating) or not u.size:
            return u
        u = u.astype(summed_dtype(u.dtype))
        levels = 2 ** (self.bits - 1) - 1
        scale = jnp.max(jnp.abs(u)) / levels
        # float32 whatever the run's precision, so that both precisions round alike
        chance = jax.random.uniform(key, u.shape, jnp.float32)
        rounded = jnp.floor(u / jnp.where(scale > 0, scale, 1) + chance)
        return Quantities(jnp.clip(rounded, -levels, levels).astype(_TYPES[self.bits]), scale)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: the numbers that the levels stand for."""

        def value(part: Any) -> Any:
            if not isinstance(part, Quantities):
                return part
            if isinstance(part.scale, Quantities):  # of a Quantised inside, whose scale is quantised here
                return part._replace(scale=value(part.scale))
            return part.levels.astype(part.scale.dtype) * part.scale

        return receive(jax.tree.map(value, upload, is_leaf=lambda part: isinstance(part, Quantities)))
