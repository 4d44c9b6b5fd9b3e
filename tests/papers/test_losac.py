"""The command that reproduces LoSAC's Table 2, on a part of it and on stand-in files in MNIST's format."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import tomlkit

from fedrax.experiments import comparison
from papers.losac import __main__ as losac
from papers.losac import running, table2, theory

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
    monkeypatch.setattr(table2, "HERE", tmp_path)
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
    assert table2.against(57, [], ".0f", 3) == ["57", "not reached", ""]
    assert table2.against(57, [60, 64], ".0f", 2) == ["57", "62 ± 3", "+5"]
    assert table2.against(57, [60, 64], ".0f", 3) == ["57", "62 ± 3 (2 runs)", "+5"]
    assert running.spread([0.5], ".2f") == "0.50"


def test_table2_of_esr_runs_as_long_as_the_printed_numbers_say() -> None:
    spec = comparison.from_table(table2.of_esr(), "test")
    spec.check()
    rounds = {method.name: method.run.rounds for method in spec.methods}
    assert len(rounds) == 18 and min(rounds.values()) == table2.MEASURED_AT
    assert rounds["SCAFFOLD, T=2, M=2"] == 2000 and rounds["LoSAC, T=6, M=5"] == 500  # printed: 1952 and 180
    assert all(method.run.eval_train for method in spec.methods)
    for data, blocks in (("MNIST", 2), ("HAR", 3), ("ESR", 5)):
        spec = comparison.from_table(table2.at_the_end(data, blocks, 4), "test")
        assert len(spec.methods) == 2 and {method.run.rounds for method in spec.methods} == {500}


@pytest.fixture
def esr_dir(tmp_path: Path) -> Path:
    """1,500 rows of noise in which a seizure is louder."""
    rng, folder = np.random.default_rng(0), tmp_path / "data" / "esr"
    folder.mkdir(parents=True)
    label = np.arange(1500) % 5 + 1
    signal = rng.normal(0, 100, (1500, 8)) + 300 * (label == 1)[:, None]
    np.savez(folder / "esr.npz", X=signal.astype(np.int16), y=label)
    return folder.parent


def command(what: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> str:
    """The table that a command writes."""
    places = ["--out", str(data_dir / "runs"), "--results", str(data_dir / "results"), "--data-dir", str(data_dir)]
    monkeypatch.setattr(sys, "argv", ["losac", what, *places, *more])
    assert losac.main() == 0
    return (data_dir / "results" / f"{what}.md").read_text()


def few(monkeypatch: pytest.MonkeyPatch, steps: str, blocks: str) -> None:
    """Table 2 with one pair of T and M."""
    read, every = table2.files.read_toml, table2.printed_rows

    def shorter(file: Path) -> dict:
        table = read(file)
        if "compare" in table:
            table["compare"] = [e for e in table["compare"] if f"T={steps}, M={blocks}" in e["label"]]
        return table

    monkeypatch.setattr(table2.files, "read_toml", shorter)
    monkeypatch.setattr(
        table2, "printed_rows", lambda data: [r for r in every(data) if (r["T"], r["M"]) == (steps, blocks)]
    )


@pytest.mark.slow
def test_losses_are_printed_beside_those_on_both_kinds_of_rows(esr_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, "6", "5")
    more = ("--data", "ESR", "--blocks", "5", "--local-steps", "6", "--rounds", "4", "--seeds", "0")
    rows = [line for line in command("losses", esr_dir, monkeypatch, *more).splitlines() if line.startswith("| ESR")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["SCAFFOLD, T=6, M=5", "0.3485"], ["LoSAC, T=6, M=5", "0.1967"],
    ]  # fmt: skip
    method, _ = losac.stored(esr_dir / "runs" / "losses" / "ESR,T=6,M=5")
    test, train = float(rows[0].split(" | ")[3]), float(rows[0].split(" | ")[5])
    last = method.runs[0].events[-1]
    assert (test, train) == (pytest.approx(last["test_loss"], abs=1e-4), pytest.approx(last["train_loss"], abs=1e-4))
    assert test != train


@pytest.mark.slow
def test_blocks_in_random_order_stand_beside_drawn_ones(esr_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, "2", "2")
    (esr_dir / "results").mkdir()
    rows = ["| | | |", "| SCAFFOLD, T=2, M=2 | 1952 | 30 ± 3 |", "| LoSAC, T=2, M=2 | 1020 | 20 ± 4 |"]
    (esr_dir / "results" / "table2-esr.md").write_text("\n".join(rows))
    text = command("block-order", esr_dir, monkeypatch, "--data", "ESR", "--rounds", "30", "--seeds", "0")
    assert "| ESR | SCAFFOLD, T=2, M=2 | 1952 | 30 ± 3 | " in text
    assert "| ESR | speed-up, T=2, M=2 | 1.91× | 1.50× ± 0.34 | " in text
    runs = [run for method in losac.stored(esr_dir / "runs" / "block-order" / "ESR") for run in method.runs]
    assert all(run.table["algorithm"]["local"]["block_order"] == "shuffle" for run in runs)


def test_claims_compare_the_tables_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "results").mkdir()
    lines = []
    for row in table2.printed_rows("HAR"):  # LoSAC twice as fast as SCAFFOLD's 100 rounds
        lines.append(f"| {table2.label_of(row)} | 1 | {'100 ± 10' if row['method'] == 'SCAFFOLD' else '50 ± 5'} |")
    (tmp_path / "results" / "table2-har.md").write_text("\n".join(lines))
    monkeypatch.setattr(table2, "HERE", tmp_path)
    monkeypatch.setattr(table2, "printed_rows", lambda data, read=table2.printed_rows: _printed(data, read))
    text = command("claims", tmp_path, monkeypatch)
    assert "| HAR | 6 | 3 | 4.74× | 2.00× ± 0.28 |" in text
    assert "| mean, HAR | 2, 4, 6 | 2, 3, 5 | 2.89× | 2.00× |" in text
    assert "| mean, HAR | 2, 4, 6 | 5 | 2.40× | 2.00× |" in text
    assert "| 5.3.1: 100 % more efficient on average | HAR | +189 % | +100 % | no |" in text
    pair = "| 74 against 166 | 50 ± 5 against 100 ± 10 | yes |"
    assert f"| 5.3.2: LoSAC at T = 2, M = 3 as fast as SCAFFOLD at T = 6 | HAR {pair}" in text
    assert "| 5.3.3: with M = 2 still 40 % better | HAR | +175 % | +100 % | yes |" in text


def _printed(data: str, read: object) -> list[dict[str, str]]:
    """The printed rows, from the folder of the command."""
    lines = (HERE / "table2_printed.csv").read_text().splitlines()
    names = lines[0].split(",")
    return [dict(zip(names, line.split(","), strict=True)) for line in lines[1:] if line.startswith(data)]


def test_the_variance_of_losacs_direction_vanishes_and_of_fedavgs_does_not() -> None:
    """Lemma 1; and the gradients of blocks that it is measured with are the library's."""
    for label, vanishes in (("LoSAC (consistent)", True), ("FedAvg", False)):
        made = theory.METHODS[label]()
        early, late = (theory.variance(theory.directions(theory.simulated(made, r, 0), label))[0] for r in (10, 1000))
        assert (late < 1e-2 * early) == vanishes
    w = np.random.default_rng(0).normal(size=(65, 10))
    mean = theory.block_gradients(w, 3).mean(0)
    np.testing.assert_allclose(mean, theory.gradient(w, theory.problem().x[3], theory.problem().y[3]), rtol=1e-9)
    numeric = (theory.objective(w + 1e-6 * mean) - theory.objective(w - 1e-6 * mean)) / 2e-6
    full = np.mean([theory.block_gradients(w, i).mean(0) for i in range(theory.CLIENTS)], axis=0)
    assert numeric == pytest.approx(float(np.sum(full * mean)), rel=1e-5)
