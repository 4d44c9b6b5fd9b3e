"""Gradients of weights that see several axes, such as samples and places, as XLA's CPU backend multiplies them fast.

The gradient of a dense layer's weight is sum_n g_n x_n' over all of them. As JAX writes it, with several axes to sum
over and g, mostly the larger one, first, XLA makes a transposed copy of g before it multiplies.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core


def has_rows_last(equation: core.JaxprEqn) -> bool:
    """Whether it is the product of a matrix [D, C] and several axes [..., C], as ``vmap`` makes of matrix @ vector."""
    if equation.primitive.name != "dot_general":
        return False
    (summed, (batch, _)), (left, right) = equation.params["dimension_numbers"], (v.aval for v in equation.invars)
    last = tuple(map(tuple, summed)) == ((1,), (right.ndim - 1,))  # type: ignore[attr-defined]
    return last and not batch and left.ndim == 2 and right.ndim > 2  # type: ignore[attr-defined]


def rows_first(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """The rule for ``dot_general`` before a function is differentiated: such a product as [..., D], then as [D, ...].

    What comes next has the axes turned back, which leaves nothing to be done. As JAX writes it XLA makes transposed
    copies, in the products of the gradient too.
    """
    if not has_rows_last(equation):
        return None
    ((of_left, of_right), batch), (left, right) = equation.params["dimension_numbers"], inputs
    wanted = [equation.params[name] for name in ("precision", "preferred_element_type")]
    return jnp.moveaxis(lax.dot_general(right, left, ((of_right, of_left), batch), *wanted), -1, 0)


def larger_last(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """The rule for ``dot_general``: of sums over all leading axes, where there are several, a product of two matrices
    with one axis to sum over, the wider matrix last."""
    (summed, batch), (left, right) = equation.params["dimension_numbers"], inputs
    axes, wanted = len(summed[0]), [equation.params[name] for name in ("precision", "preferred_element_type")]
    in_order = all(tuple(of) == tuple(range(axes)) for of in summed)
    if axes < 2 or not in_order or batch[0] or {left.dtype.name, right.dtype.name} - {"float32", "float64"}:
        return None
    left, right = (a.reshape(math.prod(a.shape[:axes]), math.prod(a.shape[axes:])) for a in (left, right))
    if turned := left.shape[1] > right.shape[1]:
        left, right = right, left
    total = lax.dot_general(left, right, (((0,), (0,)), ((), ())), *wanted)
    return (total.T if turned else total).reshape(equation.outvars[0].aval.shape)  # type: ignore[attr-defined]
