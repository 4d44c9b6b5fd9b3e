"""Files written whole or not at all, and tables read from TOML."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fedrax.errors import FedraxError

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
        with open(part, "wb") as file:
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


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` (its folder is made), whole or not at all; FedraxError if that fails."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As ``write_text``, for bytes."""
    with replacing(path) as file:
        file.write(content)


def read_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file; FedraxError if it is not one."""
    try:
        if path.stat().st_size > MAX_FILE:
            raise FedraxError(f"{path} is too large for an experiment file (limit: 1 MiB).")
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise FedraxError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise FedraxError(f"{path} cannot be read as TOML: {error}.") from error
