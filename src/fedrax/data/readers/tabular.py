"""CSV tables as data sets: column selection, one-hot encoding, imputation and standardization.

Means, standard deviations and categories are estimated on training rows only and are reported in ``notes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedrax.data.dataset import Dataset, as_samples
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.assembly import (
    encode_categories,
    encode_labels,
    format_number,
    make_dataset,
    reject_unused_options,
    small_split_notes,
    split_rows,
)
from fedrax.data.readers.table_files import CsvFormat, normalize_decimal, read_csv, zero_padded_columns
from fedrax.data.readers.token_data import TextReader
from fedrax.errors import FedraxError, unknown
from fedrax.host_memory import host_memory
from fedrax.inputs import Inputs

if TYPE_CHECKING:
    import polars as pl

SCALE_RATIO = 100.0
"""Ratio of the standard deviations of two features above which there is a note."""

FREE_TEXT_SPACES = 3
"""Mean number of spaces above which categories are probably free text."""

MEMORY_COPIES = 4
"""Copies of all samples in memory at the same time while they are read, split and partitioned."""

MIN_ROWS_FOR_ID = 50
"""Smallest number of rows for which distinct integers, or mostly distinct texts, are reported as row ids."""

MIN_DISTINCT_TEXTS = 10
"""Smallest number of texts that are reported as row ids if all are distinct."""

EXPECTED_COLLISIONS = 5
"""Expected number of equal pairs among random integers above which distinct integers are reported as row ids."""


_FILE_COLUMN = "\nfile"
"""Name of the added column with the file of each row; no column of a file can have this name."""


@dataclass(frozen=True)
class EncodedFeatures:
    """The features of all rows."""

    x: np.ndarray
    """Features with one-hot encoded categories, float32 [n, features]."""
    numbers: np.ndarray
    """Numeric features, float64 [n, numeric], NaN where a value is missing."""
    names: tuple[str, ...]
    """Names of the features."""
    numeric: np.ndarray
    """Indices of the numeric features in x."""
    notes: tuple[str, ...]
    """Notes on the preprocessing of the columns."""


@dataclass(frozen=True)
class OneHotColumn:
    """A one-hot encoded column: the index in ``names`` of each row's category [n], -1 for none."""

    column: str
    codes: np.ndarray
    names: tuple[str, ...]


@dataclass(frozen=True)
class ColumnRoles:
    """Roles and preprocessing of a table's columns; the fields are those of `load_csv`."""

    label: str
    client: str | None = None
    partition_by: str | None = None
    columns: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    labels: Literal["auto", "classes", "numbers"] = "auto"
    standardize: Literal["all", "client", "none"] = "all"
    missing: Literal["refuse", "mean"] | float = "refuse"
    categorical: tuple[str, ...] = ()
    max_categories: int = 50
    decimal: Literal[".", ","] = "."
    different_columns: Literal["refuse", "union", "intersection"] = "refuse"
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_choices(labels=self.labels, standardize=self.standardize, different_columns=self.different_columns)
        if isinstance(self.missing, str):
            _check_choices(missing=self.missing)
        elif isinstance(self.missing, bool) or not (
            isinstance(self.missing, int | float | np.number) and abs(self.missing) <= np.finfo(np.float32).max
        ):
            raise FedraxError(f'missing must be "refuse", "mean" or a finite number, not {self.missing!r}.')
        twice = next((name for name, count in Counter(self.columns).items() if count > 1), None)
        if twice is not None:
            raise FedraxError(f"columns names {twice!r} twice.")
        if self.client in self.columns:
            raise FedraxError(f"columns names {self.client!r}, the column of clients, which cannot be a feature.")
        wrong = next((name for name in self.texts if name in (*self.rows, *self.drop, *self.categorical)), None)
        if wrong is not None or len(self.texts) > 2 or len(set(self.texts)) < len(self.texts):
            found = f"{wrong!r}, which has another role" if wrong is not None else ", ".join(self.texts)
            raise FedraxError(f"texts names one column of texts, or two for pairs of texts, not {found}.")

    @property
    def rows(self) -> list[str]:
        """The columns of which each row needs a value: label, client and ``partition_by``."""
        return [self.label, *(name for name in (self.client, self.partition_by) if name is not None)]

    @property
    def named(self) -> list[str]:
        """All columns that must exist."""
        return [*self.rows, *self.columns, *self.drop, *self.categorical, *self.texts]

    @property
    def of_names(self) -> list[str]:
        """Columns of classes, clients, categories and texts, whose values are read as written: 007 differs from 7."""
        classes = [self.label] if self.labels != "numbers" else []
        return [*classes, *([self.client] if self.client is not None else []), *self.categorical, *self.texts]

    def uses(self, name: str) -> bool:
        """Whether a column has a role or is a feature."""
        is_selected = not self.columns or name in self.columns
        return name in (*self.rows, *self.texts) or (is_selected and name not in self.drop)

    def features(self, table: pl.DataFrame, path: object) -> list[str]:
        """The feature columns: the selected ones without those of other roles."""
        others = {self.label, self.client, *self.drop, *self.texts}
        features = [name for name in (self.columns or table.columns) if name not in others]
        if not (features or self.texts):
            raise FedraxError(f"{path} has no feature left: label, client, columns and drop leave none of its columns.")
        return features


@dataclass(frozen=True)
class TableRows:
    """Labels, clients, ``partition_by`` and the split of a table's rows, without features."""

    y: np.ndarray
    class_names: tuple[str, ...]
    clients: np.ndarray | None
    client_names: tuple[str, ...]
    partition_by: np.ndarray | None
    train: np.ndarray
    test: np.ndarray
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, table: pl.DataFrame, chosen: ColumnRoles, first: int | None, test_fraction: float, seed: int, path: str
    ) -> TableRows:
        """Read the columns; the ``first`` rows are for training, or all but ``test_fraction`` of each group."""
        y, names = encode_labels(_labels(table, chosen, path))
        clients, client_names = None, ()
        if chosen.client is not None:
            _reject_missing(table, chosen.client, path)
            found, clients = np.unique(table[chosen.client].to_numpy(), return_inverse=True)
            client_names = tuple(str(name) for name in found)
        if first is None:
            train, test = split_rows(y, clients, test_fraction, seed)
        else:
            train, test = np.arange(first), np.arange(first, len(table))
        by = None if chosen.partition_by is None else _partition_values(table, chosen, chosen.partition_by, path)[train]
        notes = () if first is not None else small_split_notes(clients, test, test_fraction)
        notes += _unseen_in_training(y, names, train, test, "class", "classes") if y.dtype.kind == "i" else ()
        notes += () if clients is None else _unseen_in_training(clients, client_names, train, test, "client", "clients")
        return cls(y, names, clients, client_names, by, train, test, notes)

    def dataset(self, name: str, x: Inputs, notes: tuple[str, ...] = ()) -> Dataset:
        """The data set of these rows with the inputs x [n, ...]."""
        samples, names = as_samples(x, self.y), self.client_names
        made = make_dataset(name, samples, self.clients, self.train, self.test, self.class_names, client_names=names)
        return replace(made, partition_by=self.partition_by, notes=(*notes, *self.notes))


def _unseen_in_training(
    codes: np.ndarray, names: Sequence[str], train: np.ndarray, test: np.ndarray, one: str, more: str
) -> tuple[str, ...]:
    """Note about classes or clients that only test rows have."""
    alone = np.setdiff1d(codes[test], codes[train])
    if not len(alone):
        return ()
    what = f"the {one} {names[alone[0]]!r}" if len(alone) == 1 else f"{len(alone):,} {more} such as {names[alone[0]]!r}"
    return (f"{np.isin(codes[test], alone).sum():,} test rows are of {what}, of which there are no training rows",)


def _partition_values(table: pl.DataFrame, chosen: ColumnRoles, name: str, path: str) -> np.ndarray:
    """A column as integers from 0 in the order of its values, or as floats if it holds floats."""
    _reject_missing(table, name, path)
    reject_text_in_numeric_columns(table, chosen, [name], path)
    values = table[name].to_numpy()
    if values.dtype.kind != "f":
        return encode_categories(values)[1]
    _reject_nonfinite(values, name, path)
    return values


_CHOICES = {
    "labels": ("auto", "classes", "numbers"),
    "standardize": ("all", "client", "none"),
    "missing": ("refuse", "mean"),
    "different_columns": ("refuse", "union", "intersection"),
}


def _check_choices(**given: str) -> None:
    for option, word in given.items():
        if word not in _CHOICES[option]:
            raise unknown(f"{option}:", word, _CHOICES[option])


def check_columns(known: Collection[str], named: Sequence[str], path: object) -> None:
    """Raise FedraxError for ``named`` columns that are not among the ``known`` ones."""
    for column in named:
        if column not in known:
            raise unknown(f"column of {path}", column, known)


def _labels(table: pl.DataFrame, chosen: ColumnRoles, path: object) -> np.ndarray:
    """The label column as classes (integers, texts) or targets (floats)."""
    label, kind = chosen.label, chosen.labels
    _reject_missing(table, label, path)
    column = table[label]
    _reject_unsupported_type(column, path)
    if kind != "classes":
        reject_text_in_numeric_columns(table, chosen, [label], path)
    if kind == "numbers":
        if not column.dtype.is_numeric():
            raise FedraxError(f"{path}: column {label!r} holds texts, which cannot be regression targets.")
        y = column.to_numpy().astype(np.float64)
    elif kind == "classes" and column.dtype.is_float():
        y = np.array([format_number(value) for value in column.to_list()])
    else:
        y = column.to_numpy()
    if y.dtype.kind == "f":
        _reject_nonfinite(y, label, path)
    return y


def _reject_nonfinite(values: np.ndarray, name: str, path: object, limit: float = np.finfo(np.float64).max) -> None:
    """Raise FedraxError, naming the first row, for numbers of a column beyond ``limit``; rows count from 0."""
    bad = ~(np.abs(values) <= limit)
    if bad.any():
        beyond = "" if limit == np.finfo(np.float64).max else ", or beyond 32-bit floats"
        raise FedraxError(
            f"{path}: column {name!r} holds numbers that are not finite{beyond}, in {bad.sum():,} rows, the first"
            f" {values[bad][0]} in row {bad.argmax()}."
        )


def label_notes(table: pl.DataFrame, chosen: ColumnRoles) -> list[str]:
    """Warnings about labels that may be misinterpreted: integers as classes, or classes that differ in case only."""
    import polars as pl

    column, most = table[chosen.label], chosen.max_categories
    if is_text(column):
        names, rows = column.cast(pl.String).unique().sort().to_list(), len(column)
        note = f"warning: {chosen.label!r} has {len(names):,} classes in {rows:,} rows: it may be an ID or a date"
        return _case_notes(names, chosen.label) + ([note] if 2 * len(names) > rows >= 10 else [])
    if not column.dtype.is_numeric():
        return []
    count = column.n_unique()
    if count == 1:
        return [f"warning: {chosen.label!r} is {column[0]} in every row: there is nothing to predict"]
    if chosen.labels != "auto":
        return []
    if column.dtype.is_integer() and count > most:
        meaning, other, task = "distinct integers, which are read as classes", "numbers", "a regression"
    elif column.dtype.is_float() and count <= min(most, len(column) // 5) and (column == column.floor()).all():
        meaning, other, task = "distinct integers written as floats, which are read as targets", "classes", "classes"
    else:
        return []
    return [f'warning: {chosen.label!r} holds {count:,} {meaning}: labels = "{other}" makes {task} of them']


def _case_notes(names: Sequence[str], label: str) -> list[str]:
    """Warning about two classes whose names differ in case only."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            return [f"warning: {label!r} has classes that differ in case only, such as {other!r} and {name!r}"]
    return []


def _reject_unsupported_type(column: pl.Series, path: object) -> None:
    if column.dtype.is_nested() or str(column.dtype).startswith(("Binary", "Object", "Duration")):
        raise FedraxError(
            f"{path}: column {column.name!r} holds {column.dtype} values, which are neither numbers nor texts: choose"
            " other columns, or convert it to numbers"
        )


def _reject_missing(table: pl.DataFrame, column: str, path: object) -> None:
    found = table[column].fill_nan(None) if table[column].dtype.is_float() else table[column]
    if found.null_count():
        raise FedraxError(
            f"{path}: column {column!r} has missing values, which are not allowed there: remove those rows, of which"
            f" there are {found.null_count():,}, the first row {found.is_null().arg_max()}"
        )


def is_text(column: pl.Series) -> bool:
    """Whether a column holds text; a column without values counts as numeric."""
    is_empty = column.null_count() == len(column)
    return not is_empty and not column.dtype.is_numeric() and str(column.dtype) != "Boolean"


_MISSING_MARKERS = ("na", "n/a", "#n/a", "<na>", "nan", "null", "?")
"""Markers of missing values in other programs, in lower case."""


def _missing_markers(column: pl.Series) -> pl.Series:
    """The values of a text column that are markers of missing values."""
    import polars as pl

    written = str(column.dtype).startswith(("String", "Categorical", "Enum"))  # not bytes, dates and lists of Parquet
    texts = (column if written else column.clear()).drop_nulls().cast(pl.String, strict=False).str.strip_chars()
    return texts.filter(texts.str.to_lowercase().is_in(_MISSING_MARKERS))


def missing_marker_notes(table: pl.DataFrame, chosen: ColumnRoles, features: Sequence[str]) -> list[str]:
    """Notes about classes, clients or categories that may be markers of missing values."""
    notes, roles = [], {chosen.label: "class", chosen.client: "client"}
    for name in [chosen.label, *([chosen.client] if chosen.client else []), *features]:
        found = _missing_markers(table[name])
        if not len(found):
            continue
        note = f"{found[0]!r}, in {len(found):,} rows of {name!r}, is read as a {roles.get(name, 'category')}"
        remove = "remove those rows if it means a missing value"
        notes.append(f"warning: {note}: {remove}" if name in roles else f"{note} (missing_as)")
    return notes


_AMOUNT = r"^[-+]?[$€£]?\s?(\d+([.,]\d+)?|\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?|\d{1,3}(\.\d{3})+(,\d+)?)\s?[%$€£]?$"
"""Numbers with thousands separators or decimal commas, percentages and prices; not lists as 1,2,5."""


def reject_text_in_numeric_columns(
    table: pl.DataFrame, chosen: ColumnRoles, names: Sequence[str], path: object
) -> None:
    """Raise FedraxError for numeric columns that a few texts ("NA", "?") or commas would turn into categories."""
    import polars as pl

    for name in names:
        _reject_unsupported_type(table[name], path)
        if name in chosen.categorical or not is_text(table[name]):
            continue
        written = table[name].drop_nulls().cast(pl.String)
        odd = written.filter(normalize_decimal(written, chosen.decimal).cast(pl.Float64, strict=False).is_null())
        amounts = odd.filter(odd.str.strip_chars().str.contains(_AMOUNT))
        if 2 * len(amounts) > len(odd):
            commas = ' (decimal = "," of csv reads commas before fractions)' if chosen.decimal == "." else ""
            remedy = 'labels = "classes" reads them' if name == chosen.label else "categorical reads the column"
            raise FedraxError(
                f"{path}: column {name!r} holds texts such as {amounts[0]!r}, numbers in another form: write them as"
                f" plain numbers{commas}; {remedy} as categories."
            )
        lost = len(_missing_markers(odd))  # also for columns that are mostly missing
        if 2 * (len(odd) - lost) < len(written) - lost and len(odd):
            kinds = odd.unique(maintain_order=True).to_list()
            listed = ", ".join(map(repr, kinds[:3])) + (f" and {len(kinds) - 3:,} others" if len(kinds) > 3 else "")
            raise FedraxError(
                f"{path}: column {name!r} holds numbers, and in {len(odd):,} of {len(table):,} rows texts: {listed}."
                f" {_remedies(chosen, name)}."
            )


def _remedies(chosen: ColumnRoles, name: str) -> str:
    """Remedies for texts in a numeric column; labels and ``partition_by`` must not be missing."""
    if name == chosen.label:
        return 'Remove those rows; labels = "classes" reads all labels as classes'
    if name == chosen.partition_by:
        return "Remove those rows; categorical names columns whose numbers are categories"
    return (
        "missing_as names texts that stand for a missing value; categorical names columns whose numbers are categories;"
        " drop leaves columns out"
    )


def load_csv(
    path: str | Path,
    label: str = "label",
    client: str | None = None,
    test_path: str | Path | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    columns: tuple[str, ...] = (),
    drop: tuple[str, ...] = (),
    labels: Literal["auto", "classes", "numbers"] = "auto",
    standardize: Literal["all", "client", "none"] = "all",
    missing: Literal["refuse", "mean"] | float = "refuse",
    missing_as: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    max_categories: int = 50,
    partition_by: str | None = None,
    separator: str = ",",
    decimal: Literal[".", ","] = ".",
    different_columns: Literal["refuse", "union", "intersection"] = "refuse",
    texts: tuple[str, ...] = (),
    tokenizer: str | None = None,
    length: int | None = None,
    min_count: int = 1,
    largest: int = 100_000,
) -> Dataset:
    """Read a table with a header: the column ``label``, optionally a column ``client``, and features (float32).

    ``path`` is a file, or a folder of files ``*.csv``. Without ``client``, each file of a folder is one client, named
    after the file, and so is a single file with standardize="client", such as that of one hospital. Files that differ
    in their columns raise an error, unless ``different_columns`` reads all columns ("union", where a column that a file
    lacks is missing in its rows) or only those of all files ("intersection").

    Features are the ``columns`` given, or all others except ``drop``. Integer or text labels are classes, in sorted
    order; floats, or all labels with labels="numbers", are regression targets. The test part is ``test_path`` if given,
    otherwise ``test_fraction`` of the rows of each client (without clients, of each class). Partitions use the column
    ``partition_by`` instead of the label if it is given.

    Text columns and those in ``categorical`` are one-hot encoded by the categories of the training rows, at most
    ``max_categories``; a text that only test rows have is 0 everywhere. ``standardize`` subtracts the mean of the
    training rows from numeric features and divides by their standard deviation, over all clients or for each client.
    Values are ``missing`` in empty cells, as NaN, and where a cell is one of ``missing_as``: "refuse" raises an error,
    "mean" replaces them by the mean of the training rows (of the client, if each client is standardized by itself), and
    a number takes their place before features are standardized. Missing texts are a category of their own.
    ``separator`` is the character between cells, ``decimal`` the decimal mark.

    ``texts`` are one column of texts, or two for pairs of texts. Without a ``tokenizer`` they are ``length`` (40) words
    of the vocabulary of the training rows, those that occur ``min_count`` times, at most ``largest``: int32
    [n, length], of pairs [n, 2, length]. With one, a directory of a tokenizer of ``transformers``, they are the inputs
    that `encode_texts` gives. Other features beside them are the input ``features``.

    Args:
        path: A file, or a folder of files ``*.csv``.
        label: Column of the labels.
        client: Column of the natural clients; by default each file of a folder is one client.
        test_path: File or folder of the test rows.
        test_fraction: Share of the rows of each client, or else class, that is held out without ``test_path``, drawn
            row by row. It is for independent rows: of overlapping windows, hold out whole recordings in ``test_path``.
        seed: Seed of the choice of the test rows.
        columns: Columns of the features; empty: all others.
        drop: Columns that are not read.
        labels: Whether labels are "classes" or "numbers" of a regression; "auto" decides by their type.
        standardize: Standardize numeric features over "all" clients, for each "client", or not ("none").
        missing: What replaces missing values: "refuse" raises an error, "mean" the mean of the training rows, or a
            number.
        missing_as: Cell contents that mean a missing value, besides empty cells and NaN.
        categorical: Columns of numbers that are one-hot encoded as texts are.
        max_categories: Largest number of categories of a column.
        partition_by: Column that partitions use instead of the label.
        separator: Character between cells.
        decimal: Decimal mark.
        different_columns: What happens if files differ in their columns: "refuse" raises an error; "union" and
            "intersection" read all or the shared ones.
        texts: One column of texts, or two for pairs of texts, that are read as tokens.
        tokenizer: Directory of a tokenizer of ``transformers``; by default texts are split into words.
        length: Number of tokens of a text; by default 40 words.
        min_count: Number of occurrences from which a word is in the vocabulary.
        largest: Largest number of words in the vocabulary.
    """
    chosen = ColumnRoles(label, client, partition_by, tuple(columns), tuple(drop), labels, standardize, missing)
    chosen = replace(chosen, categorical=tuple(categorical), max_categories=max_categories, decimal=decimal)
    chosen = replace(chosen, different_columns=different_columns, texts=tuple(texts))
    read = TextReader(tokenizer, length, min_count, largest)
    if not texts:
        unused = {"tokenizer": tokenizer, "length": length, "min_count": min_count, "largest": largest}
        reject_unused_options(load_csv, "without texts", **unused)
    if test_path is not None:
        reject_unused_options(load_csv, "where test_path holds the test rows", test_fraction=test_fraction)
    parts = [_TableSource.of(Path(p)) for p in (path, test_path) if p is not None]
    if test_path is None and not parts[0].path.is_dir():
        reject_unused_options(load_csv, "on a single file", different_columns=different_columns)
    table, chosen, first, notes = _read_tables(parts, CsvFormat(separator, decimal, tuple(missing_as)), chosen)
    where = str(path) if test_path is None else f"{path} and {test_path}"
    owners = TableRows.of(table, chosen, None if test_path is None else first, test_fraction, seed, where)
    made = dataset_from_table(table, chosen, owners, Path(path).stem, where, read)
    if chosen.client != client:
        one = f'warning: all rows of {path} are of one client, as without client and with standardize = "client"'
        several = f"each of the {len(parts[0].files)} files of {path} is a client"
        notes = [several if parts[0].path.is_dir() else one, *notes]
    return replace(made, notes=(*notes, *made.notes, *label_notes(table, chosen)))


_STATISTICS = "mean and standard deviation of the features (standardize"
_POOLED = f'{_STATISTICS} = "none" avoids this; for the privacy of whole clients "client" does, too)'
_CLIENT_STATISTICS = f'{_STATISTICS} = "none" avoids this)'


@dataclass(frozen=True)
class TableInputs:
    """The inputs of all rows of a table."""

    x: Inputs | None
    """Features float32 [n, features], tokens, or a dictionary of both; None if the table has neither."""
    notes: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    pooled: tuple[str, ...] = ()
    client_statistics: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, table: pl.DataFrame, chosen: ColumnRoles, owners: TableRows, path: str, read: TextReader, names: list[str]
    ) -> TableInputs:
        """Encode and standardize the feature columns ``names``, and encode the texts."""
        made = cls(None)
        if names:
            reject_text_in_numeric_columns(table, chosen, names, path)
            encoded = _encode_features(table, chosen, names, owners.train, path)
            x, notes = _standardize(encoded, owners.train, owners.clients, chosen.standardize, path)
            how = chosen.standardize if encoded.numeric.any() else "none"
            made = cls(
                x,
                (*encoded.notes, *notes),
                encoded.names,
                pooled=(_POOLED,) if how == "all" else (),
                client_statistics=(_CLIENT_STATISTICS,) if how == "client" else (),
            )
        made = replace(made, notes=(*made.notes, *missing_marker_notes(table, chosen, names)))
        if not chosen.texts:
            return made
        tokens, words = read.encode([_texts_of(table, text, path) for text in chosen.texts], owners.train, path)
        if made.x is not None:
            tokens = {"features": made.x} | (tokens if isinstance(tokens, dict) else {"tokens": tokens})
        return replace(made, x=tokens, vocabulary=words)

    def complete(self, made: Dataset) -> Dataset:
        """The data set with names of the features, vocabulary, and the statistics by which x was computed."""
        names = ("feature_names", "vocabulary", "pooled", "client_statistics")
        return replace(made, **{name: getattr(self, name) for name in names})


def dataset_from_table(
    table: pl.DataFrame, chosen: ColumnRoles, owners: TableRows, name: str, path: str, read: TextReader
) -> Dataset:
    """The data set of a table with its features, and with the texts that ``read`` encodes."""
    inputs = TableInputs.of(table, chosen, owners, path, read, chosen.features(table, path))
    return inputs.complete(owners.dataset(name, inputs.x, inputs.notes))


def _texts_of(table: pl.DataFrame, name: str, path: str) -> list[str]:
    """The texts of a column; FedraxError if some are missing."""
    import polars as pl

    _reject_missing(table, name, path)
    _reject_unsupported_type(table[name], path)
    return table[name].cast(pl.String).to_list()


@dataclass(frozen=True)
class _TableSource:
    """The files of the training or test rows: one file, or all of a folder."""

    path: Path
    files: tuple[Path, ...]

    @classmethod
    def of(cls, path: Path) -> _TableSource:
        if not path.is_dir():
            return cls(path, (path,))
        files = tuple(sorted(file for file in path.glob("*.csv") if not file.name.startswith(".")))
        if not files:
            raise FedraxError(f"{path} is a folder without a file *.csv in it.")
        return cls(path, files)


def _read_tables(
    parts: Sequence[_TableSource], form: CsvFormat, chosen: ColumnRoles
) -> tuple[pl.DataFrame, ColumnRoles, int, list[str]]:
    """The rows of all files, the roles of the columns, the number of rows of the first part, and notes.

    Every named column exists; where each file is a client, a column names the client.
    """
    import polars as pl

    paths = [file for part in parts for file in part.files]
    padded = {name for file in paths for name in zero_padded_columns(file, chosen.of_names, form)}
    tables = [read_csv(file, form, sorted(padded)) for file in paths]
    if mixed := _mixed_type_columns(tables):
        tables = [read_csv(file, form, sorted(padded | mixed)) for file in paths]
    first = len(parts[0].files)
    empty = next((path for path, one in zip(paths[:first], tables, strict=False) if not len(one)), None)
    if empty is None and not sum(map(len, tables[first:] or tables)):
        empty = parts[-1].path
    if empty is not None:
        raise FedraxError(f"{empty} holds no rows.")
    check_columns(dict.fromkeys(name for t in tables for name in t.columns), chosen.named, parts[0].path)
    used = [table.select([*filter(chosen.uses, table.columns)]) for table in tables]
    table, notes = concatenate_tables(used, [*map(str, paths)], chosen)
    lengths = [len(one) for one in tables]
    in_folder = parts[0].path.is_dir()
    if chosen.client is None and (in_folder or chosen.standardize == "client"):
        if in_folder and not parts[-1].path.is_dir():
            raise FedraxError(f"each file of {paths[0].parent} is a client: test_path must be a folder of their files.")
        chosen = replace(chosen, client=_FILE_COLUMN)
        names = np.repeat([file.stem if in_folder else parts[0].path.stem for file in paths], lengths)
        table = table.with_columns(pl.Series(_FILE_COLUMN, names))
    return table, chosen, sum(lengths[:first]), notes


def _mixed_type_columns(tables: Sequence[pl.DataFrame]) -> set[str]:
    """Columns that are text in some files and numeric in others; they are read as text everywhere."""
    kinds: dict[str, set[bool]] = {}
    for table in tables:
        for column in table.iter_columns():
            if column.null_count() < len(column):
                kinds.setdefault(column.name, set()).add(is_text(column))
    return {name for name, found in kinds.items() if len(found) > 1}


def concatenate_tables(
    tables: Sequence[pl.DataFrame], names: Sequence[str], chosen: ColumnRoles
) -> tuple[pl.DataFrame, list[str]]:
    """The rows of all tables with the columns that ``different_columns`` selects, and notes about it.

    Columns are in the order of the first table, then of the next ones. ``names``: how messages call the tables.
    """
    import polars as pl

    holders = Counter(name for table in tables for name in table.columns)
    partial = [name for name, count in holders.items() if count < len(tables)]
    needed = partial if chosen.different_columns == "refuse" else [*chosen.rows]
    needed += chosen.columns if chosen.different_columns == "intersection" else []
    name = next(filter(partial.__contains__, needed), None)
    if name is not None:
        holds = [name in table for table in tables]
        having, lacking = names[holds.index(True)], names[holds.index(False)]
        reason = f"every table needs as {_role(name, chosen)}"
        if chosen.different_columns == "refuse" and name not in chosen.rows:
            reason = f'{having} has: set different_columns to "union" or "intersection", or drop the column'
        raise FedraxError(f"{lacking} has no column {name!r}, which {reason}.")
    union = chosen.different_columns == "union"
    columns = [name for name in holders if union or name not in partial]
    # a column without any value is of texts, and would make texts of another table's numbers
    kinds = {n: t[n].dtype for t in reversed(tables) for n in columns if n in t and t[n].null_count() < len(t)}
    parts = [
        table.select(
            pl.lit(None, kinds.get(name, pl.String)).alias(name)
            if name not in table
            else pl.col(name).cast(kinds[name])
            if name in kinds and table[name].null_count() == len(table)
            else pl.col(name)
            for name in columns
        )
        for table in tables
    ]
    notes = []
    if partial and not union:
        notes = [f"columns that not all files have are left out: {', '.join(partial)} (different_columns)"]
    elif partial:
        listed = ", ".join(f"{name} ({len(tables) - holders[name]:,})" for name in partial)
        notes = [f"columns are missing in some of the {len(tables):,} files: {listed} (different_columns)"]
    return pl.concat(parts, how="vertical_relaxed"), notes


def _role(name: str, chosen: ColumnRoles) -> str:
    """The option that names a column, for messages."""
    options = {chosen.partition_by: "partition_by", chosen.client: "client", chosen.label: "label"}
    return options.get(name, "one of columns")


def _encode_features(
    table: pl.DataFrame, chosen: ColumnRoles, names: list[str], train: np.ndarray, path: str
) -> EncodedFeatures:
    """The columns ``names`` as numbers: texts one-hot encoded, missing values as ``chosen.missing`` says."""
    parts: list[tuple[str, np.ndarray] | OneHotColumn] = []
    notes = []
    for name in names:
        column = table[name].fill_nan(None) if table[name].dtype.is_float() else table[name]
        lost = column.null_count()
        if lost and chosen.missing == "refuse":
            raise FedraxError(
                f"{path}: column {name!r} has missing values, {lost} of them, the first in row"
                f' {column.is_null().arg_max()}: missing = "mean" replaces them by the mean of the training rows, a'
                " number by that number, and missing texts become a category of their own; drop leaves the column out."
            )
        if name in chosen.categorical or is_text(column):
            part, of_column = _categorical_column(column, name, train, chosen.max_categories, path)
            notes += of_column
        else:
            values = _numeric_column(column, name, train, path)
            if lost and not isinstance(chosen.missing, str):
                values[np.isnan(values)] = chosen.missing
                notes.append(f"{lost:,} missing values of {name!r} are {chosen.missing:g} (missing)")
            part = name, values
            if _is_row_index(column):
                notes.append(f"warning: {name!r} has a different integer in every row: drop it if it numbers the rows")
        parts.append(part)
    return _assemble_features(parts, len(table), tuple(notes), path)


def _is_row_index(column: pl.Series) -> bool:
    """Whether distinct whole numbers are row numbers rather than measurements.

    They rise or fall from row to row, or are so dense that random numbers would repeat: of n numbers drawn from m,
    n^2 / 2m pairs are equal.
    """
    n = len(column)
    if not column.dtype.is_integer() or n < MIN_ROWS_FOR_ID or not column.is_unique().all():
        return False
    low, high = int(column.min()), int(column.max())  # type: ignore[arg-type]
    in_order = column.is_sorted() or column.is_sorted(descending=True)
    return in_order or n**2 > 2 * EXPECTED_COLLISIONS * (high - low + 1)


def _assemble_features(
    parts: Sequence[tuple[str, np.ndarray] | OneHotColumn], rows: int, notes: tuple[str, ...], path: str
) -> EncodedFeatures:
    """The columns side by side, categories as features of 0 and 1."""
    hot = [part for part in parts if isinstance(part, OneHotColumn)]
    needed = 4 * rows * sum(len(part.names) for part in hot)
    if needed > min(MAX_BYTES, host_memory() // MEMORY_COPIES):
        most = max(hot, key=lambda part: len(part.names))
        raise FedraxError(
            f"{path}: a feature for each category takes {needed / 1e9:.3g} GB for {rows:,} rows, too much: column"
            f" {most.column!r} has {len(most.names):,} distinct texts; leave it out by drop."
        )
    names = [part.names if isinstance(part, OneHotColumn) else (part[0],) for part in parts]
    numeric = [np.full(len(titles), not isinstance(p, OneHotColumn)) for p, titles in zip(parts, names, strict=True)]
    x, start = np.zeros((rows, sum(map(len, names))), np.float32), 0
    for part, titles in zip(parts, names, strict=True):
        if isinstance(part, OneHotColumn):
            (known,) = np.nonzero(part.codes >= 0)
            x[known, start + part.codes[known]] = 1
        start += len(titles)
    numbers = [part[1] for part in parts if not isinstance(part, OneHotColumn)]
    numbers = np.stack(numbers, axis=1) if numbers else np.zeros((rows, 0))
    return EncodedFeatures(
        x, numbers, tuple(name for titles in names for name in titles), np.concatenate(numeric), notes
    )


def _numeric_column(column: pl.Series, name: str, train: np.ndarray, path: str) -> np.ndarray:
    """A column of numbers float64 [n], NaN where one is missing."""
    import polars as pl

    values = column.cast(pl.Float64).to_numpy().astype(np.float64)
    lost = np.isnan(values)
    # the squares of numbers beyond 32-bit floats would be infinite
    _reject_nonfinite(np.where(lost, 0, values), name, path, float(np.finfo(np.float32).max))
    if lost[train].all():
        raise FedraxError(f"{path}: column {name!r} has no value in any training row: drop it.")
    return values


def _categorical_column(
    column: pl.Series, name: str, train: np.ndarray, most: int, path: str
) -> tuple[OneHotColumn, list[str]]:
    """One-hot encode a column by the categories of its training rows, and return notes about it."""
    import polars as pl

    texts = column.cast(pl.String)
    lost = texts.is_null().to_numpy()
    words = texts.fill_null("").to_numpy()  # not of one length: a long text would make all of them long
    categories = sorted(set(words[train][~lost[train]]))
    if len(categories) > most:
        sentences = np.mean([category.count(" ") for category in categories]) >= FREE_TEXT_SPACES
        hint = f", or read it as texts, texts = [{name!r}]" if sentences else ""
        raise FedraxError(
            f"{path}: column {name!r} has {len(categories):,} distinct texts, too many for categories (limit:"
            f" {most}): leave it out by drop, or raise max_categories{hint}."
        )
    places = {category: place for place, category in enumerate(categories)}
    codes = np.array([places.get(word, -1) for word in words], int)
    codes[lost] = -1
    titles, notes = [f"{name}={category}" for category in categories], []
    new = (codes < 0) & ~lost
    if new.any():
        notes.append(f"{new.sum():,} test rows have texts of {name!r} that no training row has: 0 in every category")
    written = int((~lost[train]).sum())
    if len(categories) == written >= MIN_DISTINCT_TEXTS or (
        len(column) >= MIN_ROWS_FOR_ID and 2 * len(categories) > written
    ):
        rows = "every row" if len(categories) == written else "most rows"
        notes.append(f"warning: {name!r} has a different text in {rows}: drop it if it is an identifier or a date")
    if lost.any():
        codes[lost] = len(titles)
        titles.append(f"{name} missing")
        notes.append(f"{lost.sum():,} missing values of {name!r} are a category of their own")
    notes.append(f"{name!r} is {len(titles)} features, one for each category")
    return OneHotColumn(name, codes, tuple(titles)), notes


def _standardize(
    features: EncodedFeatures, train: np.ndarray, clients: np.ndarray | None, how: str, path: str
) -> tuple[np.ndarray, list[str]]:
    """Standardize the numeric features, replace missing numbers by the mean, and return notes about it."""
    x, numbers, numeric = features.x, features.numbers, features.numeric
    if how == "client" and clients is None:
        raise FedraxError(
            'standardize = "client" needs a column of clients: name it in client, or set standardize = "all" for the'
            " data of one client."
        )
    overall = _mean_and_std(numbers[train])
    notes = _missing_value_notes(features, *overall, how)
    if how == "none":
        x[:, numeric] = np.where(np.isnan(numbers), overall[0], numbers)
        return x, notes + scale_notes(x[train], features.names)
    owner = np.zeros(len(x), int) if how == "all" or clients is None else clients
    is_train = np.zeros(len(x), bool)
    is_train[train] = True
    order, (_, first) = np.argsort(owner, kind="stable"), np.unique(np.sort(owner), return_index=True)
    for rows in np.split(order, first[1:]):
        mean, std = _mean_and_std(numbers[rows[is_train[rows]]], overall)
        numbers[rows] = (numbers[rows] - mean) / np.where(std > 0, std, 1.0)
    single = int((np.bincount(owner[train]) == 1).sum()) if how == "client" else 0
    if single:
        notes.append(f"warning: {single:,} clients have a single training row, whose standardized features are 0")
    with np.errstate(over="ignore"):  # too large numbers become infinite and raise below
        x[:, numeric] = np.where(np.isnan(numbers), 0, numbers)  # a missing number is the mean
    beyond = ~np.isfinite(x).all(axis=0)
    if beyond.any():
        name = features.names[int(beyond.argmax())]
        raise FedraxError(
            f"{path}: column {name!r} holds numbers beyond 32-bit floats once it is standardized: correct the rows that"
            ' are so far from the training rows, leave it out by drop, or set standardize = "none".'
        )
    whose = "of each client" if how == "client" else "of all clients" if clients is not None else ""
    what = "1 feature is" if numeric.sum() == 1 else f"{numeric.sum()} features are"
    note = f"{what} standardized by mean and standard deviation of the training rows {whose}".rstrip()
    return x, notes + [f"{note} (standardize)"] * bool(numeric.any())


def _mean_and_std(
    x: np.ndarray, otherwise: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the values [n, features] that are not missing.

    ``otherwise``: the pair to use for features without values; its deviation also replaces that of constant features.
    """
    known = ~np.isnan(x)
    count = np.maximum(known.sum(0), 1)
    low, high = (
        end(np.where(known, x, none), axis=0, initial=none) for end, none in ((np.min, np.inf), (np.max, -np.inf))
    )
    same = low == high  # their mean may be rounded to another number
    mean = np.where(same, low, np.where(known, x, 0).sum(0) / count)
    std = np.where(same, 0, np.sqrt(np.where(known, (x - mean) ** 2, 0).sum(0) / count))
    if otherwise is None:
        return mean, std
    return np.where(known.any(0), mean, otherwise[0]), np.where(std > 0, std, otherwise[1])


def _missing_value_notes(features: EncodedFeatures, means: np.ndarray, deviations: np.ndarray, how: str) -> list[str]:
    """Notes on replaced missing numbers, and on constant columns."""
    lost = np.isnan(features.numbers).sum(0)
    names = [name for name, numeric in zip(features.names, features.numeric, strict=True) if numeric]
    whose = "of the client's training rows" if how == "client" else "of the training rows"
    same = [name for name, deviation in zip(names, deviations, strict=True) if deviation == 0]
    return [
        f"{count:,} missing values of {name!r} are the mean {whose}{'' if how == 'client' else f', {mean:.4g}'}"
        for name, count, mean in zip(names, lost, means, strict=True)
        if count
    ] + [f"columns that are constant in the training rows: {len(same):,}, such as {name!r}" for name in same[:1]]


def scale_notes(x: np.ndarray, names: Sequence[str] = ()) -> list[str]:
    """A warning if the standard deviations of features [n, features] differ by orders of magnitude."""
    std = np.where(x.min(axis=0) == x.max(axis=0), 0, x.std(axis=0, dtype=np.float64))
    low, high = (int(i) for i in (np.where(std > 0, std, np.inf).argmin(), std.argmax()))
    if not (std > 0).any() or std[high] < SCALE_RATIO * std[low]:
        return []
    named = [repr(names[i]) if names else f"number {i}" for i in (low, high)]
    return [
        f"warning: the standard deviations of the features range from {std[low]:.3g} ({named[0]}) to {std[high]:.3g}"
        f" ({named[1]}): no learning rate suits both; standardize them"
    ]
