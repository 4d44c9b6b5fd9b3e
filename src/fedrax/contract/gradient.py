"""The gradient of a batch's loss, traced once for all programs of a run that hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array

from fedrax import xla
from fedrax.tree import Tree


def scaled_sum(losses: Array, counts: Array | None, scale: Any = None, count: Any = None) -> Array:
    """scale times the sum of the losses [B] that count, over ``count``; without ``scale`` the sum.

    counts: bool [B], or None where all do.
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

    samples: pytree of arrays [B, ...]; the others as there. ``losses`` holds no arrays of a program that is being
    traced; one that does is for ``untraced(batch_gradient)``.
    """
    objective = lambda params, samples, counts: scaled_sum(losses(params, samples, key), counts, scale, count)  # noqa: E731
    return xla.value_and_grad(objective, precision)(params, samples, counts)
