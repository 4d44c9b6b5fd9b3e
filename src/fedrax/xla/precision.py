"""Reduced operand precision of matrix products and convolutions, with accumulation in float32.

- Before: ``dot_general`` and ``conv_general_dilated`` of float32 operands.
- After: the same with operands in TensorFloat-32 (10 bits of mantissa) or bfloat16 (7 bits).
- Why: accelerators multiply these formats several times as fast as float32. A CPU has no such units and rounds the
  operands explicitly: it gives the numbers of an accelerator up to the order of sums, and is not faster.
- Not for: other dtypes, and the format "highest".

Not in the table of passes: the user chooses the format (``fedrax.Settings.precision``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.extend.core import primitives

from fedrax.xla.rewriting import rewrite

OperandFormat = Literal["highest", "tensorfloat32", "bfloat16"]
"""Format of the operands; "highest" leaves them as they are."""

_MANTISSA_BITS = {"tensorfloat32": 10, "bfloat16": 7}
_PRODUCTS = (primitives.dot_general_p, primitives.conv_general_dilated_p)


def with_operand_format(function: Callable, format: OperandFormat) -> Callable:
    """Transform a function to round operands of float32 products to ``format``; unchanged for "highest".

    To cover the products of a gradient, wrap the gradient: ``with_operand_format(jax.grad(f), "bfloat16")``.
    """
    if format == "highest":
        return function
    return rewrite(function, {primitive.name: partial(_product, primitive, format) for primitive in _PRODUCTS})


def _product(primitive: Any, format: OperandFormat, inputs: list[Array], equation: core.JaxprEqn) -> Array | None:
    """Rule for products; None unless all operands are float32."""
    params = equation.params
    if any(x.dtype != jnp.float32 for x in inputs):
        return None
    if jax.default_backend() == "cpu":
        rounded = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_BITS[format]) for x in inputs]
        return primitive.bind(*rounded, **params)
    if format == "bfloat16":
        sums = params["preferred_element_type"] or jnp.float32
        short = [x.astype(jnp.bfloat16) for x in inputs]
        return primitive.bind(*short, **{**params, "precision": None, "preferred_element_type": sums})
    return primitive.bind(*inputs, **{**params, "precision": (lax.Precision.HIGH, lax.Precision.HIGH)})
