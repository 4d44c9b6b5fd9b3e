"""Batched random draws: random arrays of many shapes drawn by one loop, on CPUs.

- Before: at least three arrays that the same operations make of random bits: ``random_bits`` of a Threefry key, then
  elementwise operations with scalars (a normal initializer, for instance).
- After: one loop over chunks of the numbers of all arrays.
- Why: the initial parameters of a deep network are dozens of arrays, and XLA would compile a program for each shape.
  The bits are the same; values differ by rounding at most.
- Not for: other kinds of keys, functions with effects, and accelerators.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from fedrax.xla.flops import ELEMENTWISE
from fedrax.xla.options import is_enabled, note_applied
from fedrax.xla.rewriting import dependency_slice, evaluate_equation, evaluate_jaxpr, evaluate_subgraph, trace_inlined
from fedrax.xla.threefry import counter_bits, is_threefry

_CHUNK = 1 << 13
"""Numbers drawn in one step of the loop; arrays are padded to a multiple of it."""
MAX_BATCHED_DRAW = 1 << 18
"""Most numbers of an array for callers that batch draws only where memory permits: batched arrays exist all at once."""
_TRANSFORMS = ELEMENTWISE | frozenset(["bitcast_convert_type"])
"""Operations on random bits that may follow in the loop."""
_KEY_PRIMITIVES = "random_fold_in random_seed random_split random_unwrap random_wrap"
_BATCHABLE = ELEMENTWISE.union(_KEY_PRIMITIVES.split(), ["broadcast_in_dim", "reshape", "slice", "squeeze"])
"""Operations that give the same rows under ``vmap``, with which keys and scales are computed."""
_MIN_GROUP = 3
"""Fewest arrays made by the same operations that outweigh a loop."""


def batch_random_draws(function: Callable) -> Callable:
    """Transform a function to draw random arrays that the same operations make in one loop.

    Random bits are unchanged; values differ by rounding at most.
    """
    if jax.default_backend() != "cpu" or not is_enabled("batch_rng"):
        return function

    def wrapped(*args: Any) -> Any:
        closed, structure = trace_inlined(function, *args)
        return jax.tree.unflatten(structure, evaluate_with_batched_draws(closed, jax.tree.leaves(args)))

    return wrapped


def evaluate_with_batched_draws(closed: core.ClosedJaxpr, arguments: list) -> list:
    """The outputs of an inlined jaxpr, with its random arrays drawn in loops."""
    if jax.default_backend() != "cpu" or not is_enabled("batch_rng") or closed.jaxpr.effects:
        return evaluate_jaxpr(closed, arguments, {})
    known = dict(zip(closed.jaxpr.invars, arguments, strict=True))
    batched = _batched_values(closed, known)
    if batched:
        note_applied("batch_rng")
    known |= batched
    return evaluate_subgraph(closed, known, closed.jaxpr.outvars)


class _Draw(NamedTuple):
    """A random array: bits of a key, and the elementwise operations on them."""

    shape: tuple[int, ...]
    key: Any
    steps: tuple[core.JaxprEqn, ...]
    """``random_bits``, then equations whose inputs are outputs of earlier steps and scalars."""
    scalars: tuple
    """Scalar inputs of the steps, in order."""
    out: Any
    """Output of the last step."""
    kind: Hashable
    """Equal for arrays that the same operations make."""


def _batched_values(closed: core.ClosedJaxpr, known: dict) -> dict:
    """Values of the random arrays that are drawn in loops, by variable."""
    kinds: dict[Hashable, list[_Draw]] = defaultdict(list)
    for array in _find_draws(closed):
        kinds[array.kind].append(array)
    groups = [group for group in kinds.values() if len(group) >= _MIN_GROUP]
    scalars = _BatchedEvaluator(
        closed, known, [a for group in groups for one in group for a in (one.key, *one.scalars)]
    )
    found = {}
    for group in groups:
        found.update(zip((one.out for one in group), _draw_group(group, scalars), strict=True))
    return found


def _find_draws(closed: core.ClosedJaxpr) -> list[_Draw]:
    """All random arrays of an inlined jaxpr that could be batched."""
    equations = dependency_slice(closed, closed.jaxpr.outvars)
    users: dict[Any, list[core.JaxprEqn]] = defaultdict(list)
    made = {variable: equation for equation in equations for variable in equation.outvars}
    for equation in equations:
        for variable in {v for v in equation.invars if not isinstance(v, core.Literal)}:
            users[variable].append(equation)
    order = {id(equation): i for i, equation in enumerate(equations)}
    outputs = {v for v in closed.jaxpr.outvars if not isinstance(v, core.Literal)}
    found = [_find_draw(e, users, made, outputs, order) for e in equations if e.primitive.name == "random_bits"]
    return [array for array in found if array is not None]


def _find_draw(bits: core.JaxprEqn, users: dict, made: dict, outputs: set, order: dict[int, int]) -> _Draw | None:
    """Follow random bits through as many elementwise operations as possible; None for other kinds of bits."""
    (key,), shape = bits.invars, tuple(bits.params["shape"])
    fits = bits.params["bit_width"] == 32 and 0 < math.prod(shape) < 2**31
    if not fits or _shape(key) or not is_threefry(key.aval):
        return None
    steps, inside, waiting = [bits], {bits.outvars[0]}, list(users[bits.outvars[0]])
    while waiting:
        waiting.sort(key=lambda equation: order[id(equation)])
        step = waiting.pop(0)
        if step in steps:
            continue
        if not _extends_draw(step, inside, shape, made):
            break
        steps.append(step)
        inside.add(step.outvars[0])
        waiting += users[step.outvars[0]]
    # undo steps until only the last one is read by other equations
    while not _is_self_contained(steps, users, outputs):
        steps.pop()
    return _make_draw(key, shape, steps, made)


def _extends_draw(step: core.JaxprEqn, inside: set, shape: tuple[int, ...], made: dict) -> bool:
    """Whether an equation is elementwise in outputs of earlier steps and in scalars that need no random bits."""
    rest = [v for v in step.invars if isinstance(v, core.Literal) or v not in inside]
    if step.primitive.name not in _TRANSFORMS or len(step.outvars) != 1 or _shape(step.outvars[0]) != shape:
        return False
    return all(_broadcast_scalar(v, made) is not None for v in rest)


def _broadcast_scalar(atom: Any, made: dict) -> Any:
    """The scalar that an input is, or is broadcast from; None for other arrays and for results of random bits."""
    while not isinstance(atom, core.Literal) and math.prod(_shape(atom)) > 1:
        if atom not in made or made[atom].primitive.name != "broadcast_in_dim":
            return None
        atom = made[atom].invars[0]
    below, seen = [atom], set()
    while below:
        at = below.pop()
        if not isinstance(at, core.Literal) and at in made and at not in seen:
            if made[at].primitive.name == "random_bits":
                return None
            seen.add(at)
            below += made[at].invars
    return atom


def _is_self_contained(steps: list[core.JaxprEqn], users: dict, outputs: set) -> bool:
    """Whether other equations read only the last step."""
    within = {id(step) for step in steps}
    return not any(
        step.outvars[0] in outputs or any(id(user) not in within for user in users[step.outvars[0]])
        for step in steps[:-1]
    )


def _make_draw(key: Any, shape: tuple[int, ...], steps: list[core.JaxprEqn], made: dict) -> _Draw:
    """Collect the scalars of the steps, and describe the steps up to their variables."""
    places = {step.outvars[0]: i for i, step in enumerate(steps)}
    scalars, kind = [], []
    for step in steps[1:]:
        inputs = []
        for v in step.invars:
            if not isinstance(v, core.Literal) and v in places:
                inputs.append(places[v])
            else:
                scalars.append(_broadcast_scalar(v, made))
                inputs.append(str(_dtype(scalars[-1])))
        kind.append((step.primitive.name, str(step.params), str(_dtype(step.outvars[0])), tuple(inputs)))
    return _Draw(shape, key, tuple(steps), tuple(scalars), steps[-1].outvars[0], tuple(kind))


def _draw_group(group: Sequence[_Draw], scalars: _BatchedEvaluator) -> list[Array]:
    """Draw the arrays of a group in one loop over chunks."""
    words = jax.random.key_data(scalars.column([one.key for one in group]))
    columns = [scalars.column(atoms).reshape(len(group)) for atoms in zip(*(o.scalars for o in group), strict=True)]
    num_chunks = np.asarray([-(-math.prod(one.shape) // _CHUNK) for one in group])
    member = np.repeat(np.arange(len(group)), num_chunks)
    first = np.concatenate([np.arange(n, dtype=np.uint32) * _CHUNK for n in num_chunks])
    steps = group[0].steps

    def draw_chunk(chunk: tuple[Array, Array]) -> Array:
        i, start = chunk
        made = {steps[0].outvars[0]: counter_bits(words[i], start, _CHUNK)}
        rest = iter([jnp.broadcast_to(column[i], _CHUNK) for column in columns])
        for step in steps[1:]:
            inputs = [made[v] if not isinstance(v, core.Literal) and v in made else next(rest) for v in step.invars]
            made[step.outvars[0]] = step.primitive.bind(*inputs, **step.params)
        return made[group[0].out]

    flat = lax.map(draw_chunk, (jnp.asarray(member), jnp.asarray(first))).reshape(-1)
    starts = (np.cumsum(num_chunks) - num_chunks) * _CHUNK
    return [
        lax.slice(flat, (start,), (start + math.prod(one.shape),)).reshape(one.shape)
        for one, start in zip(group, starts.tolist(), strict=True)
    ]


class _RowOf(NamedTuple):
    """Row ``number`` of an array that was computed for several equations at once."""

    of: Array
    number: int


class _BatchedEvaluator:
    """Evaluates equations with equal primitives, parameters and shapes together, under ``vmap``."""

    def __init__(self, closed: core.ClosedJaxpr, known: dict, wanted: Sequence) -> None:
        self._found = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | known
        waiting = dependency_slice(closed, [v for v in wanted if not isinstance(v, core.Literal)], self._found)
        while waiting:
            ready: dict[Hashable, list[core.JaxprEqn]] = defaultdict(list)
            later = []
            for equation in waiting:
                if all(isinstance(v, core.Literal) or v in self._found for v in equation.invars):
                    ready[_batch_key(equation)].append(equation)
                else:
                    later.append(equation)
            for equal in ready.values():
                self._evaluate(equal)
            waiting = later

    def column(self, atoms: Sequence) -> Array:
        """The stacked values of several atoms of one size."""
        found = [self._found.get(v) if not isinstance(v, core.Literal) else None for v in atoms]
        first = found[0]
        if isinstance(first, _RowOf) and all(isinstance(row, _RowOf) and row.of is first.of for row in found):
            numbers = [row.number for row in found if isinstance(row, _RowOf)]
            return first.of if numbers == list(range(len(first.of))) else first.of[np.asarray(numbers)]
        if all(isinstance(v, core.Literal) for v in atoms):
            return jnp.asarray(np.asarray([np.reshape(v.val, ()) for v in atoms], _dtype(atoms[0])))
        found = [self._read(v) for v in atoms]
        return jnp.stack([x.reshape(found[0].shape) for x in found])

    def _read(self, atom: Any) -> Any:
        """The value of an atom."""
        if isinstance(atom, core.Literal):
            return jnp.asarray(atom.val, _dtype(atom))
        value = self._found[atom]
        return value.of[value.number] if isinstance(value, _RowOf) else value

    def _evaluate(self, equal: Sequence[core.JaxprEqn]) -> None:
        """Evaluate equal equations together."""
        if len(equal) == 1:
            outputs: list = evaluate_equation(equal[0], [self._read(v) for v in equal[0].invars], {})
            self._found.update(zip(equal[0].outvars, outputs, strict=True))
            return
        columns = list(zip(*(equation.invars for equation in equal), strict=True))
        shared = [len({_identity(v) for v in column}) == 1 for column in columns]
        inputs = [self._read(c[0]) if same else self.column(c) for c, same in zip(columns, shared, strict=True)]
        axes = [None if same else 0 for same in shared]

        def row(*inputs: Any) -> list:
            return evaluate_equation(equal[0], list(inputs), {})

        if all(shared):
            outputs = [[output] * len(equal) for output in row(*inputs)]
        else:
            outputs = [[_RowOf(of, i) for i in range(len(equal))] for of in jax.vmap(row, axes)(*inputs)]
        for equation, own in zip(equal, zip(*outputs, strict=True), strict=True):
            self._found.update(zip(equation.outvars, own, strict=True))


def _batch_key(equation: core.JaxprEqn) -> Hashable:
    """Key of equations that may be evaluated together; unique for others."""
    if equation.primitive.name not in _BATCHABLE:
        return id(equation)
    shapes = tuple((_shape(v), str(_dtype(v))) for v in equation.invars)
    return equation.primitive.name, str(equation.params), shapes


def _shape(atom: Any) -> tuple[int, ...]:
    """Shape of a jaxpr's atom."""
    return atom.aval.shape


def _dtype(atom: Any) -> Any:
    """Dtype of a jaxpr's atom."""
    return atom.aval.dtype


def _identity(atom: Any) -> Hashable:
    """Key that is equal for equal atoms."""
    return (str(atom.val), str(atom.aval)) if isinstance(atom, core.Literal) else atom
