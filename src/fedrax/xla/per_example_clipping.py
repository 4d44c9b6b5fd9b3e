"""Sums of clipped per-example gradients, without materializing those that are outer products (ghost norms).

- Before: leaves of a per-example gradient that are outer products: for a dense layer's weight the gradient of example b
  is a_b g_b', with the layer's input a_b and the gradient g_b of its output.
- After: the norm |a_b| |g_b|, and the sum of c_b a_b g_b' as one matrix product.
- Why: neither needs the gradients themselves, B times the memory of the weight (ghost norms: Goodfellow 2015;
  book-keeping: Bu et al. 2023).
- Not for: leaves that are anything else, such as the gradient of a convolution's kernel, which are materialized
  [B, ...]; half precision.

:func:`clipped_gradient_sum` finds outer products in the trace of any gradient function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.tree import Tree
from fedrax.xla.options import is_enabled, note_applied
from fedrax.xla.pipeline import optimize
from fedrax.xla.rewriting import evaluate_subgraph, trace_inlined

_MIN_LOOP_SIZE = 1 << 12
"""Fewest entries of an example's gradient that outweigh a step of a loop."""


def clipped_gradient_sum(
    gradient: Callable[..., Tree], params: Tree, *samples: Tree, bound: Any, counts: Array
) -> Tree:
    """Compute sum_b min(1, bound / |g_b|) g_b with g_b = gradient(params, *samples_b), without outer products.

    Each clipped gradient that is computed in float32 or wider is within the bound up to float rounding. A gradient
    whose norm is not finite is replaced by zero.

    Args:
        gradient: gradient of one example.
        params: parameters.
        samples: pytrees of arrays [B, ...].
        bound: largest norm, over all leaves of a gradient.
        counts: bool [B], False for examples to leave out.
    """
    closed, structure, found = _trace_gradients(gradient, params, *samples)
    wanted = [
        atoms
        for v, product in zip(closed.jaxpr.outvars, found, strict=True)
        for atoms in (product.factors if product else [v])
    ]
    known = dict(zip(closed.jaxpr.invars, jax.tree.leaves((params, *samples)), strict=True))
    values = iter(evaluate_subgraph(closed, known, wanted))
    leaves = [
        _Factored(product, next(values), next(values)) if product else _Materialized(next(values)) for product in found
    ]
    norm = jnp.sqrt(sum((leaf.norms() ** 2 for leaf in leaves), jnp.zeros(())))
    factor = jnp.where(norm > bound, bound / jnp.where(norm > 0, norm, 1), 1)
    keep = jnp.isfinite(norm) & counts
    return jax.tree.unflatten(structure, [leaf.weighted_sum(keep, factor) for leaf in leaves])


def materialized_bytes(gradient: Callable[..., Tree], params: Tree, *samples: Tree) -> int:
    """Bytes of the per-example gradients that :func:`clipped_gradient_sum` materializes."""
    closed, _, found = _trace_gradients(gradient, params, *samples)
    whole = [v.aval for v, product in zip(closed.jaxpr.outvars, found, strict=True) if product is None]
    return sum(aval.size * aval.dtype.itemsize for aval in whole)  # type: ignore[attr-defined]


def _trace_gradients(
    gradient: Callable[..., Tree], params: Tree, *samples: Tree
) -> tuple[Any, Any, list[_OuterProduct | None]]:
    """(jaxpr of the gradients of all examples, structure of the gradient, outer product or None for each leaf)."""
    batched = optimize(jax.vmap(gradient, (None, *(0 for _ in samples))), per_example=True)
    closed, structure = trace_inlined(batched, params, *samples)
    makers = {v: equation for equation in closed.jaxpr.eqns for v in equation.outvars}
    if not is_enabled("ghost_norm"):
        return closed, structure, [None] * len(closed.jaxpr.outvars)
    products = [_match_outer_product(v, makers) for v in closed.jaxpr.outvars]
    if any(product is not None for product in products):
        note_applied("ghost_norm")
    return closed, structure, products


# -- Leaves of a gradient ---------------------------------------------------------------------------------------------


class _Materialized(NamedTuple):
    """Per-example gradients of a leaf as an array."""

    gradients: Array
    """[B, ...]."""

    def norms(self) -> Array:
        """Norm of each example's gradient, [B]."""
        return jnp.sqrt(jnp.sum(jnp.square(self.gradients), range(1, self.gradients.ndim)))

    def weighted_sum(self, keep: Array, factor: Array) -> Array:
        """sum_b factor_b g_b over examples with ``keep``."""
        g = self.gradients
        if math.prod(g.shape[1:]) < _MIN_LOOP_SIZE:
            return _weighted_sum(g, keep, factor)
        return lax.platform_dependent(g, keep, factor, cpu=_weighted_sum_in_loop, default=_weighted_sum)


def _weighted_sum(g: Array, keep: Array, factor: Array) -> Array:
    """sum_b factor_b g_b over examples with ``keep``, which may be the only finite ones."""
    return jnp.where(_broadcast_along(keep, g), _broadcast_along(factor, g).astype(g.dtype) * g, 0).sum(0)


def _weighted_sum_in_loop(g: Array, keep: Array, factor: Array) -> Array:
    """:func:`_weighted_sum` in a loop over examples: XLA:CPU would sum long gradients entry by entry with a stride."""

    def add(b: Array, total: Array) -> Array:
        return total + jnp.where(keep[b], factor[b].astype(g.dtype) * g[b], 0)

    return lax.fori_loop(0, len(g), add, jnp.zeros(g.shape[1:], g.dtype))


class _OuterProduct(NamedTuple):
    """An output that is the outer products of two arrays, up to transposes and reshapes."""

    factors: tuple[Any, Any]
    """The variables (a, g)."""
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    """For each factor its batch axis, then the contracted axes, which have length one."""
    relabeled: tuple[core.JaxprEqn, ...]
    """Transposes and reshapes between the product [B, ...] and the output, in order."""


class _Factored(NamedTuple):
    """Per-example gradients a_b g_b' of a leaf as their factors."""

    found: _OuterProduct
    left: Array
    right: Array

    def norms(self) -> Array:
        """Norm of each example's gradient, [B]."""
        (left, right), (of_left, of_right) = (self.left, self.right), self.found.axes
        return _norms(left, of_left[0]) * _norms(right, of_right[0])

    def weighted_sum(self, keep: Array, factor: Array) -> Array:
        """sum_b factor_b a_b g_b' over examples with ``keep``: one matrix product in the highest precision."""
        (left, right), (of_left, of_right) = (self.left, self.right), self.found.axes
        left = jnp.where(
            _broadcast_along(keep, left, of_left[0]),
            _broadcast_along(factor, left, of_left[0]).astype(left.dtype) * left,
            0,
        )
        right = jnp.where(_broadcast_along(keep, right, of_right[0]), right, 0)
        total = lax.dot_general(left, right, (self.found.axes, ((), ())), lax.Precision.HIGHEST)[None]
        for equation in self.found.relabeled:
            if equation.primitive.name == "transpose":
                total = total.transpose(equation.params["permutation"])
            else:
                total = total.reshape(1, *equation.outvars[0].aval.shape[1:])  # type: ignore[attr-defined]
        return total[0]


def _broadcast_along(values: Array, array: Array, axis: int = 0) -> Array:
    """Reshape ``values`` [B] to broadcast along ``axis`` of ``array``."""
    return values.reshape([-1 if i == axis else 1 for i in range(array.ndim)])


def _norms(array: Array, axis: int) -> Array:
    """Norms [B] of the slices along ``axis``, scaled so that no square overflows or underflows.

    One factor of an outer product can be very large and the other very small.
    """
    others = tuple(i for i in range(array.ndim) if i != axis)
    # The barrier keeps XLA from simplifying (c / size)^2 to c^2 / size^2 for a constant c, which overflows
    array = lax.optimization_barrier(array)
    largest = jnp.abs(array).max(others, keepdims=True)
    size = jnp.where(largest > 0, largest, 1)
    return jnp.sqrt(jnp.sum(jnp.square(array / size), others)) * size.reshape(-1)


# -- Matching ---------------------------------------------------------------------------------------------------------


def _match_outer_product(output: Any, makers: dict) -> _OuterProduct | None:
    """The outer product that an output [B, ...] is; None for other outputs."""
    between: list[core.JaxprEqn] = []
    while (equation := makers.get(output)) is not None and _keeps_batch_axis(equation):
        between.append(equation)
        output = equation.invars[0]
    if equation is None or equation.primitive.name != "dot_general":
        return None
    left, right = equation.invars
    (of_left, of_right), (batch_left, batch_right) = equation.params["dimension_numbers"]
    summed = math.prod(left.aval.shape[axis] for axis in of_left)
    dtypes = {v.aval.dtype for v in (left, right, output)}
    if len(batch_left) != 1 or summed != 1 or len(dtypes) > 1 or dtypes & {jnp.bfloat16, jnp.float16}:
        return None
    axes = (*batch_left, *of_left), (*batch_right, *of_right)
    return _OuterProduct((left, right), axes, tuple(reversed(between)))


def _keeps_batch_axis(equation: core.JaxprEqn) -> bool:
    """Whether an equation is a transpose or reshape that keeps the batch axis first."""
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return params["permutation"][0] == 0
    if name in ("reshape", "squeeze"):
        shapes = [v.aval.shape for v in (equation.invars[0], equation.outvars[0])]  # type: ignore[attr-defined]
        return all(len(shape) > 0 for shape in shapes) and shapes[0][0] == shapes[1][0] and not params.get("sharding")
    return False
