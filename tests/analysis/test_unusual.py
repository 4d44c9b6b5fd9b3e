"""Diagnoses of experiments that are not the usual ones: nothing is lost, nothing is left out in silence."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import Federation, FedraxError, LocalSGD, Settings, Task, classification, cli, simulate
from fedrax.analysis import advice, diagnose, gradient_dissimilarity, rendering, trials, try_methods
from fedrax.analysis.advice import study
from fedrax.data import Shards, load
from fedrax.models import LeNet5, Linear, Logistic, Model
from fedrax.optim import Optax

DIGITS = load("digits")
FEDERATION = Federation.from_dataset(DIGITS, Shards(10, 2), seed=0)
TASK = classification(Logistic().build(DIGITS.train.x.shape[1:], 10))
RUN: dict[str, Any] = {"rounds": 4, "cohort_size": 3}
FLAGS = ["diagnose", "--data", "digits", "--partition", "shards", "--partition.clients", "10", "--model", "logistic"]
FLAGS += ["--picture", "None", "--run.rounds", "4", "--run.cohort-size", "3"]


def alike(x: Any, y: Any, clients: int) -> Federation:
    """Clients of the same samples."""
    times, offsets = (clients, *[1] * (np.ndim(x) - 1)), np.arange(clients + 1) * len(y)
    return Federation.from_arrays(np.tile(x, times), np.tile(y, clients), offsets=offsets, shuffle=False)


def test_a_step_size_that_comes_to_zero():
    """The last point has the last round's local steps: the run has no round after it."""
    local = LocalSGD(lr=0.1, steps=2, batch_size=10, schedule=optax.cosine_decay_schedule(1.0, decay_steps=4))
    found = diagnose(TASK, FEDERATION, Settings(**RUN), local)
    assert [point.round for point in found.points] == [0, 1, 2, 4]
    assert found.points[-1].update > 0 and np.isfinite(found.drift)


def test_a_client_that_is_like_the_others_does_not_drift():
    """Batches of five samples lead clients of the same samples apart by chance, which is noise and no drift."""
    federation = alike(DIGITS.train.x[:100], DIGITS.train.y[:100], 20)
    local = LocalSGD(lr=0.1, steps=10, batch_size=5)
    found = diagnose(TASK, federation, Settings(**RUN), local)
    assert found.apart < 1e-5 and found.noise > 1
    assert found.drift < 0.3
    far = diagnose(TASK, FEDERATION, Settings(**RUN), local)
    assert far.drift > 0.8


def test_drift_is_that_of_updates_in_the_mean():
    """f_i = |x - b|^2 / 2 with b of mean m_i: a walk ends at m_i (1 - (1 - eta)^T) in the mean, from zero."""
    rng = np.random.default_rng(0)
    centers = np.array([[0.5, 0.0], [0.5, 1.0], [0.5, -1.0], [0.5, 0.0]])
    numbers = np.concatenate([rng.permutation(np.linspace(-4, 4, 200))[:, None] + c for c in centers])
    federation = Federation.from_arrays(numbers.astype(np.float32), np.zeros(800, np.float32), np.arange(800) // 200)

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return 0.5 * jnp.sum((params["x"] - batch.x) ** 2, axis=1)

    task = Task(lambda key: {"x": jnp.zeros(2)}, losses)
    local, shrink = LocalSGD(lr=0.1, steps=5, batch_size=2), 1 - 0.9**5
    points = [
        diagnose(task, federation, Settings(rounds=1, cohort_size=4, seed=seed), local).points[0] for seed in range(12)
    ]
    assert np.mean([p.drift**2 for p in points]) == pytest.approx(0.5 * shrink**2, rel=0.5)
    assert np.mean([p.update**2 for p in points]) == pytest.approx(0.25 * shrink**2, rel=0.5)


def test_dropout_does_not_set_clients_apart():
    x, y = np.random.default_rng(0).normal(size=(20, 16, 16)).astype(np.float32), np.arange(20) % 10
    federation, task = alike(x, y, 8), classification(LeNet5(norm="none").build((16, 16), 10))
    assert gradient_dissimilarity(task, federation) == pytest.approx(1, abs=1e-4)


def test_a_point_without_a_gradient_is_left_out():
    """Once every margin is wide enough a hinge loss is flat: the first points are measured all the same."""

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return jax.nn.relu(1 - batch.y * (batch.x @ params["w"]))

    task = Task(lambda key: {"w": jnp.zeros(2)}, losses)
    x = np.array([[2.0, 0.0], [-2.0, 0.0], [2.0, 1.0], [-2.0, 1.0]], np.float32)
    federation = Federation.from_arrays(x, np.sign(x[:, 0]), np.array([0, 0, 1, 1]))
    found = diagnose(task, federation, Settings(rounds=8, cohort_size=2), LocalSGD(lr=1.0, steps=1, batch_size="full"))
    assert [point.round for point in found.points] == [0] and found.left_out == (1, 2, 4, 8)
    assert "left out       the mean gradient is zero, but for rounding, after rounds 1, 2, 4, 8" in rendering.lines(
        found
    )
    assert np.isfinite(json.loads(json.dumps(found.to_dict()))["drift"])
    flat = Task(lambda key: {"w": jnp.ones(2)}, lambda params, batch, key: 0 * batch.x @ params["w"])
    with pytest.raises(FedraxError, match="zero all along the run"):
        diagnose(flat, federation, Settings(rounds=1, cohort_size=2), LocalSGD(lr=1.0, steps=1, batch_size="full"))


def parabolas(centers: Any, start: float, noise: float = 0.0) -> tuple[Task, Federation]:
    """f_i = (x - c_i)^2 / 2, of samples whose c are c_i and ``noise`` to either side."""
    numbers = np.array([[c + side * noise] for c in centers for side in (-1, 1)], np.float32)
    federation = Federation.from_arrays(numbers, np.zeros(len(numbers), np.float32), np.arange(len(numbers)) // 2)
    loss = lambda params, batch, key: 0.5 * jnp.sum((params["x"] - batch.x) ** 2, axis=1)  # noqa: E731
    return Task(lambda key: {"x": jnp.full(1, start)}, loss), federation


def test_gradients_that_cancel_but_for_rounding_are_zero():
    """At (c_1 + c_2 + c_3) / 3 the mean gradient is what rounding leaves: no B of a million is made of it."""
    task, federation = parabolas((0.1, 0.7, -3.3), 5.0)
    local = LocalSGD(lr=0.5, steps=1, batch_size="full")
    found = diagnose(task, federation, Settings(rounds=64, cohort_size=3), local)
    assert {32, 64} <= set(found.left_out) and found.dissimilarity < 1e6


def test_an_update_that_is_lost_in_noise_is_no_small_drift(monkeypatch: pytest.MonkeyPatch):
    """Batches of one sample lead each client 100 to either side, and the mean update is 1e-3."""
    task, federation = parabolas((1.0, -1.0), 1e-3, noise=100.0)
    local, made = LocalSGD(lr=0.1, steps=1, batch_size=1), []
    for seed in range(6):
        made.append(diagnose(task, federation, Settings(rounds=1, cohort_size=2, seed=seed), local))
    lost = [one for one in made if any(point.update == 0 < point.drift for point in one.points)]
    assert lost and all(not np.isfinite(one.drift) for one in lost)
    assert json.loads(json.dumps(lost[0].to_dict(), allow_nan=False))["drift"] is None
    assert "lost in the noise of batches" in "".join(rendering.lines(lost[0]))
    assert "nearest to this one's" not in "".join(advice.lines(lost[0])) and advice.lines(lost[0])
    monkeypatch.setattr(advice, "study", lambda: study() | {"rules": [study()["rules"][0] | {"feature": "drift"}]})
    assert advice.advise(lost[0]) == []


def test_one_client_has_nothing_to_correct():
    task, federation = parabolas((3.0,), 8.0)
    found = diagnose(task, federation, Settings(rounds=1, cohort_size=1), LocalSGD(lr=0.1, batch_size="full"))
    assert any(line.startswith("one client ") for line in advice.lines(found))
    labels = [line.get_label() for line in rendering.draw(found).axes[0].lines]
    assert "clients from the mean (zero)" in labels and "mean gradient" in labels


def test_constants_that_one_gradient_cannot_tell_apart():
    task, federation = parabolas((3.0, -3.0), 8.0)
    local = LocalSGD(lr=1e-4, steps=1, batch_size="full")
    told = "".join(rendering.lines(diagnose(task, federation, Settings(rounds=4, cohort_size=2), local)))
    assert "too much alike to tell one from the other" in told and "too much alike to say how curvature" in told


def test_curvature_that_grows_a_little_is_not_said_to_be_constant():
    """f = x^2 / 2 + x^3 / 30 for x from 4 down: f'' grows by a third of its largest."""
    federation = Federation.from_arrays(np.zeros((2, 1), np.float32), np.zeros(2, np.float32), np.arange(2))
    loss = lambda params, batch, key: (params["x"] ** 2 / 2 + params["x"] ** 3 / 30)[0] + 0 * batch.y  # noqa: E731
    task = Task(lambda key: {"x": jnp.full(1, 4.0)}, loss)
    local = LocalSGD(lr=0.2, steps=1, batch_size="full")
    found = diagnose(task, federation, Settings(rounds=16, cohort_size=2), local)
    assert 0.1 < found.growth < 0.5
    assert "of the largest curvature comes with the gradient" in "".join(rendering.lines(found))


def test_in_double_precision_where_the_run_is():
    """Gradients of 1e8 that differ by one: float32 has no digit left for it."""

    def losses(params: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(lambda row: (1e8 + row[0].astype(params["x"].dtype)) * params["x"].sum())(batch.x)

    task = Task(lambda key: {"x": jnp.zeros(1)}, losses)
    federation = Federation.from_arrays(np.array([[0.0], [1.0]], np.float32), np.zeros(2, np.float32), np.arange(2))
    settings = Settings(rounds=1, cohort_size=2, dtype="float64")
    found = diagnose(task, federation, settings, LocalSGD(lr=1e-9, steps=1, batch_size="full"))
    assert found.points[0].apart == pytest.approx(0.5, rel=1e-6)


def test_parameters_of_a_short_type_are_measured_as_the_run_holds_them():
    def losses(params: Any, batch: Any, key: Any) -> Any:
        return 0.5 * (300 * params["x"].astype(jnp.float32) - batch.x[:, 0]) ** 2

    task = Task(lambda key: {"x": jnp.ones((), jnp.float16)}, losses)
    federation = Federation.from_arrays(np.array([[0.0], [30.0]], np.float32), np.zeros(2, np.float32), np.arange(2))
    local = LocalSGD(lr=1e-7, steps=1, batch_size="full")
    for dtype in ("float32", "float64"):
        found = diagnose(task, federation, Settings(rounds=1, cohort_size=2, dtype=dtype), local)
        assert found.points[0].apart == pytest.approx(300 * 15, rel=1e-6)
    assert gradient_dissimilarity(task, federation) == pytest.approx(1 + (15 / 285) ** 2, rel=1e-5)


def test_local_optimizers():
    carried = LocalSGD(lr=0.01, steps=3, optimizer=Optax.of(optax.adam), carry=True)
    assert diagnose(TASK, FEDERATION, Settings(**RUN), carried).drift > 0
    finished = LocalSGD(steps=3, optimizer=Optax(optax.adam(1e-3)))
    assert diagnose(TASK, FEDERATION, Settings(**RUN), finished).drift > 0
    with pytest.raises(FedraxError, match="a finished local optimizer has its own step size"):
        try_methods(TASK, FEDERATION, Settings(**RUN), finished, methods=("FedAvg",))


def test_a_start_that_looks_at_its_key():
    def init(key: Any) -> Any:
        rng = np.random.default_rng(int(jax.random.randint(key, (), 0, 9999)))
        return {"w": 0.01 * rng.normal(size=(64, 10)).astype(np.float32)}

    task = classification(Model(init, lambda params, x, key=None: x.reshape(len(x), -1) @ params["w"]))
    assert trials.operations(task, FEDERATION, Settings(**RUN), LocalSGD(), ("FedAvg",)) > 0
    assert try_methods(task, FEDERATION, Settings(**RUN), LocalSGD(steps=1), methods=("FedAvg",)).tried
    assert diagnose(task, FEDERATION, Settings(**RUN), LocalSGD(steps=1)).points


def test_parameters_are_kept_at_the_points_alone(monkeypatch: pytest.MonkeyPatch):
    """Those after every round of a long run of a large model would not fit into memory."""
    kept = []

    def seen(*arguments: Any, **options: Any) -> Any:
        result = simulate(*arguments, **options)
        kept.append(len(result.trajectory))
        return result

    monkeypatch.setattr(diagnose, "simulate", seen)
    found = diagnose(TASK, FEDERATION, Settings(rounds=100, cohort_size=1), LocalSGD(lr=0.01, steps=1))
    assert [point.round for point in found.points] == [0, 1, 2, 4, 8, 16, 32, 64, 100] and kept == [8]


def test_what_trials_take():
    """Batches drawn with replacement are as many as shuffled ones; evaluations of much data count."""
    took = [trials.operations(TASK, FEDERATION, Settings(**RUN), LocalSGD(order=o), ("FedAvg",)) for o in
            ("shuffle", "replacement")]  # fmt: skip
    assert took[1] == pytest.approx(took[0], rel=0.05)
    x = np.zeros((200_000, 20), np.float32)
    large = Federation.from_arrays(x, np.arange(200_000) % 2, np.arange(200_000) % 20)
    task = classification(Linear().build((20,), 2))
    settings = Settings(rounds=20, cohort_size=2)
    found = trials.operations(task, large, settings, LocalSGD(steps=1), ("FedAvg",))
    assert found > 11 * trials.SEEDS * 20 * 40_000 * 2 * 20 * 2


def test_too_few_rows_to_choose_by():
    owner = np.concatenate([np.repeat(np.arange(20), 4), [20] * 5])
    x = np.random.default_rng(0).normal(size=(85, 3)).astype(np.float32)
    federation = Federation.from_arrays(x, (x[:, 0] > 0).astype(int), owner)
    with pytest.raises(FedraxError, match="clients hold out 1 row in all, too few to choose a method by"):
        try_methods(classification(Linear().build((3,), 2)), federation, Settings(**RUN), methods=("FedAvg",))


def said(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert cli.main([*FLAGS, *flags]) == 0
    return capsys.readouterr().out


def test_methods_are_tried_where_the_experiments_own_step_size_diverges(capsys: pytest.CaptureFixture[str]):
    shown = said(capsys, "--algorithm.local.lr", "1e30", "--tune", "always")
    assert shown.startswith("not measured   ") and "\ntry first" in shown and "of the best tried" not in shown
    assert cli.main([*FLAGS, "--algorithm.local.lr", "1e30", "--tune", "never"]) == 2
    told = json.loads(said(capsys, "--algorithm.local.lr", "1e30", "--tune", "always", "--json"))
    assert "not finite" in told["not_measured"] or "diverge" in told["not_measured"]


def test_what_is_left_aside_is_said(tmp_path, capsys: pytest.CaptureFixture[str]):
    private = ["--algorithm", "outputperturbation", "--run.epsilon-budget", "100", "--tune", "never"]
    assert "set aside      of outputperturbation local steps alone are taken" in said(capsys, *private)
    own = tmp_path / "own.py"
    own.write_text(
        "from fedrax import FedAvg, hyperparameters\n\n@hyperparameters\nclass Mine(FedAvg):\n    local_steps = None\n"
    )
    shown = said(capsys, "--algorithm", f"{own}:Mine", "--tune", "never")
    assert "set aside      of Mine nothing is taken, for it has no local steps: " in shown
    drawn = ["--run.participation", "weighted_by_samples", "--run.stragglers", "0.5", "--tune", "never"]
    shown = said(capsys, *drawn)
    assert "set aside      who takes part: " in shown and "set aside      stragglers: " in shown
    trace = tmp_path / "trace.csv"
    trace.write_text("client,seconds\n" + "".join(f"{i},{1 + i}\n" for i in range(10)))
    flags = ["--algorithm", "fedbuff", "--run.participation", "asynchronous", "--run.participation.trace", str(trace)]
    shown = said(capsys, *flags, "--run.participation.concurrency", "5", "--tune", "never")
    assert "clients that work at their own pace: here each round waits" in shown
    assert "set aside" not in said(capsys, "--tune", "never")
    told = json.loads(said(capsys, *private, "--json"))
    assert told["trials"] is None and "--tune always" in told["not_tried"] and len(told["set_aside"]) == 1


def test_what_of_the_file_is_for_comparisons_is_said(tmp_path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "many.toml"
    file.write_text(
        'seeds = [0, 1]\ndata = {name = "digits"}\npartition = {name = "shards", clients = 10}\n'
        'model = {name = "logistic"}\n[run]\nrounds = 2\ncohort_size = 3\n[[compare]]\nname = "FedAvg"\n'
    )
    assert cli.main(["diagnose", str(file), "--picture", "None", "--tune", "never"]) == 0
    assert "in the file are for fedrax compare; this is one run, with seed 0" in capsys.readouterr().err
