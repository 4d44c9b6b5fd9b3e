"""Seconds of a run: those of its work, and not of the compiler's, which another run of the process may have paid."""

from __future__ import annotations

import time
from functools import cache

import jax.monitoring

_COMPILING = "/jax/core/compile/"
"""JAX's events of tracing, lowering and compiling, and of reading what was compiled before."""


class Compilations:
    """How long JAX has compiled. Its events come at their ends and may lie in one another."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []

    def heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        """An event that ends now."""
        if event.startswith(_COMPILING):
            end = time.monotonic()
            self.add(end - duration_secs, end)

    def add(self, start: float, end: float) -> None:
        """A time that ends no sooner than any before; what lies in it is not counted twice."""
        while self._spans and self._spans[-1][1] > start:
            before, after = self._spans.pop()
            self.seconds -= after - before
            start = min(start, before)
        self._spans.append((start, end))
        self.seconds += end - start


@cache
def _listening() -> Compilations:
    made = Compilations()
    jax.monitoring.register_event_duration_secs_listener(made.heard)
    return made


def clock() -> float:
    """Seconds that go on only while nothing is compiled."""
    return time.monotonic() - _listening().seconds
