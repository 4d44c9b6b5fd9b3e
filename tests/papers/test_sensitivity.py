"""The command for LoSAC's Figures 3 to 5, on few rows in HAR's format."""

import sys
from pathlib import Path

import numpy as np
import pytest
import tomlkit

from fedrax.experiments import comparison
from papers.losac import __main__ as losac
from papers.losac import running, sensitivity, table2


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """1,000 training and 60 test rows of six features, of which the one of the label is large."""
    rng, folder = np.random.default_rng(0), tmp_path / "data" / "har"
    folder.mkdir(parents=True)
    arrays = {}
    for part, rows in (("train", 1000), ("test", 60)):
        labels = np.arange(rows) % 6
        arrays[f"x_{part}"] = (np.eye(6)[labels] + rng.normal(0, 0.1, (rows, 6))).astype(np.float32)
        arrays |= {f"y_{part}": labels + 1, f"subject_{part}": labels}
    np.savez(folder / "har_features561_recomputed.npz", **arrays)
    return folder.parent


def command(what: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch, seeds: str) -> str:
    """The table that a command writes."""
    places = ["--out", str(data_dir / "runs"), "--results", str(data_dir / "results"), "--data-dir", str(data_dir)]
    monkeypatch.setattr(sys, "argv", ["losac", what, *places, "--rounds", "10", "--seeds", *seeds])
    assert losac.main() == 0
    return (data_dir / "results" / f"{what}.md").read_text()


@pytest.mark.slow
def test_figures_share_the_runs_of_a_panel(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = sensitivity.Panel(100, 10, 2, "HAR", ("FedCM",))
    other = sensitivity.Panel(100, 20, 2, "HAR", ("FedCM",))
    monkeypatch.setattr(sensitivity, "FIGURES", {"figure4": [one], "figure5": [one, other]})
    monkeypatch.setattr(sensitivity, "TITLES", {"figure4": "four", "figure5": "five"})
    first = command("figure4", data_dir, monkeypatch, "01")
    text = command("figure5", data_dir, monkeypatch, "0")
    assert "Two seeds only (0 and 1)." in first
    assert "One seed only (0)" in text  # the second seed of figure4 is in the same directory and not used
    assert sensitivity.RECOMPUTED in text
    assert [line.split(" | ")[1] for line in text.splitlines() if "| FedCM |" in line] == ["10", "20"]
    assert (data_dir / "results" / "figure5.png").stat().st_size > 10_000
    assert sensitivity.title(one, [one, other]) == "S = 10"


@pytest.mark.slow
def test_table2_of_har_is_compared_with_the_rows_of_har(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tomlkit.parse((table2.HERE / "table2.toml").read_text()).unwrap()
    table["compare"] = [entry for entry in table["compare"] if entry["label"] == "LoSAC, T=2, M=5"]
    table["run"]["cohort_size"] = 5
    (data_dir / "table2.toml").write_text(tomlkit.dumps(table))
    lines = (table2.HERE / "table2_printed.csv").read_text().splitlines()
    kept = [line for line in lines if line.startswith("data,") or "LoSAC,2,5" in line]
    assert len(kept) == 4  # MNIST and ESR have a row of this name as well
    (data_dir / "table2_printed.csv").write_text("\n".join(kept) + "\n")
    monkeypatch.setattr(table2, "HERE", data_dir)
    text = command("table2-har", data_dir, monkeypatch, "0")
    rows = [line for line in text.splitlines() if line.startswith("| LoSAC")]
    assert len(rows) == 1
    assert rows[0].startswith("| LoSAC, T=2, M=5 | 89 | ")
    assert "| 0.1076 | " in rows[0]
    assert sensitivity.RECOMPUTED in text
    assert (data_dir / "results" / "table2-har.png").stat().st_size > 10_000


@pytest.mark.parametrize("panel", [panel for panels in sensitivity.FIGURES.values() for panel in panels])
def test_panels_are_valid_experiments(panel: sensitivity.Panel) -> None:
    spec = comparison.from_table(sensitivity.experiment(panel), "test")
    spec.check()
    assert tuple(method.name for method in spec.methods) == panel.methods
    for method in spec.methods:
        local = method.algorithm.local  # type: ignore[attr-defined]
        assert (local.blocks, local.steps, method.run.cohort_size) == (5, panel.steps, panel.cohort)
        assert (local.lr, method.run.rounds) == ((4e-4, 100) if panel.data == "MNIST" else (1e-4, 500))


def test_three_seeds_have_no_remark(tmp_path: Path) -> None:
    runs = [running.SavedRun(tmp_path, {"run": {"seed": seed}}, [], None) for seed in range(3)]
    assert running.few_seeds([running.MethodRuns("all", runs)]) == ""
    assert running.few_seeds([running.MethodRuns("two", runs[:2])]) == " Two seeds only (0 and 1)."
