"""Peak memory of a traced program by liveness analysis of its variables."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.extend import core

from fedrax.xla.conv.window import MOST_TAPS
from fedrax.xla.tracing import aval_bytes, sub_jaxprs


def peak_bytes(program: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Bytes of what a program makes that are alive at one time, at most; its inputs are not among them.

    As if each operation were by itself: a compiler fuses some, which need less. What kernels of convolutions see is
    counted, as it may be laid out.
    """
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    last = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.invars if not isinstance(v, core.Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    alive = most = 0
    made: set = set()
    for i, equation in enumerate(jaxpr.eqns):
        inside = max(map(peak_bytes, sub_jaxprs(equation)), default=_patch_bytes(equation))
        made.update(equation.outvars)
        alive += sum(map(aval_bytes, equation.outvars))
        most = max(most, alive + inside)
        over = {v for v in equation.invars if not isinstance(v, core.Literal) and v in made and last[v] == i}
        over |= {v for v in equation.outvars if v not in last}
        alive -= sum(map(aval_bytes, over))
    return most


def _patch_bytes(equation: core.JaxprEqn) -> int:
    """Bytes of a convolution's patches, where they are materialized: in parts, and concatenated."""
    if equation.primitive.name != "conv_general_dilated":
        return 0
    numbers, (x, kernel), y = equation.params["dimension_numbers"], equation.invars, equation.outvars[0]
    size = lambda v, axes: math.prod(v.aval.shape[axis] for axis in axes)  # noqa: E731
    entries, places = size(kernel, numbers.rhs_spec[2:]), size(y, numbers.out_spec[2:])
    if min(entries, places) > MOST_TAPS:
        return 0
    by_entry = size(x, numbers.lhs_spec[:2]) * jnp.dtype(x.aval.dtype).itemsize  # type: ignore[attr-defined]
    return 2 * by_entry * entries * places
