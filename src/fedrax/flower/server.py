"""The server's end: a ServerApp of Flower that leads an algorithm's rounds over real clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedrax.compiled.cores import use_all_cores
from fedrax.compiled.edits import Code
from fedrax.compiled.tracing import computed
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import checked_init, require_finite_start
from fedrax.contract.client_data import Layout
from fedrax.contract.model import with_statistics
from fedrax.contract.place import Place
from fedrax.contract.seeds import RUN, START, seeded
from fedrax.contract.task import Task
from fedrax.contract.task_checks import check_task
from fedrax.data import Federation
from fedrax.errors import FedraxError, warn
from fedrax.flower.evaluation import Evaluate, check_test, on_the_clients, on_the_server
from fedrax.flower.network import Arithmetic, Network, NobodyAnswered, Traffic
from fedrax.flower.nodes import PAUSE, Nodes, log
from fedrax.flower.orders import Order
from fedrax.flower.records import packed
from fedrax.flower.travelling import any_place, needs_start, shapes_of_samples, travelling
from fedrax.privacy.ledger import Ledger
from fedrax.simulation.arguments import changed_settings, check_lists
from fedrax.simulation.beginning import at_first, check_needs, check_run, start_and_statistics
from fedrax.simulation.cohorts import Sampler
from fedrax.simulation.communication import trace_round
from fedrax.simulation.debug import NonFiniteError
from fedrax.simulation.directory import owned
from fedrax.simulation.events import Event, EventFile, RunInfo, Sink, events_of, report
from fedrax.simulation.process import arithmetic, write_environment
from fedrax.simulation.result import Result, Snapshot
from fedrax.simulation.round import Program, Rounds, run_round
from fedrax.simulation.run import Callback
from fedrax.simulation.settings import Settings
from fedrax.simulation.spending import ledger_of
from fedrax.tree import Tree

_OURS = ("rounds", "cohort_size", "weights", "eval_every", "per_client", "target", "epsilon_budget", "delta", "dtype")
"""Settings that mean something here; the others are a simulator's."""
MODEL = "model.safetensors"


def server_app(
    algorithm: Algorithm,
    task: Task,
    settings: Settings | None = None,
    *,
    then: Callable[[Result], Any] | None = None,
    **arguments: Any,
) -> ServerApp:
    """A ServerApp that leads a federation of ``algorithm`` and ``task`` over the clients of
    :func:`fedrax.flower.client_app`; arguments as of :func:`federate`.

    then: called with the result, once all rounds are over.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        result = federate(grid, algorithm, task, settings, **arguments)
        if then is not None:
            then(result)

    return app


def federate(
    grid: Grid,
    algorithm: Algorithm,
    task: Task,
    settings: Settings | None = None,
    *,
    clients: int,
    test: tuple[Any, Any] | None = None,
    params: Tree | None = None,
    seed: int | None = None,
    directory: Path | str | None = None,
    wait: float = 600.0,
    timeout: float = 600.0,
    sinks: Sequence[Sink] = (),
    callbacks: Sequence[Callback] = (),
    **changes: Any,
) -> Result:
    """Run ``algorithm`` on ``task`` over the clients of a Flower federation, as ``fedrax.simulate`` does on a machine.

    settings, changes: of :class:`fedrax.Settings` the rounds, the cohort's size, weights, evaluation, target, privacy
    budget and delta, and dtype. clients: N, how many there are; rounds begin when so many are there. test: the server's
    own test samples (x, y); without them the clients evaluate on theirs. params: starting parameters, instead of
    ``task.init``. seed: start, cohorts and the server's noise as ``simulate`` draws them; by default they are secret,
    for what others can draw, too, protects nothing. directory: where to keep events and the model as of the last
    round, ``model.safetensors``. wait: seconds to wait for the clients at the start. timeout: seconds to wait for
    answers, and for clients where too few are there for a round. Clients that do not answer in that time, or nothing
    that makes sense, are left out of the round as if they had not been asked; a round that nobody answers changes
    nothing, as does one with too few clients for a method that needs the same number in each. sinks, callbacks: as of
    ``simulate``.

    A private method's epsilon takes nothing from the draw of cohorts, since who is there is not for the server to draw.

    Raises FedraxError for impossible settings, and where clients do not fit together; NonFiniteError, whose ``result``
    holds the rounds before, when a number of the server's or of all clients' answers stops being finite.
    """
    check_lists(sinks=sinks, callbacks=callbacks)
    settings = _settings(settings, changes, seed)
    use_all_cores()
    nodes = Nodes(grid, timeout)
    nodes.gather(clients, wait)
    with arithmetic(settings.dtype):
        path = None if directory is None else Path(directory)
        run = _prepare(nodes, algorithm, task, settings, params, seed, test, path)
        return replace(run, sinks=sinks, callbacks=callbacks).finish()


def _settings(settings: Settings | None, changes: dict[str, Any], seed: int | None) -> Settings:
    """The settings, their seed the given one or a secret; FedraxError for one that only simulations have."""
    settings = changed_settings(settings, changes)
    for one in fields(Settings):
        if one.name not in _OURS and getattr(settings, one.name) != one.default:
            hint = ": give it to federate itself" if one.name == "seed" else ""
            raise FedraxError(f"{one.name} is a setting of simulations, not of a federation{hint}")
    drawn = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    return replace(settings, seed=drawn, amplification="none")


@dataclass(frozen=True, eq=False)
class Leading:
    """A federation whose rounds are under way. Made by ``_prepare``."""

    nodes: Nodes
    algorithm: Algorithm
    task: Task
    settings: Settings
    sampler: Sampler
    arithmetic: Arithmetic
    traffic: Traffic
    key: jax.Array
    server: Any
    """The state before the first round."""
    statistics: Tree
    evaluate: Evaluate
    ledger: Ledger | None
    info: RunInfo
    sinks: Sequence[Sink] = ()
    callbacks: Sequence[Callback] = ()
    events: list[Event] = field(default_factory=list)

    def finish(self) -> Result:
        """All rounds."""
        directory, started = self.info.directory, []
        if directory is None:
            return self._reported(None, started)
        with owned(directory, False):
            file = EventFile(directory, [])
            write_environment(directory)
            try:
                return self._reported(file, started)
            finally:
                file.close()

    def _reported(self, file: EventFile | None, started: list[Sink]) -> Result:
        result = None
        try:
            for sink in self.sinks:
                sink.start(self.info)
                started.append(sink)
            result = self._rounds(file)
            return result
        finally:
            for sink in started:
                sink.finish(result)

    def _rounds(self, file: EventFile | None) -> Result:
        server, statistics, stopped = self.server, self.statistics, "rounds"
        for r in range(self.settings.rounds):
            began, there = time.monotonic(), self._there(r)
            cohort = self.sampler.cohort_among(r, there)
            if not self._affordable(cohort):
                stopped = "budget"
                break
            before = server, statistics
            spent = {} if self.ledger is None else self.ledger.spend(cohort)  # whoever is asked may be heard
            try:
                server, statistics, record, answered = self._round(r, cohort, *before)
            except NonFiniteError as error:
                error.result = self._result(*before, "diverged")
                raise
            event = self._event(record, answered, time.monotonic() - began) | spent
            if self.info.directory is not None:
                model = _on_host(self.algorithm.params(server), statistics)
                Snapshot({"round": r + 1}, *model).save(self.info.directory / MODEL)
            over = r + 1 == self.settings.rounds
            if over or (r + 1) % self.settings.eval_every == 0:
                event |= self._evaluated(r, server, statistics, there)
            report([event], self.events, file, self.sinks)
            log.info("fedrax: %s", _line(event))
            if self._reached(event):
                stopped = "target"
            elif any(name.startswith("test_") for name in event) and self._stops(event, server, statistics):
                stopped = "callback"
            if stopped != "rounds":
                break
        if self.events and not any(event["clients"] for event in self.events):
            raise FedraxError(
                "no client has answered in any round, and the model is as it was: each round's warnings say why"
            )
        return self._result(server, statistics, stopped)

    def _there(self, r: int) -> np.ndarray:
        """The clients that can be asked; nobody where fewer are there than a round needs, and no more come in time."""
        needed = self.sampler.largest if self.algorithm.requirements.fixed_cohort else 1
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
        """(the server's state, the statistics, the round's record, the clients that it is made of); as before where the
        round comes to nothing."""
        if not len(cohort):
            return server, statistics, {}, []
        network = Network(self.arithmetic, self.algorithm, self._here(r, cohort), self.key, self.nodes, self.traffic)
        try:
            after, moved, record, _ = run_round(network, server, statistics)
        except NobodyAnswered:
            log.warning("round %d: %d of %d clients have answered: it changes nothing", r + 1, 0, len(cohort))
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
        place = Place(cohort.astype(np.int32), zeros, zeros, sizes.astype(np.int32), shares.astype(kind))
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
        order = Order(r, 0, 0, self.nodes.num_clients, 1.0, -1, [0, 0], self.settings.dtype)
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


def _prepare(
    nodes: Nodes,
    algorithm: Algorithm,
    task: Task,
    settings: Settings,
    params: Tree | None,
    seed: int | None,
    test: Any,
    directory: Path | None,
) -> Leading:
    """Check everything as ``simulate`` does, and lay out what the rounds need."""
    check_run(algorithm, settings, nodes.sizes)
    drawn, start, statistics, _ = start_and_statistics(task, seeded(settings.seed, START), params, settings.dtype)
    initial, broken = at_first(algorithm, start, statistics)
    sampler = Sampler(settings, nodes.sizes)
    check_needs(algorithm, settings, sampler, task, statistics)
    samples, variables = shapes_of_samples(nodes.samples), with_statistics(start, statistics)
    x, y = (np.zeros(a.shape, a.dtype) for a in samples)
    check_task(task, variables, samples, Federation.from_arrays(x, y, [0], num_classes=1))
    algorithm.requirements.check_parts(task, variables, samples.x)
    layout = Layout.of(nodes.sizes)
    program = Program(task, layout, nodes.num_clients, chunk=0, code=Code(algorithm, task))
    program = program._replace(expected=float(sampler.largest))
    traced = trace_round(program, algorithm, start, statistics, initial, samples, any_place(), broken)
    phases = travelling(program, algorithm, start, statistics, samples)
    if any(release.apart > 1 for release in algorithm.releases()):
        raise FedraxError(
            "noise in bands is for clients that take part so many rounds apart, which is not for the server to promise"
            " where clients come and go: set bands to 1"
        )
    ledger = ledger_of(algorithm, settings, sampler)
    if ledger is not None and seed is not None:
        warn("the noise of a private method is drawn from the seed, which whoever knows it can do, too: leave seed out")
    wanted = needs_start(algorithm, start, statistics)
    start, statistics = drawn()
    traffic = Traffic({"start": packed((start, statistics))} if wanted else {})
    server = computed(lambda params: algorithm.init(params, nodes.num_clients), start)
    checked_init(algorithm, start, server)
    require_finite_start(algorithm, server)
    if test is None:
        evaluate = on_the_clients(task, nodes, traffic, settings.per_client)
    else:
        check_test(test, samples)
        evaluate = on_the_server(task, test)
    return Leading(
        nodes=nodes,
        algorithm=algorithm,
        task=task,
        settings=settings,
        sampler=sampler,
        arithmetic=Arithmetic(program, phases),
        traffic=traffic,
        key=seeded(seed, RUN) if seed is not None else _secret_key(),
        server=server,
        statistics=statistics,
        evaluate=evaluate,
        ledger=ledger,
        info=RunInfo(
            algorithm=type(algorithm).__name__,
            plan=f"Flower, {nodes.num_clients} clients",
            rounds=settings.rounds,
            first_round=0,
            cohort_size=sampler.largest,
            num_clients=nodes.num_clients,
            bytes_down=traced.bytes_down,
            bytes_up=traced.bytes_up,
            parameters=sum(x.size for x in jax.tree.leaves(start)),
            directory=directory,
        ),
    )


def _secret_key() -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)))
