"""Data-dependence check: do uploads depend on private data other than through the noised value?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fedrax.contract.client_data import ClientData, TrainState
from fedrax.tree import Tree
from fedrax.xla import dependent_leaves


def find_leak(
    client: Callable, message: Any, state: Any, data: ClientData, cover: Callable[[ClientData], ClientData]
) -> str | None:
    """The first uploaded leaf that depends on the client's data other than through the noised value, or None.

    ``cover`` replaces the noised value by a constant. Dependence on the samples or their number, in this round or
    through the client state in a later one, counts. Traces ``client``.
    """

    def sent(secret: Any, state: Any) -> dict[str, Tree]:
        kept = TrainState(data.carried.statistics, data.carried.optimizer)
        output = client(message, state, cover(data._in_terms_of(*secret).with_carried(kept)))
        return {"upload": output.upload, "each": output.each, "total": output.total, "state": output.state}

    secret = (data.samples, data.size)
    leaks = dependent_leaves(sent, secret, state)
    sends = [name for name in leaks if not name.startswith("state")]
    if not sends and leaks:  # client state may depend on the data unless a later upload depends on it
        from_state = dependent_leaves(lambda state: sent(secret, state), state)
        sends = [name for name in from_state if not name.startswith("state")]
    return sends[0] if sends else None
