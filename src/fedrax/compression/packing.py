"""Signs of numbers at one bit each."""

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
    """The signs of a tree's numbers as they travel; zero counts as positive."""

    bits: Array
    """uint8, eight signs each, of the tree's leaves laid end to end."""
    structure: Any
    shapes: tuple

    @classmethod
    def of(cls, values: Tree) -> Signs:
        """The signs of all numbers."""
        flat, _ = ravel_pytree(values)
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(values))
        return cls(jnp.packbits(flat >= 0), jax.tree.structure(values), shapes)

    def values(self) -> Tree:
        """1 and -1 in the tree's shapes and types."""
        likes = [jnp.zeros(shape, name) for shape, name in self.shapes]
        flat, unravel = ravel_pytree(self.structure.unflatten(likes))
        ones = 2 * jnp.unpackbits(self.bits, count=flat.size).astype(flat.dtype) - 1
        return unravel(ones)
