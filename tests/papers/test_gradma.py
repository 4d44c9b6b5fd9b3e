"""The commands for GradMA's tables and figures on stand-in files in MNIST's format: they run and resume."""

import dataclasses
import datetime
import json
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax import FedraxError, sweep
from fedrax.data import Dataset, as_samples
from fedrax.experiments import comparison
from papers.gradma import __main__ as gradma
from papers.gradma import figures, moon, search
from papers.gradma.partition import DirichletWorkers
from papers.gradma.search import METHODS, Cell, Runs, best_point, candidates

HERE = Path(gradma.__file__).parent


def test_workers_have_two_rows_and_shares_of_every_class() -> None:
    rng = np.random.default_rng(0)
    samples = as_samples(rng.normal(size=(3000, 2)), rng.integers(0, 5, 3000))
    dataset = Dataset("made", samples, samples, 5)
    indices, offsets = DirichletWorkers(50, 0.01).assign(dataset, 1)
    sizes = np.diff(offsets)
    assert sorted(indices) == list(range(3000))
    assert sizes.min() == 2
    assert (sizes == 2).sum() > 10
    assert not np.array_equal(sizes, np.diff(DirichletWorkers(50, 0.01).assign(dataset, 2).offsets))
    even = np.diff(DirichletWorkers(50, 1e5).assign(dataset, 1).offsets)
    assert np.abs(even - 60).max() < 10


def test_partition_agrees_with_the_authors_program() -> None:
    # Drawn in the order of that program: shares, two rows for each worker from the end of each class, the remainder.
    rng, labels = np.random.RandomState(5363 + 7), np.array([0, 1] * 6)
    shares = rng.dirichlet([0.5, 0.5], size=2)
    rows, first = {0: [0, 2, 4, 6, 8, 10], 1: [1, 3, 5, 7, 9, 11]}, {0: [], 1: []}
    for _ in range(2):
        for worker in (0, 1):
            first[worker].append(rows[rng.randint(0, 2)].pop())
    for label in (0, 1):
        rng.shuffle(rows[label])
        cut = int(shares[label][0] * len(rows[label]))
        first[0] += rows[label][:cut]
        first[1] += rows[label][cut:]
    samples = as_samples(np.zeros((12, 2)), labels)
    indices, offsets = DirichletWorkers(2, 0.5).assign(Dataset("made", samples, samples, 2), 7)
    found = [sorted(rows) for rows in np.split(indices, offsets[1:-1])]
    assert found == [sorted(first[0]), sorted(first[1])]


def test_exhausted_class_raises_a_clear_error() -> None:
    samples = as_samples(np.zeros((40, 2)), np.array([0] * 39 + [1]))
    with pytest.raises(FedraxError, match=r"class 1 of 'made' has too few rows for 10 workers\."):
        DirichletWorkers(10, 0.1).assign(Dataset("made", samples, samples, 2), 0)


def test_search_varies_one_axis_after_another(tmp_path: Path) -> None:
    runs, cell = Runs(HERE / "mnist.toml", tmp_path / "kept.jsonl", None, None), Cell(10, 0.01)

    def ran(point: tuple, top: float) -> None:
        record = {"cohort": 10, "omega": 0.01, "method": "FedProx", "point": point, "seed": 0, "top": top}
        record |= {"second_half": 40.0, "experiment": runs._digest(cell, "FedProx", point, 0), "processor": "this one"}
        with runs.kept.open("a") as file:
            file.write(json.dumps(record) + "\n")

    start = (0.01, 1.0, 0.01)
    assert candidates(runs, cell, "FedProx", 0, 0, "axes") == [start]
    ran(start, 50.0)
    assert candidates(runs, cell, "FedProx", 0, 1, "axes") == [(lr, 1.0, 0.01) for lr in (0.001, 0.01, 0.1)]
    ran((0.1, 1.0, 0.01), 70.0)
    assert best_point(runs, cell, "FedProx", [0]) == (0.1, 1.0, 0.01)
    assert candidates(runs, cell, "FedProx", 0, 2, "axes") == [(0.1, lr, 0.01) for lr in (0.1, 1.0, 10.0)]
    ran((0.1, 10.0, 0.1), 90.0)  # not on the path: a repeated search takes the same path
    assert candidates(runs, cell, "FedProx", 0, 1, "axes") == [(lr, 1.0, 0.01) for lr in (0.001, 0.01, 0.1)]
    assert best_point(runs, cell, "FedProx", [0]) == (0.1, 10.0, 0.1)
    assert len(candidates(runs, cell, "FedProx", 0, 1, "grid")) == 27
    assert candidates(runs, cell, "FedProx", 0, 1, "none") == []
    assert runs.top(cell, "FedProx", (0.1, 1.0, 0.01), 0) == 70
    assert runs.usual(cell, "FedProx", (0.1, 1.0, 0.01), 0) == 40
    elsewhere = Runs(HERE / "mnist.toml", runs.kept, None, None, {"local step": 0.1})
    assert elsewhere.start("FedProx") == (0.1, 1.0, 0.01)
    with runs.kept.open("a") as file:
        file.write('{"cohort": 10, "om')  # the process was killed
    with pytest.raises(FedraxError, match=r"kept\.jsonl: line 4 is not a run; take it out and go on\."):
        runs.known(cell, "FedProx", 0)


def write_mnist(folder: Path) -> None:
    """500 training and 100 test images of noise."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for part, rows in (("train", 500), ("t10k", 100)):
        labels = np.tile(np.arange(10, dtype=np.uint8), rows // 10)
        images = rng.integers(0, 256, (rows, 28, 28)).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, rows, 28, 28) + images.tobytes())
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, rows) + labels.tobytes())


def test_table1_prints_paper_fedrax_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_mnist(tmp_path / "mnist")
    printed = (HERE / "table1_printed.csv").read_text().splitlines()
    (tmp_path / "table1_printed.csv").write_text("\n".join([printed[0], *(p for p in printed if "mnist,5," in p)]))
    for name in ("mnist.toml", "partition.py"):
        (tmp_path / name).write_text((HERE / name).read_text())
    monkeypatch.setattr(gradma, "HERE", tmp_path)
    command = ["gradma", "table1", "--search", "none", "--seeds", "0", "--rounds", "1", "--methods", "FedAvg"]
    command += ["--results", str(tmp_path), "--data-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gradma.main() == 0
    text = (tmp_path / "table1-mnist.md").read_text()
    wrote = "python -m papers.gradma table1 --search none --seeds 0 --methods FedAvg --rounds 1"
    assert f" Written by `{wrote}` (" in text
    row = next(line for line in text.splitlines() if line.startswith("| FedAvg |"))
    assert row.startswith("| FedAvg | (5, 0.01) | 49.65 ± 3.88 | ")
    today = datetime.date.today().isoformat()
    assert f"| 1 | 1 of 9 | local step 0.01, server step 1 | {today} | " in row
    assert row.endswith(" (1 seed) | local step 0.01, server step 1 |")
    assert "| MOON | (5, 0.01) |" not in text and "Not run at (5, 0.01): " in text
    assert "seed 0" in capsys.readouterr().out
    assert gradma.main() == 0
    assert "seed 0," not in capsys.readouterr().out  # stored, not run again
    monkeypatch.setattr(sys, "argv", [*command, "--cells", "7,0.01"])
    assert gradma.main() == 1
    assert "--cells: the table's columns are 5,0.01, not 7,0.01." in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "2"])
    assert gradma.main() == 1
    assert "another experiment" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--small"])
    assert gradma.main() == 1
    assert "--small: mnist has no smaller budget; cifar10, cifar100, tiny_imagenet have." in capsys.readouterr().err


@pytest.mark.parametrize(("data", "batch"), [("cifar10", 16), ("cifar100", 32), ("tiny_imagenet", 16)])
def test_smaller_budget_changes_rounds_batches_and_the_network_only(data: str, batch: int, tmp_path: Path) -> None:
    smaller = gradma.SMALLER[data]
    whole, small = (
        Runs(HERE / f"{data}.toml", tmp_path / "kept.jsonl", None, None, changes=changes) for changes in (None, smaller)
    )
    point = whole.start("GradMA")
    assert small.start("GradMA") == point
    before, after = (runs._experiment(Cell(10, 0.1), "GradMA", point, 1) for runs in (whole, small))
    local = dataclasses.replace(before.algorithm.local, batch_size=batch)  # type: ignore[attr-defined]
    assert after.algorithm == dataclasses.replace(before.algorithm, local=local)  # type: ignore[call-arg]
    assert after.run == dataclasses.replace(before.run, rounds=100, eval_every=10)
    assert after.model == dataclasses.replace(before.model, **smaller.get("model", {}))
    assert (after.data, after.partition) == (before.data, before.partition)


@pytest.mark.parametrize(
    ("data", "rounds", "cells"),
    [("mnist", 500, 80), ("cifar10", 1000, 48), ("cifar100", 2000, 48), ("tiny_imagenet", 2000, 48)],
)
def test_experiment_files_have_the_settings_of_the_paper(data: str, rounds: int, cells: int) -> None:
    spec = comparison.read([HERE / f"{data}.toml"])
    spec.check()
    assert [method.name for method in spec.methods] == list(METHODS)
    assert {(m.run.rounds, m.partition.clients) for m in spec.methods} == {(rounds, 100)}
    uniform = {method.name for method in spec.methods if method.run.weights == "uniform"}
    assert uniform == {"Scaffold", "MIFA", "MIFAM", "FedDyn"}  # which are not defined for other methods
    for method in spec.methods:
        local = method.algorithm.local  # type: ignore[attr-defined]
        assert (local.steps, local.batch_size) == (5, 64)
    assert len(gradma.read_printed(data)) == cells


def test_interrupted_search_keeps_finished_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    runs, points = Runs(HERE / "mnist.toml", tmp_path / "kept.jsonl", 1, str(tmp_path)), [(0.01, 1.0), (0.1, 1.0)]

    def one_alone(some: list, *rest: Any) -> Any:
        if len(some) > 1 or runs.kept.exists():
            raise KeyboardInterrupt
        return sweep(some, *rest)

    monkeypatch.setattr(search, "sweep", one_alone)
    with pytest.raises(KeyboardInterrupt):
        runs.run(Cell(10, 1.0), "FedAvg", points, 0)
    assert list(runs.known(Cell(10, 1.0), "FedAvg", 0)) == points[:1]


def kept(runs: Runs, cell: Cell, method: str, point: tuple, seed: int, curve: list[float]) -> None:
    """Write the line of a run with this curve."""
    half = curve[len(curve) // 2 :]
    record = {"cohort": cell.cohort, "omega": cell.omega, "method": method, "point": point, "seed": seed}
    record |= {
        "top": max(curve),
        "second_half": sum(half) / len(half),
        "every": 5,
        "curve": curve,
        "date": "2026-01-01",
    }
    record |= {"experiment": runs._digest(cell, method, point, seed), "processor": "this one", "diverged": False}
    with runs.kept.open("a") as file:
        file.write(json.dumps(record) + "\n")


def test_best_point_is_that_of_all_seeds_and_the_nearest_is_shown(tmp_path: Path) -> None:
    runs, cell = Runs(HERE / "mnist.toml", tmp_path / "kept.jsonl", None, None), Cell(10, 0.01)
    for point, tops in {(0.1, 1.0): (80.0, 40.0), (0.01, 1.0): (70.0, 72.0), (0.001, 1.0): (90.0,)}.items():
        for seed, top in enumerate(tops):
            kept(runs, cell, "FedAvg", point, seed, [top - 10, top])
    assert best_point(runs, cell, "FedAvg", [0, 1]) == (0.01, 1.0)
    assert best_point(runs, cell, "FedAvg", [0]) == (0.001, 1.0)
    assert best_point(runs, cell, "FedAvg", [0, 2]) == (0.001, 1.0)
    row = gradma.row_of(runs, cell, "FedAvg", [0, 1], 61.0, 1.0)
    assert row[3:5] == ["71.00 ± 1.41", "+10.00"]
    assert row[-2:] == ["60.00 ± 28.28", "local step 0.1, server step 1"]
    near = gradma.nearest(runs, cell, "FedAvg", [0, 1], 88.0)
    assert near == ((0.001, 1.0), "90.00 (1 seed)")


def test_runs_without_a_curve_are_missing_if_curves_are_requested(tmp_path: Path) -> None:
    runs, cell = Runs(HERE / "mnist.toml", tmp_path / "kept.jsonl", None, None, curves=True), Cell(10, 0.01)
    kept(runs, cell, "FedAvg", (0.1, 1.0), 0, [30.0, 60.0, 50.0])
    assert runs.missing(cell, "FedAvg", [(0.1, 1.0), (0.01, 1.0)], 0) == [(0.01, 1.0)]
    assert runs.curve(cell, "FedAvg", (0.1, 1.0), 0) == [(5, 30.0), (10, 60.0), (15, 50.0)]
    assert figures.rounds_to(runs.curve(cell, "FedAvg", (0.1, 1.0), 0), 45) == 10
    assert figures.rounds_to(runs.curve(cell, "FedAvg", (0.1, 1.0), 0), 61) is None
    runs.kept.write_text(runs.kept.read_text().replace(', "every": 5, "curve": [30.0, 60.0, 50.0]', ""))
    assert runs.missing(cell, "FedAvg", [(0.1, 1.0)], 0) == [(0.1, 1.0)]


def test_memory_and_betas_are_studied_at_the_best_learning_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "mnist")
    monkeypatch.setattr(figures, "MEMORIES", (10,))
    monkeypatch.setattr(figures, "BETAS", (0.9,))
    monkeypatch.setattr(figures, "COARSE", (0.9,))
    common = [
        "--rounds",
        "1",
        "--seeds",
        "0",
        "--cells",
        "10,1",
        "--results",
        str(tmp_path),
        "--data-dir",
        str(tmp_path),
    ]
    for what in ("memory", "betas"):
        monkeypatch.setattr(sys, "argv", ["gradma", what, *common])
        assert gradma.main() == 0
    lines = [json.loads(line) for line in (tmp_path / "memory-mnist.jsonl").read_text().splitlines()]
    assert [(line["point"], len(line["curve"])) for line in lines] == [([0.01, 1.0, 0.5, 0.5, 10], 1)]
    assert "| (10, 1) | 10 | " in (tmp_path / "memory-mnist.md").read_text()
    (line,) = (tmp_path / "betas-mnist.jsonl").read_text().splitlines()
    assert json.loads(line)["point"] == [0.01, 1.0, 0.9, 0.9]
    assert "| (S, omega) | beta1 | beta2 = 0.9 |" in (tmp_path / "betas-mnist.md").read_text()


def test_betas_shows_what_beta2_gains_and_how_far_its_absence_leads_mifa(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table1, maps = (
        Runs(HERE / "mnist.toml", tmp_path / f"{name}-mnist.jsonl", None, None) for name in ("table1", "betas")
    )
    cell = Cell(10, 0.01)
    for method, point, top in (("MIFA", (0.1, 1.0), 60.0), ("MIFAM", (0.1, 1.0, 0.5), 64.0)):
        kept(table1, cell, method, point, 0, [10.0, top])
    for beta1, beta2, top in ((0.0, 0.0, 61.0), (0.0, 0.5, 63.5), (0.0, 0.9, 58.0), (0.9, 0.9, 40.0)):
        kept(maps, cell, "GradMA-S", (0.01, 1.0, beta1, beta2), 0, [10.0, top])
    monkeypatch.setattr(sys, "argv", ["gradma", "betas", "--only-write", "--seeds", "0", "--results", str(tmp_path)])
    assert gradma.main() == 0
    text = (tmp_path / "betas-mnist.md").read_text()
    assert "| (10, 0.01) | 0 | 61.00 | - | - | 63.50 | - | 58.00 | 0.5 | +2.50 | -3.00 |" in text
    assert "| (10, 0.01) | 0.9 | - | - | - | - | - | 40.00 | 0.9 | - | - |" in text
    assert "| (10, 0.01) | MIFAM | 64.00 | - |" in text and "mean over 1 seed;" in text
    assert "| (10, 0.1) |" not in text
    assert (tmp_path / "betas-mnist.png").stat().st_size > 10_000


def test_partitions_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist")
    command = ["gradma", "partitions", "--partitions", "mnist", "--results", str(tmp_path), "--data-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gradma.main() == 0
    rows = [line.split(" | ") for line in (tmp_path / "partitions.md").read_text().splitlines() if "| MNIST" in line]
    assert [row[1] for row in rows] == ["1", "0.1", "0.01"]
    assert int(rows[0][2]) < int(rows[2][2])  # more workers with two rows only
    assert (tmp_path / "partitions.png").stat().st_size > 10_000


def test_table2_counts_rounds_twice_if_a_round_sends_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, cell = Runs(HERE / "mnist.toml", tmp_path / "table1-mnist.jsonl", None, None), Cell(10, 0.01)
    for method in ("FedAvg", "Scaffold"):
        for seed, curve in enumerate(([40.0, 46.0], [45.0, 40.0], [10.0, 20.0])):
            kept(runs, cell, method, (0.1, 1.0), seed, curve)
    monkeypatch.setattr(sys, "argv", ["gradma", "table2", "--results", str(tmp_path)])
    assert gradma.main() == 0
    text = (tmp_path / "table2-mnist.md").read_text()
    assert "| FedAvg | (10, 0.01) | 45 | 493 | 8 ± 4 | -486 | 2 of 3 |" in text
    assert "| Scaffold | (10, 0.01) | 45 | 60 | 15 ± 7 | -45 | 2 of 3 |" in text
    assert "| MOON | (10, 0.01) | 45 | 493 | not run | - | 0 of 0 |" in text
    assert (tmp_path / "curves-mnist.png").stat().st_size > 10_000


def test_moon_without_its_term_is_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At mu = 0 the mode of the features has no influence; at mu = 5 it has."""
    monkeypatch.setattr(moon, "MUS", (0.0, 5.0))
    monkeypatch.setattr(moon, "NETWORKS", {"no dropout": (0.0, False)})
    command = ["gradma", "moon", "--rounds", "4", "--seeds", "0", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert gradma.main() == 0
    found = [line.strip("| ").split(" | ") for line in (tmp_path / "moon.md").read_text().splitlines()]
    rows = {tuple(row[1:4]): row[4:] for row in found if row[0] == "no dropout"}
    assert rows["FedAvg", "-", "-"][1] == "+0.00"
    without = [rows["MOON", mode, "0"] for mode in ("training", "evaluation")]
    assert without == [rows["FedAvg", "-", "-"]] * 2
    assert rows["MOON", "training", "5"] != rows["MOON", "evaluation", "5"]
