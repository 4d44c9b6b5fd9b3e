"""Who takes part in which round, how much of the work each does, and which device each runs on.

Everything here is drawn on the host from counters (seed, stream, round), so any round can be drawn on its own:
a resumed run, another algorithm or another number of devices sees the same cohorts.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from fedrax.contract.client_data import Place
from fedrax.errors import FedraxError
from fedrax.simulation.arrivals import Arrivals, arrivals, read_durations
from fedrax.simulation.availability import check_list, read_trace
from fedrax.simulation.joining import to_join
from fedrax.simulation.round import Rounds
from fedrax.simulation.settings import (
    Asynchronous,
    Availability,
    FixedList,
    Poisson,
    Script,
    Settings,
    Turns,
    WeightedBySamples,
)

_COHORT, _STRAGGLER, _ARRIVALS, _TURNS = 1, 2, 3, 4
_SMALL_STORE = 64 << 20
"""Bytes of all devices' stores up to which each has a row for every client."""
_LOOKED_AT = 32
"""Rounds that show whether devices ever gain by working together."""


def generator(seed: int, stream: int, round: int) -> np.random.Generator:
    """An independent generator for each (seed, stream, round)."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (stream << 40) | round], np.uint64)))


class Sampler:
    """Draws cohorts and stragglers."""

    def __init__(self, settings: Settings, sizes: np.ndarray, script: Script | None = None):
        self.settings, self.sizes, self.num_clients = settings, sizes, len(sizes)
        self.given = None if script is None or script.cohorts is None else [np.asarray(c) for c in script.cohorts]
        self.trace: list[np.ndarray] | None = None
        self.from_file: list[np.ndarray] = []
        """What the settings name a file for."""
        if self.given is not None:
            self._check_given(self.given)
        elif settings.cohort_size > self.num_clients:
            raise FedraxError(f"cannot sample {settings.cohort_size} clients a round: there are {self.num_clients}")
        elif isinstance(settings.participation, Availability):
            self.trace = self.from_file = read_trace(settings.participation, self.num_clients)
        elif isinstance(settings.participation, FixedList):
            self.trace = [check_list(settings.participation.clients, self.num_clients)]
        elif isinstance(settings.participation, Turns):
            order = generator(settings.seed, _TURNS, 0).permutation(self.num_clients)
            self.trace = np.split(order, range(settings.cohort_size, self.num_clients, settings.cohort_size))
        self.arrivals: Arrivals | None = None
        if self.given is None and isinstance(settings.participation, Asynchronous):
            self.from_file = read_durations(settings.participation, self.num_clients)
            numbers, rng = (settings.rounds, settings.cohort_size), generator(settings.seed, _ARRIVALS, 0)
            self.arrivals = arrivals(settings.participation, self.from_file, *numbers, rng)
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
        if self.arrivals is not None:
            return max(len(cohort) for cohort in self.arrivals.cohorts)
        if self.trace is not None:
            return min(self.settings.cohort_size, max(len(row) for row in self.trace))
        return self._largest_by_chance if self.by_chance else self.settings.cohort_size

    @property
    def by_chance(self) -> bool:
        """Whether each client joins independently of the others."""
        return self.given is None and isinstance(self.settings.participation, Poisson)

    @property
    def _unequal(self) -> bool:
        """Whether some clients are likelier than others."""
        return isinstance(self.settings.participation, WeightedBySamples)

    @property
    def expected(self) -> float | None:
        """Clients a round has in the mean, where each joins by chance or when another has finished."""
        return float(self.settings.cohort_size) if self.by_chance or self.arrivals is not None else None

    @property
    def delays(self) -> dict[str, np.ndarray]:
        """``delay``, int32 [R, S], where uploads arrive late."""
        if self.arrivals is None:
            return {}
        made = np.zeros((self.settings.rounds, self.largest), np.int32)
        for row, own in zip(made, self.arrivals.delays, strict=True):
            row[: len(own)] = own
        return {"delay": made}

    @property
    def clock(self) -> np.ndarray | None:
        """Simulated seconds at which each round ends, [R]; None where nothing says how long clients take."""
        return None if self.arrivals is None else self.arrivals.clock

    def _size_by_chance(self, rng: np.random.Generator) -> int:
        """Of a Poisson cohort; drawn first, so that a round's size is known without its clients."""
        return int(rng.binomial(self.num_clients, self.settings.cohort_size / self.num_clients))

    @cached_property
    def _largest_by_chance(self) -> int:
        """Room for every round's cohort: of one size for all seeds, unless one draws what happens once in 1e12 rounds.

        P(more than k) <= exp(-S) (e S / k)^k for k > S, Chernoff's bound. The sizes themselves are looked at too, so
        that no cohort is ever cut.
        """
        mean, k = self.settings.cohort_size, self.settings.cohort_size + 1
        while k < self.num_clients and k * (np.log(mean / k) + 1) - mean > np.log(1e-12):
            k += 1
        drawn = (self._size_by_chance(generator(self.settings.seed, _COHORT, r)) for r in range(self.settings.rounds))
        return max(min(k, self.num_clients), *drawn)

    @property
    def most_clients(self) -> int:
        """Different clients that take part in all rounds together, of almost any seed.

        Exactly that where cohorts are given. Where each client is as likely as another, five deviations above the mean:
        (1 - S / N)^R of them never come, and that one does not makes it no likelier that another does not either.
        """
        rounds, clients = self.settings.rounds, self.num_clients
        if self.given is not None:
            return len(np.unique(np.concatenate(self.given[:rounds])))
        if self.trace is not None or self.arrivals is not None or self._unequal:
            return rounds * self.largest
        absent = (1 - self.settings.cohort_size / clients) ** rounds
        likely = int(clients * (1 - absent) + 5 * np.sqrt(clients * absent * (1 - absent))) + 1
        return min(likely, rounds * self.largest)

    @property
    def varying(self) -> bool:
        """Whether rounds can differ in their number of clients."""
        if self.given is not None:
            return len({len(cohort) for cohort in self.given[: self.settings.rounds]}) > 1
        if self.by_chance or self.arrivals is not None:
            return True
        return self.trace is not None and len({min(len(row), self.settings.cohort_size) for row in self.trace}) > 1

    def cohort(self, round: int) -> np.ndarray:
        """The clients of a round, int64 [S], sorted unless given; of a Poisson cohort maybe none."""
        if self.given is not None:
            return self.given[round].astype(np.int64)
        rng, size = generator(self.settings.seed, _COHORT, round), self.settings.cohort_size
        if self.arrivals is not None:
            return self.arrivals.cohorts[round]
        if self.trace is not None:
            available = self.trace[round % len(self.trace)]
            return np.sort(rng.choice(available, min(size, len(available)), replace=False))
        if self.by_chance:  # a uniform draw of a binomial number: the same as a coin for each client
            size = self._size_by_chance(rng)
        if self._unequal:
            return np.sort(rng.choice(self.num_clients, size, replace=False, p=self.sizes / self.sizes.sum()))
        return np.sort(rng.choice(self.num_clients, size, replace=False))

    def work(self, round: int, size: int) -> np.ndarray:
        """The share of the local work each client of the cohort does: float [S] in (0, 1]."""
        rng, share = generator(self.settings.seed, _STRAGGLER, round), np.ones(size)
        slow = rng.choice(max(size, 1), int(np.floor(self.settings.stragglers * size + 0.5)), replace=False)
        share[slow] = 1 - rng.random(len(slow))
        return share


def rounded_up(number: int) -> int:
    """To one of eight numbers between each power of two and the next."""
    step = 1 << max(0, number.bit_length() - 4)
    return -(-number // step) * step


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
        row_bytes: int = 0,
        given: Mapping[str, np.ndarray] | None = None,
    ):
        """row_bytes: of what a client keeps. given: see :func:`fedrax.simulation.given.given_work`."""
        self.sampler, self.offsets, self.devices, self.stateful = sampler, offsets, devices, stateful
        self.by_samples, self.chunk, self.given = by_samples, chunk, dict(given or {})
        self.straggling = sampler.settings.stragglers > 0
        self.joint_speed: float | None = None
        """How many times as fast as one device all of them together are with a client; None: they never join."""
        share = -(-sampler.largest // devices)
        even = not by_samples and not self.straggling
        places = sampler.largest if stateful else share if even else min(sampler.largest, 2 * share)
        self.places = -(-places // chunk) * chunk
        self.capacity = self._room(row_bytes)
        self.home: dict[int, tuple[int, int]] = {}
        self._used = [0] * devices
        self._assigned: dict[int, list[list[int]]] = {}
        if stateful:  # homes depend on all rounds before, so lay them out once, from the start
            for r in range(sampler.settings.rounds):
                self._assigned[r] = self._assign(r)
            self.capacity = max(self.capacity, *self._used)  # of a seed that is one in a million

    def _room(self, row_bytes: int) -> int:
        """Rows a device is to have for what clients keep: as many for every seed, so that no new one compiles anew.

        All clients on every device where that takes little memory; else as many as will take part. Devices that share
        them have some to spare, since they are not filled evenly.
        """
        clients = self.sampler.num_clients
        if clients * row_bytes * self.devices <= _SMALL_STORE:
            return clients
        clients = min(clients, rounded_up(self.sampler.most_clients))
        spare = clients // (8 if self.by_samples or self.straggling else 32)
        return clients if self.devices == 1 else -(-(clients + spare) // self.devices)

    @property
    def most_places(self) -> int:
        """Room for the clients with state that a device has in a round, as much for almost any seed."""
        # Homes fall as if by chance: four deviations above an even share, or where sizes are too unlike a doubling.
        share = self.sampler.largest / self.devices
        spread = share * (1 - 1 / self.devices) * (1 - self.sampler.largest / self.sampler.num_clients)
        room = int(np.ceil(share) + 4 * np.sqrt(spread))
        while any(len(places) > room for assigned in self._assigned.values() for places in assigned):
            room *= 2
        return min(room, self.places)

    def rows(self) -> dict[int, int]:
        """The row of each client that takes part, counted over all devices one after another."""
        return {client: device * self.capacity + row for client, (device, row) in self.home.items()}

    def owners(self) -> np.ndarray:
        """The client of each row of the state store, all devices' one after another; int32, -1 where none."""
        owners = np.full(self.capacity * self.devices if self.stateful else 0, -1, np.int32)
        for client, row in self.rows().items():
            owners[row] = client
        return owners

    def _assign(self, round: int) -> list[list[int]]:
        """For each device the places (in the cohort) of its clients, heaviest first to the least loaded."""
        cohort = self.sampler.cohort(round)
        cost = self._cost(round, cohort)
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
            while self._full(heap[0][1], chosen) and len(heap) > 1:
                popped.append(heapq.heappop(heap))
            used, device = heapq.heappop(heap)
            chosen[device].append(place)
            heapq.heappush(heap, (used + float(cost[place]), device))
            for entry in popped:
                heapq.heappush(heap, entry)
            if self.stateful:
                self.home[int(cohort[place])] = (device, self._used[device])
                self._used[device] += 1
        if self.chunk > 1:  # clients side by side wait for the slowest of them: put those of like work together
            return [sorted(places, key=lambda p: (-cost[p], p)) for places in chosen]
        return [sorted(places) for places in chosen]

    def _cost(self, round: int, cohort: np.ndarray) -> np.ndarray:
        """What each client has to do, float [S]."""
        cost = self.sampler.sizes[cohort].astype(float) if self.by_samples else np.ones(len(cohort))
        return cost * self.sampler.work(round, len(cohort)) if self.straggling else cost

    def join(self, speed: float) -> int:
        """Let devices that work together ``speed`` times as fast do so, if that helps in any of the first rounds.

        How many devices there are then, 0 where it does not.
        """
        self.joint_speed = speed if speed > 1 else None
        if self.joint_speed and not any(
            self._joined(r, self._placed(r)) for r in range(min(self.sampler.settings.rounds, _LOOKED_AT))
        ):
            self.joint_speed = None
        return self.devices if self.joint_speed else 0

    def _placed(self, round: int) -> list[list[int]]:
        return self._assigned[round] if self.stateful else self._assign(round)

    def _joined(self, round: int, assigned: list[list[int]]) -> set[int]:
        if self.joint_speed is None:
            return set()
        return to_join(assigned, self._cost(round, self.sampler.cohort(round)).tolist(), self.joint_speed)

    def _full(self, device: int, chosen: list[list[int]]) -> bool:
        """Whether a device has no place left in this round, or no row."""
        return len(chosen[device]) >= self.places or (self.stateful and self._used[device] >= self.capacity)

    def block(self, first: int, rounds: int, length: int) -> Rounds:
        """Rounds ``first`` to ``first + rounds``, in arrays of ``length`` rounds."""
        s, dims = self.sampler, (length, self.devices, self.places)
        room: Any = lambda value, dtype=np.int32: np.full(dims, value, dtype)  # noqa: E731
        given = {n: np.zeros((*dims, *a.shape[2:]), np.int32) for n, a in self.given.items()}
        places = Place(
            client=room(s.num_clients),
            slot=room(self.capacity),
            offset=room(0),
            size=room(int(s.sizes[0])),
            weight=room(0, s.settings.dtype),
            work=room(1, np.float32) if self.straggling else None,
            joined=None if self.joint_speed is None else room(False, bool),
            **given,
        )
        numbers = np.arange(first, first + length, dtype=np.int32)
        out = Rounds(numbers, np.ones(length, np.float32), np.zeros(dims[:2], np.int32), places)
        for b in range(rounds):
            self._fill(out, b, first + b)
        return out

    def _fill(self, out: Rounds, b: int, round: int) -> None:
        s = self.sampler
        cohort = s.cohort(round)
        assigned = self._placed(round)
        joined = self._joined(round, assigned)
        assigned = [sorted(places, key=joined.__contains__) for places in assigned]  # these at the end
        weight = s.sizes[cohort].astype(float) if s.settings.weights == "samples" else np.ones(len(cohort))
        found: dict[str, Any] = {
            "client": cohort,
            "offset": self.offsets[cohort],
            "size": s.sizes[cohort],
            "weight": weight / weight.sum(),
            **{name: array[round] for name, array in self.given.items()},
        }
        if self.stateful:
            found["slot"] = np.array([self.home[c][1] for c in cohort.tolist()], np.int32)
        if self.straggling:
            found["work"] = s.work(round, len(cohort))
        if self.joint_speed is not None:
            found["joined"] = np.isin(np.arange(len(cohort)), list(joined))
        out.cohort_size[b] = len(cohort)
        for d, chosen in enumerate(assigned):
            out.count[b, d] = len(chosen)
            for name, values in found.items():
                getattr(out.places, name)[b, d, : len(chosen)] = values[chosen]


# -- parts of a plan -----------------------------------------------------------------------------------------------


def share_of(xs: Rounds, r: int, d: int) -> Rounds:
    """Round ``r`` of device ``d``: without these two axes."""
    recorded = None if xs.recorded is None else xs.recorded[r]
    places = jax.tree.map(lambda a: a[r, d], xs.places)
    return Rounds(xs.round[r], xs.cohort_size[r], xs.count[r, d], places, recorded)


def whole_round(xs: Rounds, r: int, rows: int, samples: int = 0) -> Rounds:
    """Round ``r`` of all devices as if of one: slots count through a store of ``rows`` rows a device.

    And offsets through ``samples`` samples a device, where each has its own.
    """
    shares = []
    for d in range(xs.count.shape[1]):
        places = jax.tree.map(lambda a, d=d: a[r, d, : xs.count[r, d]], xs.places)
        shares.append(places._replace(slot=places.slot + d * rows, offset=places.offset + d * samples, joined=None))
    joined = jax.tree.map(lambda *parts: np.concatenate(parts), *shares)
    return Rounds(xs.round[r], xs.cohort_size[r], xs.count[r].sum(), joined)
