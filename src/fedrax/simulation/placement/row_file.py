"""Out-of-core array: client states of a run that exceed memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedrax.errors import FedraxError

_PIECE_BYTES = 8 << 20


class RowFile:
    """An array [rows, ...] in an unnamed temporary file, whose rows are ``initial`` until they are written.

    The file is sparse and is removed with the process, the last reference or ``close()``. It is read and written by
    system calls: a full disk raises an error, where a write to a memory map would kill the process, and its pages do
    not count as memory of the process.
    """

    def __init__(self, directory: Path | None, rows: int, initial: np.ndarray):
        self.shape, self.dtype, self.initial = (rows, *initial.shape), initial.dtype, initial
        self.written = np.zeros(rows, bool)
        self.directory = Path(tempfile.gettempdir()) if directory is None else directory
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.directory, buffering=0)  # noqa: SIM115 - open while it is used
        except OSError as error:
            raise self._failure(error) from error
        self.close = weakref.finalize(self, self._file.close)

    def _failure(self, error: OSError) -> FedraxError:
        return FedraxError(f"cannot keep client states on disk in {self.directory}: {error.strerror or error}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        return self.read(np.array([range(len(self))[row]]))[0]

    def read(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Read rows by number [n], into ``out`` [n, ...] if given."""
        out = np.empty((len(rows), *self.shape[1:]), self.dtype) if out is None else out
        there = self.written[rows]
        out[~there] = self.initial
        self._transfer(os.preadv, rows, out, np.flatnonzero(there))
        return out

    def write(self, rows: np.ndarray, values: np.ndarray) -> None:
        """Write ``values`` [n, ...] to rows by number [n]."""
        self._transfer(os.pwritev, rows, values, np.arange(len(rows)))
        self.written[rows] = True

    def pieces(self, max_bytes: int = _PIECE_BYTES) -> Iterator[np.ndarray]:
        """All rows in order, in chunks."""
        step = max(1, max_bytes // max(1, self.initial.nbytes))
        for first in range(0, len(self), step):
            yield self.read(np.arange(first, min(first + step, len(self))))

    def _transfer(self, call: Any, rows: np.ndarray, values: np.ndarray, at: np.ndarray) -> None:
        """Transfer ``values[at]`` from or to ``rows[at]``, neighbors together."""
        if not (len(at) and self.initial.nbytes):
            return
        gaps = np.flatnonzero((np.diff(at) != 1) | (np.diff(rows[at]) != 1)) + 1
        for first, last in zip(at[np.r_[0, gaps]].tolist(), at[np.r_[gaps - 1, len(at) - 1]].tolist(), strict=True):
            rest = memoryview(values[first : last + 1].reshape(-1).view(np.uint8))  # pyright: ignore[reportArgumentType]
            place = int(rows[first]) * self.initial.nbytes
            while rest:
                try:
                    done = call(self._file.fileno(), [rest], place)
                except OSError as error:
                    raise self._failure(error) from error
                if not done:
                    raise FedraxError(f"client states on disk in {self.directory} are lost: a file was truncated")
                rest, place = rest[done:], place + done
