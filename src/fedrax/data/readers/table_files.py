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
"""Limits: bytes of a CSV file, bytes of its header, and columns."""


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Convert errors of polars about a Parquet file to FedraxErrors.

    Offsets outside of the file make polars panic: its threads then write to standard error, which is suppressed, and
    the exception in Python is not an ``Exception``.
    """
    import polars as pl

    _check_path_encoding(path)
    error_output, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = str(error).splitlines()[0] if isinstance(error, Exception) else "it is damaged"
        raise FedraxError(f"{path} cannot be read as a Parquet table: {reason}.") from error
    finally:
        os.dup2(error_output, 2)
        os.close(error_output)
        os.close(nowhere)


def _check_path_encoding(path: Path) -> None:
    """Raise FedraxError for a file name that is not valid UTF-8, which polars cannot open."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        name = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise FedraxError(f"the name of {name} is not valid UTF-8: rename the file") from None


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
        """The numbers in ``missing_as``: -99 also means -99.0."""
        found = []
        for text in self.missing_as:
            with suppress(ValueError):
                found.append(float(text.strip().replace(self.decimal, ".")))
        return found


def read_csv(path: Path, form: CsvFormat = CsvFormat(), texts: Sequence[str] = ()) -> pl.DataFrame:
    """Read a CSV file with a header of distinct names.

    Columns in ``texts`` are read as text. Empty rows, and blanks around names and texts, are removed. Patterns are not
    expanded. Compressed files raise FedraxError, because they may grow to any size.
    """
    import polars as pl

    header = _header(path, form)
    with _csv_errors(path, form.separator):
        kinds = {name: pl.String for name in header if name.strip() in texts}
        table = _read_inferred(path, kinds, form)
    table.columns = [name.strip() for name in table.columns]
    # programs that quote every cell write "" for an empty one
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
    """The table with inferred types, or of texts only where polars before 2 fails on integers beyond 64 bits."""
    import polars as pl

    try:
        return pl.read_csv(path, infer_schema_length=None, schema_overrides=kinds, **_polars_options(form))
    except pl.exceptions.ComputeError as error:
        if not _INT64_OVERFLOW.search(str(error)):
            raise
        return pl.read_csv(path, infer_schema=False, **_polars_options(form))


_INT64_OVERFLOW = re.compile(r"could not parse `[-+]?\d{19,}` as dtype `i64`")


def cast_numeric(column: pl.Series, decimal: str = ".") -> pl.Series:
    """Convert a text column to integers or floats if all of its values are numbers; otherwise return it unchanged.

    Integers beyond 64 bits stay texts, because floats do not distinguish them.
    """
    import polars as pl

    written = normalize_decimal(column, decimal)
    for kind in (pl.Int64, pl.Float64):
        made = written.cast(kind, strict=False)
        if made.null_count() == column.null_count() < len(column):
            return column if kind == pl.Float64 and _exceeds_int64(column) else made
    return column


def nullify_numbers(column: pl.Series, numbers: Sequence[float]) -> pl.Series:
    """A numeric column with these numbers replaced by null; other columns unchanged."""
    if column.dtype.is_integer():
        numbers = [int(number) for number in numbers if number.is_integer()]
    return column.set(column.is_in(numbers), None) if numbers and column.dtype.is_numeric() else column


def normalize_decimal(column: pl.Series, decimal: str) -> pl.Series:
    """Texts with ``decimal`` replaced by a point; null for texts with a point where ``decimal`` is a comma."""
    written = column.str.strip_chars()
    if decimal == ".":
        return written
    return written.set(written.str.contains(".", literal=True), None).str.replace(decimal, ".", literal=True)


def _exceeds_int64(column: pl.Series) -> bool:
    """Whether all values are integers and some exceed 64 bits."""
    import polars as pl

    if column.dtype != pl.String:
        return column.dtype.is_integer() and "128" in str(column.dtype)
    whole = column.str.contains(r"^\s*[-+]?\d+\s*$").all()
    return whole and column.null_count() < len(column)


def zero_padded_columns(path: Path, names: Sequence[str], form: CsvFormat = CsvFormat()) -> list[str]:
    """Those of ``names`` with integers that begin with zero, as in 007, which are names."""
    import polars as pl

    known = [name for name in _header(path, form) if name.strip() in names]
    if not known:
        return []
    with _csv_errors(path, form.separator):
        table = pl.read_csv(path, infer_schema=False, columns=known, **_polars_options(form))
    return [name.strip() for name in known if table[name].str.contains(r"^\s*0\d+\s*$").any()]


def _polars_options(form: CsvFormat) -> dict[str, Any]:
    """The arguments of polars' reader."""
    missing = list(form.missing_as) or None
    return {"glob": False, "separator": form.separator, "decimal_comma": form.decimal == ",", "null_values": missing}


@contextmanager
def _csv_errors(path: Path, separator: str) -> Iterator[None]:
    """Convert errors about a CSV file to FedraxErrors, without polars' advice on its own arguments."""
    import polars as pl

    _check_path_encoding(path)
    try:
        yield
    except (OSError, ValueError, csv.Error, pl.exceptions.PolarsError) as error:
        first = (str(error).splitlines() or [""])[0].rstrip(".")
        reason = next((text for words, text in _EXPLANATIONS.items() if words in first.lower()), "{}")
        line = _damaged_line(path, separator) if "{line}" in reason else None
        reason = reason.format(first, line=line)
        raise FedraxError(f"{path} cannot be read as a CSV table: {reason}.") from error


_BEYOND_INT64 = "integers beyond 64 bits: write floats, or put a letter in front of IDs"
_EXPLANATIONS = {
    "as dtype `i128`": f"it holds {_BEYOND_INT64}",
    "utf-8": "it is not valid UTF-8: save it in this encoding",
    "more fields than": "line {line} has more cells than the header has names",
    "new-line character": "its lines end in carriage returns alone: save it with line feeds",
    "could not parse": "{}: perhaps the quotation mark in line {line} is never closed",
    "malformed": "{}: perhaps the quotation mark in line {line} is never closed",
}
"""For words in an error message of polars or Python, the explanation to print; {} is the original message."""


def _damaged_line(path: Path, separator: str) -> int:
    """The number of the first line, from 1, that starts a row of too many cells or an unclosed quotation."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(file, delimiter=separator, strict=True)
        names, line = len(next(rows, [])), rows.line_num
        with suppress(csv.Error):
            for row in rows:
                if len(row) > names:
                    break
                line = rows.line_num
    return line + 1


def _header(path: Path, form: CsvFormat) -> list[str]:
    """The column names of a CSV file; FedraxError for duplicates and for files of other formats."""
    with _csv_errors(path, form.separator), open_regular_file(path, MAX_CSV) as file:
        first = file.read(4)
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_PARQUET_MAGIC)))
        other = next((kind for kind, marks in _FOREIGN_FORMATS.items() if first.startswith(marks)), None)
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
"""First bytes of other formats: gzip, zstandard and zlib, which polars would decompress, and ZIP."""
_PARQUET_MAGIC = b"PAR1"
"""First and last bytes of a Parquet file."""


def read_csv_columns(path: Path, what: str, columns: Sequence[str]) -> pl.DataFrame:
    """Read some columns of a CSV file; FedraxError if one is missing. ``what``: the file in messages."""
    wanted = f"{what} {path} is not a CSV with columns {', '.join(columns)}"
    try:
        table = read_csv(path)
    except FedraxError as error:
        raise FedraxError(f"{wanted}: {error}") from error
    if not set(columns) <= set(table.columns):
        raise FedraxError(wanted)
    return table.select(columns)
