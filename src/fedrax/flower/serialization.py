"""Trees of arrays as records of Flower and back: raw bytes, of which the receiver knows names, types and shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord

from fedrax import tree
from fedrax.errors import FedraxError
from fedrax.tree import Tree

_RAW = "fedrax.raw"
"""Flower's own way, NumPy's files, has no word for bfloat16 and packs nothing."""


def packed(values: Tree) -> ArrayRecord:
    """The arrays of a tree by name; numbers shorter than a byte lie side by side in it."""
    return ArrayRecord({name: _array(leaf) for name, leaf in _by_name(values)})


def unpacked(record: Mapping[str, Array], like: Tree, what: str) -> Tree:
    """The tree of which ``packed`` made the record. ``like``: its shapes and types.

    Raises FedraxError, of ``what``, for other names, types or shapes, and for bytes that are not so many.
    """
    wanted = dict(_by_name(like))
    if set(record) != set(wanted):
        strange = sorted(set(record) ^ set(wanted))
        raise FedraxError(f"{what} holds other arrays than it must, among them {strange[0]!r:.80}")
    return jax.tree.unflatten(
        jax.tree.structure(like), [_leaf(record[name], leaf, f"{what}, {name}") for name, leaf in wanted.items()]
    )


def record_bytes(record: Mapping[str, Array]) -> int:
    """Bytes of the arrays in a record, without their names."""
    return sum(len(array.data) for array in record.values())


def _by_name(values: Tree) -> Iterator[tuple[str, Any]]:
    """Leaves with names of which no two are alike."""
    for number, (name, leaf) in enumerate(zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True)):
        yield f"{number} {name}".rstrip(), leaf


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _array(leaf: Any) -> Array:
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    data = np.ascontiguousarray(numbers).tobytes()
    if (bits := tree.bits_of(numbers.dtype)) < 8:
        each = np.unpackbits(np.frombuffer(data, np.uint8)[:, None], axis=1, bitorder="little")
        data = np.packbits(each[:, :bits], bitorder="little").tobytes()
    return Array(str(numbers.dtype), numbers.shape, _RAW, data)


def _leaf(array: Array, like: Any, what: str) -> Any:
    if not _is_key(like):
        return _numbers(array, like, what)
    kinds: list[Any] = []

    def data(key: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    numbers = _numbers(array, jax.eval_shape(data, like), what)
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=kinds[0])


def _numbers(array: Array, like: Any, what: str) -> np.ndarray:
    dtype, shape, bits = np.dtype(like.dtype), tuple(like.shape), tree.bits_of(like.dtype)
    count = math.prod(shape)
    if (array.stype, array.dtype, tuple(array.shape)) != (_RAW, str(dtype), shape):
        found = f"{array.dtype} {list(array.shape)}"
        raise FedraxError(f"{what} is {found!r:.80} and not {dtype} {list(shape)}")
    if len(array.data) != -(-count * min(bits, 8 * dtype.itemsize) // 8):
        raise FedraxError(f"{what} has {len(array.data):,} bytes, not those of {dtype} {list(shape)}")
    if dtype == np.bool_:  # a byte of 2 would be no truth to anybody
        return np.frombuffer(array.data, np.uint8).reshape(shape) != 0
    if bits >= 8:
        return np.frombuffer(array.data, dtype).reshape(shape)
    each = np.unpackbits(np.frombuffer(array.data, np.uint8), count=count * bits, bitorder="little")
    bytes_ = np.packbits(each.reshape(count, bits), axis=1, bitorder="little").reshape(shape)
    if not jnp.issubdtype(dtype, jnp.signedinteger):
        return bytes_.view(dtype) if not jnp.issubdtype(dtype, jnp.integer) else bytes_.astype(dtype)
    half = 1 << (bits - 1)
    return ((bytes_.astype(np.int16) ^ half) - half).astype(np.int8).astype(dtype)
