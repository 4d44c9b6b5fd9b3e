"""Scan over layers: repeated layers become one ``lax.scan`` over their stacked weights, on CPUs.

Matches runs of structurally equal equations that repeat, with the output of one as the input of the next: a network of
fifty blocks is mostly the same few operations with other weights. The scan is traced, compiled and loaded once for each
kind of layer. It is built before differentiation, so that the backward pass is a scan, too; cheap operations are
rematerialized there (`_CHEAP`).

It does not apply where the scan saves fewer than `Limits.layer_scan_equations` equations, or where saved activations
and weights exceed `Limits.layer_scan_bytes`: a scan copies both, and beyond the caches that takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

from fedrax.xla.equivalence import equivalence_key
from fedrax.xla.flops import ELEMENTWISE
from fedrax.xla.options import is_enabled, limits, note_applied
from fedrax.xla.rewriting import (
    CALL_PRIMITIVES,
    CUSTOM_DERIVATIVE_PRIMITIVES,
    Rules,
    dependency_slice,
    evaluate_equation,
)
from fedrax.xla.tracing import aval_bytes, equations_in, sub_jaxprs

LAYER_SCAN_SCOPE = "_layers"
"""The scope of a scan is its length followed by this."""
_OF_INPUTS = 2
"""How often they count: weights are put together and taken apart, and so are their gradients."""
_MAX_CANDIDATES = 8
"""Most candidate runs that are tried."""
_CHEAP = ELEMENTWISE | frozenset(["broadcast_in_dim", "iota", "reshape", "rev", "slice", "squeeze", "transpose"])
"""Operations that the backward pass computes once more: it takes less than to keep and to read what they gave."""

_INDEXING = "dynamic_slice slice split squeeze stack unstack concatenate"
_LAYER_INDEXING = frozenset(f"{_INDEXING} random_seed random_split random_unwrap random_wrap".split())
"""Operations that index an array of all layers: no two are equal."""


def scanned_layers(program: core.ClosedJaxpr) -> list[int]:
    """Lengths of the scans over layers in a traced program; each counted once for a gradient."""
    turns = []
    for equation in equations_in(program):
        scope = str(equation.source_info.name_stack).split("/")[-1]
        if equation.primitive.name == "scan" and scope == f"jvp({equation.params['length']}{LAYER_SCAN_SCOPE})":
            turns.append(equation.params["length"])
    return turns


class _Run(NamedTuple):
    """``turns`` repetitions of ``period`` equal equations, from number ``start`` on."""

    start: int
    period: int
    turns: int


class _Local(NamedTuple):
    """An input computed in the same layer: by which of its equations, and which output it is."""

    equation: int
    output: int


class _Carried(NamedTuple):
    """An input computed by the layer before; the first layer takes ``first``."""

    made: _Local
    first: Any


class _Stacked(NamedTuple):
    """An input of which each layer has its own, such as weights: one atom a layer."""

    atoms: tuple


class _Shared(NamedTuple):
    """An input that all layers share."""

    atom: Any


_Source = _Local | _Carried | _Stacked | _Shared


def evaluate_with_layer_scans(closed: core.ClosedJaxpr, rules: Rules, *args: Any) -> list:
    """The outputs of a program without calls, with repeated layers in scans, and with ``rules`` for all equations."""
    jaxpr = closed.jaxpr
    equations = _indexing_first(dependency_slice(closed, jaxpr.outvars))
    loops = {loop.run.start: loop for loop in _find_scans(equations, jaxpr.invars, jaxpr.outvars)}
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
    at = 0
    while at < len(equations):
        if at in loops:
            values.update(loops[at].evaluated(read, rules))
            at += loops[at].run.period * loops[at].run.turns
            continue
        outputs = evaluate_equation(equations[at], [read(v) for v in equations[at].invars], rules)
        values.update(zip(equations[at].outvars, outputs, strict=True))
        at += 1
    return [read(v) for v in jaxpr.outvars]


def _indexing_first(equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """With indexing of stacked inputs moved to the front, so that the remaining equations repeat."""
    made = {v: equation for equation in equations for v in equation.outvars}
    first: dict[int, core.JaxprEqn] = {}
    for equation in equations:
        inputs = [made.get(v) for v in equation.invars if not isinstance(v, core.Literal)]
        if equation.primitive.name in _LAYER_INDEXING and all(of is None or id(of) in first for of in inputs):
            first[id(equation)] = equation
    return [*first.values(), *(equation for equation in equations if id(equation) not in first)]


class _LayerScan(NamedTuple):
    """A run of equations as a scan."""

    run: _Run
    template: Sequence[core.JaxprEqn]
    """The equations of one layer."""
    sources: tuple[tuple[_Source, ...], ...]
    """Of the inputs of each of them."""
    wanted: dict[Any, tuple[int, _Local]]
    """Variables that are read after the scan: the layer and the equation that compute them."""

    def evaluated(self, read: Callable[[Any], Any], rules: Rules) -> dict[Any, Array]:
        """The values of what is wanted."""
        turns = self.run.turns
        every = [source for sources in self.sources for source in sources]
        handed = {_source_key(s): s for s in every if isinstance(s, _Carried)}
        cut = {_source_key(s): s for s in every if isinstance(s, _Stacked)}
        made_by = [source.made for source in handed.values()]
        by_last = dict.fromkeys(place for t, place in self.wanted.values() if t == turns - 1)
        only_last = [place for place in by_last if place not in made_by]
        before_last = list(dict.fromkeys(place for t, place in self.wanted.values() if t < turns - 1))

        def turn(carry: list, mine: list) -> tuple[list, list]:
            made = self._turn(dict(zip([*handed, *cut], [*carry[: len(handed)], *mine], strict=True)), read, rules)
            return [made[place] for place in [*made_by, *only_last]], [made[place] for place in before_last]

        first = [jnp.asarray(read(source.first)) for source in handed.values()]
        first += [jnp.zeros(aval.shape, aval.dtype) for aval in map(self._aval, only_last)]
        stacked = [_stack(source.atoms, read) for source in cut.values()]
        # Of what is kept JAX asks an operation that complex numbers do not have.
        real = not any(map(_makes_complex, self.template))
        body = jax.checkpoint(turn, policy=_is_saved, prevent_cse=False) if real else turn
        with jax.named_scope(f"{turns}{LAYER_SCAN_SCOPE}"):
            carry, stacks = lax.scan(body, first, stacked, length=turns)
        at_end = dict(zip([*made_by, *only_last], carry, strict=True))
        on_the_way = dict(zip(before_last, stacks, strict=True))
        of = lambda t, place: at_end[place] if t == turns - 1 else on_the_way[place][t]  # noqa: E731
        return {variable: of(*where) for variable, where in self.wanted.items()}

    def _turn(self, given: dict, read: Callable[[Any], Any], rules: Rules) -> dict[_Local, Any]:
        """Everything that one layer computes."""
        made: dict[_Local, Any] = {}

        def value(source: _Source) -> Any:
            if isinstance(source, _Local):
                return made[source]
            return read(source.atom) if isinstance(source, _Shared) else given[_source_key(source)]

        for number, (equation, sources) in enumerate(zip(self.template, self.sources, strict=True)):
            outputs = evaluate_equation(equation, list(map(value, sources)), rules)
            made.update((_Local(number, i), output) for i, output in enumerate(outputs))
        return made

    def _aval(self, place: _Local) -> Any:
        return self.template[place.equation].outvars[place.output].aval


def _stack(atoms: Sequence[Any], read: Callable[[Any], Any]) -> Array:
    values = [read(atom) for atom in atoms]
    if all(isinstance(atom, core.Literal) for atom in atoms):
        return jnp.asarray(np.asarray(values, atoms[0].aval.dtype))
    return jnp.stack(values)


def _source_key(source: _Carried | _Stacked) -> Hashable:
    """What tells sources apart: numbers that stand in the program are equal, others are the same variable."""
    if isinstance(source, _Carried):
        return source.made, _atom_key(source.first)
    return tuple(map(_atom_key, source.atoms))


def _atom_key(atom: Any) -> Hashable:
    return np.asarray(atom.val).tobytes() if isinstance(atom, core.Literal) else id(atom)


def _makes_complex(equation: core.JaxprEqn) -> bool:
    inside = (e for function in sub_jaxprs(equation) for e in equations_in(function))
    made = (getattr(v.aval, "dtype", None) for e in (equation, *inside) for v in e.outvars)
    return any(dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating) for dtype in made)


def _is_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in _CHEAP


# --- What repeats ---------------------------------------------------------------------------------------------------


def _find_scans(
    equations: Sequence[core.JaxprEqn], inputs: Sequence[Any], outvars: Sequence[Any]
) -> Iterator[_LayerScan]:
    """Disjoint loops, in which as many equations as possible are saved."""
    if not is_enabled("layer_scan"):
        return
    passed = _saved_bytes(equations) + _OF_INPUTS * sum(map(aval_bytes, inputs))
    sizes = np.asarray(list(map(_count_inner, equations)))
    if sizes.sum() < limits().layer_scan_equations or passed > limits().layer_scan_bytes:
        return
    numbers: dict[Any, int] = {}
    kinds = np.asarray([numbers.setdefault(equivalence_key(equation), len(numbers)) for equation in equations])
    yield from _find_scans_between(
        _Graph(equations, kinds, sizes, _live_bytes(equations, outvars), outvars), 0, len(equations)
    )


class _Graph(NamedTuple):
    """A function's equations, and what is known of them."""

    equations: Sequence[core.JaxprEqn]
    kinds: np.ndarray
    """Equations of one number compute the same."""
    sizes: np.ndarray
    """Of how many equations each consists."""
    alive: np.ndarray
    """Bytes made before each equation that it or a later one reads."""
    outvars: Sequence[Any]


def _find_scans_between(flow: _Graph, start: int, stop: int) -> Iterator[_LayerScan]:
    """The loops among some of the equations: the one that saves most, then those before and after it."""
    for first, period, length in _repetitions(flow.kinds[start:stop], flow.sizes[start:stop])[:_MAX_CANDIDATES]:
        first += start
        # layers best begin where the fewest bytes are carried
        cuts = np.argsort(flow.alive[first : first + length % period + 1], kind="stable")
        runs = (_Run(first + int(cut), period, length // period) for cut in cuts)
        found = next((loop for run in runs if (loop := _make_scan(flow, run)) is not None), None)
        if found is not None:
            note_applied("layer_scan")
            yield from _find_scans_between(flow, start, found.run.start)
            yield found
            yield from _find_scans_between(flow, found.run.start + period * found.run.turns, stop)
            return


def _live_bytes(equations: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> np.ndarray:
    last = {v: i for i, e in enumerate(equations) for v in e.invars if not isinstance(v, core.Literal)}
    last |= {v: len(equations) for v in outvars if not isinstance(v, core.Literal)}
    changes = np.zeros(len(equations) + 2)
    for i, equation in enumerate(equations):
        for v in equation.outvars:
            changes[i + 1] += aval_bytes(v)
            changes[last.get(v, i) + 1] -= aval_bytes(v)
    return np.cumsum(changes)


def _saved_bytes(equations: Sequence[core.JaxprEqn]) -> int:
    """About what the backward pass reads of what the equations make."""
    return sum(aval_bytes(v) for e in equations if not _is_cheap(e) for v in e.outvars)


def _is_cheap(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name in (*CUSTOM_DERIVATIVE_PRIMITIVES, *CALL_PRIMITIVES):
        return all(_is_cheap(inner) for one in sub_jaxprs(equation) for inner in one.eqns)
    return equation.primitive.name in _CHEAP


def _repetitions(kinds: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, period, length) of stretches whose every equation is like the one a period before; best first."""
    found, until = [], np.concatenate([[0], np.cumsum(sizes)])
    for period in range(1, len(kinds) // 2 + 1):
        same = np.concatenate([[0], kinds[:-period] == kinds[period:], [0]]).astype(np.int8)
        ends = np.flatnonzero(np.diff(same)).reshape(-1, 2)
        for first, last in ends[(ends[:, 1] - ends[:, 0] >= period)].tolist():
            saved = int(until[first + (last - first) // period * period] - until[first])
            if saved >= limits().layer_scan_equations:
                found.append((-saved, period, first, last - first + period))
    return [(first, period, length) for _, period, first, length in sorted(found)]


def _count_inner(equation: core.JaxprEqn) -> int:
    """Equations inside it, where it stands for some."""
    own = equation.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
    return 1 if own else 1 + sum(1 for one in sub_jaxprs(equation) for _ in equations_in(one))


# --- What flows -----------------------------------------------------------------------------------------------------


def _make_scan(flow: _Graph, run: _Run) -> _LayerScan | None:
    """The run as a scan; None if its repetitions read different inputs."""
    equations, (start, period, turns) = flow.equations, run
    stop = start + period * turns
    made: dict[Any, tuple[int, _Local]] = {}
    for number, equation in enumerate(equations[start:stop]):
        turn, place = divmod(number, period)
        made.update((v, (turn, _Local(place, i))) for i, v in enumerate(equation.outvars))
    sources = []
    for place in range(start, start + period):
        inputs = zip(*(equation.invars for equation in equations[place:stop:period]), strict=True)
        found = [_classify_input(atoms, made) for atoms in inputs]
        if None in found:
            return None
        sources.append(tuple(found))
    after = [*(v for equation in equations[stop:] for v in equation.invars), *flow.outvars]
    wanted = {v: made[v] for v in after if not isinstance(v, core.Literal) and v in made}
    handed = {source.made for turn in sources for source in turn if isinstance(source, _Carried)}
    begun = [v for v, (turn, place) in wanted.items() if turn == turns - 1 and place not in handed]
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in begun):  # keys, of which there are no zeros
        return None
    return _LayerScan(run, equations[start : start + period], tuple(sources), wanted)


def _classify_input(atoms: Sequence[Any], made: dict[Any, tuple[int, _Local]]) -> _Source | None:
    """Where an input comes from, given its atom in each layer."""
    where = [None if isinstance(atom, core.Literal) else made.get(atom) for atom in atoms]
    if all(place is None for place in where):
        return _Shared(atoms[0]) if len(set(map(_atom_key, atoms))) == 1 else _Stacked(tuple(atoms))
    if where[-1] is None:
        return None
    place = where[-1][1]
    if where == [(turn, place) for turn in range(len(atoms))]:
        return place
    if where == [None, *((turn, place) for turn in range(len(atoms) - 1))]:
        return _Carried(place, atoms[0])
    return None
