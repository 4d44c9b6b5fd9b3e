"""Microbatching: the gradient of a batch is accumulated over microbatches, on CPUs.

Matches losses [B] that treat each example by itself (:mod:`fedrax.xla.per_example`) and are the same function for other
batch sizes (:mod:`fedrax.xla.batch_invariance`). A convolutional network writes about a megabyte for every example, all
of which its backward pass reads; for a whole batch that exceeds the caches, and memory traffic then takes longer than
the arithmetic. :func:`accumulate_gradients` sums gradients over microbatches that fit, and can give each device a share
of them.

It does not apply to batch norm and losses that compare examples, where weights are large beside a microbatch's
activations (`Limits.microbatch_weight_ratio`), or on accelerators. The choice depends on the network and its shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from fedrax import tree
from fedrax.tree import Tree
from fedrax.xla.batch_invariance import is_batch_size_invariant
from fedrax.xla.fingerprint import CodeFingerprint
from fedrax.xla.hoist_rng import HoistedDraws, hoist_random_draws
from fedrax.xla.options import is_enabled, limits, note_applied
from fedrax.xla.per_example import PerExampleCost, analyze_per_example
from fedrax.xla.rewriting import jaxpr_as_function
from fedrax.xla.scopes import GRADIENT, scope
from fedrax.xla.tracing import (
    CACHE_SIZE,
    cached_trace,
    cpu_passes_apply,
    equations_in,
    scan_counts,
    shape_struct,
    trace_settings,
)

_MIN_ROWS = 2
"""Fewest examples of a microbatch: XLA has no fast code for some operations with a unit axis."""
_MAX_SHARED_EQUATIONS = 400
"""Equations of losses at most whose gradient is worth compiling once more, for the samples that a device shares."""
_EXCHANGED, _READ, _START = 3e9, 15e9, 1e-4
"""Rough figures that only decide what is far from worth it: bytes a second of a gradient that devices exchange, bytes
a second of weights that are read once more, and the seconds that devices wait before they start."""
_SCOPE, _WHOLE_BATCH = "pieces", "fedrax: whole batch "
CLIENT_AXIS = "clients"
"""Axis of the device mesh over which clients are sharded."""
TRACE_BATCH = 13
"""Size of a batch that is traced only for analysis: a prime, so that no shape of a model is taken for the batch."""


class Microbatches(NamedTuple):
    """How a batch is split."""

    rows: int
    """Examples of a microbatch."""
    dtype: Any
    """Of the losses."""
    drawn: HoistedDraws | None
    """What has to be drawn before the batch is cut, and the losses then."""
    lost: float | None = None
    """Of a batch that is best whole and that devices may share: what sharing takes in addition, as part of its time."""


def plan_microbatches(
    losses: Callable, params: Tree, batch: Tree, key: Array, traced: int | None = None, devices: int = 2
) -> Microbatches | None:
    """How to cut ``batch``, arrays [B, ...], for the gradient of ``losses(params, batch, key)`` [B].

    traced: with how many samples ``losses`` is traced to look at it, where any number will do and it holds no arrays
    of a program that is being traced. devices: among how many a batch is shared that is not cut. A whole batch is best
    where it is small, or the weights are large beside it. The result is None where it cannot be shared either or is
    not worth it, where samples do not stand each for itself, and on accelerators.
    """
    rows = len(jax.tree.leaves(batch)[0])
    if not cpu_passes_apply() or rows < 2 or not is_enabled("microbatch"):
        return None
    of_rows = lambda n: jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), batch)  # noqa: E731
    if traced is None:
        seen, drawn = analyze_per_example(losses, params, of_rows(rows), key), None
    else:
        seen, drawn = _cached_analysis(losses, params, of_rows(traced), key)
    if seen is None:
        return None
    weights = max(seen.weights, tree.num_bytes(params))
    most = max(limits().microbatch_bytes, limits().microbatch_weight_ratio * weights) // max(1, seen.bytes)
    fewest = -(-rows // max(_MIN_ROWS, most))
    even = (rows // n for n in range(fewest, 2 * fewest) if rows % n == 0 and rows // n >= _MIN_ROWS)
    size = next(even, -(-rows // fewest))
    least = size if size < rows else -(-rows // devices)
    if size < rows:
        found = Microbatches(size, seen.dtype, drawn)
    else:
        seconds = 3 * rows * seen.flops / limits().sharing_flops  # forward, and backward twice as much
        lost = (_START + tree.num_bytes(params) / _EXCHANGED + seen.weights / _READ) / max(seconds, _START)
        # one sample is a shape that a model may treat otherwise
        if seen.length > _MAX_SHARED_EQUATIONS or lost >= limits().sharing_overhead or least < 2:
            return None
        found = Microbatches(rows, seen.dtype, drawn, lost)
    trace = jax.make_jaxpr(losses) if traced is None else partial(cached_trace, losses)
    fits = drawn is None or all(drawn.fits(params, of_rows(n), key) for n in (rows, least))
    same = fits and _is_invariant(lambda n: trace(params, of_rows(n), key), traced or rows, (rows, least))
    if not same:
        return None
    note_applied("microbatch")
    if drawn is not None:
        note_applied("hoist_rng")
    return found


def _is_invariant(trace: Callable[[int], core.ClosedJaxpr], looked: int, sizes: tuple[int, int]) -> bool:
    """Whether what was seen of ``looked`` samples holds of batches of other sizes, whose losses ``trace`` traces."""
    try:
        return all(is_batch_size_invariant(trace(looked), trace(n), (looked, n)) for n in sizes if n != looked)
    except Exception:  # of the user's own: some models take some numbers of samples only
        return False


@lru_cache(CACHE_SIZE)
def replay_trace(losses: Callable) -> Callable:
    """The same function, from the traces by which it was looked at: Python is not run once more for its gradient."""

    def found(*args: Tree) -> Array:
        return jaxpr_as_function(cached_trace(losses, *args))(*jax.tree.leaves(args))[0]

    return found


def _cached_analysis(losses: Callable, *args: Tree) -> tuple[PerExampleCost | None, HoistedDraws | None]:
    leaves, structure = jax.tree.flatten(args)
    return _analyze(losses, structure, tuple(map(shape_struct, leaves)), (CodeFingerprint(losses), *trace_settings()))


@lru_cache(CACHE_SIZE)
def _analyze(
    losses: Callable, structure: Any, shapes: tuple, _: tuple
) -> tuple[PerExampleCost | None, HoistedDraws | None]:
    params, batch, key = jax.tree.unflatten(structure, shapes)
    try:
        seen = analyze_per_example(losses, params, batch, key)
    except Exception:  # of the user's own: some models take some numbers of samples only
        return None, None
    drawn = hoist_random_draws(losses, params, batch, key) if seen is None and is_enabled("hoist_rng") else None
    if drawn is None:
        return seen, None
    arrays, others = jax.eval_shape(drawn.draws, params, batch, key)
    return analyze_per_example(drawn.losses, params, (batch, arrays), others), drawn


def accumulate_gradients(
    gradient: Callable,
    pieces: Microbatches | None,
    params: Tree,
    batch: Tree,
    counts: Array | None,
    joined: Array | None = None,
) -> Tree:
    """``gradient(params, batch, counts)`` = (loss, gradient of the parameters), both sums over samples that count.

    batch: pytree of arrays [B, ...]. counts: bool [B], or None where all do. joined: bool; whether all devices along
    ``CLIENT_AXIS`` are here with the same batch, so that each can do some of the pieces; None where they never are.
    """
    if pieces is None:
        return gradient(params, batch, counts)
    if pieces.lost is not None:
        return _share_batch(gradient, pieces.lost, params, batch, counts, joined)
    rows = len(jax.tree.leaves(batch)[0])
    number = -(-rows // pieces.rows)
    if number * pieces.rows > rows:  # the last examples again, masked
        lanes = jnp.arange(number * pieces.rows)
        batch, inside = jax.tree.map(lambda a: a[jnp.minimum(lanes, rows - 1)], batch), lanes < rows
        counts = inside if counts is None else inside & counts[jnp.minimum(lanes, rows - 1)]
    cut = jax.tree.map(lambda a: a.reshape(number, pieces.rows, *a.shape[1:]), (batch, counts))

    def add(total: Tree, piece: Tree) -> tuple[Tree, None]:
        with scope(GRADIENT):  # once more: the loop is not the model's own
            return tree.add(total, gradient(params, *piece)), None

    zero = (jnp.zeros((), pieces.dtype), tree.zeros_like(params))
    with jax.named_scope(_SCOPE):
        if joined is None:
            return lax.scan(add, zero, cut)[0]
        share = lax.axis_index(CLIENT_AXIS) + jnp.arange(2)
        first, last = jnp.where(joined, number * share // lax.axis_size(CLIENT_AXIS), jnp.array([0, number]))
        total = lax.fori_loop(first, last, lambda i, total: add(total, tree.row(cut, i))[0], zero)
        return lax.cond(joined, lambda t: lax.psum(t, CLIENT_AXIS), lambda t: t, total)


def _share_batch(
    gradient: Callable, lost: float, params: Tree, batch: Tree, counts: Array | None, joined: Array | None
) -> Tree:
    """As :func:`accumulate_gradients`, of a batch that is whole unless devices share it."""
    if joined is None:
        loss, found = gradient(params, batch, counts)
        return checkpoint_name(loss, f"{_WHOLE_BATCH}{lost}"), found
    rows, me = len(jax.tree.leaves(batch)[0]), lax.axis_index(CLIENT_AXIS)
    share = -(-rows // lax.axis_size(CLIENT_AXIS))
    first = jnp.minimum(me * share, rows - share)
    part, own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, share), (batch, counts))
    if share * lax.axis_size(CLIENT_AXIS) > rows:  # some are the device's before
        inside = first + jnp.arange(share) >= me * share
        own = inside if own is None else inside & own
    together = lambda: lax.psum(gradient(params, part, own), CLIENT_AXIS)  # noqa: E731
    return lax.cond(joined, together, lambda: gradient(params, batch, counts))


class BatchSplit(NamedTuple):
    """A batch in microbatches, or one that devices may share."""

    pieces: int
    rows: int
    """Of each microbatch; zero for a whole batch."""
    lost: float = 0.0
    """As of :class:`Microbatches`."""


def batch_splits(program: core.ClosedJaxpr) -> list[BatchSplit]:
    """How a traced program splits batches."""
    found = []
    for equation in equations_in(program):
        if equation.primitive.name == "scan" and str(equation.source_info.name_stack).split("/")[-1] == _SCOPE:
            first: Any = equation.invars[sum(scan_counts(equation))]
            found.append(BatchSplit(*first.aval.shape[:2]))
        elif equation.primitive.name == "name" and equation.params["name"].startswith(_WHOLE_BATCH):
            found.append(BatchSplit(1, 0, float(equation.params["name"].removeprefix(_WHOLE_BATCH))))
    return found


def device_speedup(cuts: Sequence[BatchSplit], devices: int) -> float:
    """How many times as fast as one device all of them together are with a batch that is cut so."""
    alone = lambda cut: cut.pieces / -(-cut.pieces // devices) if cut.rows else 1 / (1 / devices + cut.lost)  # noqa: E731
    return min(map(alone, cuts), default=1.0)
