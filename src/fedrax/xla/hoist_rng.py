"""Hoisted random draws: arrays with a row for each example are drawn before a batch is split.

Matches arrays [B, ...] that depend on the key alone, such as dropout masks and the noise of a variational autoencoder.
:func:`hoist_random_draws` splits a loss into its draws for the whole batch and the rest, which takes them as further
inputs and may be independent per example. The numbers are the same as without microbatches.

It does not apply where a drawn array has no batch axis, or another size for another batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.extend import core
from jax.sharding import use_abstract_mesh

from fedrax.tree import Tree
from fedrax.xla.rewriting import evaluate_subgraph, inline_calls
from fedrax.xla.threefry import lower_random_bits
from fedrax.xla.tracing import CACHE_SIZE, NO_MESH, cached_trace

_RULES = {"random_bits": lower_random_bits}


class HoistedDraws(NamedTuple):
    """A function of a batch, (params, batch, key) -> [B], apart from what it draws."""

    draws: Callable[[Tree, Tree, Array], tuple[list[Array], list[Array]]]
    """(params, batch, key) -> (arrays [B, ...], others); of the first two only the shapes matter."""
    losses: Callable[[Tree, tuple[Tree, list[Array]], list[Array]], Array]
    """The rest of it, (params, (batch, arrays), others) -> [B]."""
    fits: Callable[[Tree, Tree, Array], bool]
    """Whether the function draws the like for a batch of other size."""


def hoist_random_draws(losses: Callable, params: Tree, batch: Tree, key: Array) -> HoistedDraws | None:
    """``losses(params, batch, key)`` [B] in two parts; None where it draws nothing for each sample.

    batch: pytree of arrays [B, ...], where B is no other size in the function. Only shapes and types are looked at.
    ``losses`` holds no arrays of a program that is being traced.
    """
    first = _boundary(_inlined_trace(losses, params, batch, key))
    rows = jax.tree.leaves(batch)[0].shape[:1]
    of_samples = [variable.aval.shape[:1] == rows for variable in first]
    if not any(of_samples):
        return None

    def parted(found: Sequence[Any]) -> tuple[list, list]:
        both = list(zip(found, of_samples, strict=True))
        return [a for a, is_row in both if is_row], [a for a, is_row in both if not is_row]

    def fits(params: Tree, batch: Tree, key: Array) -> bool:
        found, size = _boundary(_inlined_trace(losses, params, batch, key)), jax.tree.leaves(batch)[0].shape[:1]
        wanted = [(size + v.aval.shape[1:] if row else v.aval.shape) for v, row in zip(first, of_samples, strict=True)]
        return [v.aval.shape for v in found] == wanted

    def draws(params: Tree, batch: Tree, key: Array) -> tuple[list[Array], list[Array]]:
        closed = _inlined_trace(losses, params, batch, key)
        return parted(evaluate_subgraph(closed, {closed.jaxpr.invars[-1]: key}, _boundary(closed), _RULES))

    def rest(params: Tree, inputs: tuple[Tree, list[Array]], others: list[Array]) -> Array:
        batch, arrays = inputs
        closed = _inlined_trace(losses, params, batch, key)
        known = dict(zip(closed.jaxpr.invars[:-1], jax.tree.leaves((params, batch)), strict=True))  # without the key
        mine, shared = parted(_boundary(closed))
        known |= dict(zip([*mine, *shared], [*arrays, *others], strict=True))
        (result,) = evaluate_subgraph(closed, known, closed.jaxpr.outvars)
        return result

    return HoistedDraws(draws, rest, fits)


def _inlined_trace(losses: Callable, *args: Any) -> core.ClosedJaxpr:
    return _inline(cached_trace(losses, *args))


@lru_cache(CACHE_SIZE)
def _inline(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    with use_abstract_mesh(NO_MESH):
        return inline_calls(closed)


def _boundary(closed: core.ClosedJaxpr) -> list[Any]:
    """The variables that depend on the key, the last input, and on no other one, and meet those that do.

    What only repeats a drawn array, or makes numbers of its truth values, is left to the other side: it is larger.
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
    name, kinds = equation.primitive.name, [v.aval.dtype for v in equation.invars]  # type: ignore[attr-defined]
    return name == "broadcast_in_dim" or (name == "convert_element_type" and kinds == [bool])
