"""What a method may return, and a sentence for each way of getting it wrong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.contract.table import is_table
from fedrax.contract.vectors import holds_vectors
from fedrax.errors import FedraxError
from fedrax.tree import Tree


def checked_output(algorithm: Any, output: Any) -> Any:
    """``output`` of a client, if it is a ClientOutput that can travel."""
    from fedrax.contract.algorithm import ClientOutput

    name = type(algorithm).__name__
    if not isinstance(output, ClientOutput):
        raise FedraxError(
            f"{name}.client returns {_kind(output)} instead of a ClientOutput: write ClientOutput(upload=...)"
        )
    if not isinstance(output.info, dict):
        raise FedraxError(f"{name}.client gives the info {_kind(output.info)}: a dictionary of numbers is needed")
    for key, value in output.info.items():
        if jnp.ndim(value):
            raise FedraxError(f"{name}.client gives the info {key!r} of shape {jnp.shape(value)}: one number is needed")
    if any(is_table(part) for part in jax.tree.leaves((output.upload, output.each, output.total), is_leaf=is_table)):
        raise FedraxError(f"{name} uploads a Table: send its rows")
    return output._replace(info={key: jnp.asarray(value) for key, value in output.info.items()})


def checked_server(algorithm: Any, returned: Any) -> tuple[Any, dict]:
    """What the server's step returned, if it is (state, info)."""
    name = type(algorithm).__name__
    pair = isinstance(returned, tuple) and not hasattr(returned, "_fields") and len(returned) == 2
    if not pair or not isinstance(returned[1], dict):
        raise FedraxError(
            f"{name}.server returns {_kind(returned)} instead of a state and its info: write (state, {{}})"
        )
    return returned


def checked_state(algorithm: Any, before: Tree, after: Tree) -> None:
    """Refuse a client state unlike the one that ``init_client`` makes (leaves: anything with a shape)."""
    name = type(algorithm).__name__
    if not jax.tree.leaves(before) and jax.tree.leaves(after):
        raise FedraxError(f"{name}.client returns a state, but no client has one: define init_client(params)")
    need, have = (
        dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True)) for t in (before, after)
    )
    for leaf in [*need, *have]:
        if need.get(leaf) != have.get(leaf):
            wanted, found = (f"of shape {s[leaf]}" if leaf in s else "not there" for s in (need, have))
            raise FedraxError(
                f"{name}.client returns a state whose {leaf or 'leaf'} is {found}; init_client makes it {wanted}"
            )
    if jax.tree.structure(before, is_leaf=is_table) != jax.tree.structure(after, is_leaf=is_table):
        raise FedraxError(f"{name}.client returns a state of another structure than init_client makes")


def checked_message(algorithm: Any, message: Tree) -> Tree:
    """What is sent to clients, if it can travel."""
    if holds_vectors(message):
        raise FedraxError(f"{type(algorithm).__name__} broadcasts Vectors: send what it makes of them")
    return message


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
