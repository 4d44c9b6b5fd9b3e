"""Calls a function before, during and after every change of a folder on disk."""

from __future__ import annotations

import builtins
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

EXPERIMENT = """
name = "killed"
data = "synthetic"
partition = "natural"
model = "logistic"
algorithm = { name = "scaffold", local = { lr = 0.1, steps = 2, batch_size = 4 } }
[run]
rounds = 4
cohort_size = 3
eval_every = 2
checkpoint_every = 1
"""
COMPARISON = (
    EXPERIMENT.replace("rounds = 4", "rounds = 2")
    + """
[[compare]]
label = "fedavg"
name = "fedavg"
grid = { "algorithm.local.lr" = [0.05, 0.1] }
[[compare]]
label = "scaffold"
name = "scaffold"
"""
)
CALLS = ("link", "mkdir", "replace", "rename", "unlink", "fsync", "open", "rmdir")
"""Functions of ``os`` that change a folder or synchronize it."""


@contextmanager
def at_every_write(act: Callable[[], None]) -> Iterator[None]:
    """Call ``act()`` before and after each such call, and in the middle of each write to a file."""
    originals: dict[str, Any] = {name: getattr(os, name) for name in CALLS}
    open_file = builtins.open

    def around(call: Any) -> Any:
        def called(*arguments: Any, **options: Any) -> Any:
            if call is originals["open"] and not (len(arguments) > 1 and arguments[1] & (os.O_WRONLY | os.O_RDWR)):
                return call(*arguments, **options)
            act()
            result = call(*arguments, **options)
            act()
            return result

        return called

    class HalfWrite(io.FileIO):
        """A file that calls ``act()`` after half of each write."""

        def write(self, data: Any, /) -> int:
            view = memoryview(data).cast("B")
            half = super().write(view[: len(view) // 2]) or 0
            act()
            return half + (super().write(view[half:]) or 0)

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not set(mode) & set("wax") or isinstance(file, int):
            return open_file(file, mode, *arguments, **options)
        buffered = io.BufferedWriter(HalfWrite(file, mode.strip("bt"), opener=options.get("opener")))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding=options.get("encoding"))

    for name, call in originals.items():
        setattr(os, name, around(call))
    builtins.open = opened
    try:
        yield
    finally:
        for name, call in originals.items():
            setattr(os, name, call)
        builtins.open = open_file


def continuing_command(folder: Path, experiment: Path) -> list[str]:
    """The command after a kill: resume a run that has begun, otherwise run it again; repeat a comparison."""
    if experiment.read_text() == COMPARISON:
        return ["compare", str(experiment), "--seeds", "0", "--out", str(folder), "--quiet"]
    begun = (folder / "experiment.toml").exists()
    return ["resume", str(folder), "--quiet"] if begun else ["run", str(experiment), "--out", str(folder), "--quiet"]


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that must be bitwise equal: file names, events without durations, and digests of the states."""
    found: dict[str, Any] = {"files": sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))}
    for path in sorted(folder.rglob("events.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found[str(path.relative_to(folder))] = [
            {name: value for name, value in event.items() if not name.startswith("seconds")} for event in events
        ]
    for path in sorted(folder.rglob("state.npz")):
        with zipfile.ZipFile(path) as file, file.open("meta.npy") as member:
            described = json.loads(np.lib.format.read_array(member).tobytes().decode())
        found[str(path.relative_to(folder))] = described["digests"]
    return found
