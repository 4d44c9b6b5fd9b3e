"""Recurrent networks: dot products with weights are moved out of the scan over time steps, on CPUs and NVIDIA GPUs.

- Before: a ``scan`` whose body multiplies few rows by large weights that are constant over the steps.
- After, for each product in the body:

  - of weights and scanned inputs only: one product for all steps before the scan;
  - read by stacked outputs only (the gradients of inputs): one product for all steps after the scan;
  - accumulated in the carry (the gradient of a weight): one product over steps and rows after the scan;
  - others: on CPUs the weights are transposed once before the scan, where that layout is faster.

- Why: at every step such a product reads all of the weights, and the gradient of a weight is read, increased and
  written. XLA hoists loop-invariant operations only. On a GPU each of these operations is a kernel launch as well; its
  gain there has been computed from compiled programs and not been timed, so that it is disabled by default.
- Not for: small weights (`Limits.recurrent_weight_ratio`), which are read at no extra cost; factors above 256 MiB that
  would have to be stored; bodies with effects.
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
"""Most bytes of stored factors, and of products computed before the scan: it bounds the additional memory."""
_EXPENSIVE = ("dot_general", "conv_general_dilated", "scan", "while", "cond", "custom_vjp_call")
"""Primitives that are not evaluated twice, before the scan and in its body."""
_FEW_ROWS = 48
"""Most rows of a product for which weights are transposed. With more rows both layouts take the same time."""
_LINEAR_RESHAPES = ("transpose", "reshape", "squeeze", "slice", "split")
"""Operations that commute with a sum over steps."""
_COMBINING = ("add", "add_any", "transpose", "reshape", "squeeze")
"""Operations that may combine products after the scan. Others stay in the loop, where XLA fuses them."""


class ScanBody(NamedTuple):
    """The inlined body of a scan, with its inputs by kind."""

    closed: core.ClosedJaxpr
    constants: tuple
    """Inputs that are the same at every step."""
    carry: tuple
    """Inputs from the previous step."""
    scanned: tuple
    """Inputs with a slice for each step."""
    length: int
    """Number of steps."""

    @property
    def stacked_outputs(self) -> Sequence:
        """Outputs that the scan stacks."""
        return self.closed.jaxpr.outvars[len(self.carry) :]

    @property
    def new_carry(self) -> Sequence:
        """The carry after the step."""
        return self.closed.jaxpr.outvars[: len(self.carry)]


class Accumulation(NamedTuple):
    """What is added at every step to a part of the carry that nothing else reads."""

    root: core.JaxprEqn
    """A dot product, or a sum over some axes."""
    then: tuple[tuple[core.JaxprEqn, int], ...]
    """Linear operations between root and addition, in order, with the number of the output that the next one reads."""


def hoist_dots_from_scan(rules: Rules, inputs: list, equation: core.JaxprEqn) -> list | None:
    """Rule for ``scan``: its outputs, with ``rules`` for the body; None where no product can be moved or transposed."""
    if equation.params["jaxpr"].effects:
        return None
    body = _scan_body(inputs, equation)
    before = _dots_before(body)
    added = _profitable(_accumulations(body), body)
    kept = {*body.scanned, *before, *(v for sum_ in added.values() for v in sum_.root.invars)}
    after = _dots_after(body, kept)
    transposed = _weights_to_transpose(body)
    if not (before or added or after or transposed):
        return None
    note_applied("recurrent")
    fixed, carried = len(body.constants), len(body.carry)
    known: dict[Any, Any] = dict(zip(body.constants, inputs[:fixed], strict=True))
    stacked: dict[Any, Array] = dict(zip(body.scanned, inputs[fixed + carried :], strict=True))
    stacked.update(_batch_over_steps(body, known, stacked, before, rules))
    ahead = list(stacked)
    left = [i for i in range(carried) if i not in added]
    factors = [v for sum_ in added.values() for v in sum_.root.invars] + [v for vs in after.values() for v in vs]
    outputs = (*_nonliterals(body.stacked_outputs), *factors)
    made = list(dict.fromkeys(v for v in outputs if v not in stacked and v not in after))
    wanted = [body.new_carry[i] for i in left] + made
    if transposed:
        weights = _transposed_weights(body, known, transposed)
        body_rules: Rules = {**rules, "dot_general": partial(_dot_with_transposed, weights)}
    else:
        body_rules = rules

    def step(carry: list, xs: list) -> tuple[list, list]:
        carried_values = {body.carry[i]: value for i, value in zip(left, carry, strict=True)}
        values = known | carried_values | dict(zip(ahead, xs, strict=True))
        outputs = evaluate_subgraph(body.closed, values, wanted, body_rules)
        return outputs[: len(left)], outputs[len(left) :]

    how = {name: equation.params[name] for name in ("reverse", "unroll")}
    carry, rows = lax.scan(step, [inputs[fixed + i] for i in left], list(stacked.values()), body.length, **how)
    stacked.update(zip(made, rows, strict=True))
    for v, sources in after.items():
        stacked.update(_batch_over_steps(body, known, {source: stacked[source] for source in sources}, [v], rules))
    ends = dict(zip(left, carry, strict=True)) | _final_sums(added, stacked, inputs[fixed : fixed + carried])
    outputs = [_stacked_output(v, stacked, body.length) for v in body.stacked_outputs]
    return [*(ends[i] for i in range(carried)), *outputs]


def _scan_body(inputs: list, equation: core.JaxprEqn) -> ScanBody:
    """The body with calls inlined, equal inputs merged, and common subexpressions eliminated."""
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

    def evaluate_step(xs: list) -> list:
        return evaluate_subgraph(body.closed, known | dict(zip(stacked, xs, strict=True)), wanted, rules)

    return dict(zip(wanted, jax.vmap(evaluate_step)(list(stacked.values())), strict=True))


def _nonliterals(atoms: Iterable) -> list:
    """The variables among the atoms."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def _makers(body: ScanBody) -> dict[Any, core.JaxprEqn]:
    """The equation that computes each variable."""
    return {v: equation for equation in body.closed.jaxpr.eqns for v in equation.outvars}


def _uses(body: ScanBody) -> Counter:
    """Number of times that each variable is read."""
    uses = Counter(v for equation in body.closed.jaxpr.eqns for v in _nonliterals(equation.invars))
    uses.update(_nonliterals(body.closed.jaxpr.outvars))
    return uses


def _bytes(variables: Iterable) -> int:
    """Bytes of all variables."""
    return sum(v.aval.size * v.aval.dtype.itemsize for v in variables)


def _computed_from(body: ScanBody, sources: Iterable) -> set:
    """Variables that depend on ``sources`` and constants of the jaxpr alone."""
    found = {*sources, *body.closed.jaxpr.constvars}
    for equation in body.closed.jaxpr.eqns:
        if all(v in found for v in _nonliterals(equation.invars)) and not is_unbatchable(equation):
            found.update(equation.outvars)
    return found


def _weight_dot_input(equation: core.JaxprEqn, weights: Collection) -> Any:
    """The operand that a ``dot_general`` multiplies by large weights; None for other equations."""
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


# -- Products before the scan -----------------------------------------------------------------------------------------


def _dots_before(body: ScanBody) -> list:
    """Products that depend on weights and scanned inputs alone."""
    weights = _computed_from(body, body.constants)
    known = _computed_from(body, (*body.constants, *body.scanned))
    found, room = [], _MAX_BYTES
    for equation in body.closed.jaxpr.eqns:
        if _weight_dot_input(equation, weights) not in known:
            continue
        between = dependency_slice(body.closed, equation.outvars, weights.union(body.scanned, found))
        size = body.length * sum(_bytes(each.outvars) for each in between)
        if size <= room and not any(map(_is_expensive, between[:-1])):
            found.extend(equation.outvars)
            room -= size
    return found


def _is_expensive(equation: core.JaxprEqn) -> bool:
    """Whether an equation is too expensive to evaluate twice: the body may need the inputs of a product as well."""
    return equation.primitive.name in _EXPENSIVE


# -- Products in the scan ---------------------------------------------------------------------------------------------


def _weights_to_transpose(body: ScanBody) -> list:
    """Weights that are transposed before the scan, so that the contracted axis comes first."""
    weights, found = _computed_from(body, body.constants), []
    applies = jax.default_backend() == "cpu" and body.length >= limits().recurrent_steps
    for equation in body.closed.jaxpr.eqns if applies else ():
        place = _weight_operand(equation, weights)
        if place is not None:
            v = equation.invars[place]
            if v not in found and (v not in body.constants or _contracted_axis(equation, place) == 1):
                found.append(v)
    return found


def _weight_operand(equation: core.JaxprEqn, weights: Collection) -> int | None:
    """Which operand of a ``dot_general`` is weights [A, B] that multiply few rows; None for other equations."""
    if equation.primitive.name != "dot_general" or any(equation.params["dimension_numbers"][1]):
        return None
    places = [i for i, v in enumerate(equation.invars) if not isinstance(v, core.Literal) and v in weights]
    if len(places) != 1 or len(equation.params["dimension_numbers"][0][0]) != 1:
        return None
    kind: Any = equation.invars[places[0]].aval
    rows = _rows(equation, 1 - places[0])
    return places[0] if kind.ndim == 2 and kind.dtype in (jnp.float32, jnp.float64) and rows <= _FEW_ROWS else None


def _contracted_axis(equation: core.JaxprEqn, place: int) -> int:
    """The contracted axis of an operand."""
    return equation.params["dimension_numbers"][0][place][0]


def _rows(equation: core.JaxprEqn, place: int) -> int:
    """Size of an operand without its contracted axis."""
    shape = equation.invars[place].aval.shape  # type: ignore[attr-defined]
    return math.prod(shape) // max(1, shape[_contracted_axis(equation, place)])


def _transposed_weights(body: ScanBody, known: dict, transposed: list) -> dict[Any, tuple[Array, Array]]:
    """(weights, transposed weights) by variable."""
    values = evaluate_subgraph(body.closed, known, transposed)
    return {v: (value, value.T) for v, value in zip(transposed, values, strict=True)}


def _dot_with_transposed(
    weights: dict[Any, tuple[Array, Array]], inputs: list, equation: core.JaxprEqn
) -> Array | None:
    """Rule for ``dot_general`` with weights of which both layouts exist."""
    place = _weight_operand(equation, weights)
    if place is None:
        return None
    over, batch = equation.params["dimension_numbers"]
    inputs = [*inputs]
    inputs[place] = weights[equation.invars[place]][_contracted_axis(equation, place)]
    over = tuple((0,) if i == place else axes for i, axes in enumerate(over))
    return equation.primitive.bind(*inputs, **{**equation.params, "dimension_numbers": (over, batch)})


# -- Products after the scan ------------------------------------------------------------------------------------------


def _dots_after(body: ScanBody, kept: set) -> dict[Any, list]:
    """Stacked outputs that are products with weights, or sums of such, with the inputs of these products.

    The scan must stack the inputs instead. They are stacked anyway (``kept``), or are no larger than the outputs.
    """
    makers, uses, weights = _makers(body), _uses(body), _computed_from(body, body.constants)
    found, outputs = {}, Counter(_nonliterals(body.stacked_outputs))
    uses.subtract({v: times - 1 for v, times in outputs.items()})
    made = {v: _dot_sources(v, kept, makers, uses, weights) for v in outputs if uses[v] == 1}
    kept = kept | {v for v in outputs if v not in made or not made[v][1]}
    for v, (sources, products) in made.items():
        more = [source for source in sources if source not in kept]
        if products and _bytes(more) <= _bytes([v]):
            found[v] = sources
            kept = kept | set(more)
    return found


def _dot_sources(v: Any, kept: set, makers: dict, uses: Counter, weights: Collection) -> tuple[list, int]:
    """(variables other than weights that ``v`` is computed from by products and sums, number of products)."""
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
    """A stacked output of the scan."""
    if isinstance(v, core.Literal):
        return jnp.full((length,), v.val, v.aval.dtype)  # type: ignore[attr-defined]
    return stacked[v]


# -- Sums over all steps ----------------------------------------------------------------------------------------------


def _accumulations(body: ScanBody) -> dict[int, Accumulation]:
    """Accumulations, by number of the part of the carry."""
    makers, uses = _makers(body), _uses(body)
    found: dict[int, Accumulation] = {}
    readers: dict[Any, set[int]] = {}
    for i, (before, after) in enumerate(zip(body.carry, body.new_carry, strict=True)):
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
    # a product whose result is read otherwise has to stay in the body
    return {i: a for i, a in found.items() if len(readers[a.root.outvars[0]]) == uses[a.root.outvars[0]]}


def _profitable(added: dict[int, Accumulation], body: ScanBody) -> dict[int, Accumulation]:
    """Accumulated products much larger than the factors to store, and sums of arrays that are stored anyway."""
    kept, unstacked = set(body.scanned), {*body.constants, *body.carry, *body.closed.jaxpr.constvars}
    chosen, room = {}, _MAX_BYTES
    for name in ("dot_general", "reduce_sum"):
        for i, each in added.items():
            factors = each.root.invars
            if each.root.primitive.name != name or any(isinstance(v, core.Literal) or v in unstacked for v in factors):
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
    """Final values of the accumulating parts of the carry."""
    totals: dict[Any, tuple[Array, bool]] = {}
    ends = {}
    for i, sum_ in added.items():
        of = sum_.root.outvars[0]
        if of not in totals:
            totals[of] = _sum_over_steps(sum_.root, [stacked[v] for v in sum_.root.invars])
        total, is_transposed = totals[of]
        for each, output in sum_.then:
            total, is_transposed = _apply_linear(each, output, total, is_transposed)
        ends[i] = start[i] + (total.T if is_transposed else total)
    return ends


def _apply_linear(each: core.JaxprEqn, output: int, total: Array, is_transposed: bool) -> tuple[Array, bool]:
    """Apply a linear equation to a total, which may be stored transposed; (result, whether it is transposed)."""
    name, params = each.primitive.name, dict(each.params)
    if is_transposed and name == "transpose":
        return total, params["permutation"] == (0, 1)
    if is_transposed and name == "slice":
        ends = ("start_indices", "limit_indices", "strides")
        params |= {key: params[key] and tuple(params[key])[::-1] for key in ends}
    elif is_transposed and name == "split":
        params["axis"] = 1 - params["axis"]
    elif is_transposed:
        total, is_transposed = total.T, False
    found = each.primitive.bind(total, **params)
    return found[output] if each.primitive.multiple_results else found, is_transposed


def _sum_over_steps(root: core.JaxprEqn, factors: Sequence[Array]) -> tuple[Array, bool]:
    """(sum over all steps, from inputs [steps, ...]; whether it is transposed, to have the larger axis last)."""
    params = root.params
    if root.primitive.name == "reduce_sum":
        aval: Any = root.outvars[0].aval
        return jnp.sum(factors[0], (0, *(axis + 1 for axis in params["axes"])), aval.dtype), False
    (summed, batch) = params["dimension_numbers"]
    summed = tuple((0, *(axis + 1 for axis in axes)) for axes in summed)
    if not batch[0] and all(axes == tuple(range(len(axes))) for axes in summed):
        # merge the contracted axes: XLA:CPU copies operands with several of them
        free = [a.shape[len(axes) :] for a, axes in zip(factors, summed, strict=True)]
        factors = [a.reshape(-1, *rest) for a, rest in zip(factors, free, strict=True)]
        summed = ((0,), (0,))
        if [len(shape) for shape in free] == [1, 1] and free[0] > free[1]:
            return root.primitive.bind(*factors[::-1], **{**params, "dimension_numbers": (summed, ((), ()))}), True
    batch = tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    return root.primitive.bind(*factors, **{**params, "dimension_numbers": (summed, batch)}), False
