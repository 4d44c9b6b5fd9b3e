"""The server's instructions to a client for one phase of a round, which the client checks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from fedrax.errors import FedraxError

_NAME = "instructions"
"""Name of the record in a message. It is part of the protocol: both ends need the same version of fedrax."""
_DIGEST = re.compile(r"(?:[0-9a-f]{32})?")


@dataclass(frozen=True)
class RoundInstructions:
    """Instructions to one client for one phase of a round, or for the evaluation after it."""

    round: int
    """The round, from 0."""
    phase: int
    """The phase of the round, from 0."""
    client: int
    """Number of the client, from 0."""
    num_clients: int
    """Clients of the federation, N."""
    cohort_size: float
    """Cohort size S, as set."""
    last_aggregated: int
    """The last round whose upload of this client was aggregated; -1 for none."""
    shared: list[int]
    """Words of the random key that all clients of the round share."""
    dtype: str
    """Dtype of parameters and arithmetic, float32 or float64."""
    frozen: str
    """Digest of the server's frozen parameters, see `of_frozen`."""

    def record(self) -> dict[str, ConfigRecord]:
        """The instructions as a record of a message."""
        return {_NAME: ConfigRecord(dict(vars(self)))}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> RoundInstructions:
        """Read the instructions from a message; raises FedraxError where they are missing or invalid."""
        found = content.get(_NAME)
        if not isinstance(found, ConfigRecord) or set(found) != set(cls.__dataclass_fields__):
            raise FedraxError("malformed message: the server runs another version of fedrax")

        instructions = cls(**dict(found))  # type: ignore[arg-type]
        if not instructions._is_valid():
            raise FedraxError(f"malformed message: invalid instructions from the server, {instructions}")
        return instructions

    def _is_valid(self) -> bool:
        """Whether all fields have the right types and ranges."""
        integers = (self.round, self.phase, self.client, self.num_clients, self.last_aggregated)
        if any(type(number) is not int or not -1 <= number < 2**31 for number in integers):
            return False
        if not 0 <= self.client < self.num_clients or self.round < 0 or self.phase < 0:
            return False
        if not isinstance(self.shared, list) or any(type(n) is not int or not 0 <= n < 2**32 for n in self.shared):
            return False
        if not isinstance(self.cohort_size, float) or not 0 < self.cohort_size < 2**31:
            return False
        return self.dtype in ("float32", "float64") and is_digest(self.frozen)

    def check_frozen(self, own: str) -> None:
        """Raise FedraxError where the client's frozen parameters have another digest."""
        if own != self.frozen:
            raise FedraxError(other_weights("this client", own, self.frozen))


def is_digest(value: Any) -> bool:
    """Whether a value is a digest of frozen parameters or names, or the empty text for none."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def other_weights(client: str, theirs: str, ours: str) -> str:
    """The message about a client whose frozen parameters are not the server's."""
    digests = [f"digest {digest}" if digest else "no digest, as of a model without any" for digest in (theirs, ours)]
    return (
        f"{client} is rejected: its frozen parameters have {digests[0]}, and those of the server {digests[1]}: load the"
        " same weights on both"
    )
