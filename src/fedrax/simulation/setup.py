"""What is fixed before a run's first round: start, plan, program, devices, planner, evaluators, identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.client_data import Layout
from fedrax.contract.model import with_statistics
from fedrax.contract.table import holds_tables
from fedrax.contract.task import Batch, Task
from fedrax.contract.task_checks import check_task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.prng.seeds import RUN, START, seeded
from fedrax.simulation.client_evaluation import EvaluationMetrics, PersonalEvaluator
from fedrax.simulation.evaluation import Evaluator, StreamedEvaluator, parameter_metrics, trace_evaluation
from fedrax.simulation.executors.choose import choose_plan, clients_at_once, describe, make_mesh
from fedrax.simulation.executors.compiled import Carry, Engine
from fedrax.simulation.executors.debug import DebugEngine
from fedrax.simulation.executors.loop import LoopEngine
from fedrax.simulation.persistence.run_identity import identify
from fedrax.simulation.placement.memory_budget import Account
from fedrax.simulation.placement.planner import Planner, rows_on_a_device
from fedrax.simulation.placement.streaming import choose
from fedrax.simulation.results.events import RunInfo
from fedrax.simulation.round import Kept, Program
from fedrax.simulation.settings import Script, Settings, cohort_sampler
from fedrax.simulation.traffic import TracedRound, trace_round
from fedrax.simulation.validate_run import at_first, check_needs, check_run, start_and_statistics
from fedrax.simulation.validate_script import given_work
from fedrax.tree import Tree
from fedrax.xla import BatchSplit, CodeFingerprint, batch_splits, device_speedup, garbage_collection_paused, run_cached

ENGINES = {"scan": Engine, "vmap": Engine, "loop": LoopEngine, "debug": DebugEngine}


@dataclass(frozen=True, eq=False)
class Setup:
    """A run that has not begun. Made by :func:`prepare`, changed by nobody."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    settings: Settings
    directory: Path | None
    """Where this process keeps the run; None where it keeps nothing, as all but the first of several."""
    kept_in: Path | None
    """Where the run is kept, by whomever."""
    key: Array
    params: Tree
    """Starting parameters."""
    statistics: Tree
    """Starting statistics of the model; an empty tuple where it has none."""
    initial: Kept
    """What a client keeps before it takes part."""
    samples: Batch
    planner: Planner
    plan: str
    streamed: bool
    spilled: bool
    engine: Engine
    evaluators: dict[str, Evaluator]
    """One for each data set to evaluate on, by the prefix of its metrics."""
    personal: PersonalEvaluator | None
    info: RunInfo
    traced: TracedRound
    identity: dict[str, str] | None
    """Digests of what decides the numbers, see :func:`run_identity.identify`; None without a directory."""

    @property
    def stateful(self) -> bool:
        """Whether clients keep anything."""
        return self.planner.stateful

    @property
    def alone(self) -> bool:
        """Whether this is the only process of the run."""
        return jax.process_count() == 1

    def evaluate(
        self, algorithm: Algorithm, carry: Carry, initial: Kept, evaluators: Mapping[str, Evaluator]
    ) -> EvaluationMetrics:
        """The metrics of a state, whose ``store`` may lie on disk: of parameters alone, on each data set, and of
        clients' own models. initial: what a client keeps before it takes part.
        """
        params, own = algorithm.params(carry.server), EvaluationMetrics({}, None)
        metrics = parameter_metrics(self.task, params)
        for name, evaluator in evaluators.items():
            metrics |= evaluator(with_statistics(params, carry.statistics), name, self.settings.per_client)
        if self.personal is not None:
            rows = self.planner.rows()
            own = self.personal(algorithm, params, carry.statistics, carry.store, rows, initial)
        return EvaluationMetrics(metrics | own.overall, own.personal_metrics)


@garbage_collection_paused()
def prepare(
    algorithm: Algorithm,
    task: Task,
    federation: Federation,
    settings: Settings,
    params: Tree | None = None,
    script: Script | None = None,
    directory: Path | None = None,
) -> Setup:
    """Check everything, choose how the run is executed, and lay out what it needs. Arguments as of ``simulate``."""
    algorithm = jax.tree.map(_anywhere, algorithm)
    check_run(algorithm, settings, federation.sizes)
    drawn, start, statistics, widened = start_and_statistics(task, seeded(settings.seed, START), params, settings.dtype)
    samples, variables = Batch(*federation.train), with_statistics(start, statistics)
    check_task(task, variables, samples, federation)
    initial, broken = at_first(algorithm, start, statistics)
    sampler = cohort_sampler(settings, federation.sizes, script)
    check_needs(algorithm, settings, sampler, task, statistics)
    algorithm.traits.check_parts(task, variables, samples.x)
    mesh = make_mesh(1 if settings.plan == "debug" else settings.devices)
    plan, account = choose_plan(settings, mesh), Account.of(mesh)
    streamed, spilled = _room(algorithm, federation, settings, sampler, initial, mesh, account)
    planner = _planner(
        algorithm, federation, settings, sampler, _given(algorithm, script, sampler), initial, mesh.devices.size
    )
    _check_processes(planner, directory)
    if jax.process_count() > 1 and sampler.adaptive:
        raise FedraxError("an adaptive participation policy needs a run of a single process")
    known = Program(
        task, Layout.of(federation.sizes), federation.num_clients, chunk=0, code=CodeFingerprint(algorithm, task)
    )
    program = known._replace(precision=settings.precision, own_samples=streamed, expected=sampler.expected)
    program = program._replace(client_info=sampler.adaptive)
    place = jax.tree.map(lambda a: a[0, 0, :1], planner.block(0, 1, 1).places)
    traced = trace_round(program, algorithm, start, statistics, initial, samples, place, broken)
    account.check_server(algorithm, start, federation.num_clients, mesh.devices.size)
    program = _side_by_side(program, settings, planner, account, traced) if plan == "vmap" else program
    start, statistics = drawn()  # until here shapes were enough
    initial = run_cached(partial(Kept.at_first, algorithm), start, statistics)
    kept_in, directory = directory, directory if jax.process_index() == 0 else None  # the first process writes
    joining = _joining(planner, batch_splits(traced.program), initial) if plan == "scan" and not streamed else 0
    engine = ENGINES[plan](program._replace(joining=joining), mesh, None if streamed else samples)
    words = describe(mesh, plan, program.chunk, traced.program, streamed, spilled, joining > 0) + widened
    given_so = (algorithm, settings, federation, script, sampler.trace_data)
    return Setup(
        algorithm=algorithm,
        task=task,
        federation=federation,
        settings=settings,
        directory=directory,
        kept_in=kept_in,
        key=seeded(settings.seed, RUN),
        params=start,
        statistics=statistics,
        initial=initial,
        samples=samples,
        planner=planner,
        plan=plan,
        streamed=streamed,
        spilled=spilled,
        engine=engine,
        evaluators=make_evaluators(task, settings, federation, mesh, samples if streamed else engine.samples, streamed),
        personal=PersonalEvaluator.of(algorithm, task, federation, settings, program, engine, start, initial),
        info=_info(algorithm, federation, settings, sampler, words, traced, start, directory),
        traced=traced,
        identity=_identity(given_so, traced, task, start, statistics, samples) if kept_in else None,
    )


def _given(algorithm: Algorithm, script: Script | None, sampler: CohortSampler) -> dict[str, np.ndarray]:
    """What each round has for its clients that is known beforehand."""
    given = given_work(script, sampler, algorithm.local_steps) | sampler.delays
    longest = int(given["delay"].max()) if "delay" in given else 0
    if sampler.arrivals is not None and algorithm.traits.max_staleness:
        longest = sampler.arrivals.longest_awaited
    _check_delays(algorithm, longest)
    return given


def _check_processes(planner: Planner, directory: Path | None) -> None:
    if jax.process_count() > 1 and directory is not None and planner.stateful:
        raise FedraxError("a run over several processes keeps no client states on disk: leave the directory out")


def _side_by_side(
    program: Program, settings: Settings, planner: Planner, account: Account, traced: TracedRound
) -> Program:
    """The program with as many clients side by side as there is room for, of which the planner is told."""
    chunk = clients_at_once(settings, planner.devices, planner.sampler.largest, account, traced.peak_bytes)
    planner.go_side_by_side(chunk)
    return program._replace(chunk=chunk)


_Given = tuple[Algorithm, Settings, Federation, Script | None, Sequence[np.ndarray]]


def _identity(
    given: _Given, traced: TracedRound, task: Task, start: Tree, statistics: Tree, samples: Batch
) -> dict[str, str]:
    """What decides the numbers. given: the first arguments of ``identify``."""
    evaluation = trace_evaluation(task, start, with_statistics(start, statistics), samples)
    return identify(*given, traced.program, evaluation, start)


def _anywhere(leaf: Any) -> Any:
    """An array that lies on the devices of an earlier run, as its parameters do, without its place."""
    committed = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.committed
    return np.asarray(leaf) if committed and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _check_delays(algorithm: Algorithm, longest: int) -> None:
    """Refuse uploads that arrive later than the method allows."""
    if longest <= algorithm.traits.max_staleness:
        return
    if not algorithm.traits.max_staleness:
        inner = getattr(algorithm, "inner", None)
        while inner is not None and not inner.traits.max_staleness:
            inner = getattr(inner, "inner", None)
        instead = "FedBuff" if inner is None else f"{_name(inner)} without it"
        raise FedraxError(
            f"{_name(algorithm)} waits for all uploads of a round, and here some arrive {longest} rounds later: take"
            f" {instead}, or another participation"
        )
    raise FedraxError(
        f"an upload arrives {longest} rounds late, and {_name(algorithm)} keeps room for"
        f" {algorithm.traits.max_staleness}: set max_delay to {longest}"
    )


def _name(algorithm: Algorithm) -> str:
    return type(algorithm).__name__


def _info(
    algorithm: Algorithm,
    federation: Federation,
    settings: Settings,
    sampler: CohortSampler,
    plan: str,
    traced: TracedRound,
    start: Tree,
    directory: Path | None,
) -> RunInfo:
    return RunInfo(
        algorithm=_name(algorithm),
        plan=plan,
        rounds=settings.rounds,
        first_round=0,
        cohort_size=sampler.largest,
        num_clients=sampler.num_clients,
        bytes_down=traced.bytes_down,
        bytes_up=traced.bytes_up,
        parameters=sum(x.size for x in jax.tree.leaves(start)),
        directory=directory,
        clock=sampler.clock,
        loss="local_loss" if _on_training_samples(settings, federation) else "train_loss",
    )


def _room(
    algorithm: Algorithm,
    federation: Federation,
    settings: Settings,
    sampler: CohortSampler,
    initial: Kept,
    mesh: Mesh,
    account: Account,
) -> tuple[bool, bool]:
    """(whether samples are streamed, whether client states are spilled)."""
    row_bytes = tree.num_bytes(initial)
    account.spend(account.copied(federation.test))
    uneven = _by_samples(algorithm, federation) or settings.stragglers > 0
    store_bytes = row_bytes * rows_on_a_device(sampler, mesh.devices.size, row_bytes, uneven)
    return choose(settings, Batch(*federation.train), store_bytes, account)


def _by_samples(algorithm: Algorithm, federation: Federation) -> bool:
    """Whether clients with more samples have more to do."""
    local, sizes = algorithm.local_steps, federation.sizes
    return sizes.min() != sizes.max() and (local is None or local.steps is None)


def _planner(
    algorithm: Algorithm,
    federation: Federation,
    settings: Settings,
    sampler: CohortSampler,
    given: dict[str, np.ndarray],
    initial: Kept,
    devices: int,
) -> Planner:
    return Planner(
        sampler,
        federation.offsets,
        devices=devices,
        stateful=bool(jax.tree.leaves(initial)),
        by_samples=_by_samples(algorithm, federation),
        row_bytes=tree.num_bytes(initial),
        given=given,
        weights=settings.weights,
        dtype=settings.dtype,
    )


def _joining(planner: Planner, cuts: Sequence[BatchSplit], initial: Kept) -> int:
    """How many devices work together on some clients; tables stay on one device, and processes wait for nobody."""
    alone = holds_tables(initial) or jax.process_count() > 1
    return 0 if alone else planner.join(device_speedup(cuts, planner.devices))


def _on_training_samples(settings: Settings, federation: Federation) -> bool:
    return settings.eval_train or (settings.per_client and federation.test_offsets is None)


def make_evaluators(
    task: Task, settings: Settings, federation: Federation, mesh: Mesh, samples: Batch, streamed: bool = False
) -> dict[str, Evaluator]:
    """One for each data set to evaluate on; ``samples``: the training samples, on the host where ``streamed``."""
    if settings.target is not None and not (len(federation.test[1]) and "accuracy" in task.metrics):
        raise FedraxError("a target is a test accuracy: it needs test data and a task with the metric accuracy")
    found = {}
    if len(federation.test[1]):
        found["test"] = Evaluator(task, mesh, Batch(*federation.test), federation.test_offsets)
    if _on_training_samples(settings, federation):
        kind = StreamedEvaluator if streamed else Evaluator
        found["train"] = kind(task, mesh, samples, federation.offsets)
    return found
