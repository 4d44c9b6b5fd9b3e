"""Raw results: one JSON line for each run, after a header line with the date and the machine."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import machine

RESULTS = Path(__file__).parent / "results"


@dataclass
class Session:
    """One command's lines in ``path``; ``header`` has ``id``, ``date``, ``machine`` and further facts."""

    path: Path
    header: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, path: Path, described: dict[str, Any] | None = None, **facts: Any) -> Session:
        """Write the header; measure the machine unless it is ``described``."""
        if described is None:
            print("measuring the machine", flush=True)
            described = machine.describe() | machine.measure()
        header = {
            "kind": "session",
            "id": uuid.uuid4().hex[:8],
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": described,
        }
        session = cls(path, header | facts)
        session._append(session.header)
        return session

    @classmethod
    def all(cls, path: Path) -> list[Session]:
        """The sessions of a results file, in the order of their start."""
        records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        found = {record["id"]: cls(path, record) for record in records if record["kind"] == "session"}
        for record in records:
            if record["kind"] == "run" and record["session"] in found:
                found[record["session"]].runs.append(record)
        return list(found.values())

    @classmethod
    def latest(cls, path: Path) -> Session:
        """The last session of a results file; exits if there is none."""
        found = cls.all(path)
        if not found:
            sys.exit(f"error: {path} holds no session yet")
        return found[-1]

    def add(self, run: dict[str, Any]) -> None:
        """Append a run's record and flush it to disk."""
        record = {"kind": "run", "session": self.header["id"], **run}
        self._append(record)
        self.runs.append(record)

    def machine_text(self) -> str:
        """A sentence on the machine and one on its speed."""
        m = self.header["machine"]
        return (
            f"Machine: {m['cpu']}, {m['cores']} cores, {m['memory_gib']:.0f} GiB, {m['system']}, "
            f"Python {m['python']}. Measured in the same command: float32 matrix product "
            f"{m['gemm_gflops_1_thread']:.0f} GFLOP/s on one thread, {m['gemm_gflops_all_cores']:.0f} on all "
            f"cores; copy (read and write) {m['copy_gb_per_second_1_thread']:.0f} and "
            f"{m['copy_gb_per_second_all_cores']:.0f} GB/s."
        )

    def _append(self, record: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
