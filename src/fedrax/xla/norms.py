"""Norms of differences without writing the difference.

Matches :func:`norm` of a - b for trees a and b of one shape, as of a client's update x_i - x. `fedrax_square`
marks the question in the trace; where the marked vector is a difference, :func:`fuse_norms_of_differences` computes the
sum of squares of both operands in blocks. Without it XLA writes an array that only the aggregation reads again. In all
other cases the marked function computes the norm as `fedrax.tree.norm`.
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
    """The Euclidean norm over the whole tree, as ``tree.norm``."""
    return jnp.sqrt(sum(map(fedrax_square, jax.tree.leaves(vector)), jnp.zeros(())))


def fuse_norms_of_differences(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same function, with marked lengths of differences asked of what they are differences of."""
    jaxpr = closed.jaxpr
    if not is_enabled("norms") or not any(map(_is_marked_square, jaxpr.eqns)):
        return closed
    makers = {v: equation for equation in jaxpr.eqns for v in equation.outvars}

    def fused(equation: core.JaxprEqn) -> core.JaxprEqn:
        maker = makers.get(equation.invars[0]) if _is_marked_square(equation) else None  # type: ignore[arg-type]
        if maker is None or not _is_difference(maker):
            return equation
        note_applied("norms")
        two = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in maker.invars]
        (call,) = jax.make_jaxpr(fedrax_square_of_difference)(*two).jaxpr.eqns
        return call.replace(invars=list(maker.invars), outvars=list(equation.outvars))

    return closed.replace(jaxpr=jaxpr.replace(eqns=[fused(equation) for equation in jaxpr.eqns]))


@jax.jit
def fedrax_square(leaf: Array) -> Array:
    """The mark is its name, which no other function in a program has."""
    return tree.dot(leaf, leaf)


@jax.jit
def fedrax_square_of_difference(a: Array, b: Array) -> Array:
    """What takes its place."""
    return tree.square_of(jnp.subtract, a, b)


def _is_marked_square(equation: core.JaxprEqn) -> bool:
    """About a variable, and not a constant."""
    marked = equation.params.get("name") == "fedrax_square" and equation.primitive.name in ("jit", "pjit")
    return marked and not isinstance(equation.invars[0], core.Literal)


def _is_difference(equation: core.JaxprEqn) -> bool:
    """Of two arrays of one shape and type."""
    kinds = {(v.aval.shape, v.aval.dtype) for v in equation.invars}  # type: ignore[attr-defined]
    return equation.primitive.name == "sub" and len(kinds) == 1
