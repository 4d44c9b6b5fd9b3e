"""Seconds of a run: those of its work, and not of the compiler's, which another run of the process may have paid."""

from __future__ import annotations

import math
import threading
import time
from functools import cache

import jax.monitoring

_COMPILING = "/jax/core/compile/"
"""JAX's events of tracing, lowering and compiling, and of reading what was compiled before."""


class Compilations:
    """How long JAX has compiled. Its events come at their ends, of any thread, and may lie in one another.

    JAX takes their lengths from a clock that the system may set.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._read = -math.inf
        self._lock = threading.Lock()

    def heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        """An event that ends now."""
        if event.startswith(_COMPILING):
            with self._lock:
                end = time.monotonic()
                self.add(end - duration_secs, end)

    def add(self, start: float, end: float) -> None:
        """A time that ends no sooner than any before; what lies in it is not counted twice."""
        start = max(start, self._read)
        while self._spans and self._spans[-1][1] > start:
            before, after = self._spans.pop()
            self.seconds -= after - before
            start = min(start, before)
        self._spans.append((start, end))
        self.seconds += end - start

    def elsewhere(self) -> float:
        """Seconds that go on only while nothing is compiled, and never back: what was once read is not taken back."""
        with self._lock:
            self._read = time.monotonic()
            return self._read - self.seconds


@cache
def _listening() -> Compilations:
    made = Compilations()
    jax.monitoring.register_event_duration_secs_listener(made.heard)
    return made


def compute_clock() -> float:
    """Seconds that go on only while nothing is compiled."""
    return _listening().elsewhere()
