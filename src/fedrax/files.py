"""Files written whole or not at all, and TOML and JSON from outside, read within bounds."""

from __future__ import annotations

import io
import json
import os
import stat
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from fedrax.errors import FedraxError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_FILE = 1 << 20
"""Bytes of an experiment file, and of others that a run or a comparison keeps."""
MAX_DEPTH = 100
"""Tables and lists in one another in an experiment file."""
MAX_JSON, MAX_VALUES = 1 << 30, 100_000_000
"""Bytes and values of a JSON file; a list or an object counts as ten, for it takes as much memory."""


def cache_directory() -> Path:
    """Where fedrax keeps what it can make again: $FEDRAX_CACHE, else ~/.cache/fedrax.

    FedraxError where there is neither, as of a user of a container whom the system does not know.
    """
    if chosen := os.environ.get("FEDRAX_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "fedrax"
    except RuntimeError as error:
        raise FedraxError("this user has no home directory, where fedrax keeps its cache: set FEDRAX_CACHE") from error


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, whose folder is made, that takes the place of ``path`` once it is complete and on disk.

    On any error the old file stays and nothing of the new one does; FedraxError where it cannot be written, and where
    another process has begun to write it meanwhile. All of it happens in the one folder that was opened first, whatever
    is put in the folder's place meanwhile.
    """
    part = f".{path.name}.part"
    try:
        if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
            raise FedraxError(f"cannot write {path}: it is a device, whose place a file would take")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)  # what a killed process left, or a link that somebody planted
            with open(part, "xb", opener=partial(_no_links, folder=folder)) as file:
                try:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                    if not _is_there(file, part, folder):
                        raise FedraxError(f"cannot write {path}: another process writes it, too")
                    os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                    with suppress(OSError):  # some file systems cannot, and the file is in its place
                        os.fsync(folder)
                except BaseException:
                    if _is_there(file, part, folder):
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


def _is_there(file: BinaryIO, name: str, folder: int) -> bool:
    """Whether ``name`` in the folder is this open file, and not one of a process that writes the same."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError:
        return False


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
    """The absolute path that ``name`` means in ``folder``, which a file can hold.

    FedraxError for the home of somebody who is not there, and for names that are no text.
    """
    try:
        path = (folder / Path(name).expanduser()).resolve()
        str(path).encode()
    except UnicodeEncodeError as error:
        raise FedraxError(
            f"{path} is no text in UTF-8, as files hold it: rename it, or the folder it is in."
        ) from error
    except (RuntimeError, ValueError, OSError) as error:
        raise FedraxError(f"{name!r} is no path: {error}.") from error
    return path


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
    try:
        content = text.encode()
    except UnicodeEncodeError as error:  # a name that was typed, or a file's, in another encoding
        raise FedraxError(f"cannot write {path}: {text.split(chr(10))[0]!r:.80} is no text in UTF-8") from error
    write_bytes(path, content)


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
    if kind == "png" and not any(axes.images for axes in figure.axes):  # images have more colors than lines
        drawn, content = Image.open(content).convert("RGB"), io.BytesIO()
        drawn.quantize(256, dither=Image.Dither.NONE).save(content, kind, optimize=True)  # a third of the bytes
    write_bytes(path, content.getvalue())
    return path


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


def flatten(table: Mapping[str, Any], keep_empty: bool = False, prefix: str = "") -> dict[str, Any]:
    """A nested table with dotted keys. keep_empty: whether empty tables are values; otherwise they are left out."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping) and (value or not keep_empty)
        flat |= flatten(value, keep_empty, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


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
