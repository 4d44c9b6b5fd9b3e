"""Sums of clipped per-example gradients, without materializing those that are outer products (ghost norms).

Matches outputs of a per-example gradient that are outer products: the gradient of example b in a dense layer's weight
is a_b g_b', of the layer's input and the gradient of its output. Its norm is |a_b| |g_b|, and the sum of c_b a_b g_b'
is one matrix product, so that neither needs the gradients themselves (ghost norms: Goodfellow 2015; book-keeping: Bu
et al. 2023). :func:`clipped_gradient_sum` finds them in the trace of any function and materializes all other leaves,
[B, ...].
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
"""Fewest numbers of a gradient that are worth a step of a loop."""


def clipped_gradient_sum(
    gradient: Callable[..., Tree], params: Tree, *samples: Tree, bound: Any, counts: Array
) -> Tree:
    """sum_b min(1, bound / |g_b|) g_b, with g_b = gradient(params, *samples_b) and the length over all its leaves.

    samples: pytrees of arrays [B, ...]. counts: bool [B], False for samples to leave out. A gradient with a length that
    is not finite counts as zero. Each g_b computed in float32 or above is within the bound but for float rounding.
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
    length = jnp.sqrt(sum((leaf.length() ** 2 for leaf in leaves), jnp.zeros(())))
    factor = jnp.where(length > bound, bound / jnp.where(length > 0, length, 1), 1)
    keep = jnp.isfinite(length) & counts
    return jax.tree.unflatten(structure, [leaf.summed(keep, factor) for leaf in leaves])


def materialized_bytes(gradient: Callable[..., Tree], params: Tree, *samples: Tree) -> int:
    """Of the gradients of ``samples``, the bytes of those leaves that :func:`clipped_gradient_sum` writes out."""
    closed, _, found = _trace_gradients(gradient, params, *samples)
    whole = [v.aval for v, product in zip(closed.jaxpr.outvars, found, strict=True) if product is None]
    return sum(aval.size * aval.dtype.itemsize for aval in whole)  # type: ignore[attr-defined]


def _trace_gradients(
    gradient: Callable[..., Tree], params: Tree, *samples: Tree
) -> tuple[Any, Any, list[_OuterProduct | None]]:
    """(the gradients of all samples as a jaxpr, their structure, which leaves are products of what)."""
    batched = optimize(jax.vmap(gradient, (None, *(0 for _ in samples))), per_example=True)
    closed, structure = trace_inlined(batched, params, *samples)
    makers = {v: equation for equation in closed.jaxpr.eqns for v in equation.outvars}
    if not is_enabled("ghost_norm"):
        return closed, structure, [None] * len(closed.jaxpr.outvars)
    products = [_match_outer_product(v, makers) for v in closed.jaxpr.outvars]
    if any(product is not None for product in products):
        note_applied("ghost_norm")
    return closed, structure, products


# -- leaves -----------------------------------------------------------------------------------------------------------


class _Materialized(NamedTuple):
    """Gradients that are written out."""

    gradients: Array
    """[B, ...]."""

    def length(self) -> Array:
        """Of each sample's, [B]."""
        return jnp.sqrt(jnp.sum(jnp.square(self.gradients), range(1, self.gradients.ndim)))

    def summed(self, keep: Array, factor: Array) -> Array:
        """sum_b factor_b g_b over those that are kept."""
        g = self.gradients
        if math.prod(g.shape[1:]) < _MIN_LOOP_SIZE:
            return _weighted_sum(g, keep, factor)
        return lax.platform_dependent(g, keep, factor, cpu=_weighted_sum_in_loop, default=_weighted_sum)


def _weighted_sum(g: Array, keep: Array, factor: Array) -> Array:
    return jnp.where(_broadcast_along(keep, g), _broadcast_along(factor, g).astype(g.dtype) * g, 0).sum(0)


def _weighted_sum_in_loop(g: Array, keep: Array, factor: Array) -> Array:
    """One example after another: XLA:CPU would sum long gradients element by element, with large strides."""
    add = lambda b, total: total + jnp.where(keep[b], factor[b].astype(g.dtype) * g[b], 0)  # noqa: E731
    return lax.fori_loop(0, len(g), add, jnp.zeros(g.shape[1:], g.dtype))


class _OuterProduct(NamedTuple):
    """An output that is, but for the order and grouping of its axes, the outer products of two arrays."""

    factors: tuple[Any, Any]
    """The variables (a, g)."""
    axes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of each: its samples, then those of size one that the product sums over."""
    relabeled: tuple[core.JaxprEqn, ...]
    """The transpositions and reshapes between the product [B, ...] and the output, the first one first."""


class _Factored(NamedTuple):
    """Gradients a_b g_b'."""

    found: _OuterProduct
    left: Array
    right: Array

    def length(self) -> Array:
        """Of each sample's, [B]."""
        (left, right), (of_left, of_right) = (self.left, self.right), self.found.axes
        return _norms(left, of_left[0]) * _norms(right, of_right[0])

    def summed(self, keep: Array, factor: Array) -> Array:
        """sum_b factor_b a_b g_b' over those that are kept: one matrix product, as exact as the device can."""
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
    """values [B] in the shape in which they go along ``axis`` of ``array``."""
    return values.reshape([-1 if i == axis else 1 for i in range(array.ndim)])


def _norms(array: Array, axis: int) -> Array:
    """The length of each part along ``axis``, [B]; no square of a number of the array overflows or vanishes.

    The other factor may be as large as this one is small.
    """
    others = tuple(i for i in range(array.ndim) if i != axis)
    # As XLA does not know it: it would square both sides of a quotient with a constant before it divides them.
    array = lax.optimization_barrier(array)
    largest = jnp.abs(array).max(others, keepdims=True)
    size = jnp.where(largest > 0, largest, 1)
    return jnp.sqrt(jnp.sum(jnp.square(array / size), others)) * size.reshape(-1)


# -- the search -------------------------------------------------------------------------------------------------------


def _match_outer_product(output: Any, makers: dict) -> _OuterProduct | None:
    """The two factors of an output [B, ...]; None where it is anything else."""
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
    """Whether an equation only moves numbers about, none from one sample to another."""
    name, params = equation.primitive.name, equation.params
    if name == "transpose":
        return params["permutation"][0] == 0
    if name in ("reshape", "squeeze"):
        shapes = [v.aval.shape for v in (equation.invars[0], equation.outvars[0])]  # type: ignore[attr-defined]
        return all(len(shape) > 0 for shape in shapes) and shapes[0][0] == shapes[1][0] and not params.get("sharding")
    return False
