"""The command that reproduces LoSAC's Table 2, on a part of it and on stand-in files in MNIST's format."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tomlkit

from fedrax.experiments import comparison
from papers.losac import __main__ as losac

HERE = Path(losac.__file__).parent


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """2,000 training and 500 test images of noise with a bright stripe, whose height is the label."""
    rng, folder = np.random.default_rng(0), tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for part, rows in (("train", 2000), ("t10k", 500)):
        labels = np.tile(np.arange(10, dtype=np.uint8), rows // 10)
        stripe = np.arange(28) // 2 == labels[:, None]
        images = (rng.integers(0, 60, (rows, 28, 28)) + 180 * stripe[:, :, None]).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, rows, 28, 28) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, rows) + labels.tobytes())
    return folder.parent


@pytest.mark.slow
def test_table2_prints_paper_fedrax_and_difference(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tomlkit.parse((HERE / "table2.toml").read_text()).unwrap()
    table["compare"] = [entry for entry in table["compare"] if "T=2, M=5" in entry["label"]]
    (tmp_path / "table2.toml").write_text(tomlkit.dumps(table))
    lines = (HERE / "table2_printed.csv").read_text().splitlines()
    kept = [lines[0], *(line for line in lines if line.startswith("MNIST") and ",2,5," in line)]
    (tmp_path / "table2_printed.csv").write_text("\n".join(kept) + "\n")
    monkeypatch.setattr(losac, "HERE", tmp_path)
    out, results = tmp_path / "runs", tmp_path / "results"
    command = ["losac", "table2", "--out", str(out), "--results", str(results), "--rounds", "2", "--seeds", "0", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--data-dir", str(data_dir)])
    assert losac.main() == 0
    text = (results / "table2.md").read_text()
    assert "| SCAFFOLD, T=2, M=5 | 57 | " in text
    assert "| LoSAC, T=2, M=5 | 44 | " in text
    assert "--rounds 2" in text
    assert (results / "table2.png").stat().st_size > 10_000
    runs = {run.directory.parent.name: run for method in losac.stored(out / "table2") for run in method.runs}
    assert len(runs) == 2
    assert all(len(run.events) == 2 for run in runs.values())


@pytest.mark.slow
def test_tuned_finds_the_best_learning_rate(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tomlkit.parse((HERE / "figure2.toml").read_text()).unwrap()
    table["compare"] = [entry for entry in table["compare"] if entry["label"] == "FedAvg"]
    table["partition"]["clients"], table["run"]["cohort_size"] = 20, 5
    (tmp_path / "figure2.toml").write_text(tomlkit.dumps(table))
    monkeypatch.setattr(losac, "HERE", tmp_path)
    monkeypatch.setattr(losac, "STEP_SIZES", (1e-7, 2e-4, 2e-7))
    monkeypatch.setattr(losac, "TUNED_AT", 0)
    out, results = tmp_path / "runs", tmp_path / "results"
    command = ["losac", "tuned", "--out", str(out), "--results", str(results), "--rounds", "12", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", [*command, "--data-dir", str(data_dir)])
    assert losac.main() == 0
    assert "| FedAvg | 0.0002 (end of the grid) |" in (results / "tuned.md").read_text()
    accuracy = {lr: losac.score(losac.stored(out / "tuned" / f"lr={lr:g}")[0]) for lr in losac.STEP_SIZES}
    assert max(accuracy, key=lambda lr: accuracy[lr]) == 2e-4


def test_constants_are_tuned_with_the_learning_rate():
    wider, made = losac.with_constants([{"label": "FedAvg"}, {"label": "FedADMM", "rho": 5.0}])
    assert {entry["label"]: entry.get("rho") for entry in wider} == {label: value for label, (_, value) in made.items()}
    assert made["FedADMM"] == ("FedADMM", 5.0) and made["FedADMM, rho = 150"] == ("FedADMM", 150.0)
    best = losac.Tried(0.0064, 1500.0, losac.MethodRuns("FedADMM, rho = 1500", []))
    assert losac.settings("FedADMM", best) == "0.0064, rho = 1500 (end of the grid)"
    assert losac.settings("FedAvg", best._replace(lr=2e-4, constant=None)) == "0.0002 (end of the grid)"


@pytest.mark.parametrize(("file", "methods"), [("table2.toml", 18), ("figure2.toml", 9)])
def test_experiment_files_have_the_settings_of_the_paper(file: str, methods: int) -> None:
    spec = comparison.read([HERE / file])
    spec.check()
    assert len(spec.methods) == methods
    assert spec.seeds == (0, 1, 2)
    for method in spec.methods:
        local = method.algorithm.local  # type: ignore[attr-defined]
        assert (local.reduction, local.lr) == ("sum", 1e-4 if file == "table2.toml" else 4e-4)
        assert local.blocks is not None
        assert local.steps is not None


def test_targets_that_were_not_reached_are_reported() -> None:
    assert losac.against(57, [], ".0f", 3) == ["57", "not reached", ""]
    assert losac.against(57, [60, 64], ".0f", 2) == ["57", "62 ± 3", "+5"]
    assert losac.against(57, [60, 64], ".0f", 3) == ["57", "62 ± 3 (2 runs)", "+5"]
    assert losac.spread([0.5], ".2f") == "0.50"
