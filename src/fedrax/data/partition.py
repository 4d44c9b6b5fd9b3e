"""Partitions of a data set's training rows over clients: i.i.d., label skew, quantity skew, natural clients.

Each partition is a frozen dataclass with ``assign(dataset, seed) -> Partition``. The same data set, parameters and
seed give the same partition. Every client gets at least one row; parameters that the data cannot satisfy raise
FedraxError. Where a data set has ``partition_by``, it replaces the labels.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fedrax.config.arguments import checked_fields
from fedrax.data.dataset import Dataset, numpy_generator
from fedrax.errors import FedraxError

DIRICHLET_ATTEMPTS = 100
"""Draws of `DirichletClients` before it raises."""
MAX_TABLE = 100_000_000
"""Most entries of a table of clients and classes: 800 MB of int64."""


class Partition(NamedTuple):
    """Training rows grouped by client: client i owns rows ``indices[offsets[i]:offsets[i + 1]]``.

    Example:
        >>> partition = fedrax.data.Iid(clients=10).assign(fedrax.data.load("digits"), seed=0)
        >>> len(partition.offsets)
        11
    """

    indices: np.ndarray
    """Row numbers of the training set, int64 [total], client by client."""
    offsets: np.ndarray
    """Start of each client in ``indices``, and the end of the last, int64 [N + 1]."""


class Partitioner(Protocol):
    """Protocol of a partition: any object with ``assign``, user code included.

    Example:
        >>> class FirstRows:
        ...     def assign(self, dataset, seed):
        ...         return fedrax.data.Partition(np.arange(30), np.array([0, 10, 30]))
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), FirstRows(), seed=0)
        >>> federation.sizes.tolist()
        [10, 20]
    """

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
        ...


@dataclass(frozen=True)
class Iid:
    """I.i.d. partition: shuffled rows, divided evenly. Client sizes differ by at most one row.

    Example:
        >>> partition = fedrax.data.Iid(clients=4)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> federation.sizes.tolist()
        [361, 361, 360, 360]
    """

    clients: int = 100
    """Number of clients."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
        sizes = _even_sizes(_num_rows(dataset, self.clients), self.clients)
        rng = numpy_generator(seed, "partition")
        return Partition(rng.permutation(len(dataset.train.y)), _offsets(sizes))


@dataclass(frozen=True)
class Shards:
    """Label skew by shards: rows sorted by label are cut into shards, and each client gets ``per_client`` at random.

    There are ``clients * per_client`` shards of equal size. McMahan et al. 2017 (FedAvg), section 3, use two shards
    per client. One shard per client is the partition "sorted by label, divided evenly" (LoSAC, section 5.1.4). Client
    sizes differ by at most one row.

    Example:
        >>> partition = fedrax.data.Shards(clients=10, per_client=2)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> bool((fedrax.data.label_counts(federation) > 0).sum(axis=1).max() <= 4)
        True
    """

    clients: int = 100
    """Number of clients."""
    per_client: int = 2
    """Number of shards per client; fewer shards mean fewer classes per client."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
        if self.per_client < 1:
            raise FedraxError(f"a client needs at least 1 shard, not {self.per_client}.")
        total, shards = _num_rows(dataset, self.clients), self.clients * self.per_client
        if total < shards:
            raise FedraxError(
                f"{total} rows are too few for {shards} shards ({self.clients} clients x {self.per_client})."
            )
        rng = numpy_generator(seed, "partition")
        # Shards are assigned before they are cut. Where shard sizes differ by one, the sizes depend on the client, so
        # that client sizes differ by at most one.
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
    """Each client gets ``percent`` % i.i.d. rows; the other rows are sorted by label and divided in that order.

    Karimireddy et al. 2020 (SCAFFOLD), section 7; EPISODE, section 5.1 (s %). Client sizes differ by at most one row.

    Example:
        >>> partition = fedrax.data.Similarity(clients=10, percent=0)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> bool(fedrax.data.measure_heterogeneity(federation).total_variation > 0.7)
        True
    """

    clients: int = 100
    """Number of clients."""
    percent: float = 10.0
    """Percentage s of i.i.d. rows, from 0 (sorted by label) to 100 (i.i.d.)."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
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
    """``percent`` % of the rows are sorted by label and divided in that order; the others are i.i.d.

    LoSAC, section 5.2.1 (c %). Equal to `Similarity` with 100 - ``percent``.

    Example:
        >>> partition = fedrax.data.Mix(clients=10, percent=0)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> bool(fedrax.data.measure_heterogeneity(federation).total_variation < 0.2)
        True
    """

    clients: int = 100
    """Number of clients."""
    percent: float = 50.0
    """Percentage c of rows sorted by label, from 0 (i.i.d.) to 100 (most heterogeneous)."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
        _check_percent(self.percent)
        return Similarity(self.clients, 100 - self.percent).assign(dataset, seed)


@dataclass(frozen=True)
class DirichletClasses:
    """Dirichlet label skew with equal client sizes: client i draws class proportions from Dir(omega, ..., omega).

    GradMA, section 6.1 (omega = 1, 0.1, 0.01); Hsu et al. 2019, whose alpha is omega times the number of classes.
    Every row is assigned once, and client sizes differ by at most one row. Clients draw their rows in random order.
    When a class has no rows left, the client's proportions are renormalized over the remaining classes. In
    `DirichletClients`, whose concentration is alpha, each class draws proportions over clients instead: the two
    concentrations are not comparable.

    Example:
        >>> partition = fedrax.data.DirichletClasses(clients=4, omega=0.1)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> sorted(federation.sizes.tolist())
        [360, 360, 361, 361]
    """

    clients: int = 100
    """Number of clients."""
    omega: float = 0.1
    """Concentration omega of the Dirichlet distribution; smaller is more heterogeneous."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
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
        return _deal(labels, rng.permutation(counts), rng)  # the order of drawing rows is not the clients' order


@dataclass(frozen=True)
class DirichletClients:
    """Dirichlet label and quantity skew: each class is divided over clients in proportions Dir(alpha, ..., alpha).

    Yurochkin et al. 2019; Li et al. 2022 (NIID-Bench). The draw is repeated, at most 100 times, until every client
    has ``min_size`` rows; after that it raises FedraxError. For a class with fewer rows than clients, the offset of
    the rounding is random. With a fixed offset all such classes would go to the same clients.

    Example:
        >>> partition = fedrax.data.DirichletClients(clients=10, alpha=0.5)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> bool(federation.sizes.min() >= 10)
        True
    """

    clients: int = 100
    """Number of clients."""
    alpha: float = 0.5
    """Concentration alpha of the Dirichlet distribution; smaller is more heterogeneous."""
    min_size: int = 10
    """Fewest rows a client may have."""
    balanced: bool = False
    """Whether a client with ``total / clients`` rows or more gets no rows of later classes, as in NIID-Bench."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
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
                below = sizes * self.clients < stock.sum()
                share = share * below
                share = share / share.sum() if share.sum() > 0 else below / max(below.sum(), 1)
            start = rng.random() if 0 < available < self.clients else 0.5
            edges = np.floor(np.cumsum(share) * available + start).astype(np.int64)
            edges[-1] = available  # the cumulative sum ends at 1 only up to rounding
            counts[:, c] = np.diff(np.minimum(edges, available), prepend=0)
            sizes += counts[:, c]
        return counts


@dataclass(frozen=True)
class ClassesPerClient:
    """Pathological non-IID partition: each client holds exactly ``classes`` classes (#C = k in NIID-Bench).

    Classes are assigned at random, those with the fewest clients first, so that the numbers of clients per class
    differ by at most one. Each class is divided evenly over its clients. Client sizes differ if class sizes do.

    Example:
        >>> partition = fedrax.data.ClassesPerClient(clients=10, classes=2)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> (fedrax.data.label_counts(federation) > 0).sum(axis=1).tolist()
        [2, 2, 2, 2, 2, 2, 2, 2, 2, 2]
    """

    clients: int = 100
    """Number of clients."""
    classes: int = 2
    """Number of classes per client."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
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
    """Quantity skew with i.i.d. labels: the size of client i is proportional to exp(sigma z_i), z_i ~ N(0, 1).

    Every row is assigned. Each client first gets ``min_size`` rows; the proportions apply to the rest.

    Example:
        >>> partition = fedrax.data.LogNormal(clients=10, sigma=1.0, min_size=5)
        >>> federation = fedrax.data.Federation.from_dataset(fedrax.data.load("digits"), partition, seed=0)
        >>> bool(federation.sizes.min() >= 5)
        True
    """

    clients: int = 100
    """Number of clients."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of the client sizes; 0 gives equal sizes."""
    min_size: int = 1
    """Fewest rows a client may have."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
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
    """The natural clients of the data: writers, subjects, devices, users.

    Clients keep the order of their numbers in the data. Rows of clients that are not selected are unused.

    Example:
        >>> dataset = fedrax.data.load("synthetic", devices=5)
        >>> federation = fedrax.data.Federation.from_dataset(dataset, fedrax.data.Natural(), seed=0)
        >>> federation.num_clients
        5
    """

    clients: int | None = None
    """Number of clients to sample without replacement; None selects all."""
    min_size: int = 1
    """Fewest training rows of a client; smaller clients are excluded."""

    def assign(self, dataset: Dataset, seed: int) -> Partition:
        """Assign the training rows to clients.

        Args:
            dataset: The data set to partition.
            seed: Seed of the assignment; the same seed gives the same partition.

        Returns:
            The rows of each client.
        """
        if dataset.train_clients is None:
            raise FedraxError(f"data set {dataset.name!r} has no natural clients; choose another partition.")
        _, owner, sizes = np.unique(dataset.train_clients, return_inverse=True, return_counts=True)
        kept = np.flatnonzero(sizes >= self.min_size)
        wanted = len(kept) if self.clients is None else self.clients
        if not 1 <= wanted <= len(kept):
            raise FedraxError(
                f"data set {dataset.name!r} has {len(kept)} natural clients of {self.min_size} rows or more; "
                f"{wanted} of them cannot be selected."
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
for _partition in PARTITIONS.values():
    checked_fields(_partition)


def _num_rows(dataset: Dataset, clients: int) -> int:
    """The number of training rows, checked to be at least one for each client."""
    total = len(dataset.train.y)
    if clients < 1:
        raise FedraxError(f"a federation needs at least 1 client, not {clients}.")
    if clients > total:
        raise FedraxError(f"{total} training rows are too few for {clients} clients.")
    return total


def _partition_labels(dataset: Dataset) -> np.ndarray:
    """The training labels [n], or ``partition_by``; raises FedraxError for several labels per row."""
    if dataset.partition_by is not None:
        return dataset.partition_by
    if dataset.train.y.ndim > 1:
        raise FedraxError(
            f"data set {dataset.name!r} has labels of shape {dataset.train.y.shape[1:]} per row, but this partition "
            "needs one label per row; use iid, lognormal or natural, or partition_by."
        )
    return dataset.train.y


def _class_labels(dataset: Dataset, clients: int) -> tuple[np.ndarray, int]:
    """Labels [n] and the number of classes, for partitions by class."""
    _num_rows(dataset, clients)
    by, classes = dataset.partition_by, dataset.num_classes
    if by is not None:
        classes = None if by.dtype.kind == "f" else int(by.max()) + 1
    if classes is None:
        what = "it is a regression" if by is None else "partition_by has floats"
        raise FedraxError(f"data set {dataset.name!r} has no classes, which this partition needs: {what}.")
    if clients * classes > MAX_TABLE:
        raise FedraxError(
            f"{clients} clients x {classes} classes are too many for this partition "
            f"(at most {MAX_TABLE:,} entries); iid, shards, similarity and mix have no such limit."
        )
    return _partition_labels(dataset).astype(np.int64), classes


def _check_concentration(name: str, value: float) -> None:
    """Raise FedraxError for a Dirichlet concentration outside the range of NumPy's sampler."""
    if not 1e-4 <= value <= 1e6:
        raise FedraxError(f"{name} must lie in 0.0001 .. 1000000, not {value}.")


def _check_percent(percent: float) -> None:
    """Raise FedraxError unless ``percent`` is a percentage."""
    if not 0 <= percent <= 100:
        raise FedraxError(f"percent must lie in 0 .. 100, not {percent}.")


def _check_min_size(min_size: int, clients: int, total: int) -> None:
    """Raise FedraxError unless every client can have ``min_size`` rows."""
    if min_size < 1:
        raise FedraxError(f"min_size must be at least 1, not {min_size}.")
    if clients * min_size > total:
        raise FedraxError(f"{total} training rows are too few for {clients} clients of {min_size} rows or more.")


def _even_sizes(total: int, parts: int) -> np.ndarray:
    """``parts`` sizes that sum to ``total``; the first ``total % parts`` are larger by one."""
    return total // parts + (np.arange(parts) < total % parts).astype(np.int64)


def _offsets(sizes: np.ndarray) -> np.ndarray:
    """Offsets [N + 1] of clients with the given sizes [N], int64."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _sorted_by_label(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """``rows`` sorted by label; the sort is stable."""
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
