"""LEAF's files (Caldas et al. 2018, arXiv:1812.01097): samples grouped by user, in JSON. Hostile until parsed.

A file holds ``users`` (names), ``num_samples`` (a number each) and ``user_data``: for each user ``{"x": [...], "y":
[...]}``, where x are vectors of numbers (FEMNIST, Synthetic), strings (Shakespeare: 80 characters, and y the next one)
or lists with a text at a known place (Sent140). ``hierarchies`` may name a group for each user, such as the play.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedrax.data.dataset import Dataset, as_samples
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.assembly import (
    encode_labels,
    format_number,
    make_dataset,
    reject_unused_options,
    small_split_notes,
    split_rows,
)
from fedrax.data.readers.text_data import MAX_CHARACTERS, build_vocabulary, encode_characters, encode_words, tokenize
from fedrax.errors import FedraxError, unknown
from fedrax.files import read_json

MAX_NAME = 200
"""Most characters of a user's name, and of a label."""
CHARACTERS, WORDS = 80, 25
"""Lengths of texts in LEAF's models of Shakespeare and Sent140."""


@dataclass(frozen=True)
class LeafUser:
    """The samples of a user in one file: x float32 [n, d] or n texts, y numbers float64 [n] or n texts."""

    name: str
    group: str | None
    """None if the file has none."""
    x: np.ndarray | list[str]
    y: np.ndarray | list[str]


def load_leaf(
    path: str | Path,
    clients: Literal["users", "hierarchies"] = "users",
    shape: tuple[int, ...] = (),
    labels: Literal["auto", "classes", "numbers"] = "auto",
    text: int = 4,
    tokens: Literal["auto", "characters", "words"] = "auto",
    length: int | None = None,
    min_count: int = 2,
    largest: int = 100_000,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Dataset:
    """LEAF's JSON: a file, a folder of them, or a folder with the folders train and test.

    Natural clients are the users, or the groups in ``hierarchies``, with their names. Vectors are float32 [n, d], or
    ``[n, *shape]``. Texts, strings or what stands at place ``text`` (from 0) of lists, are tokens int32 [n, length]:
    characters where labels are single characters (not digits alone), else words as of sent140 (``min_count``,
    ``largest``), of the training rows; ``length`` is 80 characters or 25 words by default. Labels are classes where
    they are texts or whole numbers, else targets of a regression. Without a test folder each client keeps
    ``test_fraction`` of its rows for the test.

    Args:
        path: File, folder of files, or folder with the folders train and test.
        clients: Whether the natural clients are the users or the groups in ``hierarchies``.
        shape: Shape of one sample into which vectors are brought; empty: unchanged.
        labels: Whether labels are "classes" or "numbers" of a regression; "auto" decides by their type.
        text: Place of the text in samples that are lists, from 0.
        tokens: Whether texts are cut into "characters" or "words"; "auto" decides by the labels.
        length: Number of tokens of a sample; by default 80 characters or 25 words.
        min_count: Number of occurrences from which a word is in the vocabulary.
        largest: Largest number of words in the vocabulary.
        test_fraction: Share of the rows of each client that is held out without a test folder, drawn row by row. It is
            for independent rows: overlapping windows of a recording need a test folder of whole recordings.
        seed: Seed of the choice of the test rows.
    """
    _check_choices(clients, labels, tokens)
    folders = _folders(Path(path))
    if len(folders) == 2:
        reject_unused_options(load_leaf, "where a folder test holds the test rows", test_fraction=test_fraction)
    parts = [_read_part(folder, text) for folder in folders]
    users = [user for part in parts for user in part]
    if clients == "hierarchies" and any(user.group is None for user in users):
        raise FedraxError(f"{path}: a file names no hierarchies for its users: take clients = 'users'.")
    sizes = [len(user.y) for user in users]
    names = [user.group if clients == "hierarchies" else user.name for user in users]
    found, owner = np.unique(np.array(names, object), return_inverse=True)
    owner = np.repeat(owner, sizes)
    x = _concatenate([user.x for user in users], "inputs", path)
    y = _concatenate([user.y for user in users], "labels", path)
    next_characters = _predicts_characters(y)
    y, class_names = encode_labels(_labels(y, labels, path))
    notes: tuple[str, ...] = ()
    if len(parts) == 2:
        first = sum(sizes[: len(parts[0])])
        train, test = np.arange(first), np.arange(first, len(y))
    else:
        train, test = split_rows(y, owner, test_fraction, seed)
        notes = small_split_notes(owner, test, test_fraction)
    words: tuple[str, ...] = ()
    of_words: dict[str, Any] = {"min_count": min_count, "largest": largest}
    if isinstance(x, np.ndarray):
        reject_unused_options(load_leaf, "on vectors of numbers", text=text, tokens=tokens, length=length, **of_words)
        x = _reshape(x, shape, path)
    else:
        reject_unused_options(load_leaf, "on texts", shape=shape)
        x, words = _encode_texts(x, train, tokens, next_characters, length, of_words)
    client_names = tuple(str(name) for name in found)
    made = make_dataset(Path(path).stem, as_samples(x, y), owner, train, test, class_names, client_names=client_names)
    return replace(made, vocabulary=words, notes=notes)


def _encode_texts(
    texts: list[str],
    train: np.ndarray,
    tokens: str,
    next_characters: bool,
    length: int | None,
    of_words: dict[str, Any],
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Texts as tokens int32 [n, length], and the vocabulary."""
    if tokens == "words" or (tokens == "auto" and not next_characters):
        lists, length = [tokenize(text) for text in texts], _check_length(length, WORDS, len(texts))
        words = build_vocabulary((lists[row] for row in train), **of_words)
        return encode_words(lists, words, length), words
    reject_unused_options(load_leaf, "on characters", **of_words)
    most = _check_length(length, CHARACTERS, len(texts))
    if next_characters:
        texts = [text[-most:] for text in texts]  # what stands before the next one
    return encode_characters(texts, train, most)


def _check_choices(clients: str, labels: str, tokens: str) -> None:
    for option, word, known in (
        ("clients", clients, ("users", "hierarchies")),
        ("labels", labels, ("auto", "classes", "numbers")),
        ("tokens", tokens, ("auto", "characters", "words")),
    ):
        if word not in known:
            raise unknown(f"{option}:", word, known)


def _folders(path: Path) -> list[list[Path]]:
    """The files of the training part and, where there is one, of the test part."""
    if not path.is_dir():
        return [[path]]
    folders = [path / "train", path / "test"] if (path / "train").is_dir() else [path]
    parts = [sorted(folder.glob("*.json")) for folder in folders if folder.is_dir()]
    if not all(parts):
        raise FedraxError(f"{path} holds no JSON files, or its folder train or test does not.")
    return parts


def _read_part(files: Iterable[Path], text: int) -> list[LeafUser]:
    """The users of all files of a part without duplicates; users without samples are left out."""
    users: dict[str, LeafUser] = {}
    size = 0
    for path in files:
        for user in _read_users(path, text):
            if user.name in users:
                raise FedraxError(
                    f"{path}: user {user.name!r} has samples in another file already; training and test samples lie in"
                    " the folders train and test."
                )
            users[user.name] = user
            size += user.x.nbytes if isinstance(user.x, np.ndarray) else 0
        if size > MAX_BYTES:
            raise FedraxError(f"the files up to {path} hold more than {MAX_BYTES >> 30} GiB of numbers.")
    return [user for user in users.values() if len(user.y)]


def _read_users(path: Path, text: int) -> list[LeafUser]:
    found = read_json(path, partial(_parse_user, text=text))
    if not isinstance(found, dict) or not isinstance(found.get("user_data"), dict):
        raise FedraxError(f"{path} is not of LEAF's format, which has users and user_data.")
    data, names = found["user_data"], _names(found, "users", path)
    odd = next((name for name, count in Counter(names).items() if count > 1), None)
    odd = next(iter(sorted(set(names) ^ set(data))), None) if odd is None else odd
    if odd is not None:
        raise FedraxError(f"{path}: user {odd!r} must stand once among users and once in user_data.")
    groups = _names(found, "hierarchies", path) if "hierarchies" in found else [None] * len(names)
    counts = found.get("num_samples", [None] * len(names))
    if len(groups) != len(names) or not isinstance(counts, list) or len(counts) != len(names):
        raise FedraxError(f"{path}: num_samples and hierarchies must have an entry for each of {len(names):,} users.")
    return [_user(path, *facts, data[facts[0]]) for facts in zip(names, groups, counts, strict=True)]


def _names(table: dict[str, Any], key: str, path: Path) -> list[str]:
    names = table.get(key)
    if not isinstance(names, list) or not all(type(name) is str and 0 < len(name) <= MAX_NAME for name in names):
        raise FedraxError(f"{path}: {key} must be a list of names, of at most {MAX_NAME:,} characters.")
    if not _is_unicode(names):
        raise FedraxError(f"{path}: {key} holds characters that are none.")
    return names


def _user(path: Path, name: str, group: str | None, count: Any, samples: Any) -> LeafUser:
    where = f"{path}: user {name!r}"
    if isinstance(samples, FedraxError):
        raise FedraxError(f"{where} {samples}")
    if not isinstance(samples, _UserSamples):
        raise FedraxError(f"{where} needs a list x and a list y.")
    if len(samples.x) != len(samples.y) or (count is not None and count != len(samples.y)):
        stated = "" if count is None else f", where num_samples says {count!r:.20}"
        raise FedraxError(f"{where} has {len(samples.x):,} inputs and {len(samples.y):,} labels{stated}.")
    return LeafUser(name, group, samples.x, samples.y)


class _UserSamples(NamedTuple):
    x: np.ndarray | list[str]
    y: np.ndarray | list[str]


def _parse_user(table: dict[str, Any], text: int) -> Any:
    """The samples of a user as arrays or texts, or an error message; other objects unchanged."""
    x, y = table.get("x"), table.get("y")
    if not (isinstance(x, list) and isinstance(y, list)):
        return table
    try:
        return _UserSamples(_parse_inputs(x, text), _parse_labels(y))
    except FedraxError as error:
        return error


def _parse_inputs(x: list[Any], text: int) -> np.ndarray | list[str]:
    """Vectors of one length as float32 [n, d], or the n texts."""
    kinds = set(map(type, x))
    if kinds <= {str}:
        return _texts(x)
    inner = {kind for row in x if type(row) is list for kind in set(map(type, row))}
    if kinds == {list} and str in inner:
        if not all(len(row) > text >= 0 and type(row[text]) is str for row in x):
            raise FedraxError(f"has lists without a text at place {text}, counted from 0 (text).")
        return _texts([row[text] for row in x])
    if kinds != {list} or not inner <= {int, float} or len(set(map(len, x))) != 1 or not x[0]:
        raise FedraxError("has inputs that are neither texts nor vectors of numbers, all of one length.")
    return _numbers(x, np.float32)


def _parse_labels(y: list[Any]) -> np.ndarray | list[str]:
    """Labels as numbers float64 [n] or as texts."""
    kinds = set(map(type, y))
    if kinds == {str}:
        if max(map(len, y)) > MAX_NAME:
            raise FedraxError(f"has a label of more than {MAX_NAME:,} characters.")
        return _texts(y)
    if not kinds <= {int, float}:
        raise FedraxError("has labels that are neither all texts nor all numbers.")
    if any(type(label) is int and abs(label) > 2**53 for label in y):
        raise FedraxError(
            "has whole numbers beyond 2^53 as labels, which floats do not tell apart: write them as texts."
        )
    return _numbers(y, np.float64)


def _numbers(values: list[Any], dtype: type) -> np.ndarray:
    try:
        with np.errstate(over="ignore"):  # what is too large is infinite, and refused
            array = np.array(values, dtype)
    except OverflowError:
        array = np.array([np.inf])
    if not np.isfinite(array).all():
        raise FedraxError("has numbers that are not finite, or beyond 32-bit floats.")
    return array


def _texts(texts: list[str]) -> list[str]:
    if not _is_unicode(texts):
        raise FedraxError("has texts with characters that are none.")
    return [text[:MAX_CHARACTERS] for text in texts]


def _is_unicode(texts: Sequence[str]) -> bool:
    r"""Whether the texts can be written: half a pair of \\ud800 ... \\udfff cannot."""
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _concatenate(parts: Sequence[np.ndarray | list[str]], what: str, path: object) -> np.ndarray | list[str]:
    """Inputs or labels of all users, which must be of one kind."""
    texts = {isinstance(part, list) for part in parts}
    shapes = {part.shape[1:] for part in parts if isinstance(part, np.ndarray)}
    if not parts:
        raise FedraxError(f"{path} holds no samples.")
    if len(texts) > 1 or len(shapes) > 1:
        found = "texts and numbers" if len(texts) > 1 else f"lengths {sorted(shapes)}"
        raise FedraxError(f"{path}: all {what} must be of one kind, found {found:.100}.")
    if texts == {True}:
        return [text for part in parts for text in part]
    return np.concatenate(parts)


def _labels(y: np.ndarray | list[str], kind: str, path: object) -> np.ndarray:
    """Labels as classes (integers, texts) or as targets (floats)."""
    if isinstance(y, list):
        if kind == "numbers":
            raise FedraxError(f"{path}: the labels are texts, which are no numbers to predict.")
        return np.array(y, object)
    whole = bool((y == np.floor(y)).all() and (np.abs(y) < 2**53).all())
    if kind == "numbers" or (kind == "auto" and not whole):
        return y
    return y.astype(np.int64) if whole else np.array(list(map(format_number, y)), object)


def _predicts_characters(y: np.ndarray | list[str]) -> bool:
    """Whether labels are the next characters of a text, not class numbers."""
    return isinstance(y, list) and all(len(label) == 1 for label in y) and not all(map(str.isdigit, y))


def _reshape(x: np.ndarray, shape: tuple[int, ...], path: object) -> np.ndarray:
    if not shape:
        return x
    if min(shape) < 1 or math.prod(shape) != x.shape[1]:
        raise FedraxError(f"{path}: inputs are {x.shape[1]:,} numbers, which are not of shape {list(shape)}.")
    return x.reshape(len(x), *shape)


def _check_length(length: int | None, usual: int, rows: int) -> int:
    """The length of texts, validated."""
    chosen = usual if length is None else length
    if not 1 <= chosen <= MAX_CHARACTERS or 4 * rows * chosen > MAX_BYTES:
        raise FedraxError(f"{rows:,} texts of length {chosen} are none, or more than {MAX_BYTES >> 30} GiB.")
    return chosen
