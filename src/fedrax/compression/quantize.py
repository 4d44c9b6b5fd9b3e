"""Quantization to integers of few bits: unbiased for uploads, to the nearest for broadcast messages."""

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

_INTEGER_TYPES = {4: jnp.int4, 8: jnp.int8, 16: jnp.int16}


class QuantizedArray(NamedTuple):
    """A quantized array of floats: ``levels`` times ``scale``."""

    levels: Array
    """Integers in the array's shape."""
    scale: Array
    """A scalar of float32 or wider."""


@hyperparameters
class Quantized(Wrapper):
    """Unbiased stochastic quantization of the uploads of ``inner`` to integers of ``bits`` bits.

    Each array u of the upload is sent as q = floor(u / s + U) and s = max |u| / (2^(bits - 1) - 1), where U is uniform
    on [0, 1) for each entry, and is received as s q, whose expectation is u. This is the stochastic quantization of
    QSGD (Alistarh et al. 2017, section 3.1) and FedPAQ (Reisizadeh et al. 2020) on a uniform grid scaled by the largest
    magnitude. Integer arrays of an upload, and ``each`` and ``total``, are sent unchanged.

    Example:
        >>> method = fedrax.compression.Quantized(inner=fedrax.FedAvg(), bits=4)
        >>> method.bits
        4
    """

    inner: Algorithm = FedAvg()
    bits: Literal[4, 8, 16] = 8
    """Bits of each entry; each array also has a scale of four bytes."""

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Quantize the upload of ``inner``."""
        output = client(message, state, data)
        leaves, structure = jax.tree.flatten(output.upload)
        # The key's name determines the random numbers: another spelling changes every reference number.
        keys = jax.random.split(data.key("quantise"), max(len(leaves), 1))
        offsets = _rounding_offsets(keys, {i: leaf.shape for i, leaf in enumerate(leaves) if _is_quantizable(leaf)})
        quantized = [self._quantized(u, offsets[i]) if i in offsets else u for i, u in enumerate(leaves)]
        return output._replace(upload=structure.unflatten(quantized)), own

    def _quantized(self, u: Array, offset: Array) -> QuantizedArray:
        """Round u / scale up or down at random; ``offset`` is U."""
        u = u.astype(summed_dtype(u.dtype))
        levels = 2 ** (self.bits - 1) - 1
        scale = jnp.max(jnp.abs(u)) / levels
        rounded = jnp.floor(u / jnp.where(scale > 0, scale, 1) + offset)
        return QuantizedArray(jnp.clip(rounded, -levels, levels).astype(_INTEGER_TYPES[self.bits]), scale)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """Dequantize an upload for ``inner``."""
        return receive(_dequantized(upload))


@hyperparameters
class QuantizedBroadcast(Wrapper):
    """Quantization of the broadcast messages of ``inner`` to integers of ``bits`` bits, rounded to the nearest.

    Each array u is sent as q = round(u / s) and s = max |u| / (2^(bits - 1) - 1). Clients start from s q, whose error
    is up to s / 2 in each entry: training may stall at that distance from the optimum. The server state is not rounded.
    Integer arrays are sent unchanged.

    Example:
        >>> method = fedrax.compression.QuantizedBroadcast(inner=fedrax.FedAvg(), bits=8)
        >>> method.bits
        8
    """

    inner: Algorithm = FedAvg()
    bits: Literal[8, 16] = 16
    """Bits of each entry; each array also has a scale of four bytes."""

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """Quantize the message of ``inner``."""
        return jax.tree.map(self._quantized, broadcast(state))

    def _quantized(self, u: Array) -> Array | QuantizedArray:
        """Round u / scale to the nearest integers; integer arrays are unchanged."""
        if not _is_quantizable(u):
            return u
        levels = 2 ** (self.bits - 1) - 1
        scale = jnp.max(jnp.abs(u)) / levels
        return QuantizedArray(jnp.round(u / jnp.where(scale > 0, scale, 1)).astype(_INTEGER_TYPES[self.bits]), scale)

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run the client of ``inner`` on the dequantized message."""
        return client(_dequantized(message), state, data), own


def _is_quantizable(u: Array) -> bool:
    """Whether an array has floating-point entries."""
    return bool(jnp.issubdtype(u.dtype, jnp.floating) and u.size)


def _rounding_offsets(keys: Array, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, Array]:
    """Uniform numbers on [0, 1), in float32 at every precision, so that float64 runs round in the same direction."""

    def uniform(which: Sequence[int], keys: Array) -> dict[int, Array]:
        return {i: jax.random.uniform(keys[i], shapes[i], jnp.float32) for i in which}

    small = [i for i, shape in shapes.items() if math.prod(shape) <= MAX_BATCHED_DRAW]
    large = [i for i in shapes if i not in small]
    return optimize(batch_random_draws(partial(uniform, small)))(keys) | optimize(partial(uniform, large))(keys)


def _dequantized(parts: Tree) -> Tree:
    """A tree with each :class:`QuantizedArray` replaced by levels times scale."""

    def value(part: Any) -> Any:
        if not isinstance(part, QuantizedArray):
            return part
        if isinstance(part.scale, QuantizedArray):  # nested quantization: the inner wrapper's scale is quantized too
            return part._replace(scale=value(part.scale))
        return part.levels.astype(part.scale.dtype) * part.scale

    return jax.tree.map(value, parts, is_leaf=lambda part: isinstance(part, QuantizedArray))
