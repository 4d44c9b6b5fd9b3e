"""Time of a run without compilation, which may have been done by another run of the process."""

from __future__ import annotations

import math
import threading
import time
from functools import cache

import jax.monitoring

_COMPILING = "/jax/core/compile/"
"""Prefix of JAX's events of tracing, lowering and compiling, and of reading the compilation cache."""


class Compilations:
    """Seconds in which JAX has compiled.

    JAX reports an event when it ends, from any thread, and events may be nested. JAX measures durations with a clock
    that the system may adjust.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._read = -math.inf
        self._lock = threading.Lock()

    def heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Add an event that has just ended."""
        if event.startswith(_COMPILING):
            with self._lock:
                end = time.monotonic()
                self.add(end - duration_secs, end)

    def add(self, start: float, end: float) -> None:
        """Add an interval that ends no earlier than those before; overlaps are counted once."""
        start = max(start, self._read)
        while self._spans and self._spans[-1][1] > start:
            before, after = self._spans.pop()
            self.seconds -= after - before
            start = min(start, before)
        self._spans.append((start, end))
        self.seconds += end - start

    def elsewhere(self) -> float:
        """Seconds outside compilation; never decreases, since intervals are cut at the last reading."""
        with self._lock:
            self._read = time.monotonic()
            return self._read - self.seconds


@cache
def _listening() -> Compilations:
    made = Compilations()
    jax.monitoring.register_event_duration_secs_listener(made.heard)
    return made


def compute_clock() -> float:
    """Monotonic seconds that exclude compilation."""
    return _listening().elsewhere()
