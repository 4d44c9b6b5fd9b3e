"""Plan ``debug``: everything eagerly, client by client, every tensor checked; and the search for a culprit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.errors import FedraxError
from fedrax.simulation.cohorts import share_of, whole_round
from fedrax.simulation.engine import NOTED, Carry, Engine, stacked
from fedrax.simulation.recording import Noted, no_notes, noted, on_host, sent_by, statistics_down
from fedrax.simulation.result import Result
from fedrax.simulation.round import (
    Executor,
    Gathered,
    Kept,
    Program,
    Rounds,
    add_client,
    client_keys,
    no_sums,
    run_client,
    run_round,
    turn_of,
)
from fedrax.tree import Tree


class NonFiniteError(FedraxError):
    """A loss, upload, state or parameter became infinite or not a number."""

    result: Result | None = None
    """The rounds before as ``simulate`` returns them, but for what clients keep; its ``stopped`` is "diverged"."""

    def __reduce__(self) -> tuple:
        """To other processes the sentence alone goes: a result can be large, and of classes that they do not know."""
        return type(self), self.args


class DebugEngine(Engine):
    """No compilation, one client after another; the first non-finite number is named."""

    def _compile(self) -> Any:
        return None

    def run(self, algorithm: Algorithm, carry: Carry, key: Array, xs: Rounds, rounds: int) -> tuple[Carry, dict]:
        """As :meth:`Engine.run`: an unsound round is not applied."""
        records: list[dict] = []
        for r in range(rounds):
            try:
                carry, record = self.round(algorithm, carry, key, share_of(xs, r, 0))
            except NonFiniteError:
                records.append({"sound": False, "bad": self.program.num_clients})
                break
            records.append(record)
        return carry, stacked(records)

    def round(self, algorithm: Algorithm, carry: Carry, key: Array, here: Rounds) -> tuple[Carry, dict]:
        """One round on one device. NonFiniteError names what went wrong."""
        with jax.disable_jit():
            executor = StepByStep(self.program, algorithm, here, key, carry.store, jax.tree.map(_first, self.samples))
            server, statistics, record, _ = run_round(executor, carry.server, carry.statistics)
        record = {**record, "sound": True, "bad": self.program.num_clients}
        if executor.noted:
            record[NOTED] = on_host(executor.noted, 1)
        return Carry(server, statistics, executor.stored()), record


class StepByStep(Executor):
    """One round in plain Python."""

    def __init__(self, program: Program, algorithm: Algorithm, here: Rounds, key: Array, store: Tree, samples: Tree):
        here = jax.tree.map(jnp.asarray, here)
        super().__init__(program, algorithm, here, key)
        self.store, self.samples = jax.tree.map(np.array, store), samples
        self.where = f"{type(algorithm).__name__}, round {int(here.round) + 1}"  # as events count them
        self.keys = client_keys(self.round_key, here.places.client)
        count = int(here.count)
        self.numbers, self.slots = here.places.client[:count], [int(slot) for slot in here.places.slot[:count]]
        self.kept: list[Kept] = [jax.tree.map(lambda a, s=slot: jnp.asarray(a[s]), self.store) for slot in self.slots]

    def clients(self, p: int, message: Tree, statistics: Tree) -> Gathered:
        """One client after another."""
        if not self.slots:
            return self._nobody(p, message, statistics)
        sums, single, initial = None, [], self.kept[0]
        notes: Any = ()
        last, recorded = p == len(self.algorithm.phases) - 1, self.here.recorded
        for k, client in enumerate(self.numbers):
            done = run_client(
                self.program,
                p,
                self.algorithm,
                message,
                self.kept[k],
                statistics,
                self.samples,
                turn_of(self.here, self.keys, k),
            )
            sent, who = done.output, f"{self.where}, client {int(client)}"
            named = {"upload": sent.upload, "state": done.kept.state, "info": sent.info, "each": sent.each}
            require_finite(named | {"total": sent.total, "statistics": (done.statistics, done.kept.statistics)}, who)
            if sums is None:
                sums = no_sums(self.program, self.algorithm, p, initial if p == 0 else self._row(k), done)
                notes = no_notes(recorded, sent_by(done, last))
            weight = self.here.places.weight[k]
            sums = add_client(self.program, sums, done, weight, jnp.bool_(True), client)
            notes = noted(notes, recorded, client, sent_by(done, last))
            self.kept[k] = done.kept
            single.append(done.single)
        assert sums is not None
        if recorded is not None:
            self.noted.append(Noted(message, statistics_down(self.algorithm, p, statistics), notes))
        each = jax.tree.map(lambda *e: jnp.stack(e), *single)
        return Gathered(sums, each, self.numbers, self.here.places.weight[: len(single)])

    def _nobody(self, p: int, message: Tree, statistics: Tree) -> Gathered:
        """Of a cohort without clients: zeros, in the shapes that one would bring."""
        kept = jax.tree.map(lambda a: jnp.asarray(a[0]), self.store)
        turn = turn_of(self.here, self.keys, 0)
        with jax.disable_jit(False):
            done = jax.eval_shape(
                lambda: run_client(self.program, p, self.algorithm, message, kept, statistics, self.samples, turn)
            )
        none = jax.tree.map(lambda a: jnp.zeros((0, *a.shape), a.dtype), done.single)
        sums = no_sums(self.program, self.algorithm, p, kept, done)
        return Gathered(sums, none, self.numbers, self.here.places.weight[:0])

    def server(self, p: int, server: Any, gathered: Gathered) -> tuple[Any, Info]:
        """As every executor; the new state must be finite."""
        server, info = super().server(p, server, gathered)
        require_finite({"server": server}, self.where)
        return server, info

    def _row(self, k: int) -> Kept:
        return jax.tree.map(lambda a: jnp.asarray(a[self.slots[k]]), self.store)

    def stored(self) -> Tree:
        """The store after the round."""
        for slot, kept in zip(self.slots, self.kept, strict=True):
            jax.tree.map(lambda table, value, s=slot: table.__setitem__(s, value), self.store, kept)
        return self.store


def require_finite(values: Tree, where: str) -> None:
    """Raise NonFiniteError naming the first leaf of ``values`` that holds a non-finite number."""
    for name, leaf in zip(tree.leaf_names(values), jax.tree.leaves(values), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.all(jnp.isfinite(leaf))):
            raise NonFiniteError(f"{where}: {name} is not finite")


def culprit(engine: Engine, algorithm: Algorithm, carry: Carry, key: Array, xs: Rounds, r: int) -> str:
    """Repeat round ``r`` of a block client by client from its starting state; its first non-finite tensor, in words."""
    program = engine.program._replace(chunk=0, own_samples=False, joining=0)
    debug = DebugEngine(program, Mesh(engine.mesh.devices.flat[:1], engine.mesh.axis_names), engine.samples)
    a_device = lambda rows: next((len(a) // engine.devices for a in jax.tree.leaves(rows)), 0)  # noqa: E731
    here = whole_round(xs, r, a_device(carry.store), a_device(engine.samples) if engine.program.own_samples else 0)
    slots, at_the_server = (
        here.places.slot,
        f"{type(algorithm).__name__}, round {int(here.round) + 1}: the server state",
    )
    if not len(slots):  # of a Poisson cohort: nobody else can be to blame
        return f"{at_the_server} is not finite"
    store = jax.tree.map(lambda a: np.asarray(a[slots]), carry.store)
    on_host = lambda values: jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), values)  # noqa: E731
    here = here._replace(places=here.places._replace(slot=np.arange(len(slots), dtype=np.int32)))
    start = Carry(on_host(engine.whole_server(carry)), on_host(carry.statistics), store)
    try:
        debug.round(algorithm, start, key, here)
    except NonFiniteError as error:
        return str(error)
    return f"{at_the_server} is not finite"


def _first(array: Array) -> Array:
    return array.addressable_shards[0].data
