"""The gradient of a batch's loss, traced once for all programs of a run that hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.tree import Tree
from fedrax.xla.cpu import fast_on_cpu
from fedrax.xla.layer_scan import in_loops
from fedrax.xla.precision import Format, with_operands
from fedrax.xla.tracing import traced_once


def quick(gradient: Callable, precision: Format) -> Callable:
    """The same function, its products as the run asks, its operations as this machine is fast at."""
    return fast_on_cpu(with_operands(gradient, precision))


def scaled_sum(losses: Array, counts: Array | None, scale: Any = None, count: Any = None) -> Array:
    """scale times the sum of the losses [B] that count, over ``count``; without ``scale`` the sum.

    counts: bool [B], or None where all do.
    """
    total = losses.sum() if counts is None else jnp.where(counts, losses, 0).sum()
    return total if scale is None else scale * (total / count)


@traced_once(fixed=2)
def batch_gradient(
    losses: Callable,
    precision: Format,
    params: Tree,
    samples: Tree,
    counts: Array | None,
    key: Array,
    scale: Any = None,
    count: Any = None,
) -> tuple[Array, Tree]:
    """:func:`scaled_sum` of ``losses(params, samples, key)`` [B] and its gradient at ``params``.

    samples: pytree of arrays [B, ...]; the others as there. ``losses`` holds no arrays of a program that is being
    traced; one that does is for ``untraced(batch_gradient)``.
    """
    objective = lambda params, samples, counts: scaled_sum(losses(params, samples, key), counts, scale, count)  # noqa: E731
    return quick(jax.value_and_grad(in_loops(objective)), precision)(params, samples, counts)
