"""Profile of a round: its parts, the heaviest operations, and what to do."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.devices import use_all_cores
from fedrax.errors import FedraxError
from fedrax.profiling import machine_limits
from fedrax.profiling.advice import HeavyOperation, advise, heaviest
from fedrax.profiling.attribution import NAMES, REST, SUMS, WAIT, OperationTime, attribute
from fedrax.profiling.machine_limits import MachineLimits
from fedrax.profiling.measurement import Measurement, RoundTimer
from fedrax.simulation.process import numeric_context
from fedrax.simulation.settings import Settings
from fedrax.simulation.setup import Setup, prepare

_ORDER = [*NAMES.values(), SUMS, WAIT, REST, "rounds", "evaluate", "host"]
"""Order of the parts of a round."""


@dataclass(frozen=True)
class RoundPart:
    """The time of one part of a round.

    Example:
        >>> fedrax.profiling.RoundPart("gradients", None, ms=3.0, share=0.6, operations=120.0).name
        'gradients'
    """

    name: str
    """Name of the part: gather batches, gradients, local steps, aggregate, ..."""
    phase: int | None
    """The phase of the algorithm, from 1; None for algorithms of one phase and outside of phases."""
    ms: float
    """Milliseconds in a round."""
    share: float
    """Share of the round."""
    operations: float
    """Executions of operations in a round on each device."""


@dataclass(frozen=True)
class Profile:
    """The time of a round by its parts, its heaviest operations, and what to do.

    Times are milliseconds of a round, including its share of the evaluations.

    Example:
        >>> federation = fedrax.Federation.from_dataset(fedrax.data.load("digits"), fedrax.data.Shards(10, 2), seed=0)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((8, 8), 10))
        >>> settings = fedrax.Settings(rounds=2, cohort_size=2, plan="loop")
        >>> profile = fedrax.profiling.profile(fedrax.FedAvg(), task, federation, settings, rounds=1)
        >>> [part.name for part in profile.parts]
        ['rounds', 'evaluate', 'host']
    """

    algorithm: str
    """The method."""
    plan: str
    """The execution plan, in words."""
    devices: int
    """Number of devices."""
    clients: float
    """Clients in a round, the mean."""
    gradients: float
    """Per-sample gradients in a round, the mean."""
    rounds_timed: int
    """Number of rounds that were timed."""
    ms: float
    """Milliseconds of a round."""
    parts: list[RoundPart]
    """In the order of a round; they sum to ``ms``."""
    kinds: dict[str, float]
    """The same milliseconds by kind of operation; see :mod:`fedrax.profiling.advice`."""
    heaviest: list[HeavyOperation]
    """The heaviest operations; empty under plans that are not one compiled program."""
    compile_seconds: float
    """Compilation of the program of the rounds without the compilation cache; 0 without such a program."""
    evaluation_compile_seconds: float
    """Compilation of the evaluation."""
    evaluation_ms: float
    """Milliseconds of one evaluation."""
    limits: MachineLimits
    """What the devices can do."""
    flops_a_round: float
    """Floating-point operations of matrix products and convolutions in a round, two for each multiply-add."""
    gflops_in_products: float
    """GFLOP/s during the operations that contain products."""
    operations: float
    """Executions of operations in a round on each device."""
    estimated_bytes: int
    """Estimated memory of the work of the clients that a device computes at a time, which chooses their number."""
    allocated_bytes: int | None
    """Memory that the compiled program allocates for intermediate results on a device; None without such a program."""
    peak_bytes: int | None
    """Largest memory in use on a device during the profile; None where the backend does not report it."""
    advice: list[str]
    """What to do, the most important first."""
    notes: list[str]
    """How the times were measured, and disturbances."""

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values.

        Returns:
            The fields, with nested dictionaries.
        """
        return dataclasses.asdict(self) | {"limits": self.limits._asdict()}


@checked_arguments
def profile(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    *,
    rounds: int | None = None,
    keep_trace: Path | str | None = None,
) -> Profile:
    """Time some rounds of the run that ``simulate`` would make with these arguments.

    Args:
        algorithm: The method.
        task: The task.
        federation: The clients and their data.
        settings: Settings of the run.
        rounds: Number of rounds to time; by default as many as take about two seconds.
        keep_trace: Directory for the raw trace, for TensorBoard, XProf or Perfetto; by default it is deleted.

    Returns:
        The time of a round by its parts, the heaviest operations and what to do.

    Raises:
        FedraxError: For settings that ``simulate`` does not accept, and for rounds that diverge.

    Example:
        >>> federation = fedrax.Federation.from_dataset(fedrax.data.load("digits"), fedrax.data.Shards(10, 2), seed=0)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((8, 8), 10))
        >>> settings = fedrax.Settings(rounds=2, cohort_size=2, plan="loop")
        >>> fedrax.profiling.profile(fedrax.FedAvg(), task, federation, settings, rounds=1).rounds_timed
        1
    """
    settings = settings or Settings()
    if rounds is not None and not 1 <= rounds < 2**31:
        raise FedraxError(f"the rounds to time must be 1 or more and fit into 32 bits, not {rounds}")
    if not settings.rounds:
        raise FedraxError("a run of 0 rounds has no round to profile: set rounds to 1 or more")
    use_all_cores()
    with numeric_context(settings.dtype):
        setup = prepare(algorithm, task, federation, settings)
        measured = RoundTimer(setup, rounds, None if keep_trace is None else Path(keep_trace)).measure()
        return assemble(setup, measured, machine_limits.measure(setup.engine.mesh, settings.dtype, settings.precision))


def assemble(setup: Setup, measured: Measurement, machine: MachineLimits) -> Profile:
    """Assemble the profile from measurements."""
    settings, phases = setup.settings, len(setup.algorithm.phases)
    spent, note = _spent(setup, measured)
    evaluations = sum(map(settings.evaluates, range(1, settings.rounds + 1)))
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
        estimated_bytes=setup.traced.peak_bytes * max(1, setup.engine.program.chunk),
        allocated_bytes=measured.allocated,
        peak_bytes=measured.peak,
        advice=advise(setup, kinds, measured.compile + measured.evaluate_compile),
        notes=[*measured.notes, note],
    )


def _spent(setup: Setup, measured: Measurement) -> tuple[list[OperationTime], str]:
    """(times of the operations of a round without evaluations, a note on how they were measured)."""
    traced, program, per_round = measured.traced, measured.program, 1e3 / measured.rounds
    call, host = measured.call * per_round, measured.host * per_round
    platform = setup.engine.mesh.devices.flat[0].platform
    if traced is None or program is None or not traced.timelines:
        note = f"The trace of this backend ({platform}) has no names of operations: only whole calls are timed."
        if program is None:
            note = f"Plan {setup.plan} is not one program: only whole calls are timed."
        return [OperationTime(None, "rounds", "rounds", call), OperationTime(None, "host", "host", host)], note
    # time of a call outside of device work, independent of its number of rounds
    outside = per_round * min(traced.untraced - traced.busy, (1 - traced.busy / traced.untraced) * measured.call)
    spent = attribute(traced, program, 0.5 if platform == "cpu" else 5.0, call - outside)
    what = f"{traced.rounds} rounds" if traced.rounds > 1 else "one round"
    if traced.clients < 1:
        what += f" with {traced.clients:.0%} of its clients"
    slower = traced.seconds / traced.untraced
    note = (
        f"Times are from rounds without a trace. Shares are from a trace of {what}, which took {slower:.1f} times as"
        " long; each operation's share is corrected for the overhead of tracing."
    )
    return [*spent, OperationTime(None, "host", "host", host + outside)], note
