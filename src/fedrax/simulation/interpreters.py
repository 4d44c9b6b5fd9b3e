"""Two interpreters with the engine's interface that call Python for every client.

``LoopEngine`` (plan ``loop``) dispatches one jitted call a client, local steps laid out one after another: for
models whose operations are slow inside compiled loops. ``DebugEngine`` (plan ``debug``) runs everything eagerly,
client by client, and names the client, round and tensor of the first non-finite number.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, Cohort
from fedrax.errors import FedraxError
from fedrax.simulation.cohorts import Block
from fedrax.simulation.engine import (
    Carry,
    Engine,
    PhaseRunner,
    Program,
    Progress,
    Sums,
    client_data,
    merge_info,
    places_of,
    share_of,
    whole_round,
)
from fedrax.tree import Tree


class NonFiniteError(FedraxError):
    """A loss, upload, state or parameter became infinite or not a number."""


class LoopEngine(Engine):
    """Plan ``loop``: clients are dispatched from Python, in turn over the devices, which work in parallel."""

    def __init__(self, program: Program, mesh: Mesh, samples: Tree | None):
        super().__init__(program._replace(unroll=True), mesh, samples)
        self._start = jax.jit(self._start_phase, static_argnums=(0,))
        self._step = jax.jit(self._step_client, static_argnums=(0,), donate_argnums=(2,))
        self._places = jax.jit(places_of)
        self._server = jax.jit(self._server_step, static_argnums=(0,))
        self._broadcast = jax.jit(lambda p, algorithm, server: algorithm.phases[p].broadcast(server), static_argnums=0)

    def _runner(self, p: int, algorithm: Algorithm, message: Tree, samples: Tree, places: Any) -> PhaseRunner:
        return PhaseRunner(self.program, algorithm, p, message, samples, places)

    def _start_phase(
        self,
        p: int,
        algorithm: Algorithm,
        message: Tree,
        samples: Tree,
        places: Any,
        states: Tree,
        store: Tree,
    ) -> Progress:
        return self._runner(p, algorithm, message, samples, places).start(states, store)._replace(store=())

    def _step_client(
        self,
        p: int,
        algorithm: Algorithm,
        progress: Progress,
        message: Tree,
        samples: Tree,
        places: Any,
        states: Tree,
        i: Array,
    ) -> Progress:
        return self._runner(p, algorithm, message, samples, places).step(i, states, progress)

    def _server_step(self, p: int, algorithm: Algorithm, server: Any, parts: list, xs: Block) -> tuple:
        total = parts[0][0]
        for sums, _ in parts[1:]:
            total = Sums(
                tree.add(total.upload, sums.upload),
                tree.add(total.info, sums.info),
                jnp.minimum(total.bad, sums.bad),
            )
        cohort = Cohort(
            mean=total.upload,
            each=jax.tree.map(lambda *e: jnp.concatenate(e), *[each for _, each in parts]),
            clients=jnp.asarray(xs.client).reshape(-1),
            weights=jnp.asarray(xs.weight).reshape(-1),
            size=jnp.asarray(xs.cohort_size),
            num_clients=self.program.num_clients,
            round=jnp.asarray(xs.round),
        )
        server, info = algorithm.phases[p].server(server, cohort)
        return server, total, info, tree.all_finite(server)

    def run(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Block, rounds: int) -> tuple[Carry, dict]:
        """As :meth:`Engine.run`."""
        records: list[dict] = []
        for r in range(rounds):
            carry, record = self._round(algorithm, carry, key, xs, r)
            records.append(record)
            if not record["sound"]:
                break
        return carry, {name: np.asarray([record[name] for record in records]) for name in records[0]}

    def _round(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Block, r: int) -> tuple[Carry, dict]:
        devices = list(self.mesh.devices.flat)
        server, stores = self.whole_server(carry), [_shard(carry.store, d) for d in range(len(devices))]
        samples = [_shard(self.samples, d) for d in range(len(devices))]
        shares = [share_of(xs, r, d) for d in range(len(devices))]
        places = [
            self._places(*jax.device_put((share, key), device)) for share, device in zip(shares, devices, strict=True)
        ]
        states: list[Tree] = [()] * len(devices)
        whole = jax.tree.map(lambda a: a[r], xs)
        record: dict = {}
        bad = self.program.num_clients
        for p in range(len(algorithm.phases)):
            message = self._broadcast(p, algorithm, server)
            inputs = [(algorithm, jax.device_put(message, device)) for device in devices]
            progress = []
            for d, (alg, sent) in enumerate(inputs):
                begun = self._start(p, alg, sent, samples[d], places[d], states[d], stores[d])
                progress.append(begun._replace(store=stores[d]))
            for i in range(int(max(share.count for share in shares))):
                for d, (alg, sent) in enumerate(inputs):
                    if i < shares[d].count:
                        place = jax.device_put(np.int32(i), devices[d])
                        progress[d] = self._step(p, alg, progress[d], sent, samples[d], places[d], states[d], place)
            stores, states = [q.store for q in progress], [q.states for q in progress]
            parts = jax.device_put([(q.sums, q.each) for q in progress], devices[0])
            server, total, info, finite = self._server(p, algorithm, jax.device_put(server, devices[0]), parts, whole)
            bad = min(bad, int(total.bad))
            record = merge_info(record, total.info, info)
        sound = bool(finite) and bad == self.program.num_clients
        server = self.put(server, ()).server if sound else carry.server
        store = jax.tree.map(self._join, *stores) if jax.tree.leaves(carry.store) else carry.store
        return Carry(server, store), {
            **{k: np.asarray(v) for k, v in record.items()},
            "sound": sound,
            "bad": bad,
        }

    def _join(self, *shards: Array) -> Array:
        shape = (sum(len(shard) for shard in shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.store_sharding, list(shards))


def _shard(values: Tree, d: int) -> Tree:
    return jax.tree.map(lambda a: a.addressable_shards[d].data, values)


class DebugEngine(Engine):
    """Plan ``debug``: no compilation, one client after another, every tensor checked."""

    def _compile(self) -> Any:
        return None

    def run(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Block, rounds: int) -> tuple[Carry, dict]:
        """As :meth:`Engine.run`: an unsound round is not applied."""
        records: list[dict] = []
        with jax.disable_jit():
            for r in range(rounds):
                try:
                    carry, record = self.round(algorithm, carry, key, share_of(xs, r, 0))
                except NonFiniteError:
                    records.append({"sound": False, "bad": self.program.num_clients})
                    break
                records.append({name: np.asarray(value) for name, value in record.items()})
        return carry, {n: np.asarray([record[n] for record in records if n in record]) for n in records[0]}

    def round(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Block) -> tuple[Carry, dict]:
        """One round on one device; ``xs`` without round and device axes. NonFiniteError names what went wrong."""
        where = f"{type(algorithm).__name__}, round {int(xs.round) + 1}"  # as events count them
        xs = jax.tree.map(jnp.asarray, xs)
        places, samples = places_of(xs, key), _shard(self.samples, 0)
        clients = [int(c) for c in xs.client[: int(xs.count)]]
        slots = [int(s) for s in xs.slot[: len(clients)]]
        server, store = carry.server, jax.tree.map(np.array, carry.store)
        states = [jax.tree.map(lambda a, s=slot: jnp.asarray(a[s]), store) for slot in slots]
        record: dict = {}
        for phase in algorithm.phases:
            message, outputs = phase.broadcast(server), []
            for k, client in enumerate(clients):
                out = phase.client(message, states[k], client_data(self.program, samples, places, jnp.int32(k)))
                require_finite(out._asdict(), f"{where}, client {client}")
                states[k] = out.state
                outputs.append(out)
            weights = [xs.weight[k] for k in range(len(clients))]
            server, info = phase.server(server, self._cohort(outputs, weights, xs, clients))
            require_finite({"server": server}, where)
            means = {
                name: sum(
                    (1.0 if name == "gradients" else w) * o.info[name] for w, o in zip(weights, outputs, strict=True)
                )
                for name in outputs[0].info
            }
            record = merge_info(record, means, info)
        for slot, state in zip(slots, states, strict=True):
            jax.tree.map(partial(_assign, slot), store, state)
        return Carry(server, store), {**record, "sound": True, "bad": self.program.num_clients}

    def _cohort(self, outputs: list, weights: list, xs: Block, clients: list[int]) -> Cohort:
        mean = jax.tree.map(
            lambda *u: sum(w.astype(a.dtype) * a for w, a in zip(weights, u, strict=True)),
            *[o.upload for o in outputs],
        )
        return Cohort(
            mean=mean,
            each=jax.tree.map(lambda *e: jnp.stack(e), *[o.each for o in outputs]),
            clients=jnp.asarray(clients, jnp.int32),
            weights=jnp.stack(weights),
            size=jnp.asarray(xs.cohort_size),
            num_clients=self.program.num_clients,
            round=jnp.asarray(xs.round),
        )


def _assign(slot: int, table: np.ndarray, value: Array) -> None:
    table[slot] = value


def require_finite(values: Tree, where: str) -> None:
    """Raise NonFiniteError naming the first leaf of ``values`` that holds a non-finite number."""
    for name, leaf in zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {name} is not finite")


def culprit(engine: Engine, algorithm: Algorithm, carry: Carry, key: Array, xs: Block, r: int) -> str:
    """Repeat round ``r`` of a block client by client from its starting state; its first non-finite tensor, in words."""
    program = engine.program._replace(chunk=0, own_samples=False)
    debug = DebugEngine(program, Mesh(engine.mesh.devices.flat[:1], engine.mesh.axis_names), engine.samples)
    a_device = lambda rows: next((len(a) // engine.devices for a in jax.tree.leaves(rows)), 0)  # noqa: E731
    share = whole_round(xs, r, a_device(carry.store), a_device(engine.samples) if engine.program.own_samples else 0)
    store = jax.tree.map(lambda a: np.asarray(a[share.slot]), carry.store)
    server = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), engine.whole_server(carry))
    share = share._replace(slot=np.arange(len(share.slot), dtype=np.int32))
    try:
        debug.round(algorithm, Carry(server, store), key, share)
    except NonFiniteError as error:
        return str(error)
    return f"{type(algorithm).__name__}, round {int(share.round) + 1}: the server state is not finite"
