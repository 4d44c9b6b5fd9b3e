"""Structural equivalence of jaxpr equations, up to the values of literals.

Used by :mod:`fedrax.xla.cse` and :mod:`fedrax.xla.layer_scan`, which replace several equations by one, and by the
analyses that need the derivative of a function with a custom derivative.
"""

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
    """Key that is equal for equations that compute the same function of their inputs, with the same derivative.

    Inputs and literals are not part of the key. Equations that cannot be compared get a unique key.
    """
    if equation.effects or any(isinstance(f, core.ClosedJaxpr) and constants_in(f) for f in sub_jaxprs(equation)):
        return id(equation)  # constants of sub-jaxprs do not appear in their text
    if "callback" in equation.primitive.name or any(
        "callback" in e.primitive.name for f in sub_jaxprs(equation) for e in equations_in(f)
    ):
        return id(equation)  # nor do the Python functions of callbacks
    custom = equation.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
    params = sorted((name, value) for name, value in equation.params.items() if not custom or not callable(value))
    variables: Any = [*equation.invars, *equation.outvars]
    shapes = tuple((v.aval.shape, v.aval.dtype) for v in variables)
    return (
        equation.primitive.name,
        str(params),
        shapes,
        _pullback_text(equation) if custom or _contains_custom_derivative(equation) else None,
    )


def _contains_custom_derivative(equation: core.JaxprEqn) -> bool:
    """Whether a sub-jaxpr of the equation calls a function with a custom derivative."""
    return any(e.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES for f in sub_jaxprs(equation) for e in equations_in(f))


def is_differentiable(atom: Any) -> bool:
    """Whether an atom of a jaxpr has a floating-point dtype."""
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)


def is_jax_derivative(equation: core.JaxprEqn) -> bool:
    """Whether a function and its custom derivative are defined in JAX: those are elementwise, or reduce some axes."""
    infos = [getattr(getattr(value, "jaxpr", value), "debug_info", None) for value in equation.params.values()]
    sources = [str(getattr(info, "func_src_info", None)) for info in infos if info is not None]
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
        elif hasattr(value, "f_transformed") or hasattr(value, "call_wrapped"):  # JAX's WrappedFun
            waiting.append(value.f)
    return True


def tangent_jaxpr(equation: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """The equation's derivative, (inputs, tangents) -> output tangents, of differentiable atoms; None without one."""

    def output_tangents(inputs: list, tangents: list) -> list:
        def of_differentiable(*values: Any) -> list:
            return _select_differentiable(equation.outvars, _evaluate_differentiable(equation, inputs, values))

        return jax.jvp(of_differentiable, _select_differentiable(equation.invars, inputs), tangents)[1]

    shapes = _input_shapes(equation)
    try:
        return jax.make_jaxpr(output_tangents)(shapes, _select_differentiable(equation.invars, shapes))
    except Exception:  # no forward mode, or a user's rule fails
        return None


def _pullback_text(equation: core.JaxprEqn) -> Hashable:
    """Text of the jaxpr of an equation's pullback, since functions with equal text can have different derivatives."""

    def pullback(*inputs: Any) -> Any:
        outputs, back = jax.vjp(
            lambda *values: _evaluate_differentiable(equation, inputs, values),
            *_select_differentiable(equation.invars, inputs),
        )
        return back([jnp.ones(o.shape, jax.typeof(o).to_tangent_aval().dtype) for o in outputs])

    try:
        closed = jax.make_jaxpr(pullback)(*_input_shapes(equation))
    except Exception:  # no reverse mode, or a user's rule fails
        return id(equation)
    hidden = constants_in(closed) or any("callback" in e.primitive.name for e in equations_in(closed))
    return id(equation) if hidden else str(closed)


def _evaluate_differentiable(equation: core.JaxprEqn, inputs: Sequence, differentiable: Sequence) -> list:
    """The equation's outputs, with ``differentiable`` in the place of the differentiable ``inputs``."""
    rest = iter(differentiable)
    values = [next(rest) if is_differentiable(v) else x for v, x in zip(equation.invars, inputs, strict=True)]
    return evaluate_equation(equation, values, {})


def _select_differentiable(atoms: Sequence, values: Sequence) -> list:
    """The values of differentiable atoms."""
    return [value for atom, value in zip(atoms, values, strict=True) if is_differentiable(atom)]


def _input_shapes(equation: core.JaxprEqn) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the equation's inputs."""
    variables: Any = equation.invars
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
