"""Serialization of pytrees as Flower records: raw bytes, whose names, dtypes and shapes the receiver checks."""

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
"""Serialization type of an array. Flower's default, NumPy files, has no bfloat16 and does not pack 4-bit numbers."""


def pack(values: Tree) -> ArrayRecord:
    """Serialize a tree; numbers shorter than a byte are packed without gaps."""
    return ArrayRecord({name: _pack_leaf(leaf) for name, leaf in _named_leaves(values)})


def unpack(record: Mapping[str, Array], like: Tree, what: str) -> Tree:
    """Deserialize a record that :func:`pack` made.

    Args:
        record: arrays by name.
        like: tree of the expected shapes and dtypes.
        what: name of the record in error messages.

    Raises:
        FedraxError: for unexpected names, dtypes, shapes or numbers of bytes.
    """
    wanted = dict(_named_leaves(like))
    if set(record) != set(wanted):
        name = min(set(record) ^ set(wanted))
        state = "lacks" if name in wanted else "has an unexpected"
        raise FedraxError(f"{what} {state} array {name!r:.80}: give server and clients the same algorithm and task")
    return jax.tree.unflatten(
        jax.tree.structure(like), [_unpack_leaf(record[name], leaf, f"{what}, {name}") for name, leaf in wanted.items()]
    )


def record_bytes(record: Mapping[str, Array]) -> int:
    """Bytes of the arrays in a record, without their names."""
    return sum(len(array.data) for array in record.values())


def _named_leaves(values: Tree) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with unique names."""
    for number, (name, leaf) in enumerate(zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True)):
        yield f"{number} {name}".rstrip(), leaf


def _is_key(leaf: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _pack_leaf(leaf: Any) -> Array:
    """Serialize an array or a random key."""
    numbers = np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    data = np.ascontiguousarray(numbers).tobytes()
    if (bits := tree.bits_of(numbers.dtype)) < 8:
        each = np.unpackbits(np.frombuffer(data, np.uint8)[:, None], axis=1, bitorder="little")
        data = np.packbits(each[:, :bits], bitorder="little").tobytes()
    return Array(str(numbers.dtype), numbers.shape, _RAW, data)


def _unpack_leaf(array: Array, like: Any, what: str) -> Any:
    """Deserialize an array or a random key."""
    if not _is_key(like):
        return _unpack_array(array, like, what)
    kinds: list[Any] = []

    def data(key: jax.Array) -> jax.Array:
        kinds.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    numbers = _unpack_array(array, jax.eval_shape(data, like), what)
    return jax.random.wrap_key_data(jnp.asarray(numbers), impl=kinds[0])


def _unpack_array(array: Array, like: Any, what: str) -> np.ndarray:
    """Check and deserialize an array of the shape and dtype of ``like``."""
    dtype, shape, bits = np.dtype(like.dtype), tuple(like.shape), tree.bits_of(like.dtype)
    count = math.prod(shape)
    if (array.stype, array.dtype, tuple(array.shape)) != (_RAW, str(dtype), shape):
        found = f"{array.dtype} {list(array.shape)}"
        raise FedraxError(f"{what} is {found!r:.80}, expected {dtype} {list(shape)}")
    if len(array.data) != -(-count * min(bits, 8 * dtype.itemsize) // 8):
        raise FedraxError(f"{what} has {len(array.data):,} bytes, which is wrong for {dtype} {list(shape)}")
    if dtype == np.bool_:  # bytes other than 0 and 1 are not valid booleans: a sender can be malicious
        return np.frombuffer(array.data, np.uint8).reshape(shape) != 0
    if bits >= 8:
        return np.frombuffer(array.data, dtype).reshape(shape)
    each = np.unpackbits(np.frombuffer(array.data, np.uint8), count=count * bits, bitorder="little")
    bytes_ = np.packbits(each.reshape(count, bits), axis=1, bitorder="little").reshape(shape)
    if not jnp.issubdtype(dtype, jnp.signedinteger):
        return bytes_.view(dtype) if not jnp.issubdtype(dtype, jnp.integer) else bytes_.astype(dtype)
    half = 1 << (bits - 1)
    return ((bytes_.astype(np.int16) ^ half) - half).astype(np.int8).astype(dtype)
