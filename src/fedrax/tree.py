"""Vector algebra on pytrees: every function treats a whole pytree of arrays as one vector."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from fedrax.errors import FedraxError, listed

Tree = Any
"""A pytree of arrays; trees in one expression have the same structure and shapes."""

_BLOCK_SIZE = 1 << 16
"""Entries of a block in `sum_over_blocks` on CPU; the block fits into a core's cache."""

_SQUARES_BLOCK = 1 << 13
"""Entries of a block in `square_of` on CPU."""

_MAX_ROW = 1 << 14
"""Longest rows whose sum XLA:CPU computes at full speed; longer ones take ten times as long."""


def add(a: Tree, b: Tree) -> Tree:
    """Add two pytrees.

    Args:
        a: A pytree of arrays.
        b: A pytree of the same structure and shapes.

    Returns:
        a + b.

    Example:
        >>> fedrax.tree.add({"w": 1}, {"w": 2})["w"].item()
        3
    """
    return jax.tree.map(jnp.add, a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """Subtract a pytree from another.

    Args:
        a: A pytree of arrays.
        b: A pytree of the same structure and shapes.

    Returns:
        a - b.

    Example:
        >>> fedrax.tree.sub({"w": 3}, {"w": 2})["w"].item()
        1
    """
    return jax.tree.map(jnp.subtract, a, b)


def scale(factor: Any, a: Tree) -> Tree:
    """Multiply a pytree by a number, in the dtype of each leaf.

    Args:
        factor: The number.
        a: A pytree of arrays.

    Returns:
        factor * a.

    Example:
        >>> fedrax.tree.scale(2, {"w": jnp.ones(2)})["w"].tolist()
        [2.0, 2.0]
    """
    return jax.tree.map(lambda leaf: (factor * leaf).astype(leaf.dtype), a)


def add_scaled(a: Tree, factor: Any, b: Tree) -> Tree:
    """Add a multiple of a pytree, in the dtype of each leaf of ``a``.

    Args:
        a: A pytree of arrays.
        factor: The number.
        b: A pytree of the same structure and shapes.

    Returns:
        a + factor * b.

    Example:
        >>> fedrax.tree.add_scaled(jnp.ones(2), 0.5, jnp.ones(2)).tolist()
        [1.5, 1.5]
    """
    return jax.tree.map(lambda x, y: (x + factor * y).astype(x.dtype), a, b)


def rebuilt(a: Tree) -> Tree:
    """Copy the containers of a pytree, but not its arrays.

    Args:
        a: A pytree of arrays.

    Returns:
        The same arrays in new containers: writing into these does not change ``a``.

    Example:
        >>> fedrax.tree.rebuilt({"w": 1})
        {'w': 1}
    """
    return jax.tree.map(lambda leaf: leaf, a)


def zeros_like(a: Tree) -> Tree:
    """The zero vector of a pytree.

    Args:
        a: A pytree of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        Zeros in the structure, shapes and dtypes of ``a``.

    Example:
        >>> fedrax.tree.zeros_like({"w": jnp.ones(2)})["w"].tolist()
        [0.0, 0.0]
    """
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), a)


def dot(a: Tree, b: Tree) -> jax.Array:
    """The inner product over all leaves.

    Args:
        a: A pytree of arrays.
        b: A pytree of the same structure and shapes.

    Returns:
        A scalar.

    Example:
        >>> fedrax.tree.dot(jnp.ones(3), jnp.ones(3)).item()
        3.0
    """
    return sum((_dot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)), jnp.zeros(()))


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    """Inner product of two arrays."""
    if x.shape[-1:] > (_MAX_ROW,):
        return jnp.vdot(x, y, precision=jax.lax.Precision.HIGHEST)
    # Two reductions, first over all axes but the last: XLA:CPU fuses the sum of rows with their computation, but
    # materializes the operand of a reduction to a scalar.
    products = x * y
    rows = jnp.sum(products.reshape(math.prod(x.shape[:-1]), -1), axis=0) if x.size and x.ndim > 1 else products
    return jnp.sum(jax.lax.optimization_barrier(rows))


def norm(a: Tree) -> jax.Array:
    """The Euclidean norm over all leaves.

    Args:
        a: A pytree of arrays.

    Returns:
        A scalar.

    Example:
        >>> fedrax.tree.norm({"w": jnp.array([3.0, 4.0])}).item()
        5.0
    """
    return jnp.sqrt(dot(a, a))


def norm_of(function: Callable[..., jax.Array], *trees: Tree) -> jax.Array:
    """The Euclidean norm of a function of pytrees, whose values are never written to memory.

    Args:
        function: Maps matching entries of the leaves to a value, elementwise.
        *trees: Pytrees of one structure and the same shapes.

    Returns:
        A scalar.

    Example:
        >>> fedrax.tree.norm_of(jnp.subtract, jnp.array([3.0, 4.0]), jnp.zeros(2)).item()
        5.0
    """
    leaves = zip(*(jax.tree.leaves(a) for a in trees), strict=True)
    return jnp.sqrt(sum((square_of(function, *xs) for xs in leaves), jnp.zeros(())))


def square_of(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """The sum of squares of a function of arrays, whose values are never written to memory.

    On CPU the sum is taken over blocks of 8,192 entries, which are added entry by entry.

    Args:
        function: Maps matching entries of the arrays to a value, elementwise.
        *arrays: Arrays of one shape.

    Returns:
        A scalar.

    Example:
        >>> fedrax.tree.square_of(jnp.subtract, jnp.array([3.0, 4.0]), jnp.zeros(2)).item()
        25.0
    """

    def unblocked(*flat: jax.Array) -> jax.Array:
        values = function(*flat)
        return jnp.vdot(values, values, precision=jax.lax.Precision.HIGHEST)

    def blocks(*flat: jax.Array) -> jax.Array:
        count = flat[0].size // _SQUARES_BLOCK
        if count < 2:
            return unblocked(*flat)

        def add(k: jax.Array, squares: jax.Array) -> jax.Array:
            return (
                squares
                + function(*(jax.lax.dynamic_slice_in_dim(a, k * _SQUARES_BLOCK, _SQUARES_BLOCK) for a in flat)) ** 2
            )

        squares = jax.lax.fori_loop(0, count, add, jnp.zeros(_SQUARES_BLOCK, jax.eval_shape(function, *flat).dtype))
        return jnp.sum(squares) + unblocked(*(a[count * _SQUARES_BLOCK :] for a in flat))

    return jax.lax.platform_dependent(*(a.reshape(-1) for a in arrays), cpu=blocks, default=unblocked)


def sum_over_blocks(of: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Compute a sum over the last axis of arrays block by block.

    On CPU blocks stay in a core's cache while ``of`` reads them several times.

    Args:
        of: Computes the sum from the arrays, or from slices of them along the last axis.
        *arrays: Arrays with last axes of one length.

    Returns:
        ``of(*arrays)``, up to rounding.

    Example:
        >>> fedrax.tree.sum_over_blocks(lambda a: a @ a, jnp.ones(4)).item()
        4.0
    """
    if not arrays[0].shape[-1]:
        return of(*arrays)
    return jax.lax.platform_dependent(*arrays, cpu=lambda *a: _in_blocks(of, *a), default=of)


def _in_blocks(of: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """The loop of `sum_over_blocks` over full blocks, plus the remainder."""
    size = max(1, _BLOCK_SIZE // sum(a.size // a.shape[-1] for a in arrays))
    count = arrays[0].shape[-1] // size
    rest = of(*(a[..., count * size :] for a in arrays))
    if not count:
        return rest

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + of(*(jax.lax.dynamic_slice_in_dim(a, k * size, size, axis=-1) for a in arrays))

    return jax.lax.fori_loop(0, count, add, rest)


def where(condition: Any, a: Tree, b: Tree) -> Tree:
    """Select one of two pytrees by a scalar condition.

    Args:
        condition: A scalar Boolean.
        a: A pytree of arrays.
        b: A pytree of the same structure and shapes.

    Returns:
        ``a`` where the condition holds, else ``b``.

    Example:
        >>> fedrax.tree.where(True, {"w": 1}, {"w": 2})["w"].item()
        1
    """
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def row(a: Tree, index: Any) -> Tree:
    """Take a row of every leaf.

    Args:
        a: A pytree of arrays with a common leading axis.
        index: The row, which may be traced.

    Returns:
        Entry ``index`` of the leading axis of every leaf.

    Example:
        >>> fedrax.tree.row({"w": jnp.arange(3)}, 1)["w"].item()
        1
    """
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), a)


def set_row(a: Tree, index: Any, value: Tree) -> Tree:
    """Replace a row of every leaf.

    Args:
        a: A pytree of arrays with a common leading axis.
        index: The row, which may be traced.
        value: A pytree of the structure of ``a`` without the leading axes.

    Returns:
        ``a`` with row ``index`` replaced, in its dtypes.

    Example:
        >>> fedrax.tree.set_row(jnp.zeros(3), 1, jnp.ones(())).tolist()
        [0.0, 1.0, 0.0]
    """
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new.astype(leaf.dtype), index, 0),
        a,
        value,
    )


def num_bytes(a: Tree) -> int:
    """Bytes of all leaves; integers shorter than a byte count as packed.

    Args:
        a: A pytree of arrays or ``jax.ShapeDtypeStruct``.

    Returns:
        The number of bytes.

    Example:
        >>> fedrax.tree.num_bytes({"w": jnp.ones(3), "b": jnp.ones(1)})
        16
    """
    return sum(-(-leaf.size * bits_of(leaf.dtype) // 8) for leaf in jax.tree.leaves(a))


def bits_of(dtype: Any) -> int:
    """Bits of one number of a dtype: 4 of an int4, 8 of a Boolean.

    Args:
        dtype: A NumPy or JAX dtype.

    Returns:
        The number of bits.

    Example:
        >>> fedrax.tree.bits_of(jnp.dtype("float32"))
        32
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 8 * dtype.itemsize


def all_finite(a: Tree) -> jax.Array:
    """Whether every entry of every floating leaf is finite.

    Args:
        a: A pytree of arrays.

    Returns:
        A scalar Boolean.

    Example:
        >>> fedrax.tree.all_finite({"w": jnp.array([1.0, jnp.nan])}).item()
        False
    """
    by_shape: dict[Any, list] = {}
    for x in jax.tree.leaves(a):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            by_shape.setdefault((x.shape, x.dtype), []).append(x * 0)
    # Zero times a finite number is zero, and the sum reads each array once, while Boolean arrays would be written and
    # read again. Leaves of one shape are summed together, because each sum is separate code, and a deep network has
    # many leaves of few shapes.
    sums = [jnp.sum(sum(zeros[1:], zeros[0])) == 0 for zeros in by_shape.values()]
    return jnp.all(jnp.stack(sums)) if sums else jnp.bool_(True)


def leaf_names(a: Tree) -> list[str]:
    """A readable path of each leaf, such as ``dense1/kernel``.

    Args:
        a: A pytree.

    Returns:
        The paths, in the order of the leaves.

    Example:
        >>> fedrax.tree.leaf_names({"dense": {"bias": 0, "kernel": 1}})
        ['dense/bias', 'dense/kernel']
    """
    paths = jax.tree_util.tree_flatten_with_path(a)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def matching_names(names: Sequence[str], patterns: Sequence[str], field: str) -> set[str]:
    """The names that match at least one pattern, as of a shell.

    Args:
        names: Names, as of `leaf_names`.
        patterns: Patterns, such as ``head/*``.
        field: Name of the field that holds the patterns, for the message.

    Returns:
        The names.

    Raises:
        FedraxError: A pattern matches no name.

    Example:
        >>> sorted(fedrax.tree.matching_names(["body/w", "head/b", "head/w"], ("head/*",), "trainable"))
        ['head/b', 'head/w']
    """
    found: set[str] = set()
    for pattern in patterns:
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            parts = {"/".join(name.split("/")[:i]) for name in names for i in range(1, name.count("/") + 1)}
            near = difflib.get_close_matches(pattern, [*names, *(f"{part}/*" for part in sorted(parts))], 1, 0.5)
            closest = f" (the closest one is {near[0]!r})" if near else ""
            raise FedraxError(f"{field}: no parameter has the name {pattern!r}{closest}; the names are {listed(names)}")
        found.update(matching)
    return found
