"""Names that compiled programs carry for the parts of a round; ``fedrax profile`` finds them in a trace.

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
"""A batch's rows, random order included; loss and gradient; the store of client states; sums; the server."""


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Operations traced inside belong to the part ``name``, one of the constants here; also a decorator."""
    with jax.named_scope(_PREFIX + name):
        yield


@contextmanager
def phase_scope(p: int) -> Iterator[None]:
    """Operations traced inside are of the clients in phase ``p``, counted from 0."""
    with jax.named_scope(f"{_PREFIX}phase{p}"):
        yield


def read_scope(op_name: str) -> tuple[int | None, str | None]:
    """(phase, part) of an operation by the name that a compiled program gives it; None where it names none."""
    phase, part = None, None
    for name in _NAMED.findall(op_name):
        if name.startswith("phase"):
            phase = int(name.removeprefix("phase"))
        else:
            part = name
    return phase, part
