"""Bitwise repeatability of runs: the benchmark on a CPU, and its page for runs that differ."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.repeats import FLAG, sections
from benchmarks.sessions import Session

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_runs_on_a_cpu_are_bitwise_repeatable(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.repeats", "--device", "cpu", "--cases", "W1-Scaffold"]
    command += ["--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    completed = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    (run,) = Session.latest(tmp_path / "repeats.jsonl").runs
    assert run["again"] == run["resumed"] == 0 and len(set(run["digests"])) == 1 and run["moved"] > 0
    assert "| W1, Scaffold | as installed | equal | equal | equal |" in (tmp_path / "repeats.md").read_text()


def test_page_contains_the_distance_of_runs(tmp_path: Path):
    machine = {"gpu": "a card", "cpu": "a processor", "cores": 4}
    run = {"workload": "W5", "method": "GradMA", "flags": FLAG, "again": 1.4e-7, "resumed": 0.0, "digests": ["a", "b"]}
    header = {"id": "1", "date": "2026-01-01", "machine": machine, "jax": "0"}
    page = "\n".join(sections(Session(tmp_path / "none", header, [run])))
    assert f"| W5, GradMA | `{FLAG}` | 1.4e-07 | equal | not equal |" in page
