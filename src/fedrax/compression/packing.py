"""Packed signs of the entries of pytrees: one bit each, or 8/5 bits with a third value for zero."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrax.tree import Tree

_DIGITS = 5
"""Ternary digits of a byte: 3^5 = 243."""
_as_pytree = partial(jax.tree_util.register_dataclass, data_fields=["packed"], meta_fields=["structure", "shapes"])


@_as_pytree
@dataclass(frozen=True)
class Signs:
    """The signs of a tree's entries, packed to one bit each; the sign of zero is positive."""

    packed: Array
    """uint8, several signs in each, of the d entries of the tree's concatenated leaves."""
    structure: Any
    """Tree structure."""
    shapes: tuple
    """Shape and dtype name of each leaf."""

    @classmethod
    def of(cls, values: Tree) -> Self:
        """Pack the signs of all entries of ``values``."""
        flat, _ = ravel_pytree(values)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(cls.pack(flat), jax.tree.structure(values), shapes)

    def values(self) -> Tree:
        """Unpack: a tree of signs in the original shapes and dtypes."""
        zeros = [jnp.zeros(shape, name) for shape, name in self.shapes]
        flat, unravel = ravel_pytree(self.structure.unflatten(zeros))
        return unravel(self.unpack(flat))

    @staticmethod
    def pack(flat: Array) -> Array:
        """The signs of a vector [d] as uint8 [ceil(d / 8)]."""
        return jnp.packbits(flat >= 0)

    def unpack(self, like: Array) -> Array:
        """The signs, 1 and -1, with the shape and dtype of the vector ``like``."""
        return 2 * jnp.unpackbits(self.packed, count=like.size).astype(like.dtype) - 1


@_as_pytree
@dataclass(frozen=True)
class TernarySigns(Signs):
    """The signs of a tree's entries, packed to 8/5 bits each, with 0 for zero and NaN."""

    @staticmethod
    def pack(flat: Array) -> Array:
        """The signs of a vector [d] as uint8 [ceil(d / 5)], digits in base 3."""
        digits = 1 + (flat > 0).astype(jnp.uint8) - (flat < 0).astype(jnp.uint8)
        return jnp.pad(digits, (0, -len(digits) % _DIGITS)).reshape(-1, _DIGITS) @ _powers()

    def unpack(self, like: Array) -> Array:
        """The signs, 1, 0 and -1, with the shape and dtype of the vector ``like``."""
        digits = (self.packed[:, None] // _powers() % 3).reshape(-1)[: like.size]
        return digits.astype(like.dtype) - 1


def _powers() -> Array:
    return jnp.asarray([3**k for k in range(_DIGITS)], jnp.uint8)
