"""``simulate``: the loop on the host around compiled blocks of rounds."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, check_settings
from fedrax.contract.client_data import Layout
from fedrax.contract.hyperparameters import check
from fedrax.contract.task import Batch, Task, starting_parameters
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.simulation import backend, checkpoint
from fedrax.simulation.cohorts import Planner, Sampler, check_blocks
from fedrax.simulation.communication import message_bytes
from fedrax.simulation.engine import Carry, Engine, Program
from fedrax.simulation.evaluate import Evaluator, StreamedEvaluator
from fedrax.simulation.events import Event, EventFile, RunInfo, Sink, events_of, read_events, report, round_seconds
from fedrax.simulation.interpreters import DebugEngine, LoopEngine, NonFiniteError, culprit
from fedrax.simulation.plans import choose_plan, describe
from fedrax.simulation.process import Interrupted, interrupt_flag, write_environment
from fedrax.simulation.result import Result
from fedrax.simulation.settings import Script, Settings
from fedrax.simulation.storage import Portion, Spill, Storage, Streamer, choose
from fedrax.tree import Tree

_LONGEST_BLOCK = 64
_BLOCK_SECONDS = 1.0
_CHECKPOINT_SECONDS = 30.0


class Saved(NamedTuple):
    """What a checkpoint holds: the state, and which client each row of the store belongs to (-1: none)."""

    server: Any
    store: Tree
    owners: Any


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
    **changes: Any,
) -> Result:
    """Run ``algorithm`` on ``task`` over ``federation``.

    settings: see :class:`Settings`; ``changes`` replace single fields: ``simulate(..., rounds=50, seed=1)``.
    params: starting parameters, instead of ``task.init``. script: given cohorts and blocks, instead of draws.
    directory: where to keep events, checkpoints and a description of the machine; nothing is kept by default.
    With ``jax.distributed`` every process calls simulate alike, and the first one writes.
    resume: go on from the directory's checkpoint, if it has one. sinks: who else sees events. keep_clients: keep
    client states, which can be large, in the checkpoint of a finished run, so that it can go on for more rounds, and
    in what a failed run leaves.

    Raises FedraxError for impossible settings, NonFiniteError when a number stops being finite, Interrupted
    after Ctrl-C.
    """
    settings = dataclasses.replace(settings or Settings(), **changes)
    backend.use_all_cores()
    with jax.enable_x64(settings.dtype == "float64"), jax.default_matmul_precision("highest"):
        path = None if directory is None else Path(directory)
        return Simulation(algorithm, task, federation, settings, params, script, path, keep_clients).run(resume, sinks)


class Simulation:
    """A run in the making: compiled functions, state and bookkeeping."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        settings: Settings,
        params: Tree | None,
        script: Script | None,
        directory: Path | None,
        keep_clients: bool = True,
    ):
        check(algorithm)
        check(settings, "run")
        self.algorithm, self.task, self.settings, self.directory = algorithm, task, settings, directory
        self.keep_clients = keep_clients
        key = jax.random.key(settings.seed)
        self.key = jax.random.fold_in(key, 1)
        start = starting_parameters(task, jax.random.fold_in(key, 0), params)
        self.start = jax.tree.map(lambda x: jnp.asarray(x, settings.dtype), start)
        self.initial_client = jax.jit(algorithm.init_client)(self.start)
        sampler = Sampler(settings, federation.sizes, script)
        check_settings(algorithm, settings.weights, sampler.largest, sampler.varying)
        local = getattr(algorithm, "local", None)
        check_blocks(script, sampler, local)
        mesh = backend.make_mesh(1 if settings.plan == "debug" else settings.devices)
        self.plan, chunk = choose_plan(settings, mesh, self.start, sampler.largest)
        self.alone = jax.process_count() == 1
        stateful = bool(jax.tree.leaves(self.initial_client))
        if not self.alone and directory is not None and stateful:
            raise FedraxError("a run over several processes keeps no client states on disk: leave the directory out")
        if jax.process_index() > 0:
            self.directory = None  # the first process writes
        self.planner = Planner(
            sampler,
            federation.offsets,
            devices=mesh.devices.size,
            stateful=stateful,
            by_samples=federation.sizes.min() != federation.sizes.max() and getattr(local, "steps", None) is None,
            chunk=max(chunk, 1),
            script=script,
        )
        samples = Batch(*federation.train)
        store_bytes = self.planner.capacity * tree.num_bytes(self.initial_client) if stateful else 0
        self.streamed, self.spilled = choose(settings, mesh, samples, store_bytes)
        self.samples = samples
        layout = Layout.of(federation.sizes)
        program = Program(
            task,
            layout,
            federation.num_clients,
            chunk,
            precision=settings.precision,
            own_samples=self.streamed,
        )
        engines = {"loop": LoopEngine, "debug": DebugEngine}
        self.engine = engines.get(self.plan, Engine)(program, mesh, None if self.streamed else samples)  # type: ignore[arg-type]
        self.evaluators = self._evaluators(federation, mesh)
        self.info = self._info(program, mesh, chunk, sampler.largest)
        self.identity = self._identity(federation, params)

    def _info(self, program: Program, mesh: Mesh, chunk: int, cohort_size: int) -> RunInfo:
        down, up = message_bytes(program, self.algorithm, self.start, self.initial_client, self.samples)
        return RunInfo(
            algorithm=type(self.algorithm).__name__,
            plan=describe(mesh, self.plan, chunk, self.streamed, self.spilled),
            rounds=self.settings.rounds,
            first_round=0,
            cohort_size=cohort_size,
            num_clients=program.num_clients,
            bytes_down=down,
            bytes_up=up,
            parameters=sum(x.size for x in jax.tree.leaves(self.start)),
            directory=self.directory,
        )

    def _evaluators(self, federation: Federation, mesh: Mesh) -> dict[str, Evaluator]:
        """One for each data set to evaluate on, by the prefix of its metrics."""
        if self.settings.target is not None and not (len(federation.test[1]) and "accuracy" in self.task.metrics):
            raise FedraxError("a target is a test accuracy: it needs test data and a task with the metric accuracy")
        found = {}
        if len(federation.test[1]):
            found["test"] = Evaluator(self.task, mesh, Batch(*federation.test), federation.test_offsets)
        if self.settings.eval_train or (self.settings.per_client and federation.test_offsets is None):
            kind, samples = (StreamedEvaluator, self.samples) if self.streamed else (Evaluator, self.engine.samples)
            found["train"] = kind(self.task, mesh, samples, federation.offsets)
        return found

    def _identity(self, federation: Federation, params: Tree | None) -> str:
        """A digest of what decides the numbers; a checkpoint of another is refused."""
        same = {"rounds": 0, "checkpoint_every": None, "samples": "auto", "states": "auto"}
        settings = dataclasses.replace(self.settings, **same)
        what = hashlib.sha256(repr((self.algorithm, settings)).encode())
        for array in (federation.sizes, *([] if params is None else jax.tree.leaves(self.start))):
            what.update(np.asarray(array).tobytes())
        return what.hexdigest()

    # -- state -------------------------------------------------------------------------------------------------

    def _storage(self) -> Storage:
        every = (self.settings.rounds, self.settings.eval_every, self.settings.checkpoint_every or _LONGEST_BLOCK)
        where, longest = (self.planner, self.engine.mesh), min(_LONGEST_BLOCK, *every)
        streamer = Streamer(self.samples, *where, longest) if self.streamed else None
        spill = Spill(self.initial_client, *where, longest, self.directory) if self.spilled else None
        return Storage(self.planner, _LONGEST_BLOCK, streamer, spill)

    def _fresh(self) -> Carry:
        server, store = jax.jit(partial(self.algorithm.init, num_clients=self.info.num_clients))(self.start), ()
        if self.planner.stateful and self.storage.spill is None:
            store = self.engine.new_store(self.initial_client, self.planner.capacity)
        return self.engine.put(server, ())._replace(store=store)  # the store is nobody else's: no copy

    def _restore(self) -> tuple[Carry, list[Event]]:
        """State and events at the last checkpoint, or at the start if there is none."""
        assert self.directory is not None
        where = self.directory / "checkpoint"
        if not checkpoint.exists(where):
            return self._fresh(), []
        meta = checkpoint.load_meta(where)
        if meta.get("identity") != self.identity:
            raise FedraxError(f"the checkpoint in {self.directory} belongs to another experiment")
        done = meta["round"]
        if done > self.settings.rounds:
            raise FedraxError(f"{self.directory} is at round {done}, beyond the {self.settings.rounds} asked for")
        if done < self.settings.rounds and self.planner.stateful and not meta["rows"]:
            raise FedraxError(f"the finished run in {self.directory} kept no client states: it cannot go on")
        like = jax.eval_shape(lambda: self._state_like(meta["rows"]))
        saved = checkpoint.load(where, like, in_pieces="store" if self.spilled else None)[0]
        events = read_events(self.directory)
        if len(events) < done:
            raise FedraxError(f"{self.directory} has {len(events)} events, fewer than its checkpoint's {done}")
        return self.engine.put(saved.server, self._rehouse(saved)), events[:done]

    def _state_like(self, rows: int) -> Saved:
        server = self.algorithm.init(self.start, self.info.num_clients)
        repeat = lambda a: jnp.broadcast_to(a, (rows, *a.shape))  # noqa: E731
        return Saved(server, jax.tree.map(repeat, self.initial_client), jnp.zeros(rows, jnp.int32))

    def _rehouse(self, saved: Saved) -> Tree:
        """Saved client state where this run keeps it: more rounds or other devices give clients other rows."""
        owners = self.planner.owners()
        if self.storage.spill is None and np.array_equal(saved.owners, owners):
            return saved.store
        row_of = {client: row for row, client in enumerate(owners.tolist()) if client >= 0}
        moves = [(row, row_of[c]) for row, c in enumerate(saved.owners.tolist()) if c in row_of]
        old, new = np.array(moves, int).reshape(-1, 2).T
        if self.storage.spill is not None:
            self.storage.spill.fill(saved.store, old, new)
            return ()

        def move(initial: Any, rows: np.ndarray) -> np.ndarray:
            table = np.repeat(np.asarray(initial)[None], len(owners), 0)
            table[new] = rows[old]
            return table

        return jax.tree.map(move, self.initial_client, saved.store)

    def _save(self, name: str, carry: Carry, round: int, clients: bool = True, **more: str) -> None:
        owners, store = self.planner.owners(), self.storage.store(carry)
        if not clients:
            owners, store = owners[:0], jax.tree.map(lambda a: np.zeros((0, *a.shape[1:]), a.dtype), store)
        meta = {"round": round, "rows": len(owners), "identity": self.identity, "algorithm": self.info.algorithm}
        if self.directory is not None:
            checkpoint.save(self.directory / name, Saved(self.engine.whole_server(carry), store, owners), meta | more)

    # -- the loop ----------------------------------------------------------------------------------------------

    def run(self, resume: bool, sinks: Sequence[Sink]) -> Result:
        """All rounds, from the start or from the directory's checkpoint."""
        if resume and self.directory is None:
            raise FedraxError("there is no directory to resume a run from")
        self.storage = self._storage()
        carry, events = self._restore() if resume else (self._fresh(), [])
        if self.directory is not None:
            for name in ("failure",) if resume else ("checkpoint", "failure"):
                checkpoint.discard(self.directory / name)  # of an earlier run, whose events go too
        log = EventFile(self.directory, events) if self.directory is not None else None
        if self.directory is not None:
            write_environment(self.directory)
        for sink in sinks:
            sink.start(dataclasses.replace(self.info, first_round=len(events)))
        result = None
        try:
            with interrupt_flag() as interrupted:
                carry, stopped = self._rounds(carry, events, log, sinks, interrupted)
            result = self._result(carry, events, stopped)
            return result
        finally:
            self.storage.close(failed=result is None)
            if log is not None:
                log.close()
            for sink in sinks:
                sink.finish(result)

    def _rounds(
        self,
        carry: Carry,
        events: list[Event],
        log: EventFile | None,
        sinks: Sequence[Sink],
        interrupted: threading.Event,
    ) -> tuple[Carry, str]:
        pace, due = 1 if self.alone else _LONGEST_BLOCK, time.monotonic() + _CHECKPOINT_SECONDS
        stopped = "target" if self._reached(events) else "rounds"
        while len(events) < self.settings.rounds and stopped == "rounds":
            began = time.monotonic()
            portion = self.storage.portion(len(events), min(pace, self._until_stop(len(events))))
            xs, rounds = portion.xs, portion.rounds
            carry, records = self._block(carry, portion, len(events) + rounds, pace)
            if not records["sound"].all():
                self._fail(carry, portion, records, events, log, sinks)
            carry = self.storage.settle(carry, portion)
            new = events_of(self.info, records, xs.count, events, time.monotonic() - began)
            lost, evaluate = None, (len(events) + rounds) % self.settings.eval_every == 0
            if evaluate or len(events) + rounds == self.settings.rounds:
                metrics, lost = self._evaluate(carry)
                new[-1] |= metrics
                new[-1]["seconds"] = round_seconds(events, time.monotonic() - began)
            if self.alone:  # several processes must agree on blocks, and so may not look at the clock
                pace = max(1, min(_LONGEST_BLOCK, int(_BLOCK_SECONDS * rounds / (time.monotonic() - began))))
            report(new, events, log, sinks)
            if lost is not None:
                where = f"{self.info.algorithm}, round {len(events)}"
                self._stop(f"{where}: {lost} is not finite", carry, events, "the state")
            stopped = "target" if self._reached(new) else "rounds"
            over = stopped == "target" or len(events) == self.settings.rounds
            if over or interrupted.is_set() or self._checkpoint_due(len(events), due):
                if log is not None:
                    log.sync()
                began = time.monotonic()
                self._save("checkpoint", carry, len(events), clients=self.keep_clients or not over)
                took = time.monotonic() - began  # large states are written more rarely, for 5 % of the time at most
                due = time.monotonic() + max(_CHECKPOINT_SECONDS, 20 * took)
            if interrupted.is_set() and not over:
                raise Interrupted
        return carry, stopped

    def _block(self, carry: Carry, portion: Portion, after: int, pace: int) -> tuple[Carry, dict]:
        """Run a block, while the one of the rounds ``after`` it is made."""
        if portion.samples is not None:
            self.engine.samples = portion.samples
        if after < self.settings.rounds:
            self.storage.make_ahead(after, min(pace, self._until_stop(after)))
        carry = self.storage.bring(carry, portion)
        return self.engine.run(self.algorithm, carry, self.key, portion.xs, portion.rounds)

    def _until_stop(self, done: int) -> int:
        """Rounds until the host has something to do: evaluate, write a checkpoint, end."""
        every = [self.settings.eval_every] + [self.settings.checkpoint_every] * (
            self.settings.checkpoint_every is not None
        )
        return min(self.settings.rounds - done, *(n - done % n for n in every if n), _LONGEST_BLOCK)

    def _checkpoint_due(self, done: int, due: float) -> bool:
        if self.settings.checkpoint_every is not None:
            return done % self.settings.checkpoint_every == 0
        return time.monotonic() > due

    def _reached(self, events: list[Event]) -> bool:
        target = self.settings.target
        return target is not None and any(event.get("test_accuracy", -1.0) >= target for event in events)

    def _result(self, carry: Carry, events: list[Event], stopped: str) -> Result:
        homes = {client: row for row, client in enumerate(self.planner.owners().tolist()) if client >= 0}
        return Result(
            params=carry.server.params,
            server=self.engine.whole_server(carry),
            events=events,
            plan=self.info.plan,
            stopped=stopped,
            directory=self.directory,
            store=self.storage.store(carry),
            homes=homes,
            initial_client=self.initial_client,
        )

    def _fail(
        self,
        carry: Carry,
        portion: Portion,
        records: dict,
        events: list[Event],
        log: EventFile | None,
        sinks: Sequence[Sink],
    ) -> None:
        """Say which client and tensor of the unsound round went wrong, keep its starting state, and stop."""
        r = int(np.argmin(records["sound"]))
        if r:
            sound = {name: values[:r] for name, values in records.items()}
            report(events_of(self.info, sound, portion.xs.count, events, 0.0), events, log, sinks)
        message = culprit(self.engine, self.algorithm, carry, self.key, portion.xs, r)
        self._stop(message, self.storage.settle(carry, portion), events, "the state it starts from")

    def _stop(self, message: str, carry: Carry, events: list[Event], what: str) -> None:
        """Keep the state and raise NonFiniteError."""
        if self.directory is not None:
            self._save("failure", carry, len(events), clients=self.keep_clients, error=message)
            message += f"; {what} is in {self.directory / 'failure'}"
        raise NonFiniteError(message)

    def _evaluate(self, carry: Carry) -> tuple[dict[str, float], str | None]:
        """The metrics of the global parameters that are finite, and the name of one that is not."""
        metrics: dict[str, float] = {}
        for name, evaluator in self.evaluators.items():
            metrics |= evaluator(carry.server.params, name, self.settings.per_client)
        finite = {name: value for name, value in metrics.items() if np.isfinite(value)}
        return finite, next((name for name in metrics if name not in finite), None)
