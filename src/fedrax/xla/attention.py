"""Blockwise attention: T x T scores are computed a block of rows at a time, on CPUs.

- Before: a large ``dot_general`` (T x T scores for each head), row-wise operations such as masks, biases and softmax,
  and one ``dot_general`` that reduces the result to T rows.
- After: a ``scan`` over blocks of rows, each rematerialized in the backward pass.
- Why: XLA:CPU writes the scores and all that follows from them to memory, and the backward pass reads them again. A
  block's scores stay in the caches, and memory grows as T instead of T^2.
- Not for: scores that fit the caches (`Limits.attention_bytes`), scores that another equation reads, operations that
  mix rows, and integer products.

:func:`block_attention` finds candidates in :func:`_softmax_equations` and checks by the per-example analysis of
:mod:`fedrax.xla.per_example`, with rows in the place of examples, that rows are independent of each other. So it needs
no list of masks, biases and normalizations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.equivalence import is_differentiable
from fedrax.xla.flops import ELEMENTWISE
from fedrax.xla.options import limits
from fedrax.xla.per_example import RULES, Dependence, ExamplesInteract, PerExample, PerExampleAnalysis, Shared
from fedrax.xla.rewriting import CHECKPOINT_PRIMITIVES, evaluate_equation, inline_calls, input_shapes
from fedrax.xla.tracing import aval_bytes, equations_in

ATTENTION_SCOPE = "in_blocks"
"""Name scope of the scans, by which profiles recognize them."""
_MAX_TRIALS = 256
"""Most combinations of row axes of a segment's inputs that are tried. It bounds the time of the search."""
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
_SHAPE_PARAMS = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
"""Primitives with a parameter for the shape of the result, which is smaller in a block."""
_SUPPORTED = ELEMENTWISE | _REDUCTIONS | _SHAPE_PARAMS.keys() | {"dot_general", "transpose", "squeeze"}
_RECOMPUTED = ELEMENTWISE | {"broadcast_in_dim"}
"""Cheap producers of a segment's inputs that each block recomputes instead of reading its rows of their results."""
_RECURSED = ("scan", *CHECKPOINT_PRIMITIVES)
"""Primitives whose bodies are searched as well."""
_Value = tuple[Any, Dependence]


def block_attention(closed: core.ClosedJaxpr, least: int | None = None) -> core.ClosedJaxpr:
    """Replace attention by scans over blocks of rows, also in bodies of scans and of ``jax.checkpoint``.

    Args:
        closed: the jaxpr, with its calls inlined.
        least: bytes of T x T scores above which attention is replaced, `Limits.attention_bytes` by default.
    """
    jaxpr: Any = closed.jaxpr
    equations = [_block_sub_jaxpr(equation) for equation in jaxpr.eqns]
    if any(new is not old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        closed = core.ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)
    segments, taken = {}, set()
    for segment in sorted(_segments(closed, least), key=lambda segment: len(segment.equations)):
        own = {id(equation) for equation in segment.equations}
        if taken.isdisjoint(own):  # of overlapping segments the shorter one
            segments[id(segment.equations[-1])] = segment
            taken |= own
    if not segments:
        return closed

    def function(*args: Array) -> list:
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            if id(equation) in segments:
                segment = segments[id(equation)]
                values[segment.output], *_ = core.jaxpr_as_fun(segment.program)(*(values[v] for v in segment.inputs))
            elif id(equation) not in taken:
                outputs = evaluate_equation(equation, [read(v) for v in equation.invars], {})
                values.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return jax.make_jaxpr(function)(*input_shapes(closed))


def has_blockwise_attention(program: core.ClosedJaxpr) -> bool:
    """Whether a traced program has a scan that this pass made."""
    scans = (equation for equation in equations_in(program) if equation.primitive.name == "scan")
    return any(ATTENTION_SCOPE in str(scan.source_info.name_stack).split("/")[-1] for scan in scans)


def _block_sub_jaxpr(equation: core.JaxprEqn) -> core.JaxprEqn:
    """The equation with blockwise attention in its body, if it is a scan or a ``jax.checkpoint``."""
    body: Any = equation.params.get("jaxpr")
    if equation.primitive.name not in _RECURSED or body is None or equation.effects:
        return equation
    is_open = equation.primitive.name in CHECKPOINT_PRIMITIVES
    flat = inline_calls(core.ClosedJaxpr(body, ()) if is_open else body)
    new = block_attention(flat)
    if new is flat or (is_open and new.consts):
        return equation
    return equation.replace(params={**equation.params, "jaxpr": new.jaxpr if is_open else new})


class _Segment(NamedTuple):
    """Equations from T x T scores to the T rows of the result, independent per row."""

    equations: Sequence[core.JaxprEqn]
    inputs: Sequence[Any]
    output: Any
    program: core.ClosedJaxpr
    """The replacement, a function of the inputs."""


class _RowLayout(NamedTuple):
    """The row axis in every input and in the output of a segment."""

    rows: int
    """Number of rows T."""
    states: Sequence[Dependence]
    """Row axis of each input, if it has one."""
    axis: int
    """Row axis of the output."""

    def in_blocks(self, equations: Sequence[core.JaxprEqn], inputs: Sequence[Any], output: Any, number: int) -> Any:
        """The function that computes ``output`` from the inputs in ``number`` blocks."""
        size = -(-self.rows // number)
        axes = [state.axis if isinstance(state, PerExample) else None for state in self.states]

        def block(whole: list, cut: list) -> Array:
            values = [
                value if axis is None else jnp.moveaxis(rows, 0, axis)
                for axis, value, rows in zip(axes, whole, cut, strict=True)
            ]
            known = dict(zip(inputs, zip(values, self.states, strict=True), strict=True))
            _BlockEvaluator(self.rows, size).evaluate(equations, known)
            result, state = known[output]
            if state != PerExample(self.axis):
                raise ExamplesInteract
            return jnp.moveaxis(result, self.axis, 0)

        def blocks(value: Array, axis: int) -> Array:
            value = jnp.moveaxis(value, axis, 0)
            if missing := number * size - self.rows:  # padded with copies of the last row
                value = jnp.concatenate([value, jnp.broadcast_to(value[-1:], (missing, *value.shape[1:]))])
            return value.reshape(number, size, *value.shape[1:])

        def function(*values: Array) -> list[Array]:
            whole = [None if axis is not None else value for axis, value in zip(axes, values, strict=True)]
            cut = [None if axis is None else blocks(value, axis) for axis, value in zip(axes, values, strict=True)]
            of_block = _block_again_or_remat(block, whole, [None if c is None else c[0] for c in cut])
            with jax.named_scope(ATTENTION_SCOPE):
                _, results = lax.scan(lambda carry, cut: (carry, of_block(whole, cut)), None, cut, length=number)
            results = results.reshape(number * size, *results.shape[2:])[: self.rows]
            return [jnp.moveaxis(results, 0, self.axis)]

        return function


def _block_again_or_remat(block: Callable, *args: Any) -> Callable:
    """The block, split along another axis if it is still large, otherwise rematerialized in the backward pass."""
    closed = inline_calls(jax.make_jaxpr(block)(*args))
    within = block_attention(closed, limits().attention_block_bytes)
    if within is closed:
        return jax.checkpoint(block, prevent_cse=False)
    return lambda *args: core.jaxpr_as_fun(within)(*jax.tree.leaves(args))[0]


class _BlockEvaluator(NamedTuple):
    """Evaluates equations that were traced for ``rows`` rows on a block of ``size`` rows."""

    rows: int
    size: int

    def evaluate(self, equations: Sequence[core.JaxprEqn], known: dict[Any, _Value]) -> None:
        """Add the outputs of the equations to ``known``: values and their row axes."""
        for equation in equations:
            operands = [(v.val, Shared()) if isinstance(v, core.Literal) else known[v] for v in equation.invars]
            values, states = zip(*operands, strict=True)
            known[equation.outvars[0]] = self._output(equation, list(values), states)

    def _output(self, equation: core.JaxprEqn, values: list, states: Sequence[Dependence]) -> _Value:
        """The output of one equation, with shapes reduced to the block; uniform axes are kept at length one."""
        name = equation.primitive.name
        if name not in _SUPPORTED:
            raise ExamplesInteract(name)
        (found,) = RULES[name](states, equation, PerExampleAnalysis(self.rows))
        shape = list(_shape(equation.outvars[0]))
        if isinstance(found, PerExample):
            shape[found.axis] = shape[found.axis] // self.rows * self.size
        if name == "dot_general" and self._pairs_with_shared(equation, states):
            raise ExamplesInteract(name)
        if name == "broadcast_in_dim" and isinstance(found, Shared):
            # uniform axes get length one: only the operation that reads them determines their length in a block
            shape = [1 if axis in found.uniform else n for axis, n in enumerate(shape)]
        if name in ELEMENTWISE:
            if isinstance(found, Shared):  # the shortest shape that its operands broadcast to
                shapes = [jnp.shape(value) for value in values if jnp.ndim(value)]
                shape = [max(of, default=n) for *of, n in zip(*shapes, shape, strict=True)]
            same = (_shape(atom) == _shape(equation.outvars[0]) for atom in equation.invars)
            values = [_broadcast_to(v, shape) if is_same else v for v, is_same in zip(values, same, strict=True)]
        else:
            whole = zip(values, states, map(_shape, equation.invars), strict=True)
            values = [
                value if isinstance(state, PerExample) else _broadcast_to(value, of) for value, state, of in whole
            ]
        if name in _SHAPE_PARAMS:
            equation = equation.replace(params={**equation.params, _SHAPE_PARAMS[name]: tuple(shape)})
        return evaluate_equation(equation, values, {})[0], found

    def _pairs_with_shared(self, equation: core.JaxprEqn, states: Sequence[Dependence]) -> bool:
        """Whether rows are a batch axis of a ``dot_general`` whose other operand is shared by all blocks."""
        _, batch = equation.params["dimension_numbers"]
        along = (
            isinstance(state, PerExample) and state.axis in axes for state, axes in zip(states, batch, strict=True)
        )
        return any(along) and not all(isinstance(state, PerExample) for state in states)


def _shape(atom: Any) -> tuple[int, ...]:
    """Shape of a jaxpr's atom."""
    return atom.aval.shape


def _broadcast_to(value: Any, shape: Sequence[int]) -> Any:
    """Broadcast or shorten axes along which an array is uniform to ``shape``."""
    if jnp.shape(value) == tuple(shape):
        return value
    short = [min(n, wanted) for n, wanted in zip(jnp.shape(value), shape, strict=True)]
    part = lax.slice(value, [0] * len(short), short)
    return lax.broadcast_in_dim(part, tuple(shape), tuple(range(len(short))))


# --- Matching -------------------------------------------------------------------------------------------------------


def _segments(closed: core.ClosedJaxpr, least: int | None) -> Iterator[_Segment]:
    """All segments of a jaxpr, which may overlap."""
    equations = closed.jaxpr.eqns
    for place, equation in enumerate(equations):
        if is_large_dot(equation, least):
            found = _segment(closed, place)
            if found is not None:
                yield found


def is_large_dot(equation: core.JaxprEqn, least: int | None = None) -> bool:
    """Whether an equation may compute T x T scores: a ``dot_general`` much larger than its operands."""
    if equation.primitive.name != "dot_general" or not all(map(is_differentiable, equation.outvars)):
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    result_bytes, operand_bytes = aval_bytes(equation.outvars[0]), sum(map(aval_bytes, equation.invars))
    growth = limits().attention_batched_growth if batch else limits().attention_growth
    least = limits().attention_bytes if least is None else least
    return result_bytes > least and result_bytes >= growth * operand_bytes


def _segment(closed: core.ClosedJaxpr, place: int) -> _Segment | None:
    """The segment whose scores are computed by equation number ``place``; None if there is none."""
    equations = _softmax_equations(closed, place)
    if equations is None:
        return None
    made = {v for equation in equations for v in equation.outvars}
    read = [v for equation in equations for v in equation.invars if not isinstance(v, core.Literal)]
    inputs = list(dict.fromkeys(v for v in read if v not in made))
    first, (output,) = closed.jaxpr.eqns[place], equations[-1].outvars
    for rows, fixed in _row_axes(first):
        choices = [[fixed[v]] if v in fixed else _possible_dependences(v, rows) for v in inputs]
        for states in islice(product(*choices), _MAX_TRIALS):
            known = dict(zip(inputs, states, strict=True))
            try:
                PerExampleAnalysis(rows).over(equations, known)
                end = known[output]
                if not isinstance(end, PerExample):
                    continue
                number = _num_blocks(rows, aval_bytes(first.outvars[0]))
                function = _RowLayout(rows, states, end.axis).in_blocks(equations, inputs, output, number)
                return _Segment(equations, inputs, output, jax.make_jaxpr(function)(*(v.aval for v in inputs)))
            except (ExamplesInteract, TypeError, ValueError):  # TypeError and ValueError: JAX rejects the shapes
                continue
    return None


def _num_blocks(rows: int, score_bytes: int) -> int:
    """Number of blocks within the limit: the smallest that divides the rows, if there is one below twice the least."""
    least = min(-(-score_bytes // limits().attention_block_bytes), rows)
    return next((n for n in range(least, 2 * least) if rows % n == 0), least)


def _row_axes(equation: core.JaxprEqn) -> Iterator[tuple[int, dict[Any, Dependence]]]:
    """Axes along which a ``dot_general`` may be split: (length, row axis of each operand).

    Batch axes come first, as they split both operands. Along a free axis of one operand every block reads the whole
    other operand, which is worth it for large scores only.
    """
    (summed, batch), operands = equation.params["dimension_numbers"], equation.invars
    for_rows = aval_bytes(equation.outvars[0]) > limits().attention_bytes
    if any(isinstance(v, core.Literal) for v in operands):
        return
    shapes: Any = [v.aval.shape for v in operands]  # type: ignore[attr-defined]
    for i, j in zip(*batch, strict=True):
        if shapes[0][i] > 1:
            yield shapes[0][i], {operands[0]: PerExample(i), operands[1]: PerExample(j)}
    for k, v in enumerate(operands):
        for axis, rows in enumerate(shapes[k]):
            if for_rows and rows >= limits().attention_block_rows and axis not in (*summed[k], *batch[k]):
                yield rows, {v: PerExample(axis)}


def _possible_dependences(variable: Any, rows: int) -> list[Dependence]:
    """Candidates for the row axis of an input: none, or an axis of that length."""
    return [Shared(), *(PerExample(axis) for axis, n in enumerate(variable.aval.shape) if n == rows)]


def _softmax_equations(closed: core.ClosedJaxpr, place: int) -> list[core.JaxprEqn] | None:
    """The equations from the scores to the ``dot_general`` that reduces them again.

    None if the scores have several such products, or if other equations or the outputs read intermediate results.
    """
    jaxpr: Any = closed.jaxpr
    first = jaxpr.eqns[place]
    size = first.outvars[0].aval.size
    inside, after, found, last = set(first.outvars), set(), [place], None
    for number, equation in enumerate(jaxpr.eqns[place + 1 :], place + 1):
        reads = {v for v in equation.invars if not isinstance(v, core.Literal)}
        if reads & inside:
            if reads & after or equation.effects:
                return None
            found.append(number)
            ends = (
                equation.primitive.name == "dot_general"
                and equation.outvars[0].aval.size * limits().attention_batched_growth <= size
            )
            if ends and last is not None:
                return None
            last = number if ends else last
            (after if ends else inside).update(equation.outvars)
        elif reads & after:
            after.update(equation.outvars)
    if last is None or found[-1] != last or inside & {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}:
        return None
    return [jaxpr.eqns[number] for number in sorted([*found, *_recomputed_inputs(jaxpr, found, size)])]


def _recomputed_inputs(jaxpr: Any, found: list[int], size: int) -> set[int]:
    """Numbers of the cheap equations whose large results only the segment reads, such as masks."""
    readers: dict[Any, set[int]] = {v: {-1} for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for number, equation in enumerate(jaxpr.eqns):
        for v in equation.invars:
            if not isinstance(v, core.Literal):
                readers.setdefault(v, set()).add(number)
    taken = set(found)
    for number in reversed(range(found[-1])):
        equation = jaxpr.eqns[number]
        if number not in taken and equation.primitive.name in _RECOMPUTED and len(equation.outvars) == 1:
            (output,) = equation.outvars
            if 2 * output.aval.size >= size and output in readers and readers[output] <= taken:
                taken.add(number)
    return taken.difference(found)
