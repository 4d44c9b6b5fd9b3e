"""Streaming of samples from the host, and of client states from disk, for one block of rounds at a time.

A compiled block addresses samples and client states by row. Before a block, the rows of its clients are gathered into
small arrays on each device, and the block's ``offset`` and ``slot`` are renumbered on the host; afterwards the states
are written back. A block ends before the round whose rows would not fit.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import tree
from fedrax.background_thread import run_in_background
from fedrax.data.federation import allocate_aligned
from fedrax.errors import FedraxError
from fedrax.host_memory import release_pages
from fedrax.simulation.executors.compiled import RoundState
from fedrax.simulation.placement.client_states import moved_rows
from fedrax.simulation.placement.memory_budget import MemoryBudget
from fedrax.simulation.placement.planner import Planner, round_up_size
from fedrax.simulation.placement.row_file import RowFile
from fedrax.simulation.round import RoundInputs
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS

_BLOCK_BYTES = 64 << 20
"""Bytes of one block's samples, and of its states, on an accelerator or on all CPU devices together. Longer blocks save
nothing: copying takes far longer than starting a block, and larger arrays cause page faults in every block.
"""


# -- where things lie ----------------------------------------------------------------------------------------------


def choose_placement(settings: Settings, samples: Tree, store_bytes: int, budget: MemoryBudget) -> tuple[bool, bool]:
    """(samples are streamed, client states are spilled), for ``store_bytes`` of states on each device.

    What is to lie on the devices is spent from the ``budget``.
    """
    copied = budget.device_bytes(samples)
    if jax.process_count() > 1:
        if settings.samples == "streamed" or settings.states == "spilled":
            raise FedraxError("samples are streamed and client states spilled by a single process only")
        budget.reserve(copied + store_bytes)
        return False, False
    countable = all(len(a) <= np.iinfo(np.int32).max for a in jax.tree.leaves(samples))
    streamed = not (budget.has_room(copied) and countable)
    if settings.samples != "auto":
        streamed = settings.samples == "streamed"
    budget.reserve(0 if streamed else copied)
    spilled = not budget.has_room(store_bytes)
    if settings.states != "auto":
        spilled = settings.states == "spilled" and store_bytes > 0
    budget.reserve(0 if spilled else store_bytes)
    return streamed, spilled


# -- rows of a block -----------------------------------------------------------------------------------------------


def unique_entries(values: np.ndarray, count: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The distinct entries of ``values`` [B, D, K] on each device, sorted, and the index of each entry in them.

    For round b and device d only the first ``count[b, d]`` entries are used.
    """
    used = np.arange(values.shape[2]) < count[..., None]
    found, positions = [], np.zeros_like(values)
    for d in range(values.shape[1]):
        entries, inverse = np.unique(values[:, d][used[:, d]], return_inverse=True)
        found.append(entries)
        positions[:, d][used[:, d]] = inverse
    return found, positions


def rounds_that_fit(values: np.ndarray, count: np.ndarray, rows: np.ndarray | None, room: int) -> int:
    """How many of the first rounds fit into ``room`` rows on every device; at least one.

    ``rows[v]`` is the number of rows of entry v, one if None; an entry in several rounds is counted once.
    """
    used = np.arange(values.shape[2]) < count[..., None]
    need = np.zeros(len(values), np.int64)
    for d in range(values.shape[1]):
        entries, first = np.unique(values[:, d][used[:, d]], return_index=True)
        round_of = np.nonzero(used[:, d])[0][first]
        new = np.bincount(round_of, None if rows is None else rows[entries], len(values))
        need = np.maximum(need, new.cumsum().astype(np.int64))
    return max(1, int(np.searchsorted(need, room, "right")))


def _budget(mesh: Mesh) -> int:
    shared = mesh.devices.flat[0].platform == "cpu"
    return _BLOCK_BYTES // mesh.devices.size if shared else _BLOCK_BYTES


class SampleStreamer:
    """Samples on the host; each device receives those of its own clients of a block."""

    def __init__(self, samples: Tree, planner: Planner, mesh: Mesh, longest: int):
        self.samples, self.mesh = samples, mesh
        self.sizes, self.offsets = planner.sampler.sizes, planner.offsets
        leaves, largest = jax.tree.leaves(samples), int(self.sizes.max())
        fits = _budget(mesh) // max(1, sum(a.nbytes // len(a) for a in leaves))
        # Room for the longest block from the start: growing means compiling again, and on CPU unused room is free.
        self.room = max(largest, min(fits, len(leaves[0]), longest * planner.positions * largest))
        self.x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def rounds_that_fit(self, inputs: RoundInputs, rounds: int) -> int:
        """How many of the first rounds have room."""
        return rounds_that_fit(inputs.assignments.client[:rounds], inputs.count[:rounds], self.sizes, self.room)

    def place(self, inputs: RoundInputs, rounds: int) -> tuple[RoundInputs, Tree]:
        """The block with the ``offset`` of each client's samples on its device, and the samples."""
        clients, positions = unique_entries(inputs.assignments.client[:rounds], inputs.count[:rounds])
        ends = [np.cumsum(self.sizes[mine]) for mine in clients]
        starts = [end - self.sizes[mine] for end, mine in zip(ends, clients, strict=True)]
        need = max(int(end[-1]) if len(end) else 0 for end in ends)
        self.room = max(self.room, round_up_size(need))
        offset = np.zeros_like(inputs.assignments.offset)
        for d, start in enumerate(starts):
            if len(start):
                offset[:rounds, d] = start[positions[:, d]]
        rows = [
            np.repeat(self.offsets[mine] - start, self.sizes[mine]) + np.arange(len(start) and end[-1])
            for mine, start, end in zip(clients, starts, ends, strict=True)
        ]
        with jax.enable_x64(self.x64):  # a thread of its own has its own setting
            samples = jax.tree.map(lambda a: self._gather(a, rows), self.samples)
        return inputs._replace(assignments=inputs.assignments._replace(offset=offset)), samples

    def _gather(self, array: np.ndarray, rows: list[np.ndarray]) -> jax.Array:
        dtype, parts = jax.dtypes.canonicalize_dtype(array.dtype), []
        for device, mine in zip(self.mesh.devices.flat, rows, strict=True):
            # new memory each time, which CPU devices take over; zeros in the unused room cost nothing there
            part = allocate_aligned((self.room, *array.shape[1:]), dtype, np.zeros)
            if dtype == array.dtype:
                np.take(array, mine, axis=0, out=part[: len(mine)], mode="clip")
            else:
                part[: len(mine)] = np.take(array, mine, axis=0)
            parts.append(jax.device_put(part, device))
        release_pages(array)
        shape = (self.room * len(parts), *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self.mesh, P(CLIENT_AXIS)), parts)


# -- client states on disk -----------------------------------------------------------------------------------------


class StateSpill:
    """Client states on disk, one file for each leaf; the rows of a block are copied to the devices."""

    def __init__(self, initial: Tree, planner: Planner, mesh: Mesh, longest: int, directory: Path | None):
        self.capacity, self.devices = planner.capacity, mesh.devices.size
        self.sharding = NamedSharding(mesh, P(CLIENT_AXIS))
        rows = self.capacity * self.devices
        self.files = jax.tree.map(lambda a: RowFile(directory, rows, np.asarray(a)), initial)
        fits = _budget(mesh) // max(1, tree.num_bytes(initial))
        largest = planner.max_stateful_clients
        # Room for any round of the run, and of others: no block, seed or number of rounds recompiles.
        self.room = max(largest, min(fits, planner.sampler.num_clients, longest * largest))
        room = lambda file: np.zeros((self.devices, self.room, *file.shape[1:]), file.dtype)  # noqa: E731
        self._tables = jax.tree.map(room, self.files)

    def rounds_that_fit(self, inputs: RoundInputs, rounds: int) -> int:
        """How many of the first rounds have room."""
        return rounds_that_fit(inputs.assignments.slot[:rounds], inputs.count[:rounds], None, self.room)

    def place(self, inputs: RoundInputs, rounds: int) -> tuple[RoundInputs, list[np.ndarray]]:
        """The block with the ``slot`` of each client on its device, and the rows of each device."""
        found, positions = unique_entries(inputs.assignments.slot[:rounds], inputs.count[:rounds])
        slot = np.zeros_like(inputs.assignments.slot)
        slot[:rounds] = positions
        return inputs._replace(assignments=inputs.assignments._replace(slot=slot)), [
            mine + d * self.capacity for d, mine in enumerate(found)
        ]

    def read(self, rows: list[np.ndarray]) -> Tree:
        """Read each device's ``rows`` into a store on the devices."""

        def one(file: RowFile, table: np.ndarray) -> np.ndarray:
            for d, mine in enumerate(rows):
                file.read(mine, table[d, : len(mine)])
            return table.reshape(-1, *file.shape[1:])

        # The devices copy the tables, and have done so before the next block fills them again.
        return jax.device_put(jax.tree.map(one, self.files, self._tables), self.sharding, may_alias=False)

    def write(self, rows: list[np.ndarray], store: Tree) -> None:
        """Write each device's ``rows`` from the store on the devices to disk."""

        def one(file: RowFile, leaf: Any) -> None:
            parts = [s.data for s in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]
            for mine, part in zip(rows, parts, strict=True):
                file.write(mine, np.asarray(part)[: len(mine)])

        jax.tree.map(one, self.files, store)

    def fill(self, leaves: Tree, old: np.ndarray, new: np.ndarray) -> None:
        """Copy rows ``old`` (ascending) of saved leaves to rows ``new``.

        Rows with the initial record take no disk space.
        """

        def one(file: RowFile, leaf: Any) -> None:
            start = file.initial.reshape(-1).view(np.uint8)
            for mine, values in moved_rows(leaf, old, new):
                changed = (values.reshape(len(values), file.initial.size).view(np.uint8) != start).any(1)
                file.write(mine[changed], values[changed])

        jax.tree.map(one, self.files, leaves)


# -- blocks, one ahead ---------------------------------------------------------------------------------------------


class RoundBlock(NamedTuple):
    """A block of rounds with what it needs."""

    inputs: RoundInputs
    rounds: int
    samples: Tree | None
    """On the devices; None where they always are."""
    rows: list[np.ndarray]
    """The rows of client states on disk, for each device."""


class BlockLoader:
    """Plans blocks of rounds, and loads and stores their streamed samples and spilled states."""

    def __init__(self, planner: Planner, longest: int, streamer: SampleStreamer | None, spill: StateSpill | None):
        self.planner, self.longest, self.streamer, self.spill = planner, longest, streamer, spill
        self._most = longest
        self._ahead: Future[RoundBlock] | None = None

    def next_block(self, first: int, rounds: int) -> RoundBlock:
        """The block that begins with round ``first``: the prefetched one, otherwise one of up to ``rounds`` rounds."""
        ahead, self._ahead = self._ahead, None
        return self._make(first, rounds) if ahead is None else ahead.result()

    def prefetch(self, first: int, rounds: int) -> None:
        """Start to prefetch the next block in the background, if that saves time."""
        if self.streamer is not None:
            self._ahead = run_in_background(self._make, first, rounds)

    def _make(self, first: int, rounds: int) -> RoundBlock:
        rounds = asked = min(rounds, self._most)
        inputs, samples, rows = self.planner.block(first, rounds, self.longest), None, []
        for part in (self.streamer, self.spill):
            rounds = rounds if part is None else part.rounds_that_fit(inputs, rounds)
        self._most = min(self.longest, 2 * (rounds if rounds < asked else self._most))  # draw few cohorts in vain
        if self.spill is not None:
            inputs, rows = self.spill.place(inputs, rounds)
        if self.streamer is not None:
            inputs, samples = self.streamer.place(inputs, rounds)
        return RoundBlock(inputs, rounds, samples, rows)

    def load_states(self, carry: RoundState, block: RoundBlock) -> RoundState:
        """The carry with the client states at the start of a block."""
        return carry if self.spill is None else carry._replace(store=self.spill.read(block.rows))

    def save_states(self, carry: RoundState, block: RoundBlock) -> RoundState:
        """The carry after a block, with spilled states written to disk."""
        if self.spill is None:
            return carry
        self.spill.write(block.rows, carry.store)
        return carry._replace(store=())

    def store(self, carry: RoundState) -> Tree:
        """All client states: arrays, or :class:`RowFile` s."""
        return carry.store if self.spill is None else self.spill.files

    def close(self, failed: bool) -> None:
        """Wait for the background thread; states on disk stay readable unless the run has failed."""
        if self._ahead is not None:
            wait([self._ahead])
        if failed and self.spill is not None:
            for file in jax.tree.leaves(self.spill.files):
                file.close()
