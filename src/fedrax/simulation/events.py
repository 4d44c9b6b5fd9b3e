"""What a run reports: one event a round, as a line of JSON in ``events.jsonl`` and to any sink.

Keys that hold times begin with ``seconds``, which leave compilation out; all others are the same in every run of one
experiment and seed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedrax.errors import FedraxError
from fedrax.files import open_to_append, replacing

Event = dict[str, Any]
FILE = "events.jsonl"
_HIDDEN = ("sound", "bad")
"""Of a round's record: what the simulator asks, not people."""


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
        self.path = directory / FILE
        with replacing(self.path) as file:
            file.write("".join(line(event) for event in keep).encode())
        try:
            self._file = open_to_append(self.path)
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

    def append(self, events: list[Event]) -> None:
        """Write events and hand them to the operating system."""
        try:
            self._file.write("".join(line(event) for event in events))
            self._file.flush()
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

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


def read_events(directory: Path) -> list[Event]:
    """The events of a run directory; an unfinished last line, as a crash leaves it, is passed over."""
    path, events = directory / FILE, []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FedraxError(f"cannot read the events of {directory}: {error}") from error
    for number, text in enumerate(lines[:-1], 1):
        try:
            event = json.loads(text)
            if not isinstance(event, dict) or event.get("round") != number:
                raise ValueError("not the event of the round that belongs here")
        except ValueError as error:
            raise FedraxError(f"{path}, line {number}, is not an event: {error}") from error
        events.append(event)
    return events


def events_of(info: RunInfo, records: dict, count: np.ndarray, events: list[Event], seconds: float) -> list[Event]:
    """The events of a block after ``events``; counts and seconds are cumulative. ``count`` [B, D]: clients a round."""
    rounds = len(records["sound"])
    last = events[-1] if events else {"bytes_down": 0, "bytes_up": 0, "gradients": 0, "seconds": 0.0}
    down, up, gradients = last["bytes_down"], last["bytes_up"], last["gradients"]
    new = []
    for r in range(rounds):
        clients = int(count[r].sum())
        down, up = down + clients * info.bytes_down, up + clients * info.bytes_up
        gradients += round(float(records["gradients"][r]))
        event: Event = {"round": len(events) + r + 1}
        if "loss" in records:
            event["train_loss"] = float(records["loss"][r])
        event |= {"clients": clients, "bytes_down": down, "bytes_up": up, "gradients": gradients}
        event |= {k: float(v[r]) for k, v in records.items() if k not in (*_HIDDEN, "loss", "gradients")}
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
