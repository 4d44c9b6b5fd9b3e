"""Data sets of texts in Parquet tables: sentence pairs (SNLI) and tweets (Sentiment140)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrax.data.dataset import Dataset, Samples, generator, split_test
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.csv_parquet import reading_parquet
from fedrax.data.readers.tokenize import encode, tokenize, vocabulary
from fedrax.errors import FedraxError, unknown

if TYPE_CHECKING:
    import polars as pl

RELATIONS = ("entailment", "neutral", "contradiction")
SNLI = ("snli/{train}.parquet", "snli/test.parquet")
SENT140 = ("sent140/{table}.parquet",)


def load_snli(
    data_dir: Path, train: str = "dev", length: int = 40, min_count: int = 1, largest: int = 100_000
) -> Dataset:
    """SNLI (Bowman et al. 2015): pairs of sentences, int32 [n, 2, length], and one of three relations.

    Read from snli/: ``train`` names the training table, "train" or "dev" (a small stand-in where the full training set
    is not at hand), and the test table is "test". Sentences are cut after ``length`` words and padded with 0. The
    vocabulary is of the training sentences: words that occur ``min_count`` times, at most ``largest``; others are 1.
    """
    if train not in ("train", "dev"):
        raise unknown("training table of snli", train, ("train", "dev"))
    tables = [read_table(data_dir / "snli" / f"{part}.parquet", _PAIR) for part in (train, "test")]
    sides = [[[tokenize(text) for text in table[side]] for side in _PAIR[:2]] for table in tables]
    words = vocabulary([text for side in sides[0] for text in side], min_count, largest)
    parts = []
    for table, (first, second) in zip(tables, sides, strict=True):
        _check_size(len(table) * 2, length)
        other = set(table["label"].unique()) - set(RELATIONS)
        if other:
            raise FedraxError(
                f"snli: labels are {', '.join(RELATIONS)}, not {min(map(str, other))!r}: leave other rows out."
            )
        x = np.stack([encode(side, words, length) for side in (first, second)], axis=1)
        parts.append(Samples(x, np.array([RELATIONS.index(label) for label in table["label"]], np.int32)))
    return Dataset("snli", parts[0], parts[1], len(RELATIONS), class_names=RELATIONS, vocabulary=words)


_PAIR = ("sentence1", "sentence2", "label")


def load_sent140(
    data_dir: Path,
    table: str = "leaf_k30_by_user",
    length: int = 25,
    min_count: int = 2,
    largest: int = 100_000,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """Sentiment140 (Go et al. 2009): tweets, int32 [n, length], negative or positive; natural clients are the users.

    Read from sent140/: ``table`` is "leaf_k30_by_user" or "sample". Each user keeps ``test_fraction`` of the tweets for
    the test. Words are as in snli, the vocabulary that of the training tweets.
    """
    if table not in ("leaf_k30_by_user", "sample"):
        raise unknown("table of sent140", table, ("leaf_k30_by_user", "sample"))
    path = data_dir / "sent140" / f"{table}.parquet"
    rows = read_table(path, ("text", "user"), label="label")
    _check_size(len(rows), length)
    y = rows["label"].to_numpy()
    if not np.isin(y, (0, 1)).all():
        raise FedraxError(f"{path}: labels are 0 and 1.")
    users = np.unique(rows["user"].to_numpy(), return_inverse=True)[1]
    train, test = split_test(users, test_fraction, generator(seed, "test split"))
    tweets = [tokenize(text) for text in rows["text"]]
    words = vocabulary((tweets[row] for row in train), min_count, largest)
    x, y = encode(tweets, words, length), y.astype(np.int32)
    return Dataset(
        "sent140",
        Samples(x[train], y[train]),
        Samples(x[test], y[test]),
        2,
        train_clients=users[train],
        test_clients=users[test],
        class_names=("negative", "positive"),
        vocabulary=words,
    )


def read_table(path: Path, texts: Sequence[str], label: str | None = None) -> pl.DataFrame:
    """The columns ``texts``, and ``label`` of integers, of a Parquet table without missing values."""
    import polars as pl

    columns = [*texts, *([label] if label else [])]
    with reading_parquet(path):
        schema = pl.read_parquet_schema(path)
        for column in columns:
            if column not in schema:
                raise unknown(f"column of {path}", column, schema)
            fits = schema[column].is_integer() if column == label else schema[column] == pl.String
            if not fits:
                raise FedraxError(f"{path}: column {column!r} holds {schema[column]}.")
        found = pl.read_parquet(path, columns=columns, glob=False)
    if sum(found.null_count().row(0)) or not len(found):
        raise FedraxError(f"{path} has missing values, or no rows.")
    return found


def _check_size(rows: int, length: int) -> None:
    if length < 1 or 4 * rows * length > MAX_BYTES:
        raise FedraxError(f"{rows:,} texts of {length} words are none, or more than {MAX_BYTES >> 30} GiB.")
