"""Hoisted random draws: arrays with a row for each example are drawn before a batch is split.

- Before: a loss that draws arrays [B, ...] from its key, such as dropout masks or the noise of a variational
  autoencoder.
- After: two functions: one that draws for the whole batch, and one that takes the drawn arrays as inputs
  (:func:`hoist_random_draws`).
- Why: examples of the second function can be independent, so that :mod:`fedrax.xla.microbatch` can split the batch. The
  numbers are the same as without microbatches.
- Not for: drawn arrays without a batch axis, or whose other axes depend on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend import core
from jax.sharding import use_abstract_mesh

from fedrax.tree import Tree
from fedrax.xla.rewriting import evaluate_subgraph, inline_calls
from fedrax.xla.threefry import lower_random_bits
from fedrax.xla.tracing import NO_MESH, cached_trace, owned_cache

_RULES = {"random_bits": lower_random_bits}


class HoistedDraws(NamedTuple):
    """A loss (params, batch, key) -> [B] as two functions: random draws, and the rest."""

    draws: Callable[[Tree, Tree, Array], tuple[list[Array], list[Array]]]
    """(params, batch, key) -> (arrays [B, ...], others); of params and batch only the shapes are used."""
    losses: Callable[[Tree, tuple[Tree, list[Array]], list[Array]], Array]
    """The rest, (params, (batch, arrays), others) -> [B]."""
    fits: Callable[[Tree, Tree, Array], bool]
    """Whether the loss draws arrays of the same shapes per example for another batch size."""


def hoist_random_draws(losses: Callable, params: Tree, batch: Tree, key: Array) -> HoistedDraws | None:
    """Split a loss into random draws and the rest; None if it draws no array with a batch axis.

    Args:
        losses: (params, batch, key) -> [B]; it must not close over tracers.
        params: parameters; only their shapes are used.
        batch: pytree of arrays [B, ...]; only their shapes are used. No other axis may have length B.
        key: random key.
    """
    first = _boundary(_inlined_trace(losses, params, batch, key))
    rows = jax.tree.leaves(batch)[0].shape[:1]
    has_rows = [variable.aval.shape[:1] == rows for variable in first]
    if not any(has_rows):
        return None

    def partition(found: Sequence[Any]) -> tuple[list, list]:
        both = list(zip(found, has_rows, strict=True))
        return [a for a, is_row in both if is_row], [a for a, is_row in both if not is_row]

    def fits(params: Tree, batch: Tree, key: Array) -> bool:
        found, size = _boundary(_inlined_trace(losses, params, batch, key)), jax.tree.leaves(batch)[0].shape[:1]
        wanted = [(size + v.aval.shape[1:] if row else v.aval.shape) for v, row in zip(first, has_rows, strict=True)]
        return [v.aval.shape for v in found] == wanted

    def draws(params: Tree, batch: Tree, key: Array) -> tuple[list[Array], list[Array]]:
        closed = _inlined_trace(losses, params, batch, key)
        return partition(evaluate_subgraph(closed, {closed.jaxpr.invars[-1]: key}, _boundary(closed), _RULES))

    def rest(params: Tree, inputs: tuple[Tree, list[Array]], others: list[Array]) -> Array:
        batch, arrays = inputs
        closed = _inlined_trace(losses, params, batch, key)
        known = dict(zip(closed.jaxpr.invars[:-1], jax.tree.leaves((params, batch)), strict=True))  # without the key
        with_rows, without_rows = partition(_boundary(closed))
        known |= dict(zip([*with_rows, *without_rows], [*arrays, *others], strict=True))
        (result,) = evaluate_subgraph(closed, known, closed.jaxpr.outvars)
        return result

    return HoistedDraws(draws, rest, fits)


def _inlined_trace(losses: Callable, *args: Any) -> core.ClosedJaxpr:
    """The cached trace of a loss, with its calls inlined."""
    return _inline(losses, cached_trace(losses, *args))


@owned_cache()
def _inline(losses: Callable, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The cached result of inlining a trace of ``losses``."""
    with use_abstract_mesh(NO_MESH):
        return inline_calls(closed)


def _boundary(closed: core.ClosedJaxpr) -> list[Any]:
    """The variables between draws and rest: they depend on the key, the last input, alone, and the rest reads them.

    Broadcasts of drawn arrays and conversions of booleans belong to the rest, since their outputs are larger.
    """
    *others, key = closed.jaxpr.invars
    drawn, known, crossing = {key}, set(others), {}
    for equation in closed.jaxpr.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
        from_key = [v for v in inputs if v in drawn]
        if not known.isdisjoint(inputs) or (from_key and _is_expansion(equation)):
            crossing.update(dict.fromkeys(from_key))
            known.update(equation.outvars)
        elif from_key:
            drawn.update(equation.outvars)
    return list(crossing)


def _is_expansion(equation: core.JaxprEqn) -> bool:
    """Whether an equation only makes an array larger: a broadcast, or booleans to numbers."""
    name, kinds = equation.primitive.name, [v.aval.dtype for v in equation.invars]  # type: ignore[attr-defined]
    return name == "broadcast_in_dim" or (name == "convert_element_type" and kinds == [bool])
