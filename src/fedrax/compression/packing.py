"""1-bit packing of signs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedrax.tree import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["structure", "shapes"])
@dataclass(frozen=True)
class Signs:
    """The signs of a tree's entries, packed to one bit each; the sign of zero is positive."""

    bits: Array
    """uint8 [ceil(d / 8)], eight signs in each, of the d entries of the tree's concatenated leaves."""
    structure: Any
    """Tree structure."""
    shapes: tuple
    """Shape and dtype name of each leaf."""

    @classmethod
    def of(cls, values: Tree) -> Signs:
        """Pack the signs of all entries of ``values``."""
        flat, _ = ravel_pytree(values)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(jnp.packbits(flat >= 0), jax.tree.structure(values), shapes)

    def values(self) -> Tree:
        """Unpack: a tree of 1 and -1 in the original shapes and dtypes."""
        zeros = [jnp.zeros(shape, name) for shape, name in self.shapes]
        flat, unravel = ravel_pytree(self.structure.unflatten(zeros))
        ones = 2 * jnp.unpackbits(self.bits, count=flat.size).astype(flat.dtype) - 1
        return unravel(ones)
