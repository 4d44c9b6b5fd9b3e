"""Tables in client states: M vectors, of which a local step reads and writes one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax import tree
from fedrax.tree import Tree


@jax.tree_util.register_pytree_with_keys_class
class VectorTable:
    """M vectors in a client state, used one at a time.

    An algorithm may use ``table[j]``, ``table.put(j, vector)`` and ``rows`` only: vector algebra on the whole table is
    not supported. Where clients run one after another (plans scan and loop, methods of one phase), the tables of all
    clients stay in one array and a local step reads and writes one row of it; elsewhere the client works on a copy.

    Args:
        rows: the vectors, a pytree with leaves [M, ...].

    Example:
        >>> table = fedrax.contract.VectorTable(jnp.zeros((3, 2)))
        >>> table.put(1, jnp.ones(2))[1].tolist()
        [1.0, 1.0]
    """

    def __init__(self, rows: Tree, _client: Array | None = None, _number: int | None = None):
        """rows: leaves [M, ...]. The other arguments are the simulation's, see :func:`state_in`."""
        self._rows, self._client, self._number = rows, _client, _number

    @property
    def rows(self) -> Tree:
        """All of the client's vectors, leaves [M, ...]."""
        return self._rows if self._client is None else tree.row(self._rows, self._client)

    def __getitem__(self, j: Any) -> Tree:
        """Row ``j``, clipped to the nearest row."""
        if self._client is None:
            return tree.row(self._rows, j)

        def read(a: Array) -> Array:
            shape = a.shape[2:]
            return lax.dynamic_slice(a, self._start(a, j), (1, 1, *shape)).reshape(shape)

        return jax.tree.map(read, self._rows)

    def put(self, j: Any, vector: Tree) -> VectorTable:
        """Replace one row.

        Args:
            j: int32; the number of the row. A number out of range is clipped to the nearest row.
            vector: the new row, a pytree with leaves [...].

        Returns:
            The new table.
        """
        if self._client is None:
            return VectorTable(tree.set_row(self._rows, j, vector))
        write = lambda a, v: lax.dynamic_update_slice(a, v.astype(a.dtype)[None, None], self._start(a, j))  # noqa: E731
        return VectorTable(jax.tree.map(write, self._rows, vector), self._client, self._number)

    def _start(self, a: Array, j: Any) -> list[Any]:
        return [jnp.asarray(i, jnp.int32) for i in (self._client, j)] + [jnp.int32(0)] * (a.ndim - 2)

    def __repr__(self) -> str:
        return (
            f"VectorTable({self._rows!r})"
            if self._client is None
            else f"<VectorTable {self._number} of client {self._client}>"
        )

    def tree_flatten_with_keys(self) -> tuple[tuple, int | None]:
        """Flatten for JAX.

        Returns:
            The children with their keys, and the number of the table in the client state.
        """
        key = jax.tree_util.GetAttrKey
        return ((key("rows"), self._rows), (key("client"), self._client)), self._number

    @classmethod
    def tree_unflatten(cls, number: int | None, children: tuple) -> VectorTable:
        """Unflatten for JAX.

        Args:
            number: the number of the table in the client state; None outside of a store.
            children: the rows, and the client's place in the store.

        Returns:
            The table.
        """
        rows, client = children
        return cls(rows, client, number)


def is_table(value: Any) -> bool:
    """Whether ``value`` is a table, for ``is_leaf``."""
    return isinstance(value, VectorTable)


def holds_tables(state: Tree) -> bool:
    """Whether a client state has a table."""
    return any(map(is_table, jax.tree.leaves(state, is_leaf=is_table)))


def state_in(store: Tree, slot: Array) -> Tree:
    """The client state in row ``slot`` of a store of states, with its tables left in the store.

    Such a table refers to the vectors of all clients [clients, M, ...], with the row of this client and its number
    among the tables of the state.
    """
    parts, structure = jax.tree.flatten(store, is_leaf=is_table)
    state = [VectorTable(a._rows, slot, k) if is_table(a) else tree.row(a, slot) for k, a in enumerate(parts)]
    return jax.tree.unflatten(structure, state)


def set_state(store: Tree, slot: Array, state: Tree) -> Tree:
    """The store with row ``slot`` replaced by a state that was computed from :func:`state_in` of that row."""
    parts, structure = jax.tree.flatten(store, is_leaf=is_table)
    news = structure.flatten_up_to(state)

    def put(k: int, old: Any, new: Any) -> Any:
        if not is_table(old):
            return tree.set_row(old, slot, new)
        if new._client is not None and new._number == k:
            return VectorTable(new._rows)
        return VectorTable(tree.set_row(old._rows, slot, new.rows))  # tables were exchanged

    return jax.tree.unflatten(
        structure, [put(k, old, new) for k, (old, new) in enumerate(zip(parts, news, strict=True))]
    )
