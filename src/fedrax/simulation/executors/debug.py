"""Plan ``debug``: eager execution, client by client, with checks of every tensor."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.data import Federation
from fedrax.data.dataset import nonfinite_rows
from fedrax.errors import FedraxError
from fedrax.simulation.executors.compiled import CLIENT_INFO, RECORDED_PHASES, Engine, RoundState, stack_records
from fedrax.simulation.executors.phase import PhaseRunner, PhaseState
from fedrax.simulation.placement.planner import device_round
from fedrax.simulation.results.message_recorder import RecordedPhase, broadcast_statistics, phases_to_host
from fedrax.simulation.results.result import Result
from fedrax.simulation.round import (
    ClientResult,
    Executor,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    client_keys,
    run_round,
)
from fedrax.tree import Tree


class NonFiniteError(FedraxError):
    """A loss, upload, state or parameter became infinite or NaN.

    Example:
        >>> issubclass(fedrax.simulation.NonFiniteError, fedrax.FedraxError)
        True
    """

    result: Result | None = None
    """The result of the rounds before, without client states; its ``stopped`` is "diverged"."""

    def __reduce__(self) -> tuple:
        """Pickle the message without the result, which can be large and of classes that other processes lack."""
        return type(self), self.args


class DebugEngine(Engine):
    """No compilation, one client after another; the first non-finite number is named."""

    def run(
        self, algorithm: Algorithm, carry: RoundState, key: Array, inputs: RoundInputs, rounds: int
    ) -> tuple[RoundState, dict]:
        """As :meth:`Engine.run`: an unsound round is not applied."""
        records: list[dict] = []
        for r in range(rounds):
            try:
                carry, record = self.round(algorithm, carry, key, device_round(inputs, r, 0))
            except NonFiniteError as error:
                self.failure = str(error)
                records.append({"sound": False, "bad": self.program.num_clients})
                break
            records.append(record)
        return carry, stack_records(records)

    def round(
        self, algorithm: Algorithm, carry: RoundState, key: Array, round_inputs: RoundInputs
    ) -> tuple[RoundState, dict]:
        """One round on one device. NonFiniteError names what went wrong."""
        with jax.disable_jit():
            executor = DebugExecutor(
                self.program, algorithm, round_inputs, key, carry.store, jax.tree.map(_first, self.samples)
            )
            server, statistics, record, _ = run_round(executor, carry.server, carry.statistics)
        if executor.skipped:
            server, statistics = carry.server, carry.statistics
        record = {**record, "sound": True, "bad": self.program.num_clients}
        if executor.recorded_phases:
            record[RECORDED_PHASES] = phases_to_host(executor.recorded_phases, 1)
        if self.program.client_info:
            record[CLIENT_INFO] = executor.client_info
        return RoundState(server, statistics, executor.store), record


class DebugExecutor(Executor):
    """One round in plain Python."""

    def __init__(
        self,
        program: RoundProgram,
        algorithm: Algorithm,
        round_inputs: RoundInputs,
        key: Array,
        store: Tree,
        samples: Tree,
    ):
        round_inputs = jax.tree.map(jnp.asarray, round_inputs)
        super().__init__(program, algorithm, round_inputs, key)
        self.store, self.samples = jax.tree.map(jnp.asarray, store), samples
        self.client_records: Tree = ()
        self.client_info: dict[str, np.ndarray] = {}
        self.where = f"{type(algorithm).__name__}, round {int(round_inputs.round) + 1}"  # as events count them
        self.keys = client_keys(self.round_key, round_inputs.assignments.client)

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """One client after another."""
        inputs = (message, statistics, self.samples, self.round_inputs, self.keys)
        runner, count = self.runner(p, *inputs), int(self.round_inputs.count)
        with jax.disable_jit(False):
            progress = runner.start(self.client_records, self.store)
        for k in range(count):
            progress = runner.step(jnp.int32(k), self.client_records, progress)
        self.client_records, self.store = progress.client_records, progress.store
        self.client_info |= {name: np.asarray(values)[:count] for name, values in dict(progress.client_info).items()}
        if self.round_inputs.recorded is not None:
            down = broadcast_statistics(self.algorithm, p, statistics)
            self.recorded_phases.append(RecordedPhase(message, down, progress.notes))
        return PhaseResult(progress.sums, jax.tree.map(lambda a: a[:count], progress.rows))

    def runner(self, p: int, *inputs: Any) -> CheckedRunner:
        """Phase ``p``; the inputs are those of :class:`PhaseRunner`."""
        return CheckedRunner(self.where, self.program, self.algorithm, p, *inputs)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor; the new state must be finite."""
        server, info = super().server(p, server, gathered)
        if not self.skipped:
            require_finite({"server": server}, self.where)
        return server, info


class CheckedRunner(PhaseRunner):
    """A phase that names the first number of a client that is not finite."""

    def __init__(self, where: str, *inputs: Any):
        super().__init__(*inputs)
        self.where = where
        self.get_state, self.put_state = tree.row, tree.set_row  # each use of a table in the store would copy all of it

    def after(self, progress: PhaseState, at: Array, done: ClientResult, *how: Any) -> PhaseState:
        """As of every phase, of what is finite."""
        sent, who = done.output, f"{self.where}, client {int(self.round_inputs.assignments.client[at])}"
        named = {"upload": sent.upload, "state": done.record.state, "info": sent.info, "each": sent.each}
        require_finite(named | {"total": sent.total, "statistics": (done.statistics, done.record.statistics)}, who)
        return super().after(progress, at, done, *how)


def require_finite(values: Tree, where: str) -> None:
    """Raise NonFiniteError naming the first leaf of ``values`` that holds a non-finite number."""
    for name, leaf in zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {name} is not finite")


def describe_nonfinite_samples(federation: Federation) -> str:
    """Describe training samples that are not finite, for an error message; empty if all are finite.

    Samples are checked when a federation is created. Arrays may have been changed since, and memory-mapped ones are not
    checked.
    """
    bad = np.unique(np.concatenate([nonfinite_rows(array) for array in federation.train.arrays]))
    if not len(bad):
        return ""
    client = int(np.searchsorted(federation.offsets, bad[0], side="right")) - 1
    first = f"sample {bad[0] - federation.offsets[client]} of client {client}"
    return f"; {len(bad):,} of the training samples are not finite themselves, the first is {first}"


def _first(array: Array) -> Array:
    return array.addressable_shards[0].data
