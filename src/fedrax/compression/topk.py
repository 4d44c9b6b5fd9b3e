"""Sparse uploads: the largest numbers alone, with the rest remembered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedrax.algorithms.fedavg import FedAvg
from fedrax.compression.error_feedback import ErrorFeedback
from fedrax.config.annotations import Bound, Static
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm
from fedrax.tree import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["indices", "values"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Sparse:
    """k numbers of a tree as they travel; all others are zero."""

    indices: Array
    """int32 [k], ascending, in the tree's leaves laid end to end."""
    values: Array
    """[k]"""
    structure: Any
    shapes: tuple

    @classmethod
    def largest(cls, values: Tree, k: int) -> Sparse:
        """The k numbers of largest magnitude."""
        flat, _ = ravel_pytree(values)
        indices = largest(flat, k)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(indices, flat[indices], jax.tree.structure(values), shapes)

    def dense(self) -> Tree:
        """The whole tree."""
        sizes = [math.prod(shape) for shape, _ in self.shapes]
        flat = jnp.zeros(sum(sizes), self.values.dtype).at[self.indices].set(self.values)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        parts = zip(jnp.split(flat, ends), self.shapes, strict=True)
        wide = lambda name: jnp.promote_types(name, self.values.dtype)  # noqa: E731
        return self.structure.unflatten([part.reshape(shape).astype(wide(name)) for part, (shape, name) in parts])


def largest(values: Array, k: int) -> Array:
    """Indices of the k entries of a vector [d] that are largest in magnitude: int32 [k], ascending.

    XLA's CPU backend sorts the whole vector for its largest k. The magnitudes of floats are ordered as their bits read
    as integers, so the k-th largest is found bit by bit, each bit in one pass that counts. Of equal magnitudes the
    first ones are taken. ``k`` is from 1 to d.
    """
    bits = jnp.finfo(values.dtype).bits
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.dtype(f"int{bits}"))

    def with_bit(i: Array, least: Array) -> Array:
        trial = least | (jnp.ones_like(least) << jnp.asarray(bits - 2 - i, least.dtype))
        return jnp.where((magnitudes >= trial).sum(dtype=jnp.int32) >= k, trial, least)

    least = lax.fori_loop(jnp.int32(0), jnp.int32(bits - 1), with_bit, jnp.zeros((), magnitudes.dtype))
    above, equal = magnitudes > least, magnitudes == least
    room = k - above.sum(dtype=jnp.int32)
    first = lambda equal: equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room)  # noqa: E731
    equal = lax.cond(equal.sum(dtype=jnp.int32) > room, first, lambda equal: equal, equal)
    return jnp.nonzero(above | equal, size=k)[0].astype(jnp.int32)


def numbers_sent(size: int, fraction: float) -> int:
    """ceil(``fraction`` ``size``), one at least."""
    return max(1, math.ceil(fraction * size * (1 - 1e-12)))  # 7 of 100 by 0.07, whose product is just above


@hyperparameters
class TopK(ErrorFeedback):
    """Of each client's update the largest numbers alone go up; what is left is added to its next update.

    With the rest e_i and the update u: e_i + u is cut to its k = ceil(``fraction`` d) numbers of largest magnitude, of
    d in the whole update, which travel with their indices; e_i <- e_i + u less what was sent. Memory of the rest
    (error feedback) as in Stich, Cordonnier and Jaggi (2018), Algorithm 1; Karimireddy et al. (2019) for its
    convergence. A client that takes part rarely sends its rest late.

    The update is the upload of ``inner``, or the field ``params`` of it, whose other fields travel whole. A round of
    several phases keeps a rest for each.

    Example:
        >>> method = fedrax.compression.TopK(inner=fedrax.FedAvg(), fraction=0.5)
        >>> sent = method.compressed({"w": jnp.array([1.0, -4.0, 3.0, 0.5])})
        >>> sent.dense()["w"].tolist()
        [0.0, -4.0, 3.0, 0.0]
    """

    inner: Algorithm = FedAvg()
    fraction: Static[Annotated[float, Bound(gt=0, le=1)]] = 0.1
    """Share of the numbers that travel."""
    travels_as: ClassVar[type] = Sparse

    def compressed(self, values: Tree) -> Sparse:
        """The largest numbers."""
        size = sum(leaf.size for leaf in jax.tree.leaves(values))
        return Sparse.largest(values, numbers_sent(size, self.fraction))
