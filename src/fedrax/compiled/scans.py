"""Sums over the turns of a scan, made after it where that is faster.

The gradient of a recurrent network adds to its weights' gradients at every time step: a product [A, B] [B, C] of a few
samples, as large as the weights, and a pass over them to add it up. If both factors of all steps are kept instead, they
are one product after the loop, over steps and samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.compiled.rewriting import Rules, replayed
from fedrax.compiled.samples import parts_of_scan

_MOST = 1 << 28
"""Bytes of factors that are kept."""
_WORTH = 8
"""How many times as large as its factors a product is at least; with less, adding it up in the cache is as fast."""
_PASSED_ON = ("transpose", "reshape", "squeeze", "slice", "split")
"""Of a sum they are the sum of each."""


class Added(NamedTuple):
    """What a scan adds to one of its carried arrays in every turn, and does nothing else with that array."""

    root: core.JaxprEqn
    """A product, or a sum over some axes."""
    then: tuple[tuple[core.JaxprEqn, int], ...]
    """What comes between it and the addition, in this order, and which output of it."""


def sums_after(rules: Rules, inputs: list, equation: core.JaxprEqn) -> list | None:
    """The outputs of a scan, whose body is rewritten by ``rules``; None where it holds no such sums."""
    fixed, carried = parts_of_scan(equation)
    closed, length = equation.params["jaxpr"], equation.params["length"]
    body: Any = closed.jaxpr
    added = _worth_it(_added(body, fixed, carried), body, fixed + carried, length)
    if not added:
        return None
    factors = dict.fromkeys(v for sum_ in added.values() for v in sum_.root.invars)
    cut = dict(zip(body.invars[fixed + carried :], inputs[fixed + carried :], strict=True))
    made = [v for v in factors if v not in cut]
    left = [i for i in range(carried) if i not in added]
    wanted = [*(body.outvars[i] for i in left), *body.outvars[carried:], *made]

    def turn(carry: list, xs: list) -> tuple[list, list]:
        whole = list(inputs[fixed : fixed + carried])  # of those that are left out only the addition is made of them
        for i, value in zip(left, carry, strict=True):
            whole[i] = value
        outputs = replayed(closed, [*inputs[:fixed], *whole, *xs], rules, wanted)
        return outputs[: len(left)], outputs[len(left) :]

    start, xs = [inputs[fixed + i] for i in left], list(inputs[fixed + carried :])
    how = {name: equation.params[name] for name in ("reverse", "unroll")}
    carry, given = lax.scan(turn, start, xs, length, **how)
    stacked = cut | dict(zip(made, given[len(given) - len(made) :], strict=True))
    totals: dict[Any, Array] = {}
    ends = dict(zip(left, carry, strict=True))
    for i, sum_ in added.items():
        of = sum_.root.outvars[0]
        if of not in totals:
            totals[of] = _total(sum_.root, [stacked[v] for v in sum_.root.invars])
        total = totals[of]
        for each, output in sum_.then:
            total = each.primitive.bind(total, **each.params)
            total = total[output] if each.primitive.multiple_results else total
        ends[i] = inputs[fixed + i] + total
    return [*(ends[i] for i in range(carried)), *given[: len(given) - len(made)]]


def _added(body: Any, fixed: int, carried: int) -> dict[int, Added]:
    """By the number of the carried array."""
    by_output = {v: equation for equation in body.eqns for v in equation.outvars}
    uses = Counter(v for equation in body.eqns for v in equation.invars if not isinstance(v, core.Literal))
    uses.update(v for v in body.outvars if not isinstance(v, core.Literal))
    found: dict[int, Added] = {}
    readers: dict[Any, set[int]] = {}
    for i, (before, after) in enumerate(zip(body.invars[fixed : fixed + carried], body.outvars, strict=False)):
        last = None if isinstance(after, core.Literal) else by_output.get(after)
        if last is None or last.primitive.name not in ("add", "add_any") or uses[before] != 1 or uses[after] != 1:
            continue
        if before not in last.invars:
            continue
        at, then = next(v for v in last.invars if v is not before), []
        while (made := None if isinstance(at, core.Literal) else by_output.get(at)) is not None:
            if made.primitive.name in ("dot_general", "reduce_sum"):
                found[i] = Added(made, tuple(reversed(then)))
                readers.setdefault(at, set()).add(id(then[-1][0] if then else last))
            if made.primitive.name not in _PASSED_ON or uses[at] != 1:
                break
            then.append((made, made.outvars.index(at)))
            at = made.invars[0]
    # nothing is saved of a product whose result is used otherwise too
    only = lambda v: len(readers[v]) == uses[v]  # noqa: E731
    return {i: added for i, added in found.items() if only(added.root.outvars[0])}


def _worth_it(added: dict[int, Added], body: Any, first_cut: int, length: int) -> dict[int, Added]:
    """Products that are much larger than what must be kept for them, and sums of what is kept all the same."""
    kept = set(body.invars[first_cut:])
    known = lambda v: not isinstance(v, core.Literal) and v not in body.invars[:first_cut] and v not in body.constvars  # noqa: E731
    size = lambda vs: sum(v.aval.size * v.aval.dtype.itemsize for v in vs)  # noqa: E731
    chosen, room = {}, _MOST
    for name in ("dot_general", "reduce_sum"):
        for i, each in added.items():
            if each.root.primitive.name != name or not all(map(known, each.root.invars)):
                continue
            more = set(each.root.invars) - kept
            needless = (
                name == "reduce_sum" or _WORTH * size(more) > size(each.root.outvars) or length * size(more) > room
            )
            if more and needless:
                continue
            room -= length * size(more)
            kept |= more
            chosen[i] = each
    return chosen


def _total(root: core.JaxprEqn, factors: Sequence[Array]) -> Array:
    """The sum over all turns, from inputs [turns, ...] of each."""
    params = root.params
    if root.primitive.name == "reduce_sum":
        return jnp.sum(factors[0], (0, *(axis + 1 for axis in params["axes"])))
    (summed, batch) = params["dimension_numbers"]
    summed = tuple((0, *(axis + 1 for axis in axes)) for axes in summed)
    if not batch[0] and all(axes == tuple(range(len(axes))) for axes in summed):
        # one axis to sum over: of several XLA makes a transposed copy first
        free = [a.shape[len(axes) :] for a, axes in zip(factors, summed, strict=True)]
        factors = [a.reshape(-1, *rest) for a, rest in zip(factors, free, strict=True)]
        summed = ((0,), (0,))
    batch = tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    return root.primitive.bind(*factors, **{**params, "dimension_numbers": (summed, batch)})
