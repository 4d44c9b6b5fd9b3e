"""The rounds of a federation, one after another, on the server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from fedrax.flower.persistence import ServerCheckpoint, restored, save
from fedrax.flower.registry import PAUSE, ClientRegistry, log
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.privacy.ledger import Ledger
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.persistence.run_directory import owned
from fedrax.simulation.process import write_environment
from fedrax.simulation.results.events import Event, EventFile, RunInfo, Sink, events_of, report
from fedrax.simulation.results.result import Result, Snapshot
from fedrax.simulation.round import Rounds, run_round
from fedrax.simulation.run import Callback
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree

MODEL = "model.safetensors"
_CHECKPOINT_SECONDS = 30.0


@dataclass(frozen=True, eq=False)
class RoundDriver:
    """A federation whose rounds are under way. Made by ``_prepare``."""

    nodes: ClientRegistry
    algorithm: Algorithm
    task: Task
    settings: Settings
    sampler: CohortSampler
    arithmetic: ServerComputation
    traffic: DeliveryState
    key: jax.Array
    server: Any
    """The state before the first round."""
    statistics: Tree
    evaluate: Evaluate
    ledger: Ledger | None
    info: RunInfo
    known_by: dict[str, str]
    """What a checkpoint is known by, in words."""
    resume: bool = False
    sinks: Sequence[Sink] = ()
    callbacks: Sequence[Callback] = ()
    events: list[Event] = field(default_factory=list)

    def finish(self) -> Result:
        """All rounds, from the start or from the directory's checkpoint."""
        directory = self.info.directory
        if directory is None:
            return self._reported(self.server, self.statistics, None)
        with owned(directory, self.resume):
            server, statistics = self._begin()
            file = EventFile(directory, self.events)
            write_environment(directory)
            try:
                return self._reported(server, statistics, file)
            finally:
                file.close()

    def _begin(self) -> tuple[Any, Tree]:
        """(the server's state, the statistics) before the first round, or as they were left."""
        assert self.info.directory is not None
        like = self._saved(self.server, self.statistics)
        found = restored(self.info.directory, like, self.known_by) if self.resume else None
        if found is None:
            return self.server, self.statistics
        state, events = found
        self.events.extend(events)
        last = np.asarray(state.counted)
        self.traffic.counted |= {client: int(last[client]) for client in np.flatnonzero(last >= 0).tolist()}
        self.traffic.begin(state.start)
        if events:
            self.traffic.down, self.traffic.up = events[-1]["bytes_down"], events[-1]["bytes_up"]
        if self.ledger is not None:
            self.ledger.restore(state.spent, len(events))
        return state.server, state.statistics

    def _saved(self, server: Any, statistics: Tree) -> ServerCheckpoint:
        counted = np.full(self.nodes.num_clients, -1, np.int32)
        for client, last in self.traffic.counted.items():
            counted[client] = last
        spent = () if self.ledger is None else np.asarray(self.ledger.counts)
        return ServerCheckpoint(server, statistics, self.traffic.start, counted, spent)

    def _reported(self, server: Any, statistics: Tree, file: EventFile | None) -> Result:
        result, started = None, []
        try:
            for sink in self.sinks:
                sink.start(dataclasses.replace(self.info, first_round=len(self.events)))
                started.append(sink)
            result = self._rounds(server, statistics, file)
            return result
        finally:
            for sink in started:
                sink.finish(result)

    def _rounds(self, server: Any, statistics: Tree, file: EventFile | None) -> Result:
        stopped, due = "rounds", time.monotonic() + _CHECKPOINT_SECONDS
        for r in range(len(self.events), self.settings.rounds):
            began, there = time.monotonic(), self._there(r)
            cohort = self.sampler.cohort_among(r, there)
            if not self._affordable(cohort):
                stopped = "budget"
                break
            before = server, statistics
            spent: Event = {}
            if self.ledger is not None:  # whoever is asked may be heard, and a run that is cut off here must know of it
                spent = self.ledger.spend(cohort)
                self._save(*before, file)
            try:
                server, statistics, record, answered = self._round(r, cohort, *before)
            except NonFiniteError as error:
                error.result = self._result(*before, "diverged")
                raise
            event, over = self._event(record, answered, time.monotonic() - began) | spent, r + 1 == self.settings.rounds
            if self.info.directory is not None:
                model = _on_host(self.algorithm.params(server), statistics)
                Snapshot({"round": r + 1}, *model).save(self.info.directory / MODEL)
            evaluated = over or (r + 1) % self.settings.eval_every == 0
            if evaluated:
                event |= self._evaluated(r, server, statistics, there)
            report([event], self.events, file, self.sinks)
            log.info("fedrax: %s", _line(event))
            if self._reached(event):
                stopped = "target"
            elif evaluated and self._stops(event, server, statistics):
                stopped = "callback"
            if over or stopped != "rounds" or time.monotonic() > due:
                self._save(server, statistics, file)
                due = time.monotonic() + _CHECKPOINT_SECONDS
            if stopped != "rounds":
                break
        if self.events and not any(event["clients"] for event in self.events):
            raise FedraxError(
                "no round had the answers that it needs, and the model is as it was: each round's warnings say why"
            )
        return self._result(server, statistics, stopped)

    def _save(self, server: Any, statistics: Tree, file: EventFile | None) -> None:
        """Write a checkpoint, where there is a directory."""
        if file is not None and self.info.directory is not None:
            file.sync()
            save(self.info.directory, self._saved(server, statistics), self.known_by, self.events)

    def _there(self, r: int) -> np.ndarray:
        """The clients that can be asked; nobody where fewer are there than a round needs, and no more come in time."""
        needed = self.sampler.largest if self.algorithm.traits.fixed_cohort else 1
        due = time.monotonic() + self.nodes.timeout
        while len(there := self.nodes.available()) < needed:
            if time.monotonic() > due:
                words = "round %d: %d of %d clients that it needs are there after %g seconds: it changes nothing"
                log.warning(words, r + 1, len(there), needed, self.nodes.timeout)
                return there[:0]
            time.sleep(min(PAUSE, self.nodes.timeout))
        return there

    def _round(
        self, r: int, cohort: np.ndarray, server: Any, statistics: Tree
    ) -> tuple[Any, Tree, dict[str, Any], list[int]]:
        """(server state, statistics, the round's record, the aggregated clients); unchanged without enough replies."""
        if not len(cohort):
            return server, statistics, {}, []
        network = FlowerExecutor(
            self.arithmetic, self.algorithm, self._here(r, cohort), self.key, self.nodes, self.traffic
        )
        try:
            after, moved, record, _ = run_round(network, server, statistics)
        except TooFewReplies:
            log.warning("round %d: too few of its %d clients have answered: it changes nothing", r + 1, len(cohort))
            return server, statistics, {}, []
        if not bool(self.arithmetic.sound((after, moved))):
            raise NonFiniteError(f"{self.info.algorithm}, round {r + 1}: the server's state is not finite")
        self.traffic.counted |= dict.fromkeys(network.answered, r)
        return after, moved, record, network.answered

    def _here(self, r: int, cohort: np.ndarray) -> Rounds:
        kind = np.dtype(self.settings.dtype)
        sizes = self.nodes.sizes[cohort]
        shares = sizes / sizes.sum() if self.settings.weights == "samples" else np.full(len(cohort), 1 / len(cohort))
        zeros = np.zeros(len(cohort), np.int32)
        place = ClientAssignment(cohort.astype(np.int32), zeros, zeros, sizes.astype(np.int32), shares.astype(kind))
        return Rounds(np.int32(r), kind.type(len(cohort)), np.int32(len(cohort)), place)

    def _affordable(self, cohort: np.ndarray) -> bool:
        """Whether the privacy budget allows one more round with these clients."""
        budget = self.settings.epsilon_budget
        if self.ledger is None or budget is None or not len(cohort):
            return True
        counted = int(self.ledger.counts[cohort].max())
        return counted < self.ledger.accountant.counts_within(budget, counted + 1)

    def _event(self, record: dict[str, Any], answered: list[int], seconds: float) -> Event:
        """What is told of a round; bytes are those of the arrays that did travel, errors and all."""
        records = {name: np.asarray(value)[None] for name, value in record.items()} | {"sound": np.ones(1, bool)}
        event = events_of(self.info, records, np.array([[len(answered)]]), self.events, seconds)[0]
        return event | {"bytes_down": self.traffic.down, "bytes_up": self.traffic.up}

    def _evaluated(self, r: int, server: Any, statistics: Tree, there: np.ndarray) -> dict[str, float]:
        params = self.algorithm.params(server)
        order = RoundInstructions(r, 0, 0, self.nodes.num_clients, 1.0, -1, [0, 0], self.settings.dtype)
        metrics = self.evaluate(params, statistics, order, there)
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def _reached(self, event: Event) -> bool:
        target = self.settings.target
        return target is not None and event.get("test_accuracy", -1.0) >= target

    def _stops(self, event: Event, server: Any, statistics: Tree) -> bool:
        snapshot = Snapshot(event, *_on_host(self.algorithm.params(server), statistics))
        return any([bool(callback(snapshot)) for callback in self.callbacks])  # noqa: C419 - each is to see it

    def _result(self, server: Any, statistics: Tree, stopped: str) -> Result:
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
        )


def _on_host(*trees: Tree) -> tuple[Tree, ...]:
    return jax.tree.map(np.asarray, trees)


def _line(event: Event) -> str:
    shown = {k: v for k, v in event.items() if k not in ("bytes_down", "bytes_up", "gradients", "seconds")}
    said = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)  # noqa: E731
    return ", ".join(f"{name} {said(value)}" for name, value in shown.items())
