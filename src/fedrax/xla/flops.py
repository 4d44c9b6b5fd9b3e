"""Counts of floating-point operations in a traced function, and the set of elementwise primitives."""

from __future__ import annotations

import math
from typing import Any

from jax.extend import core

from fedrax.xla.tracing import equations_in, sub_jaxprs

_NAMES = """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
    conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igammac imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul mulhi ne neg nextafter not
    one_minus_square or polygamma population_count pow real reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    zeta"""
ELEMENTWISE = frozenset(_NAMES.split())
"""Primitives whose result at each position depends on the operands at this position only."""


def count_flops(program: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Floating-point operations of dot products and convolutions; bodies of ``while`` loops are counted once."""
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
        found += equation.params.get("length", 1) * sum(map(count_flops, sub_jaxprs(equation)))
    return found


def count_equations(program: core.ClosedJaxpr) -> int:
    """Number of equations, those of sub-jaxprs included."""
    return sum(1 for _ in equations_in(program))
