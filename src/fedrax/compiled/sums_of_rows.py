"""Gradients of weights that see several axes, such as samples and places, as XLA's CPU backend multiplies them fast.

The gradient of a dense layer's weight is sum_n g_n x_n' over all of them. As JAX writes it, with several axes to sum
over and g, mostly the larger one, first, XLA makes a transposed copy of g before it multiplies.
"""

from __future__ import annotations

import math

from jax import Array, lax
from jax.extend import core


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
