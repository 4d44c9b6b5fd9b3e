"""Which equations of a traced function compute the same, of other numbers."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fedrax.compiled.rewriting import outputs_of
from fedrax.compiled.tracing import constants_in, equations_in, functions_in

OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call")
"""Primitives that stand for a function and for a derivative which someone wrote."""


def kind_of(equation: core.JaxprEqn) -> Hashable:
    """What two equations have in common that compute the same, and whose derivatives do.

    Numbers that stand in the program may differ, as inputs do. In doubt an equation is like no other.
    """
    if equation.effects or any(isinstance(f, core.ClosedJaxpr) and constants_in(f) for f in functions_in(equation)):
        return id(equation)  # arrays that functions inside hold do not show in their text
    own = equation.primitive.name in OWN_DERIVATIVE
    params = sorted((name, value) for name, value in equation.params.items() if not own or not callable(value))
    variables: Any = [*equation.invars, *equation.outvars]
    shapes = tuple((v.aval.shape, v.aval.dtype) for v in variables)
    return equation.primitive.name, str(params), shapes, _derivative(equation) if own or _inside(equation) else None


def _inside(equation: core.JaxprEqn) -> bool:
    """Whether a function in the equation has a derivative of its own."""
    return any(e.primitive.name in OWN_DERIVATIVE for f in functions_in(equation) for e in equations_in(f))


def _derivative(equation: core.JaxprEqn) -> Hashable:
    """The text of an equation's derivative: that of its function may be the same as another's."""
    variables: Any = equation.invars
    is_real = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in variables]

    def pulled_back(*inputs: Any) -> Any:
        def of_real(*real: Any) -> list:
            rest = iter(real)
            return outputs_of(equation, [next(rest) if r else x for r, x in zip(is_real, inputs, strict=True)], {})

        outputs, back = jax.vjp(of_real, *(x for r, x in zip(is_real, inputs, strict=True) if r))
        return back([jnp.ones(o.shape, jax.typeof(o).to_tangent_aval().dtype) for o in outputs])

    try:
        made = jax.make_jaxpr(pulled_back)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables))
    except Exception:  # it has none in reverse mode, or wants it asked for otherwise
        return id(equation)
    return id(equation) if constants_in(made) else str(made)
