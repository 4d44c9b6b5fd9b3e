"""Dot products with a uniform operand (one value in all entries) as sums, on CPUs.

- Before: ``dot_general`` with an operand that is a broadcast scalar.
- After: the sum of the other operand, times the scalar.
- Why: XLA's CPU backend (jaxlib 0.10.2) miscompiles some of these products, if the other operand is a reduction over
  few entries that it fuses into the product: ``jax.jit(lambda x: (x * x).max(1) @ jnp.ones((16, 2)))`` differs from the
  result without ``jax.jit``, and some values are not finite. A sum is also less work. An optimization barrier does not
  prevent the error, and the option ``xla_cpu_experimental_ynn_fusion_type``, which does, makes other networks three
  times as slow.
- Not for: integers, and operands whose uniformity the analysis cannot prove, such as carries of loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.extend import core

from fedrax.xla.flops import ELEMENTWISE
from fedrax.xla.rewriting import CALL_PRIMITIVES, Rule, evaluate_jaxpr, input_shapes
from fedrax.xla.tracing import scan_counts, sub_jaxprs

_OTHERS = """broadcast_in_dim dot_general expand_dims optimization_barrier reduce_max reduce_min reduce_sum reshape rev
    slice squeeze transpose"""
_PRESERVES_UNIFORMITY = ELEMENTWISE | frozenset(_OTHERS.split())
"""Operations whose result is uniform if all operands are."""
NO_OPERAND = -1
"""Stands for the number of the uniform operand of a product that has none."""


def lower_uniform_dots(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace dot products with a uniform operand by sums."""
    found = _uniform_operands(closed)
    if all(numbers == {NO_OPERAND} for numbers in found.values()):
        return closed
    if any(len(numbers) > 1 for numbers in found.values()):
        # A function that is called with a uniform operand and without has one jaxpr for both calls: make copies
        closed = _replace_dots(lambda *_: None, closed)
        found = _uniform_operands(closed)

    def as_sum(inputs: list, equation: core.JaxprEqn) -> Array | None:
        numbers = found.get(id(equation), {NO_OPERAND})
        return None if len(numbers) > 1 or NO_OPERAND in numbers else _dot_as_sum(inputs, equation, *numbers)

    return _replace_dots(as_sum, closed)


def _replace_dots(rule: Rule, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Apply a rule to ``dot_general``; afterwards every call has its own copy of the jaxpr of its function."""
    return jax.make_jaxpr(lambda *args: evaluate_jaxpr(closed, args, {"dot_general": rule}))(*input_shapes(closed))


def _dot_as_sum(inputs: list, equation: core.JaxprEqn, number: int) -> Array:
    """A dot product whose operand ``number`` is uniform, as a sum in float32 or wider."""
    (summed, batch), result = equation.params["dimension_numbers"], equation.outvars[0].aval
    one, other = inputs[number], inputs[1 - number]
    axes, of_batch = summed[1 - number], batch[1 - number]
    free = [axis for axis in range(other.ndim) if axis not in (*axes, *of_batch)]
    wide = jnp.promote_types(result.dtype, jnp.float32)  # type: ignore[attr-defined]
    factor = lax.slice(one, [0] * one.ndim, [1] * one.ndim).reshape(()).astype(wide)
    total = (lax.transpose(other, (*of_batch, *free, *axes)).astype(wide) * factor).sum(range(-len(axes), 0))
    # axes of the result: batch, free axes of the left operand, free axes of the right one
    begin = len(of_batch) if number == 1 else result.ndim - len(free)  # type: ignore[attr-defined]
    places = (*range(len(of_batch)), *range(begin, begin + len(free)))
    return lax.broadcast_in_dim(total.astype(result.dtype), result.shape, places)  # type: ignore[attr-defined]


def _uniform_operands(closed: core.ClosedJaxpr) -> dict[int, set[int]]:
    """For each ``dot_general``, by ID, which operand is uniform: 0, 1 or `NO_OPERAND`.

    The set has several elements if the equation is in a function that is called with different operands.
    """
    found: dict[int, set[int]] = {}
    _propagate(closed, [False] * len(closed.jaxpr.invars), found)
    return found


def _propagate(closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[bool], found: dict[int, set[int]]) -> list[bool]:
    """Abstract interpretation: which outputs are uniform, given which ``inputs`` are; dot products go to ``found``."""
    jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
    known: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(zip(jaxpr.constvars, map(_is_uniform_constant, getattr(closed, "consts", ())), strict=False))

    def uniform(atom: Any) -> bool:
        if atom.aval.size == 1:
            return True
        return _is_uniform_constant(atom.val) if isinstance(atom, core.Literal) else known.get(atom, False)

    for equation in jaxpr.eqns:
        operands, name = [uniform(v) for v in equation.invars], equation.primitive.name
        outputs = [name in _PRESERVES_UNIFORMITY and all(operands)] * len(equation.outvars)
        for function in sub_jaxprs(equation):
            inner = _propagate(function, _uniform_arguments(equation, function, operands), found)
            outputs = inner if name in CALL_PRIMITIVES else outputs
        if name == "dot_general" and _is_proper_dot(equation):
            found.setdefault(id(equation), set()).add(operands.index(True) if any(operands) else NO_OPERAND)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [uniform(v) for v in jaxpr.outvars]


def _uniform_arguments(
    equation: core.JaxprEqn, function: core.ClosedJaxpr | core.Jaxpr, operands: list[bool]
) -> list[bool]:
    """Which arguments of a sub-jaxpr are uniform; carries of loops are taken not to be."""
    count = len((function.jaxpr if isinstance(function, core.ClosedJaxpr) else function).invars)
    if equation.primitive.name == "scan":
        fixed, carried = scan_counts(equation)
        return [*operands[:fixed], *[False] * carried, *operands[fixed + carried :]]
    if equation.primitive.name == "cond":
        return operands[1:]
    return operands if equation.primitive.name != "while" and len(operands) == count else [False] * count


def _is_proper_dot(equation: core.JaxprEqn) -> bool:
    """Whether a ``dot_general`` contracts an axis, is floating-point, and both operands have several entries."""
    shapes: list[Any] = [v.aval for v in equation.invars]
    (summed, _), _ = equation.params["dimension_numbers"]
    return bool(summed) and all(jnp.issubdtype(a.dtype, jnp.floating) and a.size > 1 for a in shapes)


def _is_uniform_constant(array: Any) -> bool:
    """Whether a constant of a jaxpr is uniform."""
    if isinstance(array, Tracer) or not isinstance(array, np.ndarray | jax.Array):
        return np.ndim(array) == 0
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.size == 0:
        return False
    values = np.asarray(array).reshape(-1)
    return bool(values[0] == values[-1]) and bool((values == values[0]).all())
