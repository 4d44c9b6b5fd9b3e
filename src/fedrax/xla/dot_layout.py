"""Operand layouts of ``dot_general`` that XLA's CPU backend multiplies without transposed copies.

:func:`lower_dot_general`, around a gradient:

- Before: a ``dot_general`` that contracts leading axes, as the gradients of weights (sum over n of g_n x_n') and of
  attention do.
- After: one contracted axis instead of several, and the narrower operand first.
- Why: XLA:CPU makes a transposed copy of the first operand if its first axis is contracted, and of the second one if
  its last axis is. That takes longer than the product where the copied operand is the wide one.
- Not for: dtypes other than float32 and float64.

:func:`lower_batched_matvec`, before differentiation:

- Before: a matrix [D, C] times [..., C], as ``vmap`` makes of matrix @ vector (Equinox layers).
- After: the vectors as first operand, and the result's axes moved back.
- Why: XLA:CPU makes transposed copies of the first form, also in the products of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core


def is_batched_matvec(equation: core.JaxprEqn) -> bool:
    """Whether an equation multiplies a matrix [D, C] by [..., C] with several leading axes."""
    if equation.primitive.name != "dot_general":
        return False
    (summed, (batch, _)), (left, right) = equation.params["dimension_numbers"], (v.aval for v in equation.invars)
    last = tuple(map(tuple, summed)) == ((1,), (right.ndim - 1,))  # type: ignore[attr-defined]
    return last and not batch and left.ndim == 2 and right.ndim > 2  # type: ignore[attr-defined]


def lower_batched_matvec(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """Rule for ``dot_general`` before differentiation: compute [..., D], then move D to the front.

    ``vmap`` moves it back in the next equation, so that both transpositions cancel.
    """
    if not is_batched_matvec(equation):
        return None
    ((of_left, of_right), batch), (left, right) = equation.params["dimension_numbers"], inputs
    wanted = [equation.params[name] for name in ("precision", "preferred_element_type")]
    return jnp.moveaxis(lax.dot_general(right, left, ((of_right, of_left), batch), *wanted), -1, 0)


def lower_dot_general(inputs: list, equation: core.JaxprEqn) -> Array | None:
    """Rule for ``dot_general``: one contracted axis instead of several leading ones, and the narrower operand first."""
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
    copies = first and 1 < min(rows, columns) < sums  # otherwise the copy is no larger than the result
    exchanged = copies and (rows > columns or not also_first)
    if not copies and not flat:
        return None
    if exchanged:
        left, right, of, batch = right, left, of[::-1], batch[::-1]
    total = lax.dot_general(left, right, (of, batch), *wanted)
    if copies:  # or XLA exchanges the operands again, if the result is transposed next
        total = lax.optimization_barrier(total)
    if exchanged:
        begin, ndim = len(batch[0]), left.ndim - len(batch[0]) - len(of[0])
        total = jnp.moveaxis(total, range(begin, begin + ndim), range(total.ndim - ndim, total.ndim))
    return total.reshape(equation.outvars[0].aval.shape)  # type: ignore[attr-defined]


def _layout(shape: tuple[int, ...], summed: Sequence[int], batch: Sequence[int]) -> tuple[bool, int, int]:
    """(whether the contracted axes of an operand precede its free ones, size of the free axes, of the contracted)."""
    free = [axis for axis in range(len(shape)) if axis not in (*summed, *batch)]
    free_size, summed_size = (math.prod(shape[axis] for axis in axes) for axes in (free, summed))
    return max(summed, default=-1) < min(free, default=len(shape)), free_size, summed_size
