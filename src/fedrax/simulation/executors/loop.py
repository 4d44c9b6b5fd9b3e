"""Plan ``loop``: one compiled call for each client, with unrolled local steps.

For models whose operations are slow inside compiled loops.
"""

from __future__ import annotations

from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedrax import tree, xla
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.simulation.executors.compiled import CLIENT_INFO, RECORDED_PHASES, Engine, RoundState, stack_records
from fedrax.simulation.executors.phase import PhaseRunner, PhaseState
from fedrax.simulation.placement.planner import device_round
from fedrax.simulation.results.message_recorder import RecordedPhase, broadcast_statistics, phases_to_host
from fedrax.simulation.round import (
    Executor,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    client_keys,
    merge_rows,
    merge_sums,
    run_round,
    run_server,
)
from fedrax.tree import Tree


class LoopEngine(Engine):
    """Clients are dispatched from Python to the devices in turn; the devices work in parallel."""

    def __init__(self, program: RoundProgram, mesh: Mesh, samples: Tree | None):
        super().__init__(program._replace(unroll=True), mesh, samples)
        self.compiled = CompiledSteps(self.program)

    def run(
        self, algorithm: Algorithm, carry: RoundState, key: Array, inputs: RoundInputs, rounds: int
    ) -> tuple[RoundState, dict]:
        """As :meth:`Engine.run`."""
        records: list[dict] = []
        for r in range(rounds):
            carry, record = self._round(algorithm, carry, key, inputs, r)
            records.append(record)
            if not record["sound"]:
                break
        return carry, stack_records(records)

    def _round(
        self, algorithm: Algorithm, carry: RoundState, key: Array, inputs: RoundInputs, r: int
    ) -> tuple[RoundState, dict]:
        executor = LoopExecutor(self, algorithm, carry, key, inputs, r)
        server, statistics, record, bad = run_round(executor, self.whole_server(carry), carry.statistics)
        # apart, because statistics that no client uploads (FedBN) are on all devices and the server's state is on one
        finite = bool(self.compiled.finite(server)) and bool(self.compiled.finite(statistics))
        applied = finite and int(bad) == self.program.num_clients and not executor.skipped
        sound = applied or bool(executor.skipped)
        store = jax.tree.map(self._join, *executor.stores) if jax.tree.leaves(carry.store) else carry.store
        new = self.put(server, statistics, ()) if applied else carry
        values = {name: np.asarray(value) for name, value in record.items()}
        values |= {"sound": sound, "bad": int(bad)} | (
            {RECORDED_PHASES: executor.recorded_phases} if executor.recorded_phases else {}
        )
        values |= {CLIENT_INFO: executor.client_info} if self.program.client_info else {}
        return new._replace(store=store), values

    def _join(self, *shards: Array) -> Array:
        shape = (sum(len(shard) for shard in shards), *shards[0].shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.store_sharding, list(shards))


class CompiledSteps:
    """The parts of a round, each of them a separate compiled program."""

    def __init__(self, program: RoundProgram):
        def runner(p: int, algorithm: Algorithm, *inputs: Any) -> PhaseRunner:
            return PhaseRunner(program, algorithm, p, *inputs)

        def start(p: int, algorithm: Algorithm, inputs: tuple, client_records: Tree, store: Tree) -> PhaseState:
            return runner(p, algorithm, *inputs).start(client_records, store)._replace(store=())

        def step(
            p: int, algorithm: Algorithm, progress: PhaseState, inputs: tuple, client_records: Tree, i: Array
        ) -> PhaseState:
            return runner(p, algorithm, *inputs).step(i, client_records, progress)

        def gather(parts: list) -> PhaseResult:
            rows = jax.tree.map(lambda *e: jnp.concatenate(e), *[rows for _, rows in parts])
            sums = reduce(merge_sums, [sums for sums, _ in parts])
            return PhaseResult(sums, merge_rows(program, rows, len(parts)))

        def server(p: int, algorithm: Algorithm, *inputs: Any) -> tuple[Any, Info]:
            return run_server(program, p, algorithm, *inputs)

        def broadcast(p: int, algorithm: Algorithm, server: Any) -> Tree:
            return algorithm.phases[p].broadcast(server)

        self.start = cache(lambda p: xla.jit(partial(start, p)))
        self.step = cache(lambda p: xla.jit(partial(step, p), donate_argnums=(1,)))
        self.gather = jax.jit(gather)
        self.server = jax.jit(server, static_argnums=0)
        self.broadcast = jax.jit(broadcast, static_argnums=0)
        self.keys = jax.jit(client_keys)
        self.finite = jax.jit(tree.all_finite)


class LoopExecutor(Executor):
    """One round whose clients are compiled calls on the devices of a mesh."""

    def __init__(
        self, engine: LoopEngine, algorithm: Algorithm, carry: RoundState, key: Array, inputs: RoundInputs, r: int
    ):
        self.devices, self.compiled = list(engine.mesh.devices.flat), engine.compiled
        whole = RoundInputs(
            inputs.round[r], inputs.cohort_size[r], inputs.count[r], jax.tree.map(lambda a: a[r], inputs.assignments)
        )
        super().__init__(engine.program, algorithm, whole, key)
        self.shares = [device_round(inputs, r, d) for d in range(len(self.devices))]
        self.inputs_by_device = [
            jax.device_put(mine, device) for mine, device in zip(self.shares, self.devices, strict=True)
        ]
        keys = [jax.device_put(self.round_key, device) for device in self.devices]
        self.keys = [
            self.compiled.keys(k, x.assignments.client) for k, x in zip(keys, self.inputs_by_device, strict=True)
        ]
        self.samples = [_shard(engine.samples, d) for d in range(len(self.devices))]
        self.stores = [_shard(carry.store, d) for d in range(len(self.devices))]
        self.client_records: list[Tree] = [()] * len(self.devices)
        self.client_info: dict[str, np.ndarray] = {}

    def broadcast(self, p: int, server: Any) -> Tree:
        """As every executor, compiled."""
        return self.compiled.broadcast(p, self.algorithm, server)

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Run all clients, one call for each; their results are combined in the server's call."""
        inputs = [
            (*jax.device_put((message, statistics), device), samples, round_inputs, keys)
            for device, samples, round_inputs, keys in zip(
                self.devices, self.samples, self.inputs_by_device, self.keys, strict=True
            )
        ]
        progress = [
            self.compiled.start(p)(self.algorithm, mine, client_records, store)._replace(store=store)
            for mine, client_records, store in zip(inputs, self.client_records, self.stores, strict=True)
        ]
        for i in range(int(max(share.count for share in self.shares))):
            for d, device in enumerate(self.devices):
                if i < self.shares[d].count:
                    position = jax.device_put(np.int32(i), device)
                    progress[d] = self.compiled.step(p)(
                        self.algorithm, progress[d], inputs[d], self.client_records[d], position
                    )
        self.stores, self.client_records = [q.store for q in progress], [q.client_records for q in progress]
        counted = [(q.client_info, int(share.count)) for q, share in zip(progress, self.shares, strict=True)]
        for name in progress[0].client_info:
            self.client_info[name] = np.concatenate([np.asarray(info[name])[:count] for info, count in counted])
        if self.shares[0].recorded is not None:
            notes = jax.tree.map(lambda *a: np.concatenate([np.asarray(x) for x in a]), *[q.notes for q in progress])
            down = broadcast_statistics(self.algorithm, p, statistics)
            self.recorded_phases += phases_to_host([RecordedPhase(message, down, notes)], len(self.devices))
        return self.compiled.gather(jax.device_put([(q.sums, q.rows) for q in progress], self.devices[0]))

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor, compiled."""
        server = jax.device_put(server, self.devices[0])
        return self.compiled.server(p, self.algorithm, server, gathered, self.round_inputs, self.round_key)


def _shard(values: Tree, d: int) -> Tree:
    return jax.tree.map(lambda a: a.addressable_shards[d].data, values)
