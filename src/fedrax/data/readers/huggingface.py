"""Data sets of Hugging Face's ``datasets`` (the extra ``huggingface``): from the disk, or objects given in Python.

Nothing here downloads anything or runs a data set's code: what comes from the hub is loaded by its user, with
``datasets.load_dataset``, and given to `from_huggingface`.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.dataset import Dataset, nonfinite_rows
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.assembly import reject_unused_options
from fedrax.data.readers.images import (
    EXIF_SIDEWAYS,
    MAX_FILE,
    channel_moments,
    check_image_form,
    decode_images,
    exif_orientation,
)
from fedrax.data.readers.table_files import cast_numeric
from fedrax.data.readers.tabular import (
    ColumnRoles,
    TableInputs,
    TableRows,
    check_columns,
    concatenate_tables,
    label_notes,
)
from fedrax.data.readers.text_data import MAX_CHARACTERS, build_vocabulary, encode_characters, encode_words, tokenize
from fedrax.data.readers.token_data import DEFAULT_WORDS, TextReader
from fedrax.errors import FedraxError, unknown

if TYPE_CHECKING:
    import polars as pl

Splits = dict[str, Any]
"""The ``datasets.Dataset`` of each split, by name."""


def load_huggingface(
    path: str | Path,
    label: str = "label",
    client: str | None = None,
    columns: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    partition_by: str | None = None,
    train_split: str = "train",
    test_split: str | None = "test",
    test_fraction: float = 0.2,
    seed: int = 0,
    labels: Literal["auto", "classes", "numbers"] = "auto",
    size: tuple[int, int] | None = None,
    color: Literal["rgb", "gray"] = "rgb",
    tokens: Literal["words", "characters"] = "words",
    length: int | None = None,
    min_count: int = 1,
    largest: int = 100_000,
    texts: tuple[str, ...] = (),
    tokenizer: str | None = None,
    standardize: Literal["all", "client", "none"] = "all",
    missing: Literal["refuse", "mean"] | float = "refuse",
    missing_as: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    max_categories: int = 50,
    different_columns: Literal["refuse", "union", "intersection"] = "refuse",
) -> Dataset:
    """Read what ``save_to_disk`` wrote, or Parquet files (train-*.parquet, test-*.parquet, or one file).

    A single column may hold images, texts or lists of numbers, all of one shape; otherwise columns are features, as in
    csv. Of several columns each one of images or lists is an input by its name, and all others are the input
    ``features``. Options without effect on what the columns hold raise an error.

    Args:
        path: Directory of ``save_to_disk``, Parquet file, or directory of Parquet files.
        label: Column of the labels.
        client: Column of the natural clients.
        columns: Columns of the features; empty: all others.
        drop: Columns that are not read.
        partition_by: Column that partitions use instead of the label.
        train_split: Name of the training split.
        test_split: Name of the test split; none: test rows are held out of the training split.
        test_fraction: Share of the rows of each client, or else class, that is held out without a test split, drawn row
            by row. It is for independent rows: overlapping windows of a recording need a split of whole recordings.
        seed: Seed of the choice of the test rows.
        labels: Whether labels are "classes" or "numbers" of a regression; "auto" decides by their type.
        size: Height and width in pixels to which images are resized; by default those of the first.
        color: Whether images have three channels, "rgb", or one, "gray".
        tokens: Whether a column of texts is cut into "words" or "characters".
        length: Number of tokens of a text.
        min_count: Number of occurrences from which a word is in the vocabulary.
        largest: Largest number of words in the vocabulary.
        texts: One column of texts, or two for pairs of texts, that are read as tokens.
        tokenizer: Directory of a tokenizer of ``transformers``; by default texts are split into words.
        standardize: Standardize numeric features over "all" clients, for each "client", or not ("none").
        missing: What replaces missing values: "refuse" raises an error, "mean" the mean of the training rows, or a
            number.
        missing_as: Cell contents that mean a missing value, besides empty cells and NaN.
        categorical: Columns that are one-hot encoded, also a single column of texts.
        max_categories: Largest number of categories of a column.
        different_columns: What happens if splits or Parquet files differ in their columns: "refuse" raises an error;
            "union" and "intersection" read all or the shared ones.
    """
    given = dict(locals())
    chosen = ColumnRoles(label, client, partition_by, tuple(columns), tuple(drop), labels, standardize, missing)
    chosen = replace(chosen, categorical=tuple(categorical), max_categories=max_categories)
    chosen = replace(chosen, different_columns=different_columns, texts=tuple(texts))
    if tokens not in ("words", "characters"):
        raise unknown("tokens:", tokens, ("words", "characters"))
    splits, name = _splits(path, different_columns)
    parts = _select_splits(splits, train_split, test_split, test_fraction, name)
    table, first, features, notes = _concatenate_splits(parts, chosen, name)
    table = _nullify_markers(table, missing_as, chosen)
    owners = _with_class_names(
        TableRows.of(table, chosen, first, test_fraction, seed, name), table, chosen, features, name
    )
    notes += [] if getattr(features[label], "names", None) else label_notes(table, chosen)
    notes += _unused_split_notes(splits, train_split, test_split, name)
    owners = replace(owners, notes=(*owners.notes, *notes))
    kinds = {column: _column_kind(table[column].dtype) for column in chosen.features(table, name)}
    single = next(iter(kinds)) if len(kinds) == 1 and not texts else None
    if single is not None and kinds[single] == "text" and single not in categorical and tokenizer is not None:
        chosen, kinds, single = replace(chosen, texts=(single,)), {}, None
    found = _kinds_of_samples(kinds, chosen)
    _reject_options_of_others(found, chosen, given)
    if single is not None and found != {"features"}:
        column = table[single]
        if column.null_count():
            raise FedraxError(f"{name}: column {single!r} has missing values.")
        if found == {"images"}:
            images, mean, std = _decoded(column, owners, size, color, name)
            return replace(owners.dataset(name, images, (_STANDARDIZED,)), pixels=True, mean=mean, std=std)
        if found == {"texts"}:
            return _text_dataset(column, owners, tokens, length, min_count, largest, name)
        return owners.dataset(name, _nested_lists(column, name))
    read = TextReader(tokenizer, length, min_count, largest)
    return _dataset_of_columns(table, chosen, owners, kinds, read, partial(_decoded, size=size, color=color), name)


_SCALARS = ("text", "number", "time")
"""Kinds of columns with one value in each row."""
_STANDARDIZED = "pixels are standardized by mean and deviation of the training images (normalize)"
"""Note on images."""
_OPTIONS = {
    "images": ("size", "color"),
    "texts": ("tokens", "length", "min_count", "largest"),
    "tokens": ("tokenizer", "length", "min_count", "largest"),
    "lists": (),
    "features": ("standardize", "missing", "missing_as", "categorical", "max_categories"),
}
"""Kinds of samples, and the options that apply to them."""


def _dataset_of_columns(
    table: pl.DataFrame,
    chosen: ColumnRoles,
    owners: TableRows,
    kinds: Mapping[str, str],
    read: TextReader,
    decoded: Callable[..., tuple[np.ndarray, tuple[float, ...], tuple[float, ...]]],
    name: str,
) -> Dataset:
    """The data set of columns of several kinds, of which one may hold images that ``decoded`` decodes."""
    nested = {column: kind for column, kind in kinds.items() if kind not in _SCALARS}
    inputs = TableInputs.of(table, chosen, owners, name, read, [column for column in kinds if column not in nested])
    pictures = [column for column, kind in nested.items() if kind == "image"]
    if len(pictures) > 1:
        raise FedraxError(
            f"{name}: {', '.join(pictures)} are images, of which a sample may have one: leave others out."
        )
    x: Any = inputs.x
    mean, std = (), ()
    if nested and not isinstance(x, dict):
        x = {} if x is None else {"tokens" if chosen.texts else "features": x}
    for column, kind in nested.items():
        if table[column].null_count():
            raise FedraxError(f"{name}: column {column!r} has missing values.")
        if kind == "image":
            x[column], mean, std = decoded(table[column], owners, name=name)
        else:
            x[column] = _nested_lists(table[column], name)
    made = owners.dataset(name, x, (*inputs.notes, *([_STANDARDIZED] if pictures else [])))
    made = inputs.complete(made)
    return replace(made, pixels=pictures[0], mean=mean, std=std) if pictures else made


def _kinds_of_samples(kinds: dict[str, str], chosen: ColumnRoles) -> set[str]:
    """The kinds of inputs: of a single column its own; of several, images and lists, and features of all others."""
    found = {"images" if kind == "image" else "lists" for kind in kinds.values() if kind not in _SCALARS}
    scalars = [column for column, kind in kinds.items() if kind in _SCALARS]
    if chosen.texts:
        found.add("tokens")
    elif len(kinds) == 1 and list(kinds.values()) == ["text"] and not set(kinds) <= set(chosen.categorical):
        return {"texts"}
    return found | ({"features"} if scalars else set())


def _reject_options_of_others(found: set[str], chosen: ColumnRoles, given: dict[str, Any]) -> None:
    """Raise FedraxError for options that apply to none of these kinds of inputs."""
    used = {option for kind in found for option in _OPTIONS[kind]}
    idle = sorted({option for of in _OPTIONS.values() for option in of} - used)
    if set(chosen.categorical) <= {chosen.label, chosen.partition_by}:  # which are no samples
        idle = [option for option in idle if option != "categorical"]
    reject_unused_options(
        load_huggingface, f"on {' and '.join(sorted(found))}", **{option: given[option] for option in idle}
    )


@checked_arguments
def from_huggingface(dataset: Any, **options: Any) -> Dataset:
    """Convert a data set of Hugging Face's ``datasets`` that is in memory.

    Args:
        dataset: A ``datasets.Dataset`` or ``datasets.DatasetDict``; streaming data sets are not supported.
        **options: Options of the data set "huggingface" in `load`: columns, splits, clients, text and image options.

    Returns:
        The data set.

    Raises:
        FedraxError: The package datasets is missing, ``dataset`` has another type, or an option does not fit its
            columns.

    Example:
        >>> hub = datasets.load_dataset("ylecun/mnist")  # doctest: +SKIP
        >>> dataset = fedrax.data.from_huggingface(hub, label="label")  # doctest: +SKIP
    """
    return load_huggingface(dataset, **options)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FedraxError("reading data of Hugging Face needs the package datasets: pip install datasets") from error


def _splits(given: Any, different_columns: str) -> tuple[Splits, str]:
    """The splits, and the name of the data set."""
    datasets = _import("datasets")
    name = given.name if isinstance(given, Path) else Path(given).name if isinstance(given, str) else "huggingface"
    if isinstance(given, str | Path):
        try:
            given = _read_from_disk(Path(given), datasets, different_columns)
        except FedraxError:
            raise
        except Exception as error:  # a damaged file may break the readers in any way
            raise FedraxError(f"{name} cannot be read as a Hugging Face data set: {error}.") from error
    if isinstance(given, datasets.Dataset):
        given = {"": given}
    if not isinstance(given, dict) or not all(isinstance(split, datasets.Dataset) for split in given.values()):
        raise FedraxError(
            f"{type(given).__name__} cannot be read: give a datasets.Dataset or DatasetDict that does not stream."
        )
    return dict(given), name


def _read_from_disk(path: Path, datasets: Any, different_columns: str) -> Any:
    if not path.exists():
        raise FedraxError(f"there is no data set {path}: download it first, with datasets.load_dataset.")
    if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return datasets.load_from_disk(str(path.resolve()))
    files = [path] if path.is_file() else sorted(path.glob("*.parquet")) or sorted((path / "data").glob("*.parquet"))
    if not files:
        raise FedraxError(f"{path} holds neither what save_to_disk writes nor Parquet files.")
    if sum(file.stat().st_size for file in files) > MAX_BYTES:
        raise FedraxError(f"{path} holds more than {MAX_BYTES >> 30} GiB.")
    splits: dict[str, list[Path]] = {}
    for file in files:  # train-00000-of-00001.parquet, test.parquet
        splits.setdefault(file.stem.split("-")[0] if path.is_dir() else "", []).append(file)
    return {split: datasets.Dataset(_read_parquet(parts, different_columns)) for split, parts in splits.items()}


def _read_parquet(files: Sequence[Path], different_columns: str) -> Any:
    """The rows of Parquet files; PyArrow alone would drop columns that the first file does not have."""
    tables = [_import("pyarrow.parquet").read_table(file) for file in files]
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    shared = [name for name in names if all(name in table.column_names for table in tables)]
    if len(shared) < len(names) and different_columns == "refuse":
        name = next(name for name in names if name not in shared)
        lacking = next(file for file, table in zip(files, tables, strict=True) if name not in table.column_names)
        raise FedraxError(
            f"{lacking} has no column {name!r}, which other files of its split have: set different_columns to"
            ' "union" or "intersection".'
        )
    if different_columns != "union":
        tables = [table.select(shared) for table in tables]
    return _import("pyarrow").concat_tables(tables, promote_options="permissive")


def _select_splits(
    splits: Splits, train_split: str, test_split: str | None, test_fraction: float, name: str
) -> list[Any]:
    """The training split and, where there is one, the test split, in which case ``test_fraction`` must be unset."""
    only = splits.get("") if len(splits) == 1 else None
    if only is None and train_split not in splits:
        raise unknown(f"split of {name}", train_split, splits)
    if test_split not in (None, "test", *splits):
        raise unknown(f"split of {name}", test_split, splits)
    train = splits[train_split] if only is None else only
    if test_split not in splits or test_split == train_split:
        return [train]
    reject_unused_options(load_huggingface, f"where {test_split} is a split", test_fraction=test_fraction)
    return [train, splits[test_split]]


def _concatenate_splits(
    parts: Sequence[Any], chosen: ColumnRoles, name: str
) -> tuple[pl.DataFrame, int | None, Any, list[str]]:
    """The rows of the training split, then those of a test split; the number of training rows; features; notes."""
    if sum(part.data.nbytes for part in parts) > MAX_BYTES:
        raise FedraxError(f"{name} holds more than {MAX_BYTES >> 30} GiB.")
    tables = [_to_polars(part) for part in parts]
    if not all(map(len, tables)):
        raise FedraxError(f"{name} has a split without rows.")
    types: dict[str, Any] = {}
    for table in tables:
        for column, dtype in table.schema.items():
            if types.setdefault(column, dtype) != dtype:
                raise FedraxError(f"{name}: the splits differ in the type of column {column!r}.")
    check_columns(types, chosen.named, name)
    names = [f"the {what} split of {name}" for what in ("training", "test")][: len(tables)]
    used = [table.select([*filter(chosen.uses, table.columns)]) for table in tables]
    joined, notes = concatenate_tables(used, names, chosen)
    for column in chosen.rows:
        if len({tuple(getattr(part.features[column], "names", None) or ()) for part in parts}) > 1:
            raise FedraxError(
                f"{name}: the splits number the classes of {column!r} differently: encode them before the split"
            )
    features = {column: kind for part in reversed(parts) for column, kind in part.features.items()}
    return joined, len(tables[0]) if len(parts) == 2 else None, features, notes


def _to_polars(part: Any) -> pl.DataFrame:
    """The rows as stored, without decoding; arrays as nested lists."""
    import polars as pl

    pa = _import("pyarrow")
    table = part.with_format("arrow")[:]
    for i, column in enumerate(table.columns):
        if isinstance(column.type, pa.ExtensionType):
            plain = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
            table = table.set_column(i, table.column_names[i], plain)
    made = pl.from_arrow(table)
    assert isinstance(made, pl.DataFrame)
    return made.with_columns(pl.col(pl.Decimal).cast(pl.Float64))  # amounts, as databases write them


def _unused_split_notes(splits: Splits, train_split: str, test_split: str | None, name: str) -> list[str]:
    """Note about splits that are not used."""
    others = sorted(set(splits) - {"", train_split, test_split})
    return [f"{name}: {', '.join(others)} left out (train_split, test_split)"] * bool(others)


def _nullify_markers(table: pl.DataFrame, missing_as: Sequence[str], chosen: ColumnRoles) -> pl.DataFrame:
    """Replace the strings in ``missing_as`` by null; a column of which all others are numbers becomes numeric."""
    import polars as pl

    for column in table.select(pl.col(pl.String)).iter_columns() if missing_as else ():
        kept = column.set(column.str.strip_chars().is_in([*map(str.strip, missing_as)]), None)
        if kept.null_count() > column.null_count():
            table = table.with_columns(kept if column.name in chosen.of_names else cast_numeric(kept))
    return table


def _with_class_names(
    owners: TableRows, table: pl.DataFrame, chosen: ColumnRoles, features: Any, name: str
) -> TableRows:
    """Names of classes and clients from a ``ClassLabel``, in its order."""
    names = getattr(features[chosen.label], "names", None)
    if names and chosen.labels != "numbers":
        y = table[chosen.label].to_numpy()
        if y.min() < 0 or y.max() >= len(names):
            raise FedraxError(
                f"{name}: column {chosen.label!r} holds {y.min()} .. {y.max()}, where classes are 0 .. {len(names) - 1}"
                " (-1 are rows without label: choose another split for the test, or test_split none)."
            )
        owners = replace(owners, y=y.astype(np.int32), class_names=tuple(map(str, names)))
    names = getattr(features[chosen.client], "names", None) if chosen.client else None
    if names and all(0 <= int(number) < len(names) for number in owners.client_names):
        owners = replace(owners, client_names=tuple(str(names[int(number)]) for number in owners.client_names))
    return owners


def _column_kind(dtype: Any) -> str:
    """The kind of a column, from its polars dtype."""
    import polars as pl

    if isinstance(dtype, pl.Struct):
        return "image" if {field.name for field in dtype.fields} == {"bytes", "path"} else "structure"
    if dtype == pl.Binary:
        return "image"
    if isinstance(dtype, pl.List | pl.Array):
        return "list"
    if dtype.is_numeric() or dtype == pl.Boolean:
        return "number"
    return "text" if dtype in (pl.String, pl.Categorical, pl.Enum) else "time"


def _decoded(
    column: pl.Series, owners: TableRows, size: tuple[int, int] | None, color: str, name: str
) -> tuple[np.ndarray, tuple[float, ...], tuple[float, ...]]:
    """(images [n, height, width, channels], mean and standard deviation of the training images per channel)."""
    import polars as pl

    encoded = column if column.dtype == pl.Binary else column.struct.field("bytes")
    if encoded.null_count() or encoded.bin.size().max() > MAX_FILE:  # type: ignore[operator]
        raise FedraxError(
            f"{name}: images must be stored as bytes, not as paths, and be of at most {MAX_FILE:,} bytes."
        )
    shape, mode = check_image_form(_first_image_size(encoded[0], name) if size is None else size, color)
    images = decode_images(encoded.to_list(), _open_bytes, shape, mode, name)
    return images, *channel_moments(images, owners.train)


def _open_bytes(data: bytes) -> AbstractContextManager[io.BytesIO]:
    return nullcontext(io.BytesIO(data))


def _first_image_size(data: bytes, name: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            width, height = image.size
            return (width, height) if exif_orientation(image) >= EXIF_SIDEWAYS else (height, width)
    except Exception as error:
        raise FedraxError(f"{name}, row 0 is not a readable JPEG or PNG image ({error}).") from error


def _text_dataset(
    column: pl.Series, owners: TableRows, tokens: str, length: int | None, min_count: int, largest: int, name: str
) -> Dataset:
    length = DEFAULT_WORDS if length is None else length
    if not 1 <= length <= MAX_CHARACTERS or 4 * len(column) * length > MAX_BYTES:
        raise FedraxError(f"{name}: {len(column):,} texts of length {length} are none, or too much.")
    texts = [str(text)[:MAX_CHARACTERS] for text in column]
    if tokens == "characters":
        reject_unused_options(load_huggingface, "on characters", min_count=min_count, largest=largest)
        x, words = encode_characters(texts, owners.train, length)
    else:
        lists = [tokenize(text) for text in texts]
        words = build_vocabulary((lists[row] for row in owners.train), min_count, largest)
        x = encode_words(lists, words, length)
    return replace(owners.dataset(name, x), vocabulary=words)


def _nested_lists(column: pl.Series, name: str) -> np.ndarray:
    """Lists of numbers, and lists of such lists, as an array [n, ...]."""
    import polars as pl

    shape = [len(column)]
    while isinstance(column.dtype, pl.List | pl.Array):
        lists = column.arr.to_list() if isinstance(column.dtype, pl.Array) else column
        lengths = lists.list.len().unique()
        if lists.null_count() or len(lengths) != 1 or not lengths[0]:
            raise FedraxError(f"{name}: the lists of a column must all have one shape, and no missing values.")
        shape.append(int(lengths[0]))
        column = lists.explode()
    if not column.dtype.is_numeric() or column.null_count():
        raise FedraxError(f"{name}: lists must hold numbers, and no missing values, not {column.dtype}.")
    array = column.to_numpy().reshape(shape)
    if len(bad := nonfinite_rows(array)):
        raise FedraxError(f"{name} holds numbers that are not finite, in {len(bad):,} rows, the first is row {bad[0]}.")
    return array
