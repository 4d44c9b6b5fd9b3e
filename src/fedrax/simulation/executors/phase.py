"""One phase of a round on one device: its clients run one after another, or in vectorized chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.table import set_state, state_in
from fedrax.simulation.results.message_recorder import empty_upload_buffer, record_uploads, recorded_upload
from fedrax.simulation.round import (
    ClientKeys,
    ClientResult,
    ClientRows,
    ClientSums,
    RoundInputs,
    RoundProgram,
    add_client,
    client_inputs,
    report,
    run_client,
    zero_sums,
)
from fedrax.tree import Tree
from fedrax.xla import AGGREGATE, STATES, scope, vmap


class PhaseState(NamedTuple):
    """Loop state of one device in a phase: running sums, stacked uploads, client records, and recorded messages."""

    sums: ClientSums
    rows: ClientRows
    client_records: Tree
    """By position."""
    store: Tree
    notes: Any = ()
    """Recorded uploads."""
    client_info: Any = ()
    """The info of each client by its position on the device, if ``RoundProgram.client_info`` is set."""


class PhaseRunner:
    """One phase (number ``p`` of the algorithm's) of one round on one device."""

    def __init__(
        self,
        program: RoundProgram,
        algorithm: Algorithm,
        p: int,
        message: Tree,
        statistics: Tree,
        samples: Tree,
        round_inputs: RoundInputs,
        keys: ClientKeys,
    ):
        self.program, self.algorithm, self.p, self.round_inputs = program, algorithm, p, round_inputs
        self.order = jnp.argsort(round_inputs.assignments.client)
        """The positions by ascending client number; unused ones have N and come last."""
        self.row_of = jnp.argsort(self.order)
        """The row in ``PhaseState.rows`` of the client in each position."""
        self.first, self.last = p == 0, p == len(algorithm.phases) - 1
        # A state that goes back to the store before the next client trains can leave its tables there.
        in_place = self.first and self.last and not program.chunk
        self.get_state, self.put_state = (state_in, set_state) if in_place else (tree.row, tree.set_row)
        self.one: Callable[[Tree, Array], ClientResult] = lambda client_records, k: run_client(
            program,
            p,
            algorithm,
            message,
            client_records,
            statistics,
            samples,
            client_inputs(program, round_inputs, keys, k),
        )
        """(client record, k) -> the result of the client in position k."""

    def start(self, client_records: Tree, store: Tree) -> PhaseState:
        """The loop state before the first client: zero sums, and buffers with one entry for each position."""
        assignments, n = self.round_inputs.assignments, len(self.order)
        begins = jax.eval_shape(self.get_state, store if self.first else client_records, jnp.int32(0))
        shape = jax.eval_shape(
            self.one, begins, self.round_inputs.count
        )  # of the type of run's index: one trace for both
        by_position = lambda t: jax.tree.map(lambda a: jnp.zeros((n, *a.shape), a.dtype), t)  # noqa: E731
        initial = jax.eval_shape(self.get_state, store, jnp.int32(0))
        sums = zero_sums(self.program, self.algorithm, self.p, initial, shape)
        notes = empty_upload_buffer(self.round_inputs.recorded, recorded_upload(shape, self.last))
        info = by_position(jax.eval_shape(report, shape)) if self.program.client_info else ()
        rows = ClientRows(by_position(shape.per_client), assignments.client[self.order], assignments.weight[self.order])
        return PhaseState(sums, rows, () if self.last else by_position(shape.record), store, notes, info)

    def step(self, i: Array, before: Tree, progress: PhaseState) -> PhaseState:
        """Client i (or chunk i of clients) of this device; a chunk beyond the last client repeats that one.

        What a client keeps comes from the store in the first phase and from ``before`` (by position) in later ones; it
        goes to the store in the last phase and to ``PhaseState.client_records`` before.
        """
        chunk = self.program.chunk
        position: Any = i * chunk + jnp.arange(chunk, dtype=jnp.int32) if chunk else i
        real = position < self.round_inputs.count
        at = jnp.minimum(position, self.round_inputs.count - 1) if chunk else position
        source, rows = (progress.store, self.round_inputs.assignments.slot[at]) if self.first else (before, at)
        if chunk:
            done: ClientResult = vmap(self.one)(_get_rows(source, rows), at)
            return self.after(progress, at, done, real, _put_rows, _put_rows)
        with scope(STATES):
            begins = self.get_state(source, rows)
        return self.after(progress, at, self.one(begins, at), real, tree.set_row, self.put_state)

    def after(
        self, progress: PhaseState, at: Array, done: ClientResult, real: Any, put: Callable, put_state: Callable
    ) -> PhaseState:
        """The loop state after the client in position ``at``, or after several vectorized clients.

        real: as in :func:`add_client`. put, put_state: (table, rows, values) -> the table with these rows set to the
        values.
        """
        sums, rows, client_records, store, notes, client_info = progress
        client, slot = self.round_inputs.assignments.client[at], self.round_inputs.assignments.slot[at]
        with scope(STATES):
            rows = rows._replace(per_client=put(rows.per_client, self.row_of[at], done.per_client))
            if self.last:
                store = put_state(store, slot, done.record)
            else:
                client_records = put(client_records, at, done.record)
        with scope(AGGREGATE):
            weight = self.round_inputs.assignments.weight[at]
            weight = jnp.where(real, weight, 0) if self.program.chunk else weight
            sums = add_client(self.program, sums, done, weight, real, client)
        notes = record_uploads(notes, self.round_inputs.recorded, client, recorded_upload(done, self.last))
        if self.program.client_info:
            client_info = put(client_info, at, (jax.vmap(report) if self.program.chunk else report)(done))
        return PhaseState(sums, rows, client_records, store, notes, client_info)

    def run(self, client_records: Tree, store: Tree) -> PhaseState:
        """Run all clients of this device."""
        chunk, count = self.program.chunk, self.round_inputs.count
        trips = (count + chunk - 1) // chunk if chunk else count
        return jax.lax.fori_loop(
            jnp.int32(0), trips, lambda i, p: self.step(i, client_records, p), self.start(client_records, store)
        )


@scope(STATES)
def _get_rows(table: Tree, rows: Array) -> Tree:
    return jax.tree.map(lambda a: a.at[rows].get(mode="clip"), table)


def _put_rows(table: Tree, rows: Array, values: Tree) -> Tree:
    return jax.tree.map(lambda t, v: t.at[rows].set(v.astype(t.dtype)), table, values)
