"""Atomic writes, and reading of untrusted TOML and JSON files with size limits."""

from __future__ import annotations

import io
import json
import os
import shutil
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
"""Most bytes of an experiment file, and of the small files in a run or comparison directory."""
MAX_DEPTH = 100
"""Deepest nesting of tables and lists in an experiment file."""
MAX_JSON, MAX_VALUES = 1 << 30, 100_000_000
"""Most bytes and values of a JSON file; a list or object counts as ten values, because it takes as much memory."""


def cache_directory() -> Path:
    """The cache directory: $FEDRAX_CACHE, or else ~/.cache/fedrax.

    Raises:
        FedraxError: FEDRAX_CACHE is not set and the user has no home directory, as in some containers.
    """
    if chosen := os.environ.get("FEDRAX_CACHE"):
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "fedrax"
    except RuntimeError as error:
        raise FedraxError("this user has no home directory for the cache: set FEDRAX_CACHE") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A new file that atomically replaces ``path`` when it is complete and on disk; parent folders are created.

    On any error the old file is unchanged and the new one is removed. All operations are relative to the descriptor of
    the folder, so that replacing the folder in the meantime cannot redirect them.

    Raises:
        FedraxError: The file cannot be written, or another process writes the same file.
    """
    part = f".{path.name}.part"
    try:
        if not path.is_symlink() and (path.is_char_device() or path.is_block_device()):
            raise FedraxError(f"cannot write {path}: it is a device: choose another path")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _open_folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)  # left by a killed process, or a planted link
            with open(part, "xb", opener=partial(_open_without_links, folder=folder)) as file:
                try:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                    if not _is_same_file(file, part, folder):
                        raise FedraxError(f"cannot write {path}: another process is writing it")
                    os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
                    with suppress(OSError):  # some file systems do not support it, and the file is complete
                        os.fsync(folder)
                except BaseException:
                    if _is_same_file(file, part, folder):
                        with suppress(OSError):
                            os.unlink(part, dir_fd=folder)
                    raise
    except OSError as error:
        raise FedraxError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    """A file descriptor of the folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _is_same_file(file: BinaryIO, name: str, folder: int) -> bool:
    """Whether ``name`` in the folder is this open file, and not that of another process."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(name, dir_fd=folder, follow_symlinks=False))
    except OSError:
        return False


def _open_without_links(path: str, flags: int, folder: int | None = None) -> int:
    """An opener that does not follow a link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)


@contextmanager
def open_regular_file(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file of at most ``limit`` bytes for reading; later read errors raise OSError.

    Raises:
        FedraxError: The file does not exist, cannot be opened or is too large, or it is a pipe or device, which may be
            infinite.
    """
    try:
        file = open(path, "rb", opener=_open_nonblocking)  # noqa: SIM115 - closed below
    except FileNotFoundError as error:
        raise FedraxError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:
        raise FedraxError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FedraxError(f"{path} cannot be read: it is not a regular file.")
        if limit is not None and status.st_size > limit:
            raise FedraxError(f"{path} is too large: {status.st_size:,} bytes, where at most {limit:,} are read.")
        yield file


def _open_nonblocking(path: str, flags: int) -> int:
    """An opener that does not block on a pipe without writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def decompressed_limit(stored: int) -> int:
    """Most bytes to decompress from ``stored`` bytes: 64 times as many, but at least 256 MiB."""
    return max(256 << 20, 64 * stored)


def open_to_append(path: Path) -> TextIO:
    """Open a text file for appending; OSError if it is a link."""
    return open(path, "a", encoding="utf-8", opener=_open_without_links)


def resolve_path(folder: Path, name: str) -> Path:
    """The absolute path of ``name`` relative to ``folder``, with ``~`` expanded.

    Raises:
        FedraxError: The path cannot be encoded as UTF-8, which TOML files need, or it names the home directory of an
            unknown user.
    """
    try:
        path = (folder / Path(name).expanduser()).resolve()
        str(path).encode()
    except UnicodeEncodeError as error:
        raise FedraxError(f"{path} cannot be encoded as UTF-8: rename it, or the folder it is in.") from error
    except (RuntimeError, ValueError, OSError) as error:
        raise FedraxError(f"{name!r} is not a valid path: {error}.") from error
    return path


def join_without_links(folder: Path, relative: Path) -> Path:
    """``folder / relative``; FedraxError if a component is a link, which may lead out of the folder."""
    path = folder
    for part in relative.parts:
        path = path / part
        if path.is_symlink():
            raise FedraxError(f"{path} is a link, which runs do not create: remove it")
    return path


@contextmanager
def new_directory(path: Path, remedy: str) -> Iterator[None]:
    """A new or empty directory to write files into; on any error what was written is removed again.

    Raises:
        FedraxError: The path is a file or a directory with files; the message ends with ``remedy``.
    """
    existed = os.path.lexists(path)
    if existed and (not path.is_dir() or any(path.iterdir())):
        raise FedraxError(f"{path} exists{' and is not empty' if path.is_dir() else ''}: {remedy}")
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for item in path.iterdir():
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
            if not existed:
                path.rmdir()
        raise


def write_text(path: Path, text: str) -> None:
    """Atomically write ``text`` to ``path`` as UTF-8; FedraxError if that fails."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:  # a typed name or a file name in another encoding
        raise FedraxError(f"cannot write {path}: {text.split(chr(10))[0]!r:.80} cannot be encoded as UTF-8") from error
    write_bytes(path, content)


def write_bytes(path: Path, content: bytes) -> None:
    """Atomically write bytes; see :func:`write_text`."""
    with atomic_write(path) as file:
        file.write(content)


def write_figure(path: Path, figure: Figure) -> Path:
    """Atomically write a figure as PNG or SVG, by the suffix of ``path``; equal figures give equal files."""
    import matplotlib as mpl  # imported here, because it is slow
    from PIL import Image

    kind, content = path.suffix.removeprefix("."), io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "fedrax"}):
        figure.savefig(content, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {})
    if kind == "png" and not any(axes.images for axes in figure.axes):  # figures with images have more colors
        image, content = Image.open(content).convert("RGB"), io.BytesIO()
        image.quantize(256, dither=Image.Dither.NONE).save(content, kind, optimize=True)  # a third of the bytes
    write_bytes(path, content.getvalue())
    return path


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file; FedraxError if it is invalid."""
    try:
        with open_regular_file(path, MAX_FILE) as file:
            table = tomllib.loads(file.read().decode("utf-8-sig"))
    except RecursionError as error:
        raise FedraxError(f"{path} cannot be read as TOML: it is nested too deeply.") from error
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as TOML: {error}.") from error
    if _is_deep(table):
        raise FedraxError(f"{path} cannot be read as TOML: it is nested too deeply.")
    return table


def flatten(table: Mapping[str, Any], keep_empty: bool = False, prefix: str = "") -> dict[str, Any]:
    """A nested table with dotted keys. keep_empty: whether empty tables are values; otherwise they are left out."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping) and (value or not keep_empty)
        flat |= flatten(value, keep_empty, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat


def _is_deep(table: dict[str, Any]) -> bool:
    """Whether tables and lists are nested deeper than MAX_DEPTH, without recursion, which would itself overflow."""
    level: list[Any] = [table]
    for _ in range(MAX_DEPTH):
        items = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in items if isinstance(item, dict | list)]
    return bool(level)


def read_json(path: Path, of_object: Callable[[dict[str, Any]], Any] = lambda table: table) -> Any:
    """The content of a JSON file.

    Args:
        path: The file.
        of_object: Converts every object as soon as it is parsed, inner objects first. A reader that converts lists into
            arrays there never has the complete file as Python objects in memory.

    Raises:
        FedraxError: The file is invalid or too large, or an object has duplicate names.
    """

    def convert(pairs: list[tuple[str, Any]]) -> Any:
        table = dict(pairs)
        if len(table) < len(pairs):
            duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise FedraxError(f"{path} has {duplicate!r} twice in one object.")
        return of_object(table)

    def reject_constant(constant: str) -> None:
        raise FedraxError(f"{path} holds {constant}, which is not a JSON number.")

    try:
        with open_regular_file(path, MAX_JSON) as file:
            content = file.read()
        # all values except the outermost follow one of these characters
        values = content.count(b",") + 10 * (content.count(b"[") + content.count(b"{"))
        if values > MAX_VALUES:
            raise FedraxError(f"{path} has more than {MAX_VALUES:,} values, the limit of one file: split it.")
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=convert, parse_constant=reject_constant)
    except RecursionError as error:
        raise FedraxError(f"{path} cannot be read as JSON: it is nested too deeply.") from error
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as JSON: {error}.") from error
