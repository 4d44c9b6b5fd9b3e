"""Structural equivalence of jaxpr equations, up to the constants that they hold."""

from __future__ import annotations

import os
import types
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from fedrax.xla.fingerprint import closure_values
from fedrax.xla.rewriting import CUSTOM_DERIVATIVE_PRIMITIVES, evaluate_equation
from fedrax.xla.tracing import constants_in, equations_in, sub_jaxprs

_JAX_DIR = f"{Path(jax.__file__).parent}{os.sep}"


def equivalence_key(equation: core.JaxprEqn) -> Hashable:
    """What two equations have in common that compute the same, and whose derivatives do.

    Numbers that stand in the program may differ, as inputs do. In doubt an equation is like no other.
    """
    if equation.effects or any(isinstance(f, core.ClosedJaxpr) and constants_in(f) for f in sub_jaxprs(equation)):
        return id(equation)  # arrays that functions inside hold do not show in their text
    if "callback" in equation.primitive.name or any(
        "callback" in e.primitive.name for f in sub_jaxprs(equation) for e in equations_in(f)
    ):
        return id(equation)  # nor what a function of Python is
    own = equation.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
    params = sorted((name, value) for name, value in equation.params.items() if not own or not callable(value))
    variables: Any = [*equation.invars, *equation.outvars]
    shapes = tuple((v.aval.shape, v.aval.dtype) for v in variables)
    return (
        equation.primitive.name,
        str(params),
        shapes,
        _pullback_text(equation) if own or _contains_custom_derivative(equation) else None,
    )


def _contains_custom_derivative(equation: core.JaxprEqn) -> bool:
    """Whether a function in the equation has a derivative of its own."""
    return any(e.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES for f in sub_jaxprs(equation) for e in equations_in(f))


def is_differentiable(atom: Any) -> bool:
    """Whether an atom of a jaxpr has a derivative."""
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def is_jax_derivative(equation: core.JaxprEqn) -> bool:
    """Whether a function and its custom derivative are JAX's own: these are elementwise, or reduce some axes."""
    told = [getattr(getattr(value, "jaxpr", value), "debug_info", None) for value in equation.params.values()]
    sources = [str(getattr(one, "func_src_info", None)) for one in told if one is not None]
    return (
        len(sources) > 1
        and all(_JAX_DIR in source for source in sources)
        and _all_defined_in_jax(equation.params.values())
    )


def _all_defined_in_jax(values: Iterable[Any]) -> bool:
    """Whether all functions reachable from ``values`` are defined in JAX, closures included."""
    waiting, seen = list(values), {}
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            if not value.__code__.co_filename.startswith(_JAX_DIR):
                return False
            waiting += closure_values(value)
        elif isinstance(value, tuple | list):
            waiting += value
        elif isinstance(value, partial):
            waiting += [value.func, *value.args]
        elif isinstance(value, jax.custom_jvp):
            waiting += [value.fun, value.jvp]
        elif hasattr(value, "f_transformed") or hasattr(value, "call_wrapped"):  # a function under transformations
            waiting.append(value.f)
    return True


def tangent_jaxpr(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Its derivative, if it has one: (inputs, changes of the real ones) -> changes of the real outputs."""

    def changed(inputs: list, changes: list) -> list:
        def of_real(*real: Any) -> list:
            return _select_differentiable(equation.outvars, _evaluate_differentiable(equation, inputs, real))

        return jax.jvp(of_real, _select_differentiable(equation.invars, inputs), changes)[1]

    shapes = _input_shapes(equation)
    try:
        return jax.make_jaxpr(changed)(shapes, _select_differentiable(equation.invars, shapes))
    except Exception:  # it has none in forward mode, or a custom rule fails
        return None


def _pullback_text(equation: core.JaxprEqn) -> Hashable:
    """The text of an equation's derivative: that of its function may be the same as another's."""

    def pulled_back(*inputs: Any) -> Any:
        outputs, back = jax.vjp(
            lambda *real: _evaluate_differentiable(equation, inputs, real),
            *_select_differentiable(equation.invars, inputs),
        )
        return back([jnp.ones(o.shape, jax.typeof(o).to_tangent_aval().dtype) for o in outputs])

    try:
        made = jax.make_jaxpr(pulled_back)(*_input_shapes(equation))
    except Exception:  # it has none in reverse mode, or wants it asked for otherwise
        return id(equation)
    hidden = constants_in(made) or any("callback" in e.primitive.name for e in equations_in(made))
    return id(equation) if hidden else str(made)


def _evaluate_differentiable(equation: core.JaxprEqn, inputs: Sequence, real: Sequence) -> list:
    """Its outputs, of ``inputs`` but for the real ones."""
    rest = iter(real)
    given = [next(rest) if is_differentiable(v) else x for v, x in zip(equation.invars, inputs, strict=True)]
    return evaluate_equation(equation, given, {})


def _select_differentiable(atoms: Sequence, values: Sequence) -> list:
    """Those values that are of real atoms."""
    return [value for atom, value in zip(atoms, values, strict=True) if is_differentiable(atom)]


def _input_shapes(equation: core.JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    variables: Any = equation.invars
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
