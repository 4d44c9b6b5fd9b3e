"""Data sets before they are partitioned over clients: NumPy arrays in host memory, in dtypes that JAX supports."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError, unknown
from fedrax.host_memory import is_memory_mapped, release_pages
from fedrax.inputs import (
    Inputs,
    arrays_of,
    by_key,
    describe_inputs,
    has_several,
    map_inputs,
    named_inputs,
    same_form,
)

if TYPE_CHECKING:
    from fedrax.contract.task import Preprocess

_INT32_MAX = np.iinfo(np.int32).max
_PIECE_BYTES = 16 << 20
"""Bytes of samples that are checked at once: they may be memory-mapped and larger than memory."""
_NAMED = ", and class_names has the numbers"
_MAX_IMPLIED_CLASSES, _MAX_CLASSES_PER_LABEL = 100, 10
"""More classes than the former, and more than so many for each label that occurs, are stated by ``num_classes``."""


class Samples(NamedTuple):
    """Inputs and labels of ``n`` samples. `as_samples` converts arrays of other dtypes.

    Example:
        >>> samples = fedrax.data.Samples(x=np.zeros((4, 28, 28, 1), np.uint8), y=np.arange(4, dtype=np.int32))
        >>> samples.x.shape
        (4, 28, 28, 1)
    """

    x: Inputs
    """Inputs, an array [n, ...]: images [n, height, width, channels], sequences [n, time, channels], tokens [n, time],
    or features [n, features]. Several inputs of a sample are a dictionary or tuple of such arrays."""
    y: np.ndarray
    """Labels [n], or [n, ...] with one label per position: next tokens [n, time], a segmentation [n, height, width],
    several targets [n, targets]. Class labels are int32, regression targets floating-point."""

    def map(self, function: Callable[[np.ndarray], Any]) -> "Samples":
        """Apply a function to each array.

        Args:
            function: A function of an array [n, ...].

        Returns:
            Its values in place of the arrays.
        """
        return Samples(map_inputs(function, self.x), function(self.y))

    @property
    def arrays(self) -> list[np.ndarray]:
        """The arrays of x, and y."""
        return [*arrays_of(self.x), self.y]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples with their metadata, before they are partitioned over clients.

    Raises:
        FedraxError: Shapes disagree, a label is neither ``padding`` nor in 0 .. ``num_classes`` - 1, JAX does not
            support the dtype of x, or a number is NaN or infinite (memory-mapped arrays are not read for this).

    Example:
        >>> samples = fedrax.data.as_samples(np.zeros((10, 3)), np.arange(10) % 2)
        >>> fedrax.data.Dataset("toy", train=samples, test=samples, num_classes=2)
        Dataset 'toy': 10 training samples, 10 test samples
          x float64 [3], y int32 []: 2 classes
    """

    name: str
    """Name in reports and messages."""
    train: Samples
    """Training samples, at least one."""
    test: Samples
    """Test samples of the shapes of the training samples; may be empty."""
    num_classes: int | None
    """Number of classes C; None for a regression."""
    mean: tuple[float, ...] = ()
    """Mean per channel (the last axis of x), after pixels are scaled by 1/255; empty for no normalization."""
    std: tuple[float, ...] = ()
    """Standard deviation per channel, on the same scale as ``mean``."""
    train_clients: np.ndarray | None = None
    """Natural client of each training row, integers [n]; None if the data has no natural clients."""
    test_clients: np.ndarray | None = None
    """Natural client of each test row, integers [n]; None if test rows belong to no client."""
    class_names: tuple[str, ...] = ()
    """Names of the classes 0 .. C - 1, or empty."""
    pixels: bool | str = False
    """Whether x holds image bytes (uint8), which models read scaled to [0, 1]. Other bytes are tokens or counts. Of
    several inputs the name of the one that does, of a tuple its number, such as "0"."""
    padding: int | None = None
    """Label of positions that loss and metrics ignore (such as -1 or 255), where y is [n, ...]."""
    truth: np.ndarray | None = None
    """Parameters that generated the data, if known: a model may measure its distance to them."""
    vocabulary: tuple[str, ...] = ()
    """Words of the tokens 2, 3, ...; token 0 is padding and token 1 any other word."""
    client_names: tuple[str, ...] = ()
    """Names of the natural clients 0, 1, ..., or empty."""
    feature_names: tuple[str, ...] = ()
    """Names of the columns of x [n, features], or empty."""
    notes: tuple[str, ...] = ()
    """What the reader did to the data, and its warnings."""
    pooled: tuple[str, ...] = ()
    """Statistics of the rows of all clients by which x was computed, which no differential privacy covers."""
    client_statistics: tuple[str, ...] = ()
    """Statistics of each client's rows by which its x was computed, which no privacy of single samples covers."""
    partition_by: np.ndarray | None = None
    """One number [n] per training row that partitions by label use instead of the label: integers from 0, or floats
    to sort by."""

    @staticmethod
    def _remedy(value: object) -> str:
        """How to make a data set of ``value``; empty if unknown."""
        return "Federation.from_arrays takes arrays" if isinstance(value, tuple | list | np.ndarray) else ""

    def __repr__(self) -> str:
        """Numbers of samples, shapes and dtypes."""
        y = self.train.y
        kind = "targets" if self.num_classes is None else f"{self.num_classes} classes"
        clients = 0 if self.train_clients is None else len(np.unique(self.train_clients))
        of = f" of {clients:,} clients" if clients else ""
        return (
            f"Dataset {self.name!r}: {len(y):,} training samples{of}, {len(self.test.y):,} test samples\n"
            f"  {describe_inputs(self.train.x)}, y {y.dtype} {list(y.shape[1:])}: {kind}"
        )

    def __post_init__(self) -> None:
        if len(self.train.y) == 0:
            raise FedraxError(f"data set {self.name!r} has no training samples.")
        check_parts(self, f"data set {self.name!r}")
        for part, samples, clients in (
            ("training", self.train, self.train_clients),
            ("test", self.test, self.test_clients),
        ):
            where = f"data set {self.name!r}, {part} part"
            if clients is not None and (clients.shape != samples.y.shape[:1] or clients.dtype.kind not in "iu"):
                raise FedraxError(f"{where}: clients must be one integer for each of {len(samples.y)} rows.")
        by = self.partition_by
        if by is not None and (by.shape != self.train.y.shape[:1] or by.dtype.kind not in "iuf"):
            raise FedraxError(f"data set {self.name!r}: partition_by must be one number for each training row.")
        if by is not None and by.dtype.kind == "i" and by.min() < 0:
            raise FedraxError(f"data set {self.name!r}: integers in partition_by must be 0 or more.")

    def preprocess(self, normalize: bool = True) -> "Preprocess | None":
        """The preprocessing of x for ``classification(model, ...)``: see `fedrax.contract.rescale`.

        Args:
            normalize: Subtract the mean and divide by the standard deviation, where they are known. If False, pixels
                are only scaled to [0, 1].

        Returns:
            A function of x, or None if x needs no preprocessing.
        """
        return make_preprocess(self.pixels, self.mean, self.std, normalize)


def make_preprocess(
    pixels: bool | str, mean: tuple[float, ...], std: tuple[float, ...], normalize: bool
) -> "Preprocess | None":
    """`rescale` for pixels and for data with a mean, which refers to pixels; None otherwise."""
    from fedrax.contract.task import rescale  # here, so that arrays can be read without JAX

    which = pixels if isinstance(pixels, str) else None
    if mean and normalize:
        return rescale(mean, std, which)
    return rescale(of=which) if pixels or mean else None


@checked_arguments
def as_samples(x: Any, y: Any, padding: int | None = None) -> Samples:
    """Convert arrays to `Samples` in dtypes that JAX supports.

    Integer and Boolean labels become int32. Other arrays keep their dtype, except that 64-bit integers become int32,
    bfloat16 becomes float32, floats of more than 64 bits become float64, and the byte order becomes the machine's.
    Only such conversions copy.

    Args:
        x: Inputs [n, ...]; a table of pandas or polars gives [n, columns]. Several inputs of a sample are a dictionary
            of such arrays, whose names are Python identifiers, or a tuple of them.
        y: Labels [n] or [n, ...]: integers or Booleans for classes, floats for regression targets.
        padding: Label of positions to ignore, which may be negative.

    Returns:
        The samples.

    Raises:
        FedraxError: The arrays are not n inputs with n labels, hold anything but real numbers or integers beyond 32
            bits, or a label other than ``padding`` is negative.

    Example:
        >>> samples = fedrax.data.as_samples([[0.5, 1.0], [2.0, 3.0]], [True, False])
        >>> samples.y.dtype.name, samples.y.tolist()
        ('int32', [1, 0])
    """
    given = split_inputs(x, y)
    y = _one_label(y, given)
    for what, array in (*named_inputs(given), ("y", y)):
        if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
            raise FedraxError(f"{what} has masked values: leave those rows out, or fill them with numbers.")
    try:
        x, y = map_inputs(_to_array, given), np.asarray(y)
    except (ValueError, TypeError) as error:
        raise FedraxError("samples must be arrays of numbers in which all rows have one shape.") from error
    missing = sum(map(is_missing, y.ravel())) if y.dtype.kind == "O" else 0
    if missing:
        raise FedraxError(f"labels are missing in {missing:,} of {y.size:,} rows: leave those rows out.")
    for (what, array), (_, original) in zip(named_inputs(x), named_inputs(given), strict=True):
        if any(a.dtype.kind not in "buif" and a.dtype.name != "bfloat16" for a in (array, y)):
            raise FedraxError(
                f"samples must be real numbers, not {what} of dtype {array.dtype} with y of dtype {y.dtype}"
                f"{_conversion_hint(original, array, y)}."
            )
        _check_lengths(what, array, y)
    made = iter([_to_jax_dtype(array, what) for what, array in named_inputs(x)])
    x = map_inputs(lambda _: next(made), x)
    if y.dtype.kind in "bui":
        low, high = label_range(y, padding)
        if low < 0 or high > _INT32_MAX:
            hint = f": as strings, y.astype(str), each number that occurs is a class{_NAMED}" if y.ndim == 1 else ""
            if low < 0 and padding is None and y.ndim > 1:
                hint = f" (padding={low} leaves positions out)"
            raise FedraxError(f"class labels must be 0 or more and fit into 32 bits, found {low} .. {high}{hint}.")
        return Samples(x, y.astype(np.int32, copy=False))
    return Samples(x, _to_jax_dtype(y, "y"))


def split_inputs(x: Any, y: Any) -> Inputs:
    """``x`` as one object, or as a dictionary or tuple of them where a sample has several inputs.

    Raises FedraxError for an empty dictionary, names that are no identifiers, and lists of several inputs.
    """
    if isinstance(x, Mapping):
        odd = [name for name in x if not (isinstance(name, str) and name.isidentifier())]
        if odd or not len(x):
            found = f"not {odd[0]!r}" if odd else "and it is empty"
            raise FedraxError(f"a dictionary of inputs has names that are Python identifiers, {found}.")
        nested = next((name for name, value in x.items() if isinstance(value, Mapping)), None)
        if nested is not None:
            raise FedraxError(f"x[{nested!r}] must be an array [n, ...], not a dictionary: give all inputs in one.")
        return {name: x[name] for name in sorted(x)}
    arrays = isinstance(x, tuple | list) and bool(x) and all(map(_is_array, x))
    if arrays and isinstance(x, tuple):
        return tuple(x)
    # a list of arrays has one for each sample, of which there are as many as labels
    if arrays and hasattr(y, "__len__") and len(x) != len(y) and all(len(part) == len(y) for part in x):
        raise FedraxError(
            f"x is one array [n, ...], not a list of {len(x)}: several inputs of a sample are a tuple of arrays, or a"
            " dictionary of them by name."
        )
    return list(x) if isinstance(x, tuple) else x


def _is_array(value: Any) -> bool:
    """Whether ``value`` is an array with rows, or a table."""
    return (hasattr(value, "dtype") and np.ndim(value) > 0) or bool(_table_columns(value))


def _one_label(y: Any, x: Any) -> Any:
    """``y`` if it is one array; FedraxError for several labels of a sample: a dictionary, tuple or list of arrays."""
    parts = list(y.values()) if isinstance(y, Mapping) else y if isinstance(y, tuple | list) else ()
    arrays = bool(parts) and all(hasattr(part, "dtype") and np.ndim(part) for part in parts)
    first = next(iter(arrays_of(x)), ()) if has_several(x) else x
    if isinstance(y, list) and arrays and hasattr(first, "__len__"):
        arrays = len(parts) != len(first) and all(len(part) == len(first) for part in parts)
    if not arrays and not isinstance(y, Mapping):
        return y
    raise FedraxError(
        f"y is one array [n, ...], not a {type(y).__name__} of {len(parts)}: stack several labels of a sample into one"
        " array, np.stack([a, ...], axis=1), and take them apart in the loss of fedrax.contract.supervised."
    )


def _check_lengths(what: str, array: np.ndarray, y: np.ndarray, where: str = "") -> None:
    """Raise FedraxError, prefixed by ``where``, unless there is a label for each row."""
    if array.ndim < 1 or y.ndim < 1 or len(array) != len(y):
        raise FedraxError(
            f"{where}{what} of shape {array.shape} and y of shape {y.shape} are not n samples with n labels."
        )


def _to_array(given: Any) -> np.ndarray:
    """Samples as one array, with the columns of a table stacked along the last axis.

    Converts columns for which ``np.asarray`` gives objects: Booleans beside numbers, decimals, nullable numbers.
    """
    columns = _table_columns(given)
    array = np.asarray(given)
    non_numeric = next((name for name, column in columns if not _is_numeric(column)), None)
    if non_numeric is not None or not columns or array.dtype.kind != "O":
        return array if non_numeric is None else array.astype(object)
    return np.stack([_to_float64(column) for _, column in columns], axis=1)


def _table_columns(given: Any) -> list[tuple[Any, Any]]:
    """(name, column) of each column of a pandas or polars table; empty for anything else."""
    if hasattr(given, "iter_columns"):
        return [(column.name, column) for column in given.iter_columns()]
    return list(given.items()) if hasattr(given, "iloc") and hasattr(given, "columns") else []


def column_names(given: Any) -> tuple[Any, ...]:
    """The names of the columns of a pandas or polars table; empty for anything else."""
    return tuple(name for name, _ in _table_columns(given))


def _is_numeric(column: Any) -> bool:
    """Whether a column holds numbers, Booleans or categories of them."""
    kind = column.dtype
    if hasattr(kind, "is_numeric"):  # of polars
        return kind.is_numeric() or str(kind) == "Boolean"
    return getattr(getattr(kind, "categories", kind), "dtype", kind).kind in "biuf"


def _to_float64(column: Any) -> np.ndarray:
    """A column as float64 [n], NaN where a number is missing."""
    if hasattr(column, "iloc"):
        return column.to_numpy(np.float64, na_value=np.nan)
    return np.array([np.nan if is_missing(value) else float(value) for value in column.to_list()], np.float64)


def encode_string_labels(
    y: Any, test: tuple[Any, Any] | None, class_names: tuple[str, ...] = ()
) -> tuple[Any, tuple[Any, Any] | None, tuple[str, ...]]:
    """Labels, ``test`` and class names, with string labels encoded as indices of the class names.

    The class names are the given ones, or else all labels of training and test data in sorted order. Labels that are
    not strings are returned as they are.

    Raises FedraxError for a label that is none of ``class_names``.
    """
    test_labels = () if test is None or not len(test[1]) else (test[1],)
    parts = [part for part in map(_string_array, (y, *test_labels)) if part is not None]
    if len(parts) != 1 + len(test_labels):
        return y, test, class_names
    present = np.unique(np.concatenate([part.ravel() for part in parts]))
    names = [str(name) for name in class_names or present]
    if unlisted := sorted(set(present.tolist()) - set(names)):
        raise unknown("class of class_names:", unlisted[0], names)
    class_of = np.array([names.index(label) for label in present], np.int32)
    codes = [class_of[np.searchsorted(present, part)] for part in parts]
    return codes[0], test and (test[0], codes[1] if test_labels else codes[0][:0]), tuple(names)


def _string_array(labels: Any) -> np.ndarray | None:
    """Labels as an array of strings, or None unless all are strings."""
    try:
        array = np.asarray(labels) if hasattr(labels, "dtype") else np.asarray(labels, object)
    except (ValueError, TypeError):
        return None
    texts = array.dtype.kind in "UT" or (array.dtype.kind == "O" and all(isinstance(v, str) for v in array.ravel()))
    return array.astype(str) if texts and array.size else None


def _conversion_hint(given: Any, x: np.ndarray, y: np.ndarray) -> str:
    """Hint on how to convert non-numeric samples to numbers."""
    if hasattr(given, "toarray"):
        return "; x.toarray() gives a dense array"
    if hasattr(given, "collect"):
        return "; x.collect() gives the table"
    odd = [(name, column) for name, column in _table_columns(given) if not _is_numeric(column)]
    texts = next((name for name, column in odd if any(isinstance(v, str) for v in np.asarray(column))), None)
    if texts is not None:
        return (
            f"; column {texts!r} holds text: leave it out, or one-hot encode its categories"
            " with get_dummies of pandas or to_dummies of polars"
        )
    if odd:
        return f"; column {odd[0][0]!r} holds {odd[0][1].dtype}: leave it out, or convert it to numbers"
    if x.dtype.kind == "O":
        return "; x.astype(float) converts objects that are all numbers"
    if y.dtype.kind in "SU" or any(isinstance(label, str) for label in y.ravel()):
        return "; np.unique(labels, return_inverse=True) of all training and test labels gives integer classes"
    return "; labels are integers or strings for classes, floats for targets" if y.dtype.kind not in "buif" else ""


def is_missing(value: object) -> bool:
    """Whether ``value`` is None, NaN, NaT or pandas' NA (whose comparisons have no truth value)."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return value.__class__.__name__ == "NAType"


def decode_bytes(array: np.ndarray) -> np.ndarray:
    """Bytes decoded as UTF-8; invalid bytes are escaped, so that values stay distinct. Other arrays are unchanged."""
    return np.char.decode(array, "utf-8", "backslashreplace") if array.dtype.kind == "S" else array


def count_classes(parts: Sequence[np.ndarray], padding: int | None, where: str) -> int:
    """Number of classes of integer labels, training and test ones: the largest label plus one.

    Raises FedraxError, prefixed by ``where``, for one label a row in which most numbers up to the largest never occur:
    they are codes, such as years, and would give a model an output for each number between them.
    """
    classes = max(label_range(part, padding)[1] for part in parts) + 1
    if classes > _MAX_IMPLIED_CLASSES and parts[0].ndim == 1:
        used = np.unique(np.concatenate([np.unique(part) for part in parts]))
        if len(used) * _MAX_CLASSES_PER_LABEL < classes:
            raise FedraxError(
                f"{where}: labels are classes 0, 1, ..., so that the label {used[-1]} makes {classes:,} classes, of"
                f" which {len(used):,} occur: as strings, y.astype(str), each number that occurs is a class{_NAMED};"
                f" num_classes={classes} keeps all classes."
            )
    return classes


def label_range(labels: np.ndarray, padding: int | None) -> tuple[int, int]:
    """Smallest and largest label except ``padding``; (0, -1) without labels."""
    counted = labels if padding is None else labels[labels != padding]
    return (int(counted.min()), int(counted.max())) if counted.size else (0, -1)


def _to_jax_dtype(array: np.ndarray, what: str) -> np.ndarray:
    """``array`` in its own dtype if JAX supports it, else in the nearest one that it does."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind in "iu" and size > 4:
        low, high = label_range(array, None)
        if low < -_INT32_MAX - 1 or high > _INT32_MAX:
            raise FedraxError(f"{what} holds integers of {low} .. {high}, which do not fit into 32 bits: use floats.")
        return array.astype(np.int32)
    if kind == "f" and size > 8:
        return array.astype(np.float64)
    if kind == "V":
        return array.astype(np.float32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def check_matching_shapes(train: Samples, test: Samples, where: str) -> None:
    """Raise FedraxError, prefixed by ``where``, unless training and test samples have the same shape."""
    if not same_form(train.x, test.x):
        found = " and ".join(", ".join(name for name, _ in named_inputs(part.x)) for part in (train, test))
        raise FedraxError(f"{where}: training and test samples must have the same inputs, not {found}.")
    names = ["samples"] if not has_several(train.x) else [f"inputs {name}" for name, _ in named_inputs(train.x)]
    for what, a, b in zip([*names, "labels"], train.arrays, test.arrays, strict=True):
        if not (hasattr(a, "dtype") and hasattr(b, "dtype")):
            raise FedraxError(f"{where}: {what} must be arrays; as_samples converts lists.")
        if a.shape[1:] != b.shape[1:]:
            raise FedraxError(f"{where}: training {what} have shape {a.shape[1:]}, test {what} {b.shape[1:]}.")


def check_parts(data: Any, where: str) -> None:
    """Raise FedraxError unless training part, test part and class names of a Dataset or Federation are consistent."""
    check_matching_shapes(data.train, data.test, where)
    for part, samples in (("training", data.train), ("test", data.test)):
        check_samples(samples, data.num_classes, f"{where}, {part} part", data.pixels, data.padding)
    check_class_names(data.class_names, data.num_classes, where)
    _check_scale(data.mean, data.std, _images(data.train.x, data.pixels, bool(data.mean), where), where)


def _images(x: Inputs, pixels: bool | str, needed: bool, where: str) -> np.ndarray | None:
    """The input that holds images, None unless it is ``needed``; FedraxError if ``pixels`` does not name it."""
    if not (pixels or needed):
        return None
    inputs = by_key(x)
    if isinstance(pixels, str) and pixels in inputs:
        return inputs[pixels]
    if isinstance(pixels, str) or has_several(x):
        known = f"{' or '.join(map(repr, inputs))}, the input that holds images" if inputs else "True, x is one array"
        raise FedraxError(f"{where}: pixels must be {known}, not {pixels!r}.")
    return x


def _check_scale(mean: tuple[float, ...], std: tuple[float, ...], images: np.ndarray | None, where: str) -> None:
    """Raise FedraxError, prefixed by ``where``, unless mean and std standardize bytes that are scaled by 1/255."""
    if len(mean) != len(std) or not (np.isfinite((*mean, *std)).all() and all(s > 0 for s in std)):
        raise FedraxError(f"{where}: mean and std need one finite number per channel, std above 0.")
    if images is not None and mean and images.dtype != np.uint8:
        raise FedraxError(
            f"{where}: mean and std standardize image bytes (uint8), and x is {images.dtype}: standardize x, and leave"
            " them out."
        )
    if any(not 0 <= m <= 1 for m in mean):
        raise FedraxError(
            f"{where}: mean must lie in 0 to 1, because pixels are scaled by 1/255 first, not be {list(mean)}: divide"
            " mean and std by 255."
        )


def check_class_names(names: tuple[str, ...], num_classes: int | None, where: str) -> None:
    """Raise FedraxError, prefixed by ``where``, unless every class has a name or none has."""
    if names and len(names) != num_classes:
        found = "no classes" if num_classes is None else f"{num_classes} classes"
        raise FedraxError(f"{where} has {found}, but {len(names)} names for them.")


def check_samples(
    samples: Samples, num_classes: int | None, where: str, pixels: bool | str = False, padding: int | None = None
) -> None:
    """Raise FedraxError, prefixed by ``where``, unless lengths, dtypes and labels are consistent."""
    x, y = samples
    for what, array in named_inputs(x):
        _check_lengths(what, array, y, f"{where}: ")
    if 0 in y.shape[1:]:
        raise FedraxError(f"{where}: labels of shape {y.shape[1:]} are empty.")
    images = _images(x, pixels, False, where)
    if images is not None and images.dtype != np.uint8:
        raise FedraxError(f"{where}: pixels must be bytes (uint8), not {images.dtype}.")
    for what, array in (*named_inputs(x), *([("y", y)] if num_classes is None else [])):
        wide = array.dtype.itemsize > (4 if array.dtype.kind in "iu" else 8)
        if array.dtype.kind not in "buif" or wide or not array.dtype.isnative:
            raise FedraxError(f"{where}: JAX does not support {what} of dtype {array.dtype}; as_samples converts it.")
    if padding is not None and (num_classes is None or y.ndim == 1):
        raise FedraxError(f"{where}: padding needs class labels y [n, ...] of positions, not shape {y.shape}.")
    check_finite(samples, where)
    if num_classes is None:
        if y.dtype.kind != "f":
            raise FedraxError(f"{where}: regression targets must be floating-point, not {y.dtype}.")
        return
    if y.dtype != np.int32:
        raise FedraxError(f"{where}: class labels must be int32, not {y.dtype}.")
    if num_classes < 1:
        raise FedraxError(f"{where}: a classification needs at least one class, not {num_classes}.")
    low, high = label_range(y, padding)
    if low < 0 or high >= num_classes:
        or_padding = "" if padding is None else f", or be the padding {padding}"
        raise FedraxError(f"{where}: labels must lie in 0 .. {num_classes - 1}{or_padding}, found {low} .. {high}.")


def nonfinite_rows(array: np.ndarray, piece_bytes: int = _PIECE_BYTES) -> np.ndarray:
    """The rows of an array [n, ...] with a number that is NaN or infinite, int64, in ascending order.

    Reads pieces of ``piece_bytes``, which may be memory-mapped, and takes the time of their sum: only where a sum is
    not finite are its terms looked at.
    """
    found: list[np.ndarray] = []
    if array.dtype.kind == "f" and array.size:
        step = max(1, piece_bytes * len(array) // array.nbytes)
        for first in range(0, len(array), step):
            piece = array[first : first + step]
            with np.errstate(over="ignore", invalid="ignore"):
                sound = np.isfinite(piece.sum(dtype=np.result_type(array.dtype, np.float32)))
            if not sound:  # a sum of finite numbers can overflow
                found.append(first + np.nonzero(~np.isfinite(piece).reshape(len(piece), -1).all(1))[0])
            release_pages(array)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def check_finite(
    samples: Samples,
    where: str,
    *,
    names: tuple[str, str] = ("x", "y"),
    rows: np.ndarray | None = None,
    columns: Sequence[object] = (),
    memory_mapped: bool = False,
) -> None:
    """Raise FedraxError for samples with numbers that are NaN or infinite.

    Args:
        samples: The samples.
        where: Prefix of the message.
        names: Names of x and y in the message.
        rows: The row of each sample in the arrays that the user gave, if they are in another order.
        columns: Names of the columns of x, if it was a table.
        memory_mapped: Whether memory-mapped arrays are read.
    """
    inputs = [(*one, columns) for one in named_inputs(samples.x, names[0])]
    for what, array, titles in (*inputs, (names[1], samples.y, ())):
        if is_memory_mapped(array) and not memory_mapped:
            continue
        bad = nonfinite_rows(array)
        if not len(bad):
            continue
        given = bad if rows is None else rows[bad]
        row, given_row = int(bad[given.argmin()]), int(given.min())
        entry = tuple(int(i) for i in np.argwhere(~np.isfinite(array[row]))[0])
        value = array[row][entry]
        index = ", ".join(map(str, (given_row, *entry)))
        place = f"column {titles[entry[0]]!r} of row {given_row}" if titles else f"{what}[{index}]"
        raise FedraxError(
            f"{where}: {what} is not finite in {len(bad):,} of {len(array):,} rows, first {place} = {value}: leave"
            " those rows out, or fill in numbers."
        )


def numpy_generator(seed: int, purpose: str) -> np.random.Generator:
    """A generator seeded by ``seed`` and ``purpose``: different purposes draw independent numbers from one seed."""
    if seed < 0:
        raise FedraxError(f"a seed must be 0 or more, not {seed}.")
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def floor_fractions(sizes: np.ndarray, fraction: float) -> np.ndarray:
    """``fraction`` of each of the ``sizes``, rounded down, int64."""
    return (sizes * fraction * (1 + 1e-12)).astype(np.int64)  # 0.29 * 100 is slightly below 29 in floating point


def train_test_split(groups: np.ndarray, fraction: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into training and test rows, stratified by ``groups`` (classes or clients).

    Args:
        groups: The group of each row [n], of any sortable dtype.
        fraction: Share of each group in the test part, in [0, 1). Rounded down, so that no group loses all rows.
        rng: Source of the random order.

    Returns:
        Training and test row numbers, two sorted int64 arrays.

    Raises:
        FedraxError: ``fraction`` is outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise FedraxError(f"the test fraction must lie in [0, 1), not {fraction}.")
    shuffled = rng.permutation(len(groups))
    _, codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    in_test = rank < np.repeat(floor_fractions(sizes, fraction), sizes)
    return np.sort(order[~in_test]), np.sort(order[in_test])
