"""Scan over layers: repeated layers become one ``lax.scan`` over their stacked weights, on CPUs.

- Before: the equations of one layer, repeated with other weights (:mod:`fedrax.xla.equivalence`), where each layer
  reads the outputs of the one before.
- After: one ``scan`` over the stacked weights; cheap operations are rematerialized in its backward pass (`_CHEAP`).
- Why: the scan is traced, compiled and loaded once for each kind of layer. A network of fifty blocks is mostly the same
  few operations with other weights. It is built before differentiation, so that the backward pass is a scan, too.
- Not for: scans that save fewer than `Limits.layer_scan_equations` equations, and programs whose saved activations and
  weights exceed `Limits.layer_scan_bytes`: a scan copies both, and beyond the caches that takes longer than it saves.

:func:`_find_scans` searches repetitions in the sequence of equivalence keys; :func:`_make_scan` classifies the inputs
of a layer (local, carried, stacked, shared); :class:`_LayerScan` evaluates the scan.
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
"""Suffix of a scan's name scope, after its length; profiles recognize scans by it."""
_WEIGHT_COPIES = 2
"""Copies of each weight: weights are stacked in the forward pass, and their gradients unstacked in the backward."""
_MAX_CANDIDATES = 8
"""Most candidate runs that are tried. It bounds the time of the search."""
_CHEAP = ELEMENTWISE | frozenset(["broadcast_in_dim", "iota", "reshape", "rev", "slice", "squeeze", "transpose"])
"""Operations that the backward pass recomputes, which takes less time than to store and to read their results."""

_INDEXING = "dynamic_slice slice split squeeze stack unstack concatenate"
_LAYER_INDEXING = frozenset(f"{_INDEXING} random_seed random_split random_unwrap random_wrap".split())
"""Operations that index an array of all layers. Each has other indices, so that they would interrupt a repetition."""


def scanned_layers(program: core.ClosedJaxpr) -> list[int]:
    """Lengths of the scans over layers in a traced program, backward scans excluded."""
    lengths = []
    for equation in equations_in(program):
        scope = str(equation.source_info.name_stack).split("/")[-1]
        if equation.primitive.name == "scan" and scope == f"jvp({equation.params['length']}{LAYER_SCAN_SCOPE})":
            lengths.append(equation.params["length"])
    return lengths


class _Run(NamedTuple):
    """``layers`` repetitions of ``period`` equations, from number ``start`` on."""

    start: int
    period: int
    layers: int


class _Local(NamedTuple):
    """An input that equation number ``equation`` of the same layer computes: its output number ``output``."""

    equation: int
    output: int


class _Carried(NamedTuple):
    """An input that the previous layer computes; the first layer reads ``first``."""

    made: _Local
    first: Any


class _Stacked(NamedTuple):
    """An input that differs between layers, such as weights: one atom for each layer."""

    atoms: tuple


class _Shared(NamedTuple):
    """An input that is the same in all layers."""

    atom: Any


_Source = _Local | _Carried | _Stacked | _Shared


def evaluate_with_layer_scans(closed: core.ClosedJaxpr, rules: Rules, *args: Any) -> list:
    """The outputs of an inlined jaxpr, with repeated layers in scans, and with ``rules`` for all equations."""
    jaxpr = closed.jaxpr
    equations = _indexing_first(dependency_slice(closed, jaxpr.outvars))
    loops = {loop.run.start: loop for loop in _find_scans(equations, jaxpr.invars, jaxpr.outvars)}
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    at = 0
    while at < len(equations):
        if at in loops:
            values.update(loops[at].evaluate(read, rules))
            at += loops[at].run.period * loops[at].run.layers
            continue
        outputs = evaluate_equation(equations[at], [read(v) for v in equations[at].invars], rules)
        values.update(zip(equations[at].outvars, outputs, strict=True))
        at += 1
    return [read(v) for v in jaxpr.outvars]


def _indexing_first(equations: Sequence[core.JaxprEqn]) -> list[core.JaxprEqn]:
    """Move indexing of stacked inputs to the front, so that the remaining equations repeat."""
    made = {v: equation for equation in equations for v in equation.outvars}
    first: dict[int, core.JaxprEqn] = {}
    for equation in equations:
        inputs = [made.get(v) for v in equation.invars if not isinstance(v, core.Literal)]
        if equation.primitive.name in _LAYER_INDEXING and all(of is None or id(of) in first for of in inputs):
            first[id(equation)] = equation
    return [*first.values(), *(equation for equation in equations if id(equation) not in first)]


class _LayerScan(NamedTuple):
    """A run of layers as a scan."""

    run: _Run
    template: Sequence[core.JaxprEqn]
    """The equations of one layer."""
    sources: tuple[tuple[_Source, ...], ...]
    """Sources of the inputs of each of these equations."""
    wanted: dict[Any, tuple[int, _Local]]
    """Variables that are read after the scan: the layer and the equation that compute them."""

    def evaluate(self, read: Callable[[Any], Any], rules: Rules) -> dict[Any, Array]:
        """The values of the wanted variables."""
        layers = self.run.layers
        every = [source for sources in self.sources for source in sources]
        carried = {_source_key(s): s for s in every if isinstance(s, _Carried)}
        scanned = {_source_key(s): s for s in every if isinstance(s, _Stacked)}
        made_by = [source.made for source in carried.values()]
        by_last = dict.fromkeys(place for layer, place in self.wanted.values() if layer == layers - 1)
        only_last = [place for place in by_last if place not in made_by]
        before_last = list(dict.fromkeys(place for layer, place in self.wanted.values() if layer < layers - 1))

        def step(carry: list, xs: list) -> tuple[list, list]:
            inputs = dict(zip([*carried, *scanned], [*carry[: len(carried)], *xs], strict=True))
            made = self._evaluate_layer(inputs, read, rules)
            return [made[place] for place in [*made_by, *only_last]], [made[place] for place in before_last]

        first = [jnp.asarray(read(source.first)) for source in carried.values()]
        first += [jnp.zeros(aval.shape, aval.dtype) for aval in map(self._aval, only_last)]
        stacked = [_stack(source.atoms, read) for source in scanned.values()]
        # jax.checkpoint applies reduce_precision to saved residuals, which has no complex form
        real = not any(map(_makes_complex, self.template))
        body = jax.checkpoint(step, policy=_is_saved, prevent_cse=False) if real else step
        with jax.named_scope(f"{layers}{LAYER_SCAN_SCOPE}"):
            carry, stacks = lax.scan(body, first, stacked, length=layers)
        last_values = dict(zip([*made_by, *only_last], carry, strict=True))
        earlier_values = dict(zip(before_last, stacks, strict=True))
        return {
            variable: last_values[place] if layer == layers - 1 else earlier_values[place][layer]
            for variable, (layer, place) in self.wanted.items()
        }

    def _evaluate_layer(self, inputs: dict, read: Callable[[Any], Any], rules: Rules) -> dict[_Local, Any]:
        """All results of one layer, given its carried and stacked inputs."""
        made: dict[_Local, Any] = {}

        def value(source: _Source) -> Any:
            if isinstance(source, _Local):
                return made[source]
            return read(source.atom) if isinstance(source, _Shared) else inputs[_source_key(source)]

        for number, (equation, sources) in enumerate(zip(self.template, self.sources, strict=True)):
            outputs = evaluate_equation(equation, list(map(value, sources)), rules)
            made.update((_Local(number, i), output) for i, output in enumerate(outputs))
        return made

    def _aval(self, place: _Local) -> Any:
        """Shape and dtype of a result of a layer."""
        return self.template[place.equation].outvars[place.output].aval


def _stack(atoms: Sequence[Any], read: Callable[[Any], Any]) -> Array:
    """The stacked values of one atom for each layer."""
    values = [read(atom) for atom in atoms]
    if all(isinstance(atom, core.Literal) for atom in atoms):
        return jnp.asarray(np.asarray(values, atoms[0].aval.dtype))
    return jnp.stack(values)


def _source_key(source: _Carried | _Stacked) -> Hashable:
    """Key of a source: two are equal for the same variables and for literals of equal value."""
    if isinstance(source, _Carried):
        return source.made, _atom_key(source.first)
    return tuple(map(_atom_key, source.atoms))


def _atom_key(atom: Any) -> Hashable:
    """The bytes of a literal, or the ID of a variable."""
    return np.asarray(atom.val).tobytes() if isinstance(atom, core.Literal) else id(atom)


def _makes_complex(equation: core.JaxprEqn) -> bool:
    """Whether an equation or one of its sub-jaxprs has complex results."""
    inside = (e for function in sub_jaxprs(equation) for e in equations_in(function))
    made = (getattr(v.aval, "dtype", None) for e in (equation, *inside) for v in e.outvars)
    return any(dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating) for dtype in made)


def _is_saved(primitive: Any, *_: Any, **__: Any) -> bool:
    """Policy of ``jax.checkpoint``: all but cheap operations are saved."""
    return primitive.name not in _CHEAP


# --- Repetitions ----------------------------------------------------------------------------------------------------


def _find_scans(
    equations: Sequence[core.JaxprEqn], inputs: Sequence[Any], outvars: Sequence[Any]
) -> Iterator[_LayerScan]:
    """Disjoint scans, chosen greedily by the number of equations that each saves."""
    if not is_enabled("layer_scan"):
        return
    copied = _saved_bytes(equations) + _WEIGHT_COPIES * sum(map(aval_bytes, inputs))
    sizes = np.asarray(list(map(_count_inner, equations)))
    if sizes.sum() < limits().layer_scan_equations or copied > limits().layer_scan_bytes:
        return
    numbers: dict[Any, int] = {}
    kinds = np.asarray([numbers.setdefault(equivalence_key(equation), len(numbers)) for equation in equations])
    yield from _find_scans_between(
        _AnalyzedEquations(equations, kinds, sizes, _live_bytes(equations, outvars), outvars), 0, len(equations)
    )


class _AnalyzedEquations(NamedTuple):
    """A function's equations with facts about each of them."""

    equations: Sequence[core.JaxprEqn]
    kinds: np.ndarray
    """Numbers that are equal for equivalent equations."""
    sizes: np.ndarray
    """Number of equations in each, sub-jaxprs included."""
    alive: np.ndarray
    """Bytes of earlier results that are alive at each equation."""
    outvars: Sequence[Any]


def _find_scans_between(analyzed: _AnalyzedEquations, start: int, stop: int) -> Iterator[_LayerScan]:
    """The scans between two equations: the one that saves most, and those before and after it."""
    for first, period, length in _repetitions(analyzed.kinds[start:stop], analyzed.sizes[start:stop])[:_MAX_CANDIDATES]:
        first += start
        # a layer should begin where the fewest bytes are carried
        cuts = np.argsort(analyzed.alive[first : first + length % period + 1], kind="stable")
        runs = (_Run(first + int(cut), period, length // period) for cut in cuts)
        found = next((loop for run in runs if (loop := _make_scan(analyzed, run)) is not None), None)
        if found is not None:
            note_applied("layer_scan")
            yield from _find_scans_between(analyzed, start, found.run.start)
            yield found
            yield from _find_scans_between(analyzed, found.run.start + period * found.run.layers, stop)
            return


def _live_bytes(equations: Sequence[core.JaxprEqn], outvars: Sequence[Any]) -> np.ndarray:
    """Bytes of results that are alive before each equation."""
    last = {v: i for i, e in enumerate(equations) for v in e.invars if not isinstance(v, core.Literal)}
    last |= {v: len(equations) for v in outvars if not isinstance(v, core.Literal)}
    changes = np.zeros(len(equations) + 2)
    for i, equation in enumerate(equations):
        for v in equation.outvars:
            changes[i + 1] += aval_bytes(v)
            changes[last.get(v, i) + 1] -= aval_bytes(v)
    return np.cumsum(changes)


def _saved_bytes(equations: Sequence[core.JaxprEqn]) -> int:
    """Bytes of the results that are saved for the backward pass."""
    return sum(aval_bytes(v) for e in equations if not _is_cheap(e) for v in e.outvars)


def _is_cheap(equation: core.JaxprEqn) -> bool:
    """Whether the backward pass recomputes an equation."""
    if equation.primitive.name in (*CUSTOM_DERIVATIVE_PRIMITIVES, *CALL_PRIMITIVES):
        return all(_is_cheap(inner) for one in sub_jaxprs(equation) for inner in one.eqns)
    return equation.primitive.name in _CHEAP


def _repetitions(kinds: np.ndarray, sizes: np.ndarray) -> list[tuple[int, int, int]]:
    """(first, period, length) of ranges that repeat with a period, by the number of equations saved, most first."""
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
    """Number of equations, those of sub-jaxprs included; functions with custom derivatives count as one."""
    custom = equation.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
    return 1 if custom else 1 + sum(1 for one in sub_jaxprs(equation) for _ in equations_in(one))


# --- Data flow ------------------------------------------------------------------------------------------------------


def _make_scan(analyzed: _AnalyzedEquations, run: _Run) -> _LayerScan | None:
    """The run as a scan; None if inputs of its layers have different sources."""
    equations, (start, period, layers) = analyzed.equations, run
    stop = start + period * layers
    made: dict[Any, tuple[int, _Local]] = {}
    for number, equation in enumerate(equations[start:stop]):
        layer, place = divmod(number, period)
        made.update((v, (layer, _Local(place, i))) for i, v in enumerate(equation.outvars))
    sources = []
    for place in range(start, start + period):
        inputs = zip(*(equation.invars for equation in equations[place:stop:period]), strict=True)
        found = [_classify_input(atoms, made) for atoms in inputs]
        if None in found:
            return None
        sources.append(tuple(found))
    after = [*(v for equation in equations[stop:] for v in equation.invars), *analyzed.outvars]
    wanted = {v: made[v] for v in after if not isinstance(v, core.Literal) and v in made}
    carried = {source.made for layer in sources for source in layer if isinstance(source, _Carried)}
    only_last = [v for v, (layer, place) in wanted.items() if layer == layers - 1 and place not in carried]
    if any(jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in only_last):  # a carry of keys has no zeros
        return None
    return _LayerScan(run, equations[start : start + period], tuple(sources), wanted)


def _classify_input(atoms: Sequence[Any], made: dict[Any, tuple[int, _Local]]) -> _Source | None:
    """The source of an input, given its atom in each layer; None if layers differ in it."""
    where = [None if isinstance(atom, core.Literal) else made.get(atom) for atom in atoms]
    if all(place is None for place in where):
        return _Shared(atoms[0]) if len(set(map(_atom_key, atoms))) == 1 else _Stacked(tuple(atoms))
    if where[-1] is None:
        return None
    place = where[-1][1]
    if where == [(layer, place) for layer in range(len(atoms))]:
        return place
    if where == [None, *((layer, place) for layer in range(len(atoms) - 1))]:
        return _Carried(place, atoms[0])
    return None
