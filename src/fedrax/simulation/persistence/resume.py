"""Saving and restoring the state of a run: checkpoints, resume, and the state that a failed run leaves."""

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
from fedrax.simulation.executors.compiled import RoundState
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE
from fedrax.simulation.persistence.run_identity import difference
from fedrax.simulation.placement.client_states import ShardedRows, restore_rows, row_moves
from fedrax.simulation.placement.streaming import BlockLoader
from fedrax.simulation.results.events import Event, digest_of, events_until, read_events, rounds_done
from fedrax.simulation.setup import Setup
from fedrax.tree import Tree
from fedrax.xla import run_cached


class RunStart(NamedTuple):
    """The state a run starts from: fresh, or restored from a checkpoint."""

    carry: RoundState
    """Server state, running statistics and client states on the devices."""
    events: list[Event]
    """The events of the rounds already done."""
    has_clients: bool = True
    """Whether client states are present: a finished run may have been saved without them (``keep_clients=False``)."""
    spent: bool = False
    """Whether the run was ended by its privacy budget."""


class RunState(NamedTuple):
    """The arrays of a run's checkpoint."""

    server: Any
    """The algorithm's server state."""
    statistics: Tree
    """The model's running statistics."""
    store: Tree
    """Client states, [rows, ...]."""
    owners: Any
    """int32 [rows]; the client of each row, -1 for unused rows."""
    ledger: Any = ()
    """int32 [N]; rounds in which each client participated, for private runs."""
    participation: Any = ()
    """State of an adaptive participation policy."""


def start_run(setup: Setup, storage: BlockLoader, ledger: Ledger | None, resume: bool) -> RunStart:
    """The state before the first round or, with ``resume``, at the last checkpoint of the directory if there is one.

    The ``ledger`` is restored with it.
    """
    if not resume or setup.run_directory is None:
        return RunStart(initial_state(setup, storage), [])
    start = _restored(setup, storage, ledger)
    done = np.int32(rounds_done(start.events))
    if not setup.alone and len(np.unique(multihost_utils.process_allgather(done))) > 1:
        raise FedraxError(
            f"the processes of this run find different checkpoints in {setup.run_directory}: resume from a directory"
            " on a file system that all of them share"
        )
    return start


def check_can_continue(setup: Setup, start: RunStart) -> None:
    """Raise FedraxError where more rounds are asked of a run that was saved without its client states."""
    if not start.has_clients:
        raise FedraxError(
            f"the finished run in {setup.run_directory} was saved without client states and cannot be continued: run it"
            " again in another directory with keep_clients=True"
        )


def initial_state(setup: Setup, storage: BlockLoader) -> RoundState:
    """The state before the first round."""
    server = run_cached(lambda params: setup.algorithm.init(params, setup.info.num_clients), setup.params)
    require_finite_start(setup.algorithm, server)
    carry, store = setup.engine.put(server, setup.statistics, ()), setup.initial
    if setup.stateful:
        away = storage.spill is not None
        store = () if away else setup.engine.new_store(setup.initial, setup.planner.capacity)
    return carry._replace(store=store)  # the store has no other owner: no copy is needed


def _restored(setup: Setup, storage: BlockLoader, ledger: Ledger | None) -> RunStart:
    """The state at the last checkpoint, or a fresh one; adds the remedy to the error of a damaged checkpoint."""
    assert setup.run_directory is not None
    where = setup.run_directory / CHECKPOINT
    if not checkpoint.exists(where):
        return RunStart(initial_state(setup, storage), [])
    try:
        return _at_checkpoint(setup, storage, where, ledger)
    except checkpoint.DamagedCheckpointError as error:
        raise FedraxError(f"{error}; {_damage_remedy(setup.run_directory)}") from error


def _damage_remedy(directory: Path) -> str:
    """What to do about a damaged checkpoint."""
    try:
        done = checkpoint.verify(directory / CHECKPOINT / checkpoint.PREVIOUS).get("round")
    except FedraxError:
        return f"see what is left: fedrax doctor {directory}"
    return f"the previous one, of round {done}, is intact; restore it with: fedrax doctor {directory} --repair"


def _at_checkpoint(setup: Setup, storage: BlockLoader, where: Path, ledger: Ledger | None) -> RunStart:
    """Load a checkpoint and check that it belongs to this run and to the events beside it."""
    assert setup.run_directory is not None
    if not (where / checkpoint.FILE).is_file():
        raise checkpoint.DamagedCheckpointError(f"the checkpoint {where / checkpoint.FILE} is missing or no file")
    meta = _checked_meta(setup, where)
    done, rounds = round_of(meta, where), setup.settings.rounds
    if done > rounds:
        raise FedraxError(
            f"{setup.run_directory} is at round {done}, beyond rounds = {rounds}: set rounds to {done} or more, or"
            " choose another directory"
        )
    like = jax.eval_shape(lambda: _like(setup, meta["rows"], ledger))
    saved = checkpoint.load(where, like, in_pieces="store" if setup.stateful else None)[0]
    events = read_events(setup.run_directory)
    if rounds_done(events) < done:
        raise FedraxError(
            f"{setup.run_directory} has the events of {rounds_done(events)} rounds, fewer than its checkpoint's {done}:"
            f" see fedrax doctor {setup.run_directory}"
        )
    if digest_of(events_until(events, done)) != meta.get("events"):
        raise FedraxError(
            f"the events of {setup.run_directory} were changed after its checkpoint was written: see fedrax doctor"
            f" {setup.run_directory}"
        )
    if ledger is not None:
        ledger.restore(saved.ledger, done)
    if setup.planner.sampler.adaptive:
        setup.planner.sampler.restore(saved.participation, done)
    has_clients = not setup.stateful or meta["rows"] > 0
    store = _stored(setup, storage, saved) if has_clients else ()
    carry = setup.engine.put(saved.server, saved.statistics, ())._replace(store=store)
    return RunStart(carry, events_until(events, done), has_clients, meta.get("stopped") == "budget")


def check_identity(setup: Setup) -> None:
    """Raise FedraxError unless the run in the directory has the identity of this one.

    The identity is that of its checkpoint, or of the state that a failed run left.
    """
    assert setup.run_directory is not None
    there = [name for name in (CHECKPOINT, FAILURE) if checkpoint.exists(setup.run_directory / name)]
    if not there:
        raise FedraxError(
            f"{setup.run_directory} has no checkpoint, so its experiment is unknown: choose another directory"
        )
    for name in there:
        _checked_meta(setup, setup.run_directory / name)


def _checked_meta(setup: Setup, where: Path) -> dict[str, Any]:
    """The metadata of a checkpoint; raises FedraxError where its identity is not that of this run."""
    meta = checkpoint.load_meta(where)
    assert setup.identity is not None
    if (differs := difference(meta.get("identity"), setup.identity)) is not None:
        raise FedraxError(
            f"the checkpoint in {setup.run_directory} belongs to another experiment: {differs}; restore what was"
            " changed, or choose another directory"
        )
    return meta


def round_of(meta: dict[str, Any], where: Path) -> int:
    """The round after which a checkpoint was written, from its metadata, which is checked."""
    counts = [meta.get(key) for key in ("round", "rows")]
    if any(not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < 2**31 for n in counts):
        raise checkpoint.damaged(where / checkpoint.FILE, ValueError("its metadata has no round or no rows"))
    return meta["round"]


def _like(setup: Setup, rows: int, ledger: Ledger | None) -> RunState:
    """A state of the shapes and dtypes that a checkpoint of this run must have."""
    server = setup.algorithm.init(tree.rebuilt(setup.params), setup.info.num_clients)
    repeat = lambda a: jnp.broadcast_to(a, (rows, *a.shape))  # noqa: E731
    counts = () if ledger is None else jnp.asarray(ledger.counts)
    store, owners = jax.tree.map(repeat, setup.initial), jnp.zeros(rows, jnp.int32)
    return RunState(server, setup.statistics, store, owners, counts, _policy_state(setup))


def _policy_state(setup: Setup) -> Tree:
    """The state of an adaptive participation policy; empty for others."""
    sampler = setup.planner.sampler
    return sampler.state if sampler.adaptive else ()


def _stored(setup: Setup, storage: BlockLoader, saved: RunState) -> Tree:
    """Client states from a checkpoint where this run keeps them: on the devices, or spilled to disk."""
    owners = setup.planner.owners()
    if storage.spill is None:
        return restore_rows(saved.store, saved.owners, owners, setup.initial, setup.engine.mesh)
    storage.spill.fill(saved.store, *row_moves(saved.owners, owners))
    return ()


def save(
    setup: Setup,
    storage: BlockLoader,
    name: str,
    carry: RoundState,
    done: int,
    clients: bool = True,
    ledger: Ledger | None = None,
    **more: str,
) -> None:
    """Write the state after ``done`` rounds, if the run has a directory.

    Args:
        setup: the run's setup.
        storage: where client states are.
        name: folder in the run's directory, ``CHECKPOINT`` or ``FAILURE``.
        carry: the state on the devices.
        done: rounds done.
        clients: write client states too.
        ledger: the privacy ledger of a private run.
        **more: more entries of the metadata.
    """
    if setup.directory is None:
        return
    owners, store = setup.planner.owners(), storage.store(carry)
    store = jax.tree.map(lambda a: ShardedRows(a) if isinstance(a, jax.Array) else a, store)
    if not clients:
        owners, store = owners[:0], jax.tree.map(lambda a: np.zeros((0, *a.shape[1:]), a.dtype), store)
    meta = {"round": done, "rows": len(owners), "identity": setup.identity, "algorithm": setup.info.algorithm}
    counts = () if ledger is None else ledger.counts
    saved = RunState(setup.engine.whole_server(carry), carry.statistics, store, owners, counts, _policy_state(setup))
    checkpoint.save(setup.directory / name, saved, meta | more, keep_previous=clients)
