"""The GPU benchmark, run on a CPU with fedrax alone, and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import WHOLE, conclude
from benchmarks.sessions import Session

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_gpu_benchmark_writes_its_page_and_resumes(tmp_path: Path):
    """The second call with --resume measures nothing."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--workloads", "W10", "--peers", "fedrax"]
    command += ["--repeats", "1", "--max-wait", "0", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    for more in ([], ["--resume"]):
        completed = subprocess.run([*command, *more], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        runs = Session.latest(tmp_path / "gpu.jsonl").runs
        assert [run["setting"] for run in runs] == ["nothing compiled before", "compiled before"]
    assert "| fedrax, compiled before |" in (tmp_path / "gpu.md").read_text()


def test_ratios_are_relative_to_the_best_peer_and_exclude_whole_runs(tmp_path: Path):
    machine = {"date": "2026-01-01", "gpu": "a card", "cpu": "a processor", "cores": 4, "python": "3.12"}
    header = {"id": "1", "machine": machine, "packages": [], "workloads": {"W11": {"flop": 1e12, "steps": 250}}}
    session = Session(tmp_path / "gpu.jsonl", header)
    measured = [("fedrax", "compiled before", 0.02, 0.1), ("PyTorch loop", "float32", 0.4, 0.1001)]
    measured += [("FedJAX", "jit", 0.2, 0.1), ("fedrax", WHOLE, 0.03, 0.9)]
    for simulator, setting, seconds, loss in measured:
        run = {"workload": "W11", "simulator": simulator, "setting": setting, "repeat": 1, "round_median": seconds}
        run |= {"first_round": 1.0, "first_round_with_import": 45.0, "peak_pss_mb": 1.0, "foreign_cpu": 0.0}
        session.add(run | {"test_loss": loss, "test_accuracy": 0.5, "device_peak_mb": 1234.0})
    assert conclude(session, tmp_path) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "20 (10.00×)" in page and "400 (0.50×)" in page and "take fedrax 45.0 s" in page and "1,234" in page
    session.runs[0]["test_loss"] = 0.2
    assert conclude(session, tmp_path) == 1
