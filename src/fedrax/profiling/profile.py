"""Puts measurements together: where a round's time goes, what the devices achieve, and what bounds the round."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from fedrax.algorithm import Algorithm
from fedrax.data import Federation
from fedrax.profiling import limits, trace
from fedrax.profiling.hlo import Cost, ProgramText
from fedrax.profiling.limits import Limits
from fedrax.profiling.measurement import Measurement, Stopwatch, Traced
from fedrax.profiling.verdict import Verdict, judge
from fedrax.scopes import AGGREGATE, GATHER, GRADIENT, SERVER, STATES
from fedrax.simulation import backend
from fedrax.simulation.run import Simulation
from fedrax.simulation.settings import Settings
from fedrax.task import Task

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
_LEAST_KEPT = 0.1
"""Of an operation's time in the trace, however much of it looks like tracing."""


@dataclass(frozen=True)
class Part:
    """A part of a round."""

    name: str
    phase: int | None
    """Of the algorithm's phases, from 1; None where it has but one, and outside of them."""
    ms: float
    share: float
    """Of the whole round."""
    operations: float
    """Executions a round on each device."""


@dataclass(frozen=True)
class Profile:
    """What ``fedrax profile`` reports. Times are milliseconds a round, the evaluations' share in it included."""

    algorithm: str
    plan: str
    devices: int
    clients: float
    gradients: float
    """Samples' gradients a round."""
    rounds_timed: int
    ms: float
    parts: list[Part]
    """In the order of a round; they sum to ``ms``."""
    kinds: dict[str, float]
    """The same milliseconds by what bounds them; see :mod:`fedrax.profiling.verdict`."""
    compile_seconds: float
    """Of the program for the rounds, without the cache of compiled programs; 0 where there is none."""
    evaluation_compile_seconds: float
    evaluation_ms: float
    """One evaluation."""
    limits: Limits
    verdict: Verdict
    notes: list[str]
    gflops: float = 0.0
    """Of matrix products (and convolutions) over the devices' time in rounds: 10^9 a second."""
    gflops_in_products: float = 0.0
    """The same over the time of these operations alone."""
    gigabytes: float = 0.0
    """10^9 bytes a second that operations touch, in caches or memory."""
    flops_a_round: float = 0.0
    bytes_a_round: float = 0.0
    operations: float = 0.0
    """Executions a round on each device."""
    operation_microseconds: float = 0.0
    """The mean time of one, its start included."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        table = dataclasses.asdict(self)
        return table | {"limits": self.limits._asdict(), "verdict": dataclasses.asdict(self.verdict)}


@dataclass
class _Device:
    """Milliseconds a round on the mean device, by part and by kind."""

    parts: dict[tuple[int | None, str], float] = field(default_factory=lambda: defaultdict(float))
    operations: dict[tuple[int | None, str], float] = field(default_factory=lambda: defaultdict(float))
    kinds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cost: Cost = field(default_factory=Cost)
    """A round's, on all devices."""


def profile(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    *,
    rounds: int | None = None,
    keep_trace: Path | None = None,
) -> Profile:
    """Run some rounds of the simulation that ``simulate`` would run with these arguments, and say what takes time.

    rounds: to time; by default as many as take about two seconds. keep_trace: where to keep the raw trace. Nothing
    else is kept. Raises FedraxError for settings that ``simulate`` refuses, and for rounds that diverge.
    """
    settings = settings or Settings()
    backend.use_all_cores()
    with jax.enable_x64(settings.dtype == "float64"), jax.default_matmul_precision(settings.precision):
        simulation = Simulation(algorithm, task, federation, settings, None, None, None)
        measured = Stopwatch(simulation, rounds, keep_trace).measure()
        return assemble(simulation, measured, limits.measure(simulation.engine.mesh, settings.dtype))


def assemble(simulation: Simulation, measured: Measurement, machine: Limits) -> Profile:
    """The profile of measurements."""
    settings, mesh, notes = simulation.settings, simulation.engine.mesh, [*measured.notes]
    platform = mesh.devices.flat[0].platform
    call = 1e3 * measured.call / measured.rounds
    traced, program = measured.traced, measured.program
    device = _Device()
    overhead = 0.0
    if traced is not None and program is not None and traced.timelines:
        spans = [timeline.span / 1e9 for timeline in traced.timelines]
        overhead = min(1e3 * max(traced.seconds - max(spans), 0.0) / measured.rounds, call)
        device = _on_devices(traced, program, SMALL_MICROSECONDS.get(platform, 5.0), call - overhead)
        notes.append(_how_traced(traced))
    elif program is not None:
        notes.append(f"The trace of this backend ({platform}) names no operations: only whole calls are known.")
    else:
        notes.append(f"Plan {simulation.plan} is not one program: what its calls consist of is not known.")
    if not device.parts:
        device.parts[(None, "rounds")] = device.kinds["rounds"] = call
    host = (measured.plan + measured.events) * 1e3 / measured.rounds + overhead
    evaluation = 1e3 * measured.evaluate / min(settings.eval_every, settings.rounds)
    device.parts[(None, "evaluate")] = device.kinds["evaluation"] = evaluation
    device.parts[(None, "host")] = device.kinds["host"] = host
    total = sum(device.parts.values())
    phases = len(algorithm_phases(simulation))
    parts = [
        Part(name, None if phase is None or phases == 1 else phase + 1, ms, ms / total, device.operations[phase, name])
        for (phase, name), ms in sorted(device.parts.items(), key=_in_order)
    ]
    in_rounds, count = call - overhead, sum(device.operations.values())
    products = device.kinds["products"]
    compiling = 0.0 if program is None else measured.compile
    evaluation_compile = max(measured.evaluate_first - measured.evaluate, 0.0) if simulation.evaluators else 0.0
    achieved = device.cost.flops / products / 1e6 if products else 0.0
    return Profile(
        algorithm=simulation.info.algorithm,
        plan=simulation.info.plan,
        devices=mesh.devices.size,
        clients=measured.clients,
        gradients=measured.gradients,
        rounds_timed=measured.calls * measured.rounds,
        ms=total,
        parts=parts,
        kinds={kind: ms for kind, ms in sorted(device.kinds.items(), key=lambda item: -item[1]) if ms > 0},
        compile_seconds=compiling,
        evaluation_compile_seconds=evaluation_compile,
        evaluation_ms=1e3 * measured.evaluate,
        limits=machine,
        verdict=judge(
            simulation,
            device.kinds,
            products_of_limit=achieved / machine.gflops,
            compile_seconds=compiling + evaluation_compile,
            microseconds=1e3 * in_rounds / count if count else 0.0,
        ),
        notes=notes,
        gflops=device.cost.flops / in_rounds / 1e6,
        gflops_in_products=achieved,
        gigabytes=device.cost.bytes / in_rounds / 1e6,
        flops_a_round=device.cost.flops,
        bytes_a_round=device.cost.bytes,
        operations=count,
        operation_microseconds=1e3 * in_rounds / count if count else 0.0,
    )


def algorithm_phases(simulation: Simulation) -> tuple:
    """The phases of the simulation's algorithm."""
    return simulation.algorithm.phases


def _in_order(item: tuple[tuple[int | None, str], float]) -> tuple:
    (phase, name), _ = item
    order = [*NAMES.values(), SUMS, "wait for other devices", "rest of the round", "rounds", "evaluate", "host"]
    return (99 if phase is None else phase, order.index(name))


def _on_devices(traced: Traced, program: ProgramText, small: float, ms: float) -> _Device:
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
    outside = traced.seconds - max(timeline.span for timeline in traced.timelines) / 1e9
    cost = _tracing_cost(nanoseconds, runs, count * 1e9 * (traced.untraced - outside) - waited)
    made, seen = _Device(), set(runs)
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
        parts[None, "wait for other devices"]["waiting"] += waited / traced.rounds
    scale = ms / max(sum(sum(kinds.values()) for kinds in parts.values()), 1e-9)
    for key, kinds in parts.items():
        made.parts[key] = scale * sum(kinds.values())
        for kind, spent in kinds.items():
            made.kinds[kind] += scale * spent
    return made


def _name(phase: int | None, part: str | None) -> str:
    if phase is None:
        return NAMES.get(part, "rest of the round") if part is not None else "rest of the round"
    return SUMS if part == AGGREGATE else NAMES[part]


def _tracing_cost(nanoseconds: dict[str, float], runs: dict[str, int], without: float) -> float:
    """Nanoseconds an execution, found by bisection: without them the operations take ``without`` together."""
    low, high = 0.0, max(spent / runs[name] for name, spent in nanoseconds.items())
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


def _how_traced(traced: Traced) -> str:
    what = f"{traced.rounds} rounds" if traced.rounds > 1 else "one round"
    if traced.clients < 1:
        what += f" with {traced.clients:.0%} of its clients"
    slower = traced.seconds / traced.untraced
    return (
        f"Shares are from a trace of {what}, which took {slower:.1f} times as long as without one; times are from"
        " rounds without, and each operation's share is corrected for the tracing."
    )
