"""Round driver of a federation: samples cohorts, runs rounds, evaluates, writes checkpoints and reports events."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedrax.contract.algorithm import Algorithm
from fedrax.contract.assignment import ClientAssignment
from fedrax.contract.task import Task
from fedrax.errors import FedraxError
from fedrax.flower.evaluation import Evaluate
from fedrax.flower.executor import DeliveryState, FlowerExecutor, ServerComputation, TooFewReplies
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.loss_requests import LossRequests
from fedrax.flower.persistence import ServerCheckpoint, load_checkpoint, save_checkpoint
from fedrax.flower.registry import POLL_SECONDS, ClientRegistry, Traffic, log
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.participation.policies import Uniform
from fedrax.privacy.ledger import Ledger
from fedrax.signals import Interrupted, StopFlag, interrupt_flag
from fedrax.simulation.evaluation import Metrics, split_finite
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.client_summary import ClientSummary, write_client_summary
from fedrax.simulation.persistence.run_description import write_description
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE, MODEL, lock_directory
from fedrax.simulation.privacy_ledger import warn_of_budget
from fedrax.simulation.process import write_environment
from fedrax.simulation.results.events import (
    Event,
    EventFile,
    RunInfo,
    Sink,
    event_of_start,
    events_of,
    report,
    round_seconds,
    rounds_done,
)
from fedrax.simulation.results.result import Result, Snapshot
from fedrax.simulation.round import RoundInputs, run_round
from fedrax.simulation.run import Callback
from fedrax.simulation.settings import Settings
from fedrax.simulation.validate import initial_client_state
from fedrax.tree import Tree

_DATA = "data of the clients"
"""Name of the data in reports: a server knows only the clients' numbers of samples."""
_CHECKPOINT_SECONDS = 30.0
"""Seconds between checkpoints of methods without client states. Rounds after the last one are repeated at resume."""


@dataclass(frozen=True, eq=False)
class RoundDriver:
    """Runs the rounds of a federation; :mod:`fedrax.flower.server` makes it."""

    registry: ClientRegistry
    algorithm: Algorithm
    task: Task
    settings: Settings
    sampler: CohortSampler
    computation: ServerComputation
    delivery: DeliveryState
    key: jax.Array
    server: Any
    """Initial server state."""
    statistics: Tree
    """Initial running statistics of the model."""
    evaluate: Evaluate
    ledger: Ledger | None
    info: RunInfo
    identity: dict[str, str]
    """Digests of the run that a checkpoint belongs to, by part of it."""
    described: Mapping[str, Any]
    """The settings that ``run.json`` names; a secret seed is not among them."""
    ask: LossRequests | None = None
    """Asks clients for their loss, where the participation policy does."""
    resume: bool = False
    sinks: Sequence[Sink] = ()
    callbacks: Sequence[Callback] = ()
    events: list[Event] = field(default_factory=list)

    def run(self) -> Result:
        """Run all rounds, from the start or from the checkpoint in the directory."""
        directory = self.info.directory
        if directory is None:
            return self._run_with_sinks(self.server, self.statistics, None)
        with lock_directory(directory, self.resume):
            server, statistics = self._restore()
            checkpoint.discard(directory / FAILURE)  # of an earlier attempt
            file = EventFile(directory, self.events)
            try:
                write_environment(directory)
                write_client_summary(directory, ClientSummary.of_sizes(_DATA, self.registry.sizes))
                return self._run_with_sinks(server, statistics, file)
            finally:
                file.close()

    def _restore(self) -> tuple[Any, Tree]:
        """(server state, statistics) of the checkpoint; the initial ones without one."""
        assert self.info.directory is not None
        like = self._checkpoint_state(self.server, self.statistics)
        found = load_checkpoint(self.info.directory, like, self.identity) if self.resume else None
        if found is None:
            return self.server, self.statistics
        state, events = found
        self.events.extend(events)
        last = np.asarray(state.last_aggregated)
        self.delivery.last_aggregated |= {client: int(last[client]) for client in np.flatnonzero(last >= 0).tolist()}
        self.delivery.set_start(state.start)
        if events:
            self.delivery.bytes_down, self.delivery.bytes_up = events[-1]["bytes_down"], events[-1]["bytes_up"]
            traffic = self.registry.traffic._asdict()  # the clients have introduced themselves again
            self.registry.traffic = Traffic(**{name: events[-1][name] + more for name, more in traffic.items()})
        if self.sampler.adaptive:
            self.sampler.restore(state.participation, rounds_done(events))
        if self.ledger is not None:
            self.ledger.restore(state.spent, rounds_done(events))
            before, counted = events[-1]["epsilon"] if events else 0.0, self.ledger.spent.epsilon
            if before is not None and before < counted < math.inf:
                log.warning(
                    "round %d was interrupted after its clients were asked: they are counted again when it is repeated,"
                    " and epsilon is %.4g so far",
                    rounds_done(events) + 1,
                    counted,
                )
        return state.server, state.statistics

    def _checkpoint_state(self, server: Any, statistics: Tree) -> ServerCheckpoint:
        """The content of a checkpoint."""
        last_aggregated = np.full(self.registry.num_clients, -1, np.int32)
        for client, last in self.delivery.last_aggregated.items():
            last_aggregated[client] = last
        spent = () if self.ledger is None else np.asarray(self.ledger.counts)
        policy = self.sampler.state if self.sampler.adaptive else ()
        return ServerCheckpoint(server, statistics, self.delivery.start, last_aggregated, spent, policy)

    def _run_with_sinks(self, server: Any, statistics: Tree, file: EventFile | None) -> Result:
        """Run the rounds between ``start`` and ``finish`` of all sinks."""
        result, started = None, []
        try:
            for sink in self.sinks:
                sink.start(dataclasses.replace(self.info, first_round=rounds_done(self.events)))
                started.append(sink)
            if self.info.directory is not None:
                guarantee = None if self.ledger is None else self.ledger.guarantee
                write_description(self.info.directory, self.info, self.algorithm, self.described, guarantee)
            with interrupt_flag(replace=False) as interrupted:
                result = self._run_rounds(server, statistics, file, interrupted)
            return result
        finally:
            for sink in started:
                sink.finish(result)

    def _run_rounds(self, server: Any, statistics: Tree, file: EventFile | None, interrupted: StopFlag) -> Result:
        """Run the remaining rounds; a signal ends them after one, with a checkpoint."""
        stopped, due = "rounds", time.monotonic() + _CHECKPOINT_SECONDS
        if not self.events and (self.settings.eval_first or not self.settings.rounds):
            began, metrics = time.monotonic(), self._evaluate(0, server, statistics, self.registry.available())
            event = event_of_start(metrics, time.monotonic() - began)
            stopped = self._report(event, True, server, statistics, file)
            self._save(server, statistics, file)
        for r in range(rounds_done(self.events), self.settings.rounds if stopped == "rounds" else 0):
            began, available = time.monotonic(), self._available_clients(r, interrupted)
            if interrupted.signal is not None:
                self._save(server, statistics, file)
                raise Interrupted(interrupted.signal)
            cohort = self._cohort(r, available, server, statistics)
            if not self._within_budget(cohort):
                stopped = "budget"
                warn_of_budget(self.settings, r)
                self._save(server, statistics, file, stopped=stopped)
                break
            before = server, statistics
            spent: Event = {}
            if self.ledger is not None:
                # A client may send its upload as soon as it is asked: the ledger is saved before, in case of a crash
                spent = self.ledger.spend(cohort)
                self._save(*before, file)
            try:
                server, statistics, record, replied = self._round(r, cohort, *before)
                if not replied:
                    self.sampler.skip(r)
            except NonFiniteError as error:
                self._save(*before, file, FAILURE, error=str(error))
                error.result = self._result(*before, "diverged")
                raise
            event, last = self._event(record, replied, time.monotonic() - began) | spent, r + 1 == self.settings.rounds
            if self.info.directory is not None:
                model = _on_host(self.algorithm.params(server), statistics)
                Snapshot({"round": r + 1}, *model).save(self.info.directory / MODEL)
            evaluated = self.settings.evaluates(r + 1)
            if evaluated:
                event |= self._evaluate(r, server, statistics, available)
                event["seconds"] = round_seconds(self.events, time.monotonic() - began)
            stopped = self._report(event, evaluated, server, statistics, file)
            if last or stopped != "rounds" or self._checkpoint_due(due):
                self._save(server, statistics, file)
                due = time.monotonic() + _CHECKPOINT_SECONDS
            if stopped != "rounds":
                break
        if rounds_done(self.events) and not any(event["clients"] for event in self.events):
            raise FedraxError(
                "no round received enough replies, and the model is unchanged: the warnings of each round say why"
            )
        return self._result(server, statistics, stopped)

    def _checkpoint_due(self, due: float) -> bool:
        """Whether a checkpoint is written after a round: by default after every one if clients keep states.

        Clients store the states of two rounds, and discard those that an older checkpoint asks for.
        """
        every = self.settings.checkpoint_every or (1 if self._has_client_states else None)
        return time.monotonic() > due if every is None else rounds_done(self.events) % every == 0

    @cached_property
    def _has_client_states(self) -> bool:
        """Whether clients keep a state from round to round."""
        initial, _ = initial_client_state(self.algorithm, self.algorithm.params(self.server), self.statistics)
        return bool(jax.tree.leaves(initial))

    def _report(self, event: Event, evaluated: bool, server: Any, statistics: Tree, file: EventFile | None) -> str:
        """Report an event, and return the reason to stop: "rounds" if there is none before the last round."""
        event |= self.registry.traffic._asdict()
        report([event], self.events, file, self.sinks)
        log.info("fedrax: %s", _log_line(event))
        if self._target_reached(event):
            return "target"
        return "callback" if evaluated and self._callbacks_stop(event, server, statistics) else "rounds"

    def _save(self, server: Any, statistics: Tree, file: EventFile | None, name: str = CHECKPOINT, **more: str) -> None:
        """Write a checkpoint with ``more`` metadata to the folder ``name``, if the run has a directory."""
        if file is not None and self.info.directory is not None:
            file.sync()
            meta = {"identity": self.identity, "algorithm": self.info.algorithm} | more
            save_checkpoint(self.info.directory / name, self._checkpoint_state(server, statistics), meta, self.events)

    def _available_clients(self, r: int, interrupted: StopFlag) -> np.ndarray:
        """Wait for as many available clients as a round needs; returns none if there are too few within the timeout."""
        needed = self.sampler.largest if self.algorithm.traits.fixed_cohort else 1
        due = time.monotonic() + self.registry.timeout
        while len(available := self.registry.available()) < needed and not interrupted.is_set():
            if time.monotonic() > due:
                message = "round %d is skipped: %d clients are available after %g seconds, and it needs %d"
                log.warning(message, r + 1, len(available), self.registry.timeout, needed)
                return available[:0]
            time.sleep(min(POLL_SECONDS, self.registry.timeout))
        return available

    def _cohort(self, r: int, available: np.ndarray, server: Any, statistics: Tree) -> np.ndarray:
        """The available clients of a round's cohort; none if there are too few for the method."""
        if isinstance(self.settings.participation, Uniform):
            return self.sampler.cohort_among(r, available)
        if self.ask is not None:
            clients = np.intersect1d(self.sampler.clients_to_ask(r), available)
            losses = self.ask(r, (self.algorithm.params(server), statistics), clients)
            self.sampler.observe_losses(r, np.array(list(losses), int), np.array(list(losses.values()), float))
        sampled = self.sampler.cohort(r)
        cohort = np.intersect1d(sampled, available)
        if len(cohort) < len(sampled):
            log.warning(
                "round %d: %d of its %d clients are not available", r + 1, len(sampled) - len(cohort), len(sampled)
            )
        enough = len(cohort) == len(sampled) or not self.algorithm.traits.fixed_cohort
        return cohort if enough else cohort[:0]

    def _round(
        self, r: int, cohort: np.ndarray, server: Any, statistics: Tree
    ) -> tuple[Any, Tree, dict[str, Any], list[int]]:
        """(server state, statistics, the round's record, aggregated clients); unchanged without enough replies."""
        if not len(cohort):
            return server, statistics, {}, []
        executor = FlowerExecutor(
            self.computation,
            self.algorithm,
            self._round_inputs(r, cohort),
            self.key,
            self.registry,
            self.delivery,
            self.sampler.unbiased,
        )
        try:
            new_server, new_statistics, record, _ = run_round(executor, server, statistics)
        except TooFewReplies:
            log.warning("round %d is skipped: too few of its %d clients replied", r + 1, len(cohort))
            return server, statistics, {}, []
        if not bool(self.computation.is_finite((new_server, new_statistics))):
            raise NonFiniteError(f"{self.info.algorithm}, round {r + 1}: the server's state is not finite")
        self.delivery.last_aggregated |= dict.fromkeys(executor.replied, r)
        if self.sampler.adaptive:
            rows = [executor.reports[client] for client in executor.replied]
            info = {name: np.array([row[name] for row in rows]) for name in rows[0]}
            self.sampler.observe(r, np.array(executor.replied), info)
        return new_server, new_statistics, record, executor.replied

    def _round_inputs(self, r: int, cohort: np.ndarray) -> RoundInputs:
        """Inputs of a round: its number, cohort size, and an assignment with a weight for each client."""
        dtype = np.dtype(self.settings.dtype)
        sizes = self.registry.sizes[cohort]
        shares = self.sampler.weights(r, cohort)
        if self.sampler.unbiased:
            shares = shares * len(self.sampler.cohort(r)) / len(cohort)
        zeros = np.zeros(len(cohort), np.int32)
        cohort_ids = cohort.astype(np.int32)
        assignments = ClientAssignment(cohort_ids, zeros, zeros, sizes.astype(np.int32), shares.astype(dtype))
        return RoundInputs(np.int32(r), dtype.type(len(cohort)), np.int32(len(cohort)), assignments)

    def _within_budget(self, cohort: np.ndarray) -> bool:
        """Whether the privacy budget allows one more round with these clients."""
        budget = self.settings.epsilon_budget
        if self.ledger is None or budget is None or not len(cohort):
            return True
        participations = int(self.ledger.counts[cohort].max())
        return participations < self.ledger.accountant.counts_within(budget, participations + 1)

    def _event(self, record: dict[str, Any], replied: list[int], seconds: float) -> Event:
        """The event of a round. Bytes are those of all arrays that were sent, including those of failed requests."""
        records = {name: np.asarray(value)[None] for name, value in record.items()} | {"sound": np.ones(1, bool)}
        event = events_of(self.info, records, np.array([[len(replied)]]), self.events, seconds)[0]
        asked = {} if self.ask is None else {"asked": self.ask.asked}
        return event | {"bytes_down": self.delivery.bytes_down, "bytes_up": self.delivery.bytes_up} | asked

    def _evaluate(self, r: int, server: Any, statistics: Tree, available: np.ndarray) -> Metrics:
        """The metrics of the global model after round ``r`` that are finite or not defined."""
        params = self.algorithm.params(server)
        instructions = RoundInstructions(
            r, 0, 0, self.registry.num_clients, 1.0, -1, [0, 0], self.settings.dtype, self.registry.frozen
        )
        return split_finite(self.evaluate(params, statistics, instructions, available))[0]

    def _target_reached(self, event: Event) -> bool:
        """Whether the test accuracy has reached the target."""
        target = self.settings.target
        return target is not None and event.get("test_accuracy", -1.0) >= target

    def _callbacks_stop(self, event: Event, server: Any, statistics: Tree) -> bool:
        """Call all callbacks; whether one of them stops the run."""
        snapshot = Snapshot(event, *_on_host(self.algorithm.params(server), statistics))
        return any([bool(callback(snapshot)) for callback in self.callbacks])  # noqa: C419 - call each of them

    def _result(self, server: Any, statistics: Tree, stopped: str) -> Result:
        """The result of the rounds so far."""
        return Result(
            params=self.algorithm.params(server),
            server=server,
            events=self.events,
            plan=self.info.plan,
            stopped=stopped,
            directory=self.info.directory,
            spent=None if self.ledger is None else self.ledger.spent,
            lower_is_better=self.task.lower_is_better,
            statistics=statistics,
            algorithm=self.algorithm,
            task=self.task,
        )


def _on_host(*trees: Tree) -> tuple[Tree, ...]:
    """Trees as NumPy arrays."""
    return jax.tree.map(np.asarray, trees)


def _log_line(event: Event) -> str:
    """A line of the log with the event's metrics."""
    hidden = ("bytes_down", "bytes_up", "gradients", "seconds", *Traffic._fields)
    shown = {k: v for k, v in event.items() if k not in hidden}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())
