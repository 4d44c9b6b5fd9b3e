"""Building blocks of the mechanisms: clipping to a norm, and Gaussian noise."""

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


def clip_by_norm(vector: Tree, bound: Any) -> tuple[Tree, Array]:
    """(vector * min(1, bound / |vector|), whether |vector| <= bound), with the norm over all leaves.

    A vector whose norm is not finite becomes zero, so that no client exceeds ``bound``, whatever its data. Up to
    floating-point rounding.
    """
    size = norm(vector)
    factor = jnp.where(size > bound, bound / jnp.where(size > 0, size, 1), 1)
    finite = jnp.isfinite(size)
    cut = jax.tree.map(lambda a: jnp.where(finite, factor.astype(a.dtype) * a, 0).astype(a.dtype), vector)
    return cut, size <= bound


def with_noise(key: Array, vector: Tree, deviation: Any) -> Tree:
    """The vector with independent noise from N(0, deviation^2) added to each entry.

    The noise is drawn in float32, so that runs in float32 and float64 have the same noise.
    """
    add = lambda a, z: a + (deviation * z).astype(a.dtype)  # noqa: E731
    return jax.tree.map(add, vector, normal_noise(key, vector))


def gradient_count_only(info: Info) -> Info:
    """The info reduced to the count of gradients; other entries are measured on private data."""
    return {name: value for name, value in info.items() if name == "gradients"}


def floats_sent(output: ClientOutput, who: str, inner: Algorithm, summed_only: bool) -> dict[str, Tree]:
    """The fields of a client's output that are sent, converted to at least float32.

    Raises:
        FedraxError: a leaf cannot be noised, because it holds integers or, if ``summed_only``, because it is sent
            outside the mean of uploads.
    """
    sent = {"upload": output.upload, "each": output.each, "total": output.total}
    for name, leaf in zip(tree.leaf_names(sent), jax.tree.leaves(sent), strict=True):
        where = f"{who} cannot protect {name}, which clients of {type(inner).__name__} send: "
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise FedraxError(f"{where}noise is added to floats, and its dtype is {leaf.dtype}")
        if summed_only and not name.startswith("upload"):
            raise FedraxError(
                f"{where}noise at the server covers only the mean of uploads;"
                " send it in upload, or add the noise at the clients"
            )
    return jax.tree.map(lambda a: a.astype(summed_dtype(a.dtype)), sent)
