"""Run directories: created, locked against other runs, and checked for an earlier run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fedrax.errors import FedraxError
from fedrax.simulation.persistence import checkpoint
from fedrax.simulation.results import events

CHECKPOINT, FAILURE, LOCK = "checkpoint", "failure", ".lock"
MODEL = "model.safetensors"
"""The model of the last checkpoint, for `load_model`."""


class RunDirectory:
    """A directory that is locked for one run. Made by :func:`lock_directory`."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor

    def check_present(self) -> None:
        """Raise FedraxError where the directory has been removed or replaced since the run began."""
        try:
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise FedraxError(f"{self.path} was removed during the run: its checkpoints cannot be written")


@contextmanager
def lock_directory(path: Path, resume: bool) -> Iterator[RunDirectory]:
    """Lock a run directory until the context ends or the process dies; it is created where it is missing.

    Args:
        path: the directory.
        resume: allow a directory that holds a run already.

    Yields:
        The locked directory.

    Raises:
        FedraxError: where another run has the lock, where the directory holds a run and ``resume`` is False, and where
            it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (OSError, ValueError) as error:
        raise FedraxError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    with ExitStack() as at_end:
        at_end.callback(os.close, descriptor)
        if not _locked(path, descriptor):  # NFS locks nothing that is not open for writing, as no folder is
            with suppress(OSError):
                file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
                at_end.callback(os.close, file)
                _locked(path, file)
        for name in (CHECKPOINT, FAILURE):
            if (path / name).is_symlink():
                raise FedraxError(f"{path / name} is a symbolic link, which no run creates: remove it")
        if not resume and ((path / events.FILE).exists() or checkpoint.exists(path / CHECKPOINT)):
            raise FedraxError(f"{path} holds a run already: choose another directory, or resume that run")
        yield RunDirectory(path, descriptor)


def _locked(path: Path, descriptor: int) -> bool:
    """Lock an open file or folder; False where the file system has no locks.

    Raises FedraxError where another run has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FedraxError(f"another run is writing to {path}: wait for it, or choose another directory") from error

    except OSError:
        return False
    return True
