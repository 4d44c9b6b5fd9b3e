"""Batch-size invariance: whether a traced function is the same for other numbers of examples.

A loss that divides by len(x), or a model that branches on the batch size, is another function for a microbatch.
:func:`is_batch_size_invariant` compares the traces of two batch sizes, equation by equation: they must be equal but for
array lengths in proportion to the batch size. In doubt they are not. Backward passes of ``jax.custom_vjp`` are not
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

from fedrax.xla.equivalence import is_jax_derivative, tangent_jaxpr
from fedrax.xla.rewriting import CUSTOM_DERIVATIVE_PRIMITIVES

_FUNCTIONS = (core.ClosedJaxpr, core.Jaxpr)


def is_batch_size_invariant(first: core.ClosedJaxpr, second: core.ClosedJaxpr, rows: tuple[int, int]) -> bool:
    """Whether two traces of a function, with so many samples each, are the same but for lengths in proportion to them.

    In doubt they are not. Backward passes of ``jax.custom_vjp`` are not compared.
    """
    return _Comparison(*rows).functions(first, second)


class _Comparison:
    """Two programs, equation by equation."""

    def __init__(self, rows: int, others: int, derived: bool = False):
        """derived: whether they are derivatives themselves, in which no function's own one is asked for."""
        self.rows, self.others, self.derived = rows, others, derived

    def functions(self, a: Any, b: Any) -> bool:
        arrays: Any = getattr(a, "consts", ()), getattr(b, "consts", ())
        a, b = (f.jaxpr if isinstance(f, core.ClosedJaxpr) else f for f in (a, b))
        if len(a.eqns) != len(b.eqns) or not self.values(*map(list, arrays)):
            return False
        known: dict[Any, Any] = {}
        if not self._named(known, [*a.constvars, *a.invars], [*b.constvars, *b.invars]):
            return False
        for one, other in zip(a.eqns, b.eqns, strict=True):
            same = one.primitive is other.primitive and self._atoms(known, one.invars, other.invars)
            same = same and self._params(one, other) and self._named(known, one.outvars, other.outvars)
            if not same or _reduces_batch_axis(one, other):
                return False
        return self._atoms(known, a.outvars, b.outvars)

    def _named(self, known: dict[Any, Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Whether new variables have shapes in proportion; from here on one stands for the other."""
        known.update(zip(a, b, strict=False))
        alike = lambda v, w: getattr(v, "dtype", None) == getattr(w, "dtype", None) and self.values(v.shape, w.shape)  # noqa: E731
        shaped = lambda v: hasattr(v.aval, "shape")  # noqa: E731
        return len(a) == len(b) and all(
            alike(v.aval, w.aval) if shaped(v) and shaped(w) else v.aval == w.aval for v, w in zip(a, b, strict=True)
        )

    def _atoms(self, known: dict[Any, Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
        def same(v: Any, w: Any) -> bool:
            if isinstance(v, core.Literal) or isinstance(w, core.Literal):
                literals = isinstance(v, core.Literal) and isinstance(w, core.Literal)
                return literals and v.aval == w.aval and _identical(v.val, w.val)
            return known.get(v) is w

        return len(a) == len(b) and all(map(same, a, b))

    def _params(self, a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
        if a.params.keys() != b.params.keys():
            return False
        own = a.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
        for name, value in a.params.items():
            if own and not isinstance(value, (*_FUNCTIONS, bool, int, tuple)):
                continue  # what makes the derivative, anew for every trace
            if not self.values(value, b.params[name]):
                return False
        return a.primitive.name != "custom_jvp_call" or self.derived or self._derivatives(a, b)

    def _derivatives(self, a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
        if is_jax_derivative(a) and is_jax_derivative(b):
            return True
        one, other = tangent_jaxpr(a), tangent_jaxpr(b)
        known = one is not None and other is not None
        return known and _Comparison(self.rows, self.others, derived=True).functions(one, other)

    def values(self, a: Any, b: Any) -> bool:
        """Of a parameter, or a part of one."""
        if type(a) is not type(b):
            return False
        if type(a) in (tuple, list):
            return len(a) == len(b) and all(map(self._parts, a, b))
        if isinstance(a, _FUNCTIONS):
            return self.functions(a, b)
        if isinstance(a, np.ndarray | jax.Array):
            if a is b:
                return True
            return not isinstance(a, Tracer) and _identical(a, b)
        return bool(a == b or (a != a and b != b))

    def _parts(self, a: Any, b: Any) -> bool:
        """Of a list, such as a shape."""
        lengths = type(a) is int and type(b) is int and a * self.others == b * self.rows
        return lengths or self.values(a, b)


def _reduces_batch_axis(a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
    """Whether numbers along an axis of other length meet: of ones that may be to count them."""
    params: Any = a.params
    name, inputs = a.primitive.name, list(zip(a.invars, b.invars, strict=True))
    for param in ("window_dimensions", "fft_lengths"):
        if param in params:
            return params[param] != b.params[param]
    if name == "dot_general":
        axes = params["dimension_numbers"][0]
    elif name == "conv_general_dilated":
        axes = [(), params["dimension_numbers"].rhs_spec[1:]]
    elif name == "reduce":
        axes = [params["dimensions"]] * (len(inputs) // 2)  # the others are what it begins with
    else:
        axes = [params.get("axes", (params["axis"],) if name.startswith("cum") else ())]
    avals: Any = [(v.aval, w.aval) for v, w in inputs]
    return any(v.shape[i] != w.shape[i] for (v, w), along in zip(avals, axes, strict=False) for i in along)


def _identical(a: Any, b: Any) -> bool:
    """Whether two numbers or arrays are the same, those that are none among them."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
