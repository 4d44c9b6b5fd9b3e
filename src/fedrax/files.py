"""Files written whole or not at all, and tables and JSON from outside, read within bounds."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from fedrax.errors import FedraxError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

MAX_FILE = 1 << 20
"""Bytes of an experiment file, and of a CSV file's header."""
MAX_DEPTH = 100
"""Tables and lists in one another in an experiment file."""
MAX_CSV, MAX_COLUMNS = 4 << 30, 100_000
"""Bytes and columns of a CSV file."""
MAX_JSON, MAX_VALUES = 1 << 30, 100_000_000
"""Bytes and values of a JSON file; a list or an object counts as ten, for it takes as much memory."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, whose folder is made, that takes the place of ``path`` once it is complete and on disk.

    On any error the old file stays and nothing of the new one does; FedraxError where it cannot be written. All of it
    happens in the one folder that was opened first, whatever is put in the folder's place meanwhile.
    """
    part = f".{path.name}.part"
    try:
        if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
            raise FedraxError(f"cannot write {path}: it is a device, whose place a file would take")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _folder(path.parent) as folder:
            try:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)  # what a killed process left, or a link that somebody planted
                with open(part, "xb", opener=partial(_no_links, folder=folder)) as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
    except OSError as error:
        raise FedraxError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _folder(path: Path) -> Iterator[int]:
    """The folder's descriptor."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _no_links(path: str, flags: int, folder: int | None = None) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)


@contextmanager
def reading(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """A regular file to read, of at most ``limit`` bytes.

    FedraxError for a file that is not there or too large, and for pipes and devices, which may have no end. What else
    goes wrong in reading is an OSError as usual.
    """
    try:
        file = open(path, "rb", opener=_not_waiting)  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise FedraxError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:
        raise FedraxError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    with file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise FedraxError(f"{path} cannot be read: it is not a regular file.")
        if limit is not None and facts.st_size > limit:
            raise FedraxError(f"{path} is too large: {facts.st_size:,} bytes, where at most {limit:,} are read.")
        yield file


def _not_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer


def inflated_limit(stored: int) -> int:
    """How many bytes are taken out of ``stored`` compressed ones: 256 MiB, or 64 times as many if that is more."""
    return max(256 << 20, 64 * stored)


def open_to_append(path: Path) -> TextIO:
    """A text file to append to, which must not be a link; raises OSError."""
    return open(path, "a", encoding="utf-8", opener=_no_links)


def below(folder: Path, name: str) -> Path:
    """The absolute path that ``name`` means in ``folder``; FedraxError for the home of somebody who is not there."""
    try:
        return (folder / Path(name).expanduser()).resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise FedraxError(f"{name!r} is no path: {error}.") from error


def inside(folder: Path, place: Path) -> Path:
    """``folder / place``; FedraxError where something on the way is a link, which may lead out of the folder."""
    path = folder
    for part in place.parts:
        path = path / part
        if path.is_symlink():
            raise FedraxError(f"{path} is a link, which no run makes: remove it")
    return path


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` (its folder is made), whole or not at all; FedraxError if that fails."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As ``write_text``, for bytes."""
    with replacing(path) as file:
        file.write(content)


def write_picture(path: Path, figure: Figure) -> Path:
    """A figure as PNG or SVG, by the name's ending, whole or not at all; the same figure is the same file."""
    import matplotlib as mpl  # which takes a while, and few need it
    from PIL import Image

    kind, content = path.suffix.removeprefix("."), io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fedrax"}):
        figure.savefig(content, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    if kind == "png" and not any(axes.images for axes in figure.axes):  # images have more colours than lines
        drawn, content = Image.open(content).convert("RGB"), io.BytesIO()
        drawn.quantize(256, dither=Image.Dither.NONE).save(content, kind, optimize=True)  # a third of the bytes
    write_bytes(path, content.getvalue())
    return path


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    """FedraxError for what polars finds wrong with a Parquet file.

    Offsets that lie outside of the file make it panic: its threads write reports onto the error output, which are kept
    away, and what reaches Python is no ``Exception``.
    """
    import polars as pl

    error_output, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        said = str(error).splitlines()[0] if isinstance(error, Exception) else "it is damaged"
        raise FedraxError(f"{path} cannot be read as a Parquet table: {said}.") from error
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)
        os.close(nowhere)


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file is written: what stands between two cells, what before a number's fraction, and the texts of cells
    that hold nothing, besides empty ones."""

    separator: str = ","
    decimal: str = "."
    missing_as: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.separator) != 1 or not self.separator.isascii() or self.separator in '\r\n"':
            raise FedraxError(f"a separator is one character of ASCII, such as ';', not {self.separator!r}.")
        if self.decimal not in (".", ","):
            raise FedraxError(f"decimal must be '.' or ',', not {self.decimal!r}.")
        if self.decimal == self.separator:
            raise FedraxError("a decimal comma needs another separator than a comma: set separator, to ';' perhaps.")


def read_csv(path: Path, form: CsvForm = CsvForm(), texts: Sequence[str] = ()) -> pl.DataFrame:
    """The table in a CSV file with a header of different names; FedraxError if it is not one.

    Columns in ``texts`` stay texts, whatever they hold; rows that hold nothing are left out, and so are blanks around
    names and texts. A path is a file and never a pattern. A compressed file is refused: it may grow to any size.
    """
    import polars as pl

    header = _header(path, form)
    with _reading_csv(path):
        kinds = {name: pl.String for name in header if name.strip() in texts}
        table = pl.read_csv(path, infer_schema_length=None, schema_overrides=kinds, **_options(form))
    table.columns = [name.strip() for name in table.columns]
    # a cell of quotes alone, as programs write them that quote everything, is as empty as one of nothing
    written = pl.col(pl.String).str.strip_chars()
    empty = written.is_in(["", *map(str.strip, form.missing_as)])
    table = table.with_columns(pl.when(empty).then(None).otherwise(written).name.keep())
    of_texts = [c for c in table.select(pl.col(pl.String)).iter_columns() if c.name not in texts]
    table = table.with_columns(as_numbers(column, form.decimal) for column in of_texts)
    long = next((column.name for column in table.iter_columns() if column.name not in texts and _is_long(column)), None)
    if long is not None:
        raise FedraxError(f"{path}: column {long!r} holds {_TOO_LONG}.")
    return table.filter(~pl.all_horizontal(pl.all().is_null())) if table.width > 1 else table


def as_numbers(column: pl.Series, decimal: str = ".") -> pl.Series:
    """A column of texts all of which are numbers as whole numbers or floats; any other as it is.

    So are whole numbers beyond 64 bits, which floats do not tell apart.
    """
    import polars as pl

    written = plain(column, decimal)
    for kind in (pl.Int64, pl.Float64):
        made = written.cast(kind, strict=False)
        if made.null_count() == column.null_count() < len(column):
            return column if kind == pl.Float64 and _is_long(column) else made
    return column


def plain(column: pl.Series, decimal: str) -> pl.Series:
    """Numbers among texts with a point before their fraction; nothing where one stands already and should not."""
    written = column.str.strip_chars()
    if decimal == ".":
        return written
    return written.set(written.str.contains(".", literal=True), None).str.replace(decimal, ".", literal=True)


def _is_long(column: pl.Series) -> bool:
    """Whether all are whole numbers, some of them beyond 64 bits."""
    import polars as pl

    if column.dtype != pl.String:
        return column.dtype.is_integer() and "128" in str(column.dtype)
    whole = column.str.contains(r"^\s*[-+]?\d+\s*$").all()
    return whole and column.null_count() < len(column)


def zero_padded(path: Path, names: Sequence[str], form: CsvForm = CsvForm()) -> list[str]:
    """Of these columns those where a whole number begins with a zero, as in 007: such are names of things."""
    import polars as pl

    known = [name for name in _header(path, form) if name.strip() in names]
    if not known:
        return []
    with _reading_csv(path):
        table = pl.read_csv(path, infer_schema=False, columns=known, **_options(form))
    return [name.strip() for name in known if table[name].str.contains(r"^\s*0\d+\s*$").any()]


def _options(form: CsvForm) -> dict[str, Any]:
    """For polars."""
    missing = list(form.missing_as) or None
    return {"glob": False, "separator": form.separator, "decimal_comma": form.decimal == ",", "null_values": missing}


@contextmanager
def _reading_csv(path: Path) -> Iterator[None]:
    """What polars finds wrong with a CSV file, without its advice on arguments that users of fedrax do not have."""
    import polars as pl

    try:
        yield
    except (OSError, ValueError, csv.Error, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        said = next((text for words, text in _KNOWN.items() if words in first.lower()), "{}").format(first)
        raise FedraxError(f"{path} cannot be read as a CSV table: {said}.") from error


_TOO_LONG = "whole numbers beyond 64 bits: write floats, or put a letter in front of names"
_KNOWN = {
    "as dtype `i128`": f"it holds {_TOO_LONG}",
    "utf-8": "it is no text in UTF-8: save it in this encoding",
    "more fields than": "a row has more cells than the header has names",
    "new-line character": "its lines end in carriage returns alone: save it with line feeds",
    "could not parse": "{}: perhaps a quotation mark is never closed",
    "malformed": "{}: perhaps a quotation mark is never closed",
}
"""What to say where polars or Python says these words, which take the place of the brackets."""


def _header(path: Path, form: CsvForm) -> list[str]:
    """The names of a CSV file's columns; FedraxError where they cannot be told apart."""
    with _reading_csv(path), reading(path, MAX_CSV) as file:
        first = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_PARQUET)))
        other = next((said for said, marks in _NO_TEXTS.items() if first.startswith(marks)), None)
        if first == _PARQUET == file.read():
            other = "a Parquet table: the data set huggingface reads it"
        if other is not None:
            raise FedraxError(f"{path} is {other}.")
        file.seek(0)
        line = file.readline(MAX_FILE).decode("utf-8-sig")
        header = next(csv.reader([line], delimiter=form.separator), [])
    if len(header) > MAX_COLUMNS:
        raise FedraxError(f"{path} has {len(header):,} columns, where at most {MAX_COLUMNS:,} are read.")
    other = next((mark for mark in ",;\t|" if mark != form.separator and mark in line), None)
    if len(header) == 1 and other is not None:
        raise FedraxError(
            f"{path} has one column {header[0]!r}: if {other!r} separates its columns, set separator to it."
        )
    twice = next((name for name, count in Counter(map(str.strip, header)).items() if count > 1), None)
    if twice is not None:
        raise FedraxError(f"{path} has two columns {twice!r}: its first line must give each a name of its own.")
    return header


_NO_TEXTS = {
    "compressed: unpack it first": (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x78\x01", b"\x78\x9c", b"\x78\xda"),
    "a ZIP archive or a spreadsheet: unpack it, or save it as CSV": (b"PK\x03\x04",),
    "taken for compressed, as it begins with x^: unpack it first, or give its first column another name": (b"x^",),
}
"""How other files begin: gzip, zstandard and zlib, which polars would unpack by itself, and ZIP."""
_PARQUET = b"PAR1"
"""How a Parquet table begins and ends."""


def read_columns(path: Path, what: str, columns: Sequence[str]) -> pl.DataFrame:
    """These columns of a CSV file; FedraxError if it is none or lacks one. ``what``: the file, in words."""
    wanted = f"{what} {path} is not a CSV with columns {', '.join(columns)}"
    try:
        table = read_csv(path)
    except FedraxError as error:
        raise FedraxError(f"{wanted}: {error}") from error
    if not set(columns) <= set(table.columns):
        raise FedraxError(wanted)
    return table.select(columns)


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file; FedraxError if it is not one."""
    try:
        with reading(path, MAX_FILE) as file:
            table = tomllib.loads(file.read().decode("utf-8-sig"))
    except RecursionError as error:
        raise FedraxError(f"{path} cannot be read as TOML: brackets in brackets, too deep.") from error
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as TOML: {error}.") from error
    if _is_deep(table):
        raise FedraxError(f"{path} cannot be read as TOML: tables in tables, too deep.")
    return table


def _is_deep(table: dict[str, Any]) -> bool:
    """Whether tables and lists go deeper than is read, level by level: recursion would end in an error itself."""
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        inner = [one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer)]
        level = [one for one in inner if isinstance(one, dict | list)]
    return bool(level)


def read_json(path: Path, of_object: Callable[[dict[str, Any]], Any] = lambda table: table) -> Any:
    """What a JSON file holds; FedraxError if it is none, holds a name twice in an object, or is too large.

    ``of_object`` makes something of every object as soon as it is read, the inner ones first: a reader that turns lists
    into arrays there never holds a whole file as Python objects.
    """

    def made(pairs: list[tuple[str, Any]]) -> Any:
        table = dict(pairs)
        if len(table) < len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise FedraxError(f"{path} holds {twice!r} twice in one object.")
        return of_object(table)

    def refuse(word: str) -> None:
        raise FedraxError(f"{path} holds {word}, which is no number of JSON.")

    try:
        with reading(path, MAX_JSON) as file:
            content = file.read()
        # every value but the outermost follows one of these
        values = content.count(b",") + 10 * (content.count(b"[") + content.count(b"{"))
        if values > MAX_VALUES:
            raise FedraxError(f"{path} holds more than the {MAX_VALUES:,} values that are read of one file: split it.")
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=made, parse_constant=refuse)
    except RecursionError as error:
        raise FedraxError(f"{path} cannot be read as JSON: brackets in brackets, too deep.") from error
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as JSON: {error}.") from error
