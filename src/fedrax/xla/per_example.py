"""Per-example independence: whether a function computes each example of a batch independently, found in its jaxpr.

An analysis, used by :mod:`fedrax.xla.microbatch` and :mod:`fedrax.xla.attention`. :func:`analyze_per_example`
propagates the batch axis from equation to equation (abstract interpretation). `RULES` has a rule for each primitive,
which raises :class:`ExamplesInteract` if it may combine values of two examples; a primitive without a rule is taken to
do so. Batch norm, losses that compare examples, and custom derivatives (``jax.custom_jvp``, ``jax.custom_vjp``) that
combine examples are found this way, and dropout, whose masks for a batch are one random array (see
:mod:`fedrax.xla.hoist_rng`).
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
    """The batch axis. Each example has the same number of consecutive entries along it."""


class Shared(NamedTuple):
    """An array that does not depend on any example."""

    uniform: frozenset[int] = frozenset()
    """Axes along which it is constant."""


Dependence = PerExample | Shared
"""How an array depends on the examples."""
Rule = Callable[[Sequence[Dependence], core.JaxprEqn, "PerExampleAnalysis"], Sequence[Dependence]]
"""(dependences of the inputs, equation, analysis) -> dependences of the outputs."""


class ExamplesInteract(Exception):
    """An operation combines values of several examples, or may do so."""


class PerExampleCost(NamedTuple):
    """Cost of a function whose examples are independent."""

    bytes: int
    """Bytes that products and convolutions write for one example."""
    weights: int
    """Bytes of shared operands (weights) that they read, counted at every step of a loop."""
    dtype: Any
    """Dtype of its result."""
    flops: int
    """Floating-point operations of products and convolutions for one example."""
    length: int
    """Number of equations."""


def analyze_per_example(function: Callable, shared: Tree, batch: Tree, key: Tree) -> PerExampleCost | None:
    """Trace a function and analyze whether its examples are independent; nothing is computed.

    Args:
        function: (shared, batch, key) -> [B].
        shared: pytree of arrays that all examples share, such as parameters.
        batch: pytree of arrays [B, ...], B > 1.
        key: random key.

    Returns:
        The cost; None if a value of the result, or its derivative, may depend on another example.
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
    """Abstract interpretation of a function of ``samples`` examples.

    ``derived``: the function is a derivative itself, in which custom derivatives are not analyzed again.
    """

    def __init__(self, samples: int, derived: bool = False):
        self.samples, self.derived = samples, derived
        self.bytes = self.weights = 0
        self.repeats = 1
        """How often the current equations run, in the loops around them."""

    def through(self, closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[Dependence]) -> list[Dependence]:
        """The dependences of a jaxpr's outputs, given those of its inputs."""
        jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
        known: dict[Any, Dependence] = {v: Shared() for v in jaxpr.constvars}
        known.update(zip(jaxpr.invars, inputs, strict=True))
        self.over(jaxpr.eqns, known)
        return [_dependence(atom, known) for atom in jaxpr.outvars]

    def over(self, equations: Sequence[core.JaxprEqn], known: dict[Any, Dependence]) -> None:
        """Add the dependences of the equations' outputs to ``known``."""
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
        """:meth:`through` for the jaxpr of a derivative, whose cost is not counted."""
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
            joined = [join_dependences([a, b]) for a, b in zip(carry, outputs, strict=False)]
            if joined == carry:
                self.repeats = before[-1]
                return carry, outputs[len(carry) :]
            carry, (self.bytes, self.weights, self.repeats) = joined, before


def _dependence(atom: Any, states: dict[Any, Dependence]) -> Dependence:
    """The dependence of an atom; literals are shared."""
    return Shared() if isinstance(atom, core.Literal) else states[atom]


# -- Rules of primitives -----------------------------------------------------------------------------------------------
# Rules without a docstring are named after the primitive that they are for.


def _shape(atom: Any) -> tuple[int, ...]:
    """Shape of a jaxpr's atom."""
    return atom.aval.shape


def join_dependences(states: Sequence[Dependence]) -> Dependence:
    """The dependence of an elementwise result, or of one of several arrays of one shape."""
    along = {state for state in states if isinstance(state, PerExample)}
    uniform = [state.uniform for state in states if isinstance(state, Shared)]
    if not along:
        return Shared(frozenset.intersection(*uniform))
    (found, *others) = along
    if others or not all(found.axis in axes for axes in uniform):
        raise ExamplesInteract
    return found


def _require_not(interacts: bool, state: Dependence) -> Dependence:
    """``state``; raises :class:`ExamplesInteract` if ``interacts``."""
    if interacts:
        raise ExamplesInteract
    return state


def _elementwise(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    # scalars are allowed beside arrays, as bounds or predicates; they and unit axes are uniform
    operands = zip(states, map(_shape, equation.invars), strict=True)
    marked = [_mark_unit_axes(state, shape) for state, shape in operands if shape]
    return [join_dependences(marked) if marked else Shared()] * len(equation.outvars)


def _mark_unit_axes(state: Dependence, shape: tuple[int, ...]) -> Dependence:
    """The dependence with unit axes, which are broadcast, as uniform ones."""
    if isinstance(state, PerExample):
        return state
    return Shared(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1))


def _bitcast(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    if _shape(equation.invars[0]) == _shape(equation.outvars[0]):
        return _elementwise(states, equation, analysis)
    return [_require_shared(states[0])]  # another number of bits, which adds or removes an axis


def _identity(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    """The outputs are the inputs."""
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
    for axis, n in enumerate(new):  # entries of an example stay consecutive along the new axis at the same stride
        if n > 1 and math.prod(new[:axis]) == before:
            return [_require_not(n % analysis.samples > 0, PerExample(axis))]
    raise ExamplesInteract


def _uniform_after_reshape(uniform: frozenset[int], old: tuple[int, ...], new: tuple[int, ...]) -> frozenset[int]:
    """The uniform axes that a reshape does not split or merge, by their new number; unit axes are uniform."""
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
    """The dependence after a reduction over some axes."""

    def new_number(axis: int) -> int:
        return axis - sum(other < axis for other in axes)

    if isinstance(state, PerExample):
        return _require_not(state.axis in axes, PerExample(new_number(state.axis)))
    return Shared(frozenset(new_number(axis) for axis in state.uniform if axis not in axes))


def _reduction(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_without(state, equation.params["axes"]) for state in states]


def _along_axes(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    """Operations that combine entries along some axes and keep the shape of the others, such as sorting."""
    (value,) = [equation.params[name] for name in ("axis", "dimension", "dimensions") if name in equation.params]
    axes = value if isinstance(value, Sequence) else (value,)
    joined = join_dependences(states)
    if isinstance(joined, Shared):
        return [Shared(joined.uniform - set(axes))] * len(equation.outvars)
    return [_require_not(joined.axis in axes, joined)] * len(equation.outvars)


def _stack(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_with_new_axis(join_dependences(states), equation.params["axis"])]


def _unstack(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [_without(states[0], (equation.params["axis"],))] * len(equation.outvars)


def _tile(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    (state,), times, shape = states, equation.params["reps"], _shape(equation.invars[0])
    if isinstance(state, PerExample):
        return [_require_not(times[state.axis] > 1, state)]
    return [Shared(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1 and times[axis] > 1))]


def _whole_axis(untouched: Callable[[dict, Any, int], bool]) -> Rule:
    """A rule for operations on the first input; ``untouched``: whether they keep an axis as it is.

    The other inputs, such as indices, must be shared.
    """

    def rule(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
        state = states[0]
        if any(isinstance(other, PerExample) for other in states[1:]):
            raise ExamplesInteract
        if isinstance(state, Shared):
            return [Shared()] * len(equation.outvars)
        return [_require_not(not untouched(equation.params, equation, state.axis), state)] * len(equation.outvars)

    return rule


def _slice_keeps(params: dict, equation: Any, axis: int) -> bool:
    """Whether a slice takes all of an axis."""
    n, strides = _shape(equation.invars[0])[axis], params["strides"]
    whole = (params["start_indices"][axis], params["limit_indices"][axis]) == (0, n)
    return whole and (strides is None or strides[axis] == 1)


def _window_keeps(params: dict, equation: Any, axis: int) -> bool:
    """Whether the window of a reduction has length one along an axis."""
    one = all(
        params[name][axis] == 1
        for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        if name in params
    )
    return one and tuple(params["padding"][axis]) == (0, 0)


def _dot_general(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
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
            same_example = other == PerExample(there) or (isinstance(other, Shared) and there in other.uniform)
            found.add(place if same_example else -1)
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
            if there not in array.uniform:  # each example reads another part of the array
                raise ExamplesInteract
        return [
            PerExample(from_rows[rows.axis])
            if isinstance(rows, PerExample) and rows.axis < len(from_rows)
            else _require_shared(rows)
        ]
    if array.axis in numbers.operand_batching_dims:
        there = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(array.axis)]
        same_example = rows == PerExample(there) or (isinstance(rows, Shared) and there in rows.uniform)
        return [_require_not(not same_example, PerExample(from_rows[there]))]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = equation.params["slice_sizes"][array.axis] == _shape(equation.invars[0])[array.axis]
    if isinstance(rows, PerExample) or array.axis in (*gone, *numbers.start_index_map) or not whole:
        raise ExamplesInteract
    kept = [i for i in range(len(_shape(equation.invars[0]))) if i not in gone]
    return [PerExample(numbers.offset_dims[kept.index(array.axis)])]


def _require_shared(state: Dependence) -> Shared:
    """An array that is not uniform along any axis; raises :class:`ExamplesInteract` for a per-example ``state``."""
    if isinstance(state, PerExample):
        raise ExamplesInteract
    return Shared()


def _iota(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return [Shared(frozenset(range(len(_shape(equation.outvars[0])))) - {equation.params["dimension"]})]


def _call(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    return analysis.through(equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"], states)


def _custom_jvp(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    """A ``custom_jvp`` function, whose derivative must be independent per example, too."""
    outputs = _call(states, equation, analysis)
    if all(isinstance(state, Shared) for state in states) or analysis.derived or is_jax_derivative(equation):
        return outputs
    derivative = tangent_jaxpr(equation)
    if derivative is None:
        raise ExamplesInteract
    tangents_in = [state for state, v in zip(states, equation.invars, strict=True) if is_differentiable(v)]
    tangents_out = analysis.through_derivative(derivative, [*states, *tangents_in])
    primals = [state for state, v in zip(outputs, equation.outvars, strict=True) if is_differentiable(v)]
    if any(isinstance(t, PerExample) and t != state for t, state in zip(tangents_out, primals, strict=True)):
        raise ExamplesInteract
    return outputs


def _custom_vjp(
    states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis
) -> list[Dependence]:
    """A ``custom_vjp`` function: of backward passes only those of fedrax are known to be independent per example."""
    backward = equation.params.get("bwd")
    if not getattr(getattr(backward, "f", backward), "__module__", "").startswith("fedrax."):
        raise ExamplesInteract
    return _call(states, equation, analysis)


def _scan(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    fixed, carried = scan_counts(equation)
    slices = [_without(state, (0,)) for state in states[fixed + carried :]]
    constants, initial = list(states[:fixed]), list(states[fixed : fixed + carried])
    carry, outputs = analysis.in_loop(equation.params["jaxpr"], constants, initial, slices, equation.params["length"])
    return [*carry, *map(_with_new_axis, outputs)]


def _with_new_axis(state: Dependence, axis: int = 0) -> Dependence:
    """The dependence of stacked arrays, which differ along the new axis."""
    if isinstance(state, PerExample):
        return PerExample(state.axis + (state.axis >= axis))
    return Shared(frozenset(i + (i >= axis) for i in state.uniform))


def _while(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    n_cond, n_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    constants, initial = list(states[n_cond : n_cond + n_body]), list(states[n_cond + n_body :])
    carry, _ = analysis.in_loop(equation.params["body_jaxpr"], constants, initial, [], 1)
    for state in analysis.through(equation.params["cond_jaxpr"], [*states[:n_cond], *carry]):
        _require_shared(state)
    return carry


def _cond(states: Sequence[Dependence], equation: core.JaxprEqn, analysis: PerExampleAnalysis) -> list[Dependence]:
    _require_shared(states[0])
    branches = [analysis.through(branch, states[1:]) for branch in equation.params["branches"]]
    return [join_dependences(found) for found in zip(*branches, strict=True)]


def _for_all(rule: Rule, names: str) -> dict[str, Rule]:
    """One rule for several primitives."""
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    "polynomial": _elementwise,
    "bitcast_convert_type": _bitcast,
    **_for_all(_call, "checkpoint closed_call core_call jit pjit remat remat2"),
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    **_for_all(_identity, "name optimization_barrier"),
    **_for_all(_reduction, "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin"),
    **_for_all(_along_axes, "cumsum cumprod cummax cummin cumlogsumexp concatenate sort rev split"),
    **_for_all(_whole_axis(_window_keeps), "reduce_window reduce_window_sum reduce_window_max reduce_window_min"),
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "fft": _whole_axis(lambda params, eqn, axis: axis < len(_shape(eqn.invars[0])) - len(params["fft_lengths"])),
    "top_k": _whole_axis(lambda params, eqn, axis: axis != params.get("axis", len(_shape(eqn.invars[0])) - 1)),
    "slice": _whole_axis(_slice_keeps),
    "dynamic_slice": _whole_axis(lambda params, eqn, axis: params["slice_sizes"][axis] == _shape(eqn.invars[0])[axis]),
    "pad": _whole_axis(lambda params, eqn, axis: tuple(params["padding_config"][axis]) == (0, 0, 0)),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "iota": _iota,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
