"""Data-parallel clients: all devices share the batches of some clients, where whole clients would leave devices idle.

Five clients on two devices take as long as three on each. :func:`clients_to_share` finds on the host which clients of a
round are better shared: each device computes the gradients of its share of every batch
(:mod:`fedrax.xla.microbatch`). :class:`DataParallelRunner` runs these clients after all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedrax import tree
from fedrax.simulation.executors.phase import PhaseRunner, PhaseState
from fedrax.simulation.round import client_inputs, run_client
from fedrax.tree import Tree
from fedrax.xla import AGGREGATE, CLIENT_AXIS, STATES, scope

_WAITING = 0.05
"""Share of the time of data-parallel work in which devices wait for each other, and the least gain that pays."""


def clients_to_share(assigned: Sequence[Sequence[int]], cost: Sequence[float], speed: float) -> set[int]:
    """The clients of a round, by position in the cohort, that all devices share; mostly none.

    Args:
        assigned: the positions of each device.
        cost: the work of each position.
        speed: the speed of all devices together, in units of one device's.

    Returns:
        The positions that are shared.
    """
    load = [sum(cost[p] for p in positions) for positions in assigned]
    best, least = (1 - _WAITING) * max(load), sum(load) / len(load)
    if speed <= 1 or least >= best:
        return set()
    left = [sorted(positions, key=lambda p: (-cost[p], p)) for positions in assigned]
    taken: list[int] = []
    together, chosen = 0.0, 0
    while any(left) and together < best:
        d = max((d for d in range(len(left)) if left[d]), key=load.__getitem__)
        # of the device that would be last, the heaviest that is not too heavy
        taken.append(left[d].pop(next((i for i, p in enumerate(left[d]) if cost[p] <= load[d] - least), -1)))
        load[d] -= cost[taken[-1]]
        together += (1 + _WAITING) * cost[taken[-1]] / speed
        if max(load) + together < best:
            best, chosen = max(load) + together, len(taken)
    return set(taken[:chosen])


class DataParallelRunner(PhaseRunner):
    """A phase on one of several devices that share the batches of some clients.

    ``keys``, ``everyone`` and ``shared_order`` are those of the positions of all devices, concatenated by device.
    """

    def __init__(self, *inputs: Any):
        super().__init__(*inputs)
        program, algorithm, p, message, statistics, samples, round_inputs, keys = inputs
        self.me, self.room = lax.axis_index(CLIENT_AXIS), round_inputs.assignments.client.shape[0]
        assignments, counts = jax.tree.map(
            partial(lax.all_gather, axis_name=CLIENT_AXIS), (round_inputs.assignments, round_inputs.count)
        )
        shared = assignments.data_parallel & (jnp.arange(self.room) < counts[:, None])
        self.together = shared.sum(dtype=jnp.int32)
        self.alone = round_inputs.count - shared[self.me].sum(dtype=jnp.int32)
        self.shared_order = jnp.flatnonzero(shared, size=shared.size, fill_value=0).astype(jnp.int32)
        everyone = round_inputs._replace(assignments=jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), assignments))
        self.one = lambda client_records, k: run_client(
            program,
            p,
            algorithm,
            message,
            client_records,
            statistics,
            samples,
            client_inputs(program, everyone, keys, k),
        )

    def step(self, i: Array, before: Tree, progress: PhaseState) -> PhaseState:
        """Run client i of this device, or after its own clients the next shared one, whose result one device stores."""
        is_shared = i >= self.alone
        k = jnp.where(is_shared, self.shared_order[i - self.alone], self.me * self.room + i)
        owner = k // self.room
        mine = owner == self.me
        at = jnp.where(mine, k % self.room, 0)  # another device's: position 0 keeps its value
        where_mine = lambda new, old: jax.tree.map(lambda a, b: jnp.where(mine, a.astype(b.dtype), b), new, old)  # noqa: E731
        put = lambda table, row, value: tree.set_row(table, row, where_mine(value, tree.row(table, row)))  # noqa: E731
        with scope(STATES):
            source, row = (progress.store, self.round_inputs.assignments.slot[at]) if self.first else (before, at)
            begins = lax.cond(is_shared, lambda t: _of_device(owner, t), lambda t: t, tree.row(source, row))
        after = self.after(progress, at, self.one(begins, k), jnp.bool_(True), put, put)
        with scope(AGGREGATE):
            sums, notes = where_mine((after.sums, after.notes), (progress.sums, progress.notes))
        return after._replace(sums=sums, notes=notes)

    def run(self, client_records: Tree, store: Tree) -> PhaseState:
        """This device's own clients, then the shared ones."""
        trips = self.alone + self.together
        return lax.fori_loop(
            jnp.int32(0), trips, lambda i, p: self.step(i, client_records, p), self.start(client_records, store)
        )


def _of_device(owner: Array, values: Tree) -> Tree:
    """The values of one device, on all of them."""
    return jax.tree.map(lambda a: lax.all_gather(a, CLIENT_AXIS)[owner], values)
