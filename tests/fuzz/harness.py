"""Runs many cases with limits on the time of each and the memory of all."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

SECONDS = 600
"""Limit for a case on any machine; most take less than a second."""
MAX_MEGABYTES = 1024
"""Limit for the memory of all cases, against leaks and files whose declared sizes are allocated."""


def fuzz(cases: SearchStrategy, check: Callable[[Any], bool], count: int, start: int = 0) -> dict[str, int]:
    """Try ``count`` cases and return the numbers of accepted and rejected ones; raise the minimized first failure.

    ``check`` returns whether a case was accepted, and raises for wrong behavior.
    """
    counts = {"accepted": 0, "refused": 0}

    def one(case: Any) -> None:
        with time_limit():
            counts["accepted" if check(case) else "refused"] += 1
        if sum(counts.values()) % 100 == 0:
            jax.clear_caches()  # JAX's caches of hundreds of programs are no leak

    quiet = settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seed(start)(quiet(given(cases)(one)))()
    counts["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert counts["MiB"] < MAX_MEGABYTES, f"the cases took {counts['MiB']} MiB"
    return counts


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise AssertionError after ``SECONDS``."""

    def over(number: int, frame: Any) -> None:
        raise AssertionError(f"it hangs: {SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
