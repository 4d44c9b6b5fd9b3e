"""Events: one dictionary for each round, written as a line of JSON to ``events.jsonl`` and sent to every sink.

An evaluation before the first round is an event of round 0.

Keys of times begin with ``seconds`` and exclude compilation; all other values are the same in every run of one
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
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.files import atomic_write, open_regular_file, open_to_append
from fedrax.tree import Tree

if TYPE_CHECKING:
    from fedrax.contract.algorithm import Algorithm
    from fedrax.participation.cohort_sampler import CohortSampler
    from fedrax.simulation.traffic import TracedRound

Event = dict[str, Any]
FILE = "events.jsonl"
MAX_BYTES = 2 << 30
"""Most bytes of an events file that are read: millions of rounds."""
_LINE = 1 << 20
_LARGEST = 1 << 63
_COUNTED = ("clients", "bytes_down", "bytes_up", "gradients")
_HIDDEN = ("sound", "bad")
"""Values of a round's record that are internal to the simulator."""
_NULLABLE = ("epsilon", "epsilon_paper", "test_", "train_")
"""Beginnings of keys that may be null: privacy losses that are unbounded, metrics that are not defined."""


@dataclass(frozen=True)
class RunInfo:
    """Facts about a run that are known before its first round; sinks receive it.

    Example:
        >>> class Rounds:
        ...     def start(self, run): print(f"{run.algorithm}: {run.rounds} rounds")
        ...     def event(self, event): pass
        ...     def finish(self, result): pass
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> data = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, data, rounds=1, cohort_size=2, sinks=[Rounds()])
        FedAvg: 1 rounds
    """

    algorithm: str
    """Name of the algorithm's class."""
    plan: str
    """The execution plan, as text."""
    rounds: int
    """Rounds of the run."""
    first_round: int
    """Rounds already done, of a resumed run."""
    cohort_size: int
    """Clients sampled in a round."""
    num_clients: int
    """Clients of the federation."""
    bytes_down: int
    """Bytes to each client of the cohort in a round."""
    bytes_up: int
    """Bytes from each client of the cohort in a round."""
    parameters: int
    """Number of model parameters."""
    directory: Path | None = None
    """The run directory, if any."""
    clock: np.ndarray | None = None
    """Simulated seconds at which each round ends, [rounds], for participation with simulated durations."""
    loss: str = "train_loss"
    """Key of the mean loss along the local steps in events: ``local_loss`` where ``train_loss`` is the evaluated loss
    on all training samples."""
    runtime: Literal["simulation", "federation"] = "simulation"
    """Where the clients are: simulated on this machine, or nodes of a federation."""

    @classmethod
    def of(
        cls, algorithm: Algorithm, sampler: CohortSampler, traced: TracedRound, params: Tree, plan: str, **others: Any
    ) -> RunInfo:
        """The facts of a run from its parts.

        Args:
            algorithm: the method.
            sampler: the sampler of its cohorts.
            traced: its traced round.
            params: its starting parameters, or their shapes.
            plan: the execution plan, as text.
            **others: the field ``rounds``, and ``directory``, ``loss`` and ``runtime`` where they are not the defaults.

        Returns:
            The facts.
        """
        return cls(
            algorithm=type(algorithm).__name__,
            plan=plan,
            first_round=0,
            cohort_size=sampler.largest,
            num_clients=sampler.num_clients,
            bytes_down=traced.bytes_down,
            bytes_up=traced.bytes_up,
            parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
            clock=sampler.clock,
            **others,
        )


class Sink(Protocol):
    """Protocol of receivers of a run's events: progress bars, experiment trackers, files.

    Example:
        >>> class Accuracies:
        ...     def __init__(self): self.values = []
        ...     def start(self, run): pass
        ...     def event(self, event): self.values.append(event.get("test_accuracy"))
        ...     def finish(self, result): pass
        >>> sink: fedrax.simulation.Sink = Accuracies()
    """

    def start(self, run: RunInfo) -> None:
        """Called before the first round.

        Args:
            run: facts about the run.
        """

    def event(self, event: Event) -> None:
        """Called after each round, in order.

        Args:
            event: the round's event.
        """

    def finish(self, result: Any | None) -> None:
        """Called at the end of the run.

        Args:
            result: the result; None for a run that was interrupted or failed.
        """


class EventFile:
    """Appends events to ``events.jsonl``, handed to the operating system at once."""

    def __init__(self, directory: Path, keep: list[Event]):
        """Start the file with the events ``keep``: events that a killed run wrote after its checkpoint are dropped."""
        self.path, self._hash = directory / FILE, _hash_of(keep)
        with atomic_write(self.path) as file:
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
        """Digest of all events so far without their times; a checkpoint stores the digest of the events before it."""
        return self._hash.hexdigest()

    def sync(self) -> None:
        """Wait until all events are on disk: a checkpoint must not be newer than the events before it."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FedraxError(f"cannot write {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk, which ``append`` has reported
            self._file.close()


def line(event: Event) -> str:
    """An event as a line of JSON."""
    return json.dumps(event) + "\n"


def digest_of(events: Sequence[Event]) -> str:
    """The ``EventFile.digest`` of these events."""
    return _hash_of(events).hexdigest()


def _hash_of(events: Sequence[Event]) -> Any:
    made = hashlib.blake2b(digest_size=16)
    for event in events:
        made.update(_without_times(event))
    return made


def _without_times(event: Event) -> bytes:
    return line({key: value for key, value in event.items() if not key.startswith("seconds")}).encode()


@checked_arguments
def read_events(directory: Path | str) -> list[Event]:
    """Read the events of a run directory; an incomplete last line, as a crash may leave it, is ignored.

    Args:
        directory: the run directory.

    Returns:
        One event for each round, after that of round 0 if the run evaluated before its first round.

    Raises:
        FedraxError: for a missing or damaged file.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> data = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, data, rounds=3, cohort_size=2, directory="run")
        >>> [event["round"] for event in fedrax.simulation.read_events("run")]
        [1, 2, 3]
    """
    directory = Path(directory)
    events, wrong = read_whole_events(directory)
    if wrong is not None:
        raise FedraxError(f"{directory / FILE}, line {len(events) + 1}, is not an event: {wrong}")
    return events


def read_whole_events(directory: Path) -> tuple[list[Event], str | None]:
    """The events before the first invalid line, and what is wrong with that line (None where all are valid)."""
    events: list[Event] = []
    try:
        with open_regular_file(directory / FILE, MAX_BYTES) as file:
            while (text := file.readline(_LINE)).endswith(b"\n"):
                try:
                    events.append(_event(text, rounds_done(events) + 1, bool(events)))
                except (ValueError, RecursionError) as error:
                    return events, str(error)
    except OSError as error:
        raise FedraxError(f"cannot read the events of {directory}: {error}") from error
    return events, "it is too long" if len(text) == _LINE else None


def _event(text: bytes, number: int, before: bool) -> Event:
    """The event of round ``number``, or of round 0 before the first, in a line of JSON; ValueError for others."""
    event = json.loads(text.decode())
    rounds = (number,) if before else (0, number)
    if not isinstance(event, dict) or event.get("round") not in rounds or isinstance(event["round"], bool):
        raise ValueError("not the event of the round that belongs here")
    for key in ("round", *_COUNTED, "seconds"):
        if key not in event:
            raise ValueError(f"it has no {key!r}")
    for key, value in event.items():
        if value is None and key.startswith(_NULLABLE):
            continue
        kinds = int if key in ("round", *_COUNTED) else (int, float)
        wrong = not isinstance(value, kinds) or isinstance(value, bool)
        wrong = wrong or (isinstance(value, int) and abs(value) >= _LARGEST)
        if value is None or wrong or (key in (*_COUNTED, "seconds") and not 0 <= value < math.inf):
            raise ValueError(f"{key!r} is {value!r:.40}")
    return event


def rounds_done(events: Sequence[Event]) -> int:
    """The number of rounds that events report; an evaluation before the first round is an event of round 0."""
    return events[-1]["round"] if events else 0


def events_until(events: list[Event], round: int) -> list[Event]:
    """The events up to a round."""
    return [event for event in events if event["round"] <= round]


def event_of_start(metrics: Event, seconds: float) -> Event:
    """The event of round 0: the metrics of the initial parameters."""
    return {"round": 0} | dict.fromkeys(_COUNTED, 0) | {"seconds": round_seconds([], seconds)} | metrics


def holds(event: Event, name: str) -> bool:
    """Whether an event has a finite value under that name."""
    value = event.get(name)
    return value is not None and math.isfinite(value)


def events_of(info: RunInfo, records: dict, count: np.ndarray, events: list[Event], seconds: float) -> list[Event]:
    """The events of a block of B rounds after ``events``; bytes, gradients and seconds are cumulative.

    ``count`` [B, D] is the number of clients in each round on each device. Values that are not finite are left out,
    since JSON cannot hold them.
    """
    rounds = len(records["sound"])
    done, last = rounds_done(events), events[-1] if events else dict.fromkeys(_COUNTED, 0)
    down, up, gradients = last["bytes_down"], last["bytes_up"], last["gradients"]
    new = []
    for r in range(rounds):
        clients = int(count[r].sum())
        down, up = down + clients * info.bytes_down, up + clients * info.bytes_up
        said = {k: value for k, v in records.items() if k not in _HIDDEN and math.isfinite(value := float(v[r]))}
        gradients, loss = gradients + round(said.pop("gradients", 0.0)), said.pop("loss", None)
        event: Event = {"round": done + r + 1}
        if loss is not None and clients:  # a Poisson cohort may be empty
            event[info.loss] = loss
        event |= {"clients": clients, "bytes_down": down, "bytes_up": up, "gradients": gradients} | said
        if info.clock is not None:
            event["clock"] = float(info.clock[done + r])
        event["seconds"] = round_seconds(events, seconds * (r + 1) / rounds)
        new.append(event)
    return new


def report(new: list[Event], events: list[Event], log: EventFile | None, sinks: Sequence[Sink]) -> None:
    """Append ``new`` events to ``events`` and to the file, and send them to the sinks."""
    events.extend(new)
    if log is not None:
        log.append(new)
    for event in new:
        for sink in sinks:
            sink.event(event)


def round_seconds(events: list[Event], more: float) -> float:
    """Cumulative seconds, to the microsecond."""
    return round((events[-1]["seconds"] if events else 0.0) + more, 6)
