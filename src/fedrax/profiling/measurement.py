"""Timing of rounds: compilation, blocks with and without a trace, evaluation, and the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from fedrax.errors import FedraxError
from fedrax.profiling import trace
from fedrax.profiling.hlo import ProgramText
from fedrax.profiling.trace import Timeline
from fedrax.simulation.persistence.resume import initial_state
from fedrax.simulation.placement.streaming import RoundBlock
from fedrax.simulation.results.events import events_of
from fedrax.simulation.round import RoundInputs
from fedrax.simulation.run import make_block_loader
from fedrax.simulation.setup import Setup

_ROUNDS_A_CALL = 64
"""Largest number of rounds in a timed call."""
_SECONDS, _AT_MOST = 2.0, 10.0
"""Seconds to time by default: at least the first value; until three calls are timed, up to the second."""
_LITTLE, _MOST_TRACED = 0.05, 1.5
"""Seconds of the first trace, and of the longest one."""
_OPERATIONS = 300_000
"""Executions of operations in a trace. In a shorter trace, extra work of the first round, such as allocation, has a
larger share."""


@dataclass
class TracedRounds:
    """A few rounds, run with and without a trace."""

    rounds: int
    clients: float
    """Share of each round's clients that ran."""
    seconds: float
    """Seconds of the call with the trace."""
    untraced: float
    """Seconds of the call without the trace."""
    timelines: list[Timeline]
    """The operations of each device."""
    idle: float | None = None
    """If only some of a round's clients ran: the time that devices wait in the whole round, relative to client work. It
    cannot be measured in such a call, whose clients are distributed differently over devices."""

    @property
    def busy(self) -> float:
        """Seconds of the untraced call in which devices compute; only these are longer with a trace."""
        outside = self.seconds - max(timeline.span for timeline in self.timelines) / 1e9
        return max(self.untraced - max(outside, 0.0), 0.1 * self.untraced)


@dataclass
class Measurement:
    """Times in seconds, medians over repetitions."""

    rounds: int
    """Rounds in each timed call."""
    calls: int = 0
    """Number of timed calls."""
    compile: float = 0.0
    """Compilation of the program of a block of rounds without the cache; 0 if there is no such program."""
    call: float = 0.0
    """One call of ``rounds`` rounds, without the host's work."""
    host: float = 0.0
    """Sampling the cohorts of a call and making its events."""
    evaluate: float = 0.0
    """One evaluation."""
    evaluate_compile: float = 0.0
    """Compilation of the evaluation."""
    traced: TracedRounds | None = None
    """The traced rounds."""
    program: ProgramText | None = None
    """The compiled program."""
    allocated: int | None = None
    """Bytes that the compiled program allocates for intermediate results on a device."""
    peak: int | None = None
    """Largest number of bytes in use on a device so far; None where the backend does not report it."""
    clients: float = 0.0
    """Mean number of clients in a round."""
    gradients: float = 0.0
    """Mean number of per-sample gradients in a round."""
    notes: list[str] = field(default_factory=list)
    """Remarks on the measurement."""


class RoundTimer:
    """Times the first rounds of a run repeatedly; each call continues from the state of the last one.

    Args:
        setup: The run.
        rounds: Rounds to time, without those of the trace; by default as many as take two seconds.
        keep: Directory for the raw trace.
    """

    def __init__(self, setup: Setup, rounds: int | None = None, keep: Path | None = None):
        self.setup, self.rounds, self.keep = setup, rounds, keep
        self._run, self._carry, self._storage = setup.engine.run, cast(Any, None), make_block_loader(setup)

    def measure(self) -> Measurement:
        """Measure everything, in the order of a run."""
        settings = self.setup.settings
        most = min(self.rounds or _ROUNDS_A_CALL, _ROUNDS_A_CALL)
        made = Measurement(min(settings.evaluation_interval, settings.rounds, most))
        made.notes += other_work()
        try:
            self._carry = initial_state(self.setup, self._storage)
            first = self._storage.next_block(0, 1)
            if self.setup.plan in ("scan", "vmap"):
                self._compile(made, first)
            self._call(first)  # warm-up
            seconds, _ = self._call(first)
            # calls as long as a run's, which aims at one second
            made.rounds = max(1, min(made.rounds, int(1 / max(seconds, 1e-6))))
            self._blocks(made)
            self._evaluations(made)
            if made.program is not None:
                self._trace(made, made.program)
            stats = self.setup.engine.mesh.local_devices[0].memory_stats() or {}
            made.peak = stats.get("peak_bytes_in_use")
        finally:
            self._storage.close(failed=True)
        return made

    def _compile(self, made: Measurement, block: RoundBlock) -> None:
        """Compile the program of a block without the cache, and keep it and its text."""
        sim = self.setup
        self._bring(block)
        program = sim.engine.block(sim.algorithm)
        began = time.perf_counter()
        with without_compilation_cache():
            lowered = program.lower(sim.algorithm, self._carry, sim.engine.samples, sim.key, block.inputs, np.int32(1))
            compiled = lowered.compile()
        made.compile = time.perf_counter() - began
        made.program, memory = ProgramText(compiled.as_text() or ""), compiled.memory_analysis()
        made.allocated = None if memory is None else memory.temp_size_in_bytes

        def run(algorithm: Any, carry: Any, key: Any, inputs: RoundInputs, rounds: int) -> tuple[Any, dict]:
            carry, records, *_ = compiled(algorithm, carry, sim.engine.samples, key, inputs, np.int32(rounds))
            return carry, {name: np.asarray(value)[:rounds] for name, value in records.items()}

        self._run = run
        self._carry = self._storage.save_states(self._carry, block)

    def _bring(self, block: RoundBlock) -> None:
        """Move samples and client states of a block to the devices if they are stored elsewhere."""
        if block.samples is not None:
            self.setup.engine.samples = block.samples
        self._carry = self._storage.load_states(self._carry, block)

    def _call(self, block: RoundBlock) -> tuple[float, dict]:
        """Run a block; returns (seconds, records)."""
        sim, began = self.setup, time.perf_counter()
        self._bring(block)
        self._carry, records = self._run(sim.algorithm, self._carry, sim.key, block.inputs, block.rounds)
        jax.block_until_ready(self._carry)
        self._carry = self._storage.save_states(self._carry, block)
        seconds = time.perf_counter() - began
        if not np.all(records["sound"]):
            raise FedraxError(f"{sim.info.algorithm} diverges in the rounds to profile: try a smaller learning rate")
        return seconds, records

    def _blocks(self, made: Measurement) -> None:
        """Time calls as in a run, over the rounds of the run."""
        sim, rows = self.setup, []
        places = max(1, sim.settings.rounds // made.rounds)
        wanted = None if self.rounds is None else max(1, round(self.rounds / made.rounds))
        spent = 0.0
        while len(rows) < wanted if wanted else spent < _SECONDS or (len(rows) < 3 and spent < _AT_MOST):
            began = time.perf_counter()
            block = self._storage.next_block(len(rows) % places * made.rounds, made.rounds)
            planning = time.perf_counter() - began
            seconds, records = self._call(block)
            called = time.perf_counter()
            events_of(sim.info, records, block.inputs.count, [], 0.0)
            host = planning + time.perf_counter() - called
            share = made.rounds / block.rounds  # blocks are shorter if samples or states are streamed to devices
            clients = block.inputs.count[: block.rounds].sum(1).mean()
            rows.append((share * seconds, share * host, clients, np.mean(records["gradients"])))
            spent += share * seconds
        made.calls = len(rows)
        made.call, made.host = map(float, np.median(rows, axis=0)[:2])
        made.clients, made.gradients = map(float, np.mean(rows, axis=0)[2:])

    def _evaluations(self, made: Measurement) -> None:
        """Time evaluations."""
        sim, times = self.setup, []
        carry = self._carry._replace(store=self._storage.store(self._carry))
        while len(times) < 4 and sum(times[1:]) < _SECONDS:
            began = time.perf_counter()
            with without_compilation_cache():
                sim.evaluate(sim.algorithm, carry, sim.initial, sim.evaluators)
            times.append(time.perf_counter() - began)
        made.evaluate = float(np.median(times[1:]))
        made.evaluate_compile = max(times[0] - made.evaluate, 0.0) if sim.evaluators or sim.personal else 0.0

    def _trace(self, made: Measurement, program: ProgramText) -> None:
        """Trace a few rounds, then as many rounds as have about ``_OPERATIONS`` executions."""
        seconds = _LITTLE
        first = self._traced(made, program, seconds, None)
        executions = sum(len(times) for timeline in first.timelines for times in timeline.charged.values())
        seconds = min(seconds * _OPERATIONS / max(executions, 1), _MOST_TRACED)
        made.traced = self._traced(made, program, seconds, self.keep)
        alike = (first.rounds, first.clients) == (made.traced.rounds, made.traced.clients)
        if (
            self.keep is None and alike and first.seconds < made.traced.seconds
        ):  # a kept trace is the one that is reported
            made.traced = first

    def _traced(self, made: Measurement, program: ProgramText, most: float, keep: Path | None) -> TracedRounds:
        """Trace as many rounds as take ``most`` seconds, or part of one round's clients."""
        seconds = made.call / made.rounds
        block, share, idle = self._storage.next_block(0, max(1, min(made.rounds, int(most / seconds)))), 1.0, None
        if seconds > most:
            kept = np.ceil(block.inputs.count * most / seconds).astype(np.int32)
            share = float(kept.sum() / block.inputs.count.sum())
            block = block._replace(inputs=block.inputs._replace(count=kept))
            idle = self.setup.planner.idle_share(0)
        # the minimum: other programs only add time
        untraced = min(self._call(block)[0] for _ in range(3))
        (seconds, _), timelines = trace.record(lambda: self._call(block), program, keep)
        return TracedRounds(block.rounds, share, seconds, untraced, timelines, idle)


def other_work() -> list[str]:
    """A remark if other programs have kept the machine busy for the last minute."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.5 * cores:
        return []
    return [
        f"Other programs were running (a load of {load:.1f} on {cores} cores): times and the waiting of devices may be"
        " longer because of them."
    ]


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """Neither read nor write the persistent compilation cache.

    JAX cannot disable it temporarily. A cache key with metadata is never found, since no such entry is written.
    """
    changes = {
        "jax_compilation_cache_include_metadata_in_key": True,
        "jax_persistent_cache_min_compile_time_secs": float("inf"),
    }
    before = {name: getattr(jax.config, name) for name in changes}
    for name, value in changes.items():
        jax.config.update(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
