"""Vectors like the parameters in the server state, one per client, sharded over the devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedrax.tree import Tree, leaf_names, sum_over_blocks

_FEW_DEVICES = 4
"""Most devices that exchange their parts pairwise; with more the number of exchanges grows too large."""


class Form(NamedTuple):
    """The tree structure of a vector and the shapes of its leaves."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]


class Changes(NamedTuple):
    """The rows that :meth:`ServerVectors.accumulate` has replaced since :func:`watched`, to undo it in place."""

    of: object
    """Identity of the vectors before the changes."""
    rows: tuple[tuple[Array, tuple[Array, ...]], ...] = ()
    """For each call the row numbers [R] and the rows before it, [R, n] of each leaf."""
    zeros: tuple[tuple[Array, ...], ...] = ()
    """For each call the sum of zero times each new vector, [n] of each leaf: not zero where an entry is not finite."""


@jax.tree_util.register_pytree_with_keys_class
class ServerVectors:
    """K vectors v_k with the structure of the parameters, for server states with one vector per client.

    A client uploads one as ``ClientOutput(each=ServerVectors.of(update))``; the server reads those of the cohort in
    ``cohort.each``. ``ServerVectors.zeros`` in ``init`` allocates vectors in the server state. In the compiled plans
    each device of a process holds a part of every vector and computes on that part. An algorithm must use the public
    methods only, and create vectors with `of` and `zeros`.

    Args:
        parts: the entries of each leaf [K, n], or this device's part of them.
        form: the tree structure of a vector and the shapes of its leaves.

    Example:
        >>> vectors = fedrax.contract.ServerVectors.zeros(2, like={"w": jnp.ones(3)})
        >>> len(vectors), vectors.combine(jnp.ones(2))["w"].tolist()
        (2, [0.0, 0.0, 0.0])
    """

    def __init__(self, parts: Sequence[Any], form: Form, _axis: str | None = None, _changes: Changes | None = None):
        """Made by :meth:`of` and :meth:`zeros`. parts: each leaf's entries [K, n], or this device's share of them."""
        self._parts, self._form, self._axis, self._changes = tuple(parts), form, _axis, _changes

    @classmethod
    def of(cls, vector: Tree) -> ServerVectors:
        """Create a single vector, without the axis K.

        Args:
            vector: a pytree of arrays.

        Returns:
            The vector, for an upload.
        """
        leaves, structure = jax.tree.flatten(vector)
        return cls([x.reshape(-1) for x in leaves], Form(structure, tuple(x.shape for x in leaves)))

    @classmethod
    def zeros(cls, count: int, like: Tree) -> ServerVectors:
        """Create vectors of zeros.

        Args:
            count: K, the number of vectors.
            like: a pytree of arrays whose structure, shapes and dtypes each vector has.

        Returns:
            The K vectors.
        """
        one = cls.of(like)
        return cls([jnp.zeros((count, *part.shape), part.dtype) for part in one._parts], one._form)

    def __len__(self) -> int:
        """K."""
        return len(self._parts[0])

    def combine(self, factors: Array) -> Tree:
        """Compute the linear combination sum_k factors_k v_k.

        Args:
            factors: [K], or [leaves, K] with separate factors for each leaf.

        Returns:
            The combination, a pytree like one vector.
        """
        each = jnp.broadcast_to(factors, (len(self._parts), len(self)))
        return self._whole([jnp.tensordot(f.astype(v.dtype), v, 1) for f, v in zip(each, self._parts, strict=True)])

    def products(self, rows: Array, vector: Tree) -> tuple[Array, Array]:
        """Compute inner products with all v_k, separately for each leaf.

        Args:
            rows: int [R], the numbers of R of the vectors. A number out of range is clipped to the nearest.
            vector: another vector, a pytree.

        Returns:
            The inner products of the vectors ``rows`` [leaves, R, K] and those of ``vector`` [leaves, K].
        """

        def of(v: Array, p: Array) -> Array:
            chosen = jnp.concatenate([v.at[rows].get(mode="clip"), p[None]])
            return jnp.matmul(chosen, v.T, precision=lax.Precision.HIGHEST)

        pairs = zip(self._parts, self._share(vector), strict=True)
        products = jnp.stack([sum_over_blocks(of, v, p) for v, p in pairs])
        products = products if self._axis is None else lax.psum(products, self._axis)
        return products[:, :-1], products[:, -1]

    def accumulate(self, rows: Array, kept: Array, updates: ServerVectors) -> ServerVectors:
        """Replace v_k by kept[j] v_k plus vector j of ``updates``, where k = rows[j].

        It works row by row: XLA:CPU does that in place, where a scatter of all rows takes several times as long.

        Args:
            rows: int [R], the numbers of the vectors to replace. Numbers from K on are ignored.
            kept: [R], the factors of the old vectors.
            updates: R vectors, as in ``cohort.each``.

        Returns:
            The new vectors.
        """
        if (updates._form, updates._axis) != (self._form, self._axis):
            raise TypeError(
                "a server accumulates the ServerVectors of cohort.each, into ServerVectors that init has made"
            )
        last, changes = len(self) - 1, self._changes

        def add(j: Array, parts: tuple[tuple[Array, ...], ...]) -> tuple[tuple[Array, ...], ...]:
            k, real = jnp.minimum(rows[j], last), rows[j] <= last

            def one(v: Array, update: Array, *recorded: Array) -> tuple[Array, ...]:
                old = lax.dynamic_index_in_dim(v, k, keepdims=False)
                new = kept[j] * old + lax.dynamic_index_in_dim(update, j, keepdims=False)
                new = jnp.where(real, new.astype(v.dtype), old)
                v = lax.dynamic_update_index_in_dim(v, new, k, 0)
                if not recorded:
                    return (v,)
                before, zeros = recorded
                return v, lax.dynamic_update_index_in_dim(before, old, j, 0), zeros + 0 * new

            return tuple(zip(*map(one, parts[0], updates._parts, *parts[1:]), strict=True))

        if changes is None:
            (parts,) = lax.fori_loop(0, len(rows), add, (self._parts,))
            return ServerVectors(parts, self._form, self._axis)
        room = tuple(jnp.zeros((len(rows), *v.shape[1:]), v.dtype) for v in self._parts)
        zeros = tuple(jnp.zeros(v.shape[1:], v.dtype) for v in self._parts)
        parts, before, zeros = lax.fori_loop(0, len(rows), add, (self._parts, room, zeros))
        recorded = Changes(changes.of, (*changes.rows, (jnp.minimum(rows, last), before)), (*changes.zeros, zeros))
        return ServerVectors(parts, self._form, self._axis, recorded)

    @property
    def rows(self) -> Tree:
        """All vectors, NumPy leaves [K, ...]; outside of compiled code only."""
        pairs = zip(self._parts, self._form.shapes, strict=True)
        leaves = [np.asarray(part).reshape(*part.shape[:-1], *shape) for part, shape in pairs]
        return jax.tree.unflatten(self._form.structure, leaves)

    def _whole(self, pieces: Sequence[Array]) -> Tree:
        """The vector of which this device has the parts ``pieces``, one of each leaf."""
        if self._axis is not None:
            everyones = lax.all_gather(jnp.concatenate(pieces), self._axis)  # one exchange, not one a leaf
            bounds = itertools.pairwise(itertools.accumulate([len(p) for p in pieces], initial=0))
            pieces = [everyones[:, a:b].reshape(-1).astype(p.dtype) for (a, b), p in zip(bounds, pieces, strict=True)]
        leaves = [p[: math.prod(s)].reshape(s) for p, s in zip(pieces, self._form.shapes, strict=True)]
        return jax.tree.unflatten(self._form.structure, leaves)

    def _share(self, vector: Tree) -> list[Array]:
        """The parts of a vector on this device."""
        flat = [x.reshape(-1) for x in jax.tree.leaves(vector)]
        if self._axis is None:
            return flat
        devices, mine = lax.axis_size(self._axis), lax.axis_index(self._axis)
        pieces = [x.reshape(devices, -1) for x in _padded(flat, devices)]
        return [lax.dynamic_index_in_dim(x, mine, keepdims=False) for x in pieces]

    def tree_flatten_with_keys(self) -> tuple[tuple, tuple]:
        """Flatten for JAX.

        Returns:
            The parts with their keys, and the static data.
        """
        names = leaf_names(jax.tree.unflatten(self._form.structure, range(len(self._parts))))
        keys = map(jax.tree_util.GetAttrKey, names)
        return tuple(zip(keys, self._parts, strict=True)), (self._form, self._axis)

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Flatten for JAX.

        Returns:
            The parts, and the static data.
        """
        return self._parts, (self._form, self._axis)

    @classmethod
    def tree_unflatten(cls, fixed: tuple, parts: Sequence[Array]) -> ServerVectors:
        """Unflatten for JAX.

        Args:
            fixed: the static data.
            parts: the parts.

        Returns:
            The vectors.
        """
        return cls(parts, *fixed)


def is_vectors(value: Any) -> bool:
    """Whether ``value`` is a :class:`ServerVectors`, for ``is_leaf``."""
    return isinstance(value, ServerVectors)


def holds_vectors(values: Tree) -> bool:
    """Whether a pytree has :class:`ServerVectors`."""
    return any(map(is_vectors, jax.tree.leaves(values, is_leaf=is_vectors)))


def map_vectors(
    function: Callable[[ServerVectors], Any], values: Tree, other: Callable[[Any], Any] = lambda x: x
) -> Tree:
    """``function`` of the :class:`ServerVectors` in a pytree, ``other`` of its other leaves."""
    return jax.tree.map(lambda x: function(x) if is_vectors(x) else other(x), values, is_leaf=is_vectors)


def on_axis(values: Tree, axis: str | None) -> Tree:
    """``values`` with vectors marked as sharded along an axis of the mesh; None: not sharded."""
    return map_vectors(lambda v: ServerVectors(v._parts, v._form, axis, v._changes), values)


def watched(values: Tree) -> Tree:
    """``values`` with vectors that record what is accumulated, for :func:`settled`."""
    return map_vectors(lambda v: ServerVectors(v._parts, v._form, v._axis, Changes(object())), values)


def settled(old: Tree, new: Tree, sound: Callable[[Tree], Array]) -> tuple[Tree, Array]:
    """(``new`` if it is sound, otherwise ``old``; whether it is sound).

    Accumulated vectors are checked by the accumulated rows alone and restored in place: keeping ``old`` and ``new``
    would copy all vectors in every round.

    Args:
        old: the state before, from :func:`watched`.
        new: the state after.
        sound: pytree -> bool; whether its values are finite.
    """
    befores = jax.tree.leaves(old, is_leaf=is_vectors)
    afters, structure = jax.tree.flatten(new, is_leaf=is_vectors)
    accumulated = [_accumulated(before, after) for before, after in zip(befores, afters, strict=True)]
    others = [i for i, changes in enumerate(accumulated) if changes is None]
    zeros = [changes.zeros for changes in accumulated if changes is not None]
    good = sound(([afters[i] for i in others], zeros))
    chosen = lax.cond(good, lambda: [afters[i] for i in others], lambda: [befores[i] for i in others])
    either = dict(zip(others, chosen, strict=True))
    made = [
        either[i] if changes is None else _restored(afters[i], changes, good) for i, changes in enumerate(accumulated)
    ]
    return jax.tree.unflatten(structure, made), good


def _accumulated(before: Any, after: Any) -> Changes | None:
    """The changes if ``after`` differs from ``before`` by accumulation only; otherwise None."""
    changes = after._changes if is_vectors(before) and is_vectors(after) else None
    return changes if changes is not None and changes.of is before._changes.of else None


def _restored(vectors: ServerVectors, changes: Changes, keep: Array) -> ServerVectors:
    """The vectors, with the changes undone in reverse order unless ``keep``."""
    parts = vectors._parts
    for rows, before in reversed(changes.rows):

        def put(j: Array, parts: tuple[Array, ...], rows: Array = rows, before: tuple = before) -> tuple[Array, ...]:
            at = len(rows) - 1 - j
            pairs = zip(parts, before, strict=True)
            return tuple(lax.dynamic_update_index_in_dim(v, b[at], rows[at], 0) for v, b in pairs)

        parts = lax.fori_loop(0, jnp.where(keep, 0, len(rows)), put, parts)
    return ServerVectors(parts, vectors._form, vectors._axis)


def exchanged(vectors: ServerVectors, axis: str) -> ServerVectors:
    """The shard of this device of the vectors that all devices along ``axis`` contribute unsharded."""
    parts = _padded(vectors._parts, lax.axis_size(axis))
    exchange = _piece_by_piece if lax.axis_size(axis) <= _FEW_DEVICES else _all_to_all
    return ServerVectors([exchange(part, axis) for part in parts], vectors._form, axis)


def _all_to_all(part: Array, axis: str) -> Array:
    return lax.all_to_all(part, axis, split_axis=1, concat_axis=0, tiled=True)


def _piece_by_piece(part: Array, axis: str) -> Array:
    """As :func:`_all_to_all` without the copies and transposes that XLA:CPU makes for it."""
    devices, mine = lax.axis_size(axis), lax.axis_index(axis)
    count, share = part.shape[0], part.shape[1] // devices
    gathered = jnp.zeros((devices * count, share), part.dtype)
    for ahead in range(devices):
        piece = lax.dynamic_slice_in_dim(part, (mine + ahead) % devices * share, share, 1)
        if ahead:
            piece = lax.ppermute(piece, axis, [(i, (i + ahead) % devices) for i in range(devices)])
        gathered = lax.dynamic_update_slice_in_dim(gathered, piece, (mine - ahead) % devices * count, 0)
    return gathered


def padded(values: Tree, devices: int) -> Tree:
    """``values`` with every leaf of the vectors zero-padded to a multiple of ``devices``."""
    return map_vectors(lambda v: ServerVectors(_padded(v._parts, devices), v._form), values)


def fetched(values: Tree) -> Tree:
    """``values`` with the vectors on the host, without the padding of :func:`padded`."""

    def fetch(v: ServerVectors) -> ServerVectors:
        sizes = [math.prod(shape) for shape in v._form.shapes]
        return ServerVectors([np.asarray(part)[..., :n] for part, n in zip(v._parts, sizes, strict=True)], v._form)

    return map_vectors(fetch, values)


def _padded(parts: Sequence[Array], devices: int) -> list[Array]:
    none = lambda part: [(0, 0)] * (part.ndim - 1)  # noqa: E731
    return [jnp.pad(part, [*none(part), (0, -part.shape[-1] % devices)]) for part in parts]
