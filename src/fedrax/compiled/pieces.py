"""Gradients of a batch in pieces that stay in a CPU's caches, summed.

A convolutional network makes a megabyte or so of every sample, all of which its gradient reads once more. Of a whole
batch that is more than the caches hold, and passing over it takes longer than the arithmetic. What is chosen depends
on the network and its shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from fedrax import tree
from fedrax.compiled.draws import Drawn, drawn_before
from fedrax.compiled.samples import LookedAt, each_by_itself, parts_of_scan
from fedrax.compiled.scopes import GRADIENT, scope
from fedrax.compiled.tracing import KEPT, equations_in, settings, shape_of
from fedrax.tree import Tree

_CACHED = 7 << 20
"""Bytes that products and convolutions of a piece may give, of which a backward pass reads all."""
_OF_WEIGHTS = 5
"""Each piece reads the weights, in a loop at every turn, and adds to their gradient: it gives at least so many times
their bytes."""
_NAME = "pieces"
AXIS = "clients"
"""Of the mesh of devices, over which clients are spread."""
TRACED = 13
"""Samples of a batch that is traced only to be looked at: a prime, which shapes of a model are not taken for."""


class Pieces(NamedTuple):
    """How a batch is cut."""

    rows: int
    """Samples of a piece."""
    dtype: Any
    """Of the losses."""
    drawn: Drawn | None
    """What has to be drawn before the batch is cut, and the losses then."""


def pieces_of(losses: Callable, params: Tree, batch: Tree, key: Array, traced: int | None = None) -> Pieces | None:
    """How to cut ``batch``, arrays [B, ...], for the gradient of ``losses(params, batch, key)`` [B].

    traced: with how many samples ``losses`` is traced to look at it, where any number will do and it holds no arrays
    of a program that is being traced. The result is None where the whole batch is best: where it is small, or the
    weights are large beside it, where samples do not stand each for itself, and on accelerators.
    """
    rows = len(jax.tree.leaves(batch)[0])
    if jax.default_backend() != "cpu" or rows < 2:
        return None
    of_rows = lambda n: jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), batch)  # noqa: E731
    if traced is None:
        seen, drawn = each_by_itself(losses, params, of_rows(rows), key), None
    else:
        seen, drawn = _look_once(losses, params, of_rows(traced), key)
    if seen is None or rows * seen.bytes <= _CACHED:
        return None
    weights = max(seen.weights, tree.num_bytes(params))
    most = max(_CACHED, _OF_WEIGHTS * weights) // seen.bytes
    fewest = -(-rows // max(1, most))
    size = next((rows // n for n in range(fewest, 2 * fewest) if rows % n == 0), -(-rows // fewest))
    fits = drawn is None or all(drawn.fits(params, of_rows(n), key) for n in (rows, size))
    return Pieces(size, seen.dtype, drawn) if size < rows and fits else None


def _look_once(losses: Callable, *args: Tree) -> tuple[LookedAt | None, Drawn | None]:
    leaves, structure = jax.tree.flatten(args)
    return _looked_at(losses, structure, tuple(map(shape_of, leaves)), settings())


@lru_cache(KEPT)
def _looked_at(losses: Callable, structure: Any, shapes: tuple, _: tuple) -> tuple[LookedAt | None, Drawn | None]:
    params, batch, key = jax.tree.unflatten(structure, shapes)
    seen = each_by_itself(losses, params, batch, key)
    drawn = drawn_before(losses, params, batch, key) if seen is None else None
    if drawn is None:
        return seen, None
    arrays, others = jax.eval_shape(drawn.draws, params, batch, key)
    return each_by_itself(drawn.losses, params, (batch, arrays), others), drawn


def summed(
    gradient: Callable,
    pieces: Pieces | None,
    params: Tree,
    batch: Tree,
    counts: Array | None,
    joined: Array | None = None,
) -> Tree:
    """``gradient(params, batch, counts)`` = (loss, gradient of the parameters), both sums over samples that count.

    batch: pytree of arrays [B, ...]. counts: bool [B], or None where all do. joined: bool; whether all devices along
    ``AXIS`` are here with the same batch, so that each can do some of the pieces; None where they never are.
    """
    if pieces is None:
        return gradient(params, batch, counts)
    rows = len(jax.tree.leaves(batch)[0])
    number = -(-rows // pieces.rows)
    if number * pieces.rows > rows:  # the last samples once more, which do not count
        lanes = jnp.arange(number * pieces.rows)
        batch, inside = jax.tree.map(lambda a: a[jnp.minimum(lanes, rows - 1)], batch), lanes < rows
        counts = inside if counts is None else inside & counts[jnp.minimum(lanes, rows - 1)]
    cut = jax.tree.map(lambda a: a.reshape(number, pieces.rows, *a.shape[1:]), (batch, counts))

    def add(total: Tree, piece: Tree) -> tuple[Tree, None]:
        with scope(GRADIENT):  # once more: the loop is not the model's own
            return tree.add(total, gradient(params, *piece)), None

    zero = (jnp.zeros((), pieces.dtype), tree.zeros_like(params))
    with jax.named_scope(_NAME):
        if joined is None:
            return lax.scan(add, zero, cut)[0]
        share = lax.axis_index(AXIS) + jnp.arange(2)
        first, last = jnp.where(joined, number * share // lax.axis_size(AXIS), jnp.array([0, number]))
        total = lax.fori_loop(first, last, lambda i, total: add(total, tree.row(cut, i))[0], zero)
        return lax.cond(joined, lambda t: lax.psum(t, AXIS), lambda t: t, total)


class Cut(NamedTuple):
    """A batch in pieces."""

    pieces: int
    rows: int
    """Of each piece."""


def cuts_in(program: core.ClosedJaxpr) -> list[Cut]:
    """How a traced program cuts batches."""
    found = []
    for equation in equations_in(program):
        if equation.primitive.name == "scan" and str(equation.source_info.name_stack).split("/")[-1] == _NAME:
            first: Any = equation.invars[sum(parts_of_scan(equation))]
            found.append(Cut(*first.aval.shape[:2]))
    return found


def speed_of(cuts: Sequence[Cut], devices: int) -> float:
    """How many times as fast as one device all of them together are with a batch that is cut so."""
    return min((cut.pieces / -(-cut.pieces // devices) for cut in cuts), default=1.0)
