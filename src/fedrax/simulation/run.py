"""``simulate``: the loop on the host around blocks of rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Unpack

import jax
import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.config.user_errors import translate_errors
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.devices import unplaced, use_all_cores
from fedrax.errors import FedraxError, warn
from fedrax.privacy.ledger import Ledger
from fedrax.signals import Interrupted, StopFlag, interrupt_flag
from fedrax.simulation.evaluation import Metrics, non_finite_remedy, split_finite
from fedrax.simulation.executors import divergence
from fedrax.simulation.executors.compiled import CLIENT_INFO, RECORDED_PHASES, RoundState
from fedrax.simulation.executors.debug import NonFiniteError, describe_nonfinite_samples
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.persistence.client_summary import ClientSummary, write_client_summary
from fedrax.simulation.persistence.model_file import problem_of, save_model
from fedrax.simulation.persistence.resume import RunStart, check_can_continue, check_identity, save, start_run
from fedrax.simulation.persistence.run_description import write_description
from fedrax.simulation.persistence.run_directory import CHECKPOINT, FAILURE, MODEL, RunDirectory, lock_directory
from fedrax.simulation.placement.streaming import BlockLoader, RoundBlock, SampleStreamer, StateSpill
from fedrax.simulation.privacy_ledger import (
    check_not_spent,
    last_round,
    ledger_of,
    record_spending,
    warn_of_budget,
    warn_of_statistics,
)
from fedrax.simulation.process import (
    answer_of_any_process,
    answer_of_first_process,
    numeric_context,
    runtime_errors_explained,
    write_environment,
)
from fedrax.simulation.results.events import (
    Event,
    EventFile,
    Sink,
    event_of_start,
    events_of,
    report,
    round_seconds,
    rounds_done,
)
from fedrax.simulation.results.message_recorder import MessageSelection, RecordedExchange, exchanges
from fedrax.simulation.results.progress import ProgressSink, with_progress
from fedrax.simulation.results.result import NO_CLIENTS, PersonalMetrics, Result, Snapshot
from fedrax.simulation.settings import Script, Settings, SettingsOptions
from fedrax.simulation.setup import Setup, prepare
from fedrax.simulation.timer import compute_clock
from fedrax.simulation.validate import changed_settings, check_resume, trajectory_rounds
from fedrax.tree import Tree

Callback = Callable[[Snapshot], Any]
"""Returns True to end the run after this round; see :class:`fedrax.simulation.Snapshot`."""
LONGEST_BLOCK = 64
"""The most rounds in one compiled call: the size of its arrays, the same for all runs."""
_BLOCK_SECONDS = 1.0
"""Target duration of a compiled call in seconds; progress and signals are delayed by at most about as long."""
_CHECKPOINT_SECONDS = 30.0
"""Seconds between checkpoints by default."""


@checked_arguments
def simulate(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings | None = None,
    *,
    params: Tree | None = None,
    script: Script | None = None,
    directory: Path | str | None = None,
    resume: bool = False,
    sinks: Sequence[Sink] = (),
    keep_clients: bool = True,
    trajectory: bool | Collection[int] = False,
    record: MessageSelection | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **options: Unpack[SettingsOptions],
) -> Result:
    """Simulate federated training of ``task`` by ``algorithm`` over the clients of ``federation``.

    In a run over several processes (:func:`fedrax.simulation.join_processes`) every process calls ``simulate`` with
    the same arguments, and the first one writes.

    Args:
        algorithm: the method, with its hyper-parameters.
        task: the model and its loss.
        federation: the clients' data.
        settings: the settings of the run; the defaults if None.
        params: starting parameters, in place of ``task.init``.
        script: given cohorts and local work, in place of random draws.
        directory: where to write events, checkpoints, the model and a description; nothing is written by default.
            A directory that holds a run raises, unless ``resume`` is set, and so does one that another run writes to.
        resume: continue from the directory's checkpoint, if it has one.
        sinks: objects that receive every event.
        keep_clients: whether the checkpoint of a finished or failed run contains the client states, which can be large.
            Without them the run cannot be continued for more rounds.
        trajectory: whether :class:`Result` contains the global parameters after every round, or the rounds, counted
            from 1, after which it does.
        record: the clients and rounds whose messages :class:`Result` contains.
        callbacks: functions that are called with a :class:`Snapshot` after every evaluation; the run ends when one
            returns True. Of several processes the first one's answer decides.
        progress: whether to show a progress bar on standard error, in terminals and notebooks.
        **options: single fields of :class:`Settings`, which replace those of ``settings``.

    Returns:
        Final parameters, states and events.

    Raises:
        FedraxError: if the arguments cannot be run.
        NonFiniteError: if a loss, an upload or a parameter becomes infinite or NaN.
        Interrupted: after Ctrl-C, SIGTERM or SIGHUP, once a checkpoint is written.

    Example:
        >>> federation = fedrax.Federation.from_arrays(np.eye(4), [0, 1, 0, 1], [0, 0, 1, 1])
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=3, progress=False)
        >>> len(result.events)
        3
    """
    settings = changed_settings(settings, options)
    use_all_cores()
    with numeric_context(settings.dtype):
        path = None if directory is None else Path(directory)
        if resume:
            check_resume(path, trajectory, record)
        setup = prepare(algorithm, task, federation, settings, params, script, path)
        sinks = with_progress(sinks, progress)
        if record is not None:
            _check_record(record, setup)
        ledger = ledger_of(algorithm, settings, setup.planner.sampler)
        if ledger is not None:
            warn_of_statistics(federation, ledger.accountant.unit)
        with nullcontext() if setup.directory is None else lock_directory(setup.directory, resume) as run_directory:
            kept = trajectory_rounds(trajectory, settings.rounds)
            return Run(
                setup, make_block_loader(setup), sinks, keep_clients, run_directory, kept, record, ledger, callbacks
            ).finish(resume)


def restore(algorithm: Algorithm, task: Task, federation: Federation, settings: Settings, directory: Path) -> Result:
    """The result of the run in a directory at its last checkpoint, without its trajectory and recorded messages."""
    if not checkpoint.exists(directory / CHECKPOINT):
        raise FedraxError(f"{directory} has no checkpoint: its run has not come to one")
    use_all_cores()
    with numeric_context(settings.dtype):
        setup = prepare(algorithm, task, federation, settings, directory=directory)
        ledger = ledger_of(algorithm, settings, setup.planner.sampler)
        with lock_directory(directory, resume=True) as run_directory:
            return Run(setup, make_block_loader(setup), (), True, run_directory, ledger=ledger).at_checkpoint()


def check_possible(
    algorithm: Algorithm, task: Task, federation: Federation, settings: Settings, directory: Path | str | None = None
) -> None:
    """Raise what ``simulate`` would raise, also if ``directory`` holds another run; no round is run."""
    use_all_cores()
    with numeric_context(settings.dtype):
        setup = prepare(algorithm, task, federation, settings, directory=None if directory is None else Path(directory))
        if directory is not None:
            check_identity(setup)


def _check_record(record: MessageSelection, setup: Setup) -> None:
    if not setup.alone:
        raise FedraxError("messages are recorded by a run of a single process only")
    record.check(setup.info.num_clients, setup.info.rounds, setup.info.bytes_down + setup.info.bytes_up)


def make_block_loader(setup: Setup) -> BlockLoader:
    """Plans the blocks of rounds of a run and loads their samples and client states."""
    settings = setup.settings
    every = (settings.evaluation_interval, settings.checkpoint_every or LONGEST_BLOCK)
    if setup.planner.sampler.adaptive:
        every = (1,)
    where, longest = (setup.planner, setup.engine.mesh), min(LONGEST_BLOCK, *every)
    streamer = SampleStreamer(setup.samples, *where, longest) if setup.streamed else None
    spill = StateSpill(setup.initial, *where, longest, setup.directory) if setup.spilled else None
    return BlockLoader(setup.planner, LONGEST_BLOCK, streamer, spill)


@dataclass
class Run:
    """The loop of a run on the host, and its mutable state."""

    setup: Setup
    storage: BlockLoader
    sinks: Sequence[Sink]
    keep_clients: bool
    run_directory: RunDirectory | None
    kept: Collection[int] = ()
    """The rounds after which the parameters are kept for the trajectory."""
    record: MessageSelection | None = None
    ledger: Ledger | None = None
    callbacks: Sequence[Callback] = ()
    has_clients: bool = True
    """Whether client states are known; a finished run may have been saved without them."""
    asks: bool = False
    """Whether there are callbacks, in any process of the run."""
    last: int = 0
    """The last round, of the settings or of the privacy budget."""
    events: list[Event] = field(default_factory=list)
    exchanges: list[RecordedExchange] = field(default_factory=list)
    trajectory: list[Tree] = field(default_factory=list)
    log: EventFile | None = None
    personal_metrics: PersonalMetrics | None = None
    """Of the last evaluation, as of `Result`."""
    _warned: bool = False
    """Whether the user knows that the model cannot be written."""
    interrupted: StopFlag = field(default_factory=StopFlag)

    def finish(self, resume: bool) -> Result:
        """All rounds, from the start or from the directory's checkpoint."""
        setup, result = self.setup, None
        explaining = partial(runtime_errors_explained, setup.alone, setup.directory, setup.engine.program.chunk)
        with explaining():
            start = self._begin(resume)
        started: list[Sink] = []
        try:
            for sink in self.sinks:  # first: without the description that a sink writes a directory cannot be resumed
                sink.start(dataclasses.replace(setup.info, first_round=rounds_done(self.events)))
                started.append(sink)
            if setup.directory is not None:
                checkpoint.discard(setup.directory / FAILURE)  # of an earlier attempt
                self.log = EventFile(setup.directory, self.events)
                write_environment(setup.directory)
                write_client_summary(setup.directory, ClientSummary.of(setup.federation))
                guarantee = None if self.ledger is None else self.ledger.guarantee
                write_description(setup.directory, setup.info, setup.algorithm, vars(setup.settings), guarantee)
                if start.events:  # the run may have been killed between its checkpoint and its model
                    self._save_model(start.carry)
            with interrupt_flag() as self.interrupted, explaining():  # raises Interrupted even if all rounds are done
                result = self._result(*self._rounds(start.carry))
            return result
        finally:
            self.storage.close(failed=result is None)
            if self.log is not None:
                self.log.close()
            for sink in started:
                sink.finish(result)

    def at_checkpoint(self) -> Result:
        """The result at the directory's checkpoint; no round is run."""
        start = start_run(self.setup, self.storage, self.ledger, True)
        self.events, self.has_clients = start.events, start.has_clients
        last = last_round(self.ledger, self.setup.settings, self.setup.planner.sampler)
        stopped = "checkpoint"
        if rounds_done(self.events) == last:
            stopped = "rounds" if last == self.setup.settings.rounds else "budget"
        if self._reached(self.events):  # as the run itself says, also after its last round
            stopped = "target"
        return self._result(start.carry, stopped)

    def _begin(self, resume: bool) -> RunStart:
        """The initial state of the run, or that of the directory's checkpoint."""
        setup, settings = self.setup, self.setup.settings
        self.asks = answer_of_any_process(bool(self.callbacks))
        start = start_run(setup, self.storage, self.ledger, resume)
        self.events, self.has_clients, done = start.events, start.has_clients, rounds_done(start.events)
        self.last = last_round(self.ledger, settings, setup.planner.sampler)
        reached = self._reached(start.events)
        if self.ledger is not None and not reached and not (start.spent and done == self.last):
            check_not_spent(self.ledger, settings, done, self.last)
        if not reached and done < self.last:
            check_can_continue(setup, start)
        elif setup.directory is not None and not self.keep_clients:  # it may have been cut short after its last one
            checkpoint.forget_previous(setup.directory / CHECKPOINT)
        return start

    # -- the loop ----------------------------------------------------------------------------------------------

    def _rounds(self, carry: RoundState) -> tuple[RoundState, str]:
        total, events, interrupted = self.last, self.events, self.interrupted
        # Several processes must agree on blocks, and so may not look at the clock.
        pace = LONGEST_BLOCK if not self.setup.alone else 1
        due = time.monotonic() + _CHECKPOINT_SECONDS
        if not events and (self.setup.settings.eval_first or not self.setup.settings.rounds):
            stopped = self._start(carry)
            self._checkpoint(carry, stopped != "rounds" or not total)
        else:
            stopped = "target" if self._reached(events) else "rounds"
        while rounds_done(events) < total and stopped == "rounds":
            began = compute_clock()
            carry, rounds, stopped = self._block(carry, pace, began)
            if self.setup.alone:
                pace = max(1, min(LONGEST_BLOCK, int(_BLOCK_SECONDS * rounds / max(compute_clock() - began, 1e-6))))
            over = stopped != "rounds" or rounds_done(events) == total
            if over or interrupted.is_set() or self._checkpoint_due(due):
                due = self._checkpoint(carry, over)
            if interrupted.signal is not None and not over:
                raise Interrupted(interrupted.signal, self._outcome_of_stop(rounds_done(events)))
        if stopped == "rounds" and rounds_done(events) < self.setup.settings.rounds:
            stopped = "budget"
            warn_of_budget(self.setup.settings, rounds_done(events))
        return carry, stopped

    def _outcome_of_stop(self, done: int) -> str:
        """What an interrupted run has kept, and how to resume it."""
        stopped, directory = f"stopped after round {done} of {self.setup.settings.rounds}", self.setup.run_directory
        if directory is None:
            return f"{stopped}; nothing was saved: a run with directory=... has a checkpoint, from which it can resume"
        return f"{stopped}; its checkpoint is in {directory}: to resume, repeat the call with resume=True"

    def _start(self, carry: RoundState) -> str:
        """Evaluate and report the initial state, as an event of round 0; the reason to stop."""
        began = compute_clock()
        metrics, lost = self._evaluate(carry)
        return self._reported(carry, [event_of_start(metrics, compute_clock() - began)], lost, True)

    def _reported(self, carry: RoundState, new: list[Event], lost: str | None, evaluated: bool) -> str:
        """Report events, and return the reason to stop; raises if a metric is not finite, ``lost``."""
        setup = self.setup
        report(new, self.events, self.log, self.sinks)
        if lost is not None:
            where = f"{setup.info.algorithm}, round {rounds_done(self.events)}"
            self._stop(f"{where}: {lost} is not finite{non_finite_remedy(setup.task, lost)}", carry, "the state")
        called = self._called(carry, new[-1]) if evaluated and self.asks else "rounds"
        return "target" if self._reached(new) else called

    def _block(self, carry: RoundState, pace: int, began: float) -> tuple[RoundState, int, str]:
        """Run a block of rounds, evaluate if it is due, and report: (carry, rounds, reason to stop or None)."""
        setup, events = self.setup, self.events
        asked = self._ask(carry) if setup.planner.sampler.asks else 0
        block = self.storage.next_block(rounds_done(events), min(pace, self._until_stop(rounds_done(events))))
        block, recorded = self._to_record(block, rounds_done(events) + 1)
        rounds, after = block.rounds, rounds_done(events) + block.rounds
        sampler = setup.planner.sampler
        if after < self.last and not sampler.adaptive:
            self.storage.prefetch(after, min(pace, self._until_stop(after)))
        carry, records = run_block_of_rounds(setup, self.storage, carry, block)
        client_info = records.pop(CLIENT_INFO, ())
        if not records["sound"].all():
            self._fail(carry, block, records)
        for phases in records.pop(RECORDED_PHASES, ()):
            self.exchanges += exchanges(recorded, rounds_done(events) + 1, phases)
        carry = self.storage.save_states(carry, block)
        if sampler.adaptive:
            clients = np.asarray(block.inputs.assignments.client[0]).ravel()  # by device, as their info
            clients = clients[clients < setup.info.num_clients]
            order = np.argsort(clients)
            info = {name: a[order] for name, a in client_info[0].items()}
            sampler.observe(rounds_done(events), clients[order], info)
        new = events_of(setup.info, records, block.inputs.count, events, compute_clock() - began)
        if setup.candidate_losses is not None:
            new[0] |= setup.candidate_losses.traffic(new[0], asked)
        record_spending(self.ledger, block.inputs, new, setup.info.num_clients)
        due, lost = setup.settings.evaluates(after) or after == self.last, None
        if due:
            metrics, lost = self._evaluate(carry)
            new[-1] |= metrics
            new[-1]["seconds"] = round_seconds(events, compute_clock() - began)
        if after in self.kept:
            self.trajectory.append(jax.tree.map(np.asarray, setup.algorithm.params(carry.server)))
        return carry, rounds, self._reported(carry, new, lost, due)

    def _ask(self, carry: RoundState) -> int:
        """Tell the participation policy the losses of the clients that it asks; their number."""
        setup, sampler, round = self.setup, self.setup.planner.sampler, rounds_done(self.events)
        assert setup.candidate_losses is not None
        clients = sampler.clients_to_ask(round)
        model = with_statistics(setup.algorithm.params(carry.server), carry.statistics)
        sampler.observe_losses(round, clients, setup.candidate_losses(model, clients))
        return len(clients)

    def _called(self, carry: RoundState, event: Event) -> str:
        """The reason to stop if a callback requests it after an evaluation."""
        params, statistics = jax.tree.map(np.asarray, (self.setup.algorithm.params(carry.server), carry.statistics))
        answers = [callback(Snapshot(event, params, statistics)) for callback in self.callbacks]
        stops = any(answer is not None and bool(answer) for answer in answers)
        return "callback" if answer_of_first_process(stops) else "rounds"

    def _until_stop(self, done: int) -> int:
        """Rounds until the host has to evaluate, write a checkpoint, store parameters or messages, or end the run."""
        settings = self.setup.settings
        if self.setup.planner.sampler.adaptive:
            return 1
        every = LONGEST_BLOCK if settings.checkpoint_every is None else settings.checkpoint_every
        others = LONGEST_BLOCK if self.record is None else self.record.rounds_until(done, settings.rounds)
        kept = next((n for n in range(1, LONGEST_BLOCK) if done + n in self.kept), LONGEST_BLOCK)
        return min(self.last - done, settings.rounds_to_evaluation(done), every - done % every, others, kept)

    def _to_record(self, block: RoundBlock, round: int) -> tuple[RoundBlock, list[int]]:
        """The block that begins with ``round``, with the clients to record if that round is recorded."""
        if self.record is None or not self.record.holds(round):
            return block, []
        clients = sorted({int(client) for client in self.record.clients})
        inputs = jax.tree.map(lambda a: a[:1], block.inputs)  # one round: no room for the messages of others
        return block._replace(inputs=inputs._replace(recorded=np.asarray([clients], np.int32))), clients

    def _checkpoint_due(self, due: float) -> bool:
        every = self.setup.settings.checkpoint_every
        return time.monotonic() > due if every is None else rounds_done(self.events) % every == 0

    def _checkpoint(self, carry: RoundState, over: bool) -> float:
        """Write a checkpoint; the time when the next one is due."""
        if self.run_directory is not None:
            self.run_directory.check_present()
        if self.log is not None:
            self.log.sync()
        began = time.monotonic()
        keep, more = self.keep_clients or not over, {}
        if over and rounds_done(self.events) == self.last < self.setup.settings.rounds:
            more["stopped"] = "budget"
        self._save(CHECKPOINT, carry, keep, **more)
        self._save_model(carry)
        took = time.monotonic() - began  # large states are written more rarely, for 5 % of the time at most
        return time.monotonic() + max(_CHECKPOINT_SECONDS, 20 * took)

    def _save(self, name: str, carry: RoundState, clients: bool, **more: str) -> None:
        """Write the state, with the digest of the events before it."""
        if self.log is not None:
            done = rounds_done(self.events)
            events = self.log.digest()
            save(self.setup, self.storage, name, carry, done, clients, self.ledger, events=events, **more)

    def _save_model(self, carry: RoundState) -> None:
        """Write the global model beside the checkpoint, unless a model file cannot hold it."""
        if self.log is not None:
            assert self.setup.directory is not None
            params = self.setup.algorithm.params(self.setup.engine.whole_server(carry))
            if not (problem := problem_of(params, carry.statistics)):
                save_model(self.setup.directory / MODEL, params, carry.statistics)
            elif not self._warned:
                self._warned = True
                warn(f"no {MODEL} is written: {problem}")

    def _reached(self, events: list[Event]) -> bool:
        target = self.setup.settings.target
        return target is not None and any(event.get("test_accuracy", -1.0) >= target for event in events)

    def _evaluate(self, carry: RoundState) -> tuple[Metrics, str | None]:
        """The metrics that are finite or not defined, and the name of one that is neither."""
        setup, carry = self.setup, carry._replace(store=self.storage.store(carry))
        metrics, self.personal_metrics = setup.evaluate(setup.algorithm, carry, setup.initial, setup.evaluators)
        return split_finite(metrics)

    def _result(self, carry: RoundState, stopped: str) -> Result:
        setup, server = self.setup, self.setup.engine.whole_server(carry)
        if self.personal_metrics is None and stopped != "diverged" and self.has_clients and setup.personal is not None:
            here = carry._replace(store=self.storage.store(carry))  # a run that was finished before evaluates nothing
            self.personal_metrics = setup.evaluate(setup.algorithm, here, setup.initial, {}).personal_metrics
        store, homes = self.storage.store(carry), setup.planner.rows()
        clients = {
            "store": store,
            "homes": homes,
            "initial_client": setup.initial,
            "personal_metrics": self.personal_metrics,
        }
        return Result(
            params=unplaced(setup.algorithm.params(server)),
            server=server,
            events=self.events,
            plan=setup.info.plan,
            stopped=stopped,
            directory=setup.directory,
            spent=None if self.ledger is None else self.ledger.spent,
            lower_is_better=setup.task.lower_is_better,
            statistics=unplaced(carry.statistics),
            trajectory=self.trajectory,
            exchanges=self.exchanges,
            algorithm=setup.algorithm,
            task=setup.task,
            num_clients=setup.info.num_clients,
            **(clients if self.has_clients else NO_CLIENTS),
        )

    # -- failure -----------------------------------------------------------------------------------------------

    def _fail(self, carry: RoundState, block: RoundBlock, records: dict) -> NoReturn:
        """Raise an error with the client and tensor of the non-finite round, after storing the state before it."""
        setup, r = self.setup, int(np.argmin(records["sound"]))
        if r:
            sound = {name: values[:r] for name, values in records.items()}
            new = events_of(setup.info, sound, block.inputs.count, self.events, 0.0)
            record_spending(self.ledger, block.inputs, new, setup.info.num_clients)
            report(new, self.events, self.log, self.sinks)
        message = setup.engine.failure or self._source(carry, block, r, int(records["bad"][r]))
        self._stop(message, self.storage.save_states(carry, block), "the server's state it starts from")

    def _source(self, carry: RoundState, block: RoundBlock, r: int, bad: int) -> str:
        """What is not finite in round ``r`` of a block, in words; ``bad`` is the first client with such a loss."""
        setup, where = self.setup, f"{self.setup.info.algorithm}, round {rounds_done(self.events) + 1}"
        known = f"{where}, client {bad}: info/loss" if bad < setup.info.num_clients else f"{where}: the server state"
        known += " is not finite"
        # In a later phase, the loss of every client depends on the uploads of the phases before.
        if not setup.alone or (bad < setup.info.num_clients and len(setup.algorithm.phases) == 1):
            return known
        search = divergence.DivergenceSearch(
            setup.engine, setup.algorithm, carry, setup.key, block.inputs, r, setup.settings.dtype
        )
        shown = [sink for sink in self.sinks if isinstance(sink, ProgressSink)]

        def progress(text: str) -> None:
            for sink in shown:
                sink.note(text)

        for sink in shown:
            sink.say(f"{known}; looking for its source, for at most {divergence.SEARCH_SECONDS:g} s")
        found = search.run(self.interrupted, progress)
        progress("")
        if search.cut_short is None:
            return found or known
        checked = f"{search.checked} of {search.clients} clients are finite"
        return f'{known}; the search for its source {search.cut_short} ({checked}): plan = "debug" names it'

    def _stop(self, message: str, carry: RoundState, what: str) -> NoReturn:
        """Keep the state and raise NonFiniteError."""
        directory = self.setup.directory
        self._save(FAILURE, carry, self.keep_clients, error=message)
        if not self.interrupted.is_set():
            message += describe_nonfinite_samples(self.setup.federation)
        message += f"; {what} is in {directory / FAILURE}" if directory else ""
        error = NonFiniteError(message)
        error.result = dataclasses.replace(self._result(carry, "diverged"), **NO_CLIENTS)
        raise error


def run_block_of_rounds(
    setup: Setup, storage: BlockLoader, carry: RoundState, block: RoundBlock
) -> tuple[RoundState, dict]:
    """Run a block of rounds: (carry, records [rounds] by name); ``storage.save_states`` comes after it."""
    if block.samples is not None:
        setup.engine.samples = block.samples
    carry = storage.load_states(carry, block)
    with translate_errors(setup.algorithm):
        return setup.engine.run(setup.algorithm, carry, setup.key, block.inputs, block.rounds)
