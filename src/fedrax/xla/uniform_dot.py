"""Products with an array that is one number everywhere, as sums.

Matches ``dot_general`` with an operand that is a broadcast scalar. XLA's CPU backend (jaxlib 0.10.2) computes them
wrongly where the other operand is a reduction over few entries that it fuses into the product:
``jax.jit(lambda x: (x * x).max(1) @ jnp.ones((16, 2)))`` differs from the result without ``jax.jit``, with some values
not finite. A sum is also less work. An optimization barrier does not prevent the error, and the option
``xla_cpu_experimental_ynn_fusion_type``, which does, makes other networks three times as slow.
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
"""Operations that give one number everywhere of arrays that are one number everywhere."""
NO_OPERAND = -1
"""In the place of a factor's number."""


def lower_uniform_dots(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """``closed`` with a sum in the place of each product one of whose factors is one number everywhere."""
    found = _uniform_operands(closed)
    if all(numbers == {NO_OPERAND} for numbers in found.values()):
        return closed
    if any(len(numbers) > 1 for numbers in found.values()):
        # JAX keeps one program of a function that is called with such a factor and without: each call gets its own
        closed = _replace_dots(lambda *_: None, closed)
        found = _uniform_operands(closed)

    def as_sum(inputs: list, equation: core.JaxprEqn) -> Array | None:
        numbers = found.get(id(equation), {NO_OPERAND})
        return None if len(numbers) > 1 or NO_OPERAND in numbers else _dot_as_sum(inputs, equation, *numbers)

    return _replace_dots(as_sum, closed)


def _replace_dots(rule: Rule, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """``closed`` with the rule for products; each call of a function that has some has a function of its own then."""
    return jax.make_jaxpr(lambda *args: evaluate_jaxpr(closed, args, {"dot_general": rule}))(*input_shapes(closed))


def _dot_as_sum(inputs: list, equation: core.JaxprEqn, number: int) -> Array:
    """The product, of whose factors one, by its ``number``, is the same everywhere."""
    (summed, batch), result = equation.params["dimension_numbers"], equation.outvars[0].aval
    one, other = inputs[number], inputs[1 - number]
    axes, of_batch = summed[1 - number], batch[1 - number]
    free = [axis for axis in range(other.ndim) if axis not in (*axes, *of_batch)]
    wide = jnp.promote_types(result.dtype, jnp.float32)  # type: ignore[attr-defined]
    factor = lax.slice(one, [0] * one.ndim, [1] * one.ndim).reshape(()).astype(wide)
    total = (lax.transpose(other, (*of_batch, *free, *axes)).astype(wide) * factor).sum(range(-len(axes), 0))
    # the axes of the result: the batch's, those of the left factor, those of the right one
    begin = len(of_batch) if number == 1 else result.ndim - len(free)  # type: ignore[attr-defined]
    places = (*range(len(of_batch)), *range(begin, begin + len(free)))
    return lax.broadcast_in_dim(total.astype(result.dtype), result.shape, places)  # type: ignore[attr-defined]


def _uniform_operands(closed: core.ClosedJaxpr) -> dict[int, set[int]]:
    """The numbers (0, 1 or ``NO_OPERAND``) of the factors that are one number everywhere, by the products' ids.

    There are several of a product in a function that is called in several ways.
    """
    found: dict[int, set[int]] = {}
    _propagate(closed, [False] * len(closed.jaxpr.invars), found)
    return found


def _propagate(closed: core.ClosedJaxpr | core.Jaxpr, inputs: Sequence[bool], found: dict[int, set[int]]) -> list[bool]:
    """Enter the products in ``found``, and say of which outputs it is known that they are one number everywhere.

    inputs: whether it is so of each argument.
    """
    jaxpr = closed.jaxpr if isinstance(closed, core.ClosedJaxpr) else closed
    known: dict[Any, bool] = dict(zip(jaxpr.invars, inputs, strict=True))
    known.update(zip(jaxpr.constvars, map(_is_uniform_constant, getattr(closed, "consts", ())), strict=False))

    def uniform(atom: Any) -> bool:
        if atom.aval.size == 1:
            return True
        return _is_uniform_constant(atom.val) if isinstance(atom, core.Literal) else known.get(atom, False)

    for equation in jaxpr.eqns:
        given, name = [uniform(v) for v in equation.invars], equation.primitive.name
        outputs = [name in _PRESERVES_UNIFORMITY and all(given)] * len(equation.outvars)
        for function in sub_jaxprs(equation):
            inside = _propagate(function, _argument_facts(equation, function, given), found)
            outputs = inside if name in CALL_PRIMITIVES else outputs
        if name == "dot_general" and _is_proper_dot(equation):
            found.setdefault(id(equation), set()).add(given.index(True) if any(given) else NO_OPERAND)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [uniform(v) for v in jaxpr.outvars]


def _argument_facts(equation: core.JaxprEqn, function: core.ClosedJaxpr | core.Jaxpr, given: list[bool]) -> list[bool]:
    """Which arguments of a sub-jaxpr are uniform; carried arrays are taken not to be."""
    count = len((function.jaxpr if isinstance(function, core.ClosedJaxpr) else function).invars)
    if equation.primitive.name == "scan":
        fixed, carried = scan_counts(equation)
        return [*given[:fixed], *[False] * carried, *given[fixed + carried :]]
    if equation.primitive.name == "cond":
        return given[1:]
    return given if equation.primitive.name != "while" and len(given) == count else [False] * count


def _is_proper_dot(equation: core.JaxprEqn) -> bool:
    """Whether it adds up products of floating-point numbers, and both factors have several."""
    shapes: list[Any] = [v.aval for v in equation.invars]
    (summed, _), _ = equation.params["dimension_numbers"]
    return bool(summed) and all(jnp.issubdtype(a.dtype, jnp.floating) and a.size > 1 for a in shapes)


def _is_uniform_constant(array: Any) -> bool:
    """Of an array that stands in a program."""
    if isinstance(array, Tracer) or not isinstance(array, np.ndarray | jax.Array):
        return np.ndim(array) == 0
    if not jnp.issubdtype(array.dtype, jnp.floating) or array.size == 0:
        return False
    values = np.asarray(array).reshape(-1)
    return bool(values[0] == values[-1]) and bool((values == values[0]).all())
