"""Per-example independence: whether a function treats each example of a batch by itself, found in its jaxpr.

:func:`analyze_per_example` propagates the batch axis from equation to equation (abstract interpretation). `RULES` say
for each primitive whether numbers of two examples can meet in it; a primitive without a rule is taken to mix them. So
batch norm, dropout (whose masks differ from example to example, see :mod:`fedrax.xla.hoist_rng`), losses that compare
examples, and custom derivatives (``jax.custom_jvp``, ``jax.custom_vjp``) that do so are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fedrax.tree import Tree
from fedrax.xla.equivalence import is_differentiable, is_jax_derivative, tangent_jaxpr
from fedrax.xla.flops import ELEMENTWISE, count_equations, count_flops
from fedrax.xla.tracing import aval_bytes, scan_counts

_PRODUCTS = ("dot_general", "conv_general_dilated")


class PerExample(NamedTuple):
    """An array with a batch axis."""

    axis: int
    """The batch axis: each example has as many neighboring entries as the others."""


class Shared(NamedTuple):
    """An array that does not depend on any example."""

    uniform: frozenset[int] = frozenset()
    """Axes along which it is constant."""


Dependence = PerExample | Shared
Rule = Callable[[Sequence[Dependence], core.JaxprEqn, "PerExampleAnalysis"], Sequence[Dependence]]


class ExamplesInteract(Exception):
    """Numbers of several examples meet in an operation, or may."""


class PerExampleCost(NamedTuple):
    """Cost of a function that treats each example by itself."""

    bytes: int
    """Bytes that products and convolutions write for one example."""
    weights: int
    """Bytes of shared operands (weights) that they read; in a loop once a step."""
    dtype: Any
    """Of its values."""
    flops: int
    length: int
    """Arithmetic of its products and convolutions, for one sample; and all its equations."""


def analyze_per_example(function: Callable, shared: Tree, batch: Tree, key: Tree) -> PerExampleCost | None:
    """What is seen of ``function(shared, batch, key)`` -> [B], which is traced; no number is computed.

    shared: pytree of arrays. batch: pytree of arrays [B, ...], B > 1. None where a value of the result, or its
    derivative, may depend on more than its own sample.
    """
    closed = jax.make_jaxpr(function)(shared, batch, key)
    samples = jax.tree.leaves(batch)[0].shape[0]
    states: list[Dependence] = [Shared() for _ in jax.tree.leaves(shared)]
    states += [PerExample(0) for _ in jax.tree.leaves(batch)] + [Shared() for _ in jax.tree.leaves(key)]
    analysis = PerExampleAnalysis(samples)
    try:
        (out,) = analysis.through(closed, states)
    except ExamplesInteract:
        return None
    found: Any = closed.out_avals[0]
    if out != PerExample(0) or found.shape != (samples,):
        return None
    return PerExampleCost(
        analysis.bytes // samples,
        analysis.weights,
        found.dtype,
        count_flops(closed) // samples,
        count_equations(closed),
    )


class PerExampleAnalysis:
    """Abstract interpretation of a function of ``samples`` examples."""

    def __init__(self, samples: int, derived: bool = False):
        """derived: whether the function is a derivative itself, in which no function's own derivative is asked for."""
        self.samples, self.derived = samples, derived
        self.bytes = self.weights = 0
        self.repeats = 1
        """How often the equations at hand are run, loops around them counted."""

    def through(self, closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Dependence]) -> list[Dependence]:
        """The states of the outputs."""
        jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
        known: dict[Any, Dependence] = {v: Shared() for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.over(jaxpr.eqns, known)
        return [_dependence(atom, known) for atom in jaxpr.outvars]

    def over(self, equations: Sequence[core.JaxprEqn], known: dict[Any, Dependence]) -> None:
        """Adds the states of what the equations make to those of what they read."""
        for equation in equations:
            states = [_dependence(atom, known) for atom in equation.invars]
            name = equation.primitive.name
            if name in RULES:
                outputs = RULES[name](states, equation, self)
            elif any(isinstance(state, PerExample) for state in states):
                raise ExamplesInteract(name)
            else:
                outputs = [Shared()] * len(equation.outvars)
            if name in _PRODUCTS and isinstance(outputs[0], PerExample):
                shared = [
                    atom for atom, state in zip(equation.invars, states, strict=True) if isinstance(state, Shared)
                ]
                self.bytes += self.repeats * sum(map(aval_bytes, equation.outvars))
                self.weights += self.repeats * sum(map(aval_bytes, shared))
            known.update(zip(equation.outvars, outputs, strict=True))

    def through_derivative(self, closed: core.ClosedJaxpr, inputs: Sequence[Dependence]) -> list[Dependence]:
        """The same of a derivative, of which nothing is counted."""
        return PerExampleAnalysis(self.samples, derived=True).through(closed, inputs)

    def in_loop(
        self,
        body: core.ClosedJaxpr,
        fixed: list[Dependence],
        carry: list[Dependence],
        rest: list[Dependence],
        times: int,
    ):
        """(dependences of the carry, of the other outputs) that hold at every step: a fixed point."""
        while True:
            before, self.repeats = (self.bytes, self.weights, self.repeats), self.repeats * times
            outputs = self.through(body, [*fixed, *carry, *rest])
            met = [join_dependences([a, b]) for a, b in zip(carry, outputs, strict=False)]
            if met == carry:
                self.repeats = before[-1]
                return carry, outputs[len(carry) :]
            carry, (self.bytes, self.weights, self.repeats) = met, before


def _dependence(atom: Any, states: dict[Any, Dependence]) -> Dependence:
    return Shared() if isinstance(atom, core.Literal) else states[atom]


# -- rules of primitives -----------------------------------------------------------------------------------------------


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def join_dependences(states: Sequence[Dependence]) -> Dependence:
    """The dependence of an elementwise result, or of a choice among arrays of one shape."""
    along = {state for state in states if isinstance(state, PerExample)}
    uniform = [state.uniform for state in states if isinstance(state, Shared)]
    if not along:
        return Shared(frozenset.intersection(*uniform))
    (found, *others) = along
    if others or not all(found.axis in axes for axes in uniform):
        raise ExamplesInteract
    return found


def _require_not(bad: bool, state: Dependence) -> Dependence:
    if bad:
        raise ExamplesInteract
    return state


def _elementwise(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    # a scalar beside arrays, as a bound or a choice, is the same for all of them; so is an axis of length one
    given = zip(states, map(_shape, equation.invars), strict=True)
    met = [_mark_unit_axes(state, shape) for state, shape in given if shape]
    return [join_dependences(met) if met else Shared()] * len(equation.outvars)


def _mark_unit_axes(state: Dependence, shape: tuple[int, ...]) -> Dependence:
    """Of an array whose axes of length one are broadcast."""
    if isinstance(state, PerExample):
        return state
    return Shared(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1))


def _bitcast(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    if _shape(equation.invars[0]) == _shape(equation.outvars[0]):
        return _elementwise(states, equation, analysis)
    return [_plain(states[0])]  # of another size: its parts get an axis


def _identity(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    """Outputs that are the inputs."""
    return list(states)


def _broadcast(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    state, to = states[0], equation.params["broadcast_dimensions"]
    old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
    if isinstance(state, PerExample):
        return [_require_not(old[state.axis] != new[to[state.axis]], PerExample(to[state.axis]))]
    kept = {axis for i, axis in enumerate(to) if old[i] == new[axis] and i not in state.uniform}
    return [Shared(frozenset(range(len(new))) - kept)]


def _reshape(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    (state, *_), old, new = states, _shape(equation.invars[0]), _shape(equation.outvars[0])
    if equation.params.get("dimensions") is not None:
        raise ExamplesInteract
    if isinstance(state, Shared):
        everywhere = len(state.uniform) == len(old)
        return [Shared(frozenset(range(len(new))) if everywhere else _uniform_after_reshape(state.uniform, old, new))]
    before = math.prod(old[: state.axis])
    for axis, n in enumerate(new):  # samples that were neighbors along the old axis are so along the new one
        if n > 1 and math.prod(new[:axis]) == before:
            return [_require_not(n % analysis.samples > 0, PerExample(axis))]
    raise ExamplesInteract


def _uniform_after_reshape(uniform: frozenset[int], old: tuple[int, ...], new: tuple[int, ...]) -> frozenset[int]:
    """Of the axes, those that a reshape leaves whole, by their new number; axes of size one are always uniform."""
    places = {(math.prod(old[:i]), old[i]) for i in uniform}
    return frozenset(i for i, n in enumerate(new) if n == 1 or (math.prod(new[:i]), n) in places)


def _squeeze(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_without(states[0], equation.params["dimensions"])]


def _transpose(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    state, order = states[0], equation.params["permutation"]
    if isinstance(state, PerExample):
        return [PerExample(order.index(state.axis))]
    return [Shared(frozenset(i for i, axis in enumerate(order) if axis in state.uniform))]


def _without(state: Dependence, axes: Sequence[int]) -> Dependence:
    """Without these axes, over which numbers meet."""
    place = lambda axis: axis - sum(other < axis for other in axes)  # noqa: E731
    if isinstance(state, PerExample):
        return _require_not(state.axis in axes, PerExample(place(state.axis)))
    return Shared(frozenset(place(axis) for axis in state.uniform if axis not in axes))


def _reduction(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_without(state, equation.params["axes"]) for state in states]


def _within(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    """Inside some axes of the result."""
    (value,) = [equation.params[name] for name in ("axis", "dimension", "dimensions") if name in equation.params]
    axes = value if isinstance(value, Sequence) else (value,)
    met = join_dependences(states)
    if isinstance(met, Shared):
        return [Shared(met.uniform - set(axes))] * len(equation.outvars)
    return [_require_not(met.axis in axes, met)] * len(equation.outvars)


def _stack(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_stacked(join_dependences(states), equation.params["axis"])]


def _unstack(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_without(states[0], (equation.params["axis"],))] * len(equation.outvars)


def _tile(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    (state,), times, shape = states, equation.params["reps"], _shape(equation.invars[0])
    if isinstance(state, PerExample):
        return [_require_not(times[state.axis] > 1, state)]
    return [Shared(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1 and times[axis] > 1))]


def _whole_axis(untouched: Callable[[dict, Any, int], bool]) -> Rule:
    """Operations on the first input that leave the samples' axis as it is; the other inputs are places, say."""

    def rule(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
        state = states[0]
        if any(isinstance(other, PerExample) for other in states[1:]):
            raise ExamplesInteract
        if isinstance(state, Shared):
            return [Shared()] * len(equation.outvars)
        return [_require_not(not untouched(equation.params, equation, state.axis), state)] * len(equation.outvars)

    return rule


def _slice_leaves(params: dict, equation: Any, axis: int) -> bool:
    n, strides = _shape(equation.invars[0])[axis], params["strides"]
    whole = (params["start_indices"][axis], params["limit_indices"][axis]) == (0, n)
    return whole and (strides is None or strides[axis] == 1)


def _window_leaves(params: dict, equation: Any, axis: int) -> bool:
    one = all(
        params[name][axis] == 1
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        if name in params
    )
    return one and tuple(params["padding"][axis]) == (0, 0)


def _product(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    (summed, batch), ndims = equation.params["dimension_numbers"], [len(_shape(v)) for v in equation.invars]
    free = [[i for i in range(n) if i not in (*summed[k], *batch[k])] for k, n in enumerate(ndims)]
    found: set[int] = set()
    for k, state in enumerate(states):
        if isinstance(state, Shared):
            continue
        if state.axis in summed[k]:
            raise ExamplesInteract
        if state.axis in batch[k]:
            place, other = batch[k].index(state.axis), states[1 - k]
            there = batch[1 - k][place]
            agrees = other == PerExample(there) or (isinstance(other, Shared) and there in other.uniform)
            found.add(place if agrees else -1)
        else:
            before = len(batch[0]) + (len(free[0]) if k else 0)
            found.add(before + free[k].index(state.axis) if isinstance(states[1 - k], Shared) else -1)
    if found:
        return [_require_not(len(found) > 1 or -1 in found, PerExample(found.pop()))]
    (left, right), axes = (state.uniform for state in states if isinstance(state, Shared)), zip(*batch, strict=True)
    uniform = [i in left and j in right for i, j in axes] + [i in left for i in free[0]] + [i in right for i in free[1]]
    return [Shared(frozenset(i for i, is_uniform in enumerate(uniform) if is_uniform))]


def _convolution(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    images, kernel = states
    numbers = equation.params["dimension_numbers"]
    if isinstance(kernel, PerExample) or equation.params["batch_group_count"] > 1:
        raise ExamplesInteract
    if isinstance(images, Shared):
        return [Shared()]
    return [_require_not(images.axis != numbers.lhs_spec[0], PerExample(numbers.out_spec[0]))]


def _gather(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    (array, rows), numbers = states, equation.params["dimension_numbers"]
    from_rows = [i for i in range(len(_shape(equation.outvars[0]))) if i not in numbers.offset_dims]
    if isinstance(array, Shared):
        if isinstance(rows, PerExample) and rows.axis in numbers.start_indices_batching_dims:
            there = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(rows.axis)]
            if there not in array.uniform:  # each sample reads a part of its own
                raise ExamplesInteract
        return [
            PerExample(from_rows[rows.axis])
            if isinstance(rows, PerExample) and rows.axis < len(from_rows)
            else _plain(rows)
        ]
    if array.axis in numbers.operand_batching_dims:
        there = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(array.axis)]
        agrees = rows == PerExample(there) or (isinstance(rows, Shared) and there in rows.uniform)
        return [_require_not(not agrees, PerExample(from_rows[there]))]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = equation.params["slice_sizes"][array.axis] == _shape(equation.invars[0])[array.axis]
    if isinstance(rows, PerExample) or array.axis in (*gone, *numbers.start_index_map) or not whole:
        raise ExamplesInteract
    kept = [i for i in range(len(_shape(equation.invars[0]))) if i not in gone]
    return [PerExample(numbers.offset_dims[kept.index(array.axis)])]


def _plain(state: Dependence) -> Shared:
    if isinstance(state, PerExample):
        raise ExamplesInteract
    return Shared()


def _iota(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [Shared(frozenset(range(len(_shape(equation.outvars[0])))) - {equation.params["dimension"]})]


def _call(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return analysis.through(equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"], states)


def _own_derivative(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    """A ``custom_jvp`` function, whose derivative must be independent per example, too."""
    outputs = _call(states, equation, analysis)
    if all(isinstance(state, Shared) for state in states) or analysis.derived or is_jax_derivative(equation):
        return outputs
    derivative = tangent_jaxpr(equation)
    if derivative is None:
        raise ExamplesInteract
    real = [state for state, v in zip(states, equation.invars, strict=True) if is_differentiable(v)]
    changes = analysis.through_derivative(derivative, [*states, *real])
    of = [state for state, v in zip(outputs, equation.outvars, strict=True) if is_differentiable(v)]
    if any(isinstance(change, PerExample) and change != state for change, state in zip(changes, of, strict=True)):
        raise ExamplesInteract
    return outputs


def _own_backward(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    """A ``custom_vjp`` function: backward passes of fedrax and JAX are independent per example, others may not be."""
    backward = equation.params.get("bwd")
    if not getattr(getattr(backward, "f", backward), "__module__", "").startswith("fedrax."):
        raise ExamplesInteract
    return _call(states, equation, analysis)


def _scan(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    fixed, carried = scan_counts(equation)
    taken = [_without(state, (0,)) for state in states[fixed + carried :]]
    known, given = list(states[:fixed]), list(states[fixed : fixed + carried])
    carry, outputs = analysis.in_loop(equation.params["jaxpr"], known, given, taken, equation.params["length"])
    return [*carry, *map(_stacked, outputs)]


def _stacked(state: Dependence, axis: int = 0) -> Dependence:
    """With a new axis, along which arrays differ."""
    place = lambda i: i + (i >= axis)  # noqa: E731
    return (
        PerExample(place(state.axis)) if isinstance(state, PerExample) else Shared(frozenset(map(place, state.uniform)))
    )


def _while(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    asks, does = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    known, given = list(states[asks : asks + does]), list(states[asks + does :])
    carry, _ = analysis.in_loop(equation.params["body_jaxpr"], known, given, [], 1)
    for state in analysis.through(equation.params["cond_jaxpr"], [*states[:asks], *carry]):
        _plain(state)
    return carry


def _cond(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    _plain(states[0])
    branches = [analysis.through(branch, states[1:]) for branch in equation.params["branches"]]
    return [join_dependences(found) for found in zip(*branches, strict=True)]


def _by(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "polynomial": _elementwise,
    "bitcast_convert_type": _bitcast,
    **_by(_call, "checkpoint closed_call core_call jit pjit remat remat2"),
    "custom_jvp_call": _own_derivative,
    "custom_vjp_call": _own_backward,
    **_by(_identity, "name optimization_barrier"),
    **_by(_reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"),
    **_by(_within, "cumsum cumprod cummax cummin cumlogsumexp concatenate sort rev split"),
    **_by(_whole_axis(_window_leaves), "reduce_window reduce_window_sum reduce_window_max reduce_window_min"),
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "fft": _whole_axis(lambda params, eqn, axis: axis < len(_shape(eqn.invars[0])) - len(params["fft_lengths"])),
    "top_k": _whole_axis(lambda params, eqn, axis: axis != params.get("axis", len(_shape(eqn.invars[0])) - 1)),
    "slice": _whole_axis(_slice_leaves),
    "dynamic_slice": _whole_axis(lambda params, eqn, axis: params["slice_sizes"][axis] == _shape(eqn.invars[0])[axis]),
    "pad": _whole_axis(lambda params, eqn, axis: tuple(params["padding_config"][axis]) == (0, 0, 0)),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "iota": _iota,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
