"""Rows that a model looks up by integers of its inputs or by positions, found by tracing.

JAX reads another row where an index is outside of a table, so that tokens of another tokenizer, or texts longer than
the table of positions, would give wrong losses without an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core
from jax.lax import GatherScatterMode

from fedrax.xla.rewriting import CALL_PRIMITIVES, CHECKPOINT_PRIMITIVES, CUSTOM_DERIVATIVE_PRIMITIVES
from fedrax.xla.tracing import sub_jaxprs


class Lookup(NamedTuple):
    """A look-up of rows of a table."""

    size: int
    """Rows of the table."""
    input: int | None
    """The number of the input with the indices; None for positions."""
    largest: int | None
    """The largest index where it follows from shapes, as of positions."""


class _Source(NamedTuple):
    """Where integers come from."""

    input: int | None
    largest: int | None
    shifted: bool = False
    """Whether a number has been added, as to negative indices."""


_UNCHANGED = {
    "convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "transpose", "slice",
    "dynamic_slice", "stop_gradient",
}  # fmt: skip
"""Primitives that move integers and do not change them."""
_CALLS = (*CALL_PRIMITIVES, *CHECKPOINT_PRIMITIVES, *CUSTOM_DERIVATIVE_PRIMITIVES)


def find_lookups(closed: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Lookup]:
    """The look-ups by ``inputs``, variables of a traced function, and by positions.

    Indices that are computed otherwise than by an offset of negative ones are not followed, and neither are look-ups
    that clip indices on purpose.
    """
    sources: dict[Any, _Source] = {
        v: _Source(number, None) for number, v in enumerate(inputs) if jnp.issubdtype(v.aval.dtype, jnp.integer)
    }
    return list(_lookups_in(closed.jaxpr, sources))


def _lookups_in(jaxpr: core.Jaxpr, sources: dict[Any, _Source]) -> Iterator[Lookup]:
    """The look-ups of a function and of those that it calls; adds the sources of its variables to ``sources``."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        given = [None if isinstance(v, core.Literal) else sources.get(v) for v in equation.invars]
        known = [source for source in given if source is not None]
        if name in _CALLS:
            called = sub_jaxprs(equation)[0]
            inner = called.jaxpr if isinstance(called, core.ClosedJaxpr) else called
            inside = {v: source for v, source in zip(inner.invars, given, strict=True) if source is not None}
            yield from _lookups_in(inner, inside)
            for v, made in zip(equation.outvars, inner.outvars, strict=True):
                if not isinstance(made, core.Literal) and made in inside:
                    sources[v] = inside[made]
        elif name == "iota" and jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer):  # type: ignore[union-attr]
            dimension = equation.params["shape"][equation.params["dimension"]]
            sources[equation.outvars[0]] = _Source(None, dimension - 1)
        elif not known:
            continue
        elif name in _UNCHANGED and given[0] is not None:
            sources[equation.outvars[0]] = given[0]
        elif name == "add" and len(known) == 1:
            sources[equation.outvars[0]] = known[0]._replace(shifted=True)
        elif name == "select_n" and len({source._replace(shifted=False) for source in known}) == 1:
            sources[equation.outvars[0]] = known[0]._replace(shifted=all(source.shifted for source in known))
        elif name == "gather" and given[1] is not None and not given[1].shifted:
            axes = equation.params["dimension_numbers"].start_index_map
            rows = equation.params["slice_sizes"][axes[0]] == 1 if len(axes) == 1 else False
            if rows and equation.params["mode"] != GatherScatterMode.CLIP:
                size = equation.invars[0].aval.shape[axes[0]]  # type: ignore[union-attr]
                yield Lookup(int(size), given[1].input, given[1].largest)
