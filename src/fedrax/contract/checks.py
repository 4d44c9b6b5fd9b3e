"""Checks of what the functions of a method return, with one error message for each mistake."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.config.user_errors import phase_function, raise_collected, translate_errors
from fedrax.contract.table import is_table
from fedrax.contract.vectors import holds_vectors, is_vectors
from fedrax.errors import FedraxError
from fedrax.tree import Tree

_NUMPY_TYPES = (np.ndarray, np.generic)
_MAX_FINITE_CHECK = 1 << 20
"""Most entries of an array of the server state that is checked to be finite before the first round."""
_EVENT_FIELDS = (
    "round", "clients", "bytes_down", "bytes_up", "clock", "epsilon", "epsilon_paper", "diverged", "sound", "bad",
    "recorded", "local_loss", "asked", "evaluated_clients",
)  # fmt: skip
_EVENT_PREFIXES = ("train_", "test_", "seconds")
"""Fields of events, and prefixes of fields, that the simulator sets."""


def check_method(algorithm: Any) -> None:
    """Raise FedraxError if a property of the method has a wrong type, or a function takes wrong arguments."""
    from fedrax.contract.algorithm import Phase
    from fedrax.contract.local_training import LocalSGD
    from fedrax.contract.traits import Traits
    from fedrax.privacy.releases import Release

    name = type(algorithm).__name__
    with translate_errors(algorithm):
        traits, local_steps, releases = algorithm.traits, algorithm.local_steps, algorithm.releases()
    if not isinstance(traits, Traits):
        raise FedraxError(f"{name}.traits is {kind(traits)}: write traits = Traits(...)")
    if not isinstance(local_steps, LocalSGD | None):
        raise FedraxError(f"{name}.local_steps is {kind(local_steps)}: a LocalSGD or None is needed")
    with translate_errors(algorithm):
        phases = algorithm.phases
    if not isinstance(phases, tuple | list) or not phases or not all(isinstance(phase, Phase) for phase in phases):
        raise FedraxError(f"{name}.phases must be a tuple of one Phase or several")
    if not isinstance(releases, tuple | list) or not all(isinstance(release, Release) for release in releases):
        raise FedraxError(f"{name}.releases gives {kind(releases)}: a tuple of Release is needed, () for none")
    called = [(algorithm, what) for what in ("init", "init_client", "params", "with_params", "personal")]
    called += [(phase, what) for phase in phases for what in ("broadcast", "client", "receive", "server")]
    messages = (_signature_error(name, what, getattr(where, what)) for where, what in called)
    raise_collected([FedraxError(message) for message in messages if message])


def _signature_error(name: str, what: str, function: Callable) -> str | None:
    """The error message if a function of the contract takes wrong arguments."""
    from fedrax.contract.algorithm import Algorithm

    wanted = list(inspect.signature(getattr(Algorithm, what)).parameters)
    own = getattr(function, "__name__", "")
    own = own if own.isidentifier() else what
    write = f"write def {own}({', '.join(wanted)})"
    if not callable(function):
        return f"{name}.{what} is {kind(function)}: {write}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return None
    try:
        signature.bind(*wanted[1:])
    except TypeError:
        return f"{name}.{own} takes {signature}, and is called with ({', '.join(wanted[1:])}): {write}"
    return None


def checked_client(algorithm: Any, state: Tree) -> Tree:
    """The client state that ``init_client`` returned, as arrays."""
    if state is None:
        raise FedraxError(f"{type(algorithm).__name__}.init_client returns nothing: return the state, or () for none")
    return _state_arrays(f"{type(algorithm).__name__}.init_client", state)


def checked_personal(algorithm: Any, model: Tree | None, params: Tree) -> Tree | None:
    """The personal parameters that ``personal`` returned, checked to have the shapes of the model's."""
    from fedrax.contract.task import Variables

    if model is not None:
        trained = model.params if isinstance(model, Variables) else model
        name = f"{type(algorithm).__name__}.personal"
        _same(f"what {name} returns", _arrays(name, "model", trained), params, "the model has it")
    return model


def _where(algorithm: Any, p: int, what: str) -> str:
    """A function of phase ``p`` in messages."""
    return f"{type(algorithm).__name__}.{phase_function(algorithm, p, what)}"


def checked_received(algorithm: Any, p: int, received: Tree) -> Tree:
    """The output of the ``receive`` of phase ``p``, as arrays."""
    name = _where(algorithm, p, "receive")
    if received is None:
        raise FedraxError(f"{name} returns nothing: return the decoded upload, which is averaged")
    return _arrays(name, "value", received)


def checked_init(algorithm: Any, params: Tree, server: Any) -> Any:
    """The server state that ``init`` returned, with parameters that can be read and replaced."""
    name = type(algorithm).__name__
    server = _state_arrays(f"{name}.init", server)
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
    """Raise FedraxError if the initial server state, the parameters excepted, has entries that are not finite."""
    apart = set(map(id, jax.tree.leaves(algorithm.params(server))))
    for name, leaf in zip(tree.leaf_names(server), jax.tree.leaves(server), strict=True):
        looked_at = leaf.size <= _MAX_FINITE_CHECK and jnp.issubdtype(leaf.dtype, jnp.inexact) and id(leaf) not in apart
        if looked_at and not np.isfinite(np.asarray(leaf)).all():
            raise FedraxError(
                f"{type(algorithm).__name__}.init returns a state whose {name or 'array'} is not finite, but non-finite"
                " entries mean divergence: start with jnp.finfo(x.dtype).max, or mark unknown entries in another field"
            )


def checked_message(algorithm: Any, p: int, message: Tree) -> Tree:
    """The broadcast message of phase ``p`` as arrays."""
    if holds_vectors(message):
        raise FedraxError(f"{type(algorithm).__name__} broadcasts ServerVectors: send arrays computed from them")
    return _arrays(_where(algorithm, p, "broadcast"), "message", message)


def checked_output(algorithm: Any, p: int, output: Any) -> Any:
    """The output of a client in phase ``p``, checked to be a ClientOutput of arrays."""
    from fedrax.contract.algorithm import ClientOutput

    where = _where(algorithm, p, "client")
    if not isinstance(output, ClientOutput):
        raise FedraxError(f"{where} returns {kind(output)} instead of a ClientOutput: write ClientOutput(upload=...)")
    if output.upload is None:
        raise FedraxError(f"{where} uploads nothing: write ClientOutput(upload=()) for an empty upload")
    info = _numbers(where, output.info)
    if any(is_table(part) for part in jax.tree.leaves((output.upload, output.each, output.total), is_leaf=is_table)):
        raise FedraxError(f"{where} uploads a VectorTable: send its rows")
    output = output._replace(info=info)
    return ClientOutput(*(_arrays(where, field, part) for field, part in output._asdict().items()))


def _state_arrays(where: str, state: Tree) -> Tree:
    """A state as arrays, without random keys, which cannot be written to disk."""
    state = _arrays(where, "state", state)
    if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(state)):
        raise FedraxError(
            f"{where} returns a random key in its state: keep its numbers, jax.random.key_data(key), and make a key of"
            " them where it is used, jax.random.wrap_key_data(numbers)"
        )
    return state


def _arrays(where: str, what: str, values: Tree) -> Tree:
    fits = lambda leaf: is_vectors(leaf) or (hasattr(leaf, "dtype") and not isinstance(leaf, _NUMPY_TYPES))  # noqa: E731
    try:
        return jax.tree.map(lambda leaf: leaf if fits(leaf) else jnp.asarray(leaf), values, is_leaf=is_vectors)
    except (TypeError, ValueError) as error:
        raise FedraxError(f"{where} returns in its {what} something other than arrays: {error}") from error


def _numbers(where: str, info: Any) -> dict:
    if not isinstance(info, dict):
        raise FedraxError(f"{where} gives the info {kind(info)}: a dictionary of numbers is needed")
    info = {name: _arrays(where, "info", value) for name, value in info.items()}
    for name, value in info.items():
        if not isinstance(name, str) or name in _EVENT_FIELDS or name.startswith(_EVENT_PREFIXES):
            raise FedraxError(f"{where} gives the info {name!r}, a name that is reserved for events: choose another")
        if not hasattr(value, "dtype") or jnp.ndim(value):
            shape = f"of shape {jnp.shape(value)}" if hasattr(value, "dtype") else kind(value)
            raise FedraxError(f"{where} gives the info {name!r} {shape}: one number is needed")
    return info


def checked_server(algorithm: Any, p: int, returned: Any) -> tuple[Any, dict]:
    """The output of the ``server`` of phase ``p``, checked to be (state, info)."""
    where = _where(algorithm, p, "server")
    pair = isinstance(returned, tuple) and not hasattr(returned, "_fields") and len(returned) == 2
    if not pair or not isinstance(returned[1], dict):
        found = kind(returned)
        raise FedraxError(f"{where} returns {found} instead of a state and its info: write (state, {{}})")
    return _arrays(where, "state", returned[0]), _numbers(where, returned[1])


def checked_state(algorithm: Any, before: Tree, after: Tree) -> None:
    """Raise FedraxError if a client state has other shapes or dtypes than that of ``init_client``."""
    from fedrax.contract.algorithm import Algorithm

    where = _where(algorithm, len(algorithm.phases) - 1, "client")
    if not jax.tree.leaves(before) and jax.tree.leaves(after):
        if type(algorithm).init_client is Algorithm.init_client:
            raise FedraxError(f"{where} returns a state, but no client has one: define init_client(params)")
        raise FedraxError(
            f"{where} returns a state, but init_client's holds no numbers: give it arrays in place of None, such"
            " as tree.zeros_like(params)"
        )
    if jax.tree.leaves(before) and not jax.tree.leaves(after):
        raise FedraxError(f"{where} returns no state, but init_client makes one: pass state= to ClientOutput")
    what = f"the state that {where} returns"
    _same(what, after, before, "init_client makes it")
    _same_types(what, after, before, "init_client makes it")


def checked_round(algorithm: Any, before: Any, after: Any) -> None:
    """Raise FedraxError if a round changes shapes or dtypes of the server state."""
    what = f"the state that {_where(algorithm, len(algorithm.phases) - 1, 'server')} returns"
    _same(what, after, before, "before the round it was")
    _same_types(what, after, before, "before the round it was")


def _same_types(what: str, have: Tree, need: Tree, verb: str) -> None:
    """Raise FedraxError if a dtype differs: values would be rounded, or the round recompiled."""
    types = lambda t: dict(zip(tree.leaf_names(t), [x.dtype for x in jax.tree.leaves(t)], strict=True))  # noqa: E731
    old, new = types(need), types(have)
    for leaf in old:
        if old[leaf] != new[leaf]:
            raise FedraxError(
                f"{what} has {leaf or 'its array'} of type {new[leaf]}, but {verb} {old[leaf]}:"
                " write .astype(...), or use fedrax.tree"
            )


def _same(what: str, have: Tree, need: Tree, verb: str) -> None:
    """Raise FedraxError unless ``have`` has the names and shapes of ``need``; tables may be exchanged."""
    shapes = lambda t: dict(zip(tree.leaf_names(t), map(jnp.shape, jax.tree.leaves(t)), strict=True))  # noqa: E731
    wanted, found = shapes(need), shapes(have)
    for leaf in [*wanted, *found]:
        if wanted.get(leaf) != found.get(leaf):
            theirs, ours = (f"of shape {s[leaf]}" if leaf in s else "not there" for s in (wanted, found))
            raise FedraxError(f"{what}: {leaf or 'its array'} is {ours}, but {verb} {theirs}")
    if jax.tree.structure(need, is_leaf=is_table) != jax.tree.structure(have, is_leaf=is_table):
        raise FedraxError(f"{what} has another tree structure: use the same NamedTuple")


def kind(value: Any) -> str:
    """A description of a returned value for messages: "nothing", or its type."""
    return "nothing" if value is None else f"a {type(value).__name__}"
