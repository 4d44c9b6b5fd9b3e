"""The command for Upcycled-FL's tables, on few devices and points."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import load
from papers.upcycled import __main__ as upcycled
from papers.upcycled import figures, grid, private


@pytest.mark.slow
def test_table1_prints_paper_fedrax_and_held_out_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fedavg = dataclasses.replace(grid.METHODS["FedAvg"], steps=(1e-3, 0.1))
    step = dataclasses.replace(grid.SERVER_STEP, steps=(0.1,), axes={"server lr": (1.0, 1.5)})
    monkeypatch.setattr(grid, "EXTRAPOLATIONS", (0.0, 0.5))
    every = {"FedAvg": fedavg, "FedAvg, server step": step}
    monkeypatch.setattr(grid, "EVERY", every)
    monkeypatch.setattr(upcycled, "EVERY", every)
    monkeypatch.setitem(grid.DATA, "own 0_0", ("synthetic", {"alpha": 0, "beta": 0, "devices": 4, "features": 3}))
    command = ["upcycled", "table1", "--data", "own 0_0", "--methods", "FedAvg", "--seeds", "0", "1", "--rounds", "2"]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert upcycled.main() == 0
    text = (tmp_path / "table1-own.md").read_text()
    assert "| own 0_0 | FedAvg | 79.28 ± 0.61 | " in text
    assert "| +2.18 |" in text  # gain in the paper
    assert "| own 0_0 | FedAvg, server step tuned instead | " in text
    assert '--data "own 0_0" --methods FedAvg --rounds 2' in text
    # upcycle(FedAvg, 0.5) is FedAvg with server learning rate 1.5
    where = (tmp_path / "runs", "own 0_0", 90)
    up = dict_of(grid.measured(*where, "FedAvg", "test", [0, 1], 2, None))
    own = dict_of(grid.measured(*where, "FedAvg, server step", "test", [0, 1], 2, None))
    np.testing.assert_allclose(up[0.1, 0.5], own[0.1, 1.5], atol=0.5)
    before = (tmp_path / "table1-own.md").stat().st_mtime_ns
    monkeypatch.setattr(sys, "argv", [*command, "--only-write"])
    assert upcycled.main() == 0
    assert (tmp_path / "table1-own.md").stat().st_mtime_ns > before
    # A wider grid runs only its new points; missing values of a diverged point are 0.
    ran, run = [], grid.run
    monkeypatch.setattr(grid, "run", lambda spec, points, *rest: ran.append(points) or run(spec, points, *rest))
    monkeypatch.setitem(every, "FedAvg", dataclasses.replace(fedavg, steps=(1e-3, 0.1, 0.2)))
    place = grid.place_of(*where, "FedAvg", "test")
    assert not grid.has_all(place, "FedAvg")
    kept = json.loads(place.read_text())
    del kept["found"][0]["samples"]
    place.write_text(json.dumps(kept))
    wider = grid.measured(*where, "FedAvg", "test", [0, 1], 2, None)
    assert ran == [[{"lr": 0.2, "a": 0.0}, {"lr": 0.2, "a": 0.5}]]
    assert [point for point, _ in wider] == every["FedAvg"].points
    np.testing.assert_array_equal(wider[0][1]["samples"], [0, 0])
    np.testing.assert_array_equal(dict_of(wider)[0.1, 0.5], up[0.1, 0.5])
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "3"])
    capsys.readouterr()
    assert upcycled.main() == 1
    assert "another sweep" in capsys.readouterr().err


def dict_of(found: upcycled.Found) -> dict[tuple[float, ...], np.ndarray]:
    return {tuple(point.values()): values["devices"] for point, values in found}


def test_best_point_at_an_end_of_the_grid_is_marked() -> None:
    def found(*means: float) -> upcycled.Found:
        return [({"lr": lr, "a": 0.0}, {"devices": np.array([m])}) for lr, m in zip((1, 2, 3), means, strict=True)]

    assert upcycled.choose(found(5, 7, 6), upcycled=False) == 1
    assert upcycled.shown(found(5, 7, 6), 1) == "lr 2"
    assert upcycled.shown(found(5, 7, 8), 2) == "lr 3 (end)"
    assert upcycled.shown(found(5, 8, 8), 2) == "lr 3"


def test_held_out_rows_are_training_rows_of_every_device() -> None:
    data = load("synthetic", devices=5, features=3)
    made = grid.held_out(data)
    assert data.train_clients is not None
    assert made.test_clients is not None
    assert len(made.train.y) + len(made.test.y) == len(data.train.y)
    np.testing.assert_array_equal(np.bincount(made.test_clients), np.bincount(data.train_clients) // 5)


def test_grids_contain_the_extrapolations_of_the_paper() -> None:
    assert list(grid.METHODS) == ["FedAvg", "FedAvgM", "FedProx", "SCAFFOLD", "FedDyn", "pFedMe", "FedYogi"]
    assert min(grid.STEPS) < 0.003 < max(grid.STEPS)
    assert {point["a"] for point in grid.METHODS["FedDyn"].points} == {0, 0.1, 0.3, 0.5, 0.7, 0.9}
    assert {f"{1 + a:g}" for a in grid.EXTRAPOLATIONS} <= {f"{step:g}" for step in grid.SERVER_STEPS}
    for method in grid.EVERY.values():
        method.at(method.points[0])
    assert all(point["inner lr"] * point["lambda"] < 2 for point in grid.METHODS["pFedMe"].points)


@pytest.mark.slow
def test_figure3_compares_at_the_same_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = dataclasses.replace(private.FIGURES["figure3"], levels=(0.1, 1e-6), axes={"lr": (0.1,), "tau": (10.0,)})
    monkeypatch.setitem(private.FIGURES, "figure3", small)
    monkeypatch.setitem(private.KINDS, "upcycled", {"a": (0.0, 0.5)})
    monkeypatch.setitem(private.KINDS, "server step", {"server lr": (1.5,)})
    for module in (private, figures):
        monkeypatch.setattr(module, "MEASURED", 2)
    monkeypatch.setitem(grid.DATA, "own 0_0", ("synthetic", {"devices": 4, "features": 3, "classes": 2}))
    command = ["upcycled", "figure3", "--data", "own 0_0", "--methods", "FedAvg", "--seeds", "0", "1", "--rounds", "4"]
    command += ["--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    assert upcycled.main() == 0
    text = (tmp_path / "figure3.md").read_text()
    assert (tmp_path / "figure3.png").stat().st_size > 10_000
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| own 0_0 | FedAvg | ")]
    assert len(rows) == 4  # by test loss, by held-out loss, and at two levels
    paper, sound = [float(cell) for cell in rows[0][2:4]], [float(cell) for cell in rows[0][4:6]]
    assert paper[1] < paper[0] and sound[1] < sound[0]  # half of the rounds, 0.8 of the noise
    found = {}
    for kind in ("plain", "upcycled", "server step"):
        options = {"out": tmp_path / "runs", "seeds": [0, 1], "rounds": 4, "data_dir": None, "only_kept": True}
        found[kind] = private.measured("figure3", "own 0_0", "FedAvg", kind, "test", **options)
        assert found[kind].loss.shape[1:] == (2, 2) and np.isfinite(found[kind].loss).all()
    # without noise upcycle(FedAvg, 0.5) is FedAvg with server learning rate 1.5
    up, step = (found[kind].only(lambda p: p["sigma / tau"] < 1e-5) for kind in ("upcycled", "server step"))
    np.testing.assert_allclose(up.only(lambda p: p["a"] == 0.5).loss, step.loss, rtol=1e-3)
    monkeypatch.setattr(sys, "argv", [*command, "--rounds", "8"])
    capsys.readouterr()
    assert upcycled.main() == 1
    assert "another sweep" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["upcycled", "figure4", "--methods", "FedYogi"])
    assert upcycled.main() == 1
    assert "not FedYogi" in capsys.readouterr().err


def test_figure4_epsilons_are_those_of_theorem_6_3_and_of_fedprox() -> None:
    of, point, sizes = private.FIGURES["figure4"], {"lr": 0.1, "alpha": 20.0}, np.array([50, 200])
    sound, paper = private.spent(of.at("FedProx", point | {"a": 0.5}), 40, sizes)
    assert sound == np.inf
    claims = 40 * (2 * 20 * 2**0.5 * 0.5 + 2.8 * 0.5) / (sizes * 0.5)
    np.testing.assert_allclose(paper, claims.mean(), rtol=1e-6)
    assert np.isnan(private.spent(of.at("SCAFFOLD", point), 40, sizes)[1])


def test_feature_rows_are_scaled_to_at_most_length_one() -> None:
    data = load("synthetic", devices=3, features=3)
    made = private.unit_rows(data)
    lengths = np.linalg.norm(data.train.x, axis=1)
    np.testing.assert_allclose(np.linalg.norm(made.train.x, axis=1), np.minimum(lengths, 1), rtol=1e-6)
    np.testing.assert_array_equal(made.train.x[lengths < 1], data.train.x[lengths < 1])
    np.testing.assert_allclose(
        made.test.x, data.test.x / np.maximum(np.linalg.norm(data.test.x, axis=1), 1)[:, None], rtol=1e-6
    )
