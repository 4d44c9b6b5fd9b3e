"""What each kind of operation makes of the axis along which samples lie; see :mod:`fedrax.xla.per_example`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jax.extend import core

from fedrax.xla.equivalence import derivative_of, is_of_jax, is_real
from fedrax.xla.flops import NUMBER_BY_NUMBER
from fedrax.xla.tracing import parts_of_scan


class Along(NamedTuple):
    """An array of numbers of each sample."""

    axis: int
    """The samples lie along this axis, each with as many neighboring entries as the others."""


class Same(NamedTuple):
    """An array that does not depend on any sample."""

    uniform: frozenset[int] = frozenset()
    """Axes along which it is one and the same number."""


State = Along | Same
Rule = Callable[[Sequence[State], core.JaxprEqn, "Walk"], Sequence[State]]


class Mixed(Exception):
    """Numbers of several samples meet, or may."""


class Walk(Protocol):
    """Through the equations of a function of ``samples`` samples; see :mod:`fedrax.xla.per_example`."""

    samples: int
    derived: bool
    """Whether the function is a derivative itself, in which no function's own derivative is asked for."""

    def through(self, closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[State]) -> list[State]:
        """The states of the outputs."""
        ...

    def in_loop(
        self, body: core.ClosedJaxpr, fixed: list[State], carry: list[State], rest: list[State], times: int
    ) -> tuple[list[State], list[State]]:
        """(states of the carry, of the other outputs) that hold in every turn."""
        ...

    def through_derivative(self, closed: core.ClosedJaxpr, inputs: Sequence[State]) -> list[State]:
        """The same of a derivative, of which nothing is counted."""
        ...


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def joined(states: Sequence[State]) -> State:
    """Of arrays of one shape that meet number by number, or of which one is taken."""
    along = {state for state in states if isinstance(state, Along)}
    uniform = [state.uniform for state in states if isinstance(state, Same)]
    if not along:
        return Same(frozenset.intersection(*uniform))
    (found, *others) = along
    if others or not all(found.axis in axes for axes in uniform):
        raise Mixed
    return found


def _unless(bad: bool, state: State) -> State:
    if bad:
        raise Mixed
    return state


def _number_by_number(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    # a scalar beside arrays, as a bound or a choice, is the same for all of them; so is an axis of length one
    given = zip(states, map(_shape, equation.invars), strict=True)
    met = [_spread(state, shape) for state, shape in given if shape]
    return [joined(met) if met else Same()] * len(equation.outvars)


def _spread(state: State, shape: tuple[int, ...]) -> State:
    """Of an array whose axes of length one are broadcast."""
    if isinstance(state, Along):
        return state
    return Same(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1))


def _bitcast(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    if _shape(equation.invars[0]) == _shape(equation.outvars[0]):
        return _number_by_number(states, equation, walk)
    return [_plain(states[0])]  # of another size: its parts lie along an axis of their own


def _each(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    """Outputs that are the inputs."""
    return list(states)


def _broadcast(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    state, to = states[0], equation.params["broadcast_dimensions"]
    old, new = _shape(equation.invars[0]), _shape(equation.outvars[0])
    if isinstance(state, Along):
        return [_unless(old[state.axis] != new[to[state.axis]], Along(to[state.axis]))]
    kept = {axis for i, axis in enumerate(to) if old[i] == new[axis] and i not in state.uniform}
    return [Same(frozenset(range(len(new))) - kept)]


def _reshape(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    (state, *_), old, new = states, _shape(equation.invars[0]), _shape(equation.outvars[0])
    if equation.params.get("dimensions") is not None:
        raise Mixed
    if isinstance(state, Same):
        everywhere = len(state.uniform) == len(old)
        return [Same(frozenset(range(len(new))) if everywhere else _kept(state.uniform, old, new))]
    before = math.prod(old[: state.axis])
    for axis, n in enumerate(new):  # samples that were neighbors along the old axis are so along the new one
        if n > 1 and math.prod(new[:axis]) == before:
            return [_unless(n % walk.samples > 0, Along(axis))]
    raise Mixed


def _kept(uniform: frozenset[int], old: tuple[int, ...], new: tuple[int, ...]) -> frozenset[int]:
    """Of the axes, those that a reshape leaves whole, by their new number; axes of size one are always uniform."""
    places = {(math.prod(old[:i]), old[i]) for i in uniform}
    return frozenset(i for i, n in enumerate(new) if n == 1 or (math.prod(new[:i]), n) in places)


def _squeeze(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return [_without(states[0], equation.params["dimensions"])]


def _transpose(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    state, order = states[0], equation.params["permutation"]
    if isinstance(state, Along):
        return [Along(order.index(state.axis))]
    return [Same(frozenset(i for i, axis in enumerate(order) if axis in state.uniform))]


def _without(state: State, axes: Sequence[int]) -> State:
    """Without these axes, over which numbers meet."""
    place = lambda axis: axis - sum(other < axis for other in axes)  # noqa: E731
    if isinstance(state, Along):
        return _unless(state.axis in axes, Along(place(state.axis)))
    return Same(frozenset(place(axis) for axis in state.uniform if axis not in axes))


def _reduction(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return [_without(state, equation.params["axes"]) for state in states]


def _within(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    """Inside some axes of the result."""
    (value,) = [equation.params[name] for name in ("axis", "dimension", "dimensions") if name in equation.params]
    axes = value if isinstance(value, Sequence) else (value,)
    met = joined(states)
    if isinstance(met, Same):
        return [Same(met.uniform - set(axes))] * len(equation.outvars)
    return [_unless(met.axis in axes, met)] * len(equation.outvars)


def _stack(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return [_stacked(joined(states), equation.params["axis"])]


def _unstack(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return [_without(states[0], (equation.params["axis"],))] * len(equation.outvars)


def _tile(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    (state,), times, shape = states, equation.params["reps"], _shape(equation.invars[0])
    if isinstance(state, Along):
        return [_unless(times[state.axis] > 1, state)]
    return [Same(state.uniform.union(axis for axis, n in enumerate(shape) if n == 1 and times[axis] > 1))]


def _whole_axis(untouched: Callable[[dict, Any, int], bool]) -> Rule:
    """Operations on the first input that leave the samples' axis as it is; the other inputs are places, say."""

    def rule(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
        state = states[0]
        if any(isinstance(other, Along) for other in states[1:]):
            raise Mixed
        if isinstance(state, Same):
            return [Same()] * len(equation.outvars)
        return [_unless(not untouched(equation.params, equation, state.axis), state)] * len(equation.outvars)

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


def _product(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    (summed, batch), ndims = equation.params["dimension_numbers"], [len(_shape(v)) for v in equation.invars]
    free = [[i for i in range(n) if i not in (*summed[k], *batch[k])] for k, n in enumerate(ndims)]
    found: set[int] = set()
    for k, state in enumerate(states):
        if isinstance(state, Same):
            continue
        if state.axis in summed[k]:
            raise Mixed
        if state.axis in batch[k]:
            place, other = batch[k].index(state.axis), states[1 - k]
            there = batch[1 - k][place]
            agrees = other == Along(there) or (isinstance(other, Same) and there in other.uniform)
            found.add(place if agrees else -1)
        else:
            before = len(batch[0]) + (len(free[0]) if k else 0)
            found.add(before + free[k].index(state.axis) if isinstance(states[1 - k], Same) else -1)
    if found:
        return [_unless(len(found) > 1 or -1 in found, Along(found.pop()))]
    (left, right), axes = (state.uniform for state in states if isinstance(state, Same)), zip(*batch, strict=True)
    uniform = [i in left and j in right for i, j in axes] + [i in left for i in free[0]] + [i in right for i in free[1]]
    return [Same(frozenset(i for i, is_uniform in enumerate(uniform) if is_uniform))]


def _convolution(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    images, kernel = states
    numbers = equation.params["dimension_numbers"]
    if isinstance(kernel, Along) or equation.params["batch_group_count"] > 1:
        raise Mixed
    if isinstance(images, Same):
        return [Same()]
    return [_unless(images.axis != numbers.lhs_spec[0], Along(numbers.out_spec[0]))]


def _gather(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    (array, rows), numbers = states, equation.params["dimension_numbers"]
    from_rows = [i for i in range(len(_shape(equation.outvars[0]))) if i not in numbers.offset_dims]
    if isinstance(array, Same):
        if isinstance(rows, Along) and rows.axis in numbers.start_indices_batching_dims:
            there = numbers.operand_batching_dims[numbers.start_indices_batching_dims.index(rows.axis)]
            if there not in array.uniform:  # each sample reads a part of its own
                raise Mixed
        return [Along(from_rows[rows.axis]) if isinstance(rows, Along) and rows.axis < len(from_rows) else _plain(rows)]
    if array.axis in numbers.operand_batching_dims:
        there = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(array.axis)]
        agrees = rows == Along(there) or (isinstance(rows, Same) and there in rows.uniform)
        return [_unless(not agrees, Along(from_rows[there]))]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    whole = equation.params["slice_sizes"][array.axis] == _shape(equation.invars[0])[array.axis]
    if isinstance(rows, Along) or array.axis in (*gone, *numbers.start_index_map) or not whole:
        raise Mixed
    kept = [i for i in range(len(_shape(equation.invars[0]))) if i not in gone]
    return [Along(numbers.offset_dims[kept.index(array.axis)])]


def _plain(state: State) -> Same:
    if isinstance(state, Along):
        raise Mixed
    return Same()


def _iota(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return [Same(frozenset(range(len(_shape(equation.outvars[0])))) - {equation.params["dimension"]})]


def _call(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    return walk.through(equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"], states)


def _own_derivative(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    """A function with a derivative that someone wrote, which must treat samples alike, too."""
    outputs = _call(states, equation, walk)
    if all(isinstance(state, Same) for state in states) or walk.derived or is_of_jax(equation):
        return outputs
    derivative = derivative_of(equation)
    if derivative is None:
        raise Mixed
    real = [state for state, v in zip(states, equation.invars, strict=True) if is_real(v)]
    changes = walk.through_derivative(derivative, [*states, *real])
    of = [state for state, v in zip(outputs, equation.outvars, strict=True) if is_real(v)]
    if any(isinstance(change, Along) and change != state for change, state in zip(changes, of, strict=True)):
        raise Mixed
    return outputs


def _own_backward(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    """A function with a backward pass that someone wrote: those of our layers treat samples alike, others may not."""
    backward = equation.params.get("bwd")
    if not getattr(getattr(backward, "f", backward), "__module__", "").startswith("fedrax."):
        raise Mixed
    return _call(states, equation, walk)


def _scan(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    fixed, carried = parts_of_scan(equation)
    taken = [_without(state, (0,)) for state in states[fixed + carried :]]
    known, given = list(states[:fixed]), list(states[fixed : fixed + carried])
    carry, outputs = walk.in_loop(equation.params["jaxpr"], known, given, taken, equation.params["length"])
    return [*carry, *map(_stacked, outputs)]


def _stacked(state: State, axis: int = 0) -> State:
    """With a new axis, along which arrays differ."""
    place = lambda i: i + (i >= axis)  # noqa: E731
    return Along(place(state.axis)) if isinstance(state, Along) else Same(frozenset(map(place, state.uniform)))


def _while(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    asks, does = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    known, given = list(states[asks : asks + does]), list(states[asks + does :])
    carry, _ = walk.in_loop(equation.params["body_jaxpr"], known, given, [], 1)
    for state in walk.through(equation.params["cond_jaxpr"], [*states[:asks], *carry]):
        _plain(state)
    return carry


def _cond(states: Sequence[State], equation: core.JaxprEqn, walk: Walk) -> list[State]:
    _plain(states[0])
    branches = [walk.through(branch, states[1:]) for branch in equation.params["branches"]]
    return [joined(found) for found in zip(*branches, strict=True)]


def _by(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Rule] = {
    **dict.fromkeys(NUMBER_BY_NUMBER, _number_by_number),
    "polynomial": _number_by_number,
    "bitcast_convert_type": _bitcast,
    **_by(_call, "checkpoint closed_call core_call jit pjit remat remat2"),
    "custom_jvp_call": _own_derivative,
    "custom_vjp_call": _own_backward,
    **_by(_each, "name optimization_barrier"),
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
