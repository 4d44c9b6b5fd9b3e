"""Programs in which nothing is computed twice, so that nothing is kept twice.

XLA finds what is computed twice, too, but not that two arrays which a loop fills are then the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend import core


def computed_once(closed: core.ClosedJaxpr, same: Mapping[Any, Any]) -> core.ClosedJaxpr:
    """``closed`` with one equation in the place of all that are alike; ``same``: variables and what stands for them."""
    jaxpr = closed.jaxpr
    names, seen, equations = dict(same), {}, []
    name = lambda atom: atom if isinstance(atom, core.Literal) else names.get(atom, atom)  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [name(v) for v in equation.invars]
        key = None if equation.effects else _key(equation, inputs)
        found = None if key is None else seen.setdefault(key, equation.outvars)
        if found is None or found is equation.outvars:
            equations.append(equation.replace(invars=inputs))
        else:
            names.update(zip(equation.outvars, found, strict=True))
    changed: Any = jaxpr
    return core.ClosedJaxpr(changed.replace(eqns=equations, outvars=[name(v) for v in jaxpr.outvars]), closed.consts)


def _key(equation: core.JaxprEqn, inputs: list) -> Any:
    """Equal for equations that compute the same; None where nobody can tell."""
    outputs: Any = equation.outvars
    params = tuple(sorted(equation.params.items(), key=lambda item: item[0]))
    key = equation.primitive, tuple(map(_of_atom, inputs)), params, tuple(str(v.aval) for v in outputs)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _of_atom(atom: Any) -> Any:
    if not isinstance(atom, core.Literal):
        return atom
    value = np.asarray(atom.val)
    return "literal", value.dtype.str, value.tobytes(), str(atom.aval)
