"""Who takes part in which round, how much of the work each does, and which device each runs on.

Everything here is drawn on the host from counters (seed, stream, round), so any round can be drawn on its own:
a resumed run, another algorithm or another number of devices sees the same cohorts.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from fedrax.contract.local import LocalSGD
from fedrax.errors import FedraxError
from fedrax.simulation.settings import Availability, FixedList, Script, Settings, WeightedBySamples

_COHORT, _STRAGGLER = 1, 2


def generator(seed: int, stream: int, round: int) -> np.random.Generator:
    """An independent generator for each (seed, stream, round)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (stream << 40) | round], np.uint64)))


class Sampler:
    """Draws cohorts and stragglers."""

    def __init__(self, settings: Settings, sizes: np.ndarray, script: Script | None = None):
        self.settings, self.sizes, self.num_clients = settings, sizes, len(sizes)
        self.given = None if script is None or script.cohorts is None else [np.asarray(c) for c in script.cohorts]
        self.trace: list[np.ndarray] | None = None
        if self.given is not None:
            self._check_given(self.given)
        elif settings.cohort_size > self.num_clients:
            raise FedraxError(f"cannot sample {settings.cohort_size} clients a round: there are {self.num_clients}")
        elif isinstance(settings.participation, Availability):
            self.trace = read_trace(settings.participation, self.num_clients)
        elif isinstance(settings.participation, FixedList):
            self.trace = [check_list(settings.participation.clients, self.num_clients)]
        self.empty = np.flatnonzero(sizes == 0)
        if len(self.empty):
            raise FedraxError(f"client {self.empty[0]} has no samples ({len(self.empty)} such clients)")

    def _check_given(self, cohorts: list[np.ndarray]) -> None:
        if len(cohorts) < self.settings.rounds:
            raise FedraxError(f"{len(cohorts)} cohorts are given for {self.settings.rounds} rounds")
        for r, cohort in enumerate(cohorts):
            numbers = cohort.ndim == 1 and cohort.size and cohort.dtype.kind in "iu"
            inside = numbers and cohort.min() >= 0 and cohort.max() < self.num_clients
            if not inside or len(np.unique(cohort)) != cohort.size:
                raise FedraxError(
                    f"the given cohort of round {r} must hold different clients from 0 to {self.num_clients - 1}"
                )

    @property
    def largest(self) -> int:
        """The most clients any round can have."""
        if self.given is not None:
            return max(len(cohort) for cohort in self.given[: self.settings.rounds])
        if self.trace is not None:
            return min(self.settings.cohort_size, max(len(row) for row in self.trace))
        return self.settings.cohort_size

    @property
    def varying(self) -> bool:
        """Whether rounds can differ in their number of clients."""
        if self.given is not None:
            return len({len(cohort) for cohort in self.given[: self.settings.rounds]}) > 1
        return self.trace is not None and len({min(len(row), self.settings.cohort_size) for row in self.trace}) > 1

    def cohort(self, round: int) -> np.ndarray:
        """The clients of a round, int64 [S], sorted unless given."""
        if self.given is not None:
            return self.given[round].astype(np.int64)
        rng, size = generator(self.settings.seed, _COHORT, round), self.settings.cohort_size
        if self.trace is not None:
            available = self.trace[round % len(self.trace)]
            return np.sort(rng.choice(available, min(size, len(available)), replace=False))
        if isinstance(self.settings.participation, WeightedBySamples):
            return np.sort(rng.choice(self.num_clients, size, replace=False, p=self.sizes / self.sizes.sum()))
        return np.sort(rng.choice(self.num_clients, size, replace=False))

    def work(self, round: int, size: int) -> np.ndarray:
        """The share of the local work each client of the cohort does: float [S] in (0, 1]."""
        rng, share = generator(self.settings.seed, _STRAGGLER, round), np.ones(size)
        slow = rng.choice(size, int(np.floor(self.settings.stragglers * size + 0.5)), replace=False)
        share[slow] = 1 - rng.random(len(slow))
        return share


def check_list(clients: tuple[int, ...], num_clients: int) -> np.ndarray:
    """The clients of a fixed list, sorted."""
    if not clients or len(set(clients)) < len(clients) or min(clients) < 0 or max(clients) >= num_clients:
        raise FedraxError(f"the list of clients that take part must hold different clients from 0 to {num_clients - 1}")
    return np.sort(np.array(clients, np.int64))


def read_trace(participation: Availability, num_clients: int) -> list[np.ndarray]:
    """The available clients of each round of a trace file."""
    import polars as pl

    path = participation.trace
    try:
        table = pl.read_csv(path, infer_schema_length=None).select("round", "client")
    except (OSError, pl.exceptions.PolarsError) as error:
        raise FedraxError(f"the availability trace {path} is not a CSV with columns round, client: {error}") from error
    if not all(kind.is_integer() for kind in table.dtypes) or sum(table.null_count().row(0)):
        raise FedraxError(f"the availability trace {path} must hold whole numbers only")
    rounds, clients = np.unique(table.to_numpy(), axis=0).T
    if not len(rounds) or rounds.min() < 0 or clients.min() < 0 or clients.max() >= num_clients:
        raise FedraxError(f"the availability trace {path} must name rounds from 0 and clients 0 to {num_clients - 1}")
    named, starts = np.unique(rounds, return_index=True)
    gaps = np.flatnonzero(named != np.arange(len(named)))
    if len(gaps):
        raise FedraxError(f"the availability trace {path} has no client in round {gaps[0]}")
    return np.split(clients, starts[1:])


def check_blocks(script: Script | None, sampler: Sampler, local: LocalSGD | None) -> None:
    """Refuse given blocks that do not fit the rounds, cohorts and local steps."""
    if script is None or script.blocks is None:
        return
    if local is None or local.blocks is None or local.steps is None:
        raise FedraxError("blocks are given, but the algorithm has no local.blocks and local.steps")
    blocks, need = np.asarray(script.blocks), (sampler.settings.rounds, sampler.largest, local.steps)
    if blocks.ndim != 3 or blocks.dtype.kind not in "iu" or any(a < b for a, b in zip(blocks.shape, need, strict=True)):
        raise FedraxError(f"the given blocks must be whole numbers [rounds, clients, steps] of shape {need} or more")
    if blocks.min() < 0 or blocks.max() >= local.blocks:
        raise FedraxError(f"the given blocks must be from 0 to {local.blocks - 1}")


class Block(NamedTuple):
    """The clients of up to B consecutive rounds as arrays over (round, device, place on the device).

    In places beyond a device's clients ``client`` holds num_clients and ``weight`` zero; the rest means nothing
    there. A field is None where nothing needs it.
    """

    round: np.ndarray  # int32 [B]
    cohort_size: np.ndarray  # float32 [B]
    count: np.ndarray  # int32 [B, D]
    client: np.ndarray  # int32 [B, D, K]
    slot: np.ndarray  # int32 [B, D, K]
    offset: np.ndarray  # int32 [B, D, K]
    size: np.ndarray  # int32 [B, D, K]
    weight: np.ndarray  # float [B, D, K]
    work: np.ndarray | None  # float32 [B, D, K]
    blocks: np.ndarray | None  # int32 [B, D, K, T]


class Planner:
    """Spreads each round's clients over devices, by their work, and gives clients with state a row to keep it.

    A client's row lies on one device, allotted when it first takes part, so state never moves between devices.
    """

    def __init__(
        self,
        sampler: Sampler,
        offsets: np.ndarray,
        *,
        devices: int,
        stateful: bool,
        by_samples: bool,
        chunk: int = 1,
        script: Script | None = None,
    ):
        self.sampler, self.offsets, self.devices, self.stateful = sampler, offsets, devices, stateful
        self.by_samples, self.chunk = by_samples, chunk
        self.blocks = None if script is None or script.blocks is None else np.asarray(script.blocks)
        self.straggling = sampler.settings.stragglers > 0
        share = -(-sampler.largest // devices)
        even = not by_samples and not self.straggling
        places = sampler.largest if stateful else share if even else min(sampler.largest, 2 * share)
        self.places = -(-places // chunk) * chunk
        self.home: dict[int, tuple[int, int]] = {}
        self.rows = [0] * devices
        self.planned = 0
        self._assigned: dict[int, list[list[int]]] = {}
        if stateful:  # homes depend on all rounds before, so lay them out once, from the start
            for r in range(sampler.settings.rounds):
                self._assigned[r] = self._assign(r)

    @property
    def capacity(self) -> int:
        """Rows of client state a device needs."""
        return max(1, *self.rows) if self.devices > 1 else max(1, self.rows[0])

    @property
    def most_places(self) -> int:
        """The most clients any device has in a round; for planners of clients with state."""
        return max(len(places) for assigned in self._assigned.values() for places in assigned)

    def owners(self) -> np.ndarray:
        """The client of each row of the state store, all devices' one after another; int32, -1 where none."""
        owners = np.full(self.capacity * self.devices if self.stateful else 0, -1, np.int32)
        for client, (device, row) in self.home.items():
            owners[device * self.capacity + row] = client
        return owners

    def _assign(self, round: int) -> list[list[int]]:
        """For each device the places (in the cohort) of its clients, heaviest first to the least loaded."""
        cohort = self.sampler.cohort(round)
        cost = self.sampler.sizes[cohort].astype(float) if self.by_samples else np.ones(len(cohort))
        if self.straggling:
            cost = cost * self.sampler.work(round, len(cohort))
        chosen: list[list[int]] = [[] for _ in range(self.devices)]
        load = [0.0] * self.devices
        newcomers = []
        for place, client in enumerate(cohort.tolist()):
            if client in self.home:
                device = self.home[client][0]
                chosen[device].append(place)
                load[device] += cost[place]
            else:
                newcomers.append(place)
        heap: list[tuple[float, int]] = [(load[d], d) for d in range(self.devices)]
        heapq.heapify(heap)
        for place in sorted(newcomers, key=lambda p: (-cost[p], p)):
            popped = []
            while len(chosen[heap[0][1]]) >= self.places and len(heap) > 1:
                popped.append(heapq.heappop(heap))
            used, device = heapq.heappop(heap)
            chosen[device].append(place)
            heapq.heappush(heap, (used + float(cost[place]), device))
            for entry in popped:
                heapq.heappush(heap, entry)
            if self.stateful:
                self.home[int(cohort[place])] = (device, self.rows[device])
                self.rows[device] += 1
        if self.chunk > 1:  # clients side by side wait for the slowest of them: put those of like work together
            return [sorted(places, key=lambda p: (-cost[p], p)) for places in chosen]
        return [sorted(places) for places in chosen]

    def block(self, first: int, rounds: int, length: int) -> Block:
        """Rounds ``first`` to ``first + rounds``, in arrays of ``length`` rounds."""
        s, dims = self.sampler, (length, self.devices, self.places)
        num_clients, spare = s.num_clients, self.capacity
        out = Block(
            round=np.arange(first, first + length, dtype=np.int32),
            cohort_size=np.ones(length, np.float32),
            count=np.zeros(dims[:2], np.int32),
            client=np.full(dims, num_clients, np.int32),
            slot=np.full(dims, spare, np.int32),
            offset=np.zeros(dims, np.int32),
            size=np.full(dims, int(s.sizes[0]), np.int32),
            weight=np.zeros(dims, s.settings.dtype),
            work=np.ones(dims, np.float32) if self.straggling else None,
            blocks=None if self.blocks is None else np.zeros((*dims, self.blocks.shape[-1]), np.int32),
        )
        for b in range(rounds):
            self._fill(out, b, first + b)
        return out

    def _fill(self, out: Block, b: int, round: int) -> None:
        s = self.sampler
        cohort = s.cohort(round)
        assigned = self._assigned[round] if self.stateful else self._assign(round)
        weight = s.sizes[cohort].astype(float) if s.settings.weights == "samples" else np.ones(len(cohort))
        weight /= weight.sum()
        work = s.work(round, len(cohort)) if self.straggling else None
        out.cohort_size[b] = len(cohort)
        for d, places in enumerate(assigned):
            n = len(places)
            clients = cohort[places]
            out.count[b, d] = n
            out.client[b, d, :n] = clients
            out.offset[b, d, :n] = self.offsets[clients]
            out.size[b, d, :n] = s.sizes[clients]
            out.weight[b, d, :n] = weight[places]
            if self.stateful:
                out.slot[b, d, :n] = [self.home[int(c)][1] for c in clients]
            if out.work is not None and work is not None:
                out.work[b, d, :n] = work[places]
            if out.blocks is not None and self.blocks is not None:
                out.blocks[b, d, :n] = self.blocks[round][places]
