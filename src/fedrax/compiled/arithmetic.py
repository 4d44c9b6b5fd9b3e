"""How much a traced function computes."""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core

from fedrax.compiled.tracing import equations_in, functions_in


def flops_in(program: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Additions and multiplications of the matrix products and convolutions, forward; loops of unknown length once."""
    found = 0
    for equation in (program.jaxpr if isinstance(program, core.ClosedJaxpr) else program).eqns:
        out: Any = equation.outvars[0].aval if equation.outvars else None
        shapes: list[Any] = [v.aval for v in equation.invars]
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            found += 2 * out.size * math.prod(shapes[0].shape[axis] for axis in summed)
        elif equation.primitive.name == "conv_general_dilated":
            channels = shapes[1].shape[equation.params["dimension_numbers"].rhs_spec[0]]
            found += 2 * out.size * shapes[1].size // channels
        found += equation.params.get("length", 1) * sum(map(flops_in, functions_in(equation)))
    return found


def length_of(program: core.ClosedJaxpr) -> int:
    """The equations of a program and of the functions inside it."""
    return sum(1 for _ in equations_in(program))
