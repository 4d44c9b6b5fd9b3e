"""Files written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedrax.errors import FedraxError


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
