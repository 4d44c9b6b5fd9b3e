"""Memory available to the process, and arrays that are mapped from files instead of held in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def host_memory(own_groups: Path = _OWN_GROUPS, groups: Path = _GROUPS) -> int:
    """Memory limit of this process in bytes: that of the machine, or of its container or cluster job if lower."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_limits(own_groups, groups)])


def _limits(own_groups: Path, groups: Path) -> Iterator[int]:
    """Memory limits of the process's control groups (version 1 or 2) and of all their parents, in bytes."""
    try:
        lines = own_groups.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = PurePosixPath(path)
        for place in (group, *group.parents):  # inside a container only the outermost may exist
            with suppress(OSError, ValueError):  # the root has no file, and "max" means no limit
                yield int((root / place.relative_to("/") / name).read_text())


def is_memory_mapped(array: np.ndarray) -> bool:
    """Whether an array, or the one that it is a view of, is mapped from a file."""
    return isinstance(_memory_map(array)[0], mmap.mmap)


def release_pages(array: np.ndarray) -> None:
    """Drop the pages of a memory-mapped array from this process; they stay in the page cache."""
    base, mode = _memory_map(array)
    if isinstance(base, mmap.mmap) and mode in ("r", "r+", "w+"):  # a copy-on-write mapping would lose its changes
        base.madvise(mmap.MADV_DONTNEED)


def _memory_map(array: np.ndarray) -> tuple[object, str | None]:
    """What holds the memory of an array, and the mode if that is a mapped file."""
    mode, base = None, array
    while isinstance(base, np.ndarray):
        mode = base.mode if isinstance(base, np.memmap) else mode
        base = base.base
    return base, mode
