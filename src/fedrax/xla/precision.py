"""Reduced precision of matrix products and convolutions, with accumulation in float32.

- Before: ``dot_general`` and ``conv_general_dilated`` of float32 operands.
- After: the same with operands in TensorFloat-32 (10 bits of mantissa) or bfloat16 (7 bits). In bfloat16 the results
  are rounded as well, except where they are gradients of weights: those reach an output of the function through
  additions and changes of layout alone. All other operations (sums, norms, activation functions, losses) stay in
  float32.
- Why: accelerators multiply these formats several times as fast as float32, and results of 16 bits halve the traffic
  with memory: XLA computes the operations between two products while it reads the result of the first one. A CPU has
  no such units and rounds explicitly: it gives the numbers of an accelerator up to the order of sums, and is not
  faster.
- Not for: other dtypes, and the format "highest".

Not in the table of passes: the user chooses the format (``fedrax.Settings.precision``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.extend.core import primitives

from fedrax.xla.rewriting import Rules, rewrite
from fedrax.xla.tracing import sub_jaxprs

OperandFormat = Literal["highest", "tensorfloat32", "bfloat16"]
"""Format of the operands; "highest" leaves them as they are."""

_MANTISSA_BITS = {"tensorfloat32": 10, "bfloat16": 7}
_PRODUCTS = (primitives.dot_general_p, primitives.conv_general_dilated_p)
_NAMES = """add add_any broadcast_in_dim concatenate convert_element_type copy copy_p dynamic_slice dynamic_update_slice
    neg pad reshape rev slice split squeeze sub transpose"""
_LAYOUT_OR_SUM = frozenset(_NAMES.split())
"""Primitives between a gradient of weights and an output. No ``reduce_sum``: gradients of biases are sums of gradients
of activations, which are rounded."""


def with_operand_format(function: Callable, format: OperandFormat) -> Callable:
    """Transform a function to round operands of float32 products, in bfloat16 also their results; not for "highest".

    To cover the products of a gradient, wrap the gradient: ``with_operand_format(jax.grad(f), "bfloat16")``.
    """
    if format == "highest":
        return function

    def rules(closed: core.ClosedJaxpr) -> Rules:
        kept = _gradients_of_weights(closed.jaxpr, closed.jaxpr.outvars)[0] if format == "bfloat16" else set()
        return {primitive.name: partial(_product, primitive, format, kept) for primitive in _PRODUCTS}

    return rewrite(function, rules)


def _product(
    primitive: Any, format: OperandFormat, kept: set[core.Var], inputs: list[Array], equation: core.JaxprEqn
) -> Array | None:
    """Rule for products; None unless all operands are float32. kept: results that are not rounded."""
    params = equation.params
    if any(x.dtype != jnp.float32 for x in inputs):
        return None
    rounds = format == "bfloat16" and equation.outvars[0] not in kept
    if jax.default_backend() == "cpu":
        shorten = partial(lax.reduce_precision, exponent_bits=8, mantissa_bits=_MANTISSA_BITS[format])
        result = primitive.bind(*map(shorten, inputs), **params)
        return shorten(result) if rounds else result
    if format == "tensorfloat32":
        return primitive.bind(*inputs, **{**params, "precision": (lax.Precision.HIGH, lax.Precision.HIGH)})
    dtype = jnp.bfloat16 if rounds else jnp.float32
    short = [x.astype(jnp.bfloat16) for x in inputs]
    result = primitive.bind(*short, **{**params, "precision": None, "preferred_element_type": jnp.dtype(dtype)})
    return result.astype(params["preferred_element_type"] or jnp.float32)


def _gradients_of_weights(jaxpr: core.Jaxpr, wanted: Iterable[Any]) -> tuple[set[core.Var], set[core.Var]]:
    """(results of products that reach ``wanted`` through layout and sums alone, all variables that do)."""
    reach = {v for v in wanted if isinstance(v, core.Var)}
    kept: set[core.Var] = set()
    for equation in reversed(jaxpr.eqns):
        if reach.isdisjoint(equation.outvars):
            continue
        name, inner = equation.primitive.name, sub_jaxprs(equation)
        if equation.primitive in _PRODUCTS:
            kept.update(reach.intersection(equation.outvars))
        elif name in _LAYOUT_OR_SUM or (name in ("mul", "div") and any(v.aval.ndim == 0 for v in equation.invars)):  # type: ignore[attr-defined]
            reach.update(v for v in equation.invars if isinstance(v, core.Var))
        for one in inner:
            program: Any = getattr(one, "jaxpr", one)
            results = program.outvars[-len(equation.outvars) :]
            found, reached = _gradients_of_weights(
                program, [v for v, out in zip(results, equation.outvars, strict=False) if out in reach]
            )
            kept |= found
            arguments = zip(equation.invars[-len(program.invars) :], program.invars, strict=False)
            reach.update(v for v, given in arguments if given in reached and isinstance(v, core.Var))
    return kept, reach
