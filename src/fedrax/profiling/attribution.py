"""Parts a trace's time among the parts of a round, and among what bounds them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from fedrax.compiled.scopes import AGGREGATE, GATHER, GRADIENT, SERVER, STATES
from fedrax.profiling import trace
from fedrax.profiling.hlo import Cost, ProgramText
from fedrax.profiling.measurement import Traced

NAMES = {
    GATHER: "gather batches",
    GRADIENT: "gradients",
    None: "local steps",
    STATES: "client states",
    AGGREGATE: "aggregate",
    SERVER: "server",
}
"""What a part of a round is called; ``local steps`` are what clients do besides gathering and gradients."""
SUMS = "sum of uploads"
"""What each device adds up as its clients finish; ``aggregate`` joins the devices."""
SMALL_MICROSECONDS = {"cpu": 0.5}
"""Below this mean time much of an operation is its start; 5 on accelerators."""
WAIT, REST = "wait for other devices", "rest of the round"
_LEAST_KEPT = 0.1
"""Of an operation's time in the trace, however much of it looks like tracing."""


@dataclass
class DeviceTime:
    """Milliseconds a round on the mean device, by part and by kind."""

    parts: dict[tuple[int | None, str], float] = field(default_factory=lambda: defaultdict(float))
    operations: dict[tuple[int | None, str], float] = field(default_factory=lambda: defaultdict(float))
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cost: Cost = field(default_factory=Cost)
    """A round's, on all devices."""


def attribute(traced: Traced, program: ProgramText, small: float, ms: float) -> DeviceTime:
    """The trace's times, without what tracing costs, scaled to ``ms`` milliseconds a round.

    Tracing costs each execution of an operation the same: as much as makes the trace as long as the run without.
    """
    count = len(traced.timelines)
    nanoseconds: dict[str, float] = defaultdict(float)
    runs: dict[str, int] = defaultdict(int)
    waited = 0.0
    for timeline, waiting in zip(traced.timelines, trace.waits(traced.timelines), strict=True):
        waited += sum(waiting.values())
        for name, charged in timeline.charged.items():
            nanoseconds[name] += charged - waiting.get(name, 0)
            runs[name] += timeline.runs[name]
    cost = _tracing_cost(nanoseconds, runs, count * 1e9 * (traced.untraced - traced.outside) - waited)
    made, seen = DeviceTime(), set(runs)
    parts: dict[tuple[int | None, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, spent in nanoseconds.items():
        phase, part = program.scope(name)
        # what clients do is in proportion to the clients that ran, the rest happens once a round
        per_round = 1 / traced.rounds / (traced.clients if phase is not None else 1.0)
        key = (phase, _name(phase, part))
        net = max(spent - cost * runs[name], _LEAST_KEPT * spent) * per_round
        once = _one(program, name, seen)
        made.cost = made.cost.plus(once, runs[name] * per_round)
        made.operations[key] += runs[name] * per_round / count
        parts[key][_kind(program, name, once, part, net / (runs[name] * per_round), small)] += net
    if waited:
        parts[None, WAIT]["waiting"] += waited / traced.rounds
    scale = ms / max(sum(sum(kinds.values()) for kinds in parts.values()), 1e-9)
    for key, kinds in parts.items():
        made.parts[key] = scale * sum(kinds.values())
        for kind, spent in kinds.items():
            made.kinds[kind] += scale * spent
    return made


def _name(phase: int | None, part: str | None) -> str:
    if phase is None:
        return NAMES.get(part, REST) if part is not None else REST
    return SUMS if part == AGGREGATE else NAMES.get(part, NAMES[None])


def _tracing_cost(nanoseconds: dict[str, float], runs: dict[str, int], without: float) -> float:
    """Nanoseconds an execution, found by bisection: without them the operations take ``without`` together.

    At most what the smallest tenth of all executions take: where other programs disturb the measurement, the rest
    of the difference is not the tracing's.
    """
    means = sorted((spent / runs[name], runs[name]) for name, spent in nanoseconds.items())
    tenth, low, high = 0.1 * sum(runs.values()), 0.0, 0.0
    for mean, times in means:
        tenth -= times
        if tenth <= 0:
            high = mean
            break
    for _ in range(60):
        cost = (low + high) / 2
        left = sum(max(spent - cost * runs[name], _LEAST_KEPT * spent) for name, spent in nanoseconds.items())
        low, high = (cost, high) if left > without else (low, cost)
    return low


def _one(program: ProgramText, name: str, seen: set[str]) -> Cost:
    """What one execution costs: of a loop or call all of it, where the trace does not show its operations."""
    if program.is_container(name):
        return Cost() if any(inner in seen for inner in program.inner(name)) else program.whole_cost(name)
    return program.cost(name)


def _kind(program: ProgramText, name: str, cost: Cost, part: str | None, nanoseconds: float, small: float) -> str:
    """What bounds an operation; the rules are those of :mod:`fedrax.profiling.verdict`."""
    if cost.flops:
        return "products"
    if program.is_collective(name):
        return "exchange"
    if nanoseconds < 1e3 * small:
        return "small"
    return "gather" if part == GATHER else "memory"
