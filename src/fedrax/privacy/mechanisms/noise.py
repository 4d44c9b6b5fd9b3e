"""What all mechanisms are made of: vectors shortened to a bound, and Gaussian noise on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, ClientOutput, Info, summed_dtype
from fedrax.errors import FedraxError
from fedrax.tree import Tree
from fedrax.xla import norm, normal_noise


def shortened(vector: Tree, bound: Any) -> tuple[Tree, Array]:
    """(the vector times min(1, bound / |vector|), whether it was within the bound), over all leaves together.

    A vector with a length that is not finite becomes zero, so that no client can add more than ``bound``, whatever its
    data. Exact but for float rounding.
    """
    size = norm(vector)
    factor = jnp.where(size > bound, bound / jnp.where(size > 0, size, 1), 1)
    finite = jnp.isfinite(size)
    cut = jax.tree.map(lambda a: jnp.where(finite, factor.astype(a.dtype) * a, 0).astype(a.dtype), vector)
    return cut, size <= bound


def with_noise(key: Array, vector: Tree, deviation: Any) -> Tree:
    """The vector with independent noise from N(0, deviation^2) on each of its numbers.

    Drawn as float32 whatever the run's precision, so that both precisions see the same noise.
    """
    add = lambda a, z: a + (deviation * z).astype(a.dtype)  # noqa: E731
    return jax.tree.map(add, vector, normal_noise(key, vector))


def only_bookkeeping(info: Info) -> Info:
    """An info without what was measured on a client's data: gradients alone are still counted."""
    return {name: value for name, value in info.items() if name == "gradients"}


def floats_sent(output: ClientOutput, who: str, inner: Algorithm, summed_only: bool) -> dict[str, Tree]:
    """All that a client sends, by the output's field, in float32 at least.

    FedraxError names the leaf that no noise can cover: whole numbers anywhere; where ``summed_only``, also what
    reaches the server otherwise than in the mean of uploads.
    """
    sent = {"upload": output.upload, "each": output.each, "total": output.total}
    for name, leaf in zip(tree.leaf_names(sent), jax.tree.leaves(sent), strict=True):
        where = f"{who} cannot hide {name} of what clients of {type(inner).__name__} send: "
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise FedraxError(f"{where}noise goes on floats, and it is {leaf.dtype}")
        if summed_only and not name.startswith("upload"):
            raise FedraxError(f"{where}noise at the server covers the mean of uploads alone")
    return jax.tree.map(lambda a: a.astype(summed_dtype(a.dtype)), sent)
