"""Files written whole or not at all, and tables read from TOML."""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from fedrax.errors import FedraxError

if TYPE_CHECKING:
    import polars as pl

MAX_FILE = 1 << 20
"""Bytes of an experiment file."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, whose folder is made, that takes the place of ``path`` once it is complete and on disk.

    On any error the old file stays and nothing of the new one does; FedraxError where it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # what a killed process left, or a link that somebody planted
        with open(part, "xb", opener=_no_links) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError):
            raise FedraxError(f"cannot write {path}: {error.strerror or error}") from error
        raise


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def open_to_append(path: Path) -> TextIO:
    """A text file to append to, which must not be a link; raises OSError."""
    return open(path, "a", encoding="utf-8", opener=_no_links)


def below(folder: Path, name: str) -> Path:
    """The absolute path that ``name`` means in ``folder``; FedraxError for the home of somebody who is not there."""
    try:
        return (folder / Path(name).expanduser()).resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise FedraxError(f"{name!r} is no path: {error}.") from error


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` (its folder is made), whole or not at all; FedraxError if that fails."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As ``write_text``, for bytes."""
    with replacing(path) as file:
        file.write(content)


def read_csv(path: Path, missing_as: Sequence[str] = ()) -> pl.DataFrame:
    """The table in a CSV file with a header of different names; FedraxError if it is not one.

    ``missing_as``: texts of cells that hold nothing, besides empty ones. A path is a file and never a pattern. A
    compressed file is refused: it may grow to any size.
    """
    import polars as pl

    if not path.is_file():
        raise FedraxError(f"there is no file {path}.")
    try:
        with open(path, "rb") as file:
            if file.read(4).startswith(_COMPRESSED):
                raise FedraxError(f"{path} is compressed: unpack it first.")
            file.seek(0)
            header = next(csv.reader([file.readline(MAX_FILE).decode("utf-8-sig")]), [])
        twice = next((name for name in header if header.count(name) > 1), None)
        if twice is not None:
            raise FedraxError(f"{path} has two columns {twice!r}.")
        return pl.read_csv(path, infer_schema_length=None, glob=False, null_values=list(missing_as) or None)
    except (OSError, ValueError, csv.Error, pl.exceptions.PolarsError) as error:
        raise FedraxError(f"{path} cannot be read as a CSV table: {error}.") from error


_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
"""How gzip, zstandard and zlib begin: what polars would unpack by itself."""


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file; FedraxError if it is not one."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise FedraxError(f"{path} is too large for an experiment file (limit: 1 MiB).")
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise FedraxError(f"there is no file {path}.") from error
    except RecursionError as error:
        raise FedraxError(f"{path} cannot be read as TOML: brackets in brackets, too deep.") from error
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as TOML: {error}.") from error
