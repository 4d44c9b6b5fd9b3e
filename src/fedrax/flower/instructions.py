"""What the server tells a client of a round, beside arrays; checked where it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord

from fedrax.errors import FedraxError

_NAME = "order"


@dataclass(frozen=True)
class RoundInstructions:
    """A client's part of a round, or of an evaluation after it."""

    round: int
    """From 0."""
    phase: int
    client: int
    """Its number, from 0."""
    num_clients: int
    cohort_size: float
    """S, as it was asked for."""
    counted: int
    """The last round of this client that the server made use of; -1: none."""
    shared: list[int]
    """Of the random key that all clients of the round know."""
    dtype: str
    """Of parameters and arithmetic."""

    def record(self) -> dict[str, ConfigRecord]:
        """As a part of a message."""
        return {_NAME: ConfigRecord(dict(vars(self)))}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> RoundInstructions:
        """The order in a message; FedraxError where there is none that could be meant."""
        found = content.get(_NAME)
        if not isinstance(found, ConfigRecord) or set(found) != set(cls.__dataclass_fields__):
            raise FedraxError("the message is none of a fedrax server of this version")
        order = cls(**dict(found))  # type: ignore[arg-type]
        whole = (order.round, order.phase, order.client, order.num_clients, order.counted)
        if any(type(number) is not int or not -1 <= number < 2**31 for number in whole):
            raise FedraxError(f"the server's order makes no sense: {order}")
        inside = 0 <= order.client < order.num_clients and order.round >= 0 <= order.phase
        numbers = isinstance(order.shared, list) and all(type(n) is int and 0 <= n < 2**32 for n in order.shared)
        if not inside or not numbers or order.dtype not in ("float32", "float64"):
            raise FedraxError(f"the server's order makes no sense: {order}")
        if not isinstance(order.cohort_size, float) or not 0 < order.cohort_size < 2**31:
            raise FedraxError(f"the server's order makes no sense: {order}")
        return order
