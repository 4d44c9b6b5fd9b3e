"""A block of rounds as one compiled call: the plans ``scan`` and ``vmap`` over a mesh of devices.

The cohort of each round is spread over the ``clients`` axis of a device mesh. Each device walks its own clients,
one after another (``scan``) or a chunk at a time (``vmap``), adding weighted uploads to a running sum; one
all-reduce a phase makes the cohort's mean, and every device takes the same server step. Client state lies in a
store of rows on the device of the client's home and is updated in place. Trip counts are data, so clients of
any size, and blocks of any number of rounds, run in the same program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import tree
from fedrax.compiled.products import Format
from fedrax.compiled.scopes import AGGREGATE, SERVER, STATES, phase_scope, scope
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort
from fedrax.contract.client_data import ClientData, Layout
from fedrax.contract.table import is_table, set_state, state_in
from fedrax.contract.vectors import exchanged, fetched, holds_vectors, map_vectors, on_axis, padded
from fedrax.simulation.cohorts import Block
from fedrax.tree import Tree

AXIS = "clients"
BY_DEVICE = ("count", "client", "slot", "offset", "size", "weight", "work", "blocks")
"""The fields of a Block that have a device axis."""


def share_of(xs: Block, r: int, d: int) -> Block:
    """Round ``r`` of device ``d`` of a block on the host: its fields without these two axes."""
    pick = {name: (r, d) if name in BY_DEVICE else r for name in Block._fields}
    return Block(*(None if value is None else value[pick[name]] for name, value in xs._asdict().items()))  # type: ignore[arg-type]


def whole_round(xs: Block, r: int, rows: int, samples: int = 0) -> Block:
    """Round ``r`` of all devices as if of one: slots count through a store of ``rows`` rows a device.

    And offsets through ``samples`` samples a device, where each has its own.
    """
    shares = [share_of(xs, r, d) for d in range(xs.count.shape[1])]
    shares = [
        share._replace(slot=share.slot + d * rows, offset=share.offset + d * samples) for d, share in enumerate(shares)
    ]
    joined = {
        name: np.concatenate([getattr(share, name)[: share.count] for share in shares])
        for name in BY_DEVICE
        if name != "count" and getattr(xs, name) is not None
    }
    return shares[0]._replace(**joined, count=xs.count[r].sum())


class Program(NamedTuple):
    """What is fixed when the block is compiled, besides the algorithm's static fields."""

    task: Any
    layout: Layout
    num_clients: int
    chunk: int
    """Clients side by side; 0: one after another (plan scan)."""
    unroll: bool = False
    precision: Format = "highest"
    """Operands of the gradients' matrix products."""
    own_samples: bool = False
    """Each device holds samples of its own clients only, instead of all."""


class Carry(NamedTuple):
    """What goes from round to round."""

    server: Any
    store: Tree


class Places(NamedTuple):
    """One device's clients of one round; fields as in :class:`fedrax.simulation.cohorts.Block`."""

    round: Array
    cohort_size: Array
    count: Array
    client: Array
    slot: Array
    offset: Array
    size: Array
    weight: Array
    work: Array | None
    blocks: Array | None
    keys: Array


class Sums(NamedTuple):
    """Running sums over a device's clients."""

    upload: Tree
    info: dict[str, Array]
    bad: Array
    """The first client whose loss was not finite, num_clients if none."""


def client_data(program: Program, samples: Tree, places: Places, k: Any) -> ClientData:
    """The client in place ``k`` as algorithms see it."""
    pick: Callable[[Array | None], Array | None] = lambda a: None if a is None else a[k]  # noqa: E731
    return ClientData(
        program.task,
        program.layout,
        samples,
        offset=places.offset[k],
        size=places.size[k],
        key=places.keys[k],
        round=places.round,
        num_clients=program.num_clients,
        cohort_size=places.cohort_size,
        work=pick(places.work),
        blocks=pick(places.blocks),
        unroll=program.unroll,
        precision=program.precision,
    )


def add_info(total: dict[str, Array], info: dict[str, Array], weight: Array, real: Array) -> dict[str, Array]:
    """Infos are averaged with the clients' weights, ``gradients`` is summed."""
    return {
        name: total[name] + jnp.sum((real if name == "gradients" else weight) * value).astype(total[name].dtype)
        for name, value in info.items()
    }


def first_bad(bad: Array, info: dict[str, Array], clients: Array, num_clients: int) -> Array:
    """The smaller of ``bad`` and the clients whose loss is not finite."""
    if "loss" not in info:
        return bad
    return jnp.minimum(bad, jnp.min(jnp.where(jnp.isfinite(info["loss"]), num_clients, clients)))


class Progress(NamedTuple):
    """Where a device stands in a phase: sums, ``each`` and states by place, and the store."""

    sums: Sums
    each: Tree
    states: Tree
    store: Tree


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def run_client(
    program: Program, p: int, algorithm: Algorithm, message: Tree, state: Tree, samples: Tree, places: Places, k: Array
) -> ClientOutput:
    """Phase ``p`` of the client in place k. Inlined; jit remembers the trace, which its callers ask for repeatedly."""
    out = algorithm.phases[p].client(message, state, client_data(program, samples, places, k))
    sent = jax.tree.leaves((out.upload, out.each), is_leaf=is_table)
    if any(is_table(part) for part in sent):
        raise TypeError(f"{type(algorithm).__name__} uploads a Table: send its rows")
    return out


class PhaseRunner:
    """One phase (number ``p`` of the algorithm's) of one round on one device."""

    def __init__(
        self,
        program: Program,
        algorithm: Algorithm,
        p: int,
        message: Tree,
        samples: Tree,
        places: Places,
    ):
        self.program, self.places = program, places
        self.first, self.last = p == 0, p == len(algorithm.phases) - 1
        # A state that goes back to the store before the next client's turn can leave its tables there.
        in_place = self.first and self.last and not program.chunk
        self.get_state, self.put_state = (state_in, set_state) if in_place else (tree.row, tree.set_row)
        self.one = lambda state, k: run_client(program, p, algorithm, message, state, samples, places, k)
        """(state, k) -> ClientOutput of the client in place k."""

    def start(self, states: Tree, store: Tree) -> Progress:
        """Before the first client: zero sums and room for what is kept one per place."""
        n = self.places.client.shape[0]
        state = jax.eval_shape(self.get_state, store if self.first else states, jnp.int32(0))
        shape = jax.eval_shape(self.one, state, self.places.count)  # of the type of run's index: one trace for both
        by_place = lambda t: jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), t)  # noqa: E731
        sums = Sums(
            tree.zeros_like(shape.upload),
            {name: jnp.zeros((), jnp.float32) for name in shape.info},
            jnp.int32(self.program.num_clients),
        )
        return Progress(sums, by_place(shape.each), () if self.last else by_place(shape.state), store)

    def step(self, i: Array, states: Tree, progress: Progress) -> Progress:
        """Client i (or chunk i of clients) of this device; a chunk beyond the last client repeats that one.

        Client state comes from the store in the first phase and from ``states`` (by place) in later ones; it
        goes to the store in the last phase and to ``Progress.states`` before.
        """
        chunk, (sums, each, kept, store) = self.program.chunk, progress
        place: Any = i * chunk + jnp.arange(chunk, dtype=jnp.int32) if chunk else i
        real = place < self.places.count
        at = jnp.minimum(place, self.places.count - 1) if chunk else place
        slots = self.places.slot[at]
        source, rows = (store, slots) if self.first else (states, at)
        if chunk:
            state = _get_rows(source, rows)
            out: ClientOutput = jax.vmap(self.one)(state, at)
            put = put_state = _put_rows
        else:
            with scope(STATES):
                state = self.get_state(source, rows)
            out = self.one(state, at)
            put, put_state = scope(STATES)(tree.set_row), scope(STATES)(self.put_state)
        each = put(each, at, out.each)
        if self.last:
            store = put_state(store, slots, out.state)
        else:
            kept = put(kept, at, out.state)
        return Progress(self._add(sums, out, at, real), each, kept, store)

    def run(self, states: Tree, store: Tree) -> Progress:
        """All clients of this device."""
        chunk = self.program.chunk
        trips = (self.places.count + chunk - 1) // chunk if chunk else self.places.count
        return jax.lax.fori_loop(jnp.int32(0), trips, lambda i, p: self.step(i, states, p), self.start(states, store))

    @scope(AGGREGATE)
    def _add(self, sums: Sums, out: ClientOutput, at: Array, real: Array) -> Sums:
        clients = self.places.client[at]
        weight = jnp.where(real, self.places.weight[at], 0) if self.program.chunk else self.places.weight[at]
        if self.program.chunk:
            add = lambda a, u: a + jnp.tensordot(weight.astype(u.dtype), u, 1)  # noqa: E731
        else:
            add = lambda a, u: a + weight.astype(u.dtype) * u  # noqa: E731
        return Sums(
            jax.tree.map(add, sums.upload, out.upload),
            add_info(sums.info, out.info, weight, real),
            first_bad(sums.bad, out.info, clients, self.program.num_clients),
        )


@scope(STATES)
def _get_rows(table: Tree, rows: Array) -> Tree:
    return jax.tree.map(lambda a: a.at[rows].get(mode="clip"), table)


@scope(STATES)
def _put_rows(table: Tree, rows: Array, values: Tree) -> Tree:
    return jax.tree.map(lambda t, v: t.at[rows].set(v.astype(t.dtype)), table, values)


def places_of(xs: Block, key: Array) -> Places:
    """One device's share of a round (fields of ``xs`` without round and device axes), with the clients' keys."""
    round_key = jax.random.fold_in(key, xs.round)
    keys = jax.vmap(lambda client: jax.random.fold_in(round_key, client))(xs.client)
    return Places(**xs._asdict(), keys=keys)


def merge_info(record: dict, clients: dict, server: dict) -> dict:
    """A round's record: later phases' entries replace earlier ones', ``gradients`` adds up."""
    gradients = record.get("gradients", 0.0) + clients.get("gradients", 0.0)
    return {**record, **clients, **server, "gradients": jnp.asarray(gradients, jnp.float32)}


def run_round(
    program: Program,
    algorithm: Algorithm,
    carry: Carry,
    samples: Tree,
    key: Array,
    xs: Block,
    axis: str | None,
    vectors_axis: str | None,
) -> tuple[Carry, dict[str, Array]]:
    """One round on one device of the mesh; collectives over ``axis`` join the devices.

    Along ``vectors_axis``, the same or None, they share the Vectors of the server's state.
    """
    places = places_of(xs, key)
    join: Callable = partial(jax.lax.psum, axis_name=axis) if axis else lambda x: x
    least: Callable = partial(jax.lax.pmin, axis_name=axis) if axis else lambda x: x
    gather: Callable = partial(jax.lax.all_gather, axis_name=axis, tiled=True) if axis else lambda x: x
    share: Callable = partial(exchanged, axis=vectors_axis) if vectors_axis else partial(jax.tree.map, gather)
    record: dict[str, Array] = {}
    bad = jnp.int32(program.num_clients)
    server, store, states = carry.server, carry.store, ()
    for p, phase in enumerate(algorithm.phases):
        server = on_axis(server, vectors_axis)
        runner = PhaseRunner(program, algorithm, p, phase.broadcast(server), samples, places)
        with phase_scope(p):
            sums, each, states, store = runner.run(states, store)
        with scope(AGGREGATE):
            sums = Sums(join(sums.upload), join(sums.info), least(sums.bad))
            each, clients, weights = map_vectors(share, (each, xs.client, xs.weight), gather)
        cohort = Cohort(
            mean=sums.upload,
            each=each,
            clients=clients,
            weights=weights,
            size=jnp.asarray(xs.cohort_size),
            num_clients=program.num_clients,
            round=jnp.asarray(xs.round),
        )
        with scope(SERVER):
            server, info = phase.server(server, cohort)
            server = on_axis(server, None)
        bad = jnp.minimum(bad, sums.bad)
        record = merge_info(record, sums.info, info)
    finite = tree.all_finite(server)
    sound = (least(finite) if vectors_axis and holds_vectors(server) else finite) & (bad == program.num_clients)
    # A round that ends in a non-finite number is not applied: its server state is kept for the diagnosis.
    server = jax.lax.cond(sound, lambda: server, lambda: carry.server)
    return Carry(server, store), record | {"sound": sound, "bad": bad}


def run_block(
    program: Program,
    axis: str | None,
    algorithm: Algorithm,
    carry: Carry,
    samples: Tree,
    key: Array,
    xs: Block,
    rounds: Array,
    stop: bool = True,
    vectors_axis: str | None = None,
) -> tuple[Carry, dict[str, Array]]:
    """Up to len(xs.round) rounds, stopping after an unsound one if asked to: (carry, records [B] by name)."""
    xs = jax.tree.map(jnp.asarray, xs)
    mine = {f: None if getattr(xs, f) is None else getattr(xs, f)[:, 0] for f in BY_DEVICE}
    xs = xs._replace(**mine)
    at = lambda r: jax.tree.map(lambda a: a[r], xs)  # noqa: E731
    step = partial(run_round, program, algorithm, samples=samples, key=key, axis=axis, vectors_axis=vectors_axis)
    shapes = jax.eval_shape(lambda c: step(c, xs=at(0))[1], carry)
    records = jax.tree.map(lambda s: jnp.zeros((xs.round.shape[0], *s.shape), s.dtype), shapes)

    def unfinished(loop: tuple) -> Array:
        r, sound, _, _ = loop
        return (r < rounds) & sound if stop else r < rounds

    def body(loop: tuple) -> tuple:
        r, _, carry, records = loop
        carry, record = step(carry, xs=at(r))
        return r + 1, record["sound"], carry, tree.set_row(records, r, record)

    _, _, carry, records = jax.lax.while_loop(unfinished, body, (jnp.int32(0), jnp.bool_(True), carry, records))
    return carry, records


@lru_cache(maxsize=16)
def compiled_block(program: Program, mesh: Mesh) -> Callable:
    """``run_block`` on a mesh; runs of one task and federation shape share it, whatever their seeds and floats."""
    specs = Block(P(), P(), *(P(None, AXIS) for _ in BY_DEVICE))  # type: ignore[arg-type]

    def block_on_mesh(algorithm: Algorithm, carry: Carry, *inputs: Any) -> tuple[Carry, dict[str, Array]]:
        carries = Carry(server_specs(carry.server, mesh), P(AXIS))
        sharded = jax.shard_map(
            partial(run_block, program, AXIS, vectors_axis=AXIS if share_vectors(mesh) else None),
            mesh=mesh,
            in_specs=(P(), carries, P(AXIS) if program.own_samples else P(), P(), specs, P()),
            out_specs=(carries, P()),
            check_vma=False,
        )
        return sharded(algorithm, carry, *inputs)

    return jax.jit(block_on_mesh, donate_argnums=(1,), compiler_options=compiler_options(mesh))


def share_vectors(mesh: Mesh) -> bool:
    """Whether the devices share the Vectors of a server's state.

    Not over several processes: one of them writes the checkpoints, and must not need the others for it.
    """
    return len({device.process_index for device in mesh.devices.flat}) == 1


def server_specs(server: Any, mesh: Mesh) -> Any:
    """How a server's state lies on a mesh: every device has all of it, or of its Vectors a share."""
    return map_vectors(lambda _: P(None, AXIS) if share_vectors(mesh) else P(), server, lambda _: P())


def compiler_options(mesh: Mesh) -> dict[str, bool | int | str]:
    """XLA's options for a block of rounds.

    On CPU it copies loop state that is read and then written, a whole client store for each client, unless told
    to look closer. It splits a batch's gather over threads by the size of the whole data set, which costs a local
    step more than the gather; where each core is a device, no operation is to be split. And it prefers vectors of
    256 bits where the processor has 512, with which the cells of recurrent models are faster; other processors
    ignore the preference.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return {}
    options: dict[str, bool | int | str] = {
        "xla_cpu_copy_insertion_use_region_analysis": True,
        "xla_cpu_prefer_vector_width": 512,
    }
    if len(jax.devices()) > 1:
        options["xla_disable_hlo_passes"] = "cpu-parallel-task-assigner"
    return options


_copied = jax.jit(lambda values: jax.tree.map(jnp.copy, values))


class Engine:
    """Compiles and runs blocks of rounds on a mesh.

    ``samples`` are put on every device. Without them (None) the attribute is set before each block instead.
    """

    def __init__(self, program: Program, mesh: Mesh, samples: Tree | None):
        self.program, self.mesh = program, mesh
        self.devices = mesh.devices.size
        self.samples = None if samples is None else jax.device_put(samples, NamedSharding(mesh, P()))
        self.store_sharding = NamedSharding(mesh, P(AXIS))
        self._block = self._compile()

    def _compile(self) -> Callable:
        return compiled_block(self.program, self.mesh)

    def put(self, server: Any, store: Tree) -> Carry:
        """Server and store on the mesh; the arrays are given away to the next block."""
        if share_vectors(self.mesh):
            server = padded(server, self.devices)
        places = jax.tree.map(partial(NamedSharding, self.mesh), server_specs(server, self.mesh))
        # The copy parts them from the caller's arrays and from each other: device_put shares the first device's.
        return Carry(
            jax.device_put(_copied(server), places, may_alias=False),
            jax.device_put(store, self.store_sharding, may_alias=False),
        )

    def whole_server(self, carry: Carry) -> Any:
        """The server's state with Vectors that the devices share fetched to the host."""
        return fetched(carry.server) if share_vectors(self.mesh) else carry.server

    def new_store(self, client: Tree, capacity: int) -> Tree:
        """A store of ``capacity`` rows a device, each the state ``client`` of a client that has not taken part."""
        rows = capacity * self.devices
        repeat = lambda c: jax.tree.map(lambda a: jnp.broadcast_to(a, (rows, *a.shape)), c)  # noqa: E731
        return jax.jit(repeat, out_shardings=self.store_sharding)(client)

    def run(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Block, rounds: int) -> tuple[Carry, dict]:
        """Run up to ``rounds`` rounds; ``carry`` is given away. Records come back as NumPy arrays [rounds]."""
        carry, records = self._block(algorithm, carry, self.samples, key, xs, np.int32(rounds))
        return carry, {name: np.asarray(value)[:rounds] for name, value in records.items()}
