"""Puts measurements together: where a round's time goes, what the devices achieve, and what bounds the round."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError
from fedrax.profiling import machine_limits
from fedrax.profiling.advice import Bottleneck, HeavyOperation, heaviest, judge
from fedrax.profiling.attribution import NAMES, REST, SUMS, WAIT, OperationTime, attribute
from fedrax.profiling.machine_limits import MachineLimits
from fedrax.profiling.measurement import Measurement, RoundTimer
from fedrax.simulation.process import arithmetic
from fedrax.simulation.settings import Settings
from fedrax.simulation.setup import Setup, prepare

_ORDER = [*NAMES.values(), SUMS, WAIT, REST, "rounds", "evaluate", "host"]


@dataclass(frozen=True)
class RoundPart:
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
    parts: list[RoundPart]
    """In the order of a round; they sum to ``ms``."""
    kinds: dict[str, float]
    """The same milliseconds by what bounds them; see :mod:`fedrax.profiling.advice`."""
    heaviest: list[HeavyOperation]
    """The heaviest first; none where calls cannot be looked into."""
    compile_seconds: float
    """Of the program for the rounds, without the cache of compiled programs; 0 where there is none."""
    evaluation_compile_seconds: float
    evaluation_ms: float
    """One evaluation."""
    limits: MachineLimits
    flops_a_round: float
    """Of matrix products and convolutions, two for each multiplication with its addition."""
    gflops_in_products: float
    """10^9 of them a second over the time of the operations that they are in."""
    operations: float
    """Executions a round on each device."""
    verdict: Bottleneck
    notes: list[str]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"limits": self.limits._asdict()}


def profile(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    *,
    rounds: int | None = None,
    keep_trace: Path | str | None = None,
) -> Profile:
    """Run some rounds of the setup that ``simulate`` would run with these arguments, and say what takes time.

    rounds: to time; by default as many as take about two seconds. keep_trace: where to keep the raw trace. Nothing
    else is kept. Raises FedraxError for settings that ``simulate`` refuses, and for rounds that diverge or are none.
    """
    settings = settings or Settings()
    if rounds is not None and not 1 <= rounds < 2**31:
        raise FedraxError(f"the rounds to time must be 1 or more and fit into 32 bits, not {rounds}")
    use_all_cores()
    with arithmetic(settings.dtype):
        setup = prepare(algorithm, task, federation, settings)
        measured = RoundTimer(setup, rounds, None if keep_trace is None else Path(keep_trace)).measure()
        return assemble(setup, measured, machine_limits.measure(setup.engine.mesh, settings.dtype, settings.precision))


def assemble(setup: Setup, measured: Measurement, machine: MachineLimits) -> Profile:
    """The profile of measurements."""
    settings, phases = setup.settings, len(setup.algorithm.phases)
    spent, note = _spent(setup, measured)
    evaluations = -(-settings.rounds // settings.eval_every)  # the last round is always evaluated
    evaluation = 1e3 * measured.evaluate * evaluations / settings.rounds
    spent += [OperationTime(None, "evaluate", "evaluation", evaluation)]
    total = sum(s.ms for s in spent)
    ms, kinds, operations = defaultdict(float), defaultdict(float), defaultdict(float)
    for s in spent:
        ms[s.phase, s.part] += s.ms
        operations[s.phase, s.part] += s.executions
        kinds[s.kind] += s.ms
    in_order = sorted(ms, key=lambda key: (99 if key[0] is None else key[0], _ORDER.index(key[1])))
    flops = sum(s.flops for s in spent)
    achieved = flops / kinds["products"] / 1e6 if flops else 0.0
    return Profile(
        algorithm=setup.info.algorithm,
        plan=setup.info.plan,
        devices=setup.engine.mesh.devices.size,
        clients=measured.clients,
        gradients=measured.gradients,
        rounds_timed=measured.calls * measured.rounds,
        ms=total,
        parts=[
            RoundPart(
                part, None if phase is None or phases == 1 else phase + 1, time, time / total, operations[phase, part]
            )
            for phase, part in in_order
            for time in [ms[phase, part]]
        ],
        kinds={kind: kinds[kind] for kind in sorted(kinds, key=lambda kind: -kinds[kind]) if kinds[kind] > 0},
        heaviest=heaviest(setup, spent, total, machine),
        compile_seconds=measured.compile,
        evaluation_compile_seconds=measured.evaluate_compile,
        evaluation_ms=1e3 * measured.evaluate,
        limits=machine,
        flops_a_round=flops,
        gflops_in_products=achieved,
        operations=sum(s.executions for s in spent),
        verdict=judge(
            setup,
            kinds,
            products_of_limit=achieved / machine.gflops,
            compile_seconds=measured.compile + measured.evaluate_compile,
        ),
        notes=[*measured.notes, note],
    )


def _spent(setup: Setup, measured: Measurement) -> tuple[list[OperationTime], str]:
    """(a round's time but for evaluations, how it is known)."""
    traced, program, per_round = measured.traced, measured.program, 1e3 / measured.rounds
    call, host = measured.call * per_round, measured.host * per_round
    platform = setup.engine.mesh.devices.flat[0].platform
    if traced is None or program is None or not traced.timelines:
        note = f"The trace of this backend ({platform}) names no operations: only whole calls are known."
        if program is None:
            note = f"Plan {setup.plan} is not one program: what its calls consist of is not known."
        return [OperationTime(None, "rounds", "rounds", call), OperationTime(None, "host", "host", host)], note
    # of a call, however many rounds it has
    outside = per_round * min(traced.untraced - traced.busy, (1 - traced.busy / traced.untraced) * measured.call)
    spent = attribute(traced, program, 0.5 if platform == "cpu" else 5.0, call - outside)
    what = f"{traced.rounds} rounds" if traced.rounds > 1 else "one round"
    if traced.clients < 1:
        what += f" with {traced.clients:.0%} of its clients"
    slower = traced.seconds / traced.untraced
    note = (
        f"Shares are from a trace of {what}, which took {slower:.1f} times as long as without one; times are from"
        " rounds without, and each operation's share is corrected for the tracing."
    )
    return [*spent, OperationTime(None, "host", "host", host + outside)], note
