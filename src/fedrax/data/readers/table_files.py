"""Readers of untrusted CSV and Parquet tables by polars, with size limits and translated errors."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedrax.errors import FedraxError
from fedrax.files import open_regular_file

if TYPE_CHECKING:
    import polars as pl

MAX_CSV, MAX_HEADER, MAX_COLUMNS = 4 << 30, 1 << 20, 100_000
"""Bytes of a CSV file and of its header, and columns."""


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """FedraxError for what polars finds wrong with a Parquet file.

    Offsets that lie outside of the file make it panic: its threads write reports onto the error output, which are kept
    away, and what reaches Python is no ``Exception``.
    """
    import polars as pl

    _check_path_encoding(path)
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


def _check_path_encoding(path: Path) -> None:
    """Refuse a file whose name is no text: polars finds files by texts."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise FedraxError(f"the name of {name} is no text in UTF-8: give the file another") from None


@dataclass(frozen=True)
class CsvFormat:
    """The format of a CSV file: separator, decimal mark, and the texts that mean a missing value."""

    separator: str = ","
    decimal: str = "."
    missing_as: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.separator == r"\t":  # as typed in a shell and shown in messages
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) != 1 or not self.separator.isascii() or self.separator in '\r\n"':
            raise FedraxError(f"a separator is one character of ASCII, such as ';', not {self.separator!r}.")
        if self.decimal not in (".", ","):
            raise FedraxError(f"decimal must be '.' or ',', not {self.decimal!r}.")
        if self.decimal == self.separator:
            raise FedraxError("a decimal comma needs another separator than a comma: set separator, to ';' perhaps.")

    @property
    def missing_numbers(self) -> list[float]:
        """Those of ``missing_as`` that are numbers: -99 stands for -99.0, too."""
        found = []
        for text in self.missing_as:
            with suppress(ValueError):
                found.append(float(text.strip().replace(self.decimal, ".")))
        return found


def read_csv(path: Path, form: CsvFormat = CsvFormat(), texts: Sequence[str] = ()) -> pl.DataFrame:
    """The table in a CSV file with a header of different names; FedraxError if it is not one.

    Columns in ``texts`` stay texts, whatever they hold; rows that hold nothing are left out, and so are blanks around
    names and texts. A path is a file and never a pattern. A compressed file is refused: it may grow to any size.
    """
    import polars as pl

    header = _header(path, form)
    with _csv_errors(path):
        kinds = {name: pl.String for name in header if name.strip() in texts}
        table = _read_inferred(path, kinds, form)
    table.columns = [name.strip() for name in table.columns]
    # a cell of quotes alone, as programs write them that quote everything, is as empty as one of nothing
    written = pl.col(pl.String).str.strip_chars()
    empty = written.is_in(["", *map(str.strip, form.missing_as)])
    table = table.with_columns(pl.when(empty).then(None).otherwise(written).name.keep())
    of_texts = [c for c in table.select(pl.col(pl.String)).iter_columns() if c.name not in texts]
    table = table.with_columns(cast_numeric(column, form.decimal) for column in of_texts)
    long = next(
        (column.name for column in table.iter_columns() if column.name not in texts and _exceeds_int64(column)), None
    )
    if long is not None:
        raise FedraxError(f"{path}: column {long!r} holds {_BEYOND_INT64}.")
    table = table.with_columns(nullify_numbers(column, form.missing_numbers) for column in table.iter_columns())
    return table.filter(~pl.all_horizontal(pl.all().is_null())) if table.width > 1 else table


def _read_inferred(path: Path, kinds: Mapping[str, Any], form: CsvFormat) -> pl.DataFrame:
    """The table with the kinds that polars finds, or of texts where one before 2 gives up on a long whole number."""
    import polars as pl

    try:
        return pl.read_csv(path, infer_schema_length=None, schema_overrides=kinds, **_polars_options(form))
    except pl.exceptions.ComputeError as error:
        if not _INT64_OVERFLOW.search(str(error)):
            raise
        return pl.read_csv(path, infer_schema=False, **_polars_options(form))


_INT64_OVERFLOW = re.compile(r"could not parse `[-+]?\d{19,}` as dtype `i64`")


def cast_numeric(column: pl.Series, decimal: str = ".") -> pl.Series:
    """A column of texts all of which are numbers as whole numbers or floats; any other as it is.

    So are whole numbers beyond 64 bits, which floats do not tell apart.
    """
    import polars as pl

    written = normalize_decimal(column, decimal)
    for kind in (pl.Int64, pl.Float64):
        made = written.cast(kind, strict=False)
        if made.null_count() == column.null_count() < len(column):
            return column if kind == pl.Float64 and _exceeds_int64(column) else made
    return column


def nullify_numbers(column: pl.Series, numbers: Sequence[float]) -> pl.Series:
    """A column of numbers without these, any other as it is."""
    if column.dtype.is_integer():
        numbers = [int(number) for number in numbers if number.is_integer()]
    return column.set(column.is_in(numbers), None) if numbers and column.dtype.is_numeric() else column


def normalize_decimal(column: pl.Series, decimal: str) -> pl.Series:
    """Numbers among texts with a point before their fraction; nothing where one stands already and should not."""
    written = column.str.strip_chars()
    if decimal == ".":
        return written
    return written.set(written.str.contains(".", literal=True), None).str.replace(decimal, ".", literal=True)


def _exceeds_int64(column: pl.Series) -> bool:
    """Whether all are whole numbers, some of them beyond 64 bits."""
    import polars as pl

    if column.dtype != pl.String:
        return column.dtype.is_integer() and "128" in str(column.dtype)
    whole = column.str.contains(r"^\s*[-+]?\d+\s*$").all()
    return whole and column.null_count() < len(column)


def zero_padded_columns(path: Path, names: Sequence[str], form: CsvFormat = CsvFormat()) -> list[str]:
    """Of these columns those where a whole number begins with a zero, as in 007: such are names of things."""
    import polars as pl

    known = [name for name in _header(path, form) if name.strip() in names]
    if not known:
        return []
    with _csv_errors(path):
        table = pl.read_csv(path, infer_schema=False, columns=known, **_polars_options(form))
    return [name.strip() for name in known if table[name].str.contains(r"^\s*0\d+\s*$").any()]


def _polars_options(form: CsvFormat) -> dict[str, Any]:
    """For polars."""
    missing = list(form.missing_as) or None
    return {"glob": False, "separator": form.separator, "decimal_comma": form.decimal == ",", "null_values": missing}


@contextmanager
def _csv_errors(path: Path) -> Iterator[None]:
    """What polars finds wrong with a CSV file, without its advice on arguments that users of fedrax do not have."""
    import polars as pl

    _check_path_encoding(path)
    try:
        yield
    except (OSError, ValueError, csv.Error, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        said = next((text for words, text in _EXPLANATIONS.items() if words in first.lower()), "{}").format(first)
        raise FedraxError(f"{path} cannot be read as a CSV table: {said}.") from error


_BEYOND_INT64 = "whole numbers beyond 64 bits: write floats, or put a letter in front of names"
_EXPLANATIONS = {
    "as dtype `i128`": f"it holds {_BEYOND_INT64}",
    "utf-8": "it is no text in UTF-8: save it in this encoding",
    "more fields than": "a row has more cells than the header has names",
    "new-line character": "its lines end in carriage returns alone: save it with line feeds",
    "could not parse": "{}: perhaps a quotation mark is never closed",
    "malformed": "{}: perhaps a quotation mark is never closed",
}
"""What to say where polars or Python says these words, which take the place of the brackets."""


def _header(path: Path, form: CsvFormat) -> list[str]:
    """The names of a CSV file's columns; FedraxError where they cannot be told apart."""
    with _csv_errors(path), open_regular_file(path, MAX_CSV) as file:
        first = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_PARQUET_MAGIC)))
        other = next((said for said, marks in _FOREIGN_FORMATS.items() if first.startswith(marks)), None)
        if first == _PARQUET_MAGIC == file.read():
            other = "a Parquet table: the data set huggingface reads it"
        if other is not None:
            raise FedraxError(f"{path} is {other}.")
        file.seek(0)
        line = file.readline(MAX_HEADER).decode("utf-8-sig")
        second = file.readline(MAX_HEADER).decode(errors="replace")
        header = next(csv.reader([line], delimiter=form.separator), [])
    if len(header) > MAX_COLUMNS:
        raise FedraxError(f"{path} has {len(header):,} columns, where at most {MAX_COLUMNS:,} are read.")
    found = [mark for mark in ",;\t|" if mark != form.separator and mark in line.strip()]
    if len(header) == 1 and not found and form.separator in second:
        raise FedraxError(f"{path} begins with {header[0]!r} and not with the names of its columns: remove that line.")
    names, cells = (len(text.strip().split(" ")) for text in (line, second))
    found += [" "] if 1 < names <= cells <= names + 1 else []  # one more where rows have names
    if len(header) == 1 and found:
        raise FedraxError(
            f"{path} has one column {header[0]!r}: if {found[0]!r} separates its columns, set separator to it."
        )
    twice = next((name for name, count in Counter(map(str.strip, header)).items() if count > 1), None)
    if twice is not None:
        raise FedraxError(f"{path} has two columns {twice!r}: its first line must give each a name of its own.")
    return header


_FOREIGN_FORMATS = {
    "compressed: unpack it first": (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\x78\x01", b"\x78\x9c", b"\x78\xda"),
    "a ZIP archive or a spreadsheet: unpack it, or save it as CSV": (b"PK\x03\x04",),
    "taken for compressed, as it begins with x^: unpack it first, or give its first column another name": (b"x^",),
}
"""How other files begin: gzip, zstandard and zlib, which polars would unpack by itself, and ZIP."""
_PARQUET_MAGIC = b"PAR1"
"""How a Parquet table begins and ends."""


def read_csv_columns(path: Path, what: str, columns: Sequence[str]) -> pl.DataFrame:
    """These columns of a CSV file; FedraxError if it is none or lacks one. ``what``: the file, in words."""
    wanted = f"{what} {path} is not a CSV with columns {', '.join(columns)}"
    try:
        table = read_csv(path)
    except FedraxError as error:
        raise FedraxError(f"{wanted}: {error}") from error
    if not set(columns) <= set(table.columns):
        raise FedraxError(wanted)
    return table.select(columns)
