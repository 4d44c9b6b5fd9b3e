"""Matrix products and convolutions with operands rounded to a shorter format, sums in float32.

Accelerators multiply TensorFloat-32 (10 bits of mantissa) and bfloat16 (7 bits) several times as fast as
float32. :func:`with_operands` rewrites a traced function so that its products take such operands, whatever model
they come from. Where the device lacks the format the operands are rounded all the same: the numbers are those of
a device that has it, up to the order of sums, and nothing is gained in speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core
from jax.extend.core import primitives

Format = Literal["highest", "tensorfloat32", "bfloat16"]

_MANTISSA_BITS = {"tensorfloat32": 10, "bfloat16": 7}
_PRODUCTS = (primitives.dot_general_p, primitives.conv_general_dilated_p)
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}
"""Primitives that stand for the function they hold under this name."""


def with_operands(function: Callable, format: Format) -> Callable:
    """``function`` with the operands of its float32 products in ``format``; itself for "highest".

    To cover the products of a gradient, wrap the gradient: ``with_operands(jax.grad(f), "bfloat16")``.
    """
    if format == "highest":
        return function

    def wrapped(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        out = _replay(closed.jaxpr, closed.consts, jax.tree.leaves(args), format)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def _replay(jaxpr: core.Jaxpr, consts: Any, args: Any, format: Format) -> list:
    """The outputs of ``jaxpr``, evaluated equation by equation with its products rewritten."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        inputs, primitive, params = [read(v) for v in equation.invars], equation.primitive, equation.params
        if primitive in _PRODUCTS and all(x.dtype == jnp.float32 for x in inputs):
            out = _product(primitive, inputs, params, format)
        elif primitive.name in _CALLS:
            held = params[_CALLS[primitive.name]]
            out = _replay(held.jaxpr, held.consts, inputs, format)
        else:
            out = primitive.bind(*inputs, **{name: _rewritten(value, format) for name, value in params.items()})
        outputs = out if primitive.multiple_results or primitive.name in _CALLS else [out]
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _rewritten(value: Any, format: Format) -> Any:
    """A parameter of an equation: functions that it holds (of loops, of branches) are rewritten too."""
    if type(value) is tuple:  # branches; named tuples hold no functions
        return tuple(_rewritten(v, format) for v in value)
    if isinstance(value, core.ClosedJaxpr):
        inputs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in value.jaxpr.invars]
        return jax.make_jaxpr(lambda *args: _replay(value.jaxpr, value.consts, args, format))(*inputs)
    if isinstance(value, core.Jaxpr):  # of jax.checkpoint: without constants
        return _rewritten(core.ClosedJaxpr(value, ()), format).jaxpr
    return value


def _product(primitive: Any, inputs: list[Array], params: dict, format: Format) -> Array:
    if jax.default_backend() == "cpu":
        rounded = [lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_BITS[format]) for x in inputs]
        return primitive.bind(*rounded, **params)
    if format == "bfloat16":
        short = [x.astype(jnp.bfloat16) for x in inputs]
        return primitive.bind(*short, **{**params, "precision": None, "preferred_element_type": jnp.float32})
    return primitive.bind(*inputs, **{**params, "precision": (lax.Precision.HIGH, lax.Precision.HIGH)})
