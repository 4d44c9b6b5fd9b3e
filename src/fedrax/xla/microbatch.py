"""Microbatching: the gradient of a batch is accumulated over microbatches, on CPUs.

- Before: the gradient of losses [B] that are independent per example (:mod:`fedrax.xla.per_example`) and whose function
  does not depend on the batch size (:mod:`fedrax.xla.batch_invariance`).
- After: a loop that sums the gradients of microbatches that fit the caches; devices can share the microbatches, or a
  whole batch.
- Why: a convolutional network writes about a megabyte of activations per example, all of which the backward pass reads.
  For a whole batch that exceeds the caches, and memory traffic then takes longer than arithmetic.
- Not for: batch norm, losses that compare examples, weights that are large beside a microbatch's activations
  (`Limits.microbatch_weight_ratio`), and accelerators.

:func:`plan_microbatches` decides from the jaxpr and its shapes; :func:`accumulate_gradients` runs the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
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
    cached_trace,
    cpu_passes_apply,
    equations_in,
    owned_cache,
    scan_counts,
    shape_struct,
    trace_settings,
)

_MIN_ROWS = 2
"""Fewest examples of a microbatch: XLA has no fast code for some operations with a unit axis."""
_MAX_SHARED_EQUATIONS = 400
"""Most equations of a loss for devices to share a whole batch, since its gradient is compiled once more for a share."""
_EXCHANGE_BYTES_PER_SECOND, _READ_BYTES_PER_SECOND, _START_SECONDS = 3e9, 15e9, 1e-4
"""Rates of gradients that devices exchange and of weights that each device reads again, and the time for which devices
wait for each other. Rough figures: they only exclude cases far from worth it."""
_SCOPE, _WHOLE_BATCH = "pieces", "fedrax: whole batch "
"""Name scope of the loop over microbatches, and prefix of the checkpoint name of a whole batch that devices may share:
:func:`batch_splits` finds both in traces."""
CLIENT_AXIS = "clients"
"""Axis of the device mesh over which clients are sharded."""
TRACE_BATCH = 13
"""Batch size of traces for analysis only: a prime, which is unlikely to equal another axis of the model."""


class Microbatches(NamedTuple):
    """Plan for the gradient of a batch."""

    rows: int
    """Examples in a microbatch."""
    dtype: Any
    """Dtype of the losses."""
    drawn: HoistedDraws | None
    """Random draws for the whole batch, which come before it is split, and the losses that take them."""
    overhead: float | None = None
    """Overhead of sharing a whole batch between devices, as a fraction of its time; None for microbatches."""


def plan_microbatches(
    losses: Callable, params: Tree, batch: Tree, key: Array, traced: int | None = None, devices: int = 2
) -> Microbatches | None:
    """Plan how to split a batch for the gradient of ``losses(params, batch, key)`` [B].

    Args:
        losses: the losses of a batch.
        params: parameters; only shapes are used, as of ``batch`` and ``key``.
        batch: pytree of arrays [B, ...].
        key: random key.
        traced: batch size for the analysis, such as `TRACE_BATCH`; its trace is cached. ``losses`` must not close over
            tracers then. By default the batch's size.
        devices: number of devices that could share a whole batch.

    Returns:
        The plan; None on accelerators, for losses that are not independent per example, and where a whole batch is
        best and sharing it is not worth it.
    """
    rows = len(jax.tree.leaves(batch)[0])
    if not cpu_passes_apply() or rows < 2 or not is_enabled("microbatch"):
        return None

    def of_rows(n: int) -> Tree:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), batch)

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
        seconds = 3 * rows * seen.flops / limits().sharing_flops  # the backward pass takes twice the forward pass
        exchange, reads = tree.num_bytes(params) / _EXCHANGE_BYTES_PER_SECOND, seen.weights / _READ_BYTES_PER_SECOND
        overhead = (_START_SECONDS + exchange + reads) / max(seconds, _START_SECONDS)
        # a share of one example is excluded, since models may treat unit axes differently
        if seen.length > _MAX_SHARED_EQUATIONS or overhead >= limits().sharing_overhead or least < 2:
            return None
        found = Microbatches(rows, seen.dtype, drawn, overhead)
    trace = jax.make_jaxpr(losses) if traced is None else partial(cached_trace, losses)
    fits = drawn is None or all(drawn.fits(params, of_rows(n), key) for n in (rows, least))
    same = fits and _is_invariant(lambda n: trace(params, of_rows(n), key), traced or rows, (rows, least))
    if not same:
        return None
    note_applied("microbatch")
    if drawn is not None:
        note_applied("hoist_rng")
    return found


def _is_invariant(trace: Callable[[int], core.ClosedJaxpr], traced: int, sizes: tuple[int, int]) -> bool:
    """Whether the analysis of a batch of size ``traced`` holds for other ``sizes``; ``trace`` traces a batch size."""
    try:
        return all(is_batch_size_invariant(trace(traced), trace(n), (traced, n)) for n in sizes if n != traced)
    except Exception:  # raised by user code: some models accept only some batch sizes
        return False


@owned_cache()
def replay_trace(losses: Callable) -> Callable:
    """The function, evaluated from its cached trace, so that the user's Python code is not traced again."""

    def found(*args: Tree) -> Array:
        return jaxpr_as_function(cached_trace(losses, *args))(*jax.tree.leaves(args))[0]

    return found


def _cached_analysis(losses: Callable, *args: Tree) -> tuple[PerExampleCost | None, HoistedDraws | None]:
    """:func:`_analyze`, cached by code, shapes and settings."""
    leaves, structure = jax.tree.flatten(args)
    return _analyze(losses, structure, tuple(map(shape_struct, leaves)), (CodeFingerprint(losses), *trace_settings()))


@owned_cache()
def _analyze(
    losses: Callable, structure: Any, shapes: tuple, _: tuple
) -> tuple[PerExampleCost | None, HoistedDraws | None]:
    """(cost if examples are independent, random draws that must be hoisted for it)."""
    params, batch, key = jax.tree.unflatten(structure, shapes)
    try:
        seen = analyze_per_example(losses, params, batch, key)
    except Exception:  # raised by user code: some models accept only some batch sizes
        return None, None
    drawn = hoist_random_draws(losses, params, batch, key) if seen is None and is_enabled("hoist_rng") else None
    if drawn is None:
        return seen, None
    arrays, others = jax.eval_shape(drawn.draws, params, batch, key)
    return analyze_per_example(drawn.losses, params, (batch, arrays), others), drawn


def accumulate_gradients(
    gradient: Callable,
    plan: Microbatches | None,
    params: Tree,
    batch: Tree,
    counts: Array | None,
    shared: Array | None = None,
) -> Tree:
    """Compute ``gradient(params, batch, counts)`` by a plan.

    Args:
        gradient: (loss, gradient of the parameters), both summed over the examples where ``counts`` is true.
        plan: from :func:`plan_microbatches`; None computes the whole batch.
        params: parameters.
        batch: pytree of arrays [B, ...].
        counts: bool [B]; None for all examples.
        shared: bool; whether all devices along `CLIENT_AXIS` have the same batch now, so that they can share it; None
            if they never have.

    Returns:
        (loss, gradient).
    """
    if plan is None:
        return gradient(params, batch, counts)
    if plan.overhead is not None:
        return _share_batch(gradient, plan.overhead, params, batch, counts, shared)
    rows = len(jax.tree.leaves(batch)[0])
    number = -(-rows // plan.rows)
    if number * plan.rows > rows:  # padded with masked copies of the last example
        lanes = jnp.arange(number * plan.rows)
        batch, inside = jax.tree.map(lambda a: a[jnp.minimum(lanes, rows - 1)], batch), lanes < rows
        counts = inside if counts is None else inside & counts[jnp.minimum(lanes, rows - 1)]
    cut = jax.tree.map(lambda a: a.reshape(number, plan.rows, *a.shape[1:]), (batch, counts))

    def add(total: Tree, microbatch: Tree) -> tuple[Tree, None]:
        with scope(GRADIENT):  # again inside the loop, whose own scope hides the outer one
            return tree.add(total, gradient(params, *microbatch)), None

    zero = (jnp.zeros((), plan.dtype), tree.zeros_like(params))
    with jax.named_scope(_SCOPE):
        if shared is None:
            return lax.scan(add, zero, cut)[0]
        share = lax.axis_index(CLIENT_AXIS) + jnp.arange(2)
        first, last = jnp.where(shared, number * share // lax.axis_size(CLIENT_AXIS), jnp.array([0, number]))
        total = lax.fori_loop(first, last, lambda i, total: add(total, tree.row(cut, i))[0], zero)
        return lax.cond(shared, lambda t: lax.psum(t, CLIENT_AXIS), lambda t: t, total)


def _share_batch(
    gradient: Callable, overhead: float, params: Tree, batch: Tree, counts: Array | None, shared: Array | None
) -> Tree:
    """:func:`accumulate_gradients` of a whole batch, or of a share of it where ``shared``."""
    if shared is None:
        loss, found = gradient(params, batch, counts)
        return checkpoint_name(loss, f"{_WHOLE_BATCH}{overhead}"), found
    rows, me = len(jax.tree.leaves(batch)[0]), lax.axis_index(CLIENT_AXIS)
    share = -(-rows // lax.axis_size(CLIENT_AXIS))
    first = jnp.minimum(me * share, rows - share)
    part, own = jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, share), (batch, counts))
    if share * lax.axis_size(CLIENT_AXIS) > rows:  # shares overlap: mask the examples of the device before
        inside = first + jnp.arange(share) >= me * share
        own = inside if own is None else inside & own
    return lax.cond(
        shared, lambda: lax.psum(gradient(params, part, own), CLIENT_AXIS), lambda: gradient(params, batch, counts)
    )


class BatchSplit(NamedTuple):
    """How a traced program splits a batch."""

    num_microbatches: int
    """Number of microbatches; 1 for a whole batch."""
    rows: int
    """Examples in a microbatch; 0 for a whole batch."""
    overhead: float = 0.0
    """Overhead of sharing a whole batch, see :class:`Microbatches`."""


def batch_splits(program: core.ClosedJaxpr) -> list[BatchSplit]:
    """All batches that a traced program splits, or that its devices may share."""
    found = []
    for equation in equations_in(program):
        if equation.primitive.name == "scan" and str(equation.source_info.name_stack).split("/")[-1] == _SCOPE:
            first: Any = equation.invars[sum(scan_counts(equation))]
            found.append(BatchSplit(*first.aval.shape[:2]))
        elif equation.primitive.name == "name" and equation.params["name"].startswith(_WHOLE_BATCH):
            found.append(BatchSplit(1, 0, float(equation.params["name"].removeprefix(_WHOLE_BATCH))))
    return found


def device_speedup(splits: Sequence[BatchSplit], devices: int) -> float:
    """Estimated speedup of several devices that share each batch over one device; the least over all batches."""
    return min(
        (
            split.num_microbatches / -(-split.num_microbatches // devices)
            if split.rows
            else 1 / (1 / devices + split.overhead)
            for split in splits
        ),
        default=1.0,
    )
