"""One communication round: broadcast, local training, upload, aggregation and server update, for all executors.

:func:`run_round` describes the round. An :class:`Executor` runs the clients of a phase: in a loop inside one compiled
program, in one compiled call per client, in plain Python, or for their shapes only. A new executor, for example over a
network, implements ``clients`` only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.user_errors import call_in_phase
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, init_local_state, summed_dtype
from fedrax.contract.checks import checked_client, checked_output, checked_received, checked_server, checked_state
from fedrax.contract.client_data import ClientAssignment, ClientData, Layout, TrainState
from fedrax.contract.vectors import holds_vectors
from fedrax.prng.keys import NamedKeys
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS, SEQUENTIAL_RULES, CodeFingerprint, OperandFormat, trace_once, untraced

SERVER_KEY, SHARED_KEY = 0xFFFFFFFF, 0xFFFFFFFE
"""Numbers that derive the server's key and the clients' shared key from a round's key; clients use their own number."""


class RoundProgram(NamedTuple):
    """Static inputs of a round's compilation, besides the algorithm's static fields."""

    task: Any
    layout: Layout
    num_clients: int
    chunk: int
    """Number of clients in one vmap; 0: one client after another (plan scan)."""
    unroll: bool = False
    precision: OperandFormat = "highest"
    """Format of the operands of matrix products in local gradients."""
    sharded_samples: bool = False
    """Whether each device holds the samples of its own clients only, instead of all samples."""
    expected_cohort_size: float | None = None
    """Expected cohort size under Poisson sampling; None where the cohort size is given by the round."""
    data_parallel_devices: int = 0
    """Number of devices that share the mini-batches of some clients; 0: each client runs on one device."""
    largest_cohort: int | None = None
    """The most clients of any round, the number of rows of ``cohort.each``; None: as many as there are positions."""
    client_info: bool = False
    """Whether a round also returns the info of each client, for adaptive participation policies."""
    skips_empty_rounds: bool = False
    """Whether a round without any client leaves the server unchanged, where cohorts are not sampled independently."""
    code: CodeFingerprint | None = None
    """Fingerprint of the user's functions: editing one causes a recompilation."""


class RoundInputs(NamedTuple):
    """Cohorts of up to B consecutive rounds and their assignment to devices, or without leading axes of one round.

    Fields of ``assignments`` are [rounds, devices, positions on the device, ...], ``count`` is [rounds, devices].
    """

    round: Any
    """int32; number of each round, from 0."""
    cohort_size: Any
    """S, the number of clients in the cohort."""
    count: Any
    """int32; number of clients on each device."""
    assignments: ClientAssignment
    recorded: Any = None
    """int32 [K]; clients whose messages are recorded, the same on all devices; None: none."""


class ClientRecord(NamedTuple):
    """What a client stores between phases and rounds: a row of the client-state store."""

    state: Tree
    """The algorithm's client state."""
    optimizer: Tree
    """State of the local optimizer, where it is carried over rounds."""
    statistics: Tree = ()
    """The model's running statistics, where they are personal; otherwise empty."""

    @classmethod
    def at_first(cls, algorithm: Algorithm, params: Tree, statistics: Tree) -> ClientRecord:
        """The record of a client that has not participated."""
        kept = statistics if algorithm.traits.personal_statistics else ()
        state = checked_client(algorithm, algorithm.init_client(tree.rebuilt(params)))
        return cls(state, init_local_state(algorithm, params), kept)


class ClientKeys(NamedTuple):
    """Random keys of a round's clients."""

    own: Array
    """The key of each client, by position."""
    shared: Array
    """The key shared by all clients of the round."""


class ClientInputs(NamedTuple):
    """Inputs of one client in a round, besides its samples and its record."""

    assignment: ClientAssignment
    round: Array
    cohort_size: Array
    key: Array
    shared_key: Array


class ClientResult(NamedTuple):
    """Result of one client in a phase."""

    output: ClientOutput
    """The client's output, without its state."""
    received: Tree
    """The upload after the phase's ``receive``, as the server averages it."""
    per_client: Tree
    """What the server receives for each client: ``each``, and the received upload where the phase stacks uploads."""
    record: ClientRecord
    """What the client stores."""
    statistics: Tree
    """The model's running statistics; empty where they are personal."""


class ClientSums(NamedTuple):
    """Running sums over clients."""

    upload: Tree
    total: Tree
    info: Info
    statistics: Tree
    diverged: Array
    """int32; lowest number of a client whose loss is not finite; num_clients if there is none."""


class ClientRows(NamedTuple):
    """What the server receives for each client, by ascending client number; rows of no client have the number N."""

    per_client: Tree
    clients: Array
    weights: Array


class PhaseResult(NamedTuple):
    """Aggregated uploads of the cohort in a phase."""

    sums: ClientSums
    rows: ClientRows


class Executor(ABC):
    """Runs the phases of one round of an algorithm; subclasses run the clients."""

    def __init__(self, program: RoundProgram, algorithm: Algorithm, round_inputs: RoundInputs, key: Array):
        """round_inputs: of one round, and of one device where there are several. key: random key of the run."""
        self.program, self.algorithm, self.round_inputs = program, algorithm, round_inputs
        self.round_key = jax.random.fold_in(key, jnp.asarray(round_inputs.round))
        self.recorded_phases: list[Any] = []
        """Recorded messages of each phase so far, where clients are recorded."""

    @property
    def skipped(self) -> Any:
        """bool; whether the round has no client and leaves the server unchanged."""
        return self.program.skips_empty_rounds and self.round_inputs.cohort_size == 0

    def broadcast(self, p: int, server: Any) -> Tree:
        """The broadcast message of phase ``p``."""
        return call_in_phase(self.algorithm, p, "broadcast", tree.rebuilt(server))

    @abstractmethod
    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run phase ``p`` on all clients of the cohort."""

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """The server's update after phase ``p``."""
        step = (
            untraced(run_server) if holds_vectors(server) else run_server
        )  # a trace forgets what was accumulated in them
        return step(self.program, p, self.algorithm, server, gathered, self.round_inputs, self.round_key)


def run_round(executor: Executor, server: Any, statistics: Tree) -> tuple[Any, Tree, Info, Array]:
    """Run one round.

    Args:
        executor: runs the phases.
        server: the server state before the round.
        statistics: the model's running statistics before the round.

    Returns:
        The server state and the running statistics after the round, its info (entries of later phases replace those of
        earlier ones, ``gradients`` is summed), and the first client whose loss is not finite. Running statistics are
        averaged over clients, as uploads are, after the last phase.
    """
    record: Info = {}
    bad = jnp.int32(executor.program.num_clients)
    for p in range(len(executor.algorithm.phases)):
        gathered = executor.clients(p, executor.broadcast(p, server), statistics)
        server, info = executor.server(p, server, gathered)
        bad = jnp.minimum(bad, gathered.sums.diverged)
        gradients = record.get("gradients", 0.0) + gathered.sums.info.get("gradients", 0.0)
        record = {**record, **gathered.sums.info, **info, "gradients": jnp.asarray(gradients, jnp.float32)}
        if p == len(executor.algorithm.phases) - 1 and gathered.sums.statistics:
            anyone = executor.round_inputs.cohort_size > 0
            statistics = jax.tree.map(partial(_renewed, anyone), gathered.sums.statistics, statistics)
    return server, statistics, record, bad


def _renewed(anyone: Any, mean: Array, before: Array) -> Array:
    """Averaged statistics in their dtype, counters and flags rounded; unchanged after a round with an empty cohort."""
    inexact = jnp.issubdtype(before.dtype, jnp.inexact)
    mean = (mean if inexact else jnp.round(mean)).astype(before.dtype)
    if isinstance(anyone, Array):
        return jnp.where(anyone, mean, before)
    return (
        mean if anyone else jax.device_put(before, mean.sharding)
    )  # outside a compiled round it may be on another device


def _task_of(program: RoundProgram, *_: Any) -> Any:
    return program.task


@trace_once(2, rules=SEQUENTIAL_RULES, owner=_task_of)
def run_server(
    program: RoundProgram,
    p: int,
    algorithm: Algorithm,
    server: Any,
    gathered: PhaseResult,
    round_inputs: RoundInputs,
    round_key: Array,
) -> tuple[Any, Info]:
    """The server's update at the end of phase ``p``: (server state, info)."""
    (each, uploads), clients, weights = gathered.rows
    cohort = Cohort(
        mean=gathered.sums.upload,
        each=each,
        total=gathered.sums.total,
        clients=clients,
        weights=weights,
        size=jnp.asarray(round_inputs.cohort_size, float),
        num_clients=program.num_clients,
        round=jnp.asarray(round_inputs.round),
        keys=NamedKeys(jax.random.fold_in(jax.random.fold_in(round_key, jnp.uint32(SERVER_KEY)), p)),
        uploads=jax.tree.map(lambda u: u.astype(summed_dtype(u.dtype)), uploads),
        expected=jnp.asarray(
            round_inputs.cohort_size if program.expected_cohort_size is None else program.expected_cohort_size, float
        ),
    )
    return checked_server(algorithm, p, call_in_phase(algorithm, p, "server", server, cohort))


# -- one client ----------------------------------------------------------------------------------------------------


def client_keys(round_key: Array, clients: Array) -> ClientKeys:
    """Random keys of a round's clients."""
    own = jax.vmap(lambda client: jax.random.fold_in(round_key, client))(clients)
    return ClientKeys(own, jax.random.fold_in(round_key, jnp.uint32(SHARED_KEY)))


def client_inputs(program: RoundProgram, round_inputs: RoundInputs, keys: ClientKeys, k: Any) -> ClientInputs:
    """Per-client inputs for position ``k``; ``cohort_size`` is the expected size under Poisson sampling."""
    assignment = jax.tree.map(lambda a: a[k], round_inputs.assignments)
    asked = round_inputs.cohort_size if program.expected_cohort_size is None else program.expected_cohort_size
    size = jnp.asarray(asked, float)  # the run's dtype: products with learning rates are not rounded to a shorter one
    return ClientInputs(assignment, jnp.asarray(round_inputs.round), size, keys.own[k], keys.shared)


def client_data(program: RoundProgram, samples: Tree, inputs: ClientInputs, phase: int = 0) -> ClientData:
    """The view of a client that algorithms receive.

    It has no weight, which depends on the other clients of the cohort and which no client of a federation knows.
    """
    return ClientData(
        program.task,
        program.layout,
        samples,
        inputs.assignment._replace(weight=()),
        inputs.key,
        shared_key=inputs.shared_key,
        round=inputs.round,
        num_clients=program.num_clients,
        cohort_size=inputs.cohort_size,
        phase=phase,
        unroll=program.unroll,
        precision=program.precision,
    )


@trace_once(
    2,
    lambda program, p: [(CLIENT_AXIS, program.data_parallel_devices)] if program.data_parallel_devices else [],
    SEQUENTIAL_RULES,
    _task_of,
)
def run_client(
    program: RoundProgram,
    p: int,
    algorithm: Algorithm,
    message: Tree,
    record: ClientRecord,
    statistics: Tree,
    samples: Tree,
    inputs: ClientInputs,
) -> ClientResult:
    """Run phase ``p`` on one client, and ``receive`` on its upload."""
    return run_client_phase(p, algorithm, message, record, statistics, client_data(program, samples, inputs, p))


def run_client_phase(
    p: int, algorithm: Algorithm, message: Tree, record: ClientRecord, statistics: Tree, data: ClientData
) -> ClientResult:
    """As :func:`run_client`, with the client's data as algorithms see them."""
    personal = algorithm.traits.personal_statistics
    carried = TrainState(record.statistics if personal else statistics, record.optimizer)
    message = tree.rebuilt(message)  # other clients receive the same message
    returned = call_in_phase(algorithm, p, "client", message, record.state, data.with_carried(carried))
    output = checked_output(algorithm, p, returned)
    received = checked_received(algorithm, p, call_in_phase(algorithm, p, "receive", output.upload))
    moved = carried.statistics
    after = ClientRecord(output.state, carried.optimizer, moved if personal else ())
    per_client = (output.each, received if algorithm.phases[p].stacked else ())
    return ClientResult(output._replace(state=()), received, per_client, after, () if personal else moved)


def report(done: ClientResult) -> Info:
    """What an adaptive participation policy sees of a client: its info, and the norm of its upload."""
    return {**done.output.info, "upload_norm": tree.norm(done.received)}


class SingleClientExecutor(Executor):
    """Executor of a round with one client, for the shapes of messages and for privacy audits."""

    def __init__(
        self,
        program: RoundProgram,
        algorithm: Algorithm,
        round_inputs: RoundInputs,
        key: Array,
        record: ClientRecord,
        samples: Tree,
    ):
        super().__init__(program, algorithm, round_inputs, key)
        self.record, self.samples = record, samples
        self.initial: ClientRecord | None = record
        """The initial record; None where it is unknown, in which case that of the client's result is used."""
        self.finished: list[ClientResult] = []
        """Result of the client in each phase so far."""

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run the phase on the client."""
        assignments = self.round_inputs.assignments
        inputs = client_inputs(self.program, self.round_inputs, client_keys(self.round_key, assignments.client), 0)
        done = run_client(self.program, p, self.algorithm, message, self.record, statistics, self.samples, inputs)
        sums = zero_sums(self.program, self.algorithm, p, self.initial or done.record, done)
        sums = add_client(self.program, sums, done, assignments.weight[0], jnp.bool_(True), assignments.client[0])
        self.record = done.record
        self.finished.append(done)
        per_client = jax.tree.map(lambda a: a[None], done.per_client)
        return PhaseResult(sums, ClientRows(per_client, assignments.client, assignments.weight))


def merge_rows(program: RoundProgram, rows: ClientRows, devices: int) -> ClientRows:
    """The rows of the whole cohort from those of its devices, one after another, without rows that are never used."""
    if devices == 1:  # one device has them in order: a gather would copy all uploads
        return jax.tree.map(lambda a: a[: program.largest_cohort], rows)
    order = jnp.argsort(rows.clients)[: program.largest_cohort]
    return jax.tree.map(lambda a: a.at[order].get(mode="clip"), rows)


# -- sums ----------------------------------------------------------------------------------------------------------


def zero_sums(
    program: RoundProgram, algorithm: Algorithm, p: int, record: ClientRecord, shape: ClientResult
) -> ClientSums:
    """Zero sums for phase ``p``, in the shapes of a client's result ``shape`` and of its initial ``record``."""
    last = p == len(algorithm.phases) - 1
    if last:
        checked_state(algorithm, record.state, shape.record.state)
    zeros = lambda of: lambda a: jnp.zeros(a.shape, of(a.dtype))  # noqa: E731
    return ClientSums(
        jax.tree.map(zeros(summed_dtype), shape.received),
        jax.tree.map(zeros(_total_dtype), shape.output.total),
        {name: jnp.zeros((), _info_dtype(value)) for name, value in shape.output.info.items()},
        jax.tree.map(zeros(summed_dtype), shape.statistics) if last else (),
        jnp.int32(program.num_clients),
    )


def _info_dtype(value: Any) -> Any:
    real = jnp.issubdtype(jnp.result_type(value), jnp.floating)
    return summed_dtype(jnp.result_type(value)) if real else jnp.float32


def _total_dtype(dtype: Any) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return summed_dtype(dtype)
    unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
    wide = jnp.dtype(jnp.uint32 if unsigned else jnp.int32)
    short = jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8  # JAX does not promote these
    return wide if short else jnp.promote_types(dtype, wide)


def add_client(
    program: RoundProgram, sums: ClientSums, done: ClientResult, weight: Array, real: Array, clients: Array
) -> ClientSums:
    """Add the result of one client to the sums, or those of several vectorized clients (a leading axis everywhere).

    real: False for a client that only fills a chunk by repeating another one.
    """
    many = jnp.ndim(weight) > 0

    def mean(a: Array, u: Array) -> Array:
        w, u = weight.astype(a.dtype), u.astype(a.dtype)
        return a + (jnp.tensordot(w, u, 1) if many else w * u)

    def total(a: Array, t: Array) -> Array:
        t = t.astype(a.dtype)
        return a + (jnp.sum(jnp.where(real.reshape(-1, *[1] * (t.ndim - 1)), t, 0), 0, a.dtype) if many else t)

    def info(name: str, value: Array) -> Array:
        share = real if name == "gradients" else weight
        return sums.info[name] + jnp.sum(share * value).astype(sums.info[name].dtype)

    output, diverged = done.output, sums.diverged
    if "loss" in output.info:
        candidates = jnp.where(jnp.isfinite(output.info["loss"]), program.num_clients, clients)
        diverged = jnp.minimum(diverged, jnp.min(candidates))
    return ClientSums(
        jax.tree.map(mean, sums.upload, done.received),
        jax.tree.map(total, sums.total, output.total),
        {name: info(name, value) for name, value in output.info.items()},
        jax.tree.map(mean, sums.statistics, done.statistics) if sums.statistics else (),
        diverged,
    )


def merge_sums(a: ClientSums, b: ClientSums) -> ClientSums:
    """Add the sums over two groups of clients."""
    added = tree.add(a._replace(diverged=()), b._replace(diverged=()))  # type: ignore[arg-type]
    return added._replace(diverged=jnp.minimum(a.diverged, b.diverged))
