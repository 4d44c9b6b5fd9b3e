"""Common-subexpression elimination (CSE) on a jaxpr, before differentiation.

Matches equations with equal primitives, parameters and inputs, and equal derivatives where they hold functions. One
equation stays. XLA eliminates common subexpressions as well, but not of arrays that a loop fills. A forward pass that
is computed twice in a loss, for the network's outputs and for its features (MOON), has one backward pass this way, and
XLA would keep both.

Equations with effects are never merged. Equations whose functions hold constants or call Python are taken to differ.
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


def eliminate_common_subexpressions(
    closed: core.ClosedJaxpr, same: Mapping[Any, Any] | None = None
) -> core.ClosedJaxpr:
    """``closed`` with one equation for all equal ones; ``same``: variables that are known to equal others."""
    jaxpr = closed.jaxpr
    names, equations = dict(same or {}), []
    seen: dict[Hashable, list[_Candidate]] = {}
    name = lambda atom: atom if isinstance(atom, core.Literal) else names.get(atom, atom)  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [name(v) for v in equation.invars]
        mine = _Candidate(equation)
        others = seen.setdefault((equation.primitive, *map(_atom_key, inputs)), [])
        found = None if equation.effects else next((other for other in others if mine.is_like(other)), None)
        if found is None:
            equations.append(equation.replace(invars=inputs))
            others.append(mine)
        else:
            names.update(zip(equation.outvars, found.equation.outvars, strict=True))
    changed: Any = jaxpr
    return core.ClosedJaxpr(changed.replace(eqns=equations, outvars=[name(v) for v in jaxpr.outvars]), closed.consts)


class _Candidate:
    """An equation, to be compared with others that have its inputs."""

    def __init__(self, equation: core.JaxprEqn):
        self.equation = equation
        self.kind: Hashable = None

    def is_like(self, other: _Candidate) -> bool:
        """Whether both compute the same, and whether their derivatives do; in doubt they do not."""
        mine, theirs = self.equation, other.equation
        if [str(v.aval) for v in mine.outvars] != [str(v.aval) for v in theirs.outvars]:
            return False
        if sub_jaxprs(mine):
            return self._kind() == other._kind()
        ours = _comparable_params(mine)
        return ours is not None and ours == _comparable_params(theirs)

    def _kind(self) -> Hashable:
        if self.kind is None:
            self.kind = equivalence_key(self.equation)
        return self.kind


def has_common_subexpressions(closed: core.ClosedJaxpr) -> bool:
    """Whether a product, a convolution or a loop stands twice in a program and in what it calls, of the same inputs."""
    fresh = itertools.count()
    known: dict[Any, Any] = {v: next(fresh) for v in closed.jaxpr.invars}
    return any(_costly_duplicates(closed, known, {}, fresh))


def _costly_duplicates(closed: core.ClosedJaxpr, known: dict, seen: dict, fresh: Iterator[int]) -> Iterator[bool]:
    """Of each costly equation, whether it was there before. known: variables and the numbers of their values."""
    known.update((v, ("constant", id(c))) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True))
    of = lambda atom: _atom_key(atom) if isinstance(atom, core.Literal) else known[atom]  # noqa: E731
    for equation in closed.jaxpr.eqns:
        inputs = tuple(map(of, equation.invars))
        if equation.primitive.name in CALL_PRIMITIVES:
            inner: core.ClosedJaxpr = equation.params["jaxpr"]
            known.update(zip(inner.jaxpr.invars, inputs, strict=True))
            yield from _costly_duplicates(inner, known, seen, fresh)
            known.update(zip(equation.outvars, map(of, inner.jaxpr.outvars), strict=True))
            continue
        params = None if equation.effects else _comparable_params(equation)
        values = None if params is None else seen.get((equation.primitive, params, inputs))
        if equation.primitive.name in _COSTLY:
            yield values is not None
        if values is None:
            values = [next(fresh) for _ in equation.outvars]
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
    if not isinstance(atom, core.Literal):
        return atom
    value = np.asarray(atom.val)
    return "literal", value.dtype.str, value.tobytes(), str(atom.aval)
