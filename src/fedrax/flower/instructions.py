"""Instructions of the server to a client for one phase of a round; checked by the client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from fedrax.errors import FedraxError

_NAME = "instructions"
"""Name of the record in a message. It is part of the protocol: both ends need the same version of fedrax."""


@dataclass(frozen=True)
class RoundInstructions:
    """One client's part of a round, or of an evaluation after it."""

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
    counted: int
    """The last round whose upload of this client was aggregated; -1 for none."""
    shared: list[int]
    """Words of the random key that all clients of the round share."""
    dtype: str
    """Dtype of parameters and arithmetic, float32 or float64."""

    def record(self) -> dict[str, ConfigRecord]:
        """The instructions as a record of a message."""
        return {_NAME: ConfigRecord(dict(vars(self)))}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> RoundInstructions:
        """Read the instructions from a message; raises FedraxError where they are missing or invalid."""
        found = content.get(_NAME)
        if not isinstance(found, ConfigRecord) or set(found) != set(cls.__dataclass_fields__):
            raise FedraxError("malformed message: the server runs another version of fedrax")

        order = cls(**dict(found))  # type: ignore[arg-type]
        whole = (order.round, order.phase, order.client, order.num_clients, order.counted)
        if any(type(number) is not int or not -1 <= number < 2**31 for number in whole):
            raise FedraxError(f"invalid instructions from the server: {order}")
        inside = 0 <= order.client < order.num_clients and order.round >= 0 <= order.phase
        numbers = isinstance(order.shared, list) and all(type(n) is int and 0 <= n < 2**32 for n in order.shared)
        if not inside or not numbers or order.dtype not in ("float32", "float64"):
            raise FedraxError(f"invalid instructions from the server: {order}")
        if not isinstance(order.cohort_size, float) or not 0 < order.cohort_size < 2**31:
            raise FedraxError(f"invalid instructions from the server: {order}")
        return order
