"""What a run reports: one event a round, as a line of JSON in ``events.jsonl`` and to any sink.

Keys that hold times begin with ``seconds``, which leave compilation out; all others are the same in every run of one
experiment and seed.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedrax.errors import FedraxError
from fedrax.files import open_to_append, reading, replacing

Event = dict[str, Any]
FILE = "events.jsonl"
MAX_BYTES = 2 << 30
"""Bytes of a file of events: millions of rounds."""
_LINE = 1 << 20
_LARGEST = 1 << 63
_COUNTED = ("clients", "bytes_down", "bytes_up", "gradients")
_HIDDEN = ("sound", "bad")
"""Of a round's record: what the simulator asks, not people."""
_BOUNDS = ("epsilon", "epsilon_paper")
"""Of private runs; null where nothing bounds what was spent."""


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first round."""

    algorithm: str
    plan: str
    """The execution plan in words."""
    rounds: int
    first_round: int
    """Rounds already done, when resumed."""
    cohort_size: int
    num_clients: int
    bytes_down: int
    """Bytes to each client of the cohort in a round."""
    bytes_up: int
    """Bytes from each client of the cohort in a round."""
    parameters: int
    """Numbers in the model."""
    directory: Path | None = None
    clock: np.ndarray | None = None
    """Simulated seconds at which each round ends, [rounds], where a trace says how long clients take."""
    loss: str = "train_loss"
    """What events call the loss along a round's local steps: ``local_loss`` where the one over all training samples is
    evaluated, and called ``train_loss``."""


class Sink(Protocol):
    """Anything that wants to see a run: a progress bar, TensorBoard, a file."""

    def start(self, run: RunInfo) -> None:
        """Before the first round."""

    def event(self, event: Event) -> None:
        """After each round, in order."""

    def finish(self, result: Any | None) -> None:
        """At the end, with the result, or None when interrupted or failed."""


class EventFile:
    """Appends events to ``events.jsonl``, handed to the operating system at once."""

    def __init__(self, directory: Path, keep: list[Event]):
        """Start the file with the events ``keep``; what a killed run wrote after its checkpoint is dropped."""
        self.path, self._hash = directory / FILE, _hash_of(keep)
        with replacing(self.path) as file:
            file.write("".join(line(event) for event in keep).encode())
        try:
            self._file = open_to_append(self.path)
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

    def append(self, events: list[Event]) -> None:
        """Write events and hand them to the operating system."""
        for event in events:
            self._hash.update(_without_times(event))
        try:
            self._file.write("".join(line(event) for event in events))
            self._file.flush()
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

    def digest(self) -> str:
        """Of all events so far, but for their times: a checkpoint knows by it those that it belongs to."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Wait until all events are on disk: a checkpoint must not outlive the events before it."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # of a disk that ``append`` has reported as full
            self._file.close()


def line(event: Event) -> str:
    """An event as a line of JSON."""
    return json.dumps(event) + "\n"


def digest_of(events: Sequence[Event]) -> str:
    """What ``EventFile.digest`` is after these events."""
    return _hash_of(events).hexdigest()


def _hash_of(events: Sequence[Event]) -> Any:
    made = hashlib.blake2b(digest_size=16)
    for event in events:
        made.update(_without_times(event))
    return made


def _without_times(event: Event) -> bytes:
    return line({key: value for key, value in event.items() if not key.startswith("seconds")}).encode()


def read_events(directory: Path) -> list[Event]:
    """The events of a run directory; an unfinished last line, as a crash leaves it, is passed over."""
    events, wrong = read_whole_events(directory)
    if wrong is not None:
        raise FedraxError(f"{directory / FILE}, line {len(events) + 1}, is not an event: {wrong}")
    return events


def read_whole_events(directory: Path) -> tuple[list[Event], str | None]:
    """The events up to the first line that is none, and what is wrong with that one (None: nothing)."""
    events: list[Event] = []
    try:
        with reading(directory / FILE, MAX_BYTES) as file:
            while (text := file.readline(_LINE)).endswith(b"\n"):
                try:
                    events.append(_event(text, len(events) + 1))
                except (ValueError, RecursionError) as error:
                    return events, str(error)
    except OSError as error:
        raise FedraxError(f"cannot read the events of {directory}: {error}") from error
    return events, "it is too long" if len(text) == _LINE else None


def _event(text: bytes, number: int) -> Event:
    """The event of round ``number`` in a line of JSON; ValueError for anything else."""
    event = json.loads(text.decode())
    if not isinstance(event, dict) or event.get("round") != number:
        raise ValueError("not the event of the round that belongs here")
    for key in ("round", *_COUNTED, "seconds"):
        if key not in event:
            raise ValueError(f"it has no {key!r}")
    for key, value in event.items():
        if value is None and key in _BOUNDS:
            continue
        kinds = int if key in ("round", *_COUNTED) else (int, float)
        wrong = not isinstance(value, kinds) or isinstance(value, bool)
        wrong = wrong or (isinstance(value, int) and abs(value) >= _LARGEST)
        if value is None or wrong or (key in (*_COUNTED, "seconds") and not 0 <= value < math.inf):
            raise ValueError(f"{key!r} is {value!r:.40}")
    return event


def holds(event: Event, name: str) -> bool:
    """Whether an event has a finite number of that name."""
    value = event.get(name)
    return value is not None and math.isfinite(value)


def events_of(info: RunInfo, records: dict, count: np.ndarray, events: list[Event], seconds: float) -> list[Event]:
    """The events of a block after ``events``; counts and seconds are cumulative. ``count`` [B, D]: clients a round.

    What is not finite is left out: JSON has no word for it.
    """
    rounds = len(records["sound"])
    last = events[-1] if events else {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "seconds": 0.0}
    down, up, gradients = last["bytes_down"], last["bytes_up"], last["gradients"]
    new = []
    for r in range(rounds):
        clients = int(count[r].sum())
        down, up = down + clients * info.bytes_down, up + clients * info.bytes_up
        said = {k: value for k, v in records.items() if k not in _HIDDEN and math.isfinite(value := float(v[r]))}
        gradients, loss = gradients + round(said.pop("gradients", 0.0)), said.pop("loss", None)
        event: Event = {"round": len(events) + r + 1}
        if loss is not None and clients:  # of a Poisson cohort nobody may be there to ask
            event[info.loss] = loss
        event |= {"clients": clients, "bytes_down": down, "bytes_up": up, "gradients": gradients} | said
        if info.clock is not None:
            event["clock"] = float(info.clock[len(events) + r])
        event["seconds"] = round_seconds(events, seconds * (r + 1) / rounds)
        new.append(event)
    return new


def report(new: list[Event], events: list[Event], log: EventFile | None, sinks: Sequence[Sink]) -> None:
    """Add ``new`` events to ``events`` and tell everybody."""
    events.extend(new)
    if log is not None:
        log.append(new)
    for event in new:
        for sink in sinks:
            sink.event(event)


def round_seconds(events: list[Event], more: float) -> float:
    """Cumulative seconds, to the microsecond."""
    return round((events[-1]["seconds"] if events else 0.0) + more, 6)
