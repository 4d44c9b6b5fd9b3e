"""Peak memory of a traced program by liveness analysis of its variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from fedrax.xla.conv.window import MOST_TAPS
from fedrax.xla.tracing import aval_bytes, sub_jaxprs


def peak_bytes(program: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Upper bound of the bytes of a program's intermediate results and outputs that are alive at one time.

    Inputs are not counted. Fusion, which needs less memory, is not modeled. Patches of convolutions are counted, since
    they may be materialized (im2col).
    """
    jaxpr = program.jaxpr if isinstance(program, core.ClosedJaxpr) else program
    last = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.invars if not isinstance(v, core.Literal)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    alive = peak = 0
    made: set = set()
    for i, equation in enumerate(jaxpr.eqns):
        inner = max(map(peak_bytes, sub_jaxprs(equation)), default=_patch_bytes(equation))
        made.update(equation.outvars)
        alive += sum(map(aval_bytes, equation.outvars))
        peak = max(peak, alive + inner)
        dead = {v for v in equation.invars if not isinstance(v, core.Literal) and v in made and last[v] == i}
        dead |= {v for v in equation.outvars if v not in last}
        alive -= sum(map(aval_bytes, dead))
    return peak


def _patch_bytes(equation: core.JaxprEqn) -> int:
    """Twice the bytes of a convolution's patches, which are materialized in parts and concatenated; 0 for others."""
    if equation.primitive.name != "conv_general_dilated":
        return 0
    numbers, (x, kernel), y = equation.params["dimension_numbers"], equation.invars, equation.outvars[0]
    entries, places = _size(kernel, numbers.rhs_spec[2:]), _size(y, numbers.out_spec[2:])
    if min(entries, places) > MOST_TAPS:
        return 0
    bytes_per_entry = _size(x, numbers.lhs_spec[:2]) * jnp.dtype(x.aval.dtype).itemsize  # type: ignore[attr-defined]
    return 2 * bytes_per_entry * entries * places


def _size(atom: Any, axes: Sequence[int]) -> int:
    """Number of entries along some axes of an atom."""
    return math.prod(atom.aval.shape[axis] for axis in axes)
