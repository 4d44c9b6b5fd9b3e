"""The command for Upcycled-FL's tables, on few devices and points."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedrax.data import load
from fedrax.experiments import comparison
from papers.upcycled import __main__ as upcycled
from papers.upcycled import convergence, data_sets, figures, grid, noise, private, tweets


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
    assert "table1 --data 'own 0_0' --methods FedAvg --seeds 0 1 --rounds 2`" in text
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


def dict_of(found: upcycled.Known) -> dict[tuple[float, ...], np.ndarray]:
    return {tuple(point.values()): values["devices"] for point, values in found}


def test_best_point_at_an_end_of_the_grid_is_marked() -> None:
    def found(*means: float) -> upcycled.Known:
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


def test_the_coarse_search_ends_at_the_best_point_of_its_neighborhood() -> None:
    """Of a smooth function of the grid's indices, which the search finds from a tenth of the points."""
    spec = grid.METHODS["FedAvgM"]
    axes = {"lr": spec.steps, **spec.axes}

    def value(point: grid.Point) -> np.ndarray:
        at = [axes[name].index(point[name]) for name in axes]
        return np.array([90 - (at[0] - 6) ** 2 - (at[1] - 3) ** 2 + point["a"]])

    known: grid.Known = []
    while more := grid.next_points(spec, known):
        assert all(point in spec.points for point in more)
        known += [(point, {"devices": value(point), "samples": value(point)}) for point in more]
    tried = [tuple(point.values()) for point, _ in known]
    assert len(set(tried)) == len(tried) < len(spec.points) / 5
    best = max(known, key=lambda one: one[1]["devices"].mean())[0]
    assert best == {"lr": spec.steps[6], "beta": spec.axes["beta"][3], "a": 0.9}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Four devices, of which figures and tables read nothing in the folder of the command."""
    monkeypatch.setitem(grid.DATA, "own 0_0", ("synthetic", {"devices": 4, "features": 3, "classes": 2}))
    monkeypatch.setattr(convergence, "__file__", str(tmp_path / "convergence.py"))
    where = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path)]
    return ["--data", "own 0_0", "--methods", "FedAvg", "--seeds", "0", "1", *where]


@pytest.mark.slow
def test_curves_are_drawn_at_the_coarse_tables_best_points(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grid, "EXTRAPOLATIONS", (0.0, 0.5))
    monkeypatch.setitem(grid.EVERY, "FedAvg", dataclasses.replace(grid.METHODS["FedAvg"], steps=(1e-3, 1e-2, 0.1)))
    monkeypatch.setattr(sys, "argv", ["upcycled", "table1", "--search", "coarse", "--rounds", "4", *small])
    assert upcycled.main() == 0
    text = (tmp_path / "table1-coarse.md").read_text()
    assert "| own 0_0 | FedAvg | 79.28 ± 0.61 | " in text and "held-out" not in text
    monkeypatch.setattr(
        sys, "argv", ["upcycled", "table1", "--search", "coarse", "--rounds", "4", "--only-write", *small]
    )
    assert upcycled.main() == 0 and (tmp_path / "table1-coarse.md").read_text().splitlines()[2:5]
    (plain, up) = convergence.best_points(tmp_path, "table1")["own 0_0", "FedAvg"]
    assert plain["a"] == 0 and up["a"] == 0.5
    monkeypatch.setattr(sys, "argv", ["upcycled", "figure5", "--rounds", "4", *small])
    assert upcycled.main() == 0
    assert "| own 0_0 | FedAvg | " in (tmp_path / "figure5.md").read_text()
    assert (tmp_path / "figure5.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / "runs" / "curves-own-0_0-90-FedAvg.json").read_text())
    assert np.shape(kept["losses"]) == (2, 2, 4) and kept["points"] == [plain, up]


def test_points_are_read_as_tables_write_them() -> None:
    assert convergence.point_of("lr 0.0001, beta 0.995 (end), a 0.1") == {"lr": 1e-4, "beta": 0.995, "a": 0.1}
    assert convergence.point_of("lr 3e-05 (end), server lr 1000 (end)") == {"lr": 3e-5, "server lr": 1000, "a": 0}
    assert convergence.point_of("lr 1 (end), lambda 0.1, inner lr 0.1") == {
        "lr": 1,
        "lambda": 0.1,
        "inner lr": 0.1,
        "a": 0,
    }
    points = convergence.best_points(Path(upcycled.__file__).parent / "results", "table1")
    for (_, method), pair in points.items():
        assert all(grid.METHODS[method].at(point) for point in pair)
    assert {("iid", "FedYogi"), ("0.5_0.5", "pFedMe")} <= set(points)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "methods"),
    [("figure3-methods", ("FedAvgM", "FedYogi", "pFedMe")), ("figure4-methods", ("FedDyn", "pFedMe"))],
)
def test_methods_of_the_figures_are_private(
    figure: str, methods: tuple[str, ...], small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = dataclasses.replace(noise.FIGURES[figure], axes={"lr": (0.1,)})
    monkeypatch.setitem(noise.FIGURES, figure, of)
    for module in (noise, private):
        monkeypatch.setattr(module, "MEASURED", 2)
    monkeypatch.setattr(noise, "EXTRAPOLATIONS", (0.0, 0.5))
    for name, (make, axes) in noise.METHODS.items():
        monkeypatch.setitem(noise.METHODS, name, (make, {axis: values[:1] for axis, values in axes.items()}))
    where = [*small[:2], *small[4:], "--methods", *methods]
    monkeypatch.setattr(sys, "argv", ["upcycled", figure, "--rounds", "4", *where])
    assert upcycled.main() == 0
    losses = (tmp_path / f"{figure}.md").read_text().partition("\n## ")[0]  # the sections count them
    rows = [line.split(" | ") for line in losses.splitlines() if "| own 0_0 |" in line]
    assert [row[1] for row in rows] == list(methods) and list(noise.METHODS) == list(grid.METHODS)
    assert all(np.isfinite(float(cell.split(" ")[0])) for row in rows for cell in row[2:5])
    releases = noise.at(of, "FedAvg", noise.points_of(of, "FedAvg", True)[0]).releases()
    assert releases == of.wrap(private._fedavg({"lr": 0.1}), noise.points_of(of, "FedAvg", True)[0]).releases()


def test_table2_counts_what_the_paper_counts(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["upcycled", "table2", *small])
    assert upcycled.main() == 0
    row = next(line for line in (tmp_path / "table2.md").read_text().splitlines() if line.startswith("| own 0_0"))
    data = load("synthetic", devices=4, features=3, classes=2)
    total = len(data.train.y) + len(data.test.y)
    assert row.startswith(
        f"| own 0_0 | 13791 (1395) | {total} ({len(data.test.y)}) | 30 | 4 | 460 | {total / 4:.0f} | "
    )
    x, y = np.asarray(data.train.x, float), np.asarray(data.train.y)
    separable = dataclasses.replace(data, train=type(data.train)(x, (x[:, 0] > 0).astype(np.int32)), test=data.test)
    right = data_sets.pooled(dataclasses.replace(separable, test=separable.train, test_clients=data.train_clients))
    assert len(right) == len(y) and right.mean() > 0.98


@pytest.mark.slow
def test_mu_and_lambda_and_the_seconds_of_a_run(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convergence, "MUS", (1.0,))
    monkeypatch.setattr(convergence, "GROWTHS", (0.0, 0.5))
    monkeypatch.setattr(convergence, "ITERATIONS", (2, 4))
    monkeypatch.setattr(sys, "argv", ["upcycled", "theorem5.6", "--rounds", "4", *small])
    assert upcycled.main() == 0
    text = (tmp_path / "theorem5.6.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| own 0_0 | 1 |")).split(" | ")
    losses = [float(cell.split(" ")[0]) for cell in row[2:]]
    assert losses[-2] == pytest.approx(losses[-1], rel=0.02)  # a = 1 / 101 is nearly FedProx
    assert abs(losses[0] - losses[-1]) > 1e-3  # a = 1 goes twice as far
    assert "| own 0_0 | 0.5 | " in text


def test_table5_compares_the_time_of_runs_that_follow_each_other(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(grid.DATA, "iid", grid.DATA["own 0_0"])
    runs: list[tuple[str, int, int]] = []

    def timed(algorithm: noise.Algorithm, *_: object, rounds: int, seed: int, **__: object) -> None:
        runs.append((type(algorithm).__name__, rounds, seed))

    monkeypatch.setattr(noise, "simulate", timed)
    monkeypatch.setattr(sys, "argv", ["upcycled", "table5", "--rounds", "4", *small[2:]])
    assert upcycled.main() == 0
    turn = [("OutputPerturbation", 4), ("OutputPerturbation", 4), ("Upcycled", 2)]
    assert runs == [(*one, seed) for seed in (0, 0, 1) for one in turn]
    (row,) = (line for line in (tmp_path / "table5.md").read_text().splitlines() if line.startswith("| FedAvg"))
    assert row.startswith("| FedAvg | 147.50 ± 6.69 | 1.00 | 1 | ") and float(row.split(" | ")[4].split(" ")[0]) > 0


@pytest.fixture
def few_tweets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three users, and vectors of their words."""
    words = {f"word{k}": np.random.default_rng(k).normal(size=3) for k in range(8)}
    drawn = np.random.default_rng(0).integers(8, size=(60, 4))
    texts = [" ".join(f"word{k}" for k in row) for row in drawn]
    for name in ("sent140", "glove"):
        (tmp_path / name).mkdir()
    table = {"user": [f"u{k % 3}" for k in range(60)], "text": texts, "label": (drawn.sum(1) > 14).astype(int)}
    pl.DataFrame(table).write_parquet(tmp_path / "sent140" / "leaf_k30_by_user.parquet")
    vectors = "\n".join(f"{word} " + " ".join(f"{x:.3f}" for x in vector) for word, vector in words.items())
    (tmp_path / tweets.VECTORS).write_text(vectors + "\n")
    monkeypatch.setattr(tweets, "DEVICES", 3)
    monkeypatch.setattr(tweets, "LEAST", 1)
    monkeypatch.setattr(tweets, "HIDDEN", 2)
    monkeypatch.setattr(tweets, "STEPS", (0.3,))
    monkeypatch.setattr(tweets, "PRIVATE_STEPS", (0.3,))
    return ["--data-dir", str(tmp_path), "--out", str(tmp_path / "runs"), "--results", str(tmp_path), "--seeds", "0"]


@pytest.mark.slow
def test_tweets_are_compared_in_both_tables_and_with_noise(
    few_tweets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tweets, "TABLES", {"3": 30})
    monkeypatch.setattr(sys, "argv", ["upcycled", "sent140", "--methods", "FedAvg", "--rounds", "2", *few_tweets])
    assert upcycled.main() == 0
    (row,) = (line for line in (tmp_path / "sent140.md").read_text().splitlines() if line.startswith("| 3 "))
    cells = row.split(" | ")
    assert cells[1:3] == ["FedAvg", "74.29 ± 0.12"] and cells[4] == "75.18 ± 0.50" and 0 <= float(cells[3]) <= 100
    kept = json.loads((tmp_path / "runs" / "sent140-30-FedAvg.json").read_text())
    assert [point["a"] for point in kept["points"]] == [0, 0.5]
    monkeypatch.setattr(noise, "MEASURED", 2)
    command = ["upcycled", "figure8", "--methods", "FedProx", "--rounds", "4", *few_tweets]
    monkeypatch.setattr(sys, "argv", command)
    assert upcycled.main() == 0
    text = (tmp_path / "figure8.md").read_text()
    assert "| output | FedProx | " in text and "| objective | FedProx | " in text
    assert (tmp_path / "figure8.png").stat().st_size > 10_000
    kept = json.loads((tmp_path / "runs" / "sent140-output-FedProx-upcycled.json").read_text())
    assert [point["sigma / tau"] for point in kept["points"]] == pytest.approx([0.02])
    monkeypatch.setattr(tweets, "kept", lambda *_: None)  # nothing is there
    assert upcycled.main() == 1


def test_noise_on_tweets_is_that_of_the_appendix() -> None:
    """sigma 0.27 and 0.2, alpha 15 and 30."""
    output, objective = tweets.NOISE["output"], tweets.NOISE["objective"]
    at = [noise.at(output, "FedAvg", {"lr": 1.0, **output.printed, output.level: output.printed[output.level] * share})
          for share in (1.0, output.share)]  # fmt: skip
    assert [one.sigma for one in at] == pytest.approx([0.27, 0.2])
    assert (objective.printed["alpha"], objective.printed["alpha"] * objective.share) == (15, 30)


def test_file_for_emnist_has_each_method_and_its_upcycled_form() -> None:
    spec = comparison.read([Path(upcycled.__file__).parent / "femnist.toml"])
    spec.check()
    assert [method.name.removeprefix("Upcycled-") for method in spec.methods] == [
        name for name in ("FedAvg", "FedProx", "SCAFFOLD", "FedDyn") for _ in range(2)
    ]
    assert {method.run.stragglers for method in spec.methods} == {0.9}
