"""Short whole numbers on the wire: quantized uploads, unbiased, and quantized messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, summed_dtype
from fedrax.contract.client_data import ClientData
from fedrax.contract.wrapper import Wrapper
from fedrax.tree import Tree
from fedrax.xla import MAX_BATCHED_DRAW, batch_random_draws, optimize

_TYPES = {4: jnp.int4, 8: jnp.int8, 16: jnp.int16}


class Quantities(NamedTuple):
    """An array of floats as it travels: ``levels`` times ``scale``."""

    levels: Array
    """Whole numbers in the array's shape."""
    scale: Array
    """One number, float32 at least."""


@hyperparameters
class Quantized(Wrapper):
    """The upload of ``inner`` as whole numbers of ``bits`` bits, rounded at random: up or down, right in the mean.

    Each array u of the upload goes up as q = floor(u / s + U) and s = max |u| / (2^(bits - 1) - 1), where U is uniform
    on [0, 1) for each number, and is received as s q, whose expectation is u. That is the stochastic quantization of
    QSGD (Alistarh et al. 2017, section 3.1) and FedPAQ (Reisizadeh et al. 2020) on a uniform grid of the largest
    magnitude. Whole numbers in an upload travel as they are, and so does what goes up as ``each`` or ``total``.

    Example:
        >>> method = fedrax.compression.Quantized(inner=fedrax.FedAvg(), bits=4)
        >>> method.bits
        4
    """

    inner: Algorithm = FedAvg()
    bits: Literal[4, 8, 16] = 8
    """Bits of each number; an array takes a scale of four bytes besides."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """``inner``'s upload, quantized."""
        output = client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        # The name decides the numbers drawn: another spelling changes every reference number.
        keys = jax.random.split(data.key("quantise"), max(len(leaves), 1))
        chances = _chances(keys, {i: leaf.shape for i, leaf in enumerate(leaves) if _is_real(leaf)})
        quantities = [self._quantized(u, chances[i]) if i in chances else u for i, u in enumerate(leaves)]
        return output._replace(upload=structure.unflatten(quantities)), own

    def _quantized(self, u: Array, chance: Array) -> Quantities:
        u = u.astype(summed_dtype(u.dtype))
        levels = 2 ** (self.bits - 1) - 1
        scale = jnp.max(jnp.abs(u)) / levels
        rounded = jnp.floor(u / jnp.where(scale > 0, scale, 1) + chance)
        return Quantities(jnp.clip(rounded, -levels, levels).astype(_TYPES[self.bits]), scale)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: the numbers that the levels stand for."""
        return receive(_values(upload))


@hyperparameters
class QuantizedBroadcast(Wrapper):
    """What the server of ``inner`` sends as whole numbers of ``bits`` bits, rounded to the nearest.

    Each array goes down as q = round(u / s) with s = max |u| / (2^(bits - 1) - 1), and clients start from s q, which is
    off by up to s / 2: training may stall as far from where it would end. What the server keeps is not rounded. Whole
    numbers travel as they are.

    Example:
        >>> method = fedrax.compression.QuantizedBroadcast(inner=fedrax.FedAvg(), bits=8)
        >>> method.bits
        8
    """

    inner: Algorithm = FedAvg()
    bits: Literal[8, 16] = 16
    """Bits of each number; an array takes a scale of four bytes besides."""

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """``inner``'s message, quantized."""
        return jax.tree.map(self._quantized, broadcast(state))

    def _quantized(self, u: Array) -> Array | Quantities:
        if not _is_real(u):
            return u
        levels = 2 ** (self.bits - 1) - 1
        scale = jnp.max(jnp.abs(u)) / levels
        return Quantities(jnp.round(u / jnp.where(scale > 0, scale, 1)).astype(_TYPES[self.bits]), scale)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """From the numbers that the levels stand for."""
        return client(_values(message), state, data), own


def _is_real(u: Array) -> bool:
    """Whether an array has numbers to be rounded."""
    return bool(jnp.issubdtype(u.dtype, jnp.floating) and u.size)


def _chances(keys: Array, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Array]:
    """Numbers uniform on [0, 1), float32 whatever the run's precision, so that both precisions round alike."""

    def drawn(which: Sequence[int], keys: Array) -> dict[int, Array]:
        return {i: jax.random.uniform(keys[i], shapes[i], jnp.float32) for i in which}

    small = [i for i, shape in shapes.items() if math.prod(shape) <= MAX_BATCHED_DRAW]
    large = [i for i in shapes if i not in small]
    return optimize(batch_random_draws(partial(drawn, small)))(keys) | optimize(partial(drawn, large))(keys)


def _values(parts: Tree) -> Tree:
    """The numbers that the levels of a tree's :class:`Quantities` stand for."""

    def value(part: Any) -> Any:
        if not isinstance(part, Quantities):
            return part
        if isinstance(part.scale, Quantities):  # of a wrapper inside, whose scale is quantized here
            return part._replace(scale=value(part.scale))
        return part.levels.astype(part.scale.dtype) * part.scale

    return jax.tree.map(value, parts, is_leaf=lambda part: isinstance(part, Quantities))
