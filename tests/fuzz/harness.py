"""Trying many cases: each within its time, all of them within their memory."""

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
"""A case that takes longer hangs, on whatever machine: most take less than one."""
MEGABYTES = 1024
"""More than this in all is a leak, or a file that was believed."""


def fuzz(cases: SearchStrategy, check: Callable[[Any], bool], count: int, start: int = 0) -> dict[str, int]:
    """Try ``count`` cases; how many were accepted and refused. Raises what the first broken case raises, made small.

    ``check`` says whether a case was accepted, and raises for anything that must not be.
    """
    counts = {"accepted": 0, "refused": 0}

    def one(case: Any) -> None:
        with time_limit():
            counts["accepted" if check(case) else "refused"] += 1
        if sum(counts.values()) % 100 == 0:
            jax.clear_caches()  # what JAX remembers of hundreds of programs is no leak

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
    assert counts["MiB"] < MEGABYTES, f"the cases took {counts['MiB']} MiB"
    return counts


@contextmanager
def time_limit() -> Iterator[None]:
    """An AssertionError where the time is over."""

    def over(number: int, frame: Any) -> None:
        raise AssertionError(f"it hangs: {SECONDS} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
