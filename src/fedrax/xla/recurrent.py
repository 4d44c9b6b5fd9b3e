"""Products that leave the loop of a recurrent network: batched over time steps before or after the scan, on CPUs.

Matches a ``scan`` whose body multiplies few rows by large weights that are constant over the steps. At each step such a
product reads all of the weights.

- Products of weights and the scan's inputs need no earlier step: they are computed for all steps before the scan.
- Products of weights that only the stacked outputs need (the gradients of inputs) are computed after it.
- A product that is accumulated in the carry (the gradient of a weight) becomes one product over steps and rows after
  the scan.
- Weights whose products stay are transposed once before the scan, where that layout is faster.

It does not apply to small weights (`Limits.recurrent_weight_ratio`), where a step reads them at no extra cost, where
saved factors exceed 256 MiB, and to bodies with effects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.cse import eliminate_common_subexpressions
from fedrax.xla.options import limits, note_applied
from fedrax.xla.rewriting import Rules, dependency_slice, evaluate_subgraph, inline_calls
from fedrax.xla.threefry import is_unbatchable
from fedrax.xla.tracing import scan_counts

_MAX_BYTES = 1 << 28
"""Bytes of factors that are kept, and of products made ahead."""
_EXPENSIVE = ("dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call")
_FEW_ROWS = 48
"""Of a product by weights: with more, it takes no longer where the axis that is summed over is the weights' last."""
_LINEAR_RESHAPES = ("transpose", "reshape", "squeeze", "slice", "split")
"""Of a sum they are the sum of each."""
_COMBINING = ("add", "add_any", "transpose", "reshape", "squeeze")
"""What products are put together with: nothing that would rather be fused into the loop."""


class ScanBody(NamedTuple):
    """The body of a scan, inlined, with its inputs by kind."""

    closed: core.ClosedJaxpr
    fixed: tuple
    """Constants: the same at every step."""
    carried: tuple
    cut: tuple
    """Scanned inputs: one slice a step."""
    length: int

    @property
    def given(self) -> Sequence:
        """Stacked outputs."""
        return self.closed.jaxpr.outvars[len(self.carried) :]

    @property
    def ends(self) -> Sequence:
        """The carry after the step."""
        return self.closed.jaxpr.outvars[: len(self.carried)]


class Accumulation(NamedTuple):
    """An accumulator in the carry: what is added to it at every step; nothing else reads it."""

    root: core.JaxprEqn
    """A product, or a sum over some axes."""
    then: tuple[tuple[core.JaxprEqn, int], ...]
    """What comes between it and the addition, in this order, and which output of it."""


def hoist_dots_from_scan(rules: Rules, inputs: list, equation: core.JaxprEqn) -> list | None:
    """The outputs of a scan, whose body is rewritten by ``rules``; None where it holds no such products."""
    if equation.params["jaxpr"].effects:
        return None
    body = _scan_body(inputs, equation)
    before = _dots_before(body)
    added = _profitable(_accumulations(body), body)
    kept = {*body.cut, *before, *(v for sum_ in added.values() for v in sum_.root.invars)}
    after = _dots_after(body, kept)
    turned = _weights_to_transpose(body)
    if not (before or added or after or turned):
        return None
    note_applied("recurrent")
    fixed, carried = len(body.fixed), len(body.carried)
    known: dict[Any, Any] = dict(zip(body.fixed, inputs[:fixed], strict=True))
    stacked: dict[Any, Array] = dict(zip(body.cut, inputs[fixed + carried :], strict=True))
    stacked.update(_batch_over_steps(body, known, stacked, before, rules))
    ahead = list(stacked)
    left = [i for i in range(carried) if i not in added]
    factors = [v for sum_ in added.values() for v in sum_.root.invars] + [v for vs in after.values() for v in vs]
    made = list(dict.fromkeys(v for v in (*_nonliterals(body.given), *factors) if v not in stacked and v not in after))
    wanted = [body.ends[i] for i in left] + made
    laid_out = (
        {"dot_general": partial(_dot_with_transposed, _transposed_weights(body, known, turned))} if turned else {}
    )

    def turn(carry: list, xs: list) -> tuple[list, list]:
        given = {body.carried[i]: value for i, value in zip(left, carry, strict=True)}
        now = known | given | dict(zip(ahead, xs, strict=True))
        outputs = evaluate_subgraph(body.closed, now, wanted, {**rules, **laid_out})
        return outputs[: len(left)], outputs[len(left) :]

    how = {name: equation.params[name] for name in ("reverse", "unroll")}
    carry, rows = lax.scan(turn, [inputs[fixed + i] for i in left], list(stacked.values()), body.length, **how)
    stacked.update(zip(made, rows, strict=True))
    for v, sources in after.items():
        stacked.update(_batch_over_steps(body, known, {source: stacked[source] for source in sources}, [v], rules))
    ends = dict(zip(left, carry, strict=True)) | _final_sums(added, stacked, inputs[fixed : fixed + carried])
    return [*(ends[i] for i in range(carried)), *(_stacked_output(v, stacked, body.length) for v in body.given)]


def _scan_body(inputs: list, equation: core.JaxprEqn) -> ScanBody:
    """The body with calls inlined, inputs deduplicated, and common subexpressions eliminated."""
    closed, length = equation.params["jaxpr"], equation.params["length"]
    flat = inline_calls(closed)
    fixed, carried = scan_counts(equation)
    variables, first = flat.jaxpr.invars, {}
    same = {}
    for i, (value, v) in enumerate(zip(inputs, variables, strict=True)):
        if not fixed <= i < fixed + carried:
            same[v] = first.setdefault((id(value), i < fixed), v)
    last = fixed + carried
    parts = tuple(variables[:fixed]), tuple(variables[fixed:last]), tuple(variables[last:])
    return ScanBody(eliminate_common_subexpressions(flat, same), parts[0], parts[1], parts[2], length)


def _batch_over_steps(body: ScanBody, known: dict, stacked: dict, wanted: list, rules: Rules) -> dict[Any, Array]:
    """Evaluate ``wanted`` for all steps at once, by ``vmap`` over the stacked arrays."""
    if not wanted:
        return {}
    one = lambda xs: evaluate_subgraph(body.closed, known | dict(zip(stacked, xs, strict=True)), wanted, rules)  # noqa: E731
    return dict(zip(wanted, jax.vmap(one)(list(stacked.values())), strict=True))


def _nonliterals(atoms: Iterable) -> list:
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _makers(body: ScanBody) -> dict[Any, core.JaxprEqn]:
    return {v: equation for equation in body.closed.jaxpr.eqns for v in equation.outvars}


def _uses(body: ScanBody) -> Counter:
    uses = Counter(v for equation in body.closed.jaxpr.eqns for v in _nonliterals(equation.invars))
    uses.update(_nonliterals(body.closed.jaxpr.outvars))
    return uses


def _bytes(variables: Iterable) -> int:
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


def _computed_from(body: ScanBody, sources: Iterable) -> set:
    """Variables that are computed from ``sources`` and constants alone."""
    found = {*sources, *body.closed.jaxpr.constvars}
    for equation in body.closed.jaxpr.eqns:
        if all(v in found for v in _nonliterals(equation.invars)) and not is_unbatchable(equation):
            found.update(equation.outvars)
    return found


def _weight_dot_input(equation: core.JaxprEqn, weights: Collection) -> Any:
    """The variable that a product multiplies by large weights; None for other equations."""
    if equation.primitive.name != "dot_general" or any(equation.params["dimension_numbers"][1]):
        return None
    factors = _nonliterals(equation.invars)
    others = [v for v in factors if v not in weights]
    if len(factors) != 2 or len(others) != 1:
        return None
    large = _bytes(v for v in factors if v in weights) >= limits().recurrent_weight_ratio * _bytes(
        [*others, *equation.outvars]
    )
    return others[0] if large else None


# -- before the loop --------------------------------------------------------------------------------------------------


def _dots_before(body: ScanBody) -> list:
    """Products that depend on weights and scanned inputs alone."""
    weights = _computed_from(body, body.fixed)
    known = _computed_from(body, (*body.fixed, *body.cut))
    found, room = [], _MAX_BYTES
    for equation in body.closed.jaxpr.eqns:
        if _weight_dot_input(equation, weights) not in known:
            continue
        between = dependency_slice(body.closed, equation.outvars, weights.union(body.cut, found))
        size = body.length * sum(_bytes(each.outvars) for each in between)
        if size <= room and not any(map(_is_expensive, between[:-1])):
            found.extend(equation.outvars)
            room -= size
    return found


def _is_expensive(equation: core.JaxprEqn) -> bool:
    """Whether recomputing it is expensive: gradients need the inputs of a product inside the loop, too."""
    return equation.primitive.name in _EXPENSIVE


# -- in it ------------------------------------------------------------------------------------------------------------


def _weights_to_transpose(body: ScanBody) -> list:
    """Weights that are transposed before the loop, so that the contracted axis comes first."""
    weights, found = _computed_from(body, body.fixed), []
    for equation in body.closed.jaxpr.eqns if body.length >= limits().recurrent_steps else ():
        place = _weight_operand(equation, weights)
        if place is not None:
            v = equation.invars[place]
            if v not in found and (v not in body.fixed or _contracted_axis(equation, place) == 1):
                found.append(v)
    return found


def _weight_operand(equation: core.JaxprEqn, weights: Collection) -> int | None:
    """Which factor of a product are weights [A, B], by which few rows are multiplied; None where it is none such."""
    if equation.primitive.name != "dot_general" or any(equation.params["dimension_numbers"][1]):
        return None
    places = [i for i, v in enumerate(equation.invars) if not isinstance(v, core.Literal) and v in weights]
    if len(places) != 1 or len(equation.params["dimension_numbers"][0][0]) != 1:
        return None
    kind: Any = equation.invars[places[0]].aval
    rows = _rows(equation, 1 - places[0])
    return places[0] if kind.ndim == 2 and kind.dtype in (jnp.float32, jnp.float64) and rows <= _FEW_ROWS else None


def _contracted_axis(equation: core.JaxprEqn, place: int) -> int:
    """The axis that a product sums over, in one of its factors."""
    return equation.params["dimension_numbers"][0][place][0]


def _rows(equation: core.JaxprEqn, place: int) -> int:
    shape = equation.invars[place].aval.shape  # type: ignore[attr-defined]
    return math.prod(shape) // max(1, shape[_contracted_axis(equation, place)])


def _transposed_weights(body: ScanBody, known: dict, turned: list) -> dict[Any, tuple[Array, Array]]:
    """The weights, and the weights with their axes exchanged."""
    values = evaluate_subgraph(body.closed, known, turned)
    return {v: (value, value.T) for v, value in zip(turned, values, strict=True)}


def _dot_with_transposed(
    weights: dict[Any, tuple[Array, Array]], inputs: list, equation: core.JaxprEqn
) -> Array | None:
    """A product with weights that were transposed before the loop."""
    place = _weight_operand(equation, weights)
    if place is None:
        return None
    over, batch = equation.params["dimension_numbers"]
    inputs = [*inputs]
    inputs[place] = weights[equation.invars[place]][_contracted_axis(equation, place)]
    over = tuple((0,) if i == place else axes for i, axes in enumerate(over))
    return equation.primitive.bind(*inputs, **{**equation.params, "dimension_numbers": (over, batch)})


# -- after it ---------------------------------------------------------------------------------------------------------


def _dots_after(body: ScanBody, kept: set) -> dict[Any, list]:
    """Stacked outputs that are products with weights, or sums of such: their inputs.

    The inputs are saved for all steps: only if they are saved anyway, or are no larger than the outputs.
    """
    makers, uses, weights = _makers(body), _uses(body), _computed_from(body, body.fixed)
    found, given = {}, Counter(_nonliterals(body.given))
    uses.subtract({v: times - 1 for v, times in given.items()})
    made = {v: _dot_sources(v, kept, makers, uses, weights) for v in given if uses[v] == 1}
    kept = kept | {v for v in given if v not in made or not made[v][1]}
    for v, (sources, products) in made.items():
        more = [source for source in sources if source not in kept]
        if products and _bytes(more) <= _bytes([v]):
            found[v] = sources
            kept = kept | set(more)
    return found


def _dot_sources(v: Any, kept: set, makers: dict, uses: Counter, weights: Collection) -> tuple[list, int]:
    """(what ``v`` is made of, but for weights; of how many products)."""
    maker = makers.get(v)
    multiplied = None if maker is None or v in kept else _weight_dot_input(maker, weights)
    if multiplied is not None:
        return [multiplied], 1
    if v in weights:
        return [], 0
    if maker is None or v in kept or uses[v] != 1 or maker.primitive.name not in _COMBINING:
        return [v], 0
    parts = [_dot_sources(part, kept, makers, uses, weights) for part in _nonliterals(maker.invars)]
    return list(dict.fromkeys(source for sources, _ in parts for source in sources)), sum(n for _, n in parts)


def _stacked_output(v: Any, stacked: dict, length: int) -> Array:
    if isinstance(v, core.Literal):
        return jnp.full((length,), v.val, v.aval.dtype)  # type: ignore[attr-defined]
    return stacked[v]


# -- sums over all steps ----------------------------------------------------------------------------------------------


def _accumulations(body: ScanBody) -> dict[int, Accumulation]:
    """By the number of the carried array."""
    makers, uses = _makers(body), _uses(body)
    found: dict[int, Accumulation] = {}
    readers: dict[Any, set[int]] = {}
    for i, (before, after) in enumerate(zip(body.carried, body.ends, strict=True)):
        last = None if isinstance(after, core.Literal) else makers.get(after)
        if last is None or last.primitive.name not in ("add", "add_any") or uses[before] != 1 or uses[after] != 1:
            continue
        if before not in last.invars:
            continue
        at, then = next(v for v in last.invars if v is not before), []
        while (made := None if isinstance(at, core.Literal) else makers.get(at)) is not None:
            if made.primitive.name in ("dot_general", "reduce_sum"):
                found[i] = Accumulation(made, tuple(reversed(then)))
                readers.setdefault(at, set()).add(id(then[-1][0] if then else last))
            if made.primitive.name not in _LINEAR_RESHAPES or uses[at] != 1:
                break
            then.append((made, list[Any](made.outvars).index(at)))
            at = made.invars[0]
    # nothing is saved of a product whose result is used otherwise too
    only = lambda v: len(readers[v]) == uses[v]  # noqa: E731
    return {i: added for i, added in found.items() if only(added.root.outvars[0])}


def _profitable(added: dict[int, Accumulation], body: ScanBody) -> dict[int, Accumulation]:
    """Products that are much larger than what must be kept for them, and sums of what is kept all the same."""
    kept, fixed = set(body.cut), {*body.fixed, *body.carried, *body.closed.jaxpr.constvars}
    known = lambda v: not isinstance(v, core.Literal) and v not in fixed  # noqa: E731
    chosen, room = {}, _MAX_BYTES
    for name in ("dot_general", "reduce_sum"):
        for i, each in added.items():
            if each.root.primitive.name != name or not all(map(known, each.root.invars)):
                continue
            more = set(each.root.invars) - kept
            large = (
                limits().recurrent_product_ratio * _bytes(more) > _bytes(each.root.outvars)
                or body.length * _bytes(more) > room
            )
            if more and (name == "reduce_sum" or large):
                continue
            room -= body.length * _bytes(more)
            kept |= more
            chosen[i] = each
    return chosen


def _final_sums(added: dict[int, Accumulation], stacked: dict, start: Sequence[Array]) -> dict[int, Array]:
    """What the carried arrays end with to which something is added."""
    totals: dict[Any, tuple[Array, bool]] = {}
    ends = {}
    for i, sum_ in added.items():
        of = sum_.root.outvars[0]
        if of not in totals:
            totals[of] = _sum_over_steps(sum_.root, [stacked[v] for v in sum_.root.invars])
        total, turned = totals[of]
        for each, output in sum_.then:
            total, turned = _apply_linear(each, output, total, turned)
        ends[i] = start[i] + (total.T if turned else total)
    return ends


def _apply_linear(each: core.JaxprEqn, output: int, total: Array, turned: bool) -> tuple[Array, bool]:
    """What ``each`` makes of a total, or ``turned`` of one [B, A] that stands for [A, B]."""
    name, params = each.primitive.name, dict(each.params)
    if turned and name == "transpose":
        return total, params["permutation"] == (0, 1)
    if turned and name == "slice":
        ends = ("start_indices", "limit_indices", "strides")
        params |= {key: params[key] and tuple(params[key])[::-1] for key in ends}
    elif turned and name == "split":
        params["axis"] = 1 - params["axis"]
    elif turned:
        total, turned = total.T, False
    found = each.primitive.bind(total, **params)
    return found[output] if each.primitive.multiple_results else found, turned


def _sum_over_steps(root: core.JaxprEqn, factors: Sequence[Array]) -> tuple[Array, bool]:
    """The sum over all steps, from inputs [steps, ...]; and whether its axes are exchanged.

    Of a product [A, B] the larger axis is best the last.
    """
    params = root.params
    if root.primitive.name == "reduce_sum":
        kind: Any = root.outvars[0].aval
        return jnp.sum(factors[0], (0, *(axis + 1 for axis in params["axes"])), kind.dtype), False
    (summed, batch) = params["dimension_numbers"]
    summed = tuple((0, *(axis + 1 for axis in axes)) for axes in summed)
    if not batch[0] and all(axes == tuple(range(len(axes))) for axes in summed):
        # one axis to sum over: of several XLA makes a transposed copy first
        free = [a.shape[len(axes) :] for a, axes in zip(factors, summed, strict=True)]
        factors = [a.reshape(-1, *rest) for a, rest in zip(factors, free, strict=True)]
        summed = ((0,), (0,))
        if [len(shape) for shape in free] == [1, 1] and free[0] > free[1]:
            return root.primitive.bind(*factors[::-1], **{**params, "dimension_numbers": (summed, ((), ()))}), True
    batch = tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    return root.primitive.bind(*factors, **{**params, "dimension_numbers": (summed, batch)}), False
