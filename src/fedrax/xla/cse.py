"""Programs in which nothing is computed twice, so that nothing is kept or differentiated twice.

XLA finds what is computed twice, too, but not that two arrays which a loop fills are then the same; and of a forward
pass that stands twice in a loss, once for the outputs and once for the features, it has to keep both backward passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
from jax.extend import core

from fedrax.xla.equivalence import kind_of
from fedrax.xla.rewriting import CALLS
from fedrax.xla.tracing import functions_in

_COSTLY = ("dot_general", "conv_general_dilated", "scan")


def computed_once(closed: core.ClosedJaxpr, same: Mapping[Any, Any] | None = None) -> core.ClosedJaxpr:
    """``closed`` with one equation in the place of all that are alike; ``same``: variables and what stands for them."""
    jaxpr = closed.jaxpr
    names, equations = dict(same or {}), []
    seen: dict[Hashable, list[_Seen]] = {}
    name = lambda atom: atom if isinstance(atom, core.Literal) else names.get(atom, atom)  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [name(v) for v in equation.invars]
        mine = _Seen(equation)
        others = seen.setdefault((equation.primitive, *map(_of_atom, inputs)), [])
        found = None if equation.effects else next((other for other in others if mine.is_like(other)), None)
        if found is None:
            equations.append(equation.replace(invars=inputs))
            others.append(mine)
        else:
            names.update(zip(equation.outvars, found.equation.outvars, strict=True))
    changed: Any = jaxpr
    return core.ClosedJaxpr(changed.replace(eqns=equations, outvars=[name(v) for v in jaxpr.outvars]), closed.consts)


class _Seen:
    """An equation, to be compared with others that have its inputs."""

    def __init__(self, equation: core.JaxprEqn):
        self.equation = equation
        self.kind: Hashable = None

    def is_like(self, other: _Seen) -> bool:
        """Whether both compute the same, and whether their derivatives do; in doubt they do not."""
        mine, theirs = self.equation, other.equation
        if [str(v.aval) for v in mine.outvars] != [str(v.aval) for v in theirs.outvars]:
            return False
        if functions_in(mine):
            return self._kind() == other._kind()
        ours = _params(mine)
        return ours is not None and ours == _params(theirs)

    def _kind(self) -> Hashable:
        if self.kind is None:
            self.kind = kind_of(self.equation)
        return self.kind


def computes_twice(closed: core.ClosedJaxpr) -> bool:
    """Whether a product, a convolution or a loop stands twice in a program and in what it calls, of the same inputs."""
    fresh = itertools.count()
    known: dict[Any, Any] = {v: next(fresh) for v in closed.jaxpr.invars}
    return any(_repeats(closed, known, {}, fresh))


def _repeats(closed: core.ClosedJaxpr, known: dict, seen: dict, fresh: Iterator[int]) -> Iterator[bool]:
    """Of each costly equation, whether it was there before. known: variables and the numbers of their values."""
    known.update((v, ("constant", id(c))) for v, c in zip(closed.jaxpr.constvars, closed.consts, strict=True))
    of = lambda atom: _of_atom(atom) if isinstance(atom, core.Literal) else known[atom]  # noqa: E731
    for equation in closed.jaxpr.eqns:
        inputs = tuple(map(of, equation.invars))
        if equation.primitive.name in CALLS:
            inner: core.ClosedJaxpr = equation.params["jaxpr"]
            known.update(zip(inner.jaxpr.invars, inputs, strict=True))
            yield from _repeats(inner, known, seen, fresh)
            known.update(zip(equation.outvars, map(of, inner.jaxpr.outvars), strict=True))
            continue
        params = None if equation.effects else _params(equation)
        values = None if params is None else seen.get((equation.primitive, params, inputs))
        if equation.primitive.name in _COSTLY:
            yield values is not None
        if values is None:
            values = [next(fresh) for _ in equation.outvars]
            if params is not None:
                seen[equation.primitive, params, inputs] = values
        known.update(zip(equation.outvars, values, strict=True))


def _params(equation: core.JaxprEqn) -> Hashable:
    """The equation's parameters, or None where they cannot be compared."""
    params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
    try:
        hash(params)
    except TypeError:
        return None
    return params


def _of_atom(atom: Any) -> Hashable:
    if not isinstance(atom, core.Literal):
        return atom
    value = np.asarray(atom.val)
    return "literal", value.dtype.str, value.tobytes(), str(atom.aval)
