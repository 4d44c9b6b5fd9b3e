"""A block of rounds as one compiled call: the plans ``scan`` and ``vmap`` over a mesh of devices.

The cohort of each round is distributed over the ``clients`` axis of a device mesh. Each device runs its own clients,
one after another (``scan``) or in vectorized chunks (``vmap``), and adds weighted uploads to a running sum. One
all-reduce in each phase computes the cohort's mean, and every device takes the same server step. Each client's state is
a row of the store on its home device and is updated in place. Trip counts are inputs of the program, so clients of any
size and blocks of any number of rounds run in the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import tree, xla
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.contract.checks import checked_message
from fedrax.contract.vectors import exchanged, fetched, holds_vectors, map_vectors, on_axis, padded, settled, watched
from fedrax.simulation.executors.data_parallel import DataParallelRunner
from fedrax.simulation.executors.phase import PhaseRunner
from fedrax.simulation.results.message_recorder import RecordedPhase, broadcast_statistics, phases_to_host
from fedrax.simulation.round import (
    Executor,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    client_keys,
    merge_rows,
    run_round,
)
from fedrax.tree import Tree
from fedrax.xla import AGGREGATE, CLIENT_AXIS, INLINE, SERVER, garbage_collection_paused, phase_scope, scope

RECORDED_PHASES = "recorded"
"""Key of a round's record for recorded messages, if clients are recorded."""
CLIENT_INFO = "client info"
"""Key of a round's record for the info of each client, arrays [S] by name, if ``RoundProgram.client_info`` is set."""


class RoundState(NamedTuple):
    """The state between rounds."""

    server: Any
    statistics: Tree
    """Running statistics of the model, averaged over clients; an empty tuple if it has none."""
    store: Tree
    """A :class:`ClientRecord` a row."""


class MeshExecutor(Executor):
    """One round on one device of the mesh, with collectives over ``axis``.

    ServerVectors of the server state are sharded over ``vectors_axis``, which is ``axis`` or None.
    """

    def __init__(
        self,
        program: RoundProgram,
        algorithm: Algorithm,
        round_inputs: RoundInputs,
        key: Array,
        store: Tree,
        samples: Tree,
        axis: str | None,
        vectors_axis: str | None,
    ):
        super().__init__(program, algorithm, round_inputs, key)
        self.store, self.samples, self.vectors_axis = store, samples, vectors_axis
        self.client_records: Tree = ()
        self.client_info: dict[str, Array] = {}
        self.join: Callable = partial(jax.lax.psum, axis_name=axis) if axis else lambda x: x
        self.least: Callable = partial(jax.lax.pmin, axis_name=axis) if axis else lambda x: x
        self.devices = jax.lax.axis_size(axis) if axis else 1
        self.gather: Callable = partial(jax.lax.all_gather, axis_name=axis, tiled=True) if axis else lambda x: x
        clients = round_inputs.assignments.client
        self.keys = client_keys(self.round_key, self.gather(clients) if program.data_parallel_devices else clients)

    def broadcast(self, p: int, server: Any) -> Tree:
        """Compute the broadcast message; the server state may be sharded over devices."""
        return checked_message(self.algorithm, p, super().broadcast(p, on_axis(server, self.vectors_axis)))

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run this device's clients, then sum over all devices."""
        kind = DataParallelRunner if self.program.data_parallel_devices else PhaseRunner
        runner = kind(self.program, self.algorithm, p, message, statistics, self.samples, self.round_inputs, self.keys)
        with phase_scope(p):
            sums, rows, self.client_records, self.store, notes, info = runner.run(self.client_records, self.store)
        self.client_info |= dict(info)
        if self.round_inputs.recorded is not None:
            self.recorded_phases.append(
                RecordedPhase(message, broadcast_statistics(self.algorithm, p, statistics), notes)
            )
        share = partial(exchanged, axis=self.vectors_axis) if self.vectors_axis else partial(jax.tree.map, self.gather)
        with scope(AGGREGATE):
            sums = self.join(sums._replace(diverged=()))._replace(diverged=self.least(sums.diverged))
            rows = merge_rows(self.program, map_vectors(share, rows, self.gather), self.devices)
        return PhaseResult(sums, rows)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor, on every device alike."""
        with scope(SERVER):
            server, info = super().server(p, on_axis(server, self.vectors_axis), gathered)
            return on_axis(server, None), info


def run_device_round(
    program: RoundProgram,
    algorithm: Algorithm,
    carry: RoundState,
    samples: Tree,
    key: Array,
    round_inputs: RoundInputs,
    axis: str | None,
    vectors_axis: str | None,
    running: Array,
) -> tuple[RoundState, dict[str, Any]]:
    """One round on one device of the mesh: (carry, record).

    A round with values that are not finite leaves the server state unchanged. running: whether all rounds before were
    finite; otherwise this round is marked as not finite, too.
    """
    executor = MeshExecutor(program, algorithm, round_inputs, key, carry.store, samples, axis, vectors_axis)
    old = watched(carry.server), carry.statistics
    server, statistics, record, bad = run_round(executor, *old)

    def is_sound(made: Tree) -> Array:
        finite = tree.all_finite(made)
        if vectors_axis and holds_vectors(server):
            finite = executor.least(finite)
        return running & finite & (bad == program.num_clients) & jnp.logical_not(executor.skipped)

    # A round that ends in a non-finite number is not applied: its server state is kept for the diagnosis.
    (server, statistics), sound = settled(old, (server, statistics), is_sound)
    made: dict[str, Any] = {**record, "sound": sound | (running & executor.skipped), "bad": bad}
    if executor.recorded_phases:
        made[RECORDED_PHASES] = tuple(executor.recorded_phases)
    if program.client_info:
        made[CLIENT_INFO] = executor.client_info
    return RoundState(server, statistics, executor.store), made


def run_block(
    program: RoundProgram,
    axis: str | None,
    algorithm: Algorithm,
    carry: RoundState,
    samples: Tree,
    key: Array,
    inputs: RoundInputs,
    rounds: Array,
    running: Array | None = None,
    vectors_axis: str | None = None,
) -> tuple[RoundState, dict[str, Array]]:
    """Up to len(inputs.round) rounds, up to the first with values that are not finite: (carry, records [B] by name).

    running: for vectorized runs, which continue together, whether this run has been finite so far.
    """
    inputs = jax.tree.map(jnp.asarray, inputs)
    inputs = inputs._replace(count=inputs.count[:, 0], assignments=jax.tree.map(lambda a: a[:, 0], inputs.assignments))
    at = lambda r: jax.tree.map(lambda a: a[r], inputs)  # noqa: E731
    one = partial(run_device_round, program, algorithm, samples=samples, key=key, axis=axis, vectors_axis=vectors_axis)
    step = jax.jit(one, inline=INLINE)  # traced once, for the records' shapes and for the loop
    _, shapes = jax.eval_shape(lambda c: step(c, round_inputs=at(0), running=jnp.bool_(True)), carry)
    records = jax.tree.map(lambda s: jnp.zeros((inputs.round.shape[0], *s.shape), s.dtype), shapes)

    def unfinished(loop: tuple) -> Array:
        r, sound, _, _ = loop
        return (r < rounds) & sound if running is None else r < rounds

    def body(loop: tuple) -> tuple:
        r, sound, carry, records = loop
        carry, record = step(carry, round_inputs=at(r), running=sound)
        return r + 1, record["sound"], carry, tree.set_row(records, r, record)

    start = (jnp.int32(0), jnp.bool_(True) if running is None else running, carry, records)
    _, _, carry, records = jax.lax.while_loop(unfinished, body, start)
    return carry, records


@xla.owned_cache(lambda program, *_: program.task)
def compiled_block(program: RoundProgram, mesh: Mesh, form: Any) -> Callable:
    """``run_block`` on a mesh, shared by runs that differ only in seeds and float hyper-parameters.

    ``form`` (the algorithm's structure with its static fields) is only a cache key. JAX keeps a compiled program as
    long as its jitted function, so that each form gets a function of its own, which this cache can drop.
    """
    by_device: Any = P(None, CLIENT_AXIS)
    specs = RoundInputs(P(), P(), by_device, by_device, P())

    def run(*inputs: Any) -> tuple[RoundState, dict[str, Array], Any, Any]:
        carry, records = run_block(
            program, CLIENT_AXIS, *inputs, vectors_axis=CLIENT_AXIS if share_vectors(mesh) else None
        )
        return carry, records, records.pop(RECORDED_PHASES, ()), records.pop(CLIENT_INFO, {})

    def block_on_mesh(
        algorithm: Algorithm, carry: RoundState, *inputs: Any
    ) -> tuple[RoundState, dict[str, Array], Any, Any]:
        carries = RoundState(server_specs(carry.server, mesh), P(), P(CLIENT_AXIS))
        recorded = inputs[2].recorded is not None
        sharded = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(P(), carries, P(CLIENT_AXIS) if program.sharded_samples else P(), P(), specs, P()),
            out_specs=(
                carries,
                P(),
                (RecordedPhase(P(), P(), by_device),) * len(algorithm.phases) if recorded else (),
                by_device,
            ),
            check_vma=False,
        )
        return sharded(algorithm, carry, *inputs)

    return xla.jit(block_on_mesh, donate_argnums=(1,), compiler_options=compiler_options(mesh))


def share_vectors(mesh: Mesh) -> bool:
    """Whether the ServerVectors of a server state are sharded over the devices.

    They are not in runs of several processes, because one process writes the checkpoints without the others.
    """
    return len({device.process_index for device in mesh.devices.flat}) == 1


def server_specs(server: Any, mesh: Mesh) -> Any:
    """Sharding of a server state on a mesh: replicated, or with its ServerVectors sharded."""
    return map_vectors(lambda _: P(None, CLIENT_AXIS) if share_vectors(mesh) else P(), server, lambda _: P())


_YNN_FUSION = "xla_cpu_experimental_ynn_fusion_type"
_NO_CONVOLUTIONS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
"""Options of XLA."""


@cache
def _is_supported(name: str, value: str) -> bool:
    """Whether this version of XLA accepts an experimental option."""
    try:
        jax.jit(lambda: jnp.int32(0), compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """XLA's options for a block of rounds, on CPU.

    By default XLA copies loop state that is read and then written: a whole client store for each client. It splits the
    gather of a batch over threads by the size of the whole data set, which costs a local step more than the gather
    itself; if each core is a device, no operation should be split. It prefers vectors of 256 bits on processors with
    512 bits, with which recurrent cells are faster; other processors ignore the option. From jaxlib 0.11 on, the
    library that XLA uses for convolutions takes up to twice as long as XLA's own code; products and sums still use the
    library.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    options: dict[str, bool | int | str] = {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_prefer_vector_width": 512,
    }
    if jax.__version_info__ >= (0, 11) and _is_supported(_YNN_FUSION, _NO_CONVOLUTIONS):
        options[_YNN_FUSION] = _NO_CONVOLUTIONS
    if len(jax.devices()) > 1:
        options["xla_disable_hlo_passes"] = "cpu-parallel-task-assigner"
    return options


@cache
def repeat_rows(sharding: NamedSharding) -> Callable:
    """Repeat a tree along a new row axis with the given sharding; compiled once for all runs."""

    def repeat(rows: int, values: Tree) -> Tree:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), values)

    return jax.jit(repeat, static_argnums=0, out_shardings=sharding)


_copy = jax.jit(lambda values: jax.tree.map(jnp.copy, values))


def stack_records(records: list[dict]) -> dict[str, Any]:
    """Stack the records of single rounds as :meth:`Engine.run` returns them, with the names of the first record."""
    found = {name: [record[name] for record in records if name in record] for name in records[0]}
    lists = (RECORDED_PHASES, CLIENT_INFO)
    return {name: values if name in lists else np.asarray(values) for name, values in found.items()}


class Engine:
    """Compiles and runs blocks of rounds on a mesh.

    ``samples`` are copied to every device. If they are None, the attribute is set before each block.
    """

    failure: str | None = None
    """The first tensor that was not finite, in words, if the engine knows it."""

    def __init__(self, program: RoundProgram, mesh: Mesh, samples: Tree | None):
        self.program, self.mesh = program, mesh
        self.devices = mesh.devices.size
        self.samples = None if samples is None else jax.device_put(samples, NamedSharding(mesh, P()))
        self.store_sharding = NamedSharding(mesh, P(CLIENT_AXIS))

    def block(self, algorithm: Algorithm) -> Callable:
        """The compiled program of a block of rounds of this algorithm."""
        return compiled_block(self.program, self.mesh, jax.tree.structure(algorithm))

    def put(self, server: Any, statistics: Tree, store: Tree) -> RoundState:
        """Place server state, statistics and store on the mesh; the next block donates these arrays."""
        if share_vectors(self.mesh):
            server = padded(server, self.devices)
        shardings = jax.tree.map(partial(NamedSharding, self.mesh), server_specs(server, self.mesh))
        # The copy parts them from the caller's arrays and from each other: device_put shares the first device's.
        return RoundState(
            jax.device_put(_copy(server), shardings, may_alias=False),
            jax.device_put(_copy(statistics), NamedSharding(self.mesh, P()), may_alias=False),
            jax.device_put(store, self.store_sharding, may_alias=False),
        )

    def whole_server(self, carry: RoundState) -> Any:
        """The server state, with sharded vectors copied to the host."""
        return fetched(carry.server) if share_vectors(self.mesh) else carry.server

    def new_store(self, client: Tree, capacity: int) -> Tree:
        """A store of ``capacity`` rows for each device, filled with the initial client record ``client``."""
        return repeat_rows(self.store_sharding)(capacity * self.devices, client)

    def run(
        self, algorithm: Algorithm, carry: RoundState, key: Array, inputs: RoundInputs, rounds: int
    ) -> tuple[RoundState, dict]:
        """Run up to ``rounds`` rounds; ``carry`` is donated. Returns the carry and records as NumPy arrays [rounds].

        If clients are recorded, ``RECORDED_PHASES`` is a list [rounds] of the messages recorded in each phase.
        """
        with garbage_collection_paused():  # the first time it is traced
            run = self.block(algorithm)
            carry, records, recorded, info = run(algorithm, carry, self.samples, key, inputs, np.int32(rounds))
        found: dict[str, Any] = {name: np.asarray(value)[:rounds] for name, value in records.items()}
        if info:
            real = [np.asarray(inputs.assignments.client[r]).ravel() < self.program.num_clients for r in range(rounds)]
            found[CLIENT_INFO] = [{name: np.asarray(a[r])[real[r]] for name, a in info.items()} for r in range(rounds)]
        if recorded:
            found[RECORDED_PHASES] = [
                phases_to_host(jax.tree.map(lambda a, r=r: a[r], recorded), self.devices) for r in range(rounds)
            ]
        return carry, found
