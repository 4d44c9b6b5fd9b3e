"""What a method may return, and a sentence for each way of getting it wrong."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.config.user_errors import explained, refuse
from fedrax.contract.table import is_table
from fedrax.contract.vectors import holds_vectors, is_vectors
from fedrax.errors import FedraxError
from fedrax.tree import Tree

_OF_NUMPY = (np.ndarray, np.generic)
_SMALL = 1 << 20
"""Entries of an array in which a mark of one's own is looked for."""
_OF_EVENTS = (
    "round", "clients", "bytes_down", "bytes_up", "clock", "epsilon", "epsilon_paper", "diverged", "sound", "bad",
    "noted", "local_loss",
)  # fmt: skip
_BEGINNINGS = ("train_", "test_", "seconds")
"""Names, and how names begin, that the simulator gives to numbers of its own."""


def check_method(algorithm: Any) -> None:
    """Refuse properties that hold something else than the contract's, and functions of other arguments."""
    from fedrax.contract.algorithm import Phase
    from fedrax.contract.local_training import LocalSGD
    from fedrax.contract.traits import Traits
    from fedrax.privacy.releases import Release

    name = type(algorithm).__name__
    with explained(algorithm):
        traits, local_steps, releases = algorithm.traits, algorithm.local_steps, algorithm.releases()
    if not isinstance(traits, Traits):
        raise FedraxError(f"{name}.traits is {kind(traits)}: write traits = Traits(...)")
    if not isinstance(local_steps, LocalSGD | None):
        raise FedraxError(f"{name}.local_steps is {kind(local_steps)}: a LocalSGD or None is needed")
    with explained(algorithm):
        phases = algorithm.phases
    if not isinstance(phases, tuple | list) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise FedraxError(f"{name}.phases must be a tuple of one Phase or several")
    if not isinstance(releases, tuple | list) or not all(isinstance(release, Release) for release in releases):
        raise FedraxError(f"{name}.releases gives {kind(releases)}: a tuple of Release is needed, () for none")
    called = [(algorithm, what) for what in ("init", "init_client", "params", "with_params", "personal")]
    called += [(phase, what) for phase in phases for what in ("broadcast", "client", "receive", "server")]
    sentences = (_arguments(name, what, getattr(where, what)) for where, what in called)
    refuse([FedraxError(sentence) for sentence in sentences if sentence])


def _arguments(name: str, what: str, function: Callable) -> str | None:
    """What is wrong with the arguments of a function of the contract."""
    from fedrax.contract.algorithm import Algorithm

    wanted = list(inspect.signature(getattr(Algorithm, what)).parameters)
    own = getattr(function, "__name__", "")
    own = own if own.isidentifier() else what
    write = f"write def {own}({', '.join(wanted)})"
    if not callable(function):
        return f"{name}.{what} is {kind(function)}: {write}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of another language's
        return None
    try:
        signature.bind(*wanted[1:])
    except TypeError:
        return f"{name}.{own} takes {signature}, and is called with ({', '.join(wanted[1:])}): {write}"
    return None


def checked_client(algorithm: Any, state: Tree) -> Tree:
    """A client's state from ``init_client``, if it is made of arrays."""
    if state is None:
        raise FedraxError(f"{type(algorithm).__name__}.init_client returns nothing: return the state, or () for none")
    return _kept(f"{type(algorithm).__name__}.init_client", state)


def checked_personal(algorithm: Any, model: Tree | None, params: Tree) -> Tree | None:
    """The parameters of a client's own model, if they fit the model."""
    from fedrax.contract.task import Variables

    if model is not None:
        trained = model.params if isinstance(model, Variables) else model
        name = f"{type(algorithm).__name__}.personal"
        _same(f"what {name} returns", _arrays(name, "model", trained), params, "the model has it")
    return model


def checked_received(algorithm: Any, received: Tree) -> Tree:
    """What ``receive`` makes of an upload, if it can be summed."""
    name = f"{type(algorithm).__name__}.receive"
    if received is None:
        raise FedraxError(f"{name} returns nothing: return what is averaged of the upload")
    return _arrays(name, "value", received)


def checked_init(algorithm: Any, params: Tree, server: Any) -> Any:
    """A server state from ``init``, if its parameters can be read and are those it was made of."""
    name = type(algorithm).__name__
    server = _kept(f"{name}.init", server)
    try:
        found = algorithm.params(server)
        replaced = algorithm.with_params(server, found)
    except AttributeError as error:
        raise FedraxError(
            f"{name}.init returns {kind(server)} without params: return a NamedTuple with a field params, or define"
            " params(server) and with_params(server, params)"
        ) from error
    _same(f"the parameters in {name}'s server state", found, params, "the model has it")
    _same(f"what {name}.with_params returns", replaced, server, "init makes it")
    return server


def require_finite_start(algorithm: Any, server: Any) -> None:
    """Refuse a server state that begins with what a run takes for a sign that it diverged, its parameters apart."""
    apart = set(map(id, jax.tree.leaves(algorithm.params(server))))
    for name, leaf in zip(tree.leaf_names(server), jax.tree.leaves(server), strict=True):
        looked_at = leaf.size <= _SMALL and jnp.issubdtype(leaf.dtype, jnp.inexact) and id(leaf) not in apart
        if looked_at and not np.isfinite(np.asarray(leaf)).all():
            raise FedraxError(
                f"{type(algorithm).__name__}.init returns a state whose {name or 'array'} is not finite, by which a run"
                " that diverges is known: begin with jnp.finfo(x.dtype).max, or count what is known in another field"
            )


def checked_message(algorithm: Any, message: Tree) -> Tree:
    """What is sent to clients, if it can travel."""
    if holds_vectors(message):
        raise FedraxError(f"{type(algorithm).__name__} broadcasts ServerVectors: send what it makes of them")
    return _arrays(f"{type(algorithm).__name__}.broadcast", "message", message)


def checked_output(algorithm: Any, output: Any) -> Any:
    """``output`` of a client, if it is a ClientOutput that can travel."""
    from fedrax.contract.algorithm import ClientOutput

    name = type(algorithm).__name__
    if not isinstance(output, ClientOutput):
        raise FedraxError(
            f"{name}.client returns {kind(output)} instead of a ClientOutput: write ClientOutput(upload=...)"
        )
    if output.upload is None:
        raise FedraxError(f"{name}.client uploads nothing: write ClientOutput(upload=()) where that is meant")
    info = _numbers(f"{name}.client", output.info)
    if any(is_table(part) for part in jax.tree.leaves((output.upload, output.each, output.total), is_leaf=is_table)):
        raise FedraxError(f"{name} uploads a VectorTable: send its rows")
    output = output._replace(info=info)
    return ClientOutput(*(_arrays(f"{name}.client", field, part) for field, part in output._asdict().items()))


def _kept(where: str, state: Tree) -> Tree:
    """A state, if it is made of arrays that can be written to disk."""
    state = _arrays(where, "state", state)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
        raise FedraxError(
            f"{where} returns a random key in its state: keep its numbers, jax.random.key_data(key), and make a key of"
            " them where it is used, jax.random.wrap_key_data(numbers)"
        )
    return state


def _arrays(where: str, what: str, values: Tree) -> Tree:
    fits = lambda leaf: is_vectors(leaf) or (hasattr(leaf, "dtype") and not isinstance(leaf, _OF_NUMPY))  # noqa: E731
    try:
        return jax.tree.map(lambda leaf: leaf if fits(leaf) else jnp.asarray(leaf), values, is_leaf=is_vectors)
    except (TypeError, ValueError) as error:
        raise FedraxError(f"{where} returns in its {what} something else than arrays: {error}") from error


def _numbers(where: str, info: Any) -> dict:
    if not isinstance(info, dict):
        raise FedraxError(f"{where} gives the info {kind(info)}: a dictionary of numbers is needed")
    info = {name: _arrays(where, "info", value) for name, value in info.items()}
    for name, value in info.items():
        if not isinstance(name, str) or name in _OF_EVENTS or name.startswith(_BEGINNINGS):
            raise FedraxError(f"{where} gives the info {name!r}, a name that events do not leave free: choose another")
        if not hasattr(value, "dtype") or jnp.ndim(value):
            shape = f"of shape {jnp.shape(value)}" if hasattr(value, "dtype") else kind(value)
            raise FedraxError(f"{where} gives the info {name!r} {shape}: one number is needed")
    return info


def checked_server(algorithm: Any, returned: Any) -> tuple[Any, dict]:
    """What the server's step returned, if it is (state, info)."""
    name = type(algorithm).__name__
    pair = isinstance(returned, tuple) and not hasattr(returned, "_fields") and len(returned) == 2
    if not pair or not isinstance(returned[1], dict):
        found = kind(returned)
        raise FedraxError(f"{name}.server returns {found} instead of a state and its info: write (state, {{}})")
    return _arrays(f"{name}.server", "state", returned[0]), _numbers(f"{name}.server", returned[1])


def checked_state(algorithm: Any, before: Tree, after: Tree) -> None:
    """Refuse a client state unlike the one that ``init_client`` makes (leaves: anything with a shape)."""
    from fedrax.contract.algorithm import Algorithm

    name = type(algorithm).__name__
    if not jax.tree.leaves(before) and jax.tree.leaves(after):
        if type(algorithm).init_client is Algorithm.init_client:
            raise FedraxError(f"{name}.client returns a state, but no client has one: define init_client(params)")
        raise FedraxError(
            f"{name}.client returns a state, but init_client's holds no numbers: give it arrays in place of None, such"
            " as tree.zeros_like(params)"
        )
    what = f"the state that {name}.client returns"
    _same(what, after, before, "init_client makes it")
    _same_types(what, after, before, "init_client makes it")


def checked_round(algorithm: Any, before: Any, after: Any) -> None:
    """Refuse a server state after a round that is unlike the one before it, in shapes or types."""
    what = f"the state that {type(algorithm).__name__}.server returns"
    _same(what, after, before, "before the round it was")
    _same_types(what, after, before, "before the round it was")


def _same_types(what: str, have: Tree, need: Tree, verb: str) -> None:
    """Refuse ``have`` if a number of it is of another type than in ``need``: it would be rounded, or compile anew."""
    types = lambda t: dict(zip(tree.leaf_names(t), [x.dtype for x in jax.tree.leaves(t)], strict=True))  # noqa: E731
    old, new = types(need), types(have)
    for leaf in old:
        if old[leaf] != new[leaf]:
            raise FedraxError(
                f"{what} has {leaf or 'its array'} of type {new[leaf]}, but {verb} {old[leaf]}:"
                " write .astype(...), or use fedrax.tree"
            )


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


def kind(value: Any) -> str:
    """What somebody returned, in words: "nothing", or its type."""
    return "nothing" if value is None else f"a {type(value).__name__}"
