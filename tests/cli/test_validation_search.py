"""Hyper-parameters proposed by Optuna: chosen on validation data, and reproducible."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import hold_out
from fedrax.errors import FedraxError
from fedrax.experiments import comparison, experiment, jobs
from fedrax.experiments.run_comparison import compare
from fedrax.experiments.search.grid import SearchRange, range_of
from fedrax.report.search_plots import warnings
from fedrax.simulation import simulate
from fedrax.tuning.optuna_study import OptunaStudy
from fedrax.tuning.selection import SearchResult, Trial
from tests.cli.conftest import TINY, Outcome

FILE = 'seeds = [3]\nsearch = { trials = 6 }\ngrid = { algorithm.local.lr = "0.001..1e30:log" }\n' + TINY.replace(
    "steps = 2", "steps = 2, weight_decay = 1.0"
).replace("rounds = 4", "rounds = 1")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "s.toml"
    path.write_text(FILE)
    return path


@pytest.mark.slow
def test_repeated_search_proposes_the_same_trials(
    fedrax: Callable[..., Outcome], file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores equal those of separate simulations on the held-out rows; an interrupted search continues identically."""
    monkeypatch.setattr("fedrax.experiments.search.trials.should_vectorize", lambda *_: False)
    printed = fedrax("compare", file, "--out", "c")
    assert printed.status == 0, printed.err
    assert "up to 6 settings of each method that Optuna proposed" in printed.out
    found = json.loads((tmp_path / "c/comparison.json").read_text())["search"]
    trials = found["methods"]["fedavg"]["trials"]
    assert found["trials"] == 6 and len(trials) == 6
    assert all(0.001 <= trial["point"]["algorithm.local.lr"] <= 1e30 for trial in trials)
    assert any(trial["value"] is None for trial in trials)  # a learning rate of 1e30 diverges
    sound = [trial for trial in trials if trial["value"] is not None]
    best = max(sound, key=lambda trial: trial["value"])
    assert found["methods"]["fedavg"]["best"] == best["point"]
    spec = comparison.read([file])
    _, task, federation = experiment.build(spec.methods[0])
    at = spec.experiment_at(spec.methods[0], best["point"])
    by_hand = simulate(at.algorithm, task, hold_out(federation, 0.2), at.run, seed=3).metric("test_accuracy")[-1][1]
    assert best["value"] == pytest.approx(by_hand, abs=0.004)
    runs, run = [], jobs.simulate

    def counting_simulate(*args: object, **options: object) -> object:
        runs.append(options["directory"])
        if len(runs) == 4:
            raise KeyboardInterrupt
        return run(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs, "simulate", counting_simulate)
    with pytest.raises(KeyboardInterrupt):
        compare(file, directory=tmp_path / "d")
    again = compare(file, directory=tmp_path / "d").search_results["fedavg"].trials
    assert len(runs) == 1 + 6 + 1  # the interrupted trial is repeated; six trials, and the best one on all rows
    assert [dict(trial.point) for trial in again] == [trial["point"] for trial in trials]
    del runs[:]
    assert compare(file, directory=tmp_path / "d").search_results["fedavg"].trials == again and not runs
    assert (tmp_path / "c/grid.png").read_bytes().startswith(b"\x89PNG")


def study(file: Path, grid: str, trials: int, seed: int = 0) -> OptunaStudy:
    file.write_text(f"grid = {{ {grid} }}\n{TINY}")
    axes = comparison.read([file]).grids["fedavg"].axes
    return OptunaStudy(axes, trials, seed, lower_is_better=True)


def propose(file: Path, seed: int) -> SearchResult:
    """Forty proposals, judged by a function with its minimum at lr 0.03, 3 rounds and no weight decay."""
    grid = 'algorithm.local.lr = "1e-5..10:log", run.rounds = "1..9", algorithm.local.weight_decay = ["none", 0.5]'
    one = study(file, grid, 40, seed)
    while not one.done:
        points = one.ask()
        assert len(points) == 5
        lost = [point["algorithm.local.lr"] > 5 for point in points]
        away = [
            math.log(p["algorithm.local.lr"] / 0.03) ** 2
            + (p["run.rounds"] - 3) ** 2
            + (p["algorithm.local.weight_decay"] != "none")
            for p in points
        ]
        one.tell([Trial(p, None if end else value, 1) for p, value, end in zip(points, away, lost, strict=True)])
    return one.result("loss")


def test_proposals_improve_and_depend_on_the_seed_only(file: Path) -> None:
    choice = propose(file, 1)
    assert choice.trials == propose(file, 1).trials != propose(file, 2).trials
    points = [trial.point for trial in choice.trials]
    assert all(1e-5 <= point["algorithm.local.lr"] <= 10 for point in points)
    assert all(type(point["run.rounds"]) is int and 1 <= point["run.rounds"] <= 9 for point in points)
    values = [trial.value for trial in choice.trials if trial.value is not None]
    assert choice.best.value == min(values) < 3 and np.median(values[-10:]) < np.median(values[:10]) / 2
    assert choice.at_ends() == [] and choice.best.point["algorithm.local.weight_decay"] == "none"
    at_end = SearchResult("loss", True, (Trial({"lr": 0.97}, 1.0, 1),), {"lr": SearchRange(0.1, 1)})
    assert at_end.at_ends() == ["lr"] and "near the largest of its range" in warnings({"m": at_end})[0]
    (both,) = warnings({"m": at_end, "n": at_end})
    assert both.startswith("warning: m, n: the best lr, 0.97, is near")


def test_small_grid_is_tried_completely(file: Path) -> None:
    grid = 'algorithm.local.lr = [0.01, 0.3, 1.0], algorithm.local.weight_decay = ["none", 0.5]'
    for trials, sampled in ((5, True), (6, False)):
        file.write_text(f"search = {{ trials = {trials} }}\ngrid = {{ {grid} }}\n{TINY}")
        spec = comparison.read([file])
        assert spec.is_sampled("fedavg") is sampled and len(spec.search_runs("fedavg")) == (0 if sampled else 6)


def test_ranges_are_parsed() -> None:
    assert range_of("1..10", "x") == SearchRange(1, 10) and SearchRange(1, 10).is_integer
    assert range_of("1e-3..1:log", "x") == SearchRange(0.001, 1, True) and not SearchRange(0.001, 1).is_integer
    assert range_of("-1..0.5", "x") == SearchRange(-1, 0.5)
    assert range_of("../other.py:Thing", "x") is None and range_of("adam", "x") is None
    assert SearchRange(0.01, 1, True).position(0.1) == pytest.approx(0.5) and SearchRange(0, 4).position(1) == 0.25
    for text in ("1..1", "2..1", "0..1e999", "1..1" + "0" * 400):
        with pytest.raises(FedraxError, match="is empty or not finite"):
            range_of(text, "x")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--grid", "algorithm.local.lr=0.1..1"], "is a range, 0.1..1: set the number"),
        (["--grid", "algorithm.local.lr=0..1:log", "--trials", 3], "must begin above 0"),
        (["--grid", "algorithm.local.lr=1..0.1", "--trials", 3], "is empty or not finite"),
        (["--grid", "algorithm.local.lr=-1..0.1", "--trials", 3], "lr must be greater than 0"),
        (["--grid", "algorithm.local.lrr=0.1..1", "--trials", 3], "did you mean 'lr'"),
        (["--grid", "algorithm.local.steps=0.5..4", "--trials", 3], "must be a whole number|must be"),
        (["--grid", "algorithm.local.lr=0.1..1", "--trials", 0], "trials must be"),
        (["--grid", "algorithm.local.lr=0.1..1", "--trials", 2000], "too many"),
        (["--trials", 3], "no grid to search"),
    ],
)
def test_malformed_searches_are_rejected(
    fedrax: Callable[..., Outcome], tmp_path: Path, flags: list, words: str
) -> None:
    (tmp_path / "t.toml").write_text(TINY)
    printed = fedrax("compare", "t.toml", *flags, "--out", "c", "--quiet")
    assert printed.status == 2 and len(printed.err.splitlines()) == 1 and re.search(words, printed.err), printed.err
    assert not (tmp_path / "c").exists()


def test_missing_optuna_is_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FedraxError, match="pip install optuna"):
        compare(file, directory=tmp_path / "c")
    assert not (tmp_path / "c").exists()


@pytest.mark.slow
def test_different_search_of_the_same_name_has_another_directory(
    fedrax: Callable[..., Outcome], file: Path, tmp_path: Path
) -> None:
    """Optuna's proposals are not known in advance: trials are identified by all settings that are not searched."""
    file.write_text(FILE.replace("trials = 6", "trials = 2").replace("1e30", "1"))
    assert fedrax("compare", file).status == 0
    assert fedrax("compare", file).status == 0
    places = lambda: sorted(path.name for path in (tmp_path / "runs").iterdir())  # noqa: E731
    assert len(places()) == 1
    (first,) = places()
    before = (tmp_path / "runs" / first / "comparison.json").read_bytes()
    file.write_text(file.read_text().replace("rounds = 1", "rounds = 2"))
    rejected = fedrax("compare", file, "--out", f"runs/{first}")
    assert rejected.status == 2 and "holds a run with other settings (run.rounds 1 there, 2 here)" in rejected.err
    assert fedrax("compare", file).status == 0
    assert places() == [first, f"{first}-2"]
    assert (tmp_path / "runs" / first / "comparison.json").read_bytes() == before
