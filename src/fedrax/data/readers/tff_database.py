"""SQLite databases of TensorFlow Federated: federated EMNIST (FEMNIST) and Shakespeare, with their natural clients.

A row of the table ``examples`` is a client, a split and a serialized ``tf.train.Example``. The messages are parsed
here, and nothing of a database is executed: only a plain table is read, with limits on the size of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedrax.data.dataset import Dataset, Samples
from fedrax.data.readers.array_files import MAX_BYTES
from fedrax.data.readers.images import channel_moments
from fedrax.data.readers.text_data import PADDING, UNKNOWN
from fedrax.errors import FedraxError

MAX_EXAMPLE = 16 << 20
"""Most bytes of a value in a database."""
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Classes of federated EMNIST in the order of their labels."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

Feature = bytes | np.ndarray
"""The first string, or the numbers, of a feature of an example."""


def load_femnist(data_dir: Path, digits_only: bool = False) -> Dataset:
    """Federated EMNIST (Caldas et al. 2018) as TensorFlow Federated publishes it, from femnist/emnist_all.sqlite.

    x is uint8 [n, 28, 28, 1] with a white background, with 62 classes (digits, capital and small letters) or 10 with
    ``digits_only``. Natural clients are the 3,400 writers, whose rows are divided into training and test rows.

    Args:
        data_dir: Directory of data files.
        digits_only: Whether only the ten digits are read, instead of all 62 classes.
    """
    path = data_dir / "femnist" / "emnist_all.sqlite"
    prefix, classes = ("digits_only", 10) if digits_only else ("all", len(CHARACTERS))
    parts, owners = [], []
    for part in ("train", "test"):
        images, labels, clients = [], [], []
        for client, example in _examples(path, f"{prefix}_{part}"):
            pixels, label = _numbers(example.get("pixels"), 784, "f"), _numbers(example.get("label"), 1, "i")
            if pixels is None or label is None:
                raise FedraxError(f"{path} is not of federated EMNIST: an example needs 784 pixels and a label.")
            images.append(np.rint(255 * np.clip(pixels, 0, 1)).astype(np.uint8))  # bytes before they were divided
            labels.append(int(label[0]))
            clients.append(client)
        parts.append(Samples(np.stack(images).reshape(-1, 28, 28, 1), np.array(labels, np.int32)))
        owners.append(np.array(clients))
    mean, std = channel_moments(parts[0].x, np.arange(len(parts[0].x)))
    return _with_clients("femnist", parts, owners, tuple(CHARACTERS[:classes]), pixels=True, mean=mean, std=std)


def load_shakespeare(data_dir: Path, length: int = 80, stride: int = 1) -> Dataset:
    """Shakespeare (McMahan et al. 2017) as TensorFlow Federated publishes it, from shakespeare/shakespeare.sqlite.

    Natural clients are the 715 roles. The label of a sample is a character of a role's lines, and x is int32 [length],
    the characters before it, padded with 0 at the end; 1 is a character that the training part does not have. The
    samples of a text begin at every ``stride``-th character.

    Args:
        data_dir: Directory of data files.
        length: Number of characters before the label that a sample has.
        stride: Distance of the starts of two samples in a text, in characters.
    """
    if length < 1 or stride < 1:
        raise FedraxError(f"length and stride must be 1 or more, not {length} and {stride}.")
    path = data_dir / "shakespeare" / "shakespeare.sqlite"
    texts: list[list[str]] = []
    owners = []
    for part in ("train", "test"):
        rows = [(client, _snippet(example, path)) for client, example in _examples(path, part)]
        texts.append([text for _, text in rows])
        counts = [len(range(1, len(text), stride)) for _, text in rows]
        owners.append(np.repeat(np.array([client for client, _ in rows]), counts))
    if 4 * length * max(map(len, owners)) > MAX_BYTES:
        raise FedraxError(f"{path}: samples of {length:,} characters take more than {MAX_BYTES >> 30} GiB: set stride.")
    alphabet, labels = (tuple(sorted(set().union(*some))) for some in (texts[0], texts[0] + texts[1]))
    number = {character: i for i, character in enumerate(alphabet, UNKNOWN + 1)}
    label = {character: i for i, character in enumerate(labels)}
    parts = []
    for part in texts:
        windows = [_windows([number.get(c, UNKNOWN) for c in text], length, stride) for text in part]
        y = [label[text[at]] for text in part for at in range(1, len(text), stride)]
        parts.append(Samples(np.concatenate(windows), np.array(y, np.int32)))
    return _with_clients("shakespeare", parts, owners, labels, vocabulary=alphabet)


def _snippet(example: dict[str, Feature], path: Path) -> str:
    text = example.get("snippets")
    if not isinstance(text, bytes):
        raise FedraxError(f"{path} is not of Shakespeare: an example needs the string snippets.")
    return text.decode("utf-8", "backslashreplace")


def _windows(codes: list[int], length: int, stride: int) -> np.ndarray:
    """The ``length`` codes before every ``stride``-th position from the second one, int32 [n, length]."""
    text, starts = np.array(codes, np.int32), np.arange(1, len(codes), stride)
    windows = np.full((len(starts), length), PADDING, np.int32)
    for row, at in enumerate(starts[starts < length]):
        windows[row, :at] = text[:at]
    whole = starts >= length
    if whole.any():
        windows[whole] = np.lib.stride_tricks.sliding_window_view(text, length)[starts[whole] - length]
    return windows


def _with_clients(
    name: str, parts: list[Samples], owners: list[np.ndarray], class_names: tuple[str, ...], **facts: object
) -> Dataset:
    """The data set of two parts whose rows belong to named clients."""
    found, codes = np.unique(np.concatenate(owners), return_inverse=True)
    first = len(owners[0])
    return Dataset(
        name,
        parts[0],
        parts[1],
        len(class_names),
        train_clients=codes[:first],
        test_clients=codes[first:],
        class_names=class_names,
        client_names=tuple(map(str, found)),
        **facts,  # type: ignore[arg-type]
    )


def _numbers(value: Feature | None, size: int, kind: str) -> np.ndarray | None:
    """A feature of ``size`` finite numbers of a kind, None if it is something else."""
    if isinstance(value, np.ndarray) and value.shape == (size,) and value.dtype.kind == kind:
        return value if np.isfinite(value).all() else None
    return None


def _examples(path: Path, split: str) -> Iterator[tuple[str, dict[str, Feature]]]:
    """The client and the features of every example of a split, client by client."""
    import sqlite3

    if not path.is_file():
        raise FedraxError(f"there is no file {path}.")
    count = 0
    try:
        uri = f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_EXAMPLE)
            database.execute("PRAGMA trusted_schema = OFF")
            kinds = database.execute(
                "SELECT sql FROM sqlite_master WHERE name = 'examples' AND type = 'table'"
            ).fetchall()
            if len(kinds) != 1 or not str(kinds[0][0]).upper().startswith("CREATE TABLE"):  # no view, no virtual table
                raise FedraxError(f"{path} has no table 'examples'.")
            query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id"
            for client, message in database.execute(query, (split,)):
                if not isinstance(client, str) or not isinstance(message, bytes):
                    raise FedraxError(f"{path}: an example is not a client's name and bytes.")
                count += 1
                yield client, parse_example(message)
    except sqlite3.Error as error:
        raise FedraxError(f"{path} cannot be read as an SQLite database: {error}.") from error
    if not count:
        raise FedraxError(f"{path} has no examples of the split {split!r}.")


def parse_example(message: bytes) -> dict[str, Feature]:
    """The features of a serialized ``tf.train.Example``: numbers as arrays, strings as their first value.

    Raises FedraxError for a damaged message.
    """
    found: dict[str, Feature] = {}
    for features in _submessages(memoryview(message), 1):
        for entry in _submessages(features, 1):
            key = next(_submessages(entry, 1), None)
            value = next(_submessages(entry, 2), None)
            if key is not None and value is not None:
                found[bytes(key).decode("utf-8", "backslashreplace")] = _feature(value)
    return found


def _feature(message: memoryview) -> Feature:
    """The value of a ``tf.train.Feature``: a list of strings (1), of floats (2) or of integers (3)."""
    for strings in _submessages(message, 1):
        return bytes(next(_submessages(strings, 1), b""))
    floats, integers, is_float = [], [], False
    for number, wire, value in _fields(message):
        if wire != _LENGTH or number not in (2, 3):
            continue
        is_float = number == 2
        for inner, inner_wire, content in _fields(value):
            if inner != 1:
                continue
            if is_float and inner_wire in (_LENGTH, _FIXED32):
                if len(content) % 4:
                    raise FedraxError("a message of an example is damaged.")
                floats.append(np.frombuffer(content, "<f4"))
            elif not is_float and inner_wire == _VARINT:
                integers.append(int.from_bytes(content, "little"))
            elif not is_float and inner_wire == _LENGTH:
                at = 0
                while at < len(content):
                    one, at = _varint(content, at)
                    integers.append(one)
    if is_float:
        return np.concatenate([np.zeros(0, np.float32), *floats])
    return np.array(integers, np.uint64).astype(np.int64)  # negative integers are two's complements of 64 bits


def _submessages(message: memoryview, number: int) -> Iterator[memoryview]:
    """The values of a field of strings or messages."""
    return (value for field, wire, value in _fields(message) if field == number and wire == _LENGTH)


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """(field number, wire type, value) of each field; a varint's value is its eight bytes."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, wire, memoryview(value.to_bytes(8, "little"))
            continue
        if wire == _LENGTH:
            size, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise FedraxError("a message of an example is damaged.")
        if size > len(message) - at:
            raise FedraxError("a message of an example is truncated.")
        yield number, wire, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """An integer of up to 64 bits, seven bits a byte with the lowest ones first, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            raise FedraxError("a message of an example is truncated.")
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise FedraxError("a message of an example is damaged.")
