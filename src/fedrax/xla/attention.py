"""Attention over many places a block of rows at a time, so that what it makes stays in a CPU's caches.

The products of T places with each other are T x T numbers a head, of which softmax and a second product make T rows
again. Each row stands for itself: :func:`in_blocks` finds such products in a traced function, whatever lies between
them, and computes them in a loop over blocks of rows. The backward pass computes a block once more instead of reading
what it gave, so that memory grows as T does and not as its square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax.xla.equivalence import is_real
from fedrax.xla.flops import NUMBER_BY_NUMBER
from fedrax.xla.per_example import Walker
from fedrax.xla.per_example_rules import RULES, Along, Mixed, Same, State
from fedrax.xla.rewriting import CHECKPOINTS, called_in_place, inputs_of, outputs_of
from fedrax.xla.tracing import equations_in, num_bytes

NAME = "in_blocks"
"""The scope of the loops."""
_LARGE = 6 << 20
"""Bytes of products from which blocks are faster: more than the caches hold."""
_BLOCK = 1 << 20
"""Bytes of a block's products, at most."""
_GROWN, _GROWN_OF_EACH = 8, 2
"""Large products are at least so many times what they are made of; and those of samples or heads, each for itself."""
_ROWS = 64
"""Rows of them, at least."""
_TRIED = 256
"""Ways in which a segment's inputs may lie that are tried."""
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
_SHAPED = {"broadcast_in_dim": "shape", "reshape": "new_sizes"}
"""Operations with a parameter that says the result's shape."""
_KNOWN = NUMBER_BY_NUMBER | _REDUCTIONS | _SHAPED.keys() | {"dot_general", "transpose", "squeeze"}
_MADE_ANEW = NUMBER_BY_NUMBER | {"broadcast_in_dim"}
"""Operations that each block does itself, rather than to read its rows of what they gave."""
_LOOPS = ("scan", *CHECKPOINTS)
_Value = tuple[Any, State]


def in_blocks(closed: core.ClosedJaxpr, least: int | None = None) -> core.ClosedJaxpr:
    """The same function, with large products in blocks of rows; also in the bodies of its loops.

    least: bytes from which they are large.
    """
    jaxpr: Any = closed.jaxpr
    equations = [_within_blocks(equation) for equation in jaxpr.eqns]
    if any(new is not old for new, old in zip(equations, jaxpr.eqns, strict=True)):
        closed = core.ClosedJaxpr(jaxpr.replace(eqns=equations), closed.consts)
    segments, taken = {}, set()
    for segment in sorted(_segments(closed, least), key=lambda segment: len(segment.equations)):
        mine = {id(equation) for equation in segment.equations}
        if taken.isdisjoint(mine):  # the inner one of two that overlap
            segments[id(segment.equations[-1])] = segment
            taken |= mine
    if not segments:
        return closed

    def function(*args: Array) -> list:
        jaxpr = closed.jaxpr
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
        read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
        for equation in jaxpr.eqns:
            if id(equation) in segments:
                segment = segments[id(equation)]
                values[segment.output], *_ = core.jaxpr_as_fun(segment.program)(*(values[v] for v in segment.inputs))
            elif id(equation) not in taken:
                outputs = outputs_of(equation, [read(v) for v in equation.invars], {})
                values.update(zip(equation.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return jax.make_jaxpr(function)(*inputs_of(closed))


def has_blocks(program: core.ClosedJaxpr) -> bool:
    """Whether a traced program takes large products in blocks."""
    scans = (equation for equation in equations_in(program) if equation.primitive.name == "scan")
    return any(NAME in str(scan.source_info.name_stack).split("/")[-1] for scan in scans)


def _within_blocks(equation: core.JaxprEqn) -> core.JaxprEqn:
    """With the body of a loop, or of what is computed twice, in blocks."""
    body: Any = equation.params.get("jaxpr")
    if equation.primitive.name not in _LOOPS or body is None or equation.effects:
        return equation
    is_open = equation.primitive.name in CHECKPOINTS
    flat = called_in_place(core.ClosedJaxpr(body, ()) if is_open else body)
    new = in_blocks(flat)
    if new is flat or (is_open and new.consts):
        return equation
    return equation.replace(params={**equation.params, "jaxpr": new.jaxpr if is_open else new})


class _Segment(NamedTuple):
    """Equations from a large product to what it ends in, of which each row is made by itself."""

    equations: Sequence[core.JaxprEqn]
    inputs: Sequence[Any]
    output: Any
    program: core.ClosedJaxpr
    """Of the inputs, in blocks."""


class _Lying(NamedTuple):
    """How rows lie that may be taken in blocks."""

    rows: int
    states: Sequence[State]
    """In each input."""
    axis: int
    """In the output."""

    def in_blocks(self, equations: Sequence[core.JaxprEqn], inputs: Sequence[Any], output: Any, number: int) -> Any:
        """The function of the inputs that gives the output of the equations, in ``number`` blocks."""
        size = -(-self.rows // number)
        axes = [state.axis if isinstance(state, Along) else None for state in self.states]

        def block(whole: list, cut: list) -> Array:
            given = [
                value if axis is None else jnp.moveaxis(rows, 0, axis)
                for axis, value, rows in zip(axes, whole, cut, strict=True)
            ]
            known = dict(zip(inputs, zip(given, self.states, strict=True), strict=True))
            _Block(self.rows, size).over(equations, known)
            made, state = known[output]
            if state != Along(self.axis):
                raise Mixed
            return jnp.moveaxis(made, self.axis, 0)

        def blocks(value: Array, axis: int) -> Array:
            value = jnp.moveaxis(value, axis, 0)
            if missing := number * size - self.rows:  # the last row once more
                value = jnp.concatenate([value, jnp.broadcast_to(value[-1:], (missing, *value.shape[1:]))])
            return value.reshape(number, size, *value.shape[1:])

        def function(*values: Array) -> list[Array]:
            whole = [None if axis is not None else value for axis, value in zip(axes, values, strict=True)]
            cut = [None if axis is None else blocks(value, axis) for axis, value in zip(axes, values, strict=True)]
            of_block = _smaller(block, whole, [None if c is None else c[0] for c in cut])
            with jax.named_scope(NAME):
                _, made = lax.scan(lambda carry, cut: (carry, of_block(whole, cut)), None, cut, length=number)
            made = made.reshape(number * size, *made.shape[2:])[: self.rows]
            return [jnp.moveaxis(made, 0, self.axis)]

        return function


def _smaller(block: Callable, *args: Any) -> Callable:
    """The block in smaller ones along another axis, if it is still large; else made once more by the backward pass."""
    closed = called_in_place(jax.make_jaxpr(block)(*args))
    within = in_blocks(closed, _BLOCK)
    if within is closed:
        return jax.checkpoint(block, prevent_cse=False)
    return lambda *args: core.jaxpr_as_fun(within)(*jax.tree.leaves(args))[0]


class _Block(NamedTuple):
    """The evaluation of equations of ``rows`` rows for ``size`` of them."""

    rows: int
    size: int

    def over(self, equations: Sequence[core.JaxprEqn], known: dict[Any, _Value]) -> None:
        """Adds what the equations make of what is known."""
        read = lambda atom: (atom.val, Same()) if isinstance(atom, core.Literal) else known[atom]  # noqa: E731
        for equation in equations:
            values, states = zip(*map(read, equation.invars), strict=True)
            known[equation.outvars[0]] = self._made(equation, list(values), states)

    def _made(self, equation: core.JaxprEqn, values: list, states: Sequence[State]) -> _Value:
        name = equation.primitive.name
        if name not in _KNOWN:
            raise Mixed(name)
        (found,) = RULES[name](states, equation, Walker(self.rows))
        shape = list(_shape(equation.outvars[0]))
        if isinstance(found, Along):
            shape[found.axis] = shape[found.axis] // self.rows * self.size
        if name == "dot_general" and self._meets_whole(equation, states):
            raise Mixed(name)
        if name == "broadcast_in_dim" and isinstance(found, Same):
            # axes of one and the same number have length one until it is known how much of them is read
            shape = [1 if axis in found.uniform else n for axis, n in enumerate(shape)]
        if name in NUMBER_BY_NUMBER:
            if isinstance(found, Same):  # as short as what it is made of
                given = [jnp.shape(value) for value in values if jnp.ndim(value)]
                shape = [max(of, default=n) for *of, n in zip(*given, shape, strict=True)]
            alike = (_shape(atom) == _shape(equation.outvars[0]) for atom in equation.invars)
            values = [_fitted(v, shape) if is_alike else v for v, is_alike in zip(values, alike, strict=True)]
        else:
            whole = zip(values, states, map(_shape, equation.invars), strict=True)
            values = [value if isinstance(state, Along) else _fitted(value, of) for value, state, of in whole]
        if name in _SHAPED:
            equation = equation.replace(params={**equation.params, _SHAPED[name]: tuple(shape)})
        return outputs_of(equation, values, {})[0], found

    def _meets_whole(self, equation: core.JaxprEqn, states: Sequence[State]) -> bool:
        """Whether a product pairs the rows with those of an operand that is there for all of them."""
        _, batch = equation.params["dimension_numbers"]
        along = (isinstance(state, Along) and state.axis in axes for state, axes in zip(states, batch, strict=True))
        return any(along) and not all(isinstance(state, Along) for state in states)


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _fitted(value: Any, shape: Sequence[int]) -> Any:
    """An array in a shape that differs in axes along which it is one and the same number."""
    if jnp.shape(value) == tuple(shape):
        return value
    short = [min(n, wanted) for n, wanted in zip(jnp.shape(value), shape, strict=True)]
    part = lax.slice(value, [0] * len(short), short)
    return lax.broadcast_in_dim(part, tuple(shape), tuple(range(len(short))))


# --- Where such products are ----------------------------------------------------------------------------------------


def _segments(closed: core.ClosedJaxpr, least: int | None) -> Iterator[_Segment]:
    equations = closed.jaxpr.eqns
    for place, equation in enumerate(equations):
        if is_large(equation, least):
            found = _segment(closed, place)
            if found is not None:
                yield found


def is_large(equation: core.JaxprEqn, least: int | None = None) -> bool:
    """Whether it is a product that may be one of places with each other."""
    if equation.primitive.name != "dot_general" or not all(map(is_real, equation.outvars)):
        return False
    _, (batch, _) = equation.params["dimension_numbers"]
    made, read = num_bytes(equation.outvars[0]), sum(map(num_bytes, equation.invars))
    return made > (_LARGE if least is None else least) and made >= (_GROWN_OF_EACH if batch else _GROWN) * read


def _segment(closed: core.ClosedJaxpr, place: int) -> _Segment | None:
    """What begins with equation number ``place``."""
    equations = _between(closed, place)
    if equations is None:
        return None
    made = {v for equation in equations for v in equation.outvars}
    read = [v for equation in equations for v in equation.invars if not isinstance(v, core.Literal)]
    inputs = list(dict.fromkeys(v for v in read if v not in made))
    first, (output,) = closed.jaxpr.eqns[place], equations[-1].outvars
    for rows, given in _axes(first):
        lie = [[given[v]] if v in given else _ways(v, rows) for v in inputs]
        for states in islice(product(*lie), _TRIED):
            known = dict(zip(inputs, states, strict=True))
            try:
                Walker(rows).over(equations, known)
                end = known[output]
                if not isinstance(end, Along):
                    continue
                number = _number(rows, num_bytes(first.outvars[0]))
                function = _Lying(rows, states, end.axis).in_blocks(equations, inputs, output, number)
                return _Segment(equations, inputs, output, jax.make_jaxpr(function)(*(v.aval for v in inputs)))
            except (Mixed, TypeError, ValueError):  # JAX's own of shapes that an operation does not take
                continue
    return None


def _number(rows: int, made: int) -> int:
    """Of blocks: as few as are small enough, or a few more that are of one size."""
    least = min(-(-made // _BLOCK), rows)
    return next((n for n in range(least, 2 * least) if rows % n == 0), least)


def _axes(equation: core.JaxprEqn) -> Iterator[tuple[int, dict[Any, State]]]:
    """Axes of a product along which it may be cut: (how long, how it lies in the operands).

    First those along which both are cut, then those of one operand, of which the other is read by each block: they are
    worth it only where much is left.
    """
    (summed, batch), operands = equation.params["dimension_numbers"], equation.invars
    for_rows = num_bytes(equation.outvars[0]) > _LARGE
    if any(isinstance(v, core.Literal) for v in operands):
        return
    shapes: Any = [v.aval.shape for v in operands]  # type: ignore[attr-defined]
    for i, j in zip(*batch, strict=True):
        if shapes[0][i] > 1:
            yield shapes[0][i], {operands[0]: Along(i), operands[1]: Along(j)}
    for k, v in enumerate(operands):
        for axis, rows in enumerate(shapes[k]):
            if for_rows and rows >= _ROWS and axis not in (*summed[k], *batch[k]):
                yield rows, {v: Along(axis)}


def _ways(variable: Any, rows: int) -> list[State]:
    return [Same(), *(Along(axis) for axis, n in enumerate(variable.aval.shape) if n == rows)]


def _between(closed: core.ClosedJaxpr, place: int) -> list[core.JaxprEqn] | None:
    """The equations from a large product to the one product that makes something small of it again.

    None where anything else reads what they make.
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
            ends = equation.primitive.name == "dot_general" and equation.outvars[0].aval.size * _GROWN_OF_EACH <= size
            if ends and last is not None:
                return None
            last = number if ends else last
            (after if ends else inside).update(equation.outvars)
        elif reads & after:
            after.update(equation.outvars)
    if last is None or found[-1] != last or inside & {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}:
        return None
    return [jaxpr.eqns[number] for number in sorted([*found, *_made_anew(jaxpr, found, size)])]


def _made_anew(jaxpr: Any, found: list[int], size: int) -> set[int]:
    """Of the equations before, those that make something large for these alone in a cheap way, such as masks."""
    readers: dict[Any, set[int]] = {v: {-1} for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for number, equation in enumerate(jaxpr.eqns):
        for v in equation.invars:
            if not isinstance(v, core.Literal):
                readers.setdefault(v, set()).add(number)
    taken = set(found)
    for number in reversed(range(found[-1])):
        equation = jaxpr.eqns[number]
        if number not in taken and equation.primitive.name in _MADE_ANEW and len(equation.outvars) == 1:
            (made,) = equation.outvars
            if 2 * made.aval.size >= size and made in readers and readers[made] <= taken:
                taken.add(number)
    return taken.difference(found)
