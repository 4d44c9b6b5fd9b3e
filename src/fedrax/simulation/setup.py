"""Setup of a run: initial state, execution plan, program, devices, planner, evaluators, identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jax import Array
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.client_data import Layout
from fedrax.contract.model import with_statistics
from fedrax.contract.table import holds_tables
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.data.federation import check_memory_mapped
from fedrax.devices import check_platform, unplaced
from fedrax.prng.keys import RUN, purpose_key
from fedrax.simulation.candidate_losses import CandidateLosses
from fedrax.simulation.client_evaluation import EvaluationMetrics, PersonalEvaluator
from fedrax.simulation.evaluation import Evaluator, StreamedEvaluator, parameter_metrics, trace_evaluation
from fedrax.simulation.executors.compiled import Engine, RoundState
from fedrax.simulation.executors.debug import DebugEngine
from fedrax.simulation.executors.execution_plan import clients_per_vmap, describe_plan, make_mesh, resolve_plan
from fedrax.simulation.executors.loop import LoopEngine
from fedrax.simulation.persistence.run_identity import identify
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.placement.planner import Planner, rows_per_device
from fedrax.simulation.placement.streaming import choose_placement
from fedrax.simulation.results.events import RunInfo
from fedrax.simulation.round import ClientRecord, RoundProgram
from fedrax.simulation.settings import Script, Settings
from fedrax.simulation.traffic import TracedRound, trace_round
from fedrax.simulation.validate import ValidatedRun, check_processes, check_target, validate, warn_of_single_samples
from fedrax.tree import Tree
from fedrax.xla import BatchSplit, CodeFingerprint, batch_splits, device_speedup, garbage_collection_paused, run_cached

ENGINES = {"scan": Engine, "vmap": Engine, "loop": LoopEngine, "debug": DebugEngine}


@dataclass(frozen=True, eq=False)
class Setup:
    """The setup of a run, created once by :func:`prepare`; immutable."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    settings: Settings
    directory: Path | None
    """Run directory of this process; None if it stores nothing, as in all processes except the first."""
    run_directory: Path | None
    """The run directory, also in processes that write nothing."""
    key: Array
    params: Tree
    """Starting parameters."""
    statistics: Tree
    """Initial running statistics of the model; an empty tuple if it has none."""
    initial: ClientRecord
    """The record of a client that has not participated."""
    samples: Batch
    planner: Planner
    plan: str
    streamed: bool
    spilled: bool
    engine: Engine
    evaluators: dict[str, Evaluator]
    """The evaluator of each data set, by the prefix of its metrics."""
    personal: PersonalEvaluator | None
    candidate_losses: CandidateLosses | None
    """Losses of the clients that the participation policy asks before a round; None where it asks none."""
    info: RunInfo
    traced: TracedRound
    identity: dict[str, str] | None
    """Digests of all that determines the numbers, see :func:`run_identity.identify`; None without a directory."""

    @property
    def stateful(self) -> bool:
        """Whether clients have a state."""
        return self.planner.stateful

    @property
    def alone(self) -> bool:
        """Whether this is the only process of the run."""
        return jax.process_count() == 1

    def evaluate(
        self, algorithm: Algorithm, carry: RoundState, initial: ClientRecord, evaluators: Mapping[str, Evaluator]
    ) -> EvaluationMetrics:
        """The metrics of a state: of the parameters, on each data set, and of personal models.

        Args:
            algorithm: the method.
            carry: the state after a round; client states may be on disk.
            initial: the client state before a client participates.
            evaluators: one for each data set.

        Returns:
            The metrics, and those of each client's personal model.
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
    """Validate a run, choose its plan, and place its data and states. The arguments are those of ``simulate``."""
    check_platform()
    algorithm, samples = unplaced(algorithm), Batch(*federation.train)
    run = validate(algorithm, task, settings, federation.sizes, samples, federation, params, script)
    check_target(settings, task, federation)
    sampler, start, statistics = run.sampler, run.params, run.statistics
    mesh = make_mesh(1 if settings.plan == "debug" else settings.devices)
    plan, budget = resolve_plan(settings, mesh), MemoryBudget.of(mesh)
    streamed, spilled = _room(run, federation, settings, mesh, budget)
    planner = _planner(run, federation, settings, mesh.devices.size)
    check_processes(planner.stateful, sampler.adaptive, directory)
    program = RoundProgram(
        task,
        Layout.of(federation.sizes),
        federation.num_clients,
        chunk=0,
        precision=settings.precision,
        sharded_samples=streamed,
        expected_cohort_size=sampler.expected,
        largest_cohort=sampler.largest,
        client_info=sampler.adaptive,
        skips_empty_rounds=sampler.varying and not sampler.independent and not algorithm.traits.max_staleness,
        code=CodeFingerprint(algorithm, task),
    )
    assignment = jax.tree.map(lambda a: a[0, 0, :1], planner.block(0, 1, 1).assignments)
    traced = trace_round(program, algorithm, start, statistics, run.initial, samples, assignment, run.broken)
    budget.check_server(algorithm, start, federation.num_clients, mesh.devices.size)
    program = _side_by_side(program, settings, planner, budget, traced) if plan == "vmap" else program
    start, statistics = run.draw_start()  # until here shapes were enough
    warn_of_single_samples(algorithm, task, start, statistics, samples, federation.sizes)
    initial = run_cached(partial(ClientRecord.at_first, algorithm), start, statistics)
    run_directory, directory = directory, directory if jax.process_index() == 0 else None  # the first process writes
    joining = _joining(planner, batch_splits(traced.program), initial) if plan == "scan" and not streamed else 0
    engine = ENGINES[plan](program._replace(data_parallel_devices=joining), mesh, None if streamed else samples)
    words = describe_plan(mesh, plan, program.chunk, traced.program, streamed, spilled, joining > 0) + run.cast_note
    identity = None
    if run_directory:
        evaluation = trace_evaluation(task, start, with_statistics(start, statistics), samples)
        trace = sampler.trace_data
        identity = identify(algorithm, settings, federation, script, trace, traced.program, evaluation, start)
    return Setup(
        algorithm=algorithm,
        task=task,
        federation=federation,
        settings=settings,
        directory=directory,
        run_directory=run_directory,
        key=purpose_key(settings.seed, RUN),
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
        personal=PersonalEvaluator.of(
            algorithm, task, federation, settings, program, engine, start, statistics, initial
        ),
        candidate_losses=CandidateLosses(task, federation, engine.samples, start, statistics) if sampler.asks else None,
        info=RunInfo.of(
            algorithm,
            sampler,
            traced,
            start,
            words,
            rounds=settings.rounds,
            directory=directory,
            loss="local_loss" if _on_training_samples(settings, federation) else "train_loss",
        ),
        traced=traced,
        identity=identity,
    )


def _side_by_side(
    program: RoundProgram, settings: Settings, planner: Planner, budget: MemoryBudget, traced: TracedRound
) -> RoundProgram:
    """The program with as many vectorized clients as fit into memory; their number is set in the planner, too."""
    chunk = clients_per_vmap(settings, planner.devices, planner.sampler.largest, budget, traced.peak_bytes)
    planner.set_chunk(chunk)
    return program._replace(chunk=chunk)


def _room(
    run: ValidatedRun, federation: Federation, settings: Settings, mesh: Mesh, budget: MemoryBudget
) -> tuple[bool, bool]:
    """(whether samples are streamed, whether client states are spilled to disk)."""
    row_bytes = tree.num_bytes(run.initial)
    budget.reserve(budget.device_bytes(federation.test))
    uneven = run.by_samples or settings.stragglers > 0
    store_bytes = row_bytes * rows_per_device(run.sampler, mesh.devices.size, row_bytes, uneven)
    streamed, spilled = choose_placement(settings, Batch(*federation.train), store_bytes, budget)
    check_memory_mapped(federation, training=not streamed)
    return streamed, spilled


def _planner(run: ValidatedRun, federation: Federation, settings: Settings, devices: int) -> Planner:
    return Planner(
        run.sampler,
        federation.offsets,
        devices=devices,
        stateful=bool(jax.tree.leaves(run.initial)),
        by_samples=run.by_samples,
        row_bytes=tree.num_bytes(run.initial),
        given=run.given,
        dtype=settings.dtype,
    )


def _joining(planner: Planner, cuts: Sequence[BatchSplit], initial: ClientRecord) -> int:
    """Number of devices that share the batches of some clients.

    It is 0 for clients with tables, which stay on one device, and in runs of several processes.
    """
    alone = holds_tables(initial) or jax.process_count() > 1
    return 0 if alone else planner.join(device_speedup(cuts, planner.devices))


def _on_training_samples(settings: Settings, federation: Federation) -> bool:
    return settings.eval_train or (settings.per_client and federation.test_offsets is None)


def make_evaluators(
    task: Task, settings: Settings, federation: Federation, mesh: Mesh, samples: Batch, streamed: bool = False
) -> dict[str, Evaluator]:
    """The evaluator of each data set; ``samples``: the training samples, on the host if ``streamed``."""
    found = {}
    if len(federation.test[1]):
        found["test"] = Evaluator(task, mesh, Batch(*federation.test), federation.test_offsets)
    if _on_training_samples(settings, federation):
        kind = StreamedEvaluator if streamed else Evaluator
        found["train"] = kind(task, mesh, samples, federation.offsets)
    return found
