"""Vector algebra on pytrees: every function treats a whole pytree of arrays as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
"""A pytree of arrays; trees in one expression have the same structure and shapes."""

_BLOCK = 1 << 16
"""Numbers whose inner products are taken at a time on CPU, so that they stay in a core's cache."""

_LANES = 1 << 13
"""Numbers that are squared side by side there."""

_LONG_ROW = 1 << 14
"""The longest rows that XLA:CPU sums into one row at speed; with longer ones it takes ten times as long."""


def add(a: Tree, b: Tree) -> Tree:
    """a + b."""
    return jax.tree.map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """a - b."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Any, a: Tree) -> Tree:
    """factor * a, in the dtype of each leaf of ``a``."""
    return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), a)


def add_scaled(a: Tree, factor: Any, b: Tree) -> Tree:
    """a + factor * b, in the dtype of each leaf of ``a``."""
    return jax.tree.map(lambda x, y: (x + factor * y).astype(x.dtype), a, b)


def rebuilt(a: Tree) -> Tree:
    """The same arrays in containers of their own: who writes into these changes nothing of ``a``."""
    return jax.tree.map(lambda leaf: leaf, a)


def zeros_like(a: Tree) -> Tree:
    """The zero vector of a's structure (leaves may be arrays or ``jax.ShapeDtypeStruct``)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), a)


def dot(a: Tree, b: Tree) -> jax.Array:
    """The inner product <a, b> over the whole tree."""
    return sum((_dot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.zeros(()))


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.shape[-1:] > (_LONG_ROW,):
        return jnp.vdot(x, y, precision=jax.lax.Precision.HIGHEST)
    # All axes but the last first, and on their own: XLA:CPU sums rows into a row straight from where they are
    # computed, but copies what it sums to a single number.
    products = x * y
    rows = jnp.sum(products.reshape(math.prod(x.shape[:-1]), -1), axis=0) if x.size and x.ndim > 1 else products
    return jnp.sum(jax.lax.optimization_barrier(rows))


def norm(a: Tree) -> jax.Array:
    """The Euclidean norm over the whole tree."""
    return jnp.sqrt(dot(a, a))


def norm_of(function: Callable[..., jax.Array], *trees: Tree) -> jax.Array:
    """The Euclidean norm of ``function`` of matching entries of the trees, a vector that is never written to memory."""
    leaves = zip(*(jax.tree.leaves(a) for a in trees), strict=True)
    return jnp.sqrt(sum((square_of(function, *xs) for xs in leaves), jnp.zeros(())))


def square_of(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """The sum of the squares of ``function`` of matching entries of arrays of one shape, which is never written.

    On CPU it is taken in blocks, the squares of one added to those of the last number by number.
    """

    def whole(*flat: jax.Array) -> jax.Array:
        values = function(*flat)
        return jnp.vdot(values, values, precision=jax.lax.Precision.HIGHEST)

    def blocks(*flat: jax.Array) -> jax.Array:
        count = flat[0].size // _LANES
        if count < 2:
            return whole(*flat)

        def add(k: jax.Array, squares: jax.Array) -> jax.Array:
            return squares + function(*(jax.lax.dynamic_slice_in_dim(a, k * _LANES, _LANES) for a in flat)) ** 2

        squares = jax.lax.fori_loop(0, count, add, jnp.zeros(_LANES, jax.eval_shape(function, *flat).dtype))
        return jnp.sum(squares) + whole(*(a[count * _LANES :] for a in flat))

    return jax.lax.platform_dependent(*(a.reshape(-1) for a in arrays), cpu=blocks, default=whole)


def sum_over_blocks(of: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """``of(*arrays)``, a sum over the arrays' last axis.

    On CPU it is taken in blocks that stay in a core's cache while ``of`` goes over them again and again.
    """
    if not arrays[0].shape[-1]:
        return of(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=lambda *a: _in_blocks(of, *a), default=of)


def _in_blocks(of: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    size = max(1, _BLOCK // sum(a.size // a.shape[-1] for a in arrays))
    whole = arrays[0].shape[-1] // size
    rest = of(*(a[..., whole * size :] for a in arrays))
    if not whole:
        return rest

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + of(*(jax.lax.dynamic_slice_in_dim(a, k * size, size, axis=-1) for a in arrays))

    return jax.lax.fori_loop(0, whole, add, rest)


def where(condition: Any, a: Tree, b: Tree) -> Tree:
    """a where the (scalar) condition holds, b elsewhere."""
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def row(a: Tree, index: Any) -> Tree:
    """Row ``index`` of every leaf's leading axis."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), a)


def set_row(a: Tree, index: Any, value: Tree) -> Tree:
    """``a`` with row ``index`` of every leaf's leading axis replaced by ``value``."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new.astype(leaf.dtype), index, 0),
        a,
        value,
    )


def num_bytes(a: Tree) -> int:
    """Bytes of all leaves (arrays or ``jax.ShapeDtypeStruct``); numbers shorter than a byte count as packed."""
    return sum(-(-leaf.size * bits_of(leaf.dtype) // 8) for leaf in jax.tree.leaves(a))


def bits_of(dtype: Any) -> int:
    """Bits of one number of a type, 4 of an int4; a Boolean takes a byte."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


def all_finite(a: Tree) -> jax.Array:
    """Whether every entry of every floating leaf is finite."""
    alike: dict[Any, list] = {}
    for x in jax.tree.leaves(a):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            alike.setdefault((x.shape, x.dtype), []).append(x * 0)
    # Zero times anything finite is zero; one sum reads an array once, where flags would be written and read again. A
    # deep network has many leaves of few shapes, and each sum is code of its own.
    sums = [jnp.sum(sum(zeros[1:], zeros[0])) == 0 for zeros in alike.values()]
    return jnp.all(jnp.stack(sums)) if sums else jnp.bool_(True)


def leaf_names(a: Tree) -> list[str]:
    """A readable path for each leaf, in leaf order: ``dense1/kernel``."""
    paths = jax.tree_util.tree_flatten_with_path(a)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
