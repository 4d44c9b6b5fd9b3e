"""Recording of broadcast messages and uploads, for studies of what a method leaks.

A :class:`MessageSelection` selects clients and rounds. In these rounds every execution plan records, phase by phase,
the broadcast message and the upload of each selected client as they are transmitted: compressed, quantized or with
noise, and before the server decodes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.errors import FedraxError
from fedrax.simulation.round import ClientResult
from fedrax.tree import Tree


@dataclass(frozen=True)
class MessageSelection:
    """Which messages :func:`fedrax.simulate` records; they are in ``Result.exchanges``.

    Example:
        >>> fedrax.simulation.MessageSelection(clients=(0, 3), rounds=(1, 10)).holds(10)
        True
    """

    clients: Sequence[int] = (0,)
    """Numbers of the clients."""
    rounds: Sequence[int] | None = None
    """The rounds, counted from 1 as in events; all rounds by default."""
    max_bytes: int = 1 << 30
    """Most bytes of memory for the messages; a larger selection raises FedraxError before the run."""

    def check(self, num_clients: int, rounds: int, bytes_each: int) -> None:
        """Raise FedraxError for clients and rounds that do not exist, and for too many messages.

        Args:
            num_clients: clients of the federation.
            rounds: rounds of the run.
            bytes_each: bytes that one client receives and sends in a round.
        """
        for name, given, first, last in (
            ("client", self.clients, 0, num_clients - 1),
            ("round", () if self.rounds is None else self.rounds, 1, rounds),
        ):
            for one in given:
                if isinstance(one, bool) or not isinstance(one, int | np.integer) or not first <= one <= last:
                    raise FedraxError(f"there is no {name} {one!r} to record: they go from {first} to {last}")
        if len(self.clients) == 0:
            raise FedraxError("a MessageSelection needs one client at least")
        count = len(set(self.clients)) * (rounds if self.rounds is None else len(set(self.rounds)))
        if count * bytes_each > self.max_bytes:
            raise FedraxError(
                f"the record would take {count * bytes_each / 1e9:.3g} GB, {count} times the traffic of a client in a"
                " round: select fewer clients or rounds, or raise max_bytes"
            )

    def holds(self, round: int) -> bool:
        """Tell whether a round is recorded.

        Args:
            round: the round, counted from 1.

        Returns:
            Whether it is selected.
        """
        return self.rounds is None or round in self.rounds

    def rounds_until(self, done: int, total: int) -> int:
        """Count the rounds that may run in one block: a recorded round is a block of its own.

        Args:
            done: rounds done.
            total: rounds of the run.

        Returns:
            The longest block that may follow.
        """
        if self.rounds is None:
            return 1
        return min((1 if r == done + 1 else int(r) - 1 - done for r in self.rounds if r > done), default=total - done)


class RecordedUpload(NamedTuple):
    """What one client sends in a phase, as transmitted; see :class:`fedrax.ClientOutput`.

    Example:
        >>> fedrax.simulation.RecordedUpload(upload={"w": np.zeros(2)}).total
        ()
    """

    upload: Tree
    """The part that is averaged over the cohort."""
    each: Tree = ()
    """The part that the server receives for each client."""
    total: Tree = ()
    """The part that is summed over the cohort."""
    statistics: Tree = ()
    """The model's running statistics, with the last phase, where the server averages them."""


class RecordedExchange(NamedTuple):
    """Messages between the server and one client in one phase, as NumPy arrays.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> options = {"rounds": 1, "cohort_size": 2, "record": fedrax.simulation.MessageSelection(clients=(1,))}
        >>> exchange = fedrax.simulate(fedrax.FedAvg(), task, federation, progress=False, **options).exchanges[0]
        >>> exchange.round, exchange.client, exchange.phase
        (1, 1, 0)
    """

    round: int
    """The round, counted from 1 as in events."""
    client: int
    """Number of the client."""
    phase: int
    """The phase of the round, counted from 0."""
    received: Tree
    """The broadcast message."""
    statistics: Tree
    """The model's running statistics that came with the first phase's message, where the server averages them."""
    sent: RecordedUpload
    """The client's upload."""


# -- inside a round -------------------------------------------------------------------------------------------------


class UploadBuffer(NamedTuple):
    """Uploads of K recorded clients in a phase, on one device."""

    sent: RecordedUpload
    """The uploads, [K, ...]."""
    present: Array
    """bool [K]; whether the client ran on this device."""


class RecordedPhase(NamedTuple):
    """One phase: the broadcast message and the uploads of the recorded clients."""

    message: Tree
    statistics: Tree
    notes: UploadBuffer


def recorded_upload(done: ClientResult, last: bool) -> RecordedUpload:
    """The upload of a client at the end of a phase."""
    return RecordedUpload(done.output.upload, done.output.each, done.output.total, done.statistics if last else ())


def empty_upload_buffer(recorded: Array | None, shape: RecordedUpload) -> Any:
    """An empty buffer for the uploads of clients ``recorded`` [K]; () where no client is recorded."""
    if recorded is None:
        return ()
    count = recorded.shape[0]
    room = jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), shape)
    return UploadBuffer(room, jnp.zeros(count, bool))


def record_uploads(notes: Any, recorded: Array | None, clients: Array, sent: RecordedUpload) -> Any:
    """The buffer with the upload of a client added, or of several vectorized clients (a leading axis everywhere)."""
    if recorded is None:
        return notes
    match = jnp.asarray(clients)[..., None] == recorded
    row = jnp.where(match.any(-1), match.argmax(-1), len(recorded))  # rows beyond the buffer are dropped
    put = lambda table, value: table.at[row].set(value, mode="drop")  # noqa: E731
    return UploadBuffer(jax.tree.map(put, notes.sent, sent), notes.present.at[row].set(True, mode="drop"))


def broadcast_statistics(algorithm: Any, p: int, statistics: Tree) -> Tree:
    """The running statistics that are broadcast with phase ``p``."""
    return statistics if p == 0 and not algorithm.traits.personal_statistics else ()


# -- on the host ----------------------------------------------------------------------------------------------------


def phases_to_host(phases: Sequence[RecordedPhase], devices: int) -> list[RecordedPhase]:
    """A round's records on the host, with a leading axis of devices."""
    split = lambda a: np.asarray(a).reshape(devices, -1, *a.shape[1:])  # noqa: E731
    as_arrays = lambda values: jax.tree.map(np.asarray, values)  # noqa: E731
    return [
        RecordedPhase(as_arrays(one.message), as_arrays(one.statistics), jax.tree.map(split, one.notes))
        for one in phases
    ]


def exchanges(recorded: Sequence[int], round: int, phases: Sequence[RecordedPhase]) -> list[RecordedExchange]:
    """The exchanges of a round, client by client, from the records of :func:`phases_to_host`."""
    found = []
    for k, client in enumerate(recorded):
        for p, (message, statistics, notes) in enumerate(phases):
            here = np.flatnonzero(notes.present[:, k])
            if len(here):
                sent = jax.tree.map(lambda a, d=here[0], k=k: a[d, k], notes.sent)
                found.append(RecordedExchange(round, int(client), p, message, statistics, sent))
    return found
