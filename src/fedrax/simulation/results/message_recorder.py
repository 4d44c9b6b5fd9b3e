"""What clients were sent and sent back, as it traveled: for those who study what a method gives away.

A :class:`MessageSelection` names clients and rounds. In these rounds every execution plan notes, phase by phase, the
message that went down and what each of the clients sent up: compressed, quantized, noised, whatever its method makes of it,
and before the server decodes it.
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
    """Which messages :func:`fedrax.simulate` keeps; they are in ``Result.exchanges``."""

    clients: Sequence[int] = (0,)
    """By number, in a list or an array."""
    rounds: Sequence[int] | None = None
    """As events count them, from 1; all of them by default."""
    max_bytes: int = 1 << 30
    """What the messages may take in memory; a record that would be larger is refused."""

    def check(self, num_clients: int, rounds: int, bytes_each: int) -> None:
        """Refuse clients and rounds that there are not, and more than fits; bytes_each: of a client in a round."""
        for name, given, first, last in (
            ("client", self.clients, 0, num_clients - 1),
            ("round", () if self.rounds is None else self.rounds, 1, rounds),
        ):
            for one in given:
                if isinstance(one, bool) or not isinstance(one, int | np.integer) or not first <= one <= last:
                    raise FedraxError(f"there is no {name} {one!r} to record: they go from {first} to {last}")
        if len(self.clients) == 0:
            raise FedraxError("a record names one client at least")
        count = len(set(self.clients)) * (rounds if self.rounds is None else len(set(self.rounds)))
        if count * bytes_each > self.max_bytes:
            raise FedraxError(
                f"the record would take {count * bytes_each / 1e9:.3g} GB, {count} times what a client gets and sends"
                f" in a round: name fewer clients or rounds, or set max_bytes"
            )

    def holds(self, round: int) -> bool:
        """Whether a round, counted from 1, is recorded."""
        return self.rounds is None or round in self.rounds

    def rounds_until(self, done: int, total: int) -> int:
        """How many rounds after ``done`` of them may run before the host is asked: one that is recorded is alone."""
        if self.rounds is None:
            return 1
        return min((1 if r == done + 1 else int(r) - 1 - done for r in self.rounds if r > done), default=total - done)


class RecordedUpload(NamedTuple):
    """What one client sends in a phase, as it travels: see :class:`fedrax.ClientOutput`."""

    upload: Tree
    each: Tree = ()
    total: Tree = ()
    statistics: Tree = ()
    """The model's running statistics, with the last phase, where their mean goes round."""


class RecordedExchange(NamedTuple):
    """One phase between the server and one client, as NumPy arrays."""

    round: int
    """As events count them, from 1."""
    client: int
    phase: int
    """From 0."""
    received: Tree
    """The server's message."""
    statistics: Tree
    """The model's running statistics that came with the first phase's message, where their mean goes round."""
    sent: RecordedUpload


# -- inside a round -------------------------------------------------------------------------------------------------


class UploadBuffer(NamedTuple):
    """What K clients sent in a phase, noted on one device."""

    sent: RecordedUpload
    """On a leading axis of K."""
    present: Array
    """bool [K]; whether the client took part on this device."""


class RecordedPhase(NamedTuple):
    """A phase: what went down, and what came up from the clients that are recorded."""

    message: Tree
    statistics: Tree
    notes: UploadBuffer


def recorded_upload(done: ClientResult, last: bool) -> RecordedUpload:
    """What a client has sent at the end of a phase."""
    return RecordedUpload(done.output.upload, done.output.each, done.output.total, done.statistics if last else ())


def empty_upload_buffer(recorded: Array | None, shape: RecordedUpload) -> Any:
    """Room for what the clients ``recorded`` [K] send; nothing at all where nobody is."""
    if recorded is None:
        return ()
    count = recorded.shape[0]
    room = jax.tree.map(lambda a: jnp.zeros((count, *a.shape), a.dtype), shape)
    return UploadBuffer(room, jnp.zeros(count, bool))


def record_uploads(notes: Any, recorded: Array | None, clients: Array, sent: RecordedUpload) -> Any:
    """The notes with what a client sent, or several side by side (a leading axis everywhere)."""
    if recorded is None:
        return notes
    match = jnp.asarray(clients)[..., None] == recorded
    row = jnp.where(match.any(-1), match.argmax(-1), len(recorded))  # beyond the notes: dropped
    put = lambda table, value: table.at[row].set(value, mode="drop")  # noqa: E731
    return UploadBuffer(jax.tree.map(put, notes.sent, sent), notes.present.at[row].set(True, mode="drop"))


def broadcast_statistics(algorithm: Any, p: int, statistics: Tree) -> Tree:
    """The running statistics that travel down with phase ``p``."""
    return statistics if p == 0 and not algorithm.traits.personal_statistics else ()


# -- on the host ----------------------------------------------------------------------------------------------------


def phases_to_host(phases: Sequence[RecordedPhase], devices: int) -> list[RecordedPhase]:
    """A round's notes of one device or, where devices share the leading axis of the notes, of all of them."""
    split = lambda a: np.asarray(a).reshape(devices, -1, *a.shape[1:])  # noqa: E731
    as_arrays = lambda values: jax.tree.map(np.asarray, values)  # noqa: E731
    return [
        RecordedPhase(as_arrays(one.message), as_arrays(one.statistics), jax.tree.map(split, one.notes))
        for one in phases
    ]


def exchanges(recorded: Sequence[int], round: int, phases: Sequence[RecordedPhase]) -> list[RecordedExchange]:
    """The exchanges of a round, client by client, from notes that :func:`phases_to_host` gave."""
    found = []
    for k, client in enumerate(recorded):
        for p, (message, statistics, notes) in enumerate(phases):
            here = np.flatnonzero(notes.present[:, k])
            if len(here):
                sent = jax.tree.map(lambda a, d=here[0], k=k: a[d, k], notes.sent)
                found.append(RecordedExchange(round, int(client), p, message, statistics, sent))
    return found
