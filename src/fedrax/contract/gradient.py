"""The gradient of the loss of a batch, traced once for all programs of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrax import xla
from fedrax.tree import Tree


def scaled_sum(losses: Array, counts: Array | None, scale: Any = None, count: Any = None) -> Array:
    """scale / count times the sum of the losses [B]; without ``scale`` the sum.

    counts: bool [B], False for padding; None without padding.
    """
    total = losses.sum() if counts is None else jnp.where(counts, losses, 0).sum()
    return total if scale is None else scale * (total / count)


@xla.trace_once(fixed=2)
def batch_gradient(
    losses: Callable,
    precision: xla.OperandFormat,
    params: Tree,
    samples: Tree,
    counts: Array | None,
    key: Array,
    scale: Any = None,
    count: Any = None,
) -> tuple[Array, Tree]:
    """:func:`scaled_sum` of ``losses(params, samples, key)`` [B] and its gradient at ``params``.

    samples: pytree of arrays [B, ...]; the others as there. ``losses`` must not close over tracers; for one that
    does, use ``untraced(batch_gradient)``.
    """
    objective = lambda params, samples, counts: scaled_sum(losses(params, samples, key), counts, scale, count)  # noqa: E731
    return xla.value_and_grad(objective, precision)(params, samples, counts)
