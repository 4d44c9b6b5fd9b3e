"""The pipeline: which passes run on a function, before and after differentiation.

Two stages of :data:`fedrax.xla.passes.PASSES` are run from here:

- :func:`optimize_forward` runs the stage "forward" on a loss before it is differentiated, so that what differentiation
  makes of the rewritten program is fast, too (a scan over layers has a scan as its backward pass).
- :func:`optimize` runs the stage "lowering" around a gradient or an evaluation. What differentiation makes of a
  convolution is again convolutions, so it goes around the gradient: ``optimize(jax.grad(f))``.

Both leave a function as it is on accelerators, except for the passes of recurrent networks where they are enabled:
XLA's GPU and TPU backends compile what users write well. On a CPU what users write is fast as a program of its own, but
in a compiled loop, where all of a simulation runs, XLA:CPU computes convolutions and the gradient of max pooling
element by element. With ``jax.disable_jit`` (plan "debug") nothing is rewritten either, so that the other plans can be
checked against the operations as a model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax import Array
from jax.extend import core

from fedrax.xla.layer_scan import evaluate_with_layer_scans
from fedrax.xla.options import Options, PassName, current_options, note_applied, use_options
from fedrax.xla.passes import Pass, enabled_passes
from fedrax.xla.precision import OperandFormat, with_operand_format
from fedrax.xla.recurrent import hoist_dots_from_scan
from fedrax.xla.rewriting import Rule, Rules, inline_calls, jaxpr_as_function, rewrite
from fedrax.xla.tracing import cpu_passes_apply


def optimize(
    function: Callable,
    precision: OperandFormat = "highest",
    per_example: bool = False,
    options: Options | None = None,
) -> Callable:
    """``function`` with its operations in the forms that XLA's CPU backend runs fast; wrap the gradient.

    Values differ by float rounding only. Half-precision numbers are computed in float32; sums of them are rounded once,
    where XLA rounds after every addition.

    Args:
        function: of pytrees of arrays.
        precision: operands of float32 products and convolutions, on any backend.
        per_example: examples have gradients of their own: a number that is not finite stays with its example.
        options: passes that are off, and limits; by default those in force.

    Returns:
        A function of the same arguments.

    Example:
        >>> fedrax.xla.optimize(jax.grad(lambda x: jnp.sin(x).sum()))(jnp.zeros(2))
        Array([1., 1.], dtype=float32)
    """
    function = with_operand_format(function, precision)
    chosen = options or current_options()
    if jax.config.values["jax_disable_jit"] or not enabled_passes("lowering", chosen):
        return function
    rewritten = rewrite(function, _lowering_rules(per_example, chosen, jax.default_backend()), _transform_program)

    def optimized(*args: Any) -> Any:
        with use_options(chosen):
            return rewritten(*args)

    return optimized


def optimize_forward(function: Callable, options: Options | None = None) -> Callable:
    """``function`` with repeated layers in scans, blockwise attention and nothing computed twice; differentiate it.

    Values differ by float rounding only.

    Args:
        function: of pytrees of arrays.
        options: passes that are off, and limits; by default those in force.

    Returns:
        A function of the same arguments.

    Example:
        >>> jax.grad(fedrax.xla.optimize_forward(lambda x: jnp.sin(x).sum()))(jnp.zeros(2))
        Array([1., 1.], dtype=float32)
    """
    if not cpu_passes_apply():
        return function
    chosen = options or current_options()

    def optimized(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        with use_options(chosen):
            out = _evaluate_forward(closed, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    return optimized


def _evaluate_forward(closed: core.ClosedJaxpr, leaves: list) -> list:
    found = [] if closed.jaxpr.effects else [one for one in enabled_passes("forward") if one.matches_in(closed)]
    if not found:  # a program with effects, such as printing, keeps its order
        return jaxpr_as_function(closed)(*leaves)
    flat, rules = inline_calls(closed), dict[str, Rule]()
    for one in found:
        flat = _transformed(one, flat)
        rules |= {name: _recording(one.name, rule) for name, rule in (one.rules(False) if one.rules else {}).items()}
    return evaluate_with_layer_scans(flat, rules, *leaves)


def value_and_grad(objective: Callable, precision: OperandFormat = "highest", has_aux: bool = False) -> Callable:
    """``jax.value_and_grad(objective, has_aux=has_aux)`` with the passes of both stages.

    Args:
        objective: of pytrees of arrays, with values []. It is differentiated by the first argument.
        precision: operands of float32 products and convolutions.
        has_aux: whether it returns (value, others).

    Returns:
        A function of the same arguments with values (value, gradient).

    Example:
        >>> fedrax.xla.value_and_grad(lambda x: (x**2).sum())(jnp.ones(2))
        (Array(2., dtype=float32), Array([2., 2.], dtype=float32))
    """
    return optimize(jax.value_and_grad(optimize_forward(objective), has_aux=has_aux), precision)


def _transform_program(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    for one in enabled_passes("lowering"):
        closed = _transformed(one, closed)
    return closed


def _transformed(one: Pass, closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    if one.transform is None:
        return closed
    changed = one.transform(closed)
    if changed is not closed:
        note_applied(one.name)
    return changed


def _recording(name: PassName, rule: Rule) -> Rule:
    """``rule``, recorded where it gives an output."""

    def recorded(inputs: list[Array], equation: core.JaxprEqn) -> Any:
        output = rule(inputs, equation)
        if output is not None:
            note_applied(name)
        return output

    return recorded


@lru_cache
def _lowering_rules(per_example: bool, options: Options, backend: str) -> Rules:
    """The rules of all passes by primitive; of several for one primitive the first that gives an output.

    ``backend`` is the current one, a key of the cache.
    """
    found: dict[str, list[Rule]] = {}
    passes = enabled_passes("lowering", options)
    for one in passes:
        for primitive, rule in (one.rules(per_example) if one.rules else {}).items():
            found.setdefault(primitive, []).append(_recording(one.name, rule))
    rules: dict[str, Rule] = {
        name: each[0] if len(each) == 1 else partial(_first, each) for name, each in found.items()
    }
    if any(one.name == "recurrent" for one in passes):  # bodies of scans are rewritten by the same rules
        rules["scan"] = partial(hoist_dots_from_scan, rules)
    return rules


def _first(rules: list[Rule], inputs: list[Array], equation: core.JaxprEqn) -> Any:
    return next((out for rule in rules if (out := rule(inputs, equation)) is not None), None)
