"""Methods tried on a task: scores are those of runs by hand; what diverges or is refused is said, and the cost."""

import dataclasses
import json

import numpy as np
import pytest

from fedrax import (
    FedAvg,
    Federation,
    FedraxError,
    LocalSGD,
    Scaffold,
    Settings,
    classification,
    cli,
    regression,
    simulate,
)
from fedrax.analysis import advice, shortlist, trials, try_methods
from fedrax.data import Shards, hold_out, load
from fedrax.models import MLP, Linear, Logistic

LOCAL = LocalSGD(steps=3, batch_size=10)
RATES = (0.02, 0.2, 1e38)
SETTINGS = Settings(rounds=8, cohort_size=3, seed=4)


@pytest.fixture(autouse=True)
def few_rates(monkeypatch: pytest.MonkeyPatch):
    for module in (shortlist, trials):
        monkeypatch.setattr(module, "RATES", RATES)


@pytest.fixture(scope="module")
def digits():
    dataset = load("digits")
    federation = Federation.from_dataset(dataset, Shards(10, 2), seed=0)
    return classification(Logistic().build(dataset.train.x.shape[1:], 10)), federation


def test_scores_are_those_of_runs_by_hand(digits):
    found = try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg", "SCAFFOLD"))
    assert found.metric == "accuracy" and found.rounds == 8 and not found.refused
    held = hold_out(digits[1], 0.2)
    for made, name in ((FedAvg, "FedAvg"), (Scaffold, "SCAFFOLD")):
        by_rate = {}
        for rate in RATES[:2]:
            algorithm = made(local=dataclasses.replace(LOCAL, lr=rate))
            runs = [
                simulate(algorithm, digits[0], held, rounds=8, cohort_size=3, seed=seed, eval_every=1)
                for seed in (4, 5, 6)
            ]
            by_rate[rate] = [np.mean([v for _, v in run.metric("test_accuracy")][-2:]) for run in runs]
        best = max(by_rate, key=lambda rate: np.mean(by_rate[rate]))
        (trial,) = (trial for trial in found.tried if trial.method == name)
        assert trial.point == {"local.lr": best} and trial.algorithm.local_steps.lr == best
        assert trial.score == pytest.approx(np.mean(by_rate[best]), abs=1e-6)
        assert trial.spread == pytest.approx(np.std(by_rate[best]), abs=1e-6)
        assert trial.at_end == (best == RATES[0])
    best = found.tried[0].score
    by_rows = f"by about {100 * np.sqrt(best * (1 - best) / found.rows):.1f})"
    assert by_rows in advice.lines(None, found)[0]
    assert [trial.score for trial in found.tried] == sorted((trial.score for trial in found.tried), reverse=True)


def test_a_loss_is_best_where_it_is_least():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x @ rng.normal(size=4)).astype(np.float32)
    federation = Federation.from_arrays(x, y, np.arange(120) % 6)
    task = regression(Linear().build((4,), 1))
    found = try_methods(task, federation, SETTINGS, LOCAL, methods=("FedAvg", "FedCM", "GradMA-S"))
    scores = [trial.score for trial in found.tried]
    assert found.metric == "loss" and scores == sorted(scores)
    assert found.tried[0].point["local.lr"] == 0.2
    told = advice._tried(found)[0]
    assert "loss on 24 rows" in told and f"{scores[0]:.4f}" in told


def test_what_cannot_be_tried_is_said(digits):
    by_samples = dataclasses.replace(SETTINGS, weights="samples")
    found = try_methods(*digits, by_samples, LOCAL, methods=("FedAvg", "SCAFFOLD"))
    assert [trial.method for trial in found.tried] == ["FedAvg"]
    assert "(not all of FedAvg, SCAFFOLD, FedDyn, GradMA, of which" in advice.advise(None, found)[0].reason
    assert len(found.refused) == 1 and found.refused[0].startswith("SCAFFOLD: ") and "weights" in found.refused[0]
    with pytest.raises(FedraxError, match=r"no method can be tried: SCAFFOLD: .*weights"):
        try_methods(*digits, by_samples, LOCAL, methods=("SCAFFOLD",))
    with pytest.raises(FedraxError, match="unknown method to try: 'scaffold'; did you mean 'SCAFFOLD'"):
        try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg", "scaffold"))
    with pytest.raises(FedraxError, match="no method can be tried: none is named"):
        try_methods(*digits, SETTINGS, LOCAL, methods=())


def test_what_diverges_at_every_step_size_is_said(digits, monkeypatch: pytest.MonkeyPatch):
    for module in (shortlist, trials):
        monkeypatch.setattr(module, "RATES", (1e38, 2e38))
    with pytest.raises(FedraxError, match=r"FedAvg: diverges at every step size from 1e\+38 to 2e\+38"):
        try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg",))


def test_points_go_in_turn_where_models_of_all_clients_would_not_fit_side_by_side(digits, monkeypatch):
    names = ("SCAFFOLD", "GradMA-S")
    together = try_methods(*digits, SETTINGS, LOCAL, methods=names)
    monkeypatch.setattr(trials, "ROOM", 5 * 650 * 4)  # five models of 64 x 10 weights and 10 biases
    modes, swept = [], trials.sweep

    def seen(*arguments, mode, **options):
        modes.append(mode)
        return swept(*arguments, mode=mode, **options)

    monkeypatch.setattr(trials, "sweep", seen)
    in_turn = try_methods(*digits, SETTINGS, LOCAL, methods=names)
    assert modes == ["sequential", "sequential"]
    by_name = [{trial.method: trial for trial in found.tried} for found in (together, in_turn)]
    assert by_name[1]["SCAFFOLD"].score == pytest.approx(by_name[0]["SCAFFOLD"].score, abs=1e-6)
    assert [found["GradMA-S"].algorithm.memory for found in by_name] == [10, 5]


def test_operations_are_those_of_the_local_steps():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 50)).astype(np.float32), rng.integers(0, 4, 400)
    federation = Federation.from_arrays(x, y, np.arange(400) % 8)  # fifty rows each
    task = classification(MLP(hidden=(100,)).build((50,), 4))
    forward = 2 * 10 * (50 * 100 + 100 * 4)
    points = len(RATES) * (1 + 2)  # FedCM has two values of alpha
    for local, steps in ((LOCAL, 3), (LocalSGD(epochs=2, batch_size=10), 10)):
        found = trials.operations(task, federation, SETTINGS, local, ("FedAvg", "FedCM"))
        steps_alone = points * trials.SEEDS * 8 * 3 * steps * 3 * forward
        evaluations = points * trials.SEEDS * 8 * (80 / 10 * forward + trials.LEAST_EVALUATION)
        assert found == pytest.approx(steps_alone + evaluations)


FLAGS = ["diagnose", "--data", "digits", "--partition", "shards", "--partition.clients", "10"]
FLAGS += ["--model", "logistic", "--picture", "None"]
RUN = ["--run.rounds", "4", "--run.cohort-size", "3", "--algorithm.local.steps", "2"]


def test_the_command_tries_what_takes_little(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert cli.main([*FLAGS, *RUN, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    first, tried = said["advice"][0], said["trials"]["tried"]
    assert {trial["method"] for trial in tried} == set(advice.shortlist())
    assert "not all of" not in first["reason"]
    assert first["among"] == "methods tried" and first["method"] == tried[0]["method"]
    assert 0 <= first["close"] <= first["tasks"] and 0 <= first["close_new"] <= first["tasks_new"]
    monkeypatch.setattr(trials, "LITTLE", 1.0)
    assert cli.main([*FLAGS, *RUN]) == 0
    shown = capsys.readouterr().out
    assert "\ntried " not in shown and "\nnot tried" in shown and "--tune always" in shown
    assert cli.main([*FLAGS, *RUN, "--tune", "always"]) == 0
    shown = capsys.readouterr().out
    assert "\ntried " in shown and f"\ntry first      {first['method']}" in shown and "not tried" not in shown


def test_a_task_too_small_to_hold_rows_out_is_diagnosed_all_the_same(tmp_path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(6, 2)).astype(np.float32), "y": np.array([0, 1, 0, 1, 0, 1])}
    arrays = {f"{key}_{part}": array for key, array in rows.items() for part in ("train", "test")}
    np.savez(tmp_path / "few.npz", **arrays, client_train=np.arange(6) % 3)
    flags = ["--data", "npz", "--data.path", str(tmp_path / "few.npz"), "--partition", "natural", "--picture", "None"]
    run = ["--model", "logistic", "--run.cohort-size", "2", "--run.rounds", "2"]
    assert cli.main(["diagnose", *flags, *run]) == 0
    assert "not tried      clients hold out 0 rows in all, too few" in capsys.readouterr().out
    assert cli.main(["diagnose", *flags, *run, "--tune", "always"]) != 0
    shown = capsys.readouterr()
    assert "dissimilarity  B = " in shown.out and shown.err.endswith("too few to choose a method by\n")


def test_a_model_with_running_statistics_is_tried_and_not_measured(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(advice, "shortlist", lambda: ("FedAvg", "SCAFFOLD"))
    model = ["--model", "tinynn", "--model.norm", "batch"]
    flags = ["diagnose", "--data", "digits", "--partition", "shards", "--partition.clients", "10", *model, *RUN]
    assert cli.main([*flags, "--tune", "always"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("not measured   a model with running statistics")
    assert "\ntried " in shown and "\ntry first " in shown and "picture" not in shown
    assert cli.main([*flags, "--tune", "never", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["trials"] is None and said["advice"][0]["among"] == "any method" and "points" not in said
