"""Batch-size invariance: whether a function computes the same per example for every batch size.

A loss that divides by len(x), or a model that branches on the batch size, is a different function on a microbatch.
:func:`is_batch_size_invariant` compares the traces for two batch sizes, equation by equation: only array lengths may
differ, in proportion to the batch size. An analysis, used by :mod:`fedrax.xla.microbatch`.
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
    """Whether two traces of a function are known to be equal up to array lengths in proportion to the batch size.

    Backward passes of ``jax.custom_vjp`` are not compared.

    Args:
        first: trace for batch size ``rows[0]``.
        second: trace for batch size ``rows[1]``.
        rows: the two batch sizes.
    """
    return _Comparison(*rows).functions(first, second)


class _Comparison:
    """Comparison of traces for ``rows`` and for ``others`` examples.

    ``derived``: the traces are derivatives themselves, in which custom derivatives are not compared again.
    """

    def __init__(self, rows: int, others: int, derived: bool = False):
        self.rows, self.others, self.derived = rows, others, derived

    def functions(self, a: Any, b: Any) -> bool:
        """Whether two jaxprs are equal."""
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
        """Pair new variables; whether their dtypes are equal and their shapes in proportion."""
        known.update(zip(a, b, strict=False))

        def same(v: Any, w: Any) -> bool:
            if not hasattr(v, "shape") or not hasattr(w, "shape"):
                return v == w
            return getattr(v, "dtype", None) == getattr(w, "dtype", None) and self.values(v.shape, w.shape)

        return len(a) == len(b) and all(same(v.aval, w.aval) for v, w in zip(a, b, strict=True))

    def _atoms(self, known: dict[Any, Any], a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Whether inputs are paired variables or equal literals."""

        def same(v: Any, w: Any) -> bool:
            if isinstance(v, core.Literal) or isinstance(w, core.Literal):
                literals = isinstance(v, core.Literal) and isinstance(w, core.Literal)
                return literals and v.aval == w.aval and _identical(v.val, w.val)
            return known.get(v) is w

        return len(a) == len(b) and all(map(same, a, b))

    def _params(self, a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
        """Whether the parameters of two equations are equal, custom derivatives included."""
        if a.params.keys() != b.params.keys():
            return False
        custom = a.primitive.name in CUSTOM_DERIVATIVE_PRIMITIVES
        for name, value in a.params.items():
            if custom and not isinstance(value, (*_FUNCTIONS, bool, int, tuple)):
                continue  # the Python function of the derivative, a new object in every trace
            if not self.values(value, b.params[name]):
                return False
        return a.primitive.name != "custom_jvp_call" or self.derived or self._derivatives(a, b)

    def _derivatives(self, a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
        """Whether the derivatives of two ``custom_jvp`` functions are known to be equal."""
        if is_jax_derivative(a) and is_jax_derivative(b):
            return True
        one, other = tangent_jaxpr(a), tangent_jaxpr(b)
        known = one is not None and other is not None
        return known and _Comparison(self.rows, self.others, derived=True).functions(one, other)

    def values(self, a: Any, b: Any) -> bool:
        """Whether two parameters, or two shapes, are equal."""
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
        """Whether two entries of a tuple or list, such as a shape, are equal or in proportion."""
        lengths = type(a) is int and type(b) is int and a * self.others == b * self.rows
        return lengths or self.values(a, b)


def _reduces_batch_axis(a: core.JaxprEqn, b: core.JaxprEqn) -> bool:
    """Whether an operation reduces an axis whose length depends on the batch size: a sum of ones counts examples."""
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
        axes = [params["dimensions"]] * (len(inputs) // 2)  # the other inputs are initial values
    else:
        axes = [params.get("axes", (params["axis"],) if name.startswith("cum") else ())]
    avals: Any = [(v.aval, w.aval) for v, w in inputs]
    return any(v.shape[i] != w.shape[i] for (v, w), along in zip(avals, axes, strict=False) for i in along)


def _identical(a: Any, b: Any) -> bool:
    """Whether two arrays are equal bit by bit, so that NaN equals NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
