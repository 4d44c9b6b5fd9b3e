"""Tables in CSV files: columns chosen, categories and missing values turned into numbers, features standardized.

Whatever is estimated (means, deviations, categories) is estimated on training rows alone, and said in ``notes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedrax.data.dataset import Dataset
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.csv_parquet import CsvForm, read_csv, zero_padded
from fedrax.data.readers.schema import (
    Columns,
    Owners,
    is_text,
    label_notes,
    missing_notes,
    refuse_idle,
    refuse_numbers_among_texts,
)
from fedrax.errors import FedraxError, unknown
from fedrax.host_memory import host_memory

if TYPE_CHECKING:
    import polars as pl

FAR_APART = 100.0
"""Times by which the deviations of two features may differ before a note says so."""

WORDS_APART = 3
"""Blanks in a category from which on it is taken for a text that is to be read."""

COPIES = 4
"""Of all samples, in a machine's memory at once at most: while they are read, split and dealt out."""

MANY_ROWS = 50
"""Rows from which on whole numbers that all differ, or texts of which most do, may be taken for the rows' own."""

ALL_DIFFER = 10
"""Texts from which on they are taken for the rows' own where no two are equal."""

EQUAL_PAIRS = 5
"""Of drawn numbers, in the mean, from which on it is no chance that there are none."""


_FILE = "\nfile"
"""A column that names the file of each row; no file has one of this name."""


@dataclass(frozen=True)
class Features:
    """The features of all rows: those of categories in x float32 [n, features], the numbers float64 [n, numeric], NaN
    where one is missing, which features these are, and what was done to them.
    """

    x: np.ndarray
    numbers: np.ndarray
    names: tuple[str, ...]
    numeric: np.ndarray
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Categories:
    """A column by category: the place of each row's among ``names`` [n], -1 where it has none."""

    column: str
    codes: np.ndarray
    names: tuple[str, ...]


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
    chosen = Columns(label, client, partition_by, tuple(columns), tuple(drop), labels, standardize, missing)
    chosen = replace(chosen, categorical=tuple(categorical), max_categories=max_categories, decimal=decimal)
    if test_path is not None:
        refuse_idle(load_csv, "where test_path holds the test rows", test_fraction=test_fraction)
    parts = [_Part.of(Path(p)) for p in (path, test_path) if p is not None]
    table, chosen, first = _read(parts, CsvForm(separator, decimal, tuple(missing_as)), chosen)
    where = str(path) if test_path is None else f"{path} and {test_path}"
    owners = Owners.of(table, chosen, None if test_path is None else first, test_fraction, seed, where)
    made = dataset_of(table, chosen, owners, Path(path).stem, where)
    said = [f"each of the {len(parts[0].files)} files of {path} is a client"] if chosen.client != client else []
    return replace(made, notes=(*said, *made.notes, *label_notes(table, chosen)))


def dataset_of(table: pl.DataFrame, chosen: Columns, owners: Owners, name: str, path: str) -> Dataset:
    """The data set of a table's rows, its features turned into numbers and standardized."""
    names = chosen.features(table, path)
    refuse_numbers_among_texts(table, chosen, names, path)
    features = _encode(table, chosen, owners.train, path)
    x, said = _standardized(features, owners.train, owners.clients, chosen.standardize, path)
    made = owners.dataset(name, x, (*features.notes, *said, *missing_notes(table, chosen, names)))
    return replace(made, feature_names=features.names)


@dataclass(frozen=True)
class _Part:
    """The training or the test rows: a file, or all of a folder."""

    path: Path
    files: tuple[Path, ...]

    @classmethod
    def of(cls, path: Path) -> _Part:
        if not path.is_dir():
            return cls(path, (path,))
        files = tuple(sorted(file for file in path.glob("*.csv") if not file.name.startswith(".")))
        if not files:
            raise FedraxError(f"{path} is a folder without a file *.csv in it.")
        return cls(path, files)


def _read(parts: Sequence[_Part], form: CsvForm, chosen: Columns) -> tuple[pl.DataFrame, Columns, int]:
    """The rows of all files, what their columns are for, and how many rows are of the first part; every column that is
    named is there, and where files are clients one that names them.
    """
    import polars as pl

    paths = [file for part in parts for file in part.files]
    padded = {name for file in paths for name in zero_padded(file, chosen.of_names, form)}
    tables = [read_csv(file, form, sorted(padded)) for file in paths]
    if mixed := _texts_in_some(tables):
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
    table = _together([table.select([*filter(chosen.counts, table.columns)]) for table in tables], paths)
    lengths = [len(one) for one in tables]
    if chosen.client is None and parts[0].path.is_dir():
        if not parts[-1].path.is_dir():
            raise FedraxError(f"each file of {paths[0].parent} is a client: test_path is a folder of their files, too.")
        chosen = replace(chosen, client=_FILE)
        names = np.repeat([file.stem for file in paths], lengths)
        table = table.with_columns(pl.Series(_FILE, names))
    return table, chosen, sum(lengths[:first])


def _texts_in_some(tables: Sequence[pl.DataFrame]) -> set[str]:
    """The columns that hold texts in some files and numbers in others, and are of texts as in one file of all rows."""
    kinds: dict[str, set[bool]] = {}
    for table in tables:
        for column in table.iter_columns():
            if column.null_count() < len(column):
                kinds.setdefault(column.name, set()).add(is_text(column))
    return {name for name, found in kinds.items() if len(found) > 1}


def _together(tables: Sequence[pl.DataFrame], paths: Sequence[Path]) -> pl.DataFrame:
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


def _encode(table: pl.DataFrame, chosen: Columns, train: np.ndarray, path: str) -> Features:
    """The columns as numbers: those of text by category, missing values filled or refused."""
    parts: list[tuple[str, np.ndarray] | Categories] = []
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
            part, said = _categories(column, name, train, chosen.max_categories, path)
        else:
            part = name, _numbers(column, name, train, path)
            said = [f"warning: {name!r} is another whole number in every row: drop it if it only counts them"]
            said = said if _numbers_rows(column) else []
        parts.append(part)
        notes += said
    return _side_by_side(parts, len(table), tuple(notes), path)


def _numbers_rows(column: pl.Series) -> bool:
    """Whether whole numbers that all differ are the rows' own, and not measured: they rise or fall from row to row, or
    lie so close together that drawn numbers would repeat. Of n numbers drawn among m, n^2 / 2m pairs are equal.
    """
    n = len(column)
    if not column.dtype.is_integer() or n < MANY_ROWS or not column.is_unique().all():
        return False
    low, high = int(column.min()), int(column.max())  # type: ignore[arg-type]
    in_order = column.is_sorted() or column.is_sorted(descending=True)
    return in_order or n**2 > 2 * EQUAL_PAIRS * (high - low + 1)


def _side_by_side(
    parts: Sequence[tuple[str, np.ndarray] | Categories], rows: int, notes: tuple[str, ...], path: str
) -> Features:
    """The columns one after the other, those of categories as features of 0 and 1."""
    hot = [part for part in parts if isinstance(part, Categories)]
    needed = 4 * rows * sum(len(part.names) for part in hot)
    if needed > min(MAX_BYTES, host_memory() // COPIES):
        most = max(hot, key=lambda part: len(part.names))
        raise FedraxError(
            f"{path}: a feature for each category takes {needed / 1e9:.3g} GB in {rows:,} rows, too much: column"
            f" {most.column!r} has {len(most.names):,} different texts; leave it out by drop."
        )
    names = [part.names if isinstance(part, Categories) else (part[0],) for part in parts]
    numeric = [np.full(len(titles), not isinstance(p, Categories)) for p, titles in zip(parts, names, strict=True)]
    x, start = np.zeros((rows, sum(map(len, names))), np.float32), 0
    for part, titles in zip(parts, names, strict=True):
        if isinstance(part, Categories):
            (known,) = np.nonzero(part.codes >= 0)
            x[known, start + part.codes[known]] = 1
        start += len(titles)
    numbers = [part[1] for part in parts if not isinstance(part, Categories)]
    numbers = np.stack(numbers, axis=1) if numbers else np.zeros((rows, 0))
    return Features(x, numbers, tuple(name for titles in names for name in titles), np.concatenate(numeric), notes)


def _numbers(column: pl.Series, name: str, train: np.ndarray, path: str) -> np.ndarray:
    """A column of numbers float64 [n], NaN where one is missing."""
    import polars as pl

    values = column.cast(pl.Float64).to_numpy().astype(np.float64)
    lost = np.isnan(values)
    if not (np.abs(values[~lost]) <= np.finfo(np.float32).max).all():  # their squares would be infinite
        raise FedraxError(f"{path}: column {name!r} holds numbers that are not finite, or beyond 32-bit floats.")
    if lost[train].all():
        raise FedraxError(f"{path}: column {name!r} has no value in any training row: drop it.")
    return values


def _categories(column: pl.Series, name: str, train: np.ndarray, most: int, path: str) -> tuple[Categories, list[str]]:
    """A column of texts, or of numbers that are names, by its categories in the training rows."""
    import polars as pl

    texts = column.cast(pl.String)
    lost = texts.is_null().to_numpy()
    words = texts.fill_null("").to_numpy()  # not of one length: a long text would make all of them long
    categories = sorted(set(words[train][~lost[train]]))
    if len(categories) > most:
        sentences = np.mean([category.count(" ") for category in categories]) >= WORDS_APART
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
    if len(categories) == written >= ALL_DIFFER or (len(column) >= MANY_ROWS and 2 * len(categories) > written):
        rows = "every row" if len(categories) == written else "most rows"
        said.append(f"warning: {name!r} has another text in {rows}: drop it if it names or dates them")
    if lost.any():
        codes[lost] = len(titles)
        titles.append(f"{name} missing")
        said.append(f"{lost.sum():,} missing values of {name!r} are a category of their own")
    said.append(f"{name!r} is {len(titles)} features, one for each category")
    return Categories(name, codes, tuple(titles)), said


def _standardized(
    features: Features, train: np.ndarray, clients: np.ndarray | None, how: str, path: str
) -> tuple[np.ndarray, list[str]]:
    """The features with mean and deviation of training rows taken out of the numbers among them, none missing."""
    x, numbers, numeric = features.x, features.numbers, features.numeric
    if how == "client" and clients is None:
        raise FedraxError('standardize = "client" needs a column of clients: name it in client.')
    overall = _moments(numbers[train])
    said = _lost(features, *overall, how)
    if how == "none":
        x[:, numeric] = np.where(np.isnan(numbers), overall[0], numbers)
        return x, said + spread_notes(x[train], features.names)
    owner = np.zeros(len(x), int) if how == "all" or clients is None else clients
    is_train = np.zeros(len(x), bool)
    is_train[train] = True
    order, (_, first) = np.argsort(owner, kind="stable"), np.unique(np.sort(owner), return_index=True)
    for rows in np.split(order, first[1:]):
        mean, std = _moments(numbers[rows[is_train[rows]]], overall)
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


def _moments(x: np.ndarray, otherwise: tuple[np.ndarray, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
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


def _lost(features: Features, means: np.ndarray, deviations: np.ndarray, how: str) -> list[str]:
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


def spread_notes(x: np.ndarray, names: Sequence[str] = ()) -> list[str]:
    """A warning where the deviations of features [n, features] differ by orders of magnitude."""
    std = np.where(x.min(axis=0) == x.max(axis=0), 0, x.std(axis=0, dtype=np.float64))
    low, high = (int(i) for i in (np.where(std > 0, std, np.inf).argmin(), std.argmax()))
    if not (std > 0).any() or std[high] < FAR_APART * std[low]:
        return []
    named = [repr(names[i]) if names else f"number {i}" for i in (low, high)]
    return [
        f"warning: the deviations of the features reach from {std[low]:.3g} ({named[0]}) to {std[high]:.3g}"
        f" ({named[1]}): no step size suits both; standardize them"
    ]
