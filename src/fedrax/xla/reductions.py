"""Reductions over awkward axes, and sums of half-precision numbers, on XLA's CPU backend.

Matches ``reduce_sum``, ``reduce_max``, ``reduce_window_sum`` and ``scatter-add``.

- A sum over the last axis and others that are not next to it (group norm) becomes two sums, the others first: XLA:CPU
  vectorizes a sum where the last axis stays, and adds scalars where it is reduced.
- Unit axes are removed from sums and maxima: where a sum is read by what it is a sum of, as in the gradient of a
  softmax, XLA:CPU takes six times as long for arrays with axes of length one.
- Sums of bfloat16 and float16 are accumulated in float32 and rounded once. XLA:CPU rounds after every addition, so that
  the gradient of a bias or of an embedding stops growing: 256 + 1 is 256 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_half_precision

_MANY_SUMS = 1 << 15
"""Results of one sum from which on XLA may not move it: it would move a reshape of them to the summands, write these
out, and compute each of them again for every result."""


def accumulate_in_float32(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for sums of one half-precision operand: computed in float32, rounded once."""
    (x,) = inputs
    if not is_half_precision(x.dtype):
        return None
    return equation.primitive.bind(x.astype(jnp.float32), **equation.params).astype(x.dtype)


def lower_scatter_add(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for ``scatter-add``."""
    (onto, places, numbers), params = inputs, equation.params
    if not is_half_precision(onto.dtype):
        return None
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    wide = lax.scatter_add(
        onto.astype(jnp.float32), places, numbers.astype(jnp.float32), **{name: params[name] for name in names}
    )
    return wide.astype(onto.dtype)


def lower_reduce_max(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """`reduce_max` without axes of length one, as :func:`lower_reduce_sum`."""
    (x,) = inputs
    empty = any(x.shape[axis] == 0 for axis in equation.params["axes"])  # of which there is no largest
    if 1 not in x.shape or empty or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    return _reduce_without_unit_axes(jnp.max, x, equation.params["axes"])


def lower_reduce_sum(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """The rule for ``reduce_sum``: over axes that are not next to the last ones first, then over the last ones.

    XLA:CPU adds vectors where the last axis stays, and single numbers where it goes; and where a sum goes back into
    what it is of, as in a softmax's gradient, it is six times as slow at arrays with axes of length one. Many sums stay
    as they are: it would move a reshape of them to what they are of, which it then writes out, and computes anew for
    each of its numbers what it is made of.
    """
    (x,), axes = inputs, equation.params["axes"]
    many = equation.outvars[0].aval.size >= _MANY_SUMS  # type: ignore[attr-defined]
    if x.dtype not in (jnp.float32, jnp.float64) or not (many or 1 in x.shape or _leading_axes(x, axes)):
        return None
    y = _reduce_without_unit_axes(_two_step_sum, x, axes) if 1 in x.shape else _two_step_sum(x, axes)
    return lax.optimization_barrier(y) if many else y


def _reduce_without_unit_axes(
    reduced: Callable[[Array, tuple[int, ...]], Array], x: Array, axes: Sequence[int]
) -> Array:
    """``reduced`` over ``axes``, of an array that has none of length one."""
    long = [axis for axis, size in enumerate(x.shape) if size != 1]
    left = [size for axis, size in enumerate(x.shape) if axis not in axes]
    squeezed = x.reshape([x.shape[axis] for axis in long])
    return reduced(squeezed, tuple(i for i, axis in enumerate(long) if axis in axes)).reshape(left)


def _leading_axes(x: Array, axes: Sequence[int]) -> tuple[int, ...]:
    """Those of ``axes`` that are not next to the last ones, if last ones are among them."""
    first = tuple(axis for axis in axes if any(other not in axes for other in range(axis, x.ndim)))
    return first if len(first) < len(axes) else ()


def _two_step_sum(x: Array, axes: Sequence[int]) -> Array:
    first = _leading_axes(x, axes)
    return lax.optimization_barrier(x.sum(first, keepdims=True)).sum(axes) if first else x.sum(axes)
