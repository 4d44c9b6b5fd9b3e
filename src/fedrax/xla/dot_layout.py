"""Operand layouts of ``dot_general`` that XLA's CPU backend multiplies without transposed copies.

- :func:`lower_dot_general` matches products that contract leading axes, as the gradients of weights (sum over n of
  g_n x_n') and of attention do. Several contracted axes become one, and the narrower operand comes first. XLA:CPU makes
  a transposed copy of the first operand, and of the second one if its last axis is contracted; that takes longer than
  the product where the copied operand is the wide one. Only float32 and float64.
- :func:`lower_batched_matvec` matches a matrix [D, C] times [..., C], as ``vmap`` makes of matrix @ vector (Equinox
  layers), before differentiation. It puts the vectors first, so that the products of the gradient need no copies, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core


def is_batched_matvec(equation: core.JaxprEqn) -> bool:
    """Whether it is the product of a matrix [D, C] and several axes [..., C], as ``vmap`` makes of matrix @ vector."""
    if equation.primitive.name != "dot_general":
        return False
    (summed, (batch, _)), (left, right) = equation.params["dimension_numbers"], (v.aval for v in equation.invars)
    last = tuple(map(tuple, summed)) == ((1,), (right.ndim - 1,))  # type: ignore[attr-defined]
    return last and not batch and left.ndim == 2 and right.ndim > 2  # type: ignore[attr-defined]


def lower_batched_matvec(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """The rule for ``dot_general`` before a function is differentiated: such a product as [..., D], then as [D, ...].

    What comes next has the axes turned back, which leaves nothing to be done. As JAX writes it XLA makes transposed
    copies, in the products of the gradient too.
    """
    if not is_batched_matvec(equation):
        return None
    ((of_left, of_right), batch), (left, right) = equation.params["dimension_numbers"], inputs
    wanted = [equation.params[name] for name in ("precision", "preferred_element_type")]
    return jnp.moveaxis(lax.dot_general(right, left, ((of_right, of_left), batch), *wanted), -1, 0)


def lower_dot_general(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """The rule for ``dot_general``: several leading axes to sum over are one, and the narrower factor comes first.

    The barrier: XLA would exchange the operands of a product whose result is transposed next.
    """
    of: Any
    (of, batch), (left, right) = equation.params["dimension_numbers"], inputs
    wanted = [equation.params[name] for name in ("precision", "preferred_element_type")]
    if {left.dtype.name, right.dtype.name} - {"float32", "float64"}:
        return None
    axes = len(of[0])
    if flat := axes > 1 and not batch[0] and all(tuple(summed) == tuple(range(axes)) for summed in of):
        left, right = (a.reshape(math.prod(a.shape[:axes]), math.prod(a.shape[axes:])) for a in (left, right))
        of = ((0,), (0,))
    first, rows, sums = _layout(left.shape, of[0], batch[0])
    also_first, columns, _ = _layout(right.shape, of[1], batch[1])
    keeps = first and 1 < min(rows, columns) < sums  # else the copy is no larger than the result
    exchanged = keeps and (rows > columns or not also_first)
    if not keeps and not flat:
        return None
    if exchanged:
        left, right, of, batch = right, left, of[::-1], batch[::-1]
    total = lax.dot_general(left, right, (of, batch), *wanted)
    if keeps:
        total = lax.optimization_barrier(total)
    if exchanged:
        begin, ndim = len(batch[0]), left.ndim - len(batch[0]) - len(of[0])
        total = jnp.moveaxis(total, range(begin, begin + ndim), range(total.ndim - ndim, total.ndim))
    return total.reshape(equation.outvars[0].aval.shape)  # type: ignore[attr-defined]


def _layout(shape: tuple[int, ...], summed: Sequence[int], batch: Sequence[int]) -> tuple[bool, int, int]:
    """Of an operand: whether sums are over the first of the axes that are not the batch's; the sizes of both kinds."""
    free = [axis for axis in range(len(shape)) if axis not in (*summed, *batch)]
    size = lambda axes: math.prod(shape[axis] for axis in axes)  # noqa: E731
    return max(summed, default=-1) < min(free, default=len(shape)), size(free), size(summed)
