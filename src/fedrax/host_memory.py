"""Memory available to the process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

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
