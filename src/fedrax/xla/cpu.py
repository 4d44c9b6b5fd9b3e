"""Functions in the forms that XLA's CPU backend runs fast inside compiled loops.

What users write is fast on accelerators, and as a program of its own. In a loop, where all of a simulation runs,
XLA:CPU computes convolutions and the gradient of max pooling element by element, and takes each recurrent step's part
of a gradient by itself. :func:`fast_on_cpu` rewrites a traced function; what is chosen is decided by operations and
shapes. It is meant to go round a gradient: what differentiation makes of a convolution is again convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jax.extend import core

from fedrax.xla import linear_algebra
from fedrax.xla.conv.lowering import convolution
from fedrax.xla.conv.pooling import largest, max_pool_gradient, sum_in_steps, sum_of_windows
from fedrax.xla.dot_layout import narrower_first
from fedrax.xla.half_precision_sums import in_float32, scattered
from fedrax.xla.recurrent import products_taken_out
from fedrax.xla.remat import fewer_residuals
from fedrax.xla.rewriting import Rule, rewritten
from fedrax.xla.threefry import many_at_once
from fedrax.xla.tracing import in_fast_forms
from fedrax.xla.trigonometric import cosine, sine
from fedrax.xla.uniform_dot import products_as_sums


def fast_on_cpu(function: Callable, apart: bool = False) -> Callable:
    """``function`` with operations on floating-point numbers in other forms, on a CPU.

    Values differ by rounding only. Those of 16 bits are computed in float32; sums of them are rounded once, where XLA
    rounds after every addition.
    To cover a gradient, wrap the gradient: ``fast_on_cpu(jax.grad(f))``. apart: where samples have gradients of their
    own, a number that is not finite stays with its sample.
    """
    return rewritten(function, _RULES[apart], _prepared) if in_fast_forms() else function


def _prepared(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    return fewer_residuals(products_as_sums(closed))


def _rules(apart: bool) -> dict[str, Rule]:
    made: dict[str, Rule] = {
        "conv_general_dilated": partial(convolution, apart=apart),
        "select_and_scatter_add": max_pool_gradient,
        "reduce_window_sum": in_float32(sum_of_windows),
        "reduce_sum": in_float32(sum_in_steps),
        "scatter-add": scattered,
        "reduce_max": largest,
        "random_bits": many_at_once,
        "dot_general": narrower_first,
        "sin": sine,
        "cos": cosine,
    }
    made |= linear_algebra.RULES
    made["scan"] = partial(products_taken_out, made)
    return made


_RULES = {apart: _rules(apart) for apart in (False, True)}
