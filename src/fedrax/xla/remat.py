"""Rematerialization of cheap residuals in the backward scan of recurrent networks, on CPUs and NVIDIA GPUs.

- Before: a ``scan`` that reads stacked outputs of another scan of the same length, some of which can be computed from
  others by at most `_MAX_OPERATIONS` additions and multiplications.
- After: the reading scan's body computes them, and XLA removes the stacked outputs, which nothing reads.
- Why: JAX stores the derivative s (1 - s) of a sigmoid s for all steps beside s itself. Writing and reading it takes
  longer than computing it. On a GPU each stored array also is a kernel launch at every step; the gain there has not
  been timed, so that the pass is disabled by default.
- Not for: programs with fewer than two scans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from fedrax.xla.rewriting import CALL_PRIMITIVES, evaluate_jaxpr, evaluate_subgraph, inline_calls, input_shapes
from fedrax.xla.tracing import scan_counts

_CHEAP_PRIMITIVES = ("add", "add_any", "copy", "integer_pow", "mul", "neg", "one_minus_square", "square", "sub")
_MAX_OPERATIONS = 8
"""Most operations on an entry: computing it then takes no longer than reading it."""


class ScanOutput(NamedTuple):
    """The scan that stacked an array, and the output of its body that was stacked."""

    scan: core.JaxprEqn
    variable: Any
    """Output of the body."""


def rematerialize_residuals(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Rematerialize cheap residuals in the scans of a jaxpr."""
    if _count_scans(closed) < 2:
        return closed
    closed = inline_calls(closed)
    kept: dict[Any, ScanOutput] = {}
    equations = []
    for equation in closed.jaxpr.eqns:
        if equation.primitive.name == "scan":
            equation = _without_cheap_residuals(equation, kept)
            _, carried = scan_counts(equation)
            stacks = zip(equation.outvars[carried:], equation.params["jaxpr"].jaxpr.outvars[carried:], strict=True)
            kept.update((v, ScanOutput(equation, inner)) for v, inner in stacks if not isinstance(inner, core.Literal))
        equations.append(equation)
    changed: Any = closed.jaxpr
    return core.ClosedJaxpr(changed.replace(eqns=equations), closed.consts)


def _count_scans(closed: core.ClosedJaxpr) -> int:
    """Number of scans at the top level of a program and of its calls."""
    inside = (e.params["jaxpr"] for e in closed.jaxpr.eqns if e.primitive.name in CALL_PRIMITIVES)
    return sum(e.primitive.name == "scan" for e in closed.jaxpr.eqns) + sum(map(_count_scans, inside))


def _without_cheap_residuals(equation: core.JaxprEqn, kept: dict[Any, ScanOutput]) -> core.JaxprEqn:
    """The scan with cheap residuals computed in its body from others that it reads."""
    first = sum(scan_counts(equation))
    sources: dict[int, list[int]] = {}
    for i, v in enumerate(equation.invars[first:], first):
        if v in kept and kept[v].scan.params["length"] == equation.params["length"]:
            sources.setdefault(id(kept[v].scan), []).append(i)
    computed: dict[int, tuple[core.JaxprEqn, dict[Any, int]]] = {}
    for places in sources.values():
        variables = {i: kept[equation.invars[i]].variable for i in places}
        scan = kept[equation.invars[places[0]]].scan
        there = dict(zip(reversed(variables.values()), reversed(variables), strict=True))  # variable -> first place
        for i, v in variables.items():
            others = there.keys() - {v}
            if there.get(v) == i and v in _cheap_functions(others, scan.params["jaxpr"].jaxpr.eqns):
                del there[v]
        computed.update((i, (scan, there)) for i, v in variables.items() if v not in there)
    return _recompute_in_body(equation, computed, kept) if computed else equation


def _cheap_functions(known: Any, equations: Sequence[core.JaxprEqn]) -> set:
    """Variables that a few cheap operations on arrays of one shape compute from ``known``."""
    operations = dict.fromkeys(known, 0)
    for equation in equations:
        if equation.primitive.name not in _CHEAP_PRIMITIVES:
            continue
        (made,), inputs = equation.outvars, [v for v in equation.invars if not isinstance(v, core.Literal)]
        computable = all(v in operations and v.aval.shape == made.aval.shape for v in inputs)  # type: ignore[attr-defined]
        if (
            computable
            and made not in operations
            and (needed := 1 + sum(operations[v] for v in inputs)) <= _MAX_OPERATIONS
        ):
            operations[made] = needed
    return operations.keys() - known


def _recompute_in_body(equation: core.JaxprEqn, computed: dict, kept: dict[Any, ScanOutput]) -> core.JaxprEqn:
    """The scan whose body computes the inputs ``computed``; their places take another input, which is not read."""
    body = equation.params["jaxpr"]

    def step(*args: Any) -> list:
        inputs = list(args)
        for i, (scan, there) in computed.items():
            known = {v: args[place] for v, place in there.items()}
            inputs[i] = evaluate_subgraph(scan.params["jaxpr"], known, [kept[equation.invars[i]].variable])[0]
        return evaluate_jaxpr(body, inputs, {})

    invars, shapes = list(equation.invars), list(input_shapes(body))
    for i, (_, there) in computed.items():
        other = next(iter(there.values()))
        invars[i], shapes[i] = invars[other], shapes[other]
    params: Any = {**equation.params, "jaxpr": jax.make_jaxpr(step)(*shapes)}
    return equation.replace(invars=invars, params=params)
