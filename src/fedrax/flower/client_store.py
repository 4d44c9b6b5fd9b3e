"""Client state between messages, stored in the client's Context.

The server may not aggregate an upload: it can be lost or late, or a later phase of the round fails. Then the client
must also discard the round's client state, or SCAFFOLD's c would no longer be the mean of the c_i. So a client stores
the states before and after its last round, and the next instructions say which of its rounds was aggregated last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fedrax.errors import FedraxError
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.serialization import pack, unpack
from fedrax.simulation.round import ClientRecord

_BEFORE, _AFTER, _ROUNDS = "fedrax.before", "fedrax.after", "fedrax.rounds"
_RECEIVED, _SECRET, _START = "fedrax.received", "fedrax.secret", "fedrax.start"
"""Names of the records: client states and their rounds; arrays, random key and starting parameters of a round."""
_NO_ROUND = -1
"""Flower's records cannot hold None."""


class ClientStore:
    """Reads and writes a client's records in ``context.state``.

    Starting parameters in the message ``content`` are stored until a round of the client is aggregated.
    """

    def __init__(self, state: RecordDict, content: RecordDict):
        self.state = state
        self.state_lost = False
        """Whether the client state that the server expects is missing."""
        if isinstance(start := content.get("start"), ArrayRecord):
            state[_START] = start

    @property
    def initial_parameters(self) -> ArrayRecord:
        """The packed starting parameters and statistics; raises FedraxError where the server did not send them."""
        found = self.state.get(_START)
        if not isinstance(found, ArrayRecord):
            raise FedraxError("this client has lost its state and needs the starting parameters again")
        return found

    @property
    def _rounds(self) -> dict[str, int]:
        """The round of the state ``before``, and the round and phase of the state ``after`` it."""
        found = self.state.get(_ROUNDS)
        return dict(found) if isinstance(found, ConfigRecord) else {}  # type: ignore[arg-type]

    def load(
        self, instructions: RoundInstructions, like: ClientRecord, initial: Callable[[], ClientRecord]
    ) -> ClientRecord:
        """The client state that a phase starts from; states of rounds that were not aggregated are discarded.

        Args:
            instructions: the server's, which name the last aggregated round.
            like: shapes and dtypes of the state.
            initial: makes the initial state; called before the client's first aggregated round and after a loss.
        """
        rounds, has_state = self._rounds, bool(jax.tree.leaves(like))
        if instructions.phase:
            if (rounds.get("after"), rounds.get("phase")) != (instructions.round, instructions.phase - 1):
                raise _missing_phases(instructions)
            return self._read(_AFTER, like) if has_state else like
        if not has_state:
            return like
        if rounds.get("after", _NO_ROUND) == instructions.last_aggregated != _NO_ROUND and rounds["phase"] == _NO_ROUND:
            self.state[_BEFORE] = self.state.pop(_AFTER)
            self.state.pop(_START, None)
            rounds = {"before": instructions.last_aggregated}
            self.state[_ROUNDS] = ConfigRecord(rounds)  # type: ignore[arg-type]
        if instructions.last_aggregated == _NO_ROUND or rounds.get("before", _NO_ROUND) != instructions.last_aggregated:
            self.state_lost = instructions.last_aggregated != _NO_ROUND
            return initial()
        return self._read(_BEFORE, like)

    def save(self, instructions: RoundInstructions, record: ClientRecord, last: bool) -> None:
        """Store the client state after a phase; ``last``: whether it is the round's last phase."""
        if jax.tree.leaves(record):
            self.state[_AFTER] = pack(record)
        after = {"after": instructions.round, "phase": _NO_ROUND if last else instructions.phase}
        self.state[_ROUNDS] = ConfigRecord({"before": self._rounds.get("before", _NO_ROUND), **after})
        for name in (_RECEIVED, _SECRET) if last else ():
            self.state.pop(name, None)

    def received_arrays(self, instructions: RoundInstructions, content: RecordDict) -> dict[str, Any]:
        """The arrays of a phase's message; those that an earlier phase sent are named and not sent again."""
        here, again = content.get("down"), content.get("again")
        if not isinstance(here, ArrayRecord):
            raise FedraxError("malformed message: the server runs another version of fedrax")
        earlier = self.state.get(_RECEIVED) if instructions.phase else None
        known = dict(earlier) if isinstance(earlier, ArrayRecord) else {}
        try:
            received = dict(here) | {name: known[str(where)] for name, where in dict(again or {}).items()}
        except KeyError:
            raise _missing_phases(instructions) from None
        if "more" in content:
            self.state[_RECEIVED] = ArrayRecord(
                known | {f"{instructions.phase} {name}": a for name, a in received.items()}
            )
        return received

    def key_words(self, instructions: RoundInstructions, make: Callable[[], list[int]]) -> list[int]:
        """The words of the client's random key in a round; ``make`` draws them in its first phase.

        A round that is requested again gets a new key: with the same noise in two uploads, their difference would not
        be private. A later phase cannot be requested again, see ``load``.
        """
        if not instructions.phase:
            self.state[_SECRET] = ConfigRecord({"round": instructions.round, "words": make()})
        found = self.state.get(_SECRET)
        if not isinstance(found, ConfigRecord) or found.get("round") != instructions.round:
            raise _missing_phases(instructions)
        return list(found["words"])  # type: ignore[arg-type]

    def _read(self, name: str, like: ClientRecord) -> ClientRecord:
        return jax.device_put(unpack(self.state[name], like, "the stored client state"))  # type: ignore[arg-type]


def _missing_phases(instructions: RoundInstructions) -> FedraxError:
    """The error of a client that missed earlier phases of a round, so that it cannot run the next one."""
    return FedraxError(f"this client has no state of the earlier phases of round {instructions.round + 1}")
