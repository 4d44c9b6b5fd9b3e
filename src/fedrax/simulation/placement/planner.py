"""The assignment of a round's clients to devices, and of client states to rows of the devices' stores."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fedrax.contract.client_data import ClientAssignment
from fedrax.participation.cohort_sampler import CohortSampler
from fedrax.simulation.executors.data_parallel import clients_to_share
from fedrax.simulation.round import RoundInputs

_SMALL_STORE = 64 << 20
"""Bytes of the stores of all devices up to which each store has a row for every client."""
_LOOKED_AT = 32
"""Number of simulated rounds that decide whether sharing batches between devices is enabled."""


def round_up_size(number: int) -> int:
    """Round up to one of eight numbers per power of two, so that few sizes occur and few programs are compiled."""
    step = 1 << max(0, number.bit_length() - 4)
    return -(-number // step) * step


def rows_per_device(sampler: CohortSampler, devices: int, row_bytes: int, uneven: bool) -> int:
    """Rows for client records on each device, independent of the seed, so that another seed causes no recompilation.

    If that takes little memory, every device has a row for every client, otherwise for the clients that will
    participate. Several devices have spare rows, because clients are not distributed evenly. uneven: clients have
    different amounts of work.
    """
    clients = sampler.num_clients
    if clients * row_bytes * devices <= _SMALL_STORE:
        return clients
    clients = min(clients, round_up_size(sampler.most_clients))
    spare = clients // (8 if uneven else 32)
    return clients if devices == 1 else -(-(clients + spare) // devices)


class Planner:
    """Assigns the clients of each round to devices by their amount of work, and client records to rows of the store.

    The row of a client is allocated on one device when it first participates, so state never moves between devices.
    """

    def __init__(
        self,
        sampler: CohortSampler,
        offsets: np.ndarray,
        *,
        devices: int,
        stateful: bool,
        by_samples: bool,
        row_bytes: int = 0,
        given: Mapping[str, np.ndarray] | None = None,
        dtype: str = "float32",
    ):
        """row_bytes: of what a client keeps. given: see :func:`fedrax.simulation.validate.scripted_work`."""
        self.sampler, self.offsets, self.devices, self.stateful = sampler, offsets, devices, stateful
        self.by_samples, self.given = by_samples, dict(given or {})
        self.chunk = 1
        """Number of vectorized clients on a device."""
        self.straggling = sampler.stragglers > 0
        self.data_parallel_speed: float | None = None
        """Speedup when all devices share the batches of a client; None: they never do."""
        share = -(-sampler.largest // devices)
        even = not by_samples and not self.straggling
        self.positions = sampler.largest if stateful else share if even else min(sampler.largest, 2 * share)
        self._row_bytes, self._dtype = row_bytes, dtype
        self.capacity = rows_per_device(sampler, devices, row_bytes, not even)
        self.home: dict[int, tuple[int, int]] = {}
        self._used = [0] * devices
        if stateful and sampler.adaptive:  # cohorts are not known yet: every client has a row
            for client in range(sampler.num_clients):
                self.home[client] = (client % devices, client // devices)
            self.capacity = max(self.capacity, -(-sampler.num_clients // devices))
        elif stateful:  # homes depend on all rounds before, so lay them out once, from the start
            for r in range(sampler.rounds):
                self._assign(r, sampler.cohort(r))
                if len(self.home) == sampler.num_clients:
                    break
            self.capacity = max(self.capacity, *self._used)  # of a seed that is one in a million

    def set_chunk(self, clients: int) -> None:
        """Set the number of vectorized clients on a device."""
        self.chunk, self.positions = clients, -(-self.positions // clients) * clients

    @property
    def max_stateful_clients(self) -> int:
        """Maximal number of clients with state on a device in a round; the same for almost every seed."""
        # Homes fall as if by chance: four deviations above an even share, or where sizes are too unlike a doubling.
        share = self.sampler.largest / self.devices
        spread = share * (1 - 1 / self.devices) * (1 - self.sampler.largest / self.sampler.num_clients)
        room = int(np.ceil(share) + 4 * np.sqrt(spread))
        if self.sampler.adaptive:
            return self.positions
        cohorts = ((r, self.sampler.cohort(r)) for r in range(self.sampler.rounds))
        most = max(len(positions) for r, cohort in cohorts for positions in self._assign(r, cohort))
        while most > room:
            room *= 2
        return min(room, self.positions)

    def rows(self) -> dict[int, int]:
        """The row of each client that participates, counted over all devices."""
        return {client: device * self.capacity + row for client, (device, row) in self.home.items()}

    def owners(self) -> np.ndarray:
        """The client of each row of the stores of all devices; int32, -1 for unused rows."""
        owners = np.full(self.capacity * self.devices if self.stateful else 0, -1, np.int32)
        for client, row in self.rows().items():
            owners[row] = client
        return owners

    def _assign(self, round: int, cohort: np.ndarray) -> list[list[int]]:
        """For each device, the positions of its clients in the cohort.

        A client with a home device runs there. The others are assigned to the least loaded device, largest work first;
        those with state have their home there from then on.
        """
        cost = self._cost(round, cohort)
        chosen: list[list[int]] = [[] for _ in range(self.devices)]
        load = [0.0] * self.devices
        newcomers = []
        for position, client in enumerate(cohort.tolist()):
            if client in self.home:
                device = self.home[client][0]
                chosen[device].append(position)
                load[device] += cost[position]
            else:
                newcomers.append(position)
        heap: list[tuple[float, int]] = [(load[d], d) for d in range(self.devices)]
        heapq.heapify(heap)
        for position in sorted(newcomers, key=lambda p: (-cost[p], p)):
            popped = []
            while self._full(heap[0][1], chosen) and len(heap) > 1:
                popped.append(heapq.heappop(heap))
            used, device = heapq.heappop(heap)
            chosen[device].append(position)
            heapq.heappush(heap, (used + float(cost[position]), device))
            for entry in popped:
                heapq.heappush(heap, entry)
            if self.stateful:
                self.home[int(cohort[position])] = (device, self._used[device])
                self._used[device] += 1
        if self.chunk > 1:  # clients side by side wait for the slowest of them: put those of like work together
            return [sorted(positions, key=lambda p: (-cost[p], p)) for positions in chosen]
        return [sorted(positions) for positions in chosen]

    def _cost(self, round: int, cohort: np.ndarray) -> np.ndarray:
        """Amount of work of each client, float [S]."""
        cost = self.sampler.sizes[cohort].astype(float) if self.by_samples else np.ones(len(cohort))
        return cost * self.sampler.work(round, len(cohort)) if self.straggling else cost

    def join(self, speed: float) -> int:
        """Enable sharing of batches with speedup ``speed`` if it helps in any of the rounds of a fixed seed.

        The seed is the same for all runs, so that the compiled program depends on clients and settings only. Returns
        the number of devices, or 0 if sharing does not help.
        """
        self.data_parallel_speed = speed if speed > 1 else None
        if self.data_parallel_speed and not self._like(_LOOKED_AT)._ever_data_parallel(speed):
            self.data_parallel_speed = None
        return self.devices if self.data_parallel_speed else 0

    def _like(self, rounds: int) -> Planner:
        """A planner for so many rounds of a fixed seed; with given cohorts at most for all of them."""
        other = self.sampler.for_rounds(rounds)
        kinds = {"devices": self.devices, "stateful": self.stateful, "by_samples": self.by_samples}
        return Planner(other, self.offsets, row_bytes=self._row_bytes, **kinds)

    def _ever_data_parallel(self, speed: float) -> bool:
        if self.sampler.adaptive:
            return False
        self.data_parallel_speed = speed
        cohorts = ((r, self.sampler.cohort(r)) for r in range(self.sampler.rounds))
        return any(self._shared_positions(r, cohort, self._assign(r, cohort)) for r, cohort in cohorts)

    def _shared_positions(self, round: int, cohort: np.ndarray, assigned: list[list[int]]) -> set[int]:
        if self.data_parallel_speed is None:
            return set()
        return clients_to_share(assigned, self._cost(round, cohort).tolist(), self.data_parallel_speed)

    def idle_share(self, round: int) -> float:
        """Idle time of the devices until the slowest one finishes, relative to the total work of the round."""
        cohort = self.sampler.cohort(round)
        assigned, cost = self._assign(round, cohort), self._cost(round, cohort)
        shared = self._shared_positions(round, cohort, assigned)
        load = [sum(cost[p] for p in positions if p not in shared) for positions in assigned]
        return float((len(load) * max(load) - sum(load)) / cost.sum()) if len(cohort) else 0.0

    def _full(self, device: int, chosen: list[list[int]]) -> bool:
        """Whether a device has no free position in this round, or no free row."""
        return len(chosen[device]) >= self.positions or (self.stateful and self._used[device] >= self.capacity)

    def block(self, first: int, rounds: int, length: int) -> RoundInputs:
        """Rounds ``first`` to ``first + rounds``, in arrays of ``length`` rounds."""
        s, dims = self.sampler, (length, self.devices, self.positions)
        room: Any = lambda value, dtype=np.int32: np.full(dims, value, dtype)  # noqa: E731
        given = {n: np.zeros((*dims, *a.shape[2:]), np.int32) for n, a in self.given.items()}
        positions = ClientAssignment(
            client=room(s.num_clients),
            slot=room(self.capacity),
            offset=room(0),
            size=room(int(s.sizes[0])),
            weight=room(0, self._dtype),
            work=room(1, np.float32) if self.straggling else None,
            data_parallel=None if self.data_parallel_speed is None else room(False, bool),
            **given,
        )
        numbers = np.arange(first, first + length, dtype=np.int32)
        out = RoundInputs(numbers, np.ones(length, np.float32), np.zeros(dims[:2], np.int32), positions)
        for b in range(rounds):
            self._fill(out, b, first + b)
        return out

    def _fill(self, out: RoundInputs, b: int, round: int) -> None:
        s = self.sampler
        cohort = s.cohort(round)
        assigned = self._assign(round, cohort)
        shared = self._shared_positions(round, cohort, assigned)
        assigned = [sorted(positions, key=shared.__contains__) for positions in assigned]  # these at the end
        found: dict[str, Any] = {
            "client": cohort,
            "offset": self.offsets[cohort],
            "size": s.sizes[cohort],
            "weight": s.weights(round, cohort),
            **{name: array[round] for name, array in self.given.items()},
        }
        if self.stateful:
            found["slot"] = np.array([self.home[c][1] for c in cohort.tolist()], np.int32)
        if self.straggling:
            found["work"] = s.work(round, len(cohort))
        if self.data_parallel_speed is not None:
            found["data_parallel"] = np.isin(np.arange(len(cohort)), list(shared))
        out.cohort_size[b] = len(cohort)
        for d, chosen in enumerate(assigned):
            out.count[b, d] = len(chosen)
            for name, values in found.items():
                getattr(out.assignments, name)[b, d, : len(chosen)] = values[chosen]


# -- parts of a plan -----------------------------------------------------------------------------------------------


def device_round(inputs: RoundInputs, r: int, d: int) -> RoundInputs:
    """Round ``r`` on device ``d``, without these two axes."""
    recorded = None if inputs.recorded is None else inputs.recorded[r]
    positions = jax.tree.map(lambda a: a[r, d], inputs.assignments)
    return RoundInputs(inputs.round[r], inputs.cohort_size[r], inputs.count[r, d], positions, recorded)


def merge_devices(inputs: RoundInputs, r: int, rows: int, samples: int = 0) -> RoundInputs:
    """Round ``r`` of all devices, as for one device: slots index the concatenated stores of ``rows`` rows each.

    If each device has its own samples, offsets index the concatenation of ``samples`` samples for each device.
    """
    shares = []
    for d in range(inputs.count.shape[1]):
        positions = jax.tree.map(lambda a, d=d: a[r, d, : inputs.count[r, d]], inputs.assignments)
        shares.append(
            positions._replace(
                slot=positions.slot + d * rows, offset=positions.offset + d * samples, data_parallel=None
            )
        )
    merged = jax.tree.map(lambda *parts: np.concatenate(parts), *shares)
    return RoundInputs(inputs.round[r], inputs.cohort_size[r], inputs.count[r].sum(), merged)
