"""Jaxpr interpreter with rewrite rules: the base of all passes.

:func:`rewrite` traces a function to a jaxpr and evaluates it equation by equation, with a rule in the place of every
primitive that has one. Sub-jaxprs (bodies of loops, branches, rematerialized parts, calls with custom derivatives) are
rewritten inside; all other equations are bound as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

Rule = Callable[[list, core.JaxprEqn], Any]
"""(inputs, equation) -> its output, a list if it has several, or None to leave the equation as it is."""
Rules = Mapping[str, Rule]
"""By the primitive's name."""

CALL_PRIMITIVES = ("jit", "pjit")
"""Calls: primitives that are inlined."""
CHECKPOINT_PRIMITIVES = ("checkpoint", "remat", "remat2")
"""Primitives of ``jax.checkpoint``, whose jaxprs cannot hold constants."""
CUSTOM_DERIVATIVE_PRIMITIVES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives of functions with custom derivatives."""
_OPAQUE_PRIMITIVES = ("shard_map", "pallas_call", "custom_partitioning")
"""Primitives whose jaxprs cannot be evaluated outside of their context."""


def rewrite(
    function: Callable,
    rules: Rules | Callable[[core.ClosedJaxpr], Rules],
    prepared: Callable = lambda closed: closed,
) -> Callable:
    """``function`` with the outputs of ``rules`` in the place of its equations.

    To cover the operations of a gradient, wrap the gradient: ``rewrite(jax.grad(f), rules)``. prepared: makes of the
    jaxpr another one, before the rules. Rules that depend on it are a function of it.
    """

    def wrapped(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        closed = prepared(closed)
        leaves = jax.tree.leaves(args)
        of_it = rules(closed) if callable(rules) else rules
        out = evaluate_jaxpr(closed, leaves, of_it) if _has_rule(closed, of_it) else jaxpr_as_function(closed)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return wrapped


def jaxpr_as_function(closed: core.ClosedJaxpr) -> Callable[..., list]:
    """``closed`` as a function that may be differentiated.

    That of ``core.jaxpr_as_fun`` hands arrays of the program as NumPy's to derivatives which someone wrote. Where the
    program was traced they were JAX's, which traced numbers may index.
    """

    def function(*args: Any) -> list:
        arrays = [jnp.asarray(c) if isinstance(c, np.ndarray) else c for c in closed.consts]
        return core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, arrays))(*args)

    return function


def inline_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """``closed`` with its calls inlined."""
    if not any(equation.primitive.name in CALL_PRIMITIVES for equation in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: evaluate_jaxpr(closed, args, {}))(*input_shapes(closed))


def input_shapes(closed: core.ClosedJaxpr) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of its inputs."""
    avals: Any = [v.aval for v in closed.jaxpr.invars]
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


def trace_inlined(function: Callable, *args: Any) -> tuple[core.ClosedJaxpr, Any]:
    """(the jaxpr of ``function``, with the functions that it calls in their place; the structure of its output)."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    return inline_calls(closed), jax.tree.structure(shape)


def evaluate_jaxpr(closed: core.ClosedJaxpr, args: Any, rules: Rules) -> list:
    """The outputs of ``closed``, evaluated equation by equation."""
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))
    return _evaluate_equations(jaxpr.eqns, values, rules, jaxpr.outvars)


def evaluate_subgraph(closed: core.ClosedJaxpr, known: Mapping, wanted: Sequence, rules: Rules | None = None) -> list:
    """The values of ``wanted`` variables from ``known`` ones: only the equations between them are evaluated."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(known)
    return _evaluate_equations(dependency_slice(closed, wanted, values), values, rules or {}, wanted)


def dependency_slice(closed: core.ClosedJaxpr, wanted: Sequence, known: Container = ()) -> list[core.JaxprEqn]:
    """The equations between known variables and wanted ones, in order."""
    found, missing = [], {v for v in wanted if not isinstance(v, core.Literal) and v not in known}
    for equation in reversed(closed.jaxpr.eqns):
        if not missing.isdisjoint(equation.outvars):
            found.append(equation)
            missing.difference_update(equation.outvars)
            missing.update(v for v in equation.invars if not isinstance(v, core.Literal) and v not in known)
    return found[::-1]


def _evaluate_equations(equations: Sequence[core.JaxprEqn], values: dict, rules: Rules, wanted: Sequence) -> list:
    read = lambda atom: atom.val if isinstance(atom, core.Literal) else values[atom]  # noqa: E731
    for equation in equations:
        outputs = evaluate_equation(equation, [read(v) for v in equation.invars], rules)
        values.update((v, out) for v, out in zip(equation.outvars, outputs, strict=True) if v not in values)
    return [read(v) for v in wanted]


def evaluate_equation(equation: core.JaxprEqn, inputs: list, rules: Rules) -> list:
    """The outputs of one equation."""
    # the scopes of the function, layers' names among them, for profiles of the compiled program
    names = source_info_util.current_name_stack() + equation.source_info.name_stack
    if equation.primitive.name in rules and not equation.primitive.multiple_results:
        names = names.extend(equation.primitive.name)
    with source_info_util.set_name_stack(names), _random_setting_of(equation):
        return _evaluate(equation, inputs, rules)


def _random_setting_of(equation: core.JaxprEqn) -> AbstractContextManager:
    """JAX's setting, on which drawn numbers depend, as it was where the equation was traced."""
    was: bool = equation.ctx.threefry_partitionable  # type: ignore[attr-defined]
    is_now: bool = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return nullcontext() if was == is_now else jax.threefry_partitionable(was)


def _evaluate(equation: core.JaxprEqn, inputs: list, rules: Rules) -> list:
    primitive, params = equation.primitive, equation.params
    if primitive.name in rules:
        out = rules[primitive.name]([_as_array(x, v) for x, v in zip(inputs, equation.invars, strict=True)], equation)
        if out is not None:
            outputs = out if primitive.multiple_results else [out]
            for given, variable in zip(outputs, equation.outvars, strict=True):
                wanted: Any = variable.aval
                # of another shape it would be broadcast somewhere, and wrong in silence
                same = (given.shape, given.dtype) == (wanted.shape, wanted.dtype)
                assert same, f"{primitive.name}: {given.shape} for {wanted}"
            return outputs
    if primitive.name in CALL_PRIMITIVES:
        return evaluate_jaxpr(params["jaxpr"], inputs, rules)
    if primitive.name in CHECKPOINT_PRIMITIVES:
        function, arrays = _constants_to_inputs(_rewrite_param(core.ClosedJaxpr(params["jaxpr"], ()), rules))
        params, inputs = {**params, "jaxpr": function}, [*arrays, *inputs]
    elif primitive.name not in _OPAQUE_PRIMITIVES:
        params = {name: _rewrite_param(value, rules) for name, value in params.items()}
    if primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES:  # see `jaxpr_as_function`
        inputs = [_as_array(x, v) for x, v in zip(inputs, equation.invars, strict=True)]
    out = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def _as_array(x: Any, atom: Any) -> Any:
    """A number or an array of NumPy that stands in a program as what a rule takes."""
    standing = isinstance(x, bool | int | float | complex | np.ndarray | np.generic)
    return jnp.asarray(x, atom.aval.dtype) if standing and atom.aval.dtype != jax.dtypes.float0 else x


def _rewrite_param(value: Any, rules: Rules) -> Any:
    """A parameter of an equation, rewritten where it is or holds a function."""
    if not _has_rule(value, rules) or _has_references(value):
        return value
    if isinstance(value, tuple):  # branches; those of a linear solve have names
        make: Any = getattr(value, "_make", tuple)
        return make(_rewrite_param(v, rules) for v in value)
    if isinstance(value, core.ClosedJaxpr):
        return jax.make_jaxpr(lambda *args: evaluate_jaxpr(value, args, rules))(*input_shapes(value))
    return value


def _constants_to_inputs(closed: core.ClosedJaxpr) -> tuple[core.Jaxpr, Sequence]:
    """A function of the arrays that ``closed`` holds and of its inputs; and these arrays."""
    jaxpr: Any = closed.jaxpr
    if not closed.consts:
        return jaxpr, ()
    return jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars]), closed.consts


def _has_references(value: Any) -> bool:
    """Whether a function is given references to arrays that change, which it cannot be traced with again."""
    variables = getattr(getattr(value, "jaxpr", value), "invars", ())
    return any(hasattr(v.aval, "inner_aval") for v in variables)


def _has_rule(value: Any, rules: Rules) -> bool:
    """Whether a function, or one that its equations hold, has a primitive with a rule."""
    if isinstance(value, tuple):
        return any(_has_rule(v, rules) for v in value)
    if isinstance(value, core.ClosedJaxpr):
        value = value.jaxpr
    if not isinstance(value, core.Jaxpr):
        return False
    return any(
        equation.primitive.name in rules or any(_has_rule(v, rules) for v in equation.params.values())
        for equation in value.eqns
    )
