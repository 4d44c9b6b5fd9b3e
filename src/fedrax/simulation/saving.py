"""A run's state to disk and back: checkpoints, resume, and what a failed run leaves."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrax.errors import FedraxError
from fedrax.privacy.ledger import Ledger
from fedrax.simulation import checkpoint
from fedrax.simulation.directory import CHECKPOINT
from fedrax.simulation.engine import Carry
from fedrax.simulation.events import Event, read_events
from fedrax.simulation.identity import difference
from fedrax.simulation.setup import Setup
from fedrax.simulation.states import moves, rehoused
from fedrax.simulation.storage import Storage
from fedrax.tree import Tree


class Saved(NamedTuple):
    """What a checkpoint holds: the state, and which client each row of the store belongs to (-1: none)."""

    server: Any
    statistics: Tree
    store: Tree
    owners: Any
    ledger: Any = ()
    """How often each client took part, of a private run."""


def fresh(setup: Setup, storage: Storage) -> Carry:
    """The state before the first round."""
    init = jax.jit(partial(setup.algorithm.init, num_clients=setup.info.num_clients))
    carry, store = setup.engine.put(init(setup.params), setup.statistics, ()), setup.initial
    if setup.stateful:
        away = storage.spill is not None
        store = () if away else setup.engine.new_store(setup.initial, setup.planner.capacity)
    return carry._replace(store=store)  # the store is nobody else's: no copy


def restore(setup: Setup, storage: Storage, ledger: Ledger | None = None) -> tuple[Carry, list[Event]]:
    """State and events at the last checkpoint of the run's directory, or at the start if there is none.

    The ``ledger`` is set to what it holds.
    """
    assert setup.directory is not None
    where = setup.directory / CHECKPOINT
    if not checkpoint.exists(where):
        return fresh(setup, storage), []
    meta = checkpoint.load_meta(where)
    assert setup.identity is not None
    if (differs := difference(meta.get("identity"), setup.identity)) is not None:
        raise FedraxError(f"the checkpoint in {setup.directory} belongs to another experiment: {differs}")
    done, rounds = meta["round"], setup.settings.rounds
    if done > rounds:
        raise FedraxError(f"{setup.directory} is at round {done}, beyond the {rounds} asked for")
    if done < rounds and setup.stateful and not meta["rows"]:
        raise FedraxError(f"the finished run in {setup.directory} kept no client states: it cannot go on")
    like = jax.eval_shape(lambda: _like(setup, meta["rows"], ledger))
    saved = checkpoint.load(where, like, in_pieces="store" if setup.spilled else None)[0]
    events = read_events(setup.directory)
    if len(events) < done:
        raise FedraxError(f"{setup.directory} has {len(events)} events, fewer than its checkpoint's {done}")
    if ledger is not None:
        ledger.restore(saved.ledger, done)
    return setup.engine.put(saved.server, saved.statistics, _stored(setup, storage, saved)), events[:done]


def _like(setup: Setup, rows: int, ledger: Ledger | None) -> Saved:
    server = setup.algorithm.init(setup.params, setup.info.num_clients)
    repeat = lambda a: jnp.broadcast_to(a, (rows, *a.shape))  # noqa: E731
    counts = () if ledger is None else jnp.asarray(ledger.counts)
    return Saved(server, setup.statistics, jax.tree.map(repeat, setup.initial), jnp.zeros(rows, jnp.int32), counts)


def _stored(setup: Setup, storage: Storage, saved: Saved) -> Tree:
    owners = setup.planner.owners()
    if storage.spill is None:
        return rehoused(saved.store, saved.owners, owners, setup.initial)
    storage.spill.fill(saved.store, *moves(saved.owners, owners))
    return ()


def save(
    setup: Setup,
    storage: Storage,
    name: str,
    carry: Carry,
    done: int,
    clients: bool = True,
    ledger: Ledger | None = None,
    **more: str,
) -> None:
    """Write the state after ``done`` rounds to ``name`` in the run's directory, if it has one.

    clients: with what clients keep. more: what else to say of it.
    """
    if setup.directory is None:
        return
    owners, store = setup.planner.owners(), storage.store(carry)
    if not clients:
        owners, store = owners[:0], jax.tree.map(lambda a: np.zeros((0, *a.shape[1:]), a.dtype), store)
    meta = {"round": done, "rows": len(owners), "identity": setup.identity, "algorithm": setup.info.algorithm}
    counts = () if ledger is None else ledger.counts
    saved = Saved(setup.engine.whole_server(carry), carry.statistics, store, owners, counts)
    checkpoint.save(setup.directory / name, saved, meta | more)
