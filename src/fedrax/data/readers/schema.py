"""What the columns of a table are for: labels, clients, features; and rows made into a data set."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedrax.data.dataset import Dataset, Samples, as_samples, generator, split_test
from fedrax.data.readers.csv_parquet import with_point
from fedrax.errors import FedraxError, unknown

if TYPE_CHECKING:
    import polars as pl


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are for, and what is done to them; see `load_csv`."""

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
        """Every column that must be there."""
        others = [name for name in (self.client, self.partition_by) if name is not None]
        return [self.label, *others, *self.columns, *self.drop, *self.categorical]

    @property
    def of_names(self) -> list[str]:
        """The columns whose numbers are names, of classes, clients and categories: 007 is another one than 7."""
        classes = [self.label] if self.labels != "numbers" else []
        return [*classes, *([self.client] if self.client is not None else []), *self.categorical]

    def counts(self, name: str) -> bool:
        """Whether a column is for anything."""
        asked = not self.columns or name in self.columns
        return name in (self.label, self.client, self.partition_by) or (asked and name not in self.drop)

    def features(self, table: pl.DataFrame, path: object) -> list[str]:
        """The columns that samples are made of: those asked for, without what is for something else."""
        besides = {self.label, self.client, *self.drop}
        chosen = [name for name in (self.columns or table.columns) if name not in besides]
        if not chosen:
            raise FedraxError(f"{path} has no feature left: label, client, columns and drop leave none of its columns.")
        return chosen


@dataclass(frozen=True)
class Owners:
    """All of a table's rows but their features: labels, clients, what they are partitioned by, the training rows."""

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
        cls, table: pl.DataFrame, chosen: Columns, first: int | None, test_fraction: float, seed: int, path: str
    ) -> Owners:
        """Read the columns; the ``first`` rows are for training, or all but ``test_fraction`` of each group."""
        y, names = classes_or_targets(_labels(table, chosen, path))
        clients, client_names = None, ()
        if chosen.client is not None:
            _refuse_missing(table, chosen.client, path)
            found, clients = np.unique(table[chosen.client].to_numpy(), return_inverse=True)
            client_names = tuple(str(name) for name in found)
        if first is None:
            train, test = split(y, clients, test_fraction, seed)
        else:
            train, test = np.arange(first), np.arange(first, len(table))
        by = None if chosen.partition_by is None else _kinds(table, chosen, chosen.partition_by, path)[train]
        notes = () if first is not None else few_notes(clients, test, test_fraction)
        notes += _of_the_test_alone(y, names, train, test, "class", "classes") if y.dtype.kind == "i" else ()
        notes += () if clients is None else _of_the_test_alone(clients, client_names, train, test, "client", "clients")
        return cls(y, names, clients, client_names, by, train, test, notes)

    def dataset(self, name: str, x: np.ndarray, notes: tuple[str, ...] = ()) -> Dataset:
        """The data set of these rows with the inputs x [n, ...]."""
        samples, names = as_samples(x, self.y), self.client_names
        made = from_rows(name, samples, self.clients, self.train, self.test, self.class_names, client_names=names)
        return replace(made, partition_by=self.partition_by, notes=(*notes, *self.notes))


def _of_the_test_alone(
    codes: np.ndarray, names: Sequence[str], train: np.ndarray, test: np.ndarray, one: str, more: str
) -> tuple[str, ...]:
    """A sentence where test rows are of classes or clients that no training row is of."""
    alone = np.setdiff1d(codes[test], codes[train])
    if not len(alone):
        return ()
    what = f"the {one} {names[alone[0]]!r}" if len(alone) == 1 else f"{len(alone):,} {more} such as {names[alone[0]]!r}"
    return (f"{np.isin(codes[test], alone).sum():,} test rows are of {what}, of which there are no training rows",)


def _kinds(table: pl.DataFrame, chosen: Columns, name: str, path: str) -> np.ndarray:
    """A column as whole numbers from 0 in the order of its values, or as the floats that it holds."""
    _refuse_missing(table, name, path)
    refuse_numbers_among_texts(table, chosen, [name], path)
    values = table[name].to_numpy()
    if values.dtype.kind != "f":
        return coded(values)[1]
    if not np.isfinite(values).all():
        raise FedraxError(f"{path}: column {name!r} holds numbers that are not finite.")
    return values


_WORDS = {
    "labels": ("auto", "classes", "numbers"),
    "standardize": ("all", "client", "none"),
    "missing": ("refuse", "mean"),
}


def _check_choices(**given: str) -> None:
    for option, word in given.items():
        if word not in _WORDS[option]:
            raise unknown(f"{option}:", word, _WORDS[option])


def check_columns(table: pl.DataFrame, named: Sequence[str], path: object) -> None:
    """Refuse names of columns that the table does not have."""
    for column in named:
        if column not in table.columns:
            raise unknown(f"column of {path}", column, table.columns)


def _labels(table: pl.DataFrame, chosen: Columns, path: object) -> np.ndarray:
    """The label column as classes (integers, texts) or targets (floats)."""
    label, kind = chosen.label, chosen.labels
    _refuse_missing(table, label, path)
    column = table[label]
    _refuse_other_kinds(column, path)
    if kind != "classes":
        refuse_numbers_among_texts(table, chosen, [label], path)
    if kind == "numbers":
        if not column.dtype.is_numeric():
            raise FedraxError(f"{path}: column {label!r} holds texts, which are no numbers to predict.")
        y = column.to_numpy().astype(np.float64)
    elif kind == "classes" and column.dtype.is_float():
        y = np.array([in_digits(value) for value in column.to_list()])
    else:
        y = column.to_numpy()
    if y.dtype.kind == "f" and not np.isfinite(y).all():
        raise FedraxError(f"{path}: column {label!r} holds numbers that are not finite.")
    return y


def label_notes(table: pl.DataFrame, chosen: Columns) -> list[str]:
    """A warning where whole numbers, or texts in capitals, may be meant otherwise than they are taken."""
    import polars as pl

    column, most = table[chosen.label], chosen.max_categories
    if is_text(column):
        names, rows = column.cast(pl.String).unique().sort().to_list(), len(column)
        told = f"warning: {chosen.label!r} has {len(names):,} classes in {rows:,} rows: it may name or date them"
        return _alike(names, chosen.label) + ([told] if 2 * len(names) > rows >= 10 else [])
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


def _alike(names: Sequence[str], label: str) -> list[str]:
    """A warning of two classes whose names differ in capitals alone."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.casefold(), name)) != name:
            return [f"warning: {label!r} has classes that differ in capitals alone, such as {other!r} and {name!r}"]
    return []


def _refuse_other_kinds(column: pl.Series, path: object) -> None:
    if column.dtype.is_nested() or str(column.dtype).startswith(("Binary", "Object", "Duration")):
        raise FedraxError(
            f"{path}: column {column.name!r} holds {column.dtype} values, which are neither numbers nor texts: choose"
            " other columns, or write it in numbers"
        )


def _refuse_missing(table: pl.DataFrame, column: str, path: object) -> None:
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


_MISSING = ("na", "n/a", "#n/a", "<na>", "nan", "null", "?")
"""How programs write what is missing, in small letters."""


def _written_missing(column: pl.Series) -> pl.Series:
    """The texts of a column that other programs write where a value is missing."""
    import polars as pl

    written = str(column.dtype).startswith(("String", "Categorical", "Enum"))  # not bytes, days and lists of Parquet
    texts = (column if written else column.clear()).drop_nulls().cast(pl.String, strict=False).str.strip_chars()
    return texts.filter(texts.str.to_lowercase().is_in(_MISSING))


def missing_notes(table: pl.DataFrame, chosen: Columns, features: Sequence[str]) -> list[str]:
    """What is a class, a client or a category, and may stand for a missing value."""
    said, roles = [], {chosen.label: "class", chosen.client: "client"}
    for name in [chosen.label, *([chosen.client] if chosen.client else []), *features]:
        found = _written_missing(table[name])
        if not len(found):
            continue
        told = f"{found[0]!r}, in {len(found):,} rows of {name!r}, is a {roles.get(name, 'category')} as any other"
        remove = "remove those rows if it stands for none"
        said.append(f"warning: {told}: {remove}" if name in roles else f"{told} (missing_as)")
    return said


_AMOUNT = r"^[-+]?[$€£]?\s?(\d+([.,]\d+)?|\d{1,3}(,\d{2,3})*,\d{3}(\.\d+)?|\d{1,3}(\.\d{3})+(,\d+)?)\s?[%$€£]?$"
"""Numbers with commas or points between their thousands or before their fraction, percentages, prices; not 1,2,5."""


def refuse_numbers_among_texts(table: pl.DataFrame, chosen: Columns, names: Sequence[str], path: object) -> None:
    """Refuse columns of numbers of which a few texts ("NA", "?"), or commas, would make categories, or classes."""
    import polars as pl

    for name in names:
        _refuse_other_kinds(table[name], path)
        if name in chosen.categorical or not is_text(table[name]):
            continue
        written = table[name].drop_nulls().cast(pl.String)
        odd = written.filter(with_point(written, chosen.decimal).cast(pl.Float64, strict=False).is_null())
        amounts = odd.filter(odd.str.strip_chars().str.contains(_AMOUNT))
        if 2 * len(amounts) > len(odd):
            commas = ' (decimal = "," of csv reads commas before fractions)' if chosen.decimal == "." else ""
            remedy = 'labels = "classes" takes them' if name == chosen.label else "categorical takes the column"
            raise FedraxError(
                f"{path}: column {name!r} holds texts such as {amounts[0]!r}, numbers in another form: write them as"
                f" plain numbers{commas}; {remedy} for categories."
            )
        lost = len(_written_missing(odd))  # of numbers most of which are missing, too
        if 2 * (len(odd) - lost) < len(written) - lost and len(odd):
            kinds = odd.unique(maintain_order=True).to_list()
            listed = ", ".join(map(repr, kinds[:3])) + (f" and {len(kinds) - 3:,} others" if len(kinds) > 3 else "")
            raise FedraxError(
                f"{path}: column {name!r} holds numbers, and in {len(odd):,} of {len(table):,} rows texts: {listed}."
                f" {_remedies(chosen, name)}."
            )


def _remedies(chosen: Columns, name: str) -> str:
    """What to do about texts among the numbers of a column; labels, and what rows are divided by, must be there."""
    if name == chosen.label:
        return 'Remove those rows; labels = "classes" takes all of them for classes'
    if name == chosen.partition_by:
        return "Remove those rows; categorical names columns whose numbers are categories"
    return (
        "missing_as names texts that stand for a missing value; categorical names columns whose numbers are categories;"
        " drop leaves columns out"
    )


def refuse_idle(reader: Callable[..., Dataset], where: str, **given: object) -> None:
    """Refuse options of a reader that are given, not as they are by default, where nothing comes of them.

    A ``test_fraction`` of nothing is none: it goes with test rows that are given.
    """
    known = inspect.signature(reader).parameters
    changed = [name for name, value in given.items() if _as_written(value) != known[name].default]
    idle = [name for name in changed if name != "test_fraction" or given[name] != 0]
    if idle:
        has, it = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise FedraxError(f"{', '.join(idle)} {has} no effect {where}: leave {it} out.")


def _as_written(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def classes_or_targets(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """Floating targets as float32 and no names, or codes int32 of sorted labels and their names."""
    if y.dtype.kind == "f":
        return shortened(y, "targets"), ()
    labels, codes = coded(y)
    return codes.astype(np.int32), tuple(str(label) for label in labels)


def coded(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values in order, and the place among them of each; texts as such, whatever their lengths."""
    if values.dtype.kind == "O":
        values = np.array([str(value) for value in values], object)
    return np.unique(values, return_inverse=True)


def in_digits(value: float) -> str:
    """A number as the name of a class: another one for another number, without a fraction where it is whole."""
    return repr(float(value)).removesuffix(".0")


def shortened(values: np.ndarray, what: str) -> np.ndarray:
    """Finite numbers as float32; FedraxError where one of them is beyond that."""
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused
        made = values.astype(np.float32)
    if not np.isfinite(made).all():
        raise FedraxError(f"the {what} hold numbers beyond 32-bit floats, {np.abs(values).max():g}: scale them.")
    return made


def split(y: np.ndarray, clients: np.ndarray | None, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Training and test rows, divided within each client, else each class, else (a regression) all rows."""
    groups = clients if clients is not None else y if y.dtype.kind == "i" else np.zeros(len(y), np.int8)
    return split_test(groups, fraction, generator(seed, "test split"))


def few_notes(clients: np.ndarray | None, test: np.ndarray, fraction: float) -> tuple[str, ...]:
    """A sentence where a split leaves no row for the test, or none of some clients; ``test`` are the rows of all."""
    if not fraction:
        return ()
    if not len(test):
        whose = "" if clients is None else " of any client"
        said = f"there are too few rows{whose} to keep {fraction:g} of them for the test, which is empty"
        return (f"warning: {said}: raise test_fraction",)
    if clients is None:
        return ()
    count = len(np.unique(clients))
    lacking = count - len(np.unique(clients[test]))
    said = f"{lacking:,} of {count:,} clients have too few rows to keep {fraction:g} of them for the test"
    return (said,) if lacking else ()


def rows_of(samples: Samples, rows: np.ndarray) -> Samples:
    """Some rows of samples."""
    return Samples(samples.x[rows], samples.y[rows])


def from_rows(
    name: str,
    samples: Samples,
    clients: np.ndarray | None,
    train: np.ndarray,
    test: np.ndarray,
    class_names: tuple[str, ...],
    *,
    client_names: tuple[str, ...] = (),
    feature_names: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Dataset:
    """A data set of rows that lie together."""
    return Dataset(
        name,
        rows_of(samples, train),
        rows_of(samples, test),
        len(class_names) or None,
        train_clients=None if clients is None else clients[train],
        test_clients=None if clients is None else clients[test],
        class_names=class_names,
        client_names=client_names,
        feature_names=feature_names,
        notes=notes,
    )
