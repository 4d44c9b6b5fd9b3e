"""Who gets what: rules that divide a data set's training rows among clients.

Each rule is a frozen dataclass with ``assign(dataset, seed) -> Partition``. The same data set, rule and seed
give the same partition; a rule that cannot be met ends in a FedraxError instead of searching for ever.
No rule leaves a client without rows. Labels are the data set's ``partition_by`` where it has one.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fedrax.data.dataset import Dataset, numpy_generator
from fedrax.errors import FedraxError, known_fields_only

DIRICHLET_ATTEMPTS = 100
MAX_TABLE = 100_000_000  # entries of a clients x classes table: 800 MB of int64


class Partition(NamedTuple):
    """Rows of the training set, grouped by client (compressed sparse rows, no object per client).

    Client i owns rows ``indices[offsets[i]:offsets[i + 1]]``; ``indices`` is int64 [total], ``offsets`` int64 [N + 1].
    """

    indices: np.ndarray
    offsets: np.ndarray


class Partitioner(Protocol):
    """What every rule of this file is."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        ...


@dataclass(frozen=True)
class Iid:
    """Shuffle the rows and deal them evenly: sizes differ by one row at most."""

    clients: int = 100
    """Number of clients."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        sizes = _even_sizes(_num_rows(dataset, self.clients), self.clients)
        rng = numpy_generator(seed, "partition")
        return Partition(rng.permutation(len(dataset.train.y)), _offsets(sizes))


@dataclass(frozen=True)
class Shards:
    """Sort by label, cut into ``clients * per_client`` shards, deal each client ``per_client`` random ones.

    McMahan et al. 2017 (FedAvg), section 3, use two shards a client. One shard a client is "sorted by label,
    divided evenly" (LoSAC, section 5.1.4). Sizes differ by one row at most.
    """

    clients: int = 100
    """Number of clients."""
    per_client: int = 2
    """Shards that each client gets."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        if self.per_client < 1:
            raise FedraxError(f"a client needs at least 1 shard, not {self.per_client}.")
        total, shards = _num_rows(dataset, self.clients), self.clients * self.per_client
        if total < shards:
            raise FedraxError(
                f"{total} rows are too few for {shards} shards ({self.clients} clients x {self.per_client})."
            )
        rng = numpy_generator(seed, "partition")
        # Shards are dealt before they are cut: where their sizes differ by one, the client that holds a
        # shard decides its size, so that the clients' totals stay even.
        shard_of = rng.permutation(shards).reshape(self.clients, self.per_client)
        one_more = _even_sizes(total % shards, self.clients)
        sizes = np.empty(shards, np.int64)
        sizes[shard_of] = total // shards + (np.arange(self.per_client) < one_more[:, None])
        owner = np.empty(shards, np.int64)
        owner[shard_of] = np.arange(self.clients)[:, None]
        rows = _sorted_by_label(dataset, rng.permutation(total))
        return _grouped(rows, np.repeat(owner, sizes), self.clients)


@dataclass(frozen=True)
class Similarity:
    """Every client gets ``percent`` % i.i.d. rows; the rest is sorted by label and dealt in order.

    Karimireddy et al. 2020 (SCAFFOLD), section 7; EPISODE, section 5.1 (s %). Sizes differ by one at most.
    """

    clients: int = 100
    """Number of clients."""
    percent: float = 10.0
    """Share s of i.i.d. rows, 0 (sorted by label) to 100 (i.i.d.)."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        _check_percent(self.percent)
        total = _num_rows(dataset, self.clients)
        rows = numpy_generator(seed, "partition").permutation(total)
        mixed = round(total * self.percent / 100)
        sizes, mixed_sizes = _even_sizes(total, self.clients), _even_sizes(mixed, self.clients)
        clients = np.arange(self.clients)
        owner = np.concatenate([np.repeat(clients, mixed_sizes), np.repeat(clients, sizes - mixed_sizes)])
        rows = np.concatenate([rows[:mixed], _sorted_by_label(dataset, rows[mixed:])])
        return _grouped(rows, owner, self.clients)


@dataclass(frozen=True)
class Mix:
    """``percent`` % of the shuffled rows are sorted by label and dealt in order, the others stay i.i.d.

    LoSAC, section 5.2.1 (c %): larger is more heterogeneous. The complement of ``Similarity``.
    """

    clients: int = 100
    """Number of clients."""
    percent: float = 50.0
    """Share c of rows that are sorted by label, 0 (i.i.d.) to 100."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        _check_percent(self.percent)
        return Similarity(self.clients, 100 - self.percent).assign(dataset, seed)


@dataclass(frozen=True)
class DirichletClasses:
    """Each client draws its class mix from Dir(omega, ..., omega) and fills an even share of rows by it.

    GradMA, section 6.1 (omega = 1, 0.1, 0.01); Hsu et al. 2019, whose alpha is omega times the number of
    classes. Every row is dealt once, sizes differ by one row at most. Clients are served one after another,
    in random order; those who find a class sold out turn to what their mix says of the classes left.
    """

    clients: int = 100
    """Number of clients."""
    omega: float = 0.1
    """Concentration; smaller is more heterogeneous."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        _check_concentration("omega", self.omega)
        labels, num_classes = _class_labels(dataset, self.clients)
        rng = numpy_generator(seed, "partition")
        mix = rng.dirichlet(np.full(num_classes, self.omega), size=self.clients)
        missing = _even_sizes(len(labels), self.clients)
        stock = np.bincount(labels, minlength=num_classes)
        counts = np.zeros((self.clients, num_classes), np.int64)
        while missing.any():  # a pass fills every client or empties a class: num_classes passes at most
            wish = mix * (stock > 0)
            mass = wish.sum(axis=1, keepdims=True)
            wish = np.where(mass > 0, wish / np.where(mass > 0, mass, 1), stock / stock.sum())
            taken = rng.multinomial(missing, wish)
            for c in np.flatnonzero(taken.sum(axis=0) > stock):
                taken[:, c] = np.diff(np.minimum(np.cumsum(taken[:, c]), stock[c]), prepend=0)
            counts += taken
            stock -= taken.sum(axis=0)
            missing -= taken.sum(axis=1)
        return _deal(labels, rng.permutation(counts), rng)  # those served last are not the last clients


@dataclass(frozen=True)
class DirichletClients:
    """Each class is divided over the clients in proportions drawn from Dir(alpha, ..., alpha).

    Yurochkin et al. 2019; Li et al. 2022 (NIID-Bench). Labels and sizes are uneven. Draws again, at most 100 times,
    until every client has ``min_size`` rows, or ends in a FedraxError. The rounding of a class with fewer rows than
    there are clients begins at a place that is drawn: all such classes would go to the same clients otherwise.
    """

    clients: int = 100
    """Number of clients."""
    alpha: float = 0.5
    """Concentration; smaller is more heterogeneous."""
    min_size: int = 10
    """Fewest rows a client may have."""
    balanced: bool = False
    """A client that has its even share of rows gets none of the later classes (as NIID-Bench does)."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        _check_concentration("alpha", self.alpha)
        _check_min_size(self.min_size, self.clients, len(dataset.train.y))
        labels, num_classes = _class_labels(dataset, self.clients)
        rng = numpy_generator(seed, "partition")
        for _ in range(DIRICHLET_ATTEMPTS):
            counts = self._draw(np.bincount(labels, minlength=num_classes), rng)
            if counts.sum(axis=1).min() >= self.min_size:
                return _deal(labels, counts, rng)
        failed = f"none of {DIRICHLET_ATTEMPTS} draws gave each of {self.clients} clients {self.min_size} rows"
        remedy = "raise alpha, lower clients or min_size, or use dirichlet_classes"
        raise FedraxError(f"{failed} at alpha={self.alpha:g}; {remedy}.")

    def _draw(self, stock: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Rows of each class [C] for each client: int64 [N, C]."""
        counts = np.zeros((self.clients, len(stock)), np.int64)
        sizes = np.zeros(self.clients, np.int64)
        for c, available in enumerate(stock):
            share = rng.dirichlet(np.full(self.clients, self.alpha))
            if self.balanced:
                hungry = sizes * self.clients < stock.sum()
                share = share * hungry
                share = share / share.sum() if share.sum() > 0 else hungry / max(hungry.sum(), 1)
            start = rng.random() if 0 < available < self.clients else 0.5
            edges = np.floor(np.cumsum(share) * available + start).astype(np.int64)
            edges[-1] = available  # the cumulative sum ends at 1 only up to rounding
            counts[:, c] = np.diff(np.minimum(edges, available), prepend=0)
            sizes += counts[:, c]
        return counts


@dataclass(frozen=True)
class ClassesPerClient:
    """Each client holds exactly ``classes`` classes; each class is divided evenly among its holders.

    The "pathological" split of much of the literature (#C = k in NIID-Bench). Classes are dealt at random,
    the least used first, so that numbers of holders differ by one at most; sizes differ where class sizes do.
    """

    clients: int = 100
    """Number of clients."""
    classes: int = 2
    """Classes that each client holds."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        labels, num_classes = _class_labels(dataset, self.clients)
        stock = np.bincount(labels, minlength=num_classes)
        present = np.flatnonzero(stock)
        if not 1 <= self.classes <= len(present):
            raise FedraxError(f"a client can hold 1 .. {len(present)} classes of this data, not {self.classes}.")
        if self.clients * self.classes < len(present):
            raise FedraxError(
                f"{self.clients} clients of {self.classes} classes cannot hold all {len(present)} classes."
            )
        rng = numpy_generator(seed, "partition")
        counts = np.zeros((self.clients, num_classes), np.int64)
        used = np.zeros(len(present), np.int64)
        for client in range(self.clients):
            chosen = np.argsort(used + rng.random(len(present)))[: self.classes]
            used[chosen] += 1
            counts[client, present[chosen]] = 1
        for c in present:
            holders = rng.permutation(np.flatnonzero(counts[:, c]))
            if len(holders) > stock[c]:
                raise FedraxError(f"class {c} has {stock[c]} rows, too few for the {len(holders)} clients to hold it.")
            counts[holders, c] = _even_sizes(stock[c], len(holders))
        return _deal(labels, counts, rng)


@dataclass(frozen=True)
class LogNormal:
    """I.i.d. labels, uneven sizes: client i's share is proportional to exp(sigma z_i), z_i ~ N(0, 1).

    Every row is dealt, and every client gets ``min_size`` rows first.
    """

    clients: int = 100
    """Number of clients."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the sizes; 0 gives even sizes."""
    min_size: int = 1
    """Fewest rows a client may have."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        if not 0 <= self.sigma <= 100:
            raise FedraxError(f"sigma must lie in 0 .. 100, not {self.sigma}.")
        total = _num_rows(dataset, self.clients)
        _check_min_size(self.min_size, self.clients, total)
        rng = numpy_generator(seed, "partition")
        normal = rng.standard_normal(self.clients)
        weights = np.exp(self.sigma * (normal - normal.max()))  # no overflow, same proportions
        exact = weights / weights.sum() * (total - self.clients * self.min_size)
        sizes = np.floor(exact).astype(np.int64)
        left = total - self.clients * self.min_size - sizes.sum()
        sizes[np.argsort(sizes - exact, kind="stable")[:left]] += 1  # largest remainders
        return Partition(rng.permutation(total), _offsets(sizes + self.min_size))


@dataclass(frozen=True)
class Natural:
    """The clients the data came with: writers, subjects, devices, users.

    Clients follow the order of their numbers in the data; rows of clients that are left out stay unused.
    """

    clients: int | None = None
    """Take this many clients, drawn at random; all of them when not given."""
    min_size: int = 1
    """Leave out clients with fewer training rows."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Divide the training rows of ``dataset`` among clients, by random numbers of ``seed``."""
        if dataset.train_clients is None:
            raise FedraxError(f"data set {dataset.name!r} has no natural clients; choose another partition.")
        _, owner, sizes = np.unique(dataset.train_clients, return_inverse=True, return_counts=True)
        kept = np.flatnonzero(sizes >= self.min_size)
        wanted = len(kept) if self.clients is None else self.clients
        if not 1 <= wanted <= len(kept):
            raise FedraxError(
                f"data set {dataset.name!r} has {len(kept)} natural clients of {self.min_size} rows or more; "
                f"{wanted} of them cannot be taken."
            )
        kept = np.sort(numpy_generator(seed, "partition").permutation(kept)[:wanted])
        number = np.full(len(sizes), -1)
        number[kept] = np.arange(wanted)
        rows = np.flatnonzero(number[owner] >= 0)
        return _grouped(rows, number[owner[rows]], wanted)


PARTITIONS: dict[str, type] = {
    "iid": Iid,
    "shards": Shards,
    "similarity": Similarity,
    "mix": Mix,
    "dirichlet_classes": DirichletClasses,
    "dirichlet_clients": DirichletClients,
    "classes_per_client": ClassesPerClient,
    "lognormal": LogNormal,
    "natural": Natural,
}
for _rule in PARTITIONS.values():
    known_fields_only(_rule)


def _num_rows(dataset: Dataset, clients: int) -> int:
    """The number of training rows, checked to be at least one for each client."""
    total = len(dataset.train.y)
    if clients < 1:
        raise FedraxError(f"a federation needs at least 1 client, not {clients}.")
    if clients > total:
        raise FedraxError(f"{total} training rows are too few for {clients} clients.")
    return total


def _partition_labels(dataset: Dataset) -> np.ndarray:
    """The training labels [n], or what stands in place of them; FedraxError where a row has several."""
    if dataset.partition_by is not None:
        return dataset.partition_by
    if dataset.train.y.ndim > 1:
        raise FedraxError(
            f"data set {dataset.name!r} has labels of shape {dataset.train.y.shape[1:]} a row, but this partition "
            "goes by one label a row; use iid, lognormal or natural, or partition_by."
        )
    return dataset.train.y


def _class_labels(dataset: Dataset, clients: int) -> tuple[np.ndarray, int]:
    """Labels [n] and the number of classes, for the rules that deal out classes."""
    _num_rows(dataset, clients)
    by, classes = dataset.partition_by, dataset.num_classes
    if by is not None:
        classes = None if by.dtype.kind == "f" else int(by.max()) + 1
    if classes is None:
        what = "classes (a regression)" if by is None else "kinds to be partitioned by but fractions"
        raise FedraxError(f"data set {dataset.name!r} has no {what}, which this partition needs.")
    if clients * classes > MAX_TABLE:
        raise FedraxError(
            f"{clients} clients x {classes} classes are too many for this partition "
            f"(at most {MAX_TABLE:,} entries); iid, shards, similarity and mix have no such limit."
        )
    return _partition_labels(dataset).astype(np.int64), classes


def _check_concentration(name: str, value: float) -> None:
    if not 1e-4 <= value <= 1e6:
        raise FedraxError(f"{name} must lie in 0.0001 .. 1000000, not {value}.")


def _check_percent(percent: float) -> None:
    if not 0 <= percent <= 100:
        raise FedraxError(f"percent must lie in 0 .. 100, not {percent}.")


def _check_min_size(min_size: int, clients: int, total: int) -> None:
    if min_size < 1:
        raise FedraxError(f"min_size must be at least 1, not {min_size}.")
    if clients * min_size > total:
        raise FedraxError(f"{total} training rows are too few for {clients} clients of {min_size} rows or more.")


def _even_sizes(total: int, parts: int) -> np.ndarray:
    """``parts`` sizes that add up to ``total``, the first ``total % parts`` of them one larger."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _sorted_by_label(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """``rows`` in the order of their labels; rows of one label keep their order."""
    return rows[np.argsort(_partition_labels(dataset)[rows], kind="stable")]


def _grouped(rows: np.ndarray, owner: np.ndarray, clients: int) -> Partition:
    """The partition in which ``rows[k]`` belongs to client ``owner[k]``."""
    return Partition(rows[np.argsort(owner, kind="stable")], _offsets(np.bincount(owner, minlength=clients)))


def _deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Partition:
    """Give each client as many random rows of each class as ``counts`` [N, C] says; all rows are used."""
    clients, num_classes = counts.shape
    rows = rng.permutation(len(labels))
    owner = np.repeat(np.tile(np.arange(clients), num_classes), counts.T.ravel())
    return _grouped(rows[np.argsort(labels[rows], kind="stable")], owner, clients)
