"""Timing of fedrax's rounds."""

from __future__ import annotations

import os
import time
from typing import Any

from benchmarks.timing import STARTED, RoundClock
from fedrax import Algorithm, Federation, Result, Task, simulate
from fedrax.simulation import Event, RunInfo
from fedrax.simulation.timer import compute_clock


class Times:
    """Sink that records the wall time and the run's own clock at each event."""

    def __init__(self) -> None:
        self.began = 0.0
        self.wall: list[float] = []
        self.working: list[float] = []
        self.own: list[float] = []

    def start(self, run: RunInfo) -> None:
        self.began = time.monotonic()

    def event(self, event: Event) -> None:
        self.wall.append(time.monotonic())
        self.working.append(compute_clock())
        self.own.append(event["seconds"])

    def finish(self, result: Result | None) -> None:
        pass

    def clock(self) -> RoundClock:
        """Durations of the rounds, without the last one, which ends with an evaluation.

        Rounds run in compiled blocks, and the run's clock gives each of them its share of the block's time. Host work
        between blocks is not included in that clock and is added in equal parts to all rounds. The first round, the
        warm-up, includes compilation.
        """
        own = [later - earlier for earlier, later in zip(self.own, self.own[1:], strict=False)]
        between = (self.working[-1] - self.working[0]) - (self.own[-1] - self.own[0])
        rounds = [self.wall[0] - self.began, *(seconds + between / len(own) for seconds in own[:-1])]
        started = os.environ.get(STARTED)
        return RoundClock(rounds, self.wall[0] - float(started) if started else None)


def device_peak_mb() -> float | None:
    """Peak memory of arrays and programs on the first device; None on a CPU."""
    import jax

    found = jax.local_devices()[0].memory_stats() or {}
    return round(found["peak_bytes_in_use"] / 2**20, 1) if "peak_bytes_in_use" in found else None


def time_rounds(
    algorithm: Algorithm, task: Task, federation: Federation, rounds: int, **settings: Any
) -> tuple[RoundClock, Result]:
    """Simulate ``rounds`` rounds, of which the first is warm-up and the last ends with the only evaluation.

    ``settings`` are those of ``fedrax.simulate``.
    """
    times = Times()
    result = simulate(algorithm, task, federation, rounds=rounds, eval_every=rounds, sinks=[times], **settings)
    return times.clock(), result
