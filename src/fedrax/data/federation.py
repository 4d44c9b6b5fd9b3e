"""The arrays a simulator holds: all samples in one array, and the rows that each client owns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from fedrax.data.dataset import (
    Dataset,
    Samples,
    as_samples,
    check_class_names,
    check_matching_shapes,
    check_samples,
    decode_bytes,
    encode_string_labels,
    is_missing,
    label_range,
    make_preprocess,
    numpy_generator,
    train_test_split,
)
from fedrax.data.partition import Natural, Partitioner
from fedrax.errors import FedraxError

if TYPE_CHECKING:
    from fedrax.contract.task import Preprocess

ALIGNMENT = 64  # bytes; JAX on the CPU takes over an array so aligned without copying it


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """Samples grouped by client, with no object per client: a million clients are two arrays.

    Client i owns rows ``offsets[i]:offsets[i + 1]`` of ``train``; ``offsets`` is int64 [N + 1] and no client
    is empty. Where clients have test data of their own, ``test_offsets`` (int64 [N + 1]) says which rows of
    ``test`` they are: a client may have none, and test rows of clients outside the federation follow after
    ``test_offsets[N]``. All arrays are C-contiguous and 64-byte aligned. ``num_classes`` is None for a
    regression; ``mean``, ``std``, ``pixels``, ``padding``, ``truth``, ``vocabulary`` and ``notes`` are as in
    ``Dataset``.
    ``client_names`` [N] is empty where clients have numbers alone.
    """

    train: Samples
    offsets: np.ndarray
    test: Samples
    test_offsets: np.ndarray | None
    num_classes: int | None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    class_names: tuple[str, ...] = ()
    name: str = "arrays"
    pixels: bool = False
    padding: int | None = None
    truth: np.ndarray | None = None
    vocabulary: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_train_offsets(self.offsets, len(self.train.y), f"federation {self.name!r}")
        if self.test_offsets is not None:
            _check_offsets(self.test_offsets, len(self.test.y), f"federation {self.name!r}, test part")
            if len(self.test_offsets) != len(self.offsets):
                raise FedraxError(f"federation {self.name!r}: test offsets are for another number of clients.")
            if not self.test_offsets[-1]:
                raise FedraxError(
                    f"federation {self.name!r}: test_offsets give no client a test row: leave them out where test rows"
                    " belong to nobody."
                )
        if self.client_names and len(self.client_names) != self.num_clients:
            raise FedraxError(
                f"federation {self.name!r} has {self.num_clients} clients, but {len(self.client_names)} names for them."
            )
        check_class_names(self.class_names, self.num_classes, f"federation {self.name!r}")
        check_matching_shapes(self.train, self.test, f"federation {self.name!r}")
        for part, samples in (("training", self.train), ("test", self.test)):
            where = f"federation {self.name!r}, {part} part"
            check_samples(samples, self.num_classes, where, self.pixels, self.padding)

    def __repr__(self) -> str:
        """A few lines: who has how much of what."""
        sizes, x, y = self.sizes, self.train.x, self.train.y
        rows = f"{sizes.min():,} to {sizes.max():,}" if sizes.min() < sizes.max() else f"{sizes.max():,}"
        kind = "targets" if self.num_classes is None else f"{self.num_classes} classes"
        owned = "" if self.test_offsets is None else ", each client's own"
        return (
            f"Federation {self.name!r}: {self.num_clients:,} clients of {rows} training samples, {len(y):,} in all\n"
            f"  x {x.dtype} {list(x.shape[1:])}, y {y.dtype} {list(y.shape[1:])}: {kind}\n"
            f"  {len(self.test.y):,} test samples{owned}"
        )

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def client_name(self, client: int) -> str:
        """What the client is called: its name, or its number."""
        return self.client_names[client] if self.client_names else str(client)

    @property
    def sizes(self) -> np.ndarray:
        """Training rows of each client, int64 [N]."""
        return np.diff(self.offsets)

    def preprocess(self, normalize: bool = True) -> "Preprocess | None":
        """What a task does to x first, as ``Dataset.preprocess`` says: for ``classification(model, ...)``."""
        return make_preprocess(self.pixels, self.mean, self.std, normalize)

    @classmethod
    def from_dataset(cls, dataset: Dataset, partition: Partitioner, seed: int, shuffle: bool = True) -> Self:
        """Divide ``dataset`` by ``partition``.

        ``shuffle`` puts each client's rows into a random order (its own stream of ``seed``), so that walking
        them in order is sampling without replacement; without it they stay as the partition lists them.
        """
        if not isinstance(dataset, Dataset):
            raise FedraxError(
                f"a partition divides a fedrax.Dataset, not {_describe(dataset)}: Federation.from_arrays takes arrays."
            )
        if isinstance(partition, type) or not hasattr(partition, "assign"):
            raise FedraxError(f"a partition is an object such as Shards(clients=20), not {_describe(partition)}.")
        rows, offsets = _assign(partition, dataset, seed)
        test_rows, test_offsets, names = None, None, ()
        if isinstance(partition, Natural) and dataset.train_clients is not None:
            clients = dataset.train_clients[rows[offsets[:-1]]]
            names = tuple(dataset.client_names[i] for i in clients) if dataset.client_names else ()
            if dataset.test_clients is not None:
                test_rows, test_offsets = _group_test_rows(clients, dataset.test_clients)
        if shuffle:
            rows = rows[_shuffle_within_clients(offsets, seed)]
        return cls(
            train=take_rows(dataset.train, rows),
            offsets=aligned_array(offsets),
            test=_aligned_samples(dataset.test) if test_rows is None else take_rows(dataset.test, test_rows),
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
        )

    @classmethod
    def from_arrays(
        cls,
        x: np.ndarray,
        y: np.ndarray,
        client_ids: Any = None,
        *,
        offsets: np.ndarray | None = None,
        test: tuple[np.ndarray, np.ndarray] | None = None,
        test_client_ids: Any = None,
        test_offsets: np.ndarray | None = None,
        num_classes: int | None = None,
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        class_names: tuple[str, ...] = (),
        name: str = "arrays",
        pixels: bool = False,
        padding: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> Self:
        """A federation from arrays: x [n, ...] and y [n] or [n, ...].

        Labels are integers, floating targets, or strings, which are classes in the order of ``class_names`` or else of
        the strings.

        Say who owns each row by ``client_ids`` [n] (integers, or strings, which name the clients; numbered in sorted
        order) or, if rows are grouped already, by ``offsets`` [N + 1]. ``test`` is (x, y), empty by default;
        ``test_client_ids`` or ``test_offsets`` say whose it is, if anybody's. ``num_classes`` of integer labels is that
        of ``class_names``, or else the largest plus one. ``pixels``: x are bytes of images; ``padding``: which label of
        y [n, ...] does not count. ``shuffle`` and ``seed`` as in :meth:`from_dataset`. Nothing is copied with
        ``offsets``, ``shuffle=False`` and aligned arrays as in JAX.
        """
        y, test, class_names = encode_string_labels(y, test, class_names)
        train, tested = _train_and_test(x, y, test, padding, f"federation {name!r}")
        if train.y.dtype.kind == "i" and num_classes is None:
            num_classes = len(class_names) or max(label_range(part.y, padding)[1] for part in (train, tested)) + 1
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
            train=_aligned_samples(train) if rows is None else take_rows(train, rows),
            offsets=aligned_array(offsets),
            test=_aligned_samples(tested) if test_rows is None else take_rows(tested, test_rows),
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
    """Training and test samples, of which the latter may be none."""
    train = as_samples(x, y, padding)
    tested = Samples(train.x[:0], train.y[:0]) if test is None else as_samples(*test, padding)
    check_matching_shapes(train, tested, where)
    if not len(train.y):
        raise FedraxError("a federation needs training samples.")
    return train, tested


def _describe(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def aligned_array(array: np.ndarray) -> np.ndarray:
    """``array`` itself if it is C-contiguous and starts at a multiple of 64 bytes, else a copy that is.

    A memory-mapped array stays one, and unread: an array in a .npy file starts at a multiple of 64 bytes.
    """
    array = np.asarray(array)
    placed = array.size == 0 or array.ctypes.data % ALIGNMENT == 0
    if placed and array.flags.c_contiguous:
        return array
    copy = allocate_aligned(array.shape, array.dtype)
    copy[...] = array
    return copy


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype, make: Callable = np.empty) -> np.ndarray:
    """An array that starts at a multiple of 64 bytes, in memory that ``make`` gives."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = make(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _aligned_samples(samples: Samples) -> Samples:
    return Samples(aligned_array(samples.x), aligned_array(samples.y))


def take_rows(samples: Samples, rows: np.ndarray) -> Samples:
    """Rows of samples, gathered straight into aligned memory."""

    def take(array: np.ndarray) -> np.ndarray:
        out = allocate_aligned((len(rows), *array.shape[1:]), array.dtype)
        # mode="raise" would gather into a second buffer; rows come from a partition and are in range.
        return np.take(array, rows, axis=0, out=out, mode="clip")

    return Samples(take(samples.x), take(samples.y))


def _assign(partition: Partitioner, dataset: Dataset, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows and offsets of a partition, which may be a user's own: rows that there are, and offsets among them."""
    name, found = type(partition).__name__, partition.assign(dataset, seed)
    if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, np.ndarray) for part in found)):
        raise FedraxError(f"the partition {name} must return arrays, row numbers [n] and offsets [N + 1].")
    rows, offsets = found
    if (
        rows.ndim != 1
        or rows.dtype.kind not in "iu"
        or (rows.size and (rows.min() < 0 or rows.max() >= len(dataset.train.y)))
    ):
        raise FedraxError(
            f"the partition {name} must return rows of 0 to {len(dataset.train.y) - 1}, whole numbers [n]."
        )
    return rows, _check_train_offsets(offsets, len(rows), f"partition {name}")


def _shuffle_within_clients(offsets: np.ndarray, seed: int) -> np.ndarray:
    """A random order of rows that leaves each row with its client."""
    owner = np.repeat(np.arange(len(offsets) - 1, dtype=np.float64), np.diff(offsets))
    return np.argsort(owner + numpy_generator(seed, "order").random(len(owner)), kind="stable")


def _check_owners(client_ids: object, offsets: object, test_client_ids: object, test_offsets: object) -> None:
    """Owners are said in one way, and those of the test rows in the same."""
    if (client_ids is None) == (offsets is None):
        raise FedraxError("say who owns the rows by client_ids or by offsets, one of the two.")
    if test_client_ids is not None and (client_ids is None or test_offsets is not None):
        raise FedraxError("test_client_ids go with client_ids, and test_offsets with offsets.")


def check_client_ids(what: str, ids: Any, rows: int, like: np.ndarray | None = None) -> np.ndarray:
    """Integers or texts [rows], as ``like`` is, of arrays, of columns of pandas or polars, and of lists alike."""
    given = np.array(ids, object) if isinstance(ids, list | tuple) else np.asarray(ids)  # NumPy would write None out
    listed = given.ravel().tolist() if given.dtype.kind in "Of" else []
    lost = sum(map(is_missing, listed))
    if lost:
        raise FedraxError(f"{what} are missing in {lost:,} of {len(listed):,} rows: leave out rows that nobody owns.")
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
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _to_integers(what: str, values: list[Any]) -> np.ndarray:
    """Whole numbers as int64, or as uint64 where they need it."""
    low, high = min(values), max(values)
    kind = next((k for k in (np.int64, np.uint64) if np.iinfo(k).min <= low and high <= np.iinfo(k).max), None)
    if kind is None:
        raise FedraxError(f"{what} hold whole numbers beyond 64 bits, {low} .. {high}: write them as strings.")
    return np.array(values, kind)


def _type_names(values: list[Any]) -> str:
    return " and ".join(sorted({type(value).__name__ for value in values}))


def _group_by_client(client_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients [N] in sorted order, all rows grouped by them [n], and their offsets [N + 1]."""
    clients, owner, sizes = np.unique(client_ids, return_inverse=True, return_counts=True)
    return clients, np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(sizes)])


def _group_test_rows(clients: np.ndarray, test_clients: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Test rows grouped by ``clients`` (sorted, [N]) and their offsets; strangers' rows last.

    (None, None) if no test row belongs to any of the clients.
    """
    if clients.dtype.kind in "iu" and np.result_type(clients, test_clients).kind == "f":
        clients, test_clients = clients.astype(object), test_clients.astype(object)  # floats do not tell them apart
    number = np.minimum(np.searchsorted(clients, test_clients), len(clients) - 1)
    owner = np.where(clients[number] == test_clients, number, len(clients))
    sizes = np.bincount(owner, minlength=len(clients) + 1)[:-1]
    if not sizes.any():
        return None, None
    return np.argsort(owner, kind="stable"), aligned_array(np.concatenate([[0], np.cumsum(sizes)]))


def _check_train_offsets(offsets: np.ndarray, rows: int, where: str) -> np.ndarray:
    """``offsets`` as int64 if they give every one of ``rows`` to a client, and every client a row."""
    offsets = _check_offsets(offsets, rows, where)
    if offsets[-1] != rows:
        raise FedraxError(f"{where}: offsets end at {offsets[-1]}, not at the last of {rows} rows.")
    sizes = np.diff(offsets)
    if sizes.min() < 1:
        raise FedraxError(f"{where}: client {sizes.argmin()} has no training rows.")
    return offsets


def _check_offsets(offsets: np.ndarray, rows: int, where: str) -> np.ndarray:
    """``offsets`` as int64 if they are [N + 1], N >= 1, start at 0, never fall and stay within ``rows``."""
    fits = offsets.ndim == 1 and len(offsets) >= 2 and offsets.dtype.kind in "iu"
    if not fits or offsets[0] != 0 or (np.diff(offsets.astype(np.int64)) < 0).any() or offsets[-1] > rows:
        raise FedraxError(f"{where}: offsets must be N + 1 integers that rise from 0 to at most {rows}.")
    return offsets.astype(np.int64, copy=False)


def hold_out(federation: Federation, share: float, seed: int = 0) -> Federation:
    """The federation with ``share`` of each client's training rows, rounded down, in place of the test data.

    Which rows they are is decided by ``seed`` (a random stream of its own). Raises FedraxError unless 0 < share < 1,
    and where no client has enough rows to lose one.
    """
    if not 0 < share < 1:
        raise FedraxError(f"the share of validation data must lie between 0 and 1, not be {share}.")
    clients = federation.num_clients
    owner = np.repeat(np.arange(clients), federation.sizes)
    kept, held = train_test_split(owner, share, numpy_generator(seed, "validation split"))
    if not len(held):
        raise FedraxError(
            f"the largest client of {federation.name!r} has {federation.sizes.max()} training rows, too few to hold"
            f" out {share:g} of them for validation: raise the share."
        )

    def offsets(rows: np.ndarray) -> np.ndarray:
        return aligned_array(
            np.concatenate([[0], np.cumsum(np.bincount(owner[rows], minlength=clients))]).astype(np.int64)
        )

    return replace(
        federation,
        train=take_rows(federation.train, kept),
        offsets=offsets(kept),
        test=take_rows(federation.train, held),
        test_offsets=offsets(held),
    )
