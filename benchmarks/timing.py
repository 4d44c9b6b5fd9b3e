"""Measurements and reports of a runner (one simulator, one workload, one fresh process).

Imports only NumPy and the standard library, because the environments of all simulators import this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workloads import WARMUP_ROUNDS, WORKLOADS, Arrays, Workload

RESULT_PREFIX = "benchmark-result: "  # marks the result in the output of the process
STARTED = "BENCHMARK_STARTED"  # environment: time.monotonic() just before the parent started the process


@dataclass
class RoundClock:
    """Call :meth:`start` just before the first round and :meth:`tick` at the end of each round."""

    seconds: list[float] = field(default_factory=list)
    first_round_since_process_start: float | None = None
    _last: float = 0.0

    def start(self) -> None:
        self._last = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        if not self.seconds and STARTED in os.environ:
            self.first_round_since_process_start = now - float(os.environ[STARTED])
        self.seconds.append(now - self._last)
        self._last = now

    def summary(self) -> dict[str, float | int | None]:
        """Times in seconds; the warm-up round is separate."""
        steady = self.seconds[WARMUP_ROUNDS:]
        return {
            "rounds": len(steady),
            "round_median": statistics.median(steady),
            "round_min": min(steady),
            "round_max": max(steady),
            "first_round": self.seconds[0],
            "first_round_with_import": self.first_round_since_process_start,
        }


class TargetClock:
    """The seconds until a test accuracy was reached, since the start of the process."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.seconds: float | None = None
        self._start = float(os.environ.get(STARTED, time.monotonic()))

    @property
    def elapsed(self) -> float:
        """Seconds since the start of the process."""
        return time.monotonic() - self._start

    def reached(self, accuracy: float) -> None:
        """Record an evaluation that has just ended."""
        if self.seconds is None and accuracy >= self.target:
            self.seconds = self.elapsed

    def summary(self) -> dict[str, float | None]:
        """The target, and the seconds to it; None if it was not reached."""
        return {"target": self.target, "seconds_to_target": self.seconds}


def runner_arguments(
    description: str, channels_last: bool = False, **integers: int
) -> tuple[argparse.Namespace, Workload, Arrays]:
    """Parses a runner's command line: ``--workload``, ``--arrays``, ``--device``, ``--precision``, and integer options
    with their defaults.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument("--arrays", required=True, help="the folder of the workload's arrays")
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="for simulators that do not choose one"
    )
    precisions = ("highest", "tensorfloat32", "bfloat16")
    parser.add_argument("--precision", default="highest", choices=precisions, help="of products")
    for name, default in integers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    return arguments, WORKLOADS[arguments.workload], Arrays(arguments.arrays, channels_last)


def report(
    clock: RoundClock,
    versions: dict[str, str],
    loss: float,
    accuracy: float,
    device_peak_mb: float | None = None,
    **more: Any,
) -> None:
    """Prints the runner's one line of results, with ``device_peak_mb`` of an accelerator and ``more`` fields."""
    result = clock.summary() | {"test_loss": loss, "test_accuracy": accuracy, "versions": versions} | more
    result |= {"device_peak_mb": device_peak_mb} if device_peak_mb is not None else {}
    print(RESULT_PREFIX + json.dumps(result), flush=True)
