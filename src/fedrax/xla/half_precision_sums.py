"""Sums of 16-bit numbers in float32, rounded once.

XLA:CPU rounds after every addition of a sum over several axes, of a scatter and of a window. The gradient of a bias or
of an embedding table, over the places of a batch, stops growing then: 256 + 1 is 256 in bfloat16.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_short
from fedrax.xla.rewriting import Rule


def in_float32(rule: Rule) -> Rule:
    """The rule of an operation that adds up its one input, ``rule`` where that has not 16 bits."""

    def ruled(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
        (x,) = inputs
        if not is_short(x.dtype):
            return rule(inputs, equation)
        return equation.primitive.bind(x.astype(jnp.float32), **equation.params).astype(x.dtype)

    return ruled


def scattered(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for ``scatter-add``."""
    (onto, places, numbers), params = inputs, equation.params
    if not is_short(onto.dtype):
        return None
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    wide = lax.scatter_add(
        onto.astype(jnp.float32), places, numbers.astype(jnp.float32), **{name: params[name] for name in names}
    )
    return wide.astype(onto.dtype)
