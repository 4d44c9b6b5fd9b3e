"""Tokenized text: words, vocabularies, word vectors from files; SNLI and Sentiment140."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrax.config.arguments import checked_arguments
from fedrax.data.dataset import Dataset, Samples, numpy_generator, train_test_split
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.table_files import parquet_errors
from fedrax.errors import FedraxError, unknown
from fedrax.files import open_regular_file

if TYPE_CHECKING:
    import polars as pl

PADDING, UNKNOWN = 0, 1
"""Tokens of padding and of words outside the vocabulary. The vocabulary starts at token 2."""

MAX_CHARACTERS = 20_000
"""Characters of a text that are read; the rest is ignored."""
MAX_DIMENSION = 4096
"""Largest dimension of a word vector."""
MAX_LINE = 64 * MAX_DIMENSION
"""Most bytes of a line of a file of word vectors."""

_IDEOGRAPH = r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]"
"""Kana and Han: written without spaces, so that each character is a word."""
_ASCII_WORD = re.compile(r"[a-z0-9]+(?:['’][a-z]+)?|\S")
"""Pattern of words in ASCII texts."""


@cache
def _unicode_word() -> re.Pattern[str]:
    """Pattern of words in any text: letters with combining marks, which Python's patterns do not match."""
    every = map(chr, range(sys.maxunicode + 1))
    marks = "".join(re.escape(sign) for sign in every if unicodedata.category(sign)[0] == "M")
    letter, in_words = (rf"(?:(?!{_IDEOGRAPH})[^\W{no}_][{marks}]*)+" for no in (r"", r"\d"))
    return re.compile(rf"{letter}(?:['’]{in_words})?|\S")


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks.

    A word is a run of letters and digits, with a suffix after an apostrophe ("don't"). Every other character that is
    not a space is a token of its own, as are Kana and Han characters. Unicode is normalized to NFC. Characters beyond
    the first 20,000 are ignored.

    Args:
        text: The text.

    Returns:
        Its tokens.

    Raises:
        FedraxError: ``text`` is not a string, such as the NaN of a missing value.

    Example:
        >>> fedrax.data.tokenize("It doesn't work!")
        ['it', "doesn't", 'work', '!']
    """
    if not isinstance(text, str):  # such as NaN, which tables have where a text is missing
        raise FedraxError(f"a text is wanted, not {text!r:.60}: leave rows without one out, or give them an empty one.")
    text = unicodedata.normalize("NFC", text[:MAX_CHARACTERS]).lower()
    return (_ASCII_WORD if text.isascii() else _unicode_word()).findall(text)


@checked_arguments
def build_vocabulary(texts: Iterable[Sequence[str]], min_count: int = 1, largest: int = 100_000) -> tuple[str, ...]:
    """Collect the most frequent words, in order of decreasing frequency and then alphabetically.

    Args:
        texts: Tokenized texts.
        min_count: Fewest occurrences of a word.
        largest: Most words in the vocabulary.

    Returns:
        The words; word i is token i + 2 in `encode_words`.

    Raises:
        FedraxError: A number is below 1, a text is not tokenized, or no word is frequent enough.

    Example:
        >>> fedrax.data.build_vocabulary([["a", "b"], ["b", "c"]], min_count=2)
        ('b',)
    """
    if min_count < 1 or largest < 1:
        raise FedraxError(f"a vocabulary needs counts of 1 or more, not min_count {min_count} and largest {largest}.")
    counts: Counter[str] = Counter()
    for words in texts:
        counts.update(_check_tokens(words))
    kept = [(-count, word) for word, count in counts.items() if count >= min_count]
    if counts and not kept:
        most = max(counts.values())
        raise FedraxError(f"no word occurs {min_count} times, the most frequent one {most}: lower min_count.")
    return tuple(word for _, word in sorted(kept)[:largest])


@checked_arguments
def encode_words(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> np.ndarray:
    """Encode tokenized texts as token numbers, truncated or padded to ``length``.

    Args:
        texts: n tokenized texts.
        words: The vocabulary; its first word is token 2.
        length: Tokens per text.

    Returns:
        Tokens, int32 [n, length]: 0 is padding, 1 a word outside the vocabulary.

    Raises:
        FedraxError: ``length`` is below 1, or a text is not tokenized.

    Example:
        >>> fedrax.data.encode_words([["b", "z"], ["c", "b", "c", "b"]], words=("b", "c"), length=3).tolist()
        [[2, 1, 0], [3, 2, 3]]
    """
    if length < 1:
        raise FedraxError(f"a text has room for 1 word or more, not {length}.")
    number = {word: i for i, word in enumerate(words, start=UNKNOWN + 1)}
    encoded = np.full((len(texts), length), PADDING, np.int32)
    for row, text in enumerate(texts):
        numbers = [number.get(word, UNKNOWN) for word in _check_tokens(text)[:length]]
        encoded[row, : len(numbers)] = numbers
    return encoded


def _check_tokens(text: Sequence[str]) -> Sequence[str]:
    """A text as a list of words; a plain string would be read as a list of characters."""
    if isinstance(text, str):
        raise FedraxError(f"a list of words is wanted, not the text {text!r:.60}: tokenize makes one of it.")
    return text


def encode_characters(texts: Sequence[str], train: np.ndarray, length: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """The first ``length`` characters of each text by number, int32 [n, length], then padding; and the alphabet.

    The alphabet are the characters of the rows ``train``, in order: the first of them has the number 2.
    """
    if length < 1:
        raise FedraxError(f"a text has room for 1 character or more, not {length}.")
    codes = np.array(texts, f"U{length}").view(np.uint32).reshape(len(texts), length)  # cut, filled up with 0
    seen = np.zeros(sys.maxunicode + 1, bool)
    seen[codes[train]] = True
    seen[0] = False
    alphabet = np.flatnonzero(seen)
    number = np.full(len(seen), UNKNOWN, np.int32)
    number[0] = PADDING
    number[alphabet] = np.arange(UNKNOWN + 1, UNKNOWN + 1 + len(alphabet))
    return number[codes], tuple(map(chr, alphabet))


def read_word_vectors(path: str | Path, words: Sequence[str]) -> np.ndarray:
    """Vectors of padding, of unknown words and of ``words``, float32 [2 + len(words), dimension], from a file.

    The format of GloVe: a line a word, the word and its numbers between single blanks, of which the word itself may
    have some; a first line of two whole numbers (word2vec's and fastText's) is passed over. The first vector of a word
    counts. Words without any, padding and unknown words are zeros. Only vectors that are asked for are kept and
    checked. Raises FedraxError for any other file.
    """
    number = {word: i for i, word in enumerate(words, start=UNKNOWN + 1)}
    table, found, width = np.zeros((0, 0), np.float32), set(), 0
    for at, line in _text_lines(Path(path)):
        width = width or _vector_length(line)
        word = _leading_word(line, width)
        if word not in number or word in found:
            continue
        values = line[len(word) + 1 :].split(" ")
        if not table.size:
            if width > MAX_DIMENSION:
                raise FedraxError(f"{path}, line {at}: a vector has 1 to {MAX_DIMENSION} numbers, not {width}.")
            table = np.zeros((len(words) + UNKNOWN + 1, max(width, 1)), np.float32)
        try:
            vector = np.array([float(value) for value in values])
        except ValueError:
            raise FedraxError(f"{path}, line {at}: {word!r} is not followed by numbers.") from None
        if len(vector) != table.shape[1] or not (np.abs(vector) < 1e30).all():
            raise FedraxError(f"{path}, line {at}: not {table.shape[1]} finite numbers, as the lines before.")
        table[number[word]] = vector
        found.add(word)
    if not found:
        raise FedraxError(
            f"{path} has a vector for none of the {len(words)} words: a line is to be a word and its numbers, with"
            " single blanks between them."
        )
    return table


def _vector_length(line: str) -> int:
    """The number of numbers at the end of a line, after its first word."""
    return sum(1 for _ in takewhile(_is_number, reversed(line.split(" ")[1:])))


def _leading_word(line: str, width: int) -> str:
    """The text before the ``width`` numbers of a line, or its first piece if the last piece is a number."""
    first = line.partition(" ")[0]
    if not width or line.count(" ") <= width:
        return first
    word = line.rsplit(" ", width)[0]
    return first if _is_number(word.rpartition(" ")[2]) else word


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, content) of every line except a header of two integers."""
    try:
        with open_regular_file(path) as file:
            at = 0
            while raw := file.readline(MAX_LINE + 1):
                at += 1
                if len(raw) > MAX_LINE:
                    raise FedraxError(f"{path}, line {at} is longer than {MAX_LINE:,} bytes.")
                try:
                    line = raw.decode("utf-8-sig" if at == 1 else "utf-8").rstrip()
                except UnicodeDecodeError:
                    raise FedraxError(
                        f"{path}, line {at} is not UTF-8 text: unpack a compressed file first, and save one of bytes,"
                        " such as word2vec's, as text."
                    ) from None
                if at == 1 and len(sizes := line.split(" ")) == 2 and all(map(str.isdecimal, sizes)):
                    continue
                yield at, line
    except OSError as error:
        raise FedraxError(f"{path} cannot be read: {error.strerror}.") from error


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

    Args:
        data_dir: Directory of data files.
        train: Table of the training sentences, "train" or "dev".
        length: Number of words after which a sentence is cut.
        min_count: Number of occurrences from which a word is in the vocabulary.
        largest: Largest number of words in the vocabulary.
    """
    if train not in ("train", "dev"):
        raise unknown("training table of snli", train, ("train", "dev"))
    tables = [read_text_table(data_dir / "snli" / f"{part}.parquet", _PAIR_COLUMNS) for part in (train, "test")]
    sides = [[[tokenize(text) for text in table[side]] for side in _PAIR_COLUMNS[:2]] for table in tables]
    words = build_vocabulary([text for side in sides[0] for text in side], min_count, largest)
    parts = []
    for table, (first, second) in zip(tables, sides, strict=True):
        _check_size(len(table) * 2, length)
        other = set(table["label"].unique()) - set(RELATIONS)
        if other:
            raise FedraxError(
                f"snli: labels are {', '.join(RELATIONS)}, not {min(map(str, other))!r}: leave other rows out."
            )
        x = np.stack([encode_words(side, words, length) for side in (first, second)], axis=1)
        parts.append(Samples(x, np.array([RELATIONS.index(label) for label in table["label"]], np.int32)))
    return Dataset("snli", parts[0], parts[1], len(RELATIONS), class_names=RELATIONS, vocabulary=words)


_PAIR_COLUMNS = ("sentence1", "sentence2", "label")


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

    Args:
        data_dir: Directory of data files.
        table: Table to read, "leaf_k30_by_user" or "sample".
        length: Number of words after which a tweet is cut.
        min_count: Number of occurrences from which a word is in the vocabulary.
        largest: Largest number of words in the vocabulary.
        test_fraction: Share of the tweets of each user that is held out as test data.
        seed: Seed of the choice of the test tweets.
    """
    if table not in ("leaf_k30_by_user", "sample"):
        raise unknown("table of sent140", table, ("leaf_k30_by_user", "sample"))
    path = data_dir / "sent140" / f"{table}.parquet"
    rows = read_text_table(path, ("text", "user"), label="label")
    _check_size(len(rows), length)
    y = rows["label"].to_numpy()
    if not np.isin(y, (0, 1)).all():
        raise FedraxError(f"{path}: labels are 0 and 1.")
    users = np.unique(rows["user"].to_numpy(), return_inverse=True)[1]
    train, test = train_test_split(users, test_fraction, numpy_generator(seed, "test split"))
    tweets = [tokenize(text) for text in rows["text"]]
    words = build_vocabulary((tweets[row] for row in train), min_count, largest)
    x, y = encode_words(tweets, words, length), y.astype(np.int32)
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


def read_text_table(path: Path, texts: Sequence[str], label: str | None = None) -> pl.DataFrame:
    """The columns ``texts``, and ``label`` of integers, of a Parquet table without missing values."""
    import polars as pl

    columns = [*texts, *([label] if label else [])]
    with parquet_errors(path):
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
