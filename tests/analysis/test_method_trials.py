"""Trials of methods on a task: scores equal those of separate runs; divergence, rejections and cost are reported."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
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
from fedrax.analysis import diagnose, method_trials, rendering, try_methods
from fedrax.data import Shards, hold_out, load
from fedrax.experiments import Comparison, read_file
from fedrax.models import MLP, Linear, Logistic, Model
from fedrax.optim import Optax
from fedrax.participation import RoundRobin

LOCAL = LocalSGD(steps=3, batch_size=10)
RATES = (0.02, 0.2, 1e38)
SETTINGS = Settings(rounds=8, cohort_size=3, seed=4)

pytestmark = pytest.mark.usefixtures("shared_tasks")


@pytest.fixture(autouse=True)
def few_rates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(method_trials, "LEARNING_RATES", RATES)


@pytest.fixture
def few_methods(monkeypatch: pytest.MonkeyPatch):
    """Restrict the command to two methods, of which one has a hyper-parameter besides the learning rate."""
    monkeypatch.setattr(method_trials, "DEFAULT_METHODS", ("FedAvg", "FedDyn"))


@pytest.fixture(scope="module")
def digits():
    dataset = load("digits")
    federation = Federation.from_dataset(dataset, Shards(10, 2), seed=0)
    return classification(Logistic().build(dataset.train.x.shape[1:], 10)), federation


def test_scores_equal_those_of_separate_runs(digits):
    found = try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg", "SCAFFOLD"))
    assert found.metric == "accuracy" and found.rounds == 8 and not found.rejected
    held = hold_out(digits[1], 0.2)
    for made, name in ((FedAvg, "FedAvg"), (Scaffold, "SCAFFOLD")):
        scores_by_rate = {}
        for rate in RATES[:2]:
            algorithm = made(local=dataclasses.replace(LOCAL, lr=rate))
            runs = [
                simulate(algorithm, digits[0], held, rounds=8, cohort_size=3, seed=seed, eval_every=1)
                for seed in (4, 5, 6)
            ]
            scores_by_rate[rate] = [np.mean([v for _, v in run.metric("test_accuracy")][-2:]) for run in runs]
        best = max(scores_by_rate, key=lambda rate: np.mean(scores_by_rate[rate]))
        (trial,) = (trial for trial in found.tried if trial.method == name)
        assert trial.point == {"local.lr": best} and trial.algorithm.local_steps.lr == best
        assert trial.score == pytest.approx(np.mean(scores_by_rate[best]), abs=1e-6)
        assert trial.spread == pytest.approx(np.std(scores_by_rate[best]), abs=1e-6)
        assert trial.at_end == (best == RATES[0])
    best = found.tried[0].score
    by_rows = f"choice of rows about {100 * np.sqrt(best * (1 - best) / found.rows):.1f})"
    assert by_rows in rendering.trial_lines(found, "all clients")[0]
    assert [trial.score for trial in found.tried] == sorted((trial.score for trial in found.tried), reverse=True)


def test_the_smallest_loss_is_the_best_score():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 4)).astype(np.float32)
    y = (x @ rng.normal(size=4)).astype(np.float32)
    federation = Federation.from_arrays(x, y, np.arange(120) % 6)
    task = regression(Linear().build((4,), 1))
    found = try_methods(task, federation, SETTINGS, LOCAL, methods=("FedAvg", "FedCM", "GradMA-S"))
    scores = [trial.score for trial in found.tried]
    assert found.metric == "loss" and scores == sorted(scores)
    assert found.tried[0].point["local.lr"] == 0.2
    text = rendering.trial_lines(found, "all clients")[0]
    assert "loss on 24 held-out rows" in text and f"{scores[0]:.4f}" in text


def test_rejected_methods_are_reported(digits):
    by_samples = dataclasses.replace(SETTINGS, weights="samples")
    found = try_methods(*digits, by_samples, LOCAL, methods=("FedAvg", "SCAFFOLD"))
    assert [trial.method for trial in found.tried] == ["FedAvg"]
    assert len(found.rejected) == 1 and found.rejected[0].startswith("SCAFFOLD: ") and "weights" in found.rejected[0]
    with pytest.raises(FedraxError, match=r"no method can be tried: SCAFFOLD: .*weights"):
        try_methods(*digits, by_samples, LOCAL, methods=("SCAFFOLD",))
    with pytest.raises(FedraxError, match="unknown method to try: 'scafolt'; did you mean 'SCAFFOLD'"):
        try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg", "scafolt"))
    with pytest.raises(FedraxError, match="no method can be tried: methods is empty"):
        try_methods(*digits, SETTINGS, LOCAL, methods=())


def test_divergence_at_every_learning_rate_is_reported(digits, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(method_trials, "LEARNING_RATES", (1e38, 2e38))
    with pytest.raises(FedraxError, match=r"FedAvg: diverges at every learning rate from 1e\+38 to 2e\+38"):
        try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg",))


def test_points_run_sequentially_if_the_client_models_do_not_fit_into_memory(digits, monkeypatch):
    names = ("SCAFFOLD", "GradMA-S")
    together = try_methods(*digits, SETTINGS, LOCAL, methods=names)
    monkeypatch.setattr(method_trials, "CLIENT_MODELS", 5 * 650 * 4)  # five models of 64 x 10 weights and 10 biases
    modes, swept = [], method_trials.sweep

    def record_mode(*arguments, mode, **options):
        modes.append(mode)
        return swept(*arguments, mode=mode, **options)

    monkeypatch.setattr(method_trials, "sweep", record_mode)
    in_turn = try_methods(*digits, SETTINGS, LOCAL, methods=names)
    assert modes == ["sequential", "sequential"]
    by_name = [{trial.method: trial for trial in found.tried} for found in (together, in_turn)]
    assert by_name[1]["SCAFFOLD"].score == pytest.approx(by_name[0]["SCAFFOLD"].score, abs=1e-6)
    assert [found["GradMA-S"].algorithm.memory for found in by_name] == [10, 5]


def test_operations_are_those_of_local_steps_and_evaluations():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 50)).astype(np.float32), rng.integers(0, 4, 400)
    federation = Federation.from_arrays(x, y, np.arange(400) % 8)  # fifty rows for each client
    task = classification(MLP(hidden=(100,)).build((50,), 4))
    forward = 2 * 10 * (50 * 100 + 100 * 4)
    points = len(RATES) * (1 + 2)  # FedCM has two values of alpha
    for local, steps in ((LOCAL, 3), (LocalSGD(epochs=2, batch_size=10), 10)):
        found = method_trials.operations(task, federation, SETTINGS, local, ("FedAvg", "FedCM"))
        steps_alone = points * method_trials.SEEDS * 8 * 3 * steps * 3 * forward
        evaluations = points * method_trials.SEEDS * 8 * (80 / 10 * forward + method_trials.EVALUATION_OVERHEAD)
        assert found == pytest.approx(steps_alone + evaluations)


FLAGS = ["diagnose", "--data", "digits", "--partition", "shards", "--partition.clients", "10"]
FLAGS += ["--model", "logistic", "--picture", "None", "--comparison", "None"]
RUN = ["--run.rounds", "4", "--run.cohort-size", "3"]
SHORT = Settings(rounds=4, cohort_size=3)
DIGITS = load("digits")
FEDERATION = Federation.from_dataset(DIGITS, Shards(10, 2), seed=0)
TASK = classification(Logistic().build(DIGITS.train.x.shape[1:], 10))


@pytest.mark.usefixtures("few_methods")
def test_diagnose_command_tries_methods_within_its_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert cli.main([*FLAGS, *RUN, "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)["trials"]["tried"]
    assert {trial["method"] for trial in tried} == set(method_trials.DEFAULT_METHODS)
    monkeypatch.setattr(method_trials, "QUICK", 1.0)
    assert cli.main([*FLAGS, *RUN]) == 0
    shown = capsys.readouterr().out
    assert "\ntrials " not in shown and "\nnot tried" in shown and "--tune always" in shown
    assert cli.main([*FLAGS, *RUN, "--tune", "always"]) == 0
    shown = capsys.readouterr().out
    assert "\ntrials " in shown and f": {tried[0]['method']} " in shown and "not tried" not in shown


@pytest.mark.usefixtures("few_methods")
@pytest.mark.parametrize("tune", ["always", "never"])
def test_diagnose_command_writes_a_comparison_file(tune: str, tmp_path, capsys: pytest.CaptureFixture[str]):
    file, run = tmp_path / "next.toml", [*RUN, "--run.seed", "3", "--tune", tune]
    flags = [*FLAGS, "--comparison", str(file), *run]
    assert cli.main([*flags, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    comparison = read_file(file)
    assert isinstance(comparison, Comparison) and printed["comparison"] == str(file)
    assert comparison.seeds == (3, 4, 5) and comparison.run.rounds == 4
    names = (
        [trial["method"] for trial in printed["trials"]["tried"]]
        if printed["trials"]
        else method_trials.DEFAULT_METHODS
    )
    assert [method.name for method in comparison.methods] == list(names)
    axes = dict(comparison.grids["FedDyn"].axes)
    assert axes["algorithm.alpha"] == (0.01, 0.1, 1.0)
    assert set(axes["algorithm.local.lr"]) <= set(RATES)
    assert cli.main(flags) == 0
    assert f"{file} exists and is kept" in capsys.readouterr().out


def test_methods_of_trials_can_be_chosen(tmp_path, capsys: pytest.CaptureFixture[str]):
    """Of every method: the file that is written can be read, and its trials are those of the experiment."""
    names = tuple(method_trials.METHODS)
    file, epochs = tmp_path / "all.toml", [*FLAGS, *RUN, "--tune", "never"]
    flags = [*epochs, "--algorithm.local.steps", "5"]
    assert cli.main([*flags, "--comparison", str(file), "--methods", *names]) == 0
    comparison = read_file(file)
    assert isinstance(comparison, Comparison) and tuple(method.name for method in comparison.methods) == names
    axes = dict(comparison.grids["EPISODE"].axes)  # gamma in units of the experiment's learning rate, 0.1
    assert axes["algorithm.gamma"] == (0.03, 0.3)
    capsys.readouterr()
    other = tmp_path / "epochs.toml"
    assert cli.main([*epochs, "--comparison", str(other), "--methods", *names]) == 0
    assert "rejected       LoSAC: with fixed blocks" in capsys.readouterr().out
    assert "LoSAC" not in {method.name for method in read_file(other).methods}
    shown = printed(
        capsys, "--tune", "always", "--methods", "fedavg", "--algorithm.local.steps", "5", "--run.stragglers", "0.5"
    )
    assert "Uniform participation of 3 of 10 clients, 50 % stragglers, accuracy" in shown
    assert "tries others" not in shown and "better chance" not in shown
    assert cli.main([*flags, "--methods", "fedavg", "scafolt"]) == 2
    assert "unknown method to try: 'scafolt'; did you mean 'SCAFFOLD'" in capsys.readouterr().err


@pytest.mark.usefixtures("few_methods")
def test_default_methods_are_explained(capsys: pytest.CaptureFixture[str]):
    shown = printed(capsys, "--tune", "always")
    assert "methods        the baseline, and one method for each kind of drift correction" in shown
    assert "FedDyn 9" in shown and "FedAvg 3" in shown and "has a better chance to be the best" in shown
    assert "--methods tries others: FedAvgM, FedProx" in shown and "no stragglers" in shown


def test_trials_have_the_stragglers_and_cohorts_of_the_experiment(digits):
    """Their scores are those of runs with the same settings, and stragglers change them."""
    late = dataclasses.replace(SETTINGS, stragglers=0.9, participation=RoundRobin())
    found = try_methods(*digits, late, LOCAL, methods=("FedAvg",)).tried[0]
    held = hold_out(digits[1], 0.2)
    runs = [
        simulate(found.algorithm, digits[0], held, dataclasses.replace(late, seed=seed, eval_every=1))
        for seed in (4, 5, 6)
    ]
    score = np.mean([[value for _, value in run.metric("test_accuracy")][-2:] for run in runs])
    assert found.score == pytest.approx(score, abs=1e-6)
    assert found.score != try_methods(*digits, SETTINGS, LOCAL, methods=("FedAvg",)).tried[0].score


def test_paths_of_a_written_comparison_are_relative_to_it(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """As in a file that a user writes, so that it can be moved with its folder."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 3},{i % 7},{'ab'[i % 2]}" for i in range(60)]
    Path("home/own.csv").write_text("\n".join(["site,dose,ill", *rows]))
    Path("home/net.py").write_text(
        "from fedrax.models import Logistic\n\ndef small(input_shape, num_outputs):\n"
        "    return Logistic().build(input_shape, num_outputs)\n"
    )
    flags = ["--data", "csv", "--data.path", "home/own.csv", "--data.client", "site", "--data.label", "ill"]
    flags += ["--partition", "natural", "--model", "home/net.py:small", "--run.cohort-size", "2", "--run.rounds", "1"]
    written = ["--picture", "None", "--tune", "never", "--comparison", "home/next.toml"]
    assert cli.main(["diagnose", *flags, *written]) == 0
    text = Path("home/next.toml").read_text()
    assert 'path = "own.csv"' in text and 'name = "net.py:small"' in text and str(tmp_path) not in text
    Path("home").rename("moved")
    comparison = read_file("moved/next.toml")
    assert isinstance(comparison, Comparison) and comparison.methods[0].data.path == tmp_path / "moved" / "own.csv"


def test_task_too_small_for_held_out_rows_is_diagnosed_without_trials(tmp_path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(6, 2)).astype(np.float32), "y": np.array([0, 1, 0, 1, 0, 1])}
    arrays = {f"{key}_{part}": array for key, array in rows.items() for part in ("train", "test")}
    np.savez(tmp_path / "few.npz", **arrays, client_train=np.arange(6) % 3)
    flags = [
        "--data",
        "npz",
        "--data.path",
        str(tmp_path / "few.npz"),
        "--partition",
        "natural",
        "--picture",
        "None",
        "--comparison",
        "None",
    ]
    run = ["--model", "logistic", "--run.cohort-size", "2", "--run.rounds", "2"]
    assert cli.main(["diagnose", *flags, *run]) == 0
    assert "not tried      clients hold out 0 rows in all, too few" in capsys.readouterr().out
    assert cli.main(["diagnose", *flags, *run, "--tune", "always"]) != 0
    shown = capsys.readouterr()
    assert "dissimilarity  B = " in shown.out and shown.err.endswith("too few to choose a method by\n")


def test_model_with_running_statistics_is_tried_but_not_measured(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(method_trials, "DEFAULT_METHODS", ("FedAvg", "SCAFFOLD"))
    model = ["--model", "tinynn", "--model.norm", "batch"]
    flags = [
        "diagnose",
        "--data",
        "digits",
        "--partition",
        "shards",
        "--partition.clients",
        "10",
        *model,
        *RUN,
        "--comparison",
        "None",
    ]
    assert cli.main([*flags, "--tune", "always"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("not measured   models with running statistics")
    assert "\ntrials " in shown and "picture" not in shown
    assert cli.main([*flags, "--tune", "never", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["trials"] is None and "points" not in printed


def test_trials_replace_the_learning_rate_of_local_optimizers():
    carried = LocalSGD(lr=0.01, steps=3, optimizer=Optax.of(optax.adam), carry=True)
    assert diagnose(TASK, FEDERATION, SHORT, carried).drift > 0
    finished = LocalSGD(steps=3, optimizer=Optax(optax.adam(1e-3)))
    assert diagnose(TASK, FEDERATION, SHORT, finished).drift > 0
    with pytest.raises(FedraxError, match="initialized local optimizer, whose learning rate is fixed"):
        try_methods(TASK, FEDERATION, SHORT, finished, methods=("FedAvg",))


def test_init_that_branches_on_its_key_is_tried():
    def init(key: Any) -> Any:
        rng = np.random.default_rng(int(jax.random.randint(key, (), 0, 9999)))
        return {"w": 0.01 * rng.normal(size=(64, 10)).astype(np.float32)}

    task = classification(Model(init, lambda params, x, key=None: x.reshape(len(x), -1) @ params["w"]))
    assert method_trials.operations(task, FEDERATION, SHORT, LocalSGD(), ("FedAvg",)) > 0
    assert try_methods(task, FEDERATION, SHORT, LocalSGD(steps=1), methods=("FedAvg",)).tried
    assert diagnose(task, FEDERATION, SHORT, LocalSGD(steps=1)).points


def test_cost_of_trials():
    """Batches drawn with replacement are as many as shuffled ones, and evaluations of many samples count."""
    took = [method_trials.operations(TASK, FEDERATION, SHORT, LocalSGD(order=o), ("FedAvg",)) for o in
            ("shuffle", "replacement")]  # fmt: skip
    assert took[1] == pytest.approx(took[0], rel=0.05)
    x = np.zeros((200_000, 20), np.float32)
    large = Federation.from_arrays(x, np.arange(200_000) % 2, np.arange(200_000) % 20)
    task = classification(Linear().build((20,), 2))
    settings = Settings(rounds=20, cohort_size=2)
    found = method_trials.operations(task, large, settings, LocalSGD(steps=1), ("FedAvg",))
    assert found > 11 * method_trials.SEEDS * 20 * 40_000 * 2 * 20 * 2


def test_too_few_held_out_rows_are_rejected():
    owner = np.concatenate([np.repeat(np.arange(20), 4), [20] * 5])
    x = np.random.default_rng(0).normal(size=(85, 3)).astype(np.float32)
    federation = Federation.from_arrays(x, (x[:, 0] > 0).astype(int), owner)
    with pytest.raises(FedraxError, match="clients hold out 1 row in all, too few to choose a method by"):
        try_methods(classification(Linear().build((3,), 2)), federation, SHORT, methods=("FedAvg",))


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main([*FLAGS, *RUN, *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("few_methods")
def test_methods_are_tried_if_the_learning_rate_of_the_experiment_diverges(capsys: pytest.CaptureFixture[str]):
    shown = printed(capsys, "--algorithm.local.lr", "1e30", "--tune", "always")
    assert shown.startswith("not measured   ") and "\ntrials " in shown
    assert cli.main([*FLAGS, *RUN, "--algorithm.local.lr", "1e30", "--tune", "never"]) == 2
    text = json.loads(printed(capsys, "--algorithm.local.lr", "1e30", "--tune", "always", "--json"))
    assert "not finite" in text["not_measured"] or "diverge" in text["not_measured"]


def test_unmeasured_settings_are_reported(tmp_path, capsys: pytest.CaptureFixture[str]):
    private = ["--algorithm", "outputperturbation", "--run.epsilon-budget", "100", "--tune", "never"]
    assert "ignored        everything of outputperturbation but its local steps, including its privacy" in printed(
        capsys, *private
    )
    own = tmp_path / "own.py"
    own.write_text(
        "from fedrax import FedAvg, hyperparameters\n\n@hyperparameters\nclass Mine(FedAvg):\n    local_steps = None\n"
    )
    shown = printed(capsys, "--algorithm", f"{own}:Mine", "--tune", "never")
    assert "ignored        Mine has no local steps" in shown
    drawn = ["--run.participation", "weighted_by_samples", "--run.stragglers", "0.5", "--tune", "never"]
    shown = printed(capsys, *drawn)
    assert "ignored        participation: " in shown and "ignored        stragglers: " in shown
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},{1 + i}\n" for i in range(10)))
    flags = ["--algorithm", "fedbuff", "--run.participation", "asynchronous", "--run.participation.trace", str(trace)]
    shown = printed(capsys, *flags, "--run.participation.concurrency", "5", "--tune", "never")
    assert "asynchronous participation: here each round waits" in shown
    assert "ignored" not in printed(capsys, "--tune", "never")
    text = json.loads(printed(capsys, *private, "--json"))
    assert text["trials"] is None and "--tune always" in text["not_tried"] and len(text["ignored"]) == 1


def test_ignored_comparison_settings_are_reported(tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "many.toml"
    file.write_text(
        'seeds = [0, 1]\ndata = {name = "digits"}\npartition = {name = "shards", clients = 10}\n'
        'model = {name = "logistic"}\n[run]\nrounds = 2\ncohort_size = 3\n[[compare]]\nname = "FedAvg"\n'
    )
    assert cli.main(["diagnose", str(file), "--picture", "None", "--comparison", "None", "--tune", "never"]) == 0
    assert "in the file are for fedrax compare; this is one run, with seed 0" in capsys.readouterr().err
