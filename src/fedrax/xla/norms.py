"""Norms of differences without writing the difference.

- Before: :func:`norm` of a - b, for trees a and b of one shape, such as a client's update x_i - x. The trace contains
  calls of :func:`fedrax_square`, which the pass recognizes by name.
- After: calls of :func:`fedrax_square_of_difference`, which sums the squares of blocks of a - b.
- Why: otherwise XLA writes the difference to memory, where only the aggregation reads it again.
- Not for: norms of anything else, which are computed as by ``fedrax.tree.norm``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core

from fedrax import tree
from fedrax.tree import Tree
from fedrax.xla.options import is_enabled, note_applied


def norm(vector: Tree) -> Array:
    """The Euclidean norm over all leaves, as ``tree.norm``."""
    return jnp.sqrt(sum(map(fedrax_square, jax.tree.leaves(vector)), jnp.zeros(())))


def fuse_norms_of_differences(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace norms of differences in a jaxpr, outside of its sub-jaxprs."""
    jaxpr = closed.jaxpr
    if not is_enabled("norms") or not any(map(_is_marked_square, jaxpr.eqns)):
        return closed
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def fused(equation: core.JaxprEqn) -> core.JaxprEqn:
        maker = makers.get(equation.invars[0]) if _is_marked_square(equation) else None  # type: ignore[arg-type]
        if maker is None or not _is_difference(maker):
            return equation
        note_applied("norms")
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in maker.invars]
        (call,) = jax.make_jaxpr(fedrax_square_of_difference)(*shapes).jaxpr.eqns
        return call.replace(invars=list(maker.invars), outvars=list(equation.outvars))

    return closed.replace(jaxpr=jaxpr.replace(eqns=[fused(equation) for equation in jaxpr.eqns]))


@jax.jit
def fedrax_square(leaf: Array) -> Array:
    """Sum of squares. The pass finds its calls by the function's name."""
    return tree.dot(leaf, leaf)


@jax.jit
def fedrax_square_of_difference(a: Array, b: Array) -> Array:
    """Sum of squares of a - b, computed in blocks."""
    return tree.square_of(jnp.subtract, a, b)


def _is_marked_square(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a call of :func:`fedrax_square` with a variable."""
    marked = equation.params.get("name") == "fedrax_square" and equation.primitive.name in ("jit", "pjit")
    return marked and not isinstance(equation.invars[0], core.Literal)


def _is_difference(equation: core.JaxprEqn) -> bool:
    """Whether an equation subtracts arrays of one shape and dtype."""
    kinds = {(v.aval.shape, v.aval.dtype) for v in equation.invars}  # type: ignore[attr-defined]
    return equation.primitive.name == "sub" and len(kinds) == 1
