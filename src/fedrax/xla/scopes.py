"""Name scopes for the parts of a round, by which ``fedrax profile`` attributes operations of a compiled program.

They are metadata: the compiled code is the same with and without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_PREFIX = "fedrax."
_NAMED = re.compile(r"fedrax\.(\w+)")
GATHER, GRADIENT, STATES, AGGREGATE, SERVER = "gather", "gradient", "states", "aggregate", "server"
"""Parts of a round: gathering a batch's rows in random order, loss and gradient, reading and writing client states,
aggregation, the server's update."""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Attribute operations that are traced inside to the part ``name``, a constant of this module; also a decorator."""
    with jax.named_scope(_PREFIX + name):
        yield


@contextmanager
def phase_scope(p: int) -> Iterator[None]:
    """Attribute operations that are traced inside to the clients in phase ``p``, counted from 0."""
    with jax.named_scope(f"{_PREFIX}phase{p}"):
        yield


def read_scope(op_name: str) -> tuple[int | None, str | None]:
    """(phase, part) of an operation, parsed from its name in a compiled program; None for what the name lacks."""
    phase, part = None, None
    for name in _NAMED.findall(op_name):
        if name.startswith("phase"):
            phase = int(name.removeprefix("phase"))
        else:
            part = name
    return phase, part
