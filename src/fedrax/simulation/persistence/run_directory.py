"""The one place where a run's directory is opened: made, locked against other runs, refused or gone on with."""

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


class RunDirectory:
    """A directory that one run writes and no other. Made by :func:`owned`."""

    def __init__(self, path: Path, descriptor: int):
        self.path, self._descriptor = path, descriptor

    def check_present(self) -> None:
        """FedraxError where the directory was removed, or another put in its place, since the run began."""
        try:
            same = os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except OSError:
            same = False
        if not same:
            raise FedraxError(f"{self.path} was removed during the run: nothing more can be kept there")


@contextmanager
def owned(path: Path, resume: bool) -> Iterator[RunDirectory]:
    """The directory, made if need be, as this run's own until it ends; in the end of a process the lock ends, too.

    Raises FedraxError where another run is writing there, where it holds a run and ``resume`` does not say to go on
    with it, and where something else stands in the way.
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
                raise FedraxError(f"{path / name} is a link, which no run makes: remove it")
        if not resume and ((path / events.FILE).exists() or checkpoint.exists(path / CHECKPOINT)):
            raise FedraxError(f"{path} holds a run already: choose another directory, or go on with it (resume)")
        yield RunDirectory(path, descriptor)


def _locked(path: Path, descriptor: int) -> bool:
    """Whether what is open is locked now; FedraxError where another run has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FedraxError(f"another run is writing to {path}: wait for it, or choose another place") from error
    except OSError:
        return False
    return True
