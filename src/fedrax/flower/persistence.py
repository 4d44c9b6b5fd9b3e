"""Persistence of a federation: client states in the clients' directories, and the server's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedrax.errors import FedraxError
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.run_directory import CHECKPOINT
from fedrax.simulation.persistence.run_identity import difference
from fedrax.simulation.results.events import Event, digest_of, events_until, read_events, rounds_done
from fedrax.tree import Tree


@contextmanager
def open_client_state(directory: Path | None, state: RecordDict) -> Iterator[RecordDict]:
    """The client state in ``directory``, which is written at exit; without one, ``state`` of Flower's Context."""
    if directory is None:
        yield state
        return
    records = _read(directory)
    yield records
    arrays = {name: dict(record) for name, record in records.items() if isinstance(record, ArrayRecord)}
    facts = {name: dict(record) for name, record in records.items() if isinstance(record, ConfigRecord)}
    described = {
        name: {k: [a.dtype, list(a.shape), a.stype, len(a.data)] for k, a in arrays[name].items()} for name in arrays
    }
    data = [np.frombuffer(array.data, np.uint8) for record in arrays.values() for array in record.values()]
    checkpoint.save(directory, data, {"arrays": described, "facts": facts}, keep_previous=False)


def _read(directory: Path) -> RecordDict:
    """The records that a directory holds; empty without a checkpoint."""
    records = RecordDict()
    if not checkpoint.exists(directory):
        return records
    meta = checkpoint.load_meta(directory)
    try:
        described = {name: {k: tuple(v) for k, v in record.items()} for name, record in meta["arrays"].items()}
        sizes = [size for record in described.values() for *_, size in record.values()]
        data = iter(checkpoint.load(directory, [jax.ShapeDtypeStruct((size,), np.uint8) for size in sizes])[0])
        for name, record in described.items():
            arrays = {
                k: Array(dtype, tuple(shape), stype, next(data).tobytes())
                for k, (dtype, shape, stype, _) in record.items()
            }
            records[name] = ArrayRecord(arrays)
        for name, facts in meta["facts"].items():
            records[name] = ConfigRecord(facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FedraxError(f"the checkpoint in {directory} is not a client state: {error}") from error
    return records


class ServerCheckpoint(NamedTuple):
    """Content of a server's checkpoint."""

    server: Any
    """Server state."""
    statistics: Tree
    """The model's running statistics."""
    start: Tree
    """Starting parameters and statistics, for clients that are sampled for the first time later."""
    last_aggregated: Any
    """int32 [N]; the last round whose upload of each client was aggregated, -1 for none."""
    spent: Any
    """int32 [N]; each client's participations in a private run; otherwise an empty tuple."""
    participation: Any = ()
    """State of an adaptive participation policy."""


def save_checkpoint(folder: Path, state: ServerCheckpoint, meta: dict[str, Any], events: list[Event]) -> None:
    """Write a checkpoint after the last round of ``events``, with metadata such as the identity of the run."""
    done = rounds_done(events)
    about = {"round": done, "rows": 0, "events": digest_of(events)}  # no rows: clients store their states
    checkpoint.save(folder, state, about | meta)


def load_checkpoint(
    directory: Path, like: ServerCheckpoint, identity: dict[str, str]
) -> tuple[ServerCheckpoint, list[Event]] | None:
    """The checkpoint in a directory and the events before it; None if there is none.

    Raises FedraxError if ``identity`` or the events differ from those that it was written with.
    """
    where = directory / CHECKPOINT
    if not checkpoint.exists(where):
        return None
    meta = checkpoint.load_meta(where)
    if differs := difference(meta.get("identity"), identity):
        raise FedraxError(f"the checkpoint in {directory} belongs to another run: {differs}")
    state, meta = checkpoint.load(where, like)
    events, done = read_events(directory), meta.get("round")
    before = events_until(events, done) if type(done) is int and done <= rounds_done(events) else None
    if before is None or digest_of(before) != meta.get("events"):
        raise FedraxError(f"the checkpoint in {directory} does not fit the events there: one of them was changed")
    return state, before
