"""Runs that differ in float hyper-parameters and seeds, as one compiled program.

Float hyper-parameters are inputs of the program, so a grid of them is one ``vmap``: the runs of one seed share cohorts
and mini-batches, which are drawn once, and a row of data is read once for the whole grid. Seeds run one after another
inside the same call; the grid is sharded over the devices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import tree, xla
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import check
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.task import Task
from fedrax.data import Federation
from fedrax.devices import unplaced, use_all_cores
from fedrax.errors import FedraxError, each_warning_once
from fedrax.simulation.evaluation import split_finite
from fedrax.simulation.executors.compiled import Engine, RoundState, compiler_options, run_block
from fedrax.simulation.executors.debug import NonFiniteError
from fedrax.simulation.executors.execution_plan import make_mesh
from fedrax.simulation.persistence.run_identity import form_of, settings_in
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.privacy_ledger import ledger_of, record_spending
from fedrax.simulation.process import numeric_context
from fedrax.simulation.results.events import Event, Sink, event_of_start, events_of, rounds_done
from fedrax.simulation.results.progress import ProgressLine, ProgressSink, compose_line, progress_is_visible
from fedrax.simulation.results.result import NO_CLIENTS, PersonalMetrics, Result
from fedrax.simulation.round import ClientRecord, RoundInputs
from fedrax.simulation.run import LONGEST_BLOCK, simulate
from fedrax.simulation.settings import Settings, SettingsOptions
from fedrax.simulation.setup import ENGINES, Setup, make_evaluators, prepare
from fedrax.simulation.timer import compute_clock
from fedrax.simulation.validate import changed_settings
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS, vmap

Mode = Literal["auto", "vectorized", "sequential"]
_SMALL = 60_000
"""Model parameters up to which vectorized runs are faster than sequential ones on CPU cores, measured by
``benchmarks/sweep.py``. A wrong value costs time only."""


@checked_arguments
def sweep(
    algorithms: Sequence[Algorithm],
    task: Task,
    federation: Federation,
    seeds: Sequence[int] | None = None,
    settings: Settings | None = None,
    *,
    mode: Mode = "auto",
    progress: bool = True,
    **options: Unpack[SettingsOptions],
) -> list[list[Result]]:
    """Run several variants of an algorithm with several seeds.

    Vectorized runs are one compiled program: variants that differ in float hyper-parameters are mapped with ``vmap``.
    Runs with plan ``loop`` or ``debug``, with streamed samples or spilled client states, or with a target or privacy
    budget are always sequential. A run that diverges stops with ``stopped = "diverged"`` and does not affect the
    others. No run directory is written (``fedrax compare`` does that); in vectorized runs the seconds in events are
    those of all runs.

    Args:
        algorithms: the variants. For vectorized runs they must be of one class and have the same static fields.
        task: loss and metrics.
        federation: the clients' data.
        seeds: seeds of the runs; by default the seed of the settings.
        settings: settings of all runs.
        mode: ``"vectorized"``, ``"sequential"``, or ``"auto"``, which chooses by model size, backend and memory.
        progress: show a progress line in terminals and notebooks.
        **options: settings by name, as in :func:`fedrax.simulate`.

    Returns:
        The results: ``results[i][j]`` is that of ``algorithms[i]`` with ``seeds[j]``.

    Raises:
        FedraxError: for impossible settings, and where ``mode="vectorized"`` is not possible.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> variants = [fedrax.FedAvg(local=fedrax.LocalSGD(lr=lr, steps=1)) for lr in (0.1, 1.0)]
        >>> results = fedrax.tuning.sweep(variants, task, federation, seeds=(0, 1), rounds=1, cohort_size=2)
        >>> len(results), len(results[0])
        (2, 2)
    """
    seeds = resolve_seeds(seeds, settings, options)
    settings = changed_settings(settings, options)
    use_all_cores()
    if not algorithms or not len(seeds):
        raise FedraxError("a sweep needs at least one algorithm and one seed")
    with each_warning_once():  # of all seeds and variants
        with numeric_context(settings.dtype):
            make_mesh(settings.devices)  # that there are so many
            one = [dataclasses.replace(settings, seed=seed, devices=1) for seed in seeds]
            setups = [prepare(algorithms[0], task, federation, each) for each in one]
            obstacle = _obstacle(setups[0])
            if obstacle and mode == "vectorized":
                raise FedraxError(f"vectorized runs {obstacle}, or use mode='sequential'")
            if mode == "vectorized" or (
                mode == "auto" and _is_faster(algorithms, setups[0], len(seeds), settings.devices)
            ):
                for algorithm in algorithms:
                    check(algorithm)
                with _progress_line(progress) as line:
                    return _VectorizedRuns(algorithms, setups, federation, settings.devices).run(line)
        count, results = len(algorithms) * len(seeds), []
        with _progress_line(progress) as line:
            for i, (algorithm, seed) in enumerate(itertools.product(algorithms, seeds), 1):
                sinks = [] if line is None else [ProgressSink(f"{type(algorithm).__name__} ({i}/{count})", line)]
                results.append(_run_one(algorithm, task, federation, dataclasses.replace(settings, seed=seed), sinks))
    return [results[i : i + len(seeds)] for i in range(0, count, len(seeds))]


@contextmanager
def _progress_line(progress: bool) -> Iterator[ProgressLine | None]:
    """A progress line if requested and visible; it is removed at the end, also after an error."""
    line = ProgressLine() if progress and progress_is_visible() else None
    try:
        yield line
    finally:
        if line is not None:
            line.clear()


def resolve_seeds(seeds: Sequence[int] | None, settings: Settings | None, options: SettingsOptions) -> Sequence[int]:
    """The seeds of several runs; raises FedraxError if both ``seeds`` and ``seed`` are given."""
    if seeds is not None and "seed" in options:
        raise FedraxError("seeds and seed are both given: leave seed out")
    return (changed_settings(settings, options).seed,) if seeds is None else seeds


def _obstacle(setup: Setup) -> str | None:
    """Why these settings exclude vectorized runs, with the remedy; None if they do not."""
    settings = setup.settings
    if settings.target is not None:
        return "cannot stop at a target: leave the target out"
    if settings.epsilon_budget is not None:
        return "cannot stop at a budget: leave epsilon_budget out"
    if setup.planner.sampler.adaptive:
        return "share their cohorts, and an adaptive policy samples them for each run: choose another participation"
    if ENGINES[setup.plan] is not Engine:
        return f"are one compiled program, and plan {setup.plan} is not: leave the plan out"
    if setup.streamed or setup.spilled:
        return "keep samples and client states on the devices: leave samples and states out"
    return None


def _is_faster(algorithms: Sequence[Algorithm], setup: Setup, seeds: int, devices: int | None) -> bool:
    """Whether vectorized runs are possible, fit into memory and are probably faster."""
    same = len({(jax.tree.structure(a), *map(jnp.shape, jax.tree.leaves(a))) for a in algorithms}) == 1
    if not same or _obstacle(setup) is not None:
        return False
    small = setup.info.parameters <= _SMALL or jax.default_backend() != "cpu"
    return small and _fits_memory(setup, len(algorithms), seeds, devices)


def _fits_memory(setup: Setup, count: int, seeds: int, devices: int | None) -> bool:
    """Whether the devices have memory for ``count`` vectorized algorithms and the states of all their seeds."""
    mesh = _mesh(devices, count)
    account, lanes = MemoryBudget.of(mesh), -(-count // mesh.devices.size)
    account.reserve(account.device_bytes((*setup.federation.train, *setup.federation.test)))
    server = jax.eval_shape(lambda: setup.algorithm.init(setup.params, setup.info.num_clients))
    states = tree.num_bytes(server) + setup.planner.capacity * tree.num_bytes(setup.initial)
    clients = max(setup.engine.program.chunk, 1)
    return account.has_room(lanes * (seeds * states + clients * setup.traced.peak_bytes))


def _mesh(devices: int | None, count: int) -> Mesh:
    """The devices over which ``count`` vectorized algorithms are sharded."""
    return make_mesh(min(devices or len(jax.devices()), count))


def should_vectorize(
    algorithms: Sequence[Algorithm], task: Task, federation: Federation, settings: Settings, seeds: int = 1
) -> bool:
    """Whether ``sweep(mode="auto")`` would vectorize these algorithms with this number of seeds."""
    use_all_cores()
    if len(algorithms) < 2:
        return False
    with numeric_context(settings.dtype):
        setup = prepare(algorithms[0], task, federation, dataclasses.replace(settings, devices=1))
        return _is_faster(algorithms, setup, seeds, settings.devices)


def program_keys(algorithm: Algorithm, task: Task, federation: Federation, settings: Settings) -> tuple[str, str]:
    """(cache key of a run's program: everything static; digests of the program, evaluation and initial parameters)."""
    use_all_cores()
    with numeric_context(settings.dtype):
        known = prepare(algorithm, task, federation, settings, directory=Path()).identity or {}
    computed = " ".join(known[part] for part in ("program", "evaluation", "starting parameters"))
    return f"{form_of(algorithm)} {settings_in(known)}", computed


def _run_one(
    algorithm: Algorithm, task: Task, federation: Federation, settings: Settings, sinks: Sequence[Sink]
) -> Result:
    """One run; the partial result if it diverges."""
    try:
        return simulate(algorithm, task, federation, settings, sinks=sinks, progress=False)
    except NonFiniteError as error:
        assert error.result is not None
        return error.result


class _VectorizedRuns:
    """All runs as one program: seeds [Z] in a loop, algorithms [G] under ``vmap``, sharded over the devices.

    A lane is one run. Its block of rounds is that of a single run, and the host makes its events as for a single run.
    """

    def __init__(
        self, algorithms: Sequence[Algorithm], setups: list[Setup], federation: Federation, devices: int | None
    ):
        if len({jax.tree.structure(a) for a in algorithms}) != 1:
            raise FedraxError("algorithms that run together must differ in float hyper-parameters only")
        self.algorithms, self.setups, self.count = algorithms, setups, len(algorithms)
        self.settings = setups[0].settings
        self.ledgers = [[ledger_of(a, s.settings, s.planner.sampler) for s in setups] for a in algorithms]
        self.personal_metrics: dict[tuple[int, int], PersonalMetrics | None] = {}
        mesh = _mesh(devices, self.count)
        devices = mesh.devices.size
        padding = -self.count % devices
        self.stacked, self.width = _stack(list(algorithms) + [algorithms[-1]] * padding), self.count + padding
        program, replicated = setups[0].engine.program, NamedSharding(mesh, P())
        self.samples = jax.device_put(setups[0].samples, replicated)  # no copy on CPU devices
        self.evaluators = make_evaluators(setups[0].task, self.settings, federation, mesh, self.samples)
        grid = vmap(partial(run_block, program, None), in_axes=(0, 0, None, None, None, None, 0))

        def on_device(
            algorithms: Algorithm,
            carry: RoundState,
            samples: Tree,
            keys: Array,
            inputs: Any,
            rounds: Array,
            alive: Array,
        ) -> tuple:
            def one_seed(c: tuple) -> tuple:
                return grid(algorithms, c[0], samples, c[1], c[2], rounds, c[3])

            return jax.lax.map(one_seed, (carry, keys, inputs, alive))

        lanes = P(None, CLIENT_AXIS)
        self._lanes = NamedSharding(mesh, lanes)
        sharded = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(P(CLIENT_AXIS), lanes, P(), P(), P(), P(), lanes),
            out_specs=(lanes, lanes),
            check_vma=False,
        )
        self._block = xla.jit(sharded, donate_argnums=(1,), compiler_options=compiler_options(mesh))
        where = f"{devices} device{'s' * (devices > 1)}"
        self.plan = f"vectorized: {self.count} x {len(setups)} runs in one program on {where}"

    def _initial(self) -> tuple[RoundState, ClientRecord]:
        """(state before the first round, initial client state) of all lanes."""
        rows = max(setup.planner.capacity for setup in self.setups)

        def start(algorithm: Algorithm, params: Tree, statistics: Tree) -> tuple[RoundState, ClientRecord]:
            initial = ClientRecord.at_first(algorithm, params, statistics)
            store = jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *jnp.shape(a))), initial)
            return RoundState(algorithm.init(params, self.setups[0].info.num_clients), statistics, store), initial

        of_seeds = jax.tree.map(lambda *x: jnp.stack(x), *[(setup.params, setup.statistics) for setup in self.setups])
        over_algorithms = jax.vmap(start, (0, None, None))
        return jax.vmap(over_algorithms, (None, 0, 0))(self.stacked, *of_seeds)

    def run(self, line: ProgressLine | None) -> list[list[Result]]:
        """Run all rounds of all runs, with the evaluations of the settings."""
        name = f"{self.count * len(self.setups)} runs of {type(self.algorithms[0]).__name__}"
        total = self.settings.rounds
        carry, initial = self._initial()
        self.initial = jax.tree.map(np.asarray, initial)
        carry = jax.device_put(carry, self._lanes)  # the sharding of a block's output, to avoid a recompilation
        keys = jnp.stack([setup.key for setup in self.setups])
        events: list[list[list[Event]]] = [[[] for _ in self.setups] for _ in range(self.count)]
        alive = np.ones((len(self.setups), self.width), bool)
        done = 0
        if self.settings.eval_first or not total:
            began, host = compute_clock(), jax.tree.map(np.asarray, carry)
            for z, g in np.ndindex(len(self.setups), self.count):
                new = [event_of_start({}, compute_clock() - began)]
                self._append(events[g][z], new, z, g, host, False)
                alive[z, g] = not events[g][z][-1].get("diverged")
        while done < total:
            if line is not None:
                line.show(compose_line(name, done, total, ["compiling"] if done == 0 else [], line.width, line.letters))
            began = compute_clock()
            rounds = min(self.settings.rounds_to_evaluation(done), total - done, LONGEST_BLOCK)
            blocks = [setup.planner.block(done, rounds, LONGEST_BLOCK) for setup in self.setups]
            inputs = jax.tree.map(lambda *x: np.stack(x), *blocks)
            carry, records = self._block(self.stacked, carry, self.samples, keys, inputs, np.int32(rounds), alive)
            done += rounds
            records = {name: np.asarray(value) for name, value in records.items()}
            host = jax.tree.map(np.asarray, carry) if self.settings.evaluates(done) else None
            seconds = compute_clock() - began
            for z, g in np.ndindex(len(self.setups), self.count):
                lane = {name: value[z, g, :rounds] for name, value in records.items()}
                self._extend(events[g][z], z, g, lane, blocks[z], seconds, host)
                alive[z, g] = not events[g][z][-1].get("diverged")
        final = jax.tree.map(np.asarray, carry)
        return [[self._result(events[g][z], final, z, g) for z in range(len(self.setups))] for g in range(self.count)]

    def _extend(
        self,
        events: list[Event],
        z: int,
        g: int,
        records: dict,
        inputs: RoundInputs,
        seconds: float,
        carry: RoundState | None,
    ) -> None:
        """Append the events of a block of one lane, and evaluate it if ``carry`` (of all lanes) is given."""
        if events and events[-1].get("diverged"):
            return
        sound = records["sound"]
        kept = len(sound) if sound.all() else int(np.argmin(sound))
        cut = {name: value[:kept] for name, value in records.items()}
        new, diverged = events_of(self.setups[z].info, cut, inputs.count, events, seconds), kept < len(sound)
        record_spending(self.ledgers[g][z], inputs, new, self.setups[z].info.num_clients)
        self._append(events, new, z, g, carry, diverged)

    def _append(
        self, events: list[Event], new: list[Event], z: int, g: int, carry: RoundState | None, diverged: bool
    ) -> None:
        """Append new events of a lane with the metrics of ``carry``, if given, and an event if it has diverged."""
        if carry is not None and not diverged:
            lane, initial = jax.tree.map(lambda a: a[z, g], (carry, self.initial))
            metrics, self.personal_metrics[z, g] = self.setups[z].evaluate(
                self.algorithms[g], lane, initial, self.evaluators
            )
            metrics, lost = split_finite(metrics)
            new[-1] |= metrics
            diverged = lost is not None
        events.extend(new)
        if diverged:
            events.append({"round": rounds_done(events) + 1, "diverged": True})

    def _result(self, events: list[Event], carry: RoundState, z: int, g: int) -> Result:
        """The result of a lane."""
        diverged, ledger, setup = bool(events[-1].get("diverged")), self.ledgers[g][z], self.setups[z]
        lane = jax.tree.map(lambda a: a[z, g], carry)
        initial = jax.tree.map(lambda a: a[z, g], self.initial)
        kept = {"store": lane.store, "homes": setup.planner.rows(), "initial_client": initial}
        kept |= {"personal_metrics": self.personal_metrics.get((z, g))}
        return Result(
            params=unplaced(self.algorithms[g].params(lane.server)),
            server=lane.server,
            events=events[:-1] if diverged else events,
            plan=self.plan,
            stopped="diverged" if diverged else "rounds",
            spent=None if ledger is None else ledger.spent,
            lower_is_better=setup.task.lower_is_better,
            statistics=unplaced(lane.statistics),
            algorithm=self.algorithms[g],
            task=setup.task,
            num_clients=setup.info.num_clients,
            **(NO_CLIENTS if diverged else kept),
        )


def _stack(algorithms: Sequence[Algorithm]) -> Algorithm:
    """Algorithms with stacked leaves."""
    return jax.tree.map(lambda *leaves: jnp.stack([_as_input(leaf) for leaf in leaves]), *algorithms)


def _as_input(leaf: Any) -> Array:
    """A hyper-parameter as an input of the program: Python numbers as floats, arrays with their dtype."""
    return jnp.asarray(leaf) if hasattr(leaf, "dtype") else jnp.asarray(leaf, float)
