"""CSV tables as data sets: column selection, one-hot encoding, imputation and standardization.

Means, standard deviations and categories are estimated on training rows only and are reported in ``notes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
from fedrax.errors import FedraxError, unknown
from fedrax.host_memory import host_memory

if TYPE_CHECKING:
    import polars as pl

SCALE_RATIO = 100.0
"""Ratio of the standard deviations of two features above which there is a note."""

FREE_TEXT_SPACES = 3
"""Mean number of spaces from which on categories count as free text."""

MEMORY_COPIES = 4
"""Copies of all samples that are in memory at a time while they are read, split and partitioned."""

MIN_ROWS_FOR_ID = 50
"""Fewest rows for which a column of distinct integers, or of mostly distinct texts, counts as row ids."""

MIN_DISTINCT_TEXTS = 10
"""Fewest texts that count as row ids if they are all distinct."""

EXPECTED_COLLISIONS = 5
"""Expected number of equal pairs among random integers above which having none is no coincidence."""


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
    """What was done to the columns."""


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
    missing: Literal["refuse", "mean"] = "refuse"
    categorical: tuple[str, ...] = ()
    max_categories: int = 50
    decimal: Literal[".", ","] = "."

    def __post_init__(self) -> None:
        _check_choices(labels=self.labels, standardize=self.standardize, missing=self.missing)
        twice = next((name for name, count in Counter(self.columns).items() if count > 1), None)
        if twice is not None:
            raise FedraxError(f"columns names {twice!r} twice.")
        if self.client in self.columns:
            raise FedraxError(f"columns names {self.client!r}, the column of clients, which is no feature.")

    @property
    def named(self) -> list[str]:
        """All columns that must exist."""
        others = [name for name in (self.client, self.partition_by) if name is not None]
        return [self.label, *others, *self.columns, *self.drop, *self.categorical]

    @property
    def of_names(self) -> list[str]:
        """Columns whose numbers are names of classes, clients or categories, so that 007 differs from 7."""
        classes = [self.label] if self.labels != "numbers" else []
        return [*classes, *([self.client] if self.client is not None else []), *self.categorical]

    def counts(self, name: str) -> bool:
        """Whether a column is used."""
        asked = not self.columns or name in self.columns
        return name in (self.label, self.client, self.partition_by) or (asked and name not in self.drop)

    def features(self, table: pl.DataFrame, path: object) -> list[str]:
        """The feature columns: the selected ones without those of other roles."""
        besides = {self.label, self.client, *self.drop}
        chosen = [name for name in (self.columns or table.columns) if name not in besides]
        if not chosen:
            raise FedraxError(f"{path} has no feature left: label, client, columns and drop leave none of its columns.")
        return chosen


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

    def dataset(self, name: str, x: np.ndarray, notes: tuple[str, ...] = ()) -> Dataset:
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
    if not np.isfinite(values).all():
        raise FedraxError(f"{path}: column {name!r} holds numbers that are not finite.")
    return values


_CHOICES = {
    "labels": ("auto", "classes", "numbers"),
    "standardize": ("all", "client", "none"),
    "missing": ("refuse", "mean"),
}


def _check_choices(**given: str) -> None:
    for option, word in given.items():
        if word not in _CHOICES[option]:
            raise unknown(f"{option}:", word, _CHOICES[option])


def check_columns(table: pl.DataFrame, named: Sequence[str], path: object) -> None:
    """Raise FedraxError for columns that the table does not have."""
    for column in named:
        if column not in table.columns:
            raise unknown(f"column of {path}", column, table.columns)


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
            raise FedraxError(f"{path}: column {label!r} holds texts, which are no numbers to predict.")
        y = column.to_numpy().astype(np.float64)
    elif kind == "classes" and column.dtype.is_float():
        y = np.array([format_number(value) for value in column.to_list()])
    else:
        y = column.to_numpy()
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise FedraxError(f"{path}: column {label!r} holds numbers that are not finite.")
    return y


def label_notes(table: pl.DataFrame, chosen: ColumnRoles) -> list[str]:
    """Warnings about labels that may be misinterpreted: integers as classes, or classes that differ in case only."""
    import polars as pl

    column, most = table[chosen.label], chosen.max_categories
    if is_text(column):
        names, rows = column.cast(pl.String).unique().sort().to_list(), len(column)
        told = f"warning: {chosen.label!r} has {len(names):,} classes in {rows:,} rows: it may name or date them"
        return _case_notes(names, chosen.label) + ([told] if 2 * len(names) > rows >= 10 else [])
    if not column.dtype.is_numeric():
        return []
    count = column.n_unique()
    if count == 1:
        return [f"warning: {chosen.label!r} is {column[0]} in every row: there is nothing to predict"]
    if chosen.labels != "auto":
        return []
    if column.dtype.is_integer() and count > most:
        said, other, made = "different whole numbers, which are taken for classes", "numbers", "a regression"
    elif column.dtype.is_float() and count <= min(most, len(column) // 5) and (column == column.floor()).all():
        said, other, made = "different whole numbers, written as floats and so taken for targets", "classes", "classes"
    else:
        return []
    return [f'warning: {chosen.label!r} holds {count:,} {said}: labels = "{other}" makes {made} of them']


def _case_notes(names: Sequence[str], label: str) -> list[str]:
    """Warning about two classes whose names differ in case only."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            return [f"warning: {label!r} has classes that differ in capitals alone, such as {other!r} and {name!r}"]
    return []


def _reject_unsupported_type(column: pl.Series, path: object) -> None:
    if column.dtype.is_nested() or str(column.dtype).startswith(("Binary", "Object", "Duration")):
        raise FedraxError(
            f"{path}: column {column.name!r} holds {column.dtype} values, which are neither numbers nor texts: choose"
            " other columns, or write it in numbers"
        )


def _reject_missing(table: pl.DataFrame, column: str, path: object) -> None:
    found = table[column].fill_nan(None) if table[column].dtype.is_float() else table[column]
    if found.null_count():
        raise FedraxError(
            f"{path}: column {column!r} has missing values, which no row may have there: remove those rows, of which"
            f" there are {found.null_count():,}"
        )


def is_text(column: pl.Series) -> bool:
    """Whether a column holds text; an empty one fits anything."""
    empty = column.null_count() == len(column)
    return not empty and not column.dtype.is_numeric() and str(column.dtype) != "Boolean"


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
    said, roles = [], {chosen.label: "class", chosen.client: "client"}
    for name in [chosen.label, *([chosen.client] if chosen.client else []), *features]:
        found = _missing_markers(table[name])
        if not len(found):
            continue
        told = f"{found[0]!r}, in {len(found):,} rows of {name!r}, is a {roles.get(name, 'category')} as any other"
        remove = "remove those rows if it stands for none"
        said.append(f"warning: {told}: {remove}" if name in roles else f"{told} (missing_as)")
    return said


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
            remedy = 'labels = "classes" takes them' if name == chosen.label else "categorical takes the column"
            raise FedraxError(
                f"{path}: column {name!r} holds texts such as {amounts[0]!r}, numbers in another form: write them as"
                f" plain numbers{commas}; {remedy} for categories."
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
        return 'Remove those rows; labels = "classes" takes all of them for classes'
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
    missing: Literal["refuse", "mean"] = "refuse",
    missing_as: tuple[str, ...] = (),
    categorical: tuple[str, ...] = (),
    max_categories: int = 50,
    partition_by: str | None = None,
    separator: str = ",",
    decimal: Literal[".", ","] = ".",
) -> Dataset:
    """A table with a header: the column ``label``, optionally a column ``client``, and features (float32).

    ``path`` is a file, or a folder of files ``*.csv`` with the same columns: without ``client`` each file is then one
    client, of the file's name.

    Features are the ``columns`` given, or all others but ``drop``. Integer or text labels are classes, in sorted
    order; floating ones, or all with labels="numbers", make a regression. The test part is ``test_path`` if given,
    else ``test_fraction`` of each client's (or else each class's) rows. Partitions that go by labels go by the column
    ``partition_by`` in place of them.

    Columns of text, and those of ``categorical``, become a feature 0 or 1 for each category of the training rows, of
    which there may be ``max_categories``; a text that only test rows have is 0 everywhere. ``standardize`` takes mean
    and deviation of the training rows out of the features that are numbers: of all clients' together, or of each
    client's own. ``missing`` values (empty cells, NaN, the texts of ``missing_as``) are refused, or become the mean of
    the training rows (of the client's, where each client is standardized by itself), for texts a category of their own.
    ``separator`` stands between two cells, ``decimal`` before a number's fraction.
    """
    chosen = ColumnRoles(label, client, partition_by, tuple(columns), tuple(drop), labels, standardize, missing)
    chosen = replace(chosen, categorical=tuple(categorical), max_categories=max_categories, decimal=decimal)
    if test_path is not None:
        reject_unused_options(load_csv, "where test_path holds the test rows", test_fraction=test_fraction)
    parts = [_TableSource.of(Path(p)) for p in (path, test_path) if p is not None]
    table, chosen, first = _read_tables(parts, CsvFormat(separator, decimal, tuple(missing_as)), chosen)
    where = str(path) if test_path is None else f"{path} and {test_path}"
    owners = TableRows.of(table, chosen, None if test_path is None else first, test_fraction, seed, where)
    made = dataset_from_table(table, chosen, owners, Path(path).stem, where)
    said = [f"each of the {len(parts[0].files)} files of {path} is a client"] if chosen.client != client else []
    return replace(made, notes=(*said, *made.notes, *label_notes(table, chosen)))


def dataset_from_table(table: pl.DataFrame, chosen: ColumnRoles, owners: TableRows, name: str, path: str) -> Dataset:
    """The data set of a table with encoded and standardized features."""
    names = chosen.features(table, path)
    reject_text_in_numeric_columns(table, chosen, names, path)
    features = _encode_features(table, chosen, owners.train, path)
    x, said = _standardize(features, owners.train, owners.clients, chosen.standardize, path)
    made = owners.dataset(name, x, (*features.notes, *said, *missing_marker_notes(table, chosen, names)))
    return replace(made, feature_names=features.names)


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
) -> tuple[pl.DataFrame, ColumnRoles, int]:
    """The rows of all files, the roles of the columns, and the number of rows of the first part.

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
    known = dict.fromkeys(name for table in tables for name in table.columns)
    if strange := [name for name in chosen.named if name not in known]:
        raise unknown(f"column of {parts[0].path}", strange[0], known)
    table = _concatenate([table.select([*filter(chosen.counts, table.columns)]) for table in tables], paths)
    lengths = [len(one) for one in tables]
    if chosen.client is None and parts[0].path.is_dir():
        if not parts[-1].path.is_dir():
            raise FedraxError(f"each file of {paths[0].parent} is a client: test_path is a folder of their files, too.")
        chosen = replace(chosen, client=_FILE_COLUMN)
        names = np.repeat([file.stem for file in paths], lengths)
        table = table.with_columns(pl.Series(_FILE_COLUMN, names))
    return table, chosen, sum(lengths[:first])


def _mixed_type_columns(tables: Sequence[pl.DataFrame]) -> set[str]:
    """Columns that are text in some files and numeric in others; they are read as text everywhere."""
    kinds: dict[str, set[bool]] = {}
    for table in tables:
        for column in table.iter_columns():
            if column.null_count() < len(column):
                kinds.setdefault(column.name, set()).add(is_text(column))
    return {name for name, found in kinds.items() if len(found) > 1}


def _concatenate(tables: Sequence[pl.DataFrame], paths: Sequence[Path]) -> pl.DataFrame:
    """All rows, the columns as in the first table."""
    import polars as pl

    columns = tables[0].columns
    for table, path in zip(tables, paths, strict=True):
        alone = sorted(set(table.columns) ^ set(columns))
        if alone:
            where = path if alone[0] in table.columns else paths[0]
            told = f"{alone[0]!r} is in {where} alone, and drop leaves it out"
            raise FedraxError(f"{paths[0]} and {path} differ in their columns: {told}.")
    # a column without any value is of texts, and would make those of another file's numbers
    kinds = {n: t[n].dtype for t in reversed(tables) for n in columns if t[n].null_count() < len(t)}
    empty = [[n for n in columns if t[n].null_count() == len(t) and n in kinds] for t in tables]
    fitted = [t.with_columns(t[n].cast(kinds[n]) for n in names) for t, names in zip(tables, empty, strict=True)]
    return pl.concat([t.select(columns) for t in fitted], how="vertical_relaxed")


def _encode_features(table: pl.DataFrame, chosen: ColumnRoles, train: np.ndarray, path: str) -> EncodedFeatures:
    """The columns as numbers: those of text by category, missing values filled or refused."""
    parts: list[tuple[str, np.ndarray] | OneHotColumn] = []
    notes = []
    for name in chosen.features(table, path):
        column = table[name].fill_nan(None) if table[name].dtype.is_float() else table[name]
        lost = column.null_count()
        if lost and chosen.missing == "refuse":
            raise FedraxError(
                f'{path}: column {name!r} has missing values, {lost} of them: missing = "mean" puts the mean of the'
                " training rows there, for texts a category of their own; drop leaves the column out."
            )
        if name in chosen.categorical or is_text(column):
            part, said = _categorical_column(column, name, train, chosen.max_categories, path)
        else:
            part = name, _numeric_column(column, name, train, path)
            said = [f"warning: {name!r} is another whole number in every row: drop it if it only counts them"]
            said = said if _is_row_index(column) else []
        parts.append(part)
        notes += said
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
    """The columns one after the other, those of categories as features of 0 and 1."""
    hot = [part for part in parts if isinstance(part, OneHotColumn)]
    needed = 4 * rows * sum(len(part.names) for part in hot)
    if needed > min(MAX_BYTES, host_memory() // MEMORY_COPIES):
        most = max(hot, key=lambda part: len(part.names))
        raise FedraxError(
            f"{path}: a feature for each category takes {needed / 1e9:.3g} GB in {rows:,} rows, too much: column"
            f" {most.column!r} has {len(most.names):,} different texts; leave it out by drop."
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
    if not (np.abs(values[~lost]) <= np.finfo(np.float32).max).all():  # their squares would be infinite
        raise FedraxError(f"{path}: column {name!r} holds numbers that are not finite, or beyond 32-bit floats.")
    if lost[train].all():
        raise FedraxError(f"{path}: column {name!r} has no value in any training row: drop it.")
    return values


def _categorical_column(
    column: pl.Series, name: str, train: np.ndarray, most: int, path: str
) -> tuple[OneHotColumn, list[str]]:
    """A column of texts, or of numbers that are names, by its categories in the training rows."""
    import polars as pl

    texts = column.cast(pl.String)
    lost = texts.is_null().to_numpy()
    words = texts.fill_null("").to_numpy()  # not of one length: a long text would make all of them long
    categories = sorted(set(words[train][~lost[train]]))
    if len(categories) > most:
        sentences = np.mean([category.count(" ") for category in categories]) >= FREE_TEXT_SPACES
        hint = "; what huggingface reads from Parquet tables may be texts, word by word" if sentences else ""
        raise FedraxError(
            f"{path}: column {name!r} has {len(categories):,} different texts, too many to be categories (limit:"
            f" {most}): leave it out by drop, or raise max_categories{hint}."
        )
    places = {category: place for place, category in enumerate(categories)}
    codes = np.array([places.get(word, -1) for word in words], int)
    codes[lost] = -1
    titles, said = [f"{name}={category}" for category in categories], []
    new = (codes < 0) & ~lost
    if new.any():
        said.append(f"{new.sum():,} test rows have texts of {name!r} that no training row has: 0 in every category")
    written = int((~lost[train]).sum())
    if len(categories) == written >= MIN_DISTINCT_TEXTS or (
        len(column) >= MIN_ROWS_FOR_ID and 2 * len(categories) > written
    ):
        rows = "every row" if len(categories) == written else "most rows"
        said.append(f"warning: {name!r} has another text in {rows}: drop it if it names or dates them")
    if lost.any():
        codes[lost] = len(titles)
        titles.append(f"{name} missing")
        said.append(f"{lost.sum():,} missing values of {name!r} are a category of their own")
    said.append(f"{name!r} is {len(titles)} features, one for each category")
    return OneHotColumn(name, codes, tuple(titles)), said


def _standardize(
    features: EncodedFeatures, train: np.ndarray, clients: np.ndarray | None, how: str, path: str
) -> tuple[np.ndarray, list[str]]:
    """The features with mean and deviation of training rows taken out of the numbers among them, none missing."""
    x, numbers, numeric = features.x, features.numbers, features.numeric
    if how == "client" and clients is None:
        raise FedraxError('standardize = "client" needs a column of clients: name it in client.')
    overall = _mean_and_std(numbers[train])
    said = _missing_value_notes(features, *overall, how)
    if how == "none":
        x[:, numeric] = np.where(np.isnan(numbers), overall[0], numbers)
        return x, said + scale_notes(x[train], features.names)
    owner = np.zeros(len(x), int) if how == "all" or clients is None else clients
    is_train = np.zeros(len(x), bool)
    is_train[train] = True
    order, (_, first) = np.argsort(owner, kind="stable"), np.unique(np.sort(owner), return_index=True)
    for rows in np.split(order, first[1:]):
        mean, std = _mean_and_std(numbers[rows[is_train[rows]]], overall)
        numbers[rows] = (numbers[rows] - mean) / np.where(std > 0, std, 1.0)
    single = int((np.bincount(owner[train]) == 1).sum()) if how == "client" else 0
    if single:
        said.append(f"warning: {single:,} clients have one training row, whose features are 0, being their mean")
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused
        x[:, numeric] = np.where(np.isnan(numbers), 0, numbers)  # a missing number is the mean
    beyond = ~np.isfinite(x).all(axis=0)
    if beyond.any():
        name = features.names[int(beyond.argmax())]
        raise FedraxError(
            f"{path}: column {name!r} holds numbers beyond 32-bit floats once it is standardized: correct the rows that"
            ' are so far from the training rows, leave it out by drop, or take standardize = "none".'
        )
    whose = "of each client by itself" if how == "client" else "of all clients" if clients is not None else ""
    what = "1 feature is" if numeric.sum() == 1 else f"{numeric.sum()} features are"
    told = f"{what} standardized by mean and deviation of the training rows {whose}".rstrip()
    return x, said + [f"{told} (standardize)"] * bool(numeric.any())


def _mean_and_std(
    x: np.ndarray, otherwise: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of the values [n, features] that are not missing.

    ``otherwise`` has those where there is no value, and the deviation where values do not differ, which says nothing of
    their scale.
    """
    known = ~np.isnan(x)
    count = np.maximum(known.sum(0), 1)
    low, high = (
        end(np.where(known, x, none), axis=0, initial=none) for end, none in ((np.min, np.inf), (np.max, -np.inf))
    )
    same = low == high  # whose sum over their number may be another number, by a rounding error
    mean = np.where(same, low, np.where(known, x, 0).sum(0) / count)
    std = np.where(same, 0, np.sqrt(np.where(known, (x - mean) ** 2, 0).sum(0) / count))
    if otherwise is None:
        return mean, std
    return np.where(known.any(0), mean, otherwise[0]), np.where(std > 0, std, otherwise[1])


def _missing_value_notes(features: EncodedFeatures, means: np.ndarray, deviations: np.ndarray, how: str) -> list[str]:
    """What became of missing numbers, column by column, and which columns say nothing."""
    lost = np.isnan(features.numbers).sum(0)
    names = [name for name, numeric in zip(features.names, features.numeric, strict=True) if numeric]
    whose = "of the client's training rows" if how == "client" else "of the training rows"
    same = [name for name, deviation in zip(names, deviations, strict=True) if deviation == 0]
    return [
        f"{count:,} missing values of {name!r} are the mean {whose}{'' if how == 'client' else f', {mean:.4g}'}"
        for name, count, mean in zip(names, lost, means, strict=True)
        if count
    ] + [f"columns of one number in all training rows: {len(same):,}, such as {name!r}" for name in same[:1]]


def scale_notes(x: np.ndarray, names: Sequence[str] = ()) -> list[str]:
    """A warning where the deviations of features [n, features] differ by orders of magnitude."""
    std = np.where(x.min(axis=0) == x.max(axis=0), 0, x.std(axis=0, dtype=np.float64))
    low, high = (int(i) for i in (np.where(std > 0, std, np.inf).argmin(), std.argmax()))
    if not (std > 0).any() or std[high] < SCALE_RATIO * std[low]:
        return []
    named = [repr(names[i]) if names else f"number {i}" for i in (low, high)]
    return [
        f"warning: the deviations of the features reach from {std[low]:.3g} ({named[0]}) to {std[high]:.3g}"
        f" ({named[1]}): no step size suits both; standardize them"
    ]
