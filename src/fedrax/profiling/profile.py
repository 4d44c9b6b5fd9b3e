"""Puts measurements together: where a round's time goes, what the devices achieve, and what bounds the round."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.compiled.cores import use_all_cores
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.profiling import limits
from fedrax.profiling.attribution import NAMES, REST, SMALL_MICROSECONDS, SUMS, WAIT, DeviceTime, attribute
from fedrax.profiling.limits import Limits
from fedrax.profiling.measurement import Measurement, Stopwatch, Traced
from fedrax.profiling.verdict import Verdict, judge
from fedrax.simulation.process import arithmetic
from fedrax.simulation.settings import Settings
from fedrax.simulation.setup import Setup, prepare


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


def profile(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    *,
    rounds: int | None = None,
    keep_trace: Path | None = None,
) -> Profile:
    """Run some rounds of the setup that ``simulate`` would run with these arguments, and say what takes time.

    rounds: to time; by default as many as take about two seconds. keep_trace: where to keep the raw trace. Nothing
    else is kept. Raises FedraxError for settings that ``simulate`` refuses, and for rounds that diverge.
    """
    settings = settings or Settings()
    use_all_cores()
    with arithmetic(settings.dtype):
        setup = prepare(algorithm, task, federation, settings)
        measured = Stopwatch(setup, rounds, keep_trace).measure()
        return assemble(setup, measured, limits.measure(setup.engine.mesh, settings.dtype))


def assemble(setup: Setup, measured: Measurement, machine: Limits) -> Profile:
    """The profile of measurements."""
    settings, mesh, notes = setup.settings, setup.engine.mesh, [*measured.notes]
    call = 1e3 * measured.call / measured.rounds
    device, overhead, note = _of_devices(setup, measured, call)
    notes.append(note)
    host = (measured.plan + measured.events) * 1e3 / measured.rounds + overhead
    evaluation = 1e3 * measured.evaluate / min(settings.eval_every, settings.rounds)
    device.parts[(None, "evaluate")] = device.kinds["evaluation"] = evaluation
    device.parts[(None, "host")] = device.kinds["host"] = host
    total = sum(device.parts.values())
    phases = len(setup.algorithm.phases)
    parts = [
        Part(name, None if phase is None or phases == 1 else phase + 1, ms, ms / total, device.operations[phase, name])
        for (phase, name), ms in sorted(device.parts.items(), key=_in_order)
    ]
    in_rounds, count = call - overhead, sum(device.operations.values())
    products = device.kinds["products"]
    compiling = 0.0 if measured.program is None else measured.compile
    evaluation_compile = max(measured.evaluate_first - measured.evaluate, 0.0) if setup.evaluators else 0.0
    achieved = device.cost.flops / products / 1e6 if products else 0.0
    return Profile(
        algorithm=setup.info.algorithm,
        plan=setup.info.plan,
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
            setup,
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


def _of_devices(setup: Setup, measured: Measurement, call: float) -> tuple[DeviceTime, float, str]:
    """(the devices' time, ms a round in which none is at work, how they are known); ``call``: ms a round."""
    traced, program = measured.traced, measured.program
    platform = setup.engine.mesh.devices.flat[0].platform
    if traced is not None and program is not None and traced.timelines:
        outside = min(traced.outside, measured.call * traced.outside / traced.untraced)
        overhead = 1e3 * outside / measured.rounds
        small = SMALL_MICROSECONDS.get(platform, 5.0)
        return attribute(traced, program, small, call - overhead), overhead, _how_traced(traced)
    device = DeviceTime()
    device.parts[(None, "rounds")] = device.kinds["rounds"] = call
    if program is not None:
        return device, 0.0, f"The trace of this backend ({platform}) names no operations: only whole calls are known."
    return device, 0.0, f"Plan {setup.plan} is not one program: what its calls consist of is not known."


def _in_order(item: tuple[tuple[int | None, str], float]) -> tuple:
    (phase, name), _ = item
    order = [*NAMES.values(), SUMS, WAIT, REST, "rounds", "evaluate", "host"]
    return (99 if phase is None else phase, order.index(name))


def _how_traced(traced: Traced) -> str:
    what = f"{traced.rounds} rounds" if traced.rounds > 1 else "one round"
    if traced.clients < 1:
        what += f" with {traced.clients:.0%} of its clients"
    slower = traced.seconds / traced.untraced
    return (
        f"Shares are from a trace of {what}, which took {slower:.1f} times as long as without one; times are from"
        " rounds without, and each operation's share is corrected for the tracing."
    )
