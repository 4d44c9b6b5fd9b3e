"""A run's state to disk and back: checkpoints, resume, and what a failed run leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fedrax import tree
from fedrax.contract.checks import require_finite_start
from fedrax.errors import FedraxError
from fedrax.privacy.ledger import Ledger
from fedrax.simulation.executors.compiled import Carry
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.persistence.run_identity import difference
from fedrax.simulation.placement.client_states import Shards, moves, rehoused
from fedrax.simulation.placement.streaming import Storage
from fedrax.simulation.results.events import Event, digest_of, read_events
from fedrax.simulation.setup import Setup
from fedrax.tree import Tree
from fedrax.xla import run_cached


class RunStart(NamedTuple):
    """Where a run begins: the state, and what went before."""

    carry: Carry
    events: list[Event]
    has_clients: bool = True
    """Whether the state holds what clients keep: a finished run may have kept none of it."""
    spent: bool = False
    """Whether the privacy budget has ended the run."""


class RunState(NamedTuple):
    """What a checkpoint holds: the state, and which client each row of the store belongs to (-1: none)."""

    server: Any
    statistics: Tree
    store: Tree
    owners: Any
    ledger: Any = ()
    """How often each client took part, of a private run."""
    participation: Any = ()
    """The state of an adaptive participation policy."""


def begin(setup: Setup, storage: Storage, ledger: Ledger | None, resume: bool) -> RunStart:
    """The run before its first round or, to ``resume`` it, at the last checkpoint of its directory, if there is one.

    The ``ledger`` is set to what that holds.
    """
    if not resume or setup.kept_in is None:
        return RunStart(fresh(setup, storage), [])
    begun = _restored(setup, storage, ledger)
    done = np.int32(len(begun.events))
    if not setup.alone and len(np.unique(multihost_utils.process_allgather(done))) > 1:
        raise FedraxError(f"{setup.kept_in} is not alike to all processes: resume from a directory that all can read")
    return begun


def check_goes_on(setup: Setup, begun: RunStart) -> None:
    """FedraxError where a run that is not over has lost what its clients kept."""
    if not begun.has_clients:
        raise FedraxError(
            f"the finished run in {setup.kept_in} kept no client states: it cannot go on; run it anew in another"
            " directory, with keep_clients=True"
        )


def fresh(setup: Setup, storage: Storage) -> Carry:
    """The state before the first round."""
    server = run_cached(lambda params: setup.algorithm.init(params, setup.info.num_clients), setup.params)
    require_finite_start(setup.algorithm, server)
    carry, store = setup.engine.put(server, setup.statistics, ()), setup.initial
    if setup.stateful:
        away = storage.spill is not None
        store = () if away else setup.engine.new_store(setup.initial, setup.planner.capacity)
    return carry._replace(store=store)  # the store is nobody else's: no copy


def _restored(setup: Setup, storage: Storage, ledger: Ledger | None) -> RunStart:
    assert setup.kept_in is not None
    where = setup.kept_in / CHECKPOINT
    if not checkpoint.exists(where):
        return RunStart(fresh(setup, storage), [])
    try:
        return _at_checkpoint(setup, storage, where, ledger)
    except checkpoint.DamagedCheckpointError as error:
        raise FedraxError(f"{error}; {_what_helps(setup.kept_in)}") from error


def _what_helps(directory: Path) -> str:
    """What to do about a damaged checkpoint."""
    try:
        done = checkpoint.verify(directory / CHECKPOINT / checkpoint.PREVIOUS).get("round")
    except FedraxError:
        return f"see what is left: fedrax doctor {directory}"
    return f"the one before it, of round {done}, is whole; go back to it with: fedrax doctor {directory} --save"


def _at_checkpoint(setup: Setup, storage: Storage, where: Path, ledger: Ledger | None) -> RunStart:
    assert setup.kept_in is not None
    if not (where / checkpoint.FILE).is_file():
        raise checkpoint.DamagedCheckpointError(f"the checkpoint {where / checkpoint.FILE} is missing or no file")
    meta = _known_again(setup, where)
    done, rounds = round_of(meta, where), setup.settings.rounds
    if done > rounds:
        raise FedraxError(f"{setup.kept_in} is at round {done}, beyond the {rounds} asked for")
    like = jax.eval_shape(lambda: _like(setup, meta["rows"], ledger))
    saved = checkpoint.load(where, like, in_pieces="store" if setup.stateful else None)[0]
    events = read_events(setup.kept_in)
    if len(events) < done:
        raise FedraxError(f"{setup.kept_in} has {len(events)} events, fewer than its checkpoint's {done}")
    if digest_of(events[:done]) != meta.get("events"):
        raise FedraxError(
            f"the events of {setup.kept_in} are not those that its checkpoint was written after: what they say was"
            f" changed; see fedrax doctor {setup.kept_in}"
        )
    if ledger is not None:
        ledger.restore(saved.ledger, done)
    if setup.planner.sampler.adaptive:
        setup.planner.sampler.restore(saved.participation, done)
    has_clients = not setup.stateful or meta["rows"] > 0
    store = _stored(setup, storage, saved) if has_clients else ()
    carry = setup.engine.put(saved.server, saved.statistics, ())._replace(store=store)
    return RunStart(carry, events[:done], has_clients, meta.get("stopped") == "budget")


def check_kept(setup: Setup) -> None:
    """FedraxError unless what the run's directory holds was computed from the same as this run would be.

    It is known by its checkpoint, or by the state that a failure has left.
    """
    assert setup.kept_in is not None
    there = [name for name in (CHECKPOINT, FAILURE) if checkpoint.exists(setup.kept_in / name)]
    if not there:
        raise FedraxError(f"{setup.kept_in} has no checkpoint to be known by")
    for name in there:
        _known_again(setup, setup.kept_in / name)


def _known_again(setup: Setup, where: Path) -> dict[str, Any]:
    """The description of a checkpoint of this run."""
    meta = checkpoint.load_meta(where)
    assert setup.identity is not None
    if (differs := difference(meta.get("identity"), setup.identity)) is not None:
        raise FedraxError(f"the checkpoint in {setup.kept_in} belongs to another experiment: {differs}")
    return meta


def round_of(meta: dict[str, Any], where: Path) -> int:
    """The round after which a checkpoint was written, from its description, which is checked."""
    counts = [meta.get(key) for key in ("round", "rows")]
    if any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 2**31 for n in counts):
        raise checkpoint.damaged(where / checkpoint.FILE, ValueError("its description has no round or no rows"))
    return meta["round"]


def _like(setup: Setup, rows: int, ledger: Ledger | None) -> RunState:
    server = setup.algorithm.init(tree.rebuilt(setup.params), setup.info.num_clients)
    repeat = lambda a: jnp.broadcast_to(a, (rows, *a.shape))  # noqa: E731
    counts = () if ledger is None else jnp.asarray(ledger.counts)
    store, owners = jax.tree.map(repeat, setup.initial), jnp.zeros(rows, jnp.int32)
    return RunState(server, setup.statistics, store, owners, counts, _policy_state(setup))


def _policy_state(setup: Setup) -> Tree:
    """The state of an adaptive participation policy; empty for others."""
    sampler = setup.planner.sampler
    return sampler.state if sampler.adaptive else ()


def _stored(setup: Setup, storage: Storage, saved: RunState) -> Tree:
    owners = setup.planner.owners()
    if storage.spill is None:
        return rehoused(saved.store, saved.owners, owners, setup.initial, setup.engine.mesh)
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
    store = jax.tree.map(lambda a: Shards(a) if isinstance(a, jax.Array) else a, store)
    if not clients:
        owners, store = owners[:0], jax.tree.map(lambda a: np.zeros((0, *a.shape[1:]), a.dtype), store)
    meta = {"round": done, "rows": len(owners), "identity": setup.identity, "algorithm": setup.info.algorithm}
    counts = () if ledger is None else ledger.counts
    saved = RunState(setup.engine.whole_server(carry), carry.statistics, store, owners, counts, _policy_state(setup))
    checkpoint.save(setup.directory / name, saved, meta | more, keep_previous=clients)
