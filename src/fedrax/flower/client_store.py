"""What a client keeps from message to message, in its own Context.

A round that the server could not make use of, because the upload was lost or late or another phase failed, has to leave
no trace on the client either: SCAFFOLD's c must stay the mean of the c_i. So a client keeps what it had before its last
round beside what it has after it, and the next order says which of its rounds was counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedrax.errors import FedraxError
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.serialization import packed, unpacked
from fedrax.simulation.round import ClientRecord

_BEFORE, _AFTER, _ROUNDS = "fedrax.before", "fedrax.after", "fedrax.rounds"
_RECEIVED, _SECRET, _START = "fedrax.received", "fedrax.secret", "fedrax.start"
_NEVER = -1


class ClientStore:
    """A client's part of ``context.state``."""

    def __init__(self, state: RecordDict, content: RecordDict):
        """content: a message, whose start, if there is one, the client needs until a round of its own is counted."""
        self.state = state
        self.lost = False
        """Whether something that was kept is not there any more."""
        if isinstance(start := content.get("start"), ArrayRecord):
            state[_START] = start

    @property
    def start(self) -> ArrayRecord:
        """The start, as it was sent."""
        found = self.state.get(_START)
        if not isinstance(found, ArrayRecord):
            raise FedraxError("this client has lost its state and needs the starting parameters again")
        return found

    @property
    def _rounds(self) -> dict[str, int]:
        """``before``: the round of the last counted state. ``after``, ``phase``: those of the state that follows it."""
        found = self.state.get(_ROUNDS)
        return dict(found) if isinstance(found, ConfigRecord) else {}  # type: ignore[arg-type]

    def kept(self, order: RoundInstructions, like: ClientRecord, at_first: Callable[[], ClientRecord]) -> ClientRecord:
        """What the client goes on from; what is out of date is forgotten. like: its shapes."""
        rounds, anything = self._rounds, bool(jax.tree.leaves(like))
        if order.phase:
            if (rounds.get("after"), rounds.get("phase")) != (order.round, order.phase - 1):
                raise FedraxError(f"this client has no state of the earlier phases of round {order.round + 1}")
            return self._read(_AFTER, like) if anything else like
        if not anything:
            return like
        if rounds.get("after", _NEVER) == order.counted != _NEVER and rounds["phase"] == _NEVER:
            self.state[_BEFORE] = self.state.pop(_AFTER)
            self.state.pop(_START, None)
            rounds = {"before": order.counted}
            self.state[_ROUNDS] = ConfigRecord(rounds)  # type: ignore[arg-type]
        if order.counted == _NEVER or rounds.get("before", _NEVER) != order.counted:
            self.lost = order.counted != _NEVER
            return at_first()
        return self._read(_BEFORE, like)

    def keep(self, order: RoundInstructions, kept: ClientRecord, last: bool) -> None:
        """What the client has after a phase, the round's last one or not."""
        if jax.tree.leaves(kept):
            self.state[_AFTER] = packed(kept)
        after = {"after": order.round, "phase": _NEVER if last else order.phase}
        self.state[_ROUNDS] = ConfigRecord({"before": self._rounds.get("before", _NEVER), **after})
        for name in (_RECEIVED, _SECRET) if last else ():
            self.state.pop(name, None)

    def receive(self, order: RoundInstructions, content: RecordDict) -> dict[str, Any]:
        """The arrays that belong to a phase: those that came with it, and those of earlier ones that it names again."""
        here, again = content.get("down"), content.get("again")
        if not isinstance(here, ArrayRecord):
            raise FedraxError("malformed message: the server runs another version of fedrax")
        earlier = self.state.get(_RECEIVED) if order.phase else None
        known = dict(earlier) if isinstance(earlier, ArrayRecord) else {}
        try:
            received = dict(here) | {name: known[str(where)] for name, where in dict(again or {}).items()}
        except KeyError:
            raise FedraxError(f"this client has no state of the earlier phases of round {order.round + 1}") from None
        if "more" in content:
            self.state[_RECEIVED] = ArrayRecord(known | {f"{order.phase} {name}": a for name, a in received.items()})
        return received

    def key(self, order: RoundInstructions, make: Callable[[], list[int]]) -> list[int]:
        """The words of the client's random key in a round.

        A round that is asked for again gets another key: the difference of two uploads with the same noise has none.
        A later phase cannot be asked for again, see ``kept``.
        """
        if not order.phase:
            self.state[_SECRET] = ConfigRecord({"round": order.round, "words": make()})
        found = self.state.get(_SECRET)
        if not isinstance(found, ConfigRecord) or found.get("round") != order.round:
            raise FedraxError(f"this client has no state of the earlier phases of round {order.round + 1}")
        return list(found["words"])  # type: ignore[arg-type]

    def _read(self, name: str, like: ClientRecord) -> ClientRecord:
        return jax.tree.map(jnp.asarray, unpacked(self.state[name], like, "what this client keeps"))  # type: ignore[arg-type]
