"""Federations: the samples of all clients in one array, and the rows of each client."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.dataset import (
    Dataset,
    Samples,
    as_samples,
    check_finite,
    check_matching_shapes,
    check_parts,
    column_names,
    count_classes,
    decode_bytes,
    encode_string_labels,
    is_missing,
    make_preprocess,
    numpy_generator,
    train_test_split,
)
from fedrax.data.partition import Natural, Partitioner
from fedrax.errors import FedraxError, describe_value
from fedrax.host_memory import is_memory_mapped
from fedrax.inputs import describe_inputs

if TYPE_CHECKING:
    from fedrax.contract.task import Preprocess

ALIGNMENT = 64
"""Bytes; on the CPU, JAX uses an array with this alignment without a copy."""


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Samples grouped by client, in arrays without an object per client.

    All arrays are C-contiguous and 64-byte aligned. `Federation.from_dataset` and `Federation.from_arrays` make one.

    Raises:
        FedraxError: Arrays do not match, or a number is NaN or infinite. Memory-mapped arrays are not read for this: a
            simulation reads them before its first round, except for training samples that it streams.

    Example:
        >>> x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
        >>> fedrax.data.Federation.from_arrays(x, y, client_ids=["a", "b", "b", "b"])
        Federation 'arrays': 2 clients of 1 to 3 training samples, 4 in all
          x float32 [2], y int32 []: 2 classes
          0 test samples
    """

    train: Samples
    """Training samples: client i owns rows ``offsets[i]:offsets[i + 1]``."""
    offsets: np.ndarray
    """Start of each client in ``train``, and the end of the last, int64 [N + 1]. Every client has a row."""
    test: Samples
    """Test samples; may be empty."""
    test_offsets: np.ndarray | None
    """The same for ``test``; None if test rows belong to no client. A client may have no test rows, and rows of
    clients outside the federation follow after ``test_offsets[N]``."""
    num_classes: int | None
    """Number of classes C; None for a regression."""
    mean: tuple[float, ...] = ()
    """Mean per channel (the last axis of x), after pixels are scaled by 1/255; empty for no normalization."""
    std: tuple[float, ...] = ()
    """Standard deviation per channel, on the same scale as ``mean``."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0 .. C - 1, or empty."""
    name: str = "arrays"
    """Name in reports and messages."""
    pixels: bool | str = False
    """Whether x holds image bytes (uint8), which models read scaled to [0, 1]; of several inputs the name of the one
    that does, of a tuple its number, such as "0"."""
    padding: int | None = None
    """Label of positions that loss and metrics ignore, where y is [n, ...]."""
    truth: np.ndarray | None = None
    """Parameters that generated the data, if known."""
    vocabulary: tuple[str, ...] = ()
    """Words of the tokens 2, 3, ...; token 0 is padding and token 1 any other word."""
    client_names: tuple[str, ...] = ()
    """Names of the clients [N], or empty."""
    notes: tuple[str, ...] = ()
    """What the reader did to the data, and its warnings."""
    pooled: tuple[str, ...] = ()
    """Statistics of the rows of all clients by which x was computed, which no differential privacy covers."""
    client_statistics: tuple[str, ...] = ()
    """Statistics of each client's rows by which its x was computed, which no privacy of single samples covers."""

    def __post_init__(self) -> None:
        _check_train_offsets(self.offsets, len(self.train.y), f"federation {self.name!r}")
        if self.test_offsets is not None:
            _check_offsets(self.test_offsets, len(self.test.y), f"federation {self.name!r}, test part")
            if len(self.test_offsets) != len(self.offsets):
                raise FedraxError(f"federation {self.name!r}: test_offsets are for another number of clients.")
            if not self.test_offsets[-1]:
                raise FedraxError(
                    f"federation {self.name!r}: test_offsets assign no test row to a client: leave them out if test"
                    " rows belong to no client."
                )
        if self.client_names and len(self.client_names) != self.num_clients:
            raise FedraxError(
                f"federation {self.name!r} has {self.num_clients} clients, but {len(self.client_names)} names for them."
            )
        check_parts(self, f"federation {self.name!r}")

    @staticmethod
    def _remedy(value: object) -> str:
        """How to make a federation of ``value``; empty if unknown."""
        if isinstance(value, Dataset):
            return "Federation.from_dataset divides it"
        return "Federation.from_arrays makes one of arrays" if isinstance(value, tuple | list | np.ndarray) else ""

    def __repr__(self) -> str:
        """Numbers of clients and samples, shapes and dtypes."""
        sizes, y = self.sizes, self.train.y
        rows = f"{sizes.min():,} to {sizes.max():,}" if sizes.min() < sizes.max() else f"{sizes.max():,}"
        kind = "targets" if self.num_classes is None else f"{self.num_classes} classes"
        owned = "" if self.test_offsets is None else ", each client's own"
        return (
            f"Federation {self.name!r}: {self.num_clients:,} clients of {rows} training samples, {len(y):,} in all\n"
            f"  {describe_inputs(self.train.x)}, y {y.dtype} {list(y.shape[1:])}: {kind}\n"
            f"  {len(self.test.y):,} test samples{owned}"
        )

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.offsets) - 1

    def client_name(self, client: int) -> str:
        """The client's name, or its number as a string if clients have no names.

        Args:
            client: Client number, 0 .. N - 1.

        Returns:
            The name.
        """
        return self.client_names[client] if self.client_names else str(client)

    @property
    def sizes(self) -> np.ndarray:
        """Number of training samples of each client, int64 [N]."""
        return np.diff(self.offsets)

    def preprocess(self, normalize: bool = True) -> "Preprocess | None":
        """The preprocessing of x for ``classification(model, ...)``: see `fedrax.contract.rescale`.

        Args:
            normalize: Subtract the mean and divide by the standard deviation, where they are known. If False, pixels
                are only scaled to [0, 1].

        Returns:
            A function of x, or None if x needs no preprocessing.
        """
        return make_preprocess(self.pixels, self.mean, self.std, normalize)

    @classmethod
    @checked_arguments
    def from_dataset(cls, dataset: Dataset, partition: Partitioner, seed: int, shuffle: bool = True) -> Self:
        """Partition the training rows of a data set over clients.

        Args:
            dataset: The data set.
            partition: A partition such as `DirichletClients`, or any object with the method ``assign``.
            seed: Seed of the partition and, independently, of the shuffle.
            shuffle: Put the rows of each client into random order, so that reading them in order is sampling without
                replacement. If False, they keep the partition's order.

        Returns:
            The federation. With `Natural`, clients have their own test rows and names where the data set has them.

        Raises:
            FedraxError: The data cannot satisfy the partition's parameters, or a user's partition returns rows or
                offsets out of range.
        """
        rows, offsets = _assign(partition, dataset, seed)
        test_rows, test_offsets, names = None, None, ()
        if isinstance(partition, Natural) and dataset.train_clients is not None:
            clients = dataset.train_clients[rows[offsets[:-1]]]
            names = tuple(dataset.client_names[i] for i in clients) if dataset.client_names else ()
            if dataset.test_clients is not None:
                test_rows, test_offsets = _group_test_rows(clients, dataset.test_clients)
        if shuffle:
            rows = rows[_shuffle_within_clients(offsets, seed)]
        where = f"data set {dataset.name!r}"
        test = dataset.test
        return cls(
            train=_take_finite(dataset.train, rows, f"{where}, training part"),
            offsets=aligned_array(offsets),
            test=_aligned_samples(test) if test_rows is None else _take_finite(test, test_rows, f"{where}, test part"),
            test_offsets=test_offsets,
            num_classes=dataset.num_classes,
            mean=dataset.mean,
            std=dataset.std,
            class_names=dataset.class_names,
            name=dataset.name,
            pixels=dataset.pixels,
            padding=dataset.padding,
            truth=dataset.truth,
            vocabulary=dataset.vocabulary,
            client_names=names,
            notes=dataset.notes,
            pooled=dataset.pooled,
            client_statistics=dataset.client_statistics,
        )

    @classmethod
    @checked_arguments
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client_ids: Any = None,
        *,
        offsets: np.ndarray | None = None,
        test: Any = None,
        test_client_ids: Any = None,
        test_offsets: np.ndarray | None = None,
        num_classes: int | None = None,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        class_names: tuple[str, ...] = (),
        name: str = "arrays",
        pixels: bool | str = False,
        padding: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> Self:
        """Make a federation from arrays and the client of each row.

        Give either ``client_ids`` or, for rows that are grouped by client already, ``offsets``. With ``offsets``,
        ``shuffle=False`` and aligned arrays of dtypes that JAX supports, nothing is copied.

        Args:
            x: Inputs [n, ...]; several inputs of a sample are a dictionary of such arrays, whose names are Python
                identifiers, or a tuple of them.
            y: Labels [n] or [n, ...]: integer classes, floating-point targets, or strings, which become classes in
                the order of ``class_names`` or, without them, in sorted order.
            client_ids: Client of each row [n], integers or strings. Clients are numbered in sorted order, and strings
                become their names.
            offsets: Start of each client, and the end of the last, [N + 1].
            test: Test samples (x, y); none by default.
            test_client_ids: Client of each test row; only with ``client_ids``.
            test_offsets: Start of each client in the test rows, [N + 1]; only with ``offsets``.
            num_classes: Number of classes of integer labels; by default the number of ``class_names``, or else the
                largest label plus one, unless most of these classes would be empty.
            mean: Mean per channel, after pixels are scaled by 1/255.
            std: Standard deviation per channel, on the same scale.
            class_names: Names of the classes.
            name: Name in reports and messages.
            pixels: Whether x holds image bytes (uint8); of several inputs the name of the one that does, of a tuple
                its number, such as "0".
            padding: Label of y [n, ...] that loss and metrics ignore.
            seed: Seed of the shuffle.
            shuffle: Put the rows of each client into random order, as in `from_dataset`.

        Returns:
            The federation.

        Raises:
            FedraxError: Arrays do not match, a client has no rows, labels are out of range, or a number is NaN or
                infinite (memory-mapped arrays are not read for this unless their rows are copied).
        """
        where = f"federation {name!r}"
        y, test, class_names = encode_string_labels(y, _check_test(test), class_names)
        train, tested = _train_and_test(x, y, test, padding, where)
        if train.y.dtype.kind == "i" and num_classes is None:
            num_classes = len(class_names) or count_classes([train.y, tested.y], padding, where)
        _check_owners(client_ids, offsets, test_client_ids, test_offsets)
        rows, test_rows, names = None, None, ()
        if client_ids is not None:
            clients, rows, offsets = _group_by_client(check_client_ids("client_ids", client_ids, len(train.y)))
            names = () if clients.dtype.kind in "iu" else tuple(map(str, clients))
            if test_client_ids is not None:
                test_ids = check_client_ids("test_client_ids", test_client_ids, len(tested.y), like=clients)
                test_rows, test_offsets = _group_test_rows(clients, test_ids)
        offsets = _check_train_offsets(np.asarray(offsets), len(train.y), f"federation {name!r}")
        if shuffle:
            rows = (np.arange(len(train.y)) if rows is None else rows)[_shuffle_within_clients(offsets, seed)]
        return cls(
            train=_aligned_samples(train) if rows is None else _take_finite(train, rows, f"{where}, training part"),
            offsets=aligned_array(offsets),
            test=_aligned_samples(tested)
            if test_rows is None
            else _take_finite(tested, test_rows, f"{where}, test part"),
            test_offsets=None if test_offsets is None else aligned_array(np.asarray(test_offsets, np.int64)),
            num_classes=num_classes,
            mean=mean,
            std=std,
            class_names=class_names,
            name=name,
            pixels=pixels,
            padding=padding,
            client_names=names,
        )


def _train_and_test(
    x: Any, y: Any, test: tuple[Any, Any] | None, padding: int | None, where: str
) -> tuple[Samples, Samples]:
    """Training samples, and test samples, which may be empty."""
    train = as_samples(x, y, padding)
    tested = train.map(lambda a: a[:0]) if test is None else as_samples(*test, padding)
    check_matching_shapes(train, tested, where)
    if not len(train.y):
        raise FedraxError("a federation needs training samples.")
    check_finite(train, f"{where}, training part", columns=column_names(x))
    check_finite(tested, f"{where}, test part", columns=() if test is None else column_names(test[0]))
    return train, tested


def _check_test(test: Any) -> Any:
    """``test`` if it is a pair (x, y), or None."""
    if test is None or (isinstance(test, tuple | list) and len(test) == 2):
        return test
    found = f"{len(test)} items" if isinstance(test, tuple | list) else describe_value(test)
    hint = ": test_client_ids are the clients of its rows" if isinstance(test, tuple | list) and len(test) == 3 else ""
    raise FedraxError(f"test must be a pair (x, y) of the test samples, not {found}{hint}.")


@checked_arguments
def aligned_array(array: np.ndarray) -> np.ndarray:
    """Return ``array`` if it is C-contiguous and 64-byte aligned, else an aligned copy.

    JAX uses such an array on the CPU without a copy. A memory-mapped .npy file is aligned already and is not read.

    Args:
        array: Any NumPy array.

    Returns:
        ``array`` or a copy.

    Example:
        >>> aligned = fedrax.data.aligned_array(np.arange(6).reshape(2, 3).T)
        >>> aligned.flags.c_contiguous, aligned.ctypes.data % 64
        (True, 0)
    """
    array = np.asarray(array)
    aligned = array.size == 0 or array.ctypes.data % ALIGNMENT == 0
    if aligned and array.flags.c_contiguous:
        return array
    copy = allocate_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype, make: Callable = np.empty) -> np.ndarray:
    """A 64-byte aligned array in memory allocated by ``make``."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = make(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _aligned_samples(samples: Samples) -> Samples:
    """Samples in aligned arrays."""
    return samples.map(aligned_array)


def take_rows(samples: Samples, rows: np.ndarray) -> Samples:
    """Rows of samples, gathered directly into aligned memory."""

    def take(array: np.ndarray) -> np.ndarray:
        out = allocate_aligned((len(rows), *array.shape[1:]), array.dtype)
        # mode="raise" would gather into a second buffer; rows come from a partition and are in range.
        return np.take(array, rows, axis=0, out=out, mode="clip")

    return samples.map(take)


def _take_finite(samples: Samples, rows: np.ndarray, where: str) -> Samples:
    """Rows of samples; of memory-mapped ones, which were not read before, FedraxError unless they are finite."""
    taken = take_rows(samples, rows)
    if any(map(is_memory_mapped, samples.arrays)):
        check_finite(taken, where, rows=rows)
    return taken


def _assign(partition: Partitioner, dataset: Dataset, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and offsets of a partition, checked, because it may be user code."""
    name, assigned = type(partition).__name__, partition.assign(dataset, seed)
    if not (isinstance(assigned, tuple) and len(assigned) == 2 and all(isinstance(a, np.ndarray) for a in assigned)):
        raise FedraxError(f"the partition {name} must return arrays, row numbers [n] and offsets [N + 1].")
    rows, offsets = assigned
    if (
        rows.ndim != 1
        or rows.dtype.kind not in "iu"
        or (rows.size and (rows.min() < 0 or rows.max() >= len(dataset.train.y)))
    ):
        raise FedraxError(f"the partition {name} must return rows of 0 to {len(dataset.train.y) - 1}, integers [n].")
    return rows, _check_train_offsets(offsets, len(rows), f"partition {name}")


def _shuffle_within_clients(offsets: np.ndarray, seed: int) -> np.ndarray:
    """A random order of the rows within each client."""
    owner = np.repeat(np.arange(len(offsets) - 1, dtype=np.float64), np.diff(offsets))
    return np.argsort(owner + numpy_generator(seed, "order").random(len(owner)), kind="stable")


def _check_owners(client_ids: object, offsets: object, test_client_ids: object, test_offsets: object) -> None:
    """Raise FedraxError unless clients are given by ids or by offsets, for training and test rows alike."""
    if (client_ids is None) == (offsets is None):
        raise FedraxError("give either client_ids or offsets, which assign rows to clients.")
    if test_client_ids is not None and (client_ids is None or test_offsets is not None):
        raise FedraxError("give test_client_ids only with client_ids, and test_offsets only with offsets.")


def check_client_ids(what: str, ids: Any, rows: int, like: np.ndarray | None = None) -> np.ndarray:
    """Client ids as integers or strings [rows], of the kind of ``like``; from arrays, table columns or lists."""
    given = (
        np.array(ids, object) if isinstance(ids, list | tuple) else np.asarray(ids)
    )  # NumPy would convert None to a string
    listed = given.ravel().tolist() if given.dtype.kind in "Of" else []
    missing = sum(map(is_missing, listed))
    if missing:
        raise FedraxError(
            f"{what} are missing in {missing:,} of {len(listed):,} rows: leave out rows that belong to no client."
        )
    if listed and all(map(_is_integer, listed)):
        given = _to_integers(what, listed).reshape(given.shape)
    elif listed and all(isinstance(value, bytes) for value in listed):
        given = np.array(listed, "S").reshape(given.shape)
    given = decode_bytes(given)
    kind = given.dtype.kind
    texts = kind in "UT" or (kind == "O" and all(isinstance(value, str) for value in listed))
    if given.shape != (rows,) or not (texts or kind in "iu"):
        found = _type_names(listed) if kind == "O" else given.dtype
        raise FedraxError(f"{what} must be one integer or string for each of {rows} rows, not {found} {given.shape}.")
    if like is not None and (like.dtype.kind in "iu") == texts:
        raise FedraxError(f"{what} must be {'integers' if texts else 'strings'}, as client_ids are.")
    return given


def _is_integer(value: object) -> bool:
    """Whether a value is an integer and no Boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _to_integers(what: str, values: list[Any]) -> np.ndarray:
    """Integers as int64, or uint64 if they exceed it."""
    low, high = min(values), max(values)
    kind = next((k for k in (np.int64, np.uint64) if np.iinfo(k).min <= low and high <= np.iinfo(k).max), None)
    if kind is None:
        raise FedraxError(f"{what} hold integers of more than 64 bits, {low} .. {high}: give strings.")
    return np.array(values, kind)


def _type_names(values: list[Any]) -> str:
    """The types of values, for messages."""
    return " and ".join(sorted({type(value).__name__ for value in values}))


def _group_by_client(client_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients [N] in sorted order, all rows grouped by them [n], and their offsets [N + 1]."""
    clients, owner, sizes = np.unique(client_ids, return_inverse=True, return_counts=True)
    return clients, np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])


def _group_test_rows(clients: np.ndarray, test_clients: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Test rows grouped by ``clients`` (sorted, [N]) and their offsets; rows of other clients come last.

    (None, None) if no test row belongs to any of the clients.
    """
    if clients.dtype.kind in "iu" and np.result_type(clients, test_clients).kind == "f":
        clients, test_clients = (
            clients.astype(object),
            test_clients.astype(object),
        )  # float64 cannot represent all of them
    number = np.minimum(np.searchsorted(clients, test_clients), len(clients) - 1)
    owner = np.where(clients[number] == test_clients, number, len(clients))
    sizes = np.bincount(owner, minlength=len(clients) + 1)[:-1]
    if not sizes.any():
        return None, None
    return np.argsort(owner, kind="stable"), aligned_array(np.concatenate([[0], np.cumsum(sizes)]))


def _check_train_offsets(offsets: np.ndarray, rows: int, where: str) -> np.ndarray:
    """``offsets`` as int64, if they assign all ``rows`` and give every client a row."""
    offsets = _check_offsets(offsets, rows, where)
    if offsets[-1] != rows:
        raise FedraxError(f"{where}: offsets end at {offsets[-1]}, not at the number of rows {rows}.")
    sizes = np.diff(offsets)
    if sizes.min() < 1:
        raise FedraxError(f"{where}: client {sizes.argmin()} has no training rows.")
    return offsets


def _check_offsets(offsets: np.ndarray, rows: int, where: str) -> np.ndarray:
    """``offsets`` as int64, if they are [N + 1] with N >= 1, start at 0, are nondecreasing and at most ``rows``."""
    fits = offsets.ndim == 1 and len(offsets) >= 2 and offsets.dtype.kind in "iu"
    if not fits or offsets[0] != 0 or (np.diff(offsets.astype(np.int64)) < 0).any() or offsets[-1] > rows:
        raise FedraxError(f"{where}: offsets must be N + 1 integers that rise from 0 to at most {rows}.")
    return offsets.astype(np.int64, copy=False)


def check_memory_mapped(federation: Federation, training: bool) -> None:
    """Raise FedraxError unless memory-mapped samples, which `Federation` does not read, are finite.

    Args:
        federation: The federation.
        training: Whether to read the training samples, too, and not only the test samples.
    """
    for part, samples, read in (("training", federation.train, training), ("test", federation.test, True)):
        if read and any(map(is_memory_mapped, samples.arrays)):
            check_finite(samples, f"federation {federation.name!r}, {part} part", memory_mapped=True)


@checked_arguments
def hold_out(federation: Federation, share: float, seed: int = 0) -> Federation:
    """Replace the test data by a validation split: a share of each client's training rows.

    Args:
        federation: The federation to split.
        share: Share of each client's rows, in (0, 1). Rounded down, so that no client loses all rows.
        seed: Seed of the selection of rows.

    Returns:
        A federation of the same clients whose test rows are the held-out training rows.

    Raises:
        FedraxError: ``share`` is outside (0, 1), or every client is too small to give up a row.

    Example:
        >>> federation = fedrax.data.Federation.from_arrays(np.zeros((20, 2)), np.arange(20) % 2, offsets=[0, 10, 20])
        >>> validation = fedrax.data.hold_out(federation, share=0.2)
        >>> validation.sizes.tolist(), len(validation.test.y)
        ([8, 8], 4)
    """
    if not 0 < share < 1:
        raise FedraxError(f"the share of rows to hold out must lie between 0 and 1, not be {share}.")
    clients = federation.num_clients
    owner = np.repeat(np.arange(clients), federation.sizes)
    kept, held_out = train_test_split(owner, share, numpy_generator(seed, "validation split"))
    if not len(held_out):
        raise FedraxError(
            f"the largest client of {federation.name!r} has {federation.sizes.max()} training rows, too few to hold"
            f" out {share:g} of them: raise the share."
        )

    def offsets(rows: np.ndarray) -> np.ndarray:
        return aligned_array(
            np.concatenate([[0], np.cumsum(np.bincount(owner[rows], minlength=clients))]).astype(np.int64)
        )

    return replace(
        federation,
        train=take_rows(federation.train, kept),
        offsets=offsets(kept),
        test=take_rows(federation.train, held_out),
        test_offsets=offsets(held_out),
    )
