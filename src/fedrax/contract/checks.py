"""What a method may return, and a sentence for each way of getting it wrong."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.contract.table import is_table
from fedrax.contract.vectors import holds_vectors
from fedrax.errors import FedraxError
from fedrax.tree import Tree


def checked_init(algorithm: Any, params: Tree, server: Any) -> Any:
    """A server state from ``init``, if its parameters can be read and are those it was made of."""
    name = type(algorithm).__name__
    try:
        found = algorithm.params(server)
        algorithm.with_params(server, found)
    except AttributeError as error:
        raise FedraxError(
            f"{name}.init returns {_kind(server)} without params: return a NamedTuple with a field params, or define"
            " params(server) and with_params(server, params)"
        ) from error
    _same(f"the parameters in {name}'s server state", found, params, "the model has it")
    return server


def checked_message(algorithm: Any, message: Tree) -> Tree:
    """What is sent to clients, if it can travel."""
    if holds_vectors(message):
        raise FedraxError(f"{type(algorithm).__name__} broadcasts Vectors: send what it makes of them")
    return message


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
    return ClientOutput(*(_arrays(name, field, part) for field, part in output._asdict().items()))


def _arrays(name: str, field: str, values: Tree) -> Tree:
    try:
        return jax.tree.map(jnp.asarray, values)
    except TypeError as error:
        raise FedraxError(f"{name}.client returns a {field} that holds something else than arrays: {error}") from error


def checked_server(algorithm: Any, returned: Any) -> tuple[Any, dict]:
    """What the server's step returned, if it is (state, info)."""
    name = type(algorithm).__name__
    pair = isinstance(returned, tuple) and not hasattr(returned, "_fields") and len(returned) == 2
    if not pair or not isinstance(returned[1], dict):
        found = _kind(returned)
        raise FedraxError(f"{name}.server returns {found} instead of a state and its info: write (state, {{}})")
    return returned


def checked_state(algorithm: Any, before: Tree, after: Tree) -> None:
    """Refuse a client state unlike the one that ``init_client`` makes (leaves: anything with a shape)."""
    name = type(algorithm).__name__
    if not jax.tree.leaves(before) and jax.tree.leaves(after):
        raise FedraxError(f"{name}.client returns a state, but no client has one: define init_client(params)")
    _same(f"the state that {name}.client returns", after, before, "init_client makes it")


def checked_round(algorithm: Any, before: Any, after: Any) -> None:
    """Refuse a server state after a round that is unlike the one before it, in shapes or types."""
    _same(f"the state that {type(algorithm).__name__}.server returns", after, before, "before the round it was")
    types = lambda t: dict(zip(tree.leaf_names(t), [x.dtype for x in jax.tree.leaves(t)], strict=True))  # noqa: E731
    old, new = types(before), types(after)
    for leaf in old:
        if old[leaf] != new[leaf]:
            what = f"the state that {type(algorithm).__name__}.server returns has {leaf} of type {new[leaf]}"
            raise FedraxError(f"{what}, before the round it was {old[leaf]}: write .astype(...), or use fedrax.tree")


def _same(what: str, have: Tree, need: Tree, verb: str) -> None:
    """Refuse ``have`` unless it has the names and shapes of ``need``; tables may have changed places."""
    shapes = lambda t: dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True))  # noqa: E731
    wanted, found = shapes(need), shapes(have)
    for leaf in [*wanted, *found]:
        if wanted.get(leaf) != found.get(leaf):
            theirs, ours = (f"of shape {s[leaf]}" if leaf in s else "not there" for s in (wanted, found))
            raise FedraxError(f"{what}: {leaf or 'its array'} is {ours}, but {verb} {theirs}")
    if jax.tree.structure(need, is_leaf=is_table) != jax.tree.structure(have, is_leaf=is_table):
        raise FedraxError(f"{what} is built of other containers than it must be: use the same NamedTuple")


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


# -- what JAX says, in words ---------------------------------------------------------------------------------------

_SENTENCES = {
    jax.errors.TracerBoolConversionError: "asks for the truth of a traced value: use jnp.where or jax.lax.cond"
    " instead of if, and, or, while",
    jax.errors.TracerArrayConversionError: "hands a traced value to NumPy: use jax.numpy",
    jax.errors.TracerIntegerConversionError: "uses a traced value as a Python index or size: use jnp.take, or a static"
    " field",
    jax.errors.ConcretizationTypeError: "needs a value that is known only when the program runs: annotate the field"
    " as int, or compute with jax.numpy",
    jax.errors.UnexpectedTracerError: "keeps a traced value outside of the function that made it: return it as state",
}


@contextmanager
def explained(algorithm: Any) -> Iterator[None]:
    """What JAX refuses to trace, as a sentence that names the place in the method's own code."""
    try:
        yield
    except tuple(_SENTENCES) as error:
        sentence = next(text for kind, text in _SENTENCES.items() if isinstance(error, kind))
        raise FedraxError(f"{type(algorithm).__name__}{_place(algorithm, error)} {sentence}") from error


def _place(algorithm: Any, error: Exception) -> str:
    """' (file.py, line 12, in client)', of the last frame in the file of the class, or nothing."""
    try:
        file = inspect.getfile(type(algorithm))
    except (TypeError, OSError):
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if not frames:
        return ""
    return f" ({file.rpartition('/')[2]}, line {frames[-1].lineno}, in {frames[-1].name})"
