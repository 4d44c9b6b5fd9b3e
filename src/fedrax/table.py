"""Tables in client states: many vectors, of which a local step reads and writes one."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array

from fedrax import tree
from fedrax.tree import Tree


@jax.tree_util.register_pytree_with_keys_class
class Table:
    """M vectors that a client remembers, used one at a time.

    To an algorithm it is a value: ``table[j]`` and ``table.put(j, vector)``. A simulation that goes through its
    clients one after another hands each its table where it lies, among those of all clients, so that a local step
    moves one row of it instead of the client's start and end all of them.
    """

    def __init__(self, rows: Tree, client: Array | None = None):
        self.rows = rows
        """Leaves [M, ...]; where ``client`` is given [clients, M, ...]."""
        self.client = client
        """int32, this client's place among all those in ``rows``."""

    def __getitem__(self, j: Any) -> Tree:
        if self.client is None:
            return tree.row(self.rows, j)
        return jax.tree.map(lambda a: a[self.client, j], self.rows)

    def put(self, j: Any, vector: Tree) -> Table:
        """The table with row ``j`` replaced."""
        if self.client is None:
            return Table(tree.set_row(self.rows, j, vector))
        rows = jax.tree.map(lambda a, v: a.at[self.client, j].set(v.astype(a.dtype)), self.rows, vector)
        return Table(rows, self.client)

    def __repr__(self) -> str:
        return f"Table({self.rows!r})" if self.client is None else f"Table({self.rows!r}, client={self.client!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple, None]:
        """For JAX."""
        return tuple((jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("rows", "client")), None

    @classmethod
    def tree_unflatten(cls, aux: None, children: tuple) -> Table:
        """For JAX."""
        return cls(*children)


def _is_table(value: Any) -> bool:
    return isinstance(value, Table)


def state_in(store: Tree, slot: Array) -> Tree:
    """The client state in row ``slot`` of a store of states, its tables left where they are."""
    take = lambda a: Table(a.rows, slot) if _is_table(a) else a[slot]  # noqa: E731
    return jax.tree.map(take, store, is_leaf=_is_table)


def set_state(store: Tree, slot: Array, state: Tree) -> Tree:
    """The store with row ``slot`` replaced by a state that may have come from :func:`state_in`."""

    def put(old: Any, new: Any) -> Any:
        if _is_table(old) and new.client is not None:
            return Table(new.rows)
        return tree.set_row(old, slot, new)

    return jax.tree.map(put, store, state, is_leaf=_is_table)
