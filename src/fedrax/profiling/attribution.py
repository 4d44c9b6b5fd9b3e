"""Attribution of a trace's time to operations of a program and to parts of a round."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from fedrax.profiling.hlo import OperationCost, OperationDescription, ProgramText
from fedrax.profiling.measurement import TracedRounds
from fedrax.profiling.trace import waits
from fedrax.xla import AGGREGATE, GATHER, GRADIENT, SERVER, STATES

NAMES = {
    GATHER: "gather batches",
    GRADIENT: "gradients",
    None: "local steps",
    STATES: "client states",
    AGGREGATE: "aggregate",
    SERVER: "server",
}
"""Names of the parts of a round; ``local steps`` is client work except gathering and gradients."""
SUMS = "sum of uploads"
"""The running sum of uploads on each device; ``aggregate`` combines devices."""
_LAUNCH_BYTES = 1024
"""Bytes below which the time of an operation is launch overhead, sometimes of another thread."""
_INTERRUPTION = 100_000
"""Nanoseconds: about the shortest time slice that the operating system gives to another program."""
WAIT, REST = "wait for other devices", "rest of the round"
"""Names of parts outside of phases."""


class OperationTime(NamedTuple):
    """Time of an operation in a round, the mean over devices."""

    phase: int | None
    part: str
    kind: str
    """Kind of time; see :mod:`fedrax.profiling.advice`."""
    ms: float
    executions: float = 0.0
    flops: float = 0.0
    """Floating-point operations in a round on all devices."""
    bytes: float = 0.0
    about: OperationDescription = OperationDescription()


def attribute(traced: TracedRounds, program: ProgramText, small: float, ms: float) -> list[OperationTime]:
    """Times of the trace's operations without the overhead of tracing, scaled to ``ms`` milliseconds in a round.

    The overhead is the same for each execution, up to nine tenths of its time. small: mean microseconds below which an
    operation is mostly launch overhead.
    """
    count, waiting, nanoseconds = len(traced.timelines), waits(traced.timelines), {}
    waited, executions = sum(waiting.values()), Counter()
    for name in {name for timeline in traced.timelines for name in timeline.charged}:
        charged = [time for timeline in traced.timelines for time in timeline.charged[name]]
        awaited = [time for timeline in traced.timelines for time in timeline.awaited[name]]
        meets = program.is_collective(name)
        own = sum(charged) if meets else sum_without_interruptions(charged)
        nanoseconds[name] = own + sum_without_interruptions(awaited) - waiting.get(name, 0)
        executions[name] = len(charged)
    beyond = sum(nanoseconds.values()) + waited - 1e9 * count * traced.busy
    tracing = max(beyond, 0.0) / max(executions.total(), 1)
    made: list[OperationTime] = []
    for name, spent in nanoseconds.items():
        phase, part = program.scope(name)
        # client work is proportional to the clients that ran, the rest runs once in a round
        times = 1 / traced.rounds / (traced.clients if phase is not None else 1.0)
        net = max(spent - tracing * executions[name], 0.1 * spent)
        cost, runs = program.cost(name), executions[name] * times
        kind = _kind(program, name, cost, part, net / executions[name] < 1e3 * small)
        about = program.describe(name) if name in program.operations else OperationDescription()
        work = (runs * cost.flops, runs * cost.bytes)
        made.append(OperationTime(phase, _part(phase, part), kind, net * times, runs / count, *work, about))
    if traced.idle is None:
        waited = waited / traced.rounds
    else:
        waited = traced.idle * sum(spent.ms for spent in made if spent.phase is not None)
    if waited:
        made.append(OperationTime(None, WAIT, "waiting", waited))
    scale = ms / max(sum(spent.ms for spent in made), 1e-9)
    return [spent._replace(ms=scale * spent.ms) for spent in made]


def sum_without_interruptions(times: list[int]) -> float:
    """The sum of times, each limited to three medians plus an interruption by another program."""
    return float(np.minimum(times, 3 * np.median(times) + _INTERRUPTION).sum()) if times else 0.0


def _part(phase: int | None, part: str | None) -> str:
    """The name of a part of the round."""
    if phase is None:
        return NAMES.get(part, REST) if part is not None else REST
    return SUMS if part == AGGREGATE else NAMES.get(part, NAMES[None])


def _kind(program: ProgramText, name: str, cost: OperationCost, part: str | None, small: bool) -> str:
    """The kind of an operation's time."""
    if cost.flops:
        return "products"
    if program.is_collective(name):
        return "exchange"
    if part == GATHER and not small:
        return "gather"
    return "small" if small or cost.bytes < _LAUNCH_BYTES else "memory"
