"""The GPU benchmark, run on a CPU with small networks, and its page."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import WHOLE, conclude
from benchmarks.make_arrays import ensure_arrays
from benchmarks.sessions import Session
from benchmarks.workloads import GPU_WORKLOADS, SMALL_WORKLOADS, Arrays, bytes_per_round

ROOT = Path(__file__).parents[2]


def run(out: Path, *options: str) -> list[dict]:
    """The runs that the command adds to ``out``; it must succeed, so all losses agree."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--repeats", "1", "--max-wait", "0"]
    command += ["--cache", str(out / "cache"), "--out", str(out), *options]
    environment = {name: value for name, value in os.environ.items() if name != "FEDRAX_DATA"}
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(command, cwd=ROOT, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Session.latest(out / "gpu.jsonl").runs


@pytest.mark.slow
def test_every_network_ends_at_the_loss_of_the_round_by_hand(tmp_path: Path):
    """All six with small layers, in fedrax in two precisions; G1 also all rounds of the benchmark (here 20)."""
    options = ("--peers", "fedrax", "JAX by hand", "--quick", "--small")
    assert len(run(tmp_path, *options)) == 6 * 3
    assert "## Share of the bound" in (tmp_path / "gpu.md").read_text()
    whole = ("--peers", "fedrax", "--workloads", "G1-small", "--rounds", "20")
    runs = run(tmp_path, *whole)
    assert [one["setting"] for one in runs][-1] == WHOLE and len(runs) == 5
    assert "All 20 rounds of G1-small (synthetic samples)" in (tmp_path / "gpu.md").read_text()
    assert run(tmp_path, *whole, "--resume") == runs


@pytest.mark.slow
def test_pytorchs_forms_end_at_the_same_loss(tmp_path: Path):
    pytest.importorskip("torch")
    runs = run(tmp_path, "--small", "--peers", "JAX by hand", "PyTorch loop", "PyTorch vmap", "--rounds", "0")
    assert len(runs) == 6 * 2 + 5 * 2


def test_the_least_traffic_of_a_round(tmp_path: Path):
    """Of the recurrent network: weights with one bias of a gate, four passes; activations and gradients, twice each."""
    workload = SMALL_WORKLOADS["G4-small"]
    arrays = Arrays(ensure_arrays(workload.name, tmp_path))
    weights = 90 * 8 + 4 * 16 * (8 + 16) + 4 * 16 * (16 + 16) + 2 * 4 * 16 + 16 * 90 + 90
    frozen, steps, samples = 2 * 4 * 16, 3 * 2, 3 * 4
    written = 6 * (8 + 2 * 6 * 16) + 90
    expected = 4 * (4 * weights * steps + 2 * frozen * steps / 3) + 4 * 4 * written * samples
    assert bytes_per_round(workload, arrays) == expected
    assert bytes_per_round(workload, arrays, 2) == expected - 2 * 4 * written * samples
    assert np.array_equal(arrays.initial["lstm.bias_hh_l0"], np.zeros(64))


def test_the_bound_of_pflresearchs_network_is_that_of_its_layers():
    """Three by three convolutions of 32 and 64 channels on 32x32 images, dense layers of 128 and 10."""
    workload = GPU_WORKLOADS["G1"]
    assert workload.macs == (30 * 30 * 32 * 27, 28 * 28 * 64 * 288, 14 * 14 * 64 * 128, 1280)
    assert workload.outputs == 30 * 30 * 32 + 28 * 28 * 64 + 128 + 10


def test_ratios_are_relative_to_the_best_peer_and_exclude_whole_runs(tmp_path: Path):
    machine = {"date": "2026-01-01", "gpu": "a card", "cpu": "a processor", "cores": 4, "python": "3.12"}
    facts = {"flop": 1e12, "steps": 250, "source": "cifar10", "bytes": 1e10, "bytes_bfloat16": 5e9}
    card = {"highest": {"gflops": 5e4}, "tensorfloat32": {"gflops": 4e5}, "bfloat16": {"gflops": 8e5}}
    header = {"id": "1", "machine": machine, "packages": [], "workloads": {"G1": facts}}
    session = Session(tmp_path / "gpu.jsonl", header | {"card": card | {"copy": {"gigabytes": 2e3}}})
    measured = [("fedrax", "compiled before", 0.02, 2.0), ("PyTorch loop", "one client after another", 0.4, 2.1)]
    measured += [("PyTorch vmap", "compiled", 0.025, 2.05), ("fedrax", WHOLE, 0.03, 0.9)]
    for simulator, setting, seconds, loss in measured:
        run = {"workload": "G1", "simulator": simulator, "setting": setting, "repeat": 1, "round_median": seconds}
        run |= {"first_round": 1.0, "first_round_with_import": 45.0, "peak_pss_mb": 1.0, "foreign_cpu": 0.0}
        run |= {"test_loss": loss, "test_accuracy": 0.5, "device_peak_mb": 1234.0, "precision": "tensorfloat32"}
        session.add(run | ({"seconds_to_target": 40.0} if setting == WHOLE else {}))
    assert conclude(session, tmp_path) == 0
    page = (tmp_path / "gpu.md").read_text()
    assert "20 (1.25×)" in page and "400 (0.06×)" in page and "take fedrax 45.0 s" in page and "1,234" in page
    assert "69% after 40.0 s" in page
    # 1e12 operations at 4e5 GFLOP/s are 2.5 ms, 1e10 bytes at 2e3 GB/s are 5 ms: a quarter of 20 ms
    assert "| fedrax | compiled before | tensorfloat32 | 20 | 2.5 | 5 | 25% | 1.25 |" in page
    session.runs[0]["test_loss"] = 3.0
    assert conclude(session, tmp_path) == 1
