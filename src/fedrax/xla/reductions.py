"""Reductions over several axes or with unit axes, and half-precision sums, on XLA's CPU backend.

:func:`lower_reduce_sum` and :func:`lower_reduce_max`:

- Before: a sum over the last axis and others that are not next to it (group norm).
- After: two sums, over the other axes first. XLA:CPU vectorizes a sum that keeps the last axis, and adds scalars where
  it is reduced.
- Before: ``reduce_sum`` or ``reduce_max`` with axes of length one.
- After: the same without them. If the operand reads the sum again, as in the gradient of a softmax, XLA:CPU takes six
  times as long with unit axes.
- Not for: sums of dtypes other than float32 and float64, and maxima of integers.

:func:`accumulate_in_float32` and :func:`lower_scatter_add`:

- Before: ``reduce_sum``, ``reduce_window_sum`` or ``scatter-add`` of bfloat16 or float16.
- After: the same in float32, rounded once.
- Why: XLA:CPU rounds after every addition, so that the gradient of a bias or of an embedding stops growing: 256 + 1 is
  256 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.conv.window import is_half_precision

_MANY_SUMS = 1 << 15
"""Results of one sum from which an optimization barrier follows it. Otherwise XLA:CPU moves a reshape of the results
before the sum, materializes the summands, and recomputes each of them for every result."""


def accumulate_in_float32(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for half-precision sums of one operand: computed in float32, rounded once."""
    (x,) = inputs
    if not is_half_precision(x.dtype):
        return None
    return equation.primitive.bind(x.astype(jnp.float32), **equation.params).astype(x.dtype)


def lower_scatter_add(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for half-precision ``scatter-add``: computed in float32, rounded once."""
    (operand, indices, updates), params = inputs, equation.params
    if not is_half_precision(operand.dtype):
        return None
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    wide = lax.scatter_add(
        operand.astype(jnp.float32), indices, updates.astype(jnp.float32), **{name: params[name] for name in names}
    )
    return wide.astype(operand.dtype)


def lower_reduce_max(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``reduce_max`` with axes of length one."""
    (x,) = inputs
    empty = any(x.shape[axis] == 0 for axis in equation.params["axes"])  # jnp.max rejects an empty reduction
    if 1 not in x.shape or empty or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    return _reduce_without_unit_axes(jnp.max, x, equation.params["axes"])


def lower_reduce_sum(inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for ``reduce_sum``: in two steps where the reduced axes are apart, without unit axes, barrier if large."""
    (x,), axes = inputs, equation.params["axes"]
    many = equation.outvars[0].aval.size >= _MANY_SUMS  # type: ignore[attr-defined]
    if x.dtype not in (jnp.float32, jnp.float64) or not (many or 1 in x.shape or _leading_axes(x, axes)):
        return None
    y = _reduce_without_unit_axes(_two_step_sum, x, axes) if 1 in x.shape else _two_step_sum(x, axes)
    return lax.optimization_barrier(y) if many else y


def _reduce_without_unit_axes(
    reduced: Callable[[Array, tuple[int, ...]], Array], x: Array, axes: Sequence[int]
) -> Array:
    """Reduce ``axes`` of ``x`` by ``reduced``, which gets an array without axes of length one."""
    long = [axis for axis, size in enumerate(x.shape) if size != 1]
    left = [size for axis, size in enumerate(x.shape) if axis not in axes]
    squeezed = x.reshape([x.shape[axis] for axis in long])
    return reduced(squeezed, tuple(i for i, axis in enumerate(long) if axis in axes)).reshape(left)


def _leading_axes(x: Array, axes: Sequence[int]) -> tuple[int, ...]:
    """The reduced axes that a kept axis separates from the last one, if the last one is reduced, too."""
    first = tuple(axis for axis in axes if any(other not in axes for other in range(axis, x.ndim)))
    return first if len(first) < len(axes) else ()


def _two_step_sum(x: Array, axes: Sequence[int]) -> Array:
    """Sum over leading axes, then over the last ones; the barrier keeps XLA from merging both."""
    first = _leading_axes(x, axes)
    return lax.optimization_barrier(x.sum(first, keepdims=True)).sum(axes) if first else x.sum(axes)
