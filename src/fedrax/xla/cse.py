"""Common-subexpression elimination (CSE) on a jaxpr, before differentiation.

- Before: two equations with equal primitives, parameters and inputs; if they have sub-jaxprs, with equal derivatives.
- After: the first equation, whose outputs replace those of the second.
- Why: XLA eliminates common subexpressions too, but not loops that fill arrays, and not after differentiation. A loss
  that computes a forward pass twice, for the network's outputs and for its features (MOON), has one backward pass this
  way; XLA would compute two.
- Not for: equations with effects, and equations whose sub-jaxprs have constants or call Python, which cannot be
  compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend import core

from fedrax.xla.equivalence import equivalence_key
from fedrax.xla.rewriting import CALL_PRIMITIVES
from fedrax.xla.tracing import sub_jaxprs

_COSTLY = ("dot_general", "conv_general_dilated", "scan")
"""Primitives for whose sake the pass runs: without a duplicate of one, a program is left as it is."""


def eliminate_common_subexpressions(
    closed: core.ClosedJaxpr, same: Mapping[Any, Any] | None = None
) -> core.ClosedJaxpr:
    """Merge equal equations of a jaxpr.

    Args:
        closed: the jaxpr; sub-jaxprs are not changed.
        same: variables that the caller knows to be equal: each is replaced by its value.
    """
    jaxpr = closed.jaxpr
    replacements, equations = dict(same or {}), []
    seen: dict[Hashable, list[_Candidate]] = {}

    def replaced(atom: Any) -> Any:
        return atom if isinstance(atom, core.Literal) else replacements.get(atom, atom)

    for equation in jaxpr.eqns:
        inputs = [replaced(v) for v in equation.invars]
        candidate = _Candidate(equation)
        others = seen.setdefault((equation.primitive, *map(_atom_key, inputs)), [])
        found = None if equation.effects else next((other for other in others if candidate.equals(other)), None)
        if found is None:
            equations.append(equation.replace(invars=inputs))
            others.append(candidate)
        else:
            replacements.update(zip(equation.outvars, found.equation.outvars, strict=True))
    open_jaxpr: Any = jaxpr
    outvars = [replaced(v) for v in jaxpr.outvars]
    return core.ClosedJaxpr(open_jaxpr.replace(eqns=equations, outvars=outvars), closed.consts)


class _Candidate:
    """An equation, to be compared with others of the same primitive and inputs."""

    def __init__(self, equation: core.JaxprEqn):
        self.equation = equation
        self._cached_key: Hashable = None

    def equals(self, other: _Candidate) -> bool:
        """Whether both equations, and their derivatives, are known to compute the same."""
        a, b = self.equation, other.equation
        if [str(v.aval) for v in a.outvars] != [str(v.aval) for v in b.outvars]:
            return False
        if sub_jaxprs(a):
            return self._key() == other._key()
        params = _comparable_params(a)
        return params is not None and params == _comparable_params(b)

    def _key(self) -> Hashable:
        """Equivalence key, computed on demand, since it traces derivatives."""
        if self._cached_key is None:
            self._cached_key = equivalence_key(self.equation)
        return self._cached_key


def has_common_subexpressions(closed: core.ClosedJaxpr) -> bool:
    """Whether a program and its calls have two equal dot products, convolutions or scans of the same inputs."""
    value_numbers = itertools.count()
    known: dict[Any, Any] = {v: next(value_numbers) for v in closed.jaxpr.invars}
    return any(_costly_duplicates(closed, known, {}, value_numbers))


def _costly_duplicates(
    closed: core.ClosedJaxpr, known: dict, seen: dict, value_numbers: Iterator[int]
) -> Iterator[bool]:
    """Value numbering: for each costly equation, whether an equal one came before; ``known``: numbers of variables."""
    known.update((v, ("constant", id(c))) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def number(atom: Any) -> Hashable:
        return _atom_key(atom) if isinstance(atom, core.Literal) else known[atom]

    for equation in closed.jaxpr.eqns:
        inputs = tuple(map(number, equation.invars))
        if equation.primitive.name in CALL_PRIMITIVES:
            inner: core.ClosedJaxpr = equation.params["jaxpr"]
            known.update(zip(inner.jaxpr.invars, inputs, strict=True))
            yield from _costly_duplicates(inner, known, seen, value_numbers)
            known.update(zip(equation.outvars, map(number, inner.jaxpr.outvars), strict=True))
            continue
        params = None if equation.effects else _comparable_params(equation)
        values = None if params is None else seen.get((equation.primitive, params, inputs))
        if equation.primitive.name in _COSTLY:
            yield values is not None
        if values is None:
            values = [next(value_numbers) for _ in equation.outvars]
            if params is not None:
                seen[equation.primitive, params, inputs] = values
        known.update(zip(equation.outvars, values, strict=True))


def _comparable_params(equation: core.JaxprEqn) -> Hashable:
    """The equation's parameters, or None where they cannot be compared."""
    params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
    try:
        hash(params)
    except TypeError:
        return None
    return params


def _atom_key(atom: Any) -> Hashable:
    """A variable itself, or dtype, value and aval of a literal."""
    if not isinstance(atom, core.Literal):
        return atom
    value = np.asarray(atom.val)
    return "literal", value.dtype.str, value.tobytes(), str(atom.aval)
