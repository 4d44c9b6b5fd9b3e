"""What of a client's work depends on its data other than through the one value that a mechanism covers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from fedrax import tree
from fedrax.contract.client_data import Carried, ClientData
from fedrax.tree import Tree


def uncovered(
    client: Callable, message: Any, state: Any, data: ClientData, cover: Callable[[ClientData], ClientData]
) -> str | None:
    """The first leaf sent, in this round or a later one, that depends on samples or on how many there are otherwise
    than through what ``cover`` takes out of the client's data; None where there is none. Traces ``client``."""

    def sent(secret: Any, state: Any) -> dict[str, Tree]:
        kept = Carried(data.carried.statistics, data.carried.optimizer)
        output = client(message, state, cover(data._in_terms_of(*secret).with_carried(kept)))
        return {"upload": output.upload, "each": output.each, "total": output.total, "state": output.state}

    secret = (data.samples, data.size)
    leaks = dependent(sent, secret, state)
    sends = [name for name in leaks if not name.startswith("state")]
    if not sends and leaks:  # what stays on the client may be exact, as long as it does not leave in a later round
        from_state = dependent(lambda state: sent(secret, state), state)
        sends = [name for name in from_state if not name.startswith("state")]
    return sends[0] if sends else None


def dependent(function: Callable[..., Tree], secret: Tree, *others: Tree) -> list[str]:
    """The names of the leaves of ``function(secret, *others)`` that are computed from ``secret``.

    ``function`` is traced and not run. Whatever an operation reads is taken to matter for all that it gives, loops and
    calls as a whole: a leaf that is not named does not depend on ``secret``; one that is named may.
    """
    with jax.disable_jit(False):
        closed, shape = jax.make_jaxpr(function, return_shape=True)(secret, *others)
    jaxpr = closed.jaxpr
    touched = set(jaxpr.invars[: len(jax.tree.leaves(secret))])
    for equation in jaxpr.eqns:
        if any(not isinstance(v, core.Literal) and v in touched for v in equation.invars):
            touched.update(equation.outvars)
    outputs = zip(tree.leaf_names(shape), jaxpr.outvars, strict=True)
    return [name for name, v in outputs if not isinstance(v, core.Literal) and v in touched]
