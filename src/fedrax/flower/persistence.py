"""What outlives a run of Flower: a client's memory in a folder of its own, and the server's state."""

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
from fedrax.simulation.results.events import Event, digest_of, read_events
from fedrax.tree import Tree


@contextmanager
def open_client_state(directory: Path | None, state: RecordDict) -> Iterator[RecordDict]:
    """A client's memory: ``state``, Flower's own, or what lies in a folder, which is written when the work is done."""
    if directory is None:
        yield state
        return
    memory = _read(directory)
    yield memory
    arrays = {name: dict(record) for name, record in memory.items() if isinstance(record, ArrayRecord)}
    facts = {name: dict(record) for name, record in memory.items() if isinstance(record, ConfigRecord)}
    described = {
        name: {k: [a.dtype, list(a.shape), a.stype, len(a.data)] for k, a in arrays[name].items()} for name in arrays
    }
    numbers = [np.frombuffer(array.data, np.uint8) for record in arrays.values() for array in record.values()]
    checkpoint.save(directory, numbers, {"arrays": described, "facts": facts}, keep_previous=False)


def _described(array: Array) -> list[Any]:
    return [array.dtype, list(array.shape), array.stype, len(array.data)]


def _read(directory: Path) -> RecordDict:
    memory = RecordDict()
    if not checkpoint.exists(directory):
        return memory
    meta = checkpoint.load_meta(directory)
    try:
        described = {name: {k: tuple(v) for k, v in record.items()} for name, record in meta["arrays"].items()}
        sizes = [size for record in described.values() for *_, size in record.values()]
        numbers = iter(checkpoint.load(directory, [jax.ShapeDtypeStruct((size,), np.uint8) for size in sizes])[0])
        for name, record in described.items():
            made = {
                k: Array(kind, tuple(shape), how, next(numbers).tobytes())
                for k, (kind, shape, how, _) in record.items()
            }
            memory[name] = ArrayRecord(made)
        for name, facts in meta["facts"].items():
            memory[name] = ConfigRecord(facts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FedraxError(f"{directory} holds no memory of a client: {error}") from error
    return memory


class ServerCheckpoint(NamedTuple):
    """What a server's checkpoint holds."""

    server: Any
    statistics: Tree
    start: Tree
    """The starting parameters and statistics, which clients may need that come later."""
    counted: Any
    """int32 [N]; the last round of each client that was made use of, -1: none."""
    spent: Any
    """int32 [N]; how often each client was asked, of a private run; else an empty tuple."""


def save(directory: Path, state: ServerCheckpoint, known_by: dict[str, str], events: list[Event]) -> None:
    """Write the server's state after its last round, and by what it is known."""
    meta = {"round": len(events), "identity": known_by, "events": digest_of(events)}
    checkpoint.save(directory / CHECKPOINT, state, meta)


def restored(
    directory: Path, like: ServerCheckpoint, known_by: dict[str, str]
) -> tuple[ServerCheckpoint, list[Event]] | None:
    """The state that a directory holds and the events up to it; None where it holds none."""
    where = directory / CHECKPOINT
    if not checkpoint.exists(where):
        return None
    meta = checkpoint.load_meta(where)
    before = meta.get("identity")
    other = [name for name in known_by if not isinstance(before, dict) or before.get(name) != known_by[name]]
    if other:
        raise FedraxError(f"the checkpoint in {directory} belongs to another run: its {other[0]} is another")
    state, meta = checkpoint.load(where, like)
    events, done = read_events(directory), meta.get("round")
    if type(done) is not int or len(events) < done or digest_of(events[:done]) != meta.get("events"):
        raise FedraxError(f"the events of {directory} are not those that its checkpoint was written after")
    return state, events[:done]
