"""Top-k sparsification of uploads with error feedback."""

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
    """A sparse tree: k entries with their indices; all others are zero."""

    indices: Array
    """int32 [k], ascending, into the concatenated leaves."""
    values: Array
    """The entries, [k]."""
    structure: Any
    """Tree structure."""
    shapes: tuple
    """Shape and dtype name of each leaf."""

    @classmethod
    def largest(cls, values: Tree, k: int) -> Sparse:
        """The k entries of ``values`` of largest magnitude."""
        flat, _ = ravel_pytree(values)
        indices = largest(flat, k)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(indices, flat[indices], jax.tree.structure(values), shapes)

    def dense(self) -> Tree:
        """Decompress: the tree with zeros in all other entries."""
        sizes = [math.prod(shape) for shape, _ in self.shapes]
        flat = jnp.zeros(sum(sizes), self.values.dtype).at[self.indices].set(self.values)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
        parts = zip(jnp.split(flat, ends), self.shapes, strict=True)
        leaves = [
            part.reshape(shape).astype(jnp.promote_types(name, self.values.dtype)) for part, (shape, name) in parts
        ]
        return self.structure.unflatten(leaves)


def largest(values: Array, k: int) -> Array:
    """Indices of the k entries of a vector [d] that are largest in magnitude, 1 <= k <= d: int32 [k], ascending.

    Ties are broken by the lower index. Non-negative floats have the order of their bit patterns as integers, so the
    k-th largest magnitude is found by a binary search over bits, with one counting pass for each. ``lax.top_k`` would
    sort the whole vector on the CPU.
    """
    bits = jnp.finfo(values.dtype).bits
    magnitudes = lax.bitcast_convert_type(jnp.abs(values), jnp.dtype(f"int{bits}"))

    def with_bit(i: Array, least: Array) -> Array:
        trial = least | (jnp.ones_like(least) << jnp.asarray(bits - 2 - i, least.dtype))
        return jnp.where((magnitudes >= trial).sum(dtype=jnp.int32) >= k, trial, least)

    least = lax.fori_loop(jnp.int32(0), jnp.int32(bits - 1), with_bit, jnp.zeros((), magnitudes.dtype))
    above, equal = magnitudes > least, magnitudes == least
    room = k - above.sum(dtype=jnp.int32)

    def first_equal(equal: Array) -> Array:
        return equal & (jnp.cumsum(equal, dtype=jnp.int32) <= room)

    equal = lax.cond(equal.sum(dtype=jnp.int32) > room, first_equal, lambda equal: equal, equal)
    return jnp.nonzero(above | equal, size=k)[0].astype(jnp.int32)


def num_sent(size: int, fraction: float) -> int:
    """Number of entries sent: ceil(``fraction`` ``size``), at least one."""
    # The factor absorbs rounding: 0.07 * 100 is just above 7 in float64.
    return max(1, math.ceil(fraction * size * (1 - 1e-12)))


@hyperparameters
class TopK(ErrorFeedback):
    """Top-k sparsification: a client uploads the entries of its update of largest magnitude, with error feedback.

    With the error e_i and the update u of d entries, the client uploads C(e_i + u), the k = ceil(``fraction`` d)
    entries of largest magnitude and their indices, and sets e_i <- e_i + u - C(e_i + u). Stich, Cordonnier and Jaggi
    (2018), Algorithm 1; convergence: Karimireddy et al. (2019). See :class:`ErrorFeedback` for what the update is.

    Example:
        >>> method = fedrax.compression.TopK(inner=fedrax.FedAvg(), fraction=0.5)
        >>> sent = method.compress({"w": jnp.array([1.0, -4.0, 3.0, 0.5])})
        >>> sent.dense()["w"].tolist()
        [0.0, -4.0, 3.0, 0.0]
    """

    inner: Algorithm = FedAvg()
    fraction: Static[Annotated[float, Bound(gt=0, le=1)]] = 0.1
    """Fraction of the entries that are sent."""
    compressed_type: ClassVar[type] = Sparse

    def compress(self, values: Tree) -> Sparse:
        """Return the k entries of largest magnitude."""
        size = sum(leaf.size for leaf in jax.tree.leaves(values))
        return Sparse.largest(values, num_sent(size, self.fraction))
