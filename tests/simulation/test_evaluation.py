"""Losses and metrics of the global parameters against NumPy."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedrax
from fedrax import FedraxError
from fedrax.models import Linear
from fedrax.simulation import evaluation
from fedrax.simulation.evaluation import Evaluator
from fedrax.simulation.executors import execution_plan
from tests.simulation.problems import FEATURES, FEDERATION, LOCAL, TASK, make_federation, run


def numpy_metrics(params: Any, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cross entropy and accuracy of every sample."""
    w, b = (np.asarray(params["output"][name], np.float64) for name in ("weight", "bias"))
    logits = x.astype(np.float64) @ w.T + b
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]
    return losses, (logits.argmax(1) == y).astype(float)


def some_params() -> Any:
    """Parameters with which samples have different metrics."""
    return jax.tree.map(
        lambda a: jnp.asarray(np.random.default_rng(a.size).normal(size=a.shape), a.dtype), TASK.init(jax.random.key(0))
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch):
    """Seven rows per chunk."""
    monkeypatch.setattr(evaluation, "_rows_of_a_chunk", lambda: 7)


@pytest.mark.slow(keep=7)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("rows", [1, 6, 7, 8, 14, 23, 43])
def test_means_over_any_number_of_rows(rows: int, devices: int):
    rng = np.random.default_rng(rows)
    x, y = rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, 3, rows).astype(np.int32)
    params = some_params()
    result = Evaluator(TASK, execution_plan.make_mesh(devices), fedrax.contract.Batch(x, y))(params, "test")
    losses, hits = numpy_metrics(params, x, y)
    assert result.keys() == {"test_loss", "test_accuracy"}
    np.testing.assert_allclose(result["test_loss"], losses.mean(), rtol=1e-6)
    assert result["test_accuracy"] == pytest.approx(hits.mean())


@pytest.mark.parametrize("offsets", [[0, 5, 5, 16, 23], [0, 0, 5, 16, 16], [0, 4, 9, 12, 19]])
def test_metrics_per_client(offsets: list[int]):
    """Clients without test rows are excluded, and rows after those of the last client belong to no client."""
    x, y = FEDERATION.test
    params = some_params()
    evaluator = Evaluator(TASK, execution_plan.make_mesh(2), fedrax.contract.Batch(x, y), np.array(offsets))
    result = evaluator(params, "test", per_client=True)
    for name, values in zip(("loss", "accuracy"), numpy_metrics(params, x, y), strict=True):
        means = [values[a:b].mean() for a, b in pairwise(offsets) if b > a]
        worst = max(means) if name == "loss" else min(means)
        np.testing.assert_allclose(result[f"test_{name}"], values.mean(), rtol=1e-6)
        np.testing.assert_allclose(result[f"test_{name}_worst_client"], worst, rtol=1e-6)
        np.testing.assert_allclose(result[f"test_{name}_client_mean"], np.mean(means), rtol=1e-6)
        np.testing.assert_allclose(result[f"test_{name}_client_std"], np.std(means), rtol=1e-5)
        np.testing.assert_allclose(result[f"test_{name}_client_p10"], np.percentile(means, 10), rtol=1e-5)
        behind = [b - a for a, b in pairwise(offsets) if b > a]
        assert result[f"test_{name}_worst_client_samples"] == behind[means.index(worst)]
        number = [i for i, (a, b) in enumerate(pairwise(offsets)) if b > a][means.index(worst)]
        assert result[f"test_{name}_worst_client_number"] == number


def test_metrics_have_a_direction():
    """The worst client of an error has the largest one, and targets are reached from above."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    y, owner = (x @ np.ones(3) + np.repeat([0, 0, 0, 5], 10)).astype(np.float32), np.repeat(np.arange(4), 10)
    federation = fedrax.Federation.from_arrays(x, y, owner, test=(x, y), test_client_ids=owner)
    task = fedrax.regression(Linear().build((3,), 1))
    bias = lambda params, batch: (task.outputs(params, batch.x)[:, 0] - batch.y) ** 2  # type: ignore[misc]  # noqa: E731
    own = replace(task, metrics={"regret": bias, "score": lambda *a: -bias(*a)}, lower_is_better=("regret",))
    for kind, falling, rising in ((task, "mse", None), (own, "regret", "score")):
        result = run(task=kind, federation=federation, rounds=6, cohort_size=4, eval_every=1, per_client=True)
        last = result.events[-1]
        assert last[f"test_{falling}_worst_client"] > last[f"test_{falling}_client_mean"]
        assert last[f"test_{falling}_worst_client_samples"] == 10
        errors = [value for _, value in result.metric(f"test_{falling}")]
        reached = result.cost_to_target(f"test_{falling}", errors[3])
        assert errors[0] > errors[3] and reached is not None and reached["rounds"] == 4
        if rising is not None:
            assert last[f"test_{rising}_worst_client"] < last[f"test_{rising}_client_mean"]
            assert result.cost_to_target(f"test_{rising}", -errors[3])["rounds"] == 4  # type: ignore[index]


@pytest.mark.parametrize("rounds", [1, 2, 7, 20, 21, 30, 39, 100, 134, 2000])
def test_by_default_about_twenty_rounds_are_evaluated(rounds: int):
    """Always including the first and the last one, for runs of any length."""
    settings = fedrax.Settings(rounds=rounds)
    evaluated = [round for round in range(1, rounds + 1) if settings.evaluates(round)]
    assert evaluated[0] == 1 and evaluated[-1] == rounds
    assert min(rounds, 11) <= len(evaluated) <= 22
    walked = [0]
    while walked[-1] < rounds:
        walked.append(min(rounds, walked[-1] + settings.rounds_to_evaluation(walked[-1])))
    assert walked[1:] == evaluated
    given = fedrax.Settings(rounds=rounds, eval_every=10)
    assert [r for r in range(1, rounds + 1) if given.evaluates(r)] == sorted({*range(10, rounds + 1, 10), rounds})


def test_every_executor_evaluates_the_same_rounds(tmp_path: Path):
    options: Any = {"rounds": 21, "cohort_size": 3}
    expected = [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 21]
    rounds = lambda result: [round for round, _ in result.metric("test_accuracy")]  # noqa: E731
    assert rounds(fedrax.simulate(fedrax.FedAvg(local=LOCAL), TASK, FEDERATION, **options)) == expected
    for mode in ("vectorized", "sequential"):
        ((swept,),) = fedrax.sweep([fedrax.FedAvg(local=LOCAL)], TASK, FEDERATION, mode=mode, **options)  # type: ignore[arg-type]
        assert rounds(swept) == expected
    run(rounds=4, eval_every=None, directory=tmp_path / "run")
    longer = run(rounds=60, eval_every=None, directory=tmp_path / "run", resume=True)
    assert rounds(longer) == [1, 2, 3, 4, *range(6, 61, 3)]
    often = run(rounds=63, eval_every=1, directory=tmp_path / "run", resume=True)
    assert rounds(often) == [1, 2, 3, 4, *range(6, 61, 3), 61, 62, 63]
    jax.tree.map(np.testing.assert_array_equal, often.params, run(rounds=63).params)


def test_evaluated_rounds_and_metrics():
    result = run(rounds=7, eval_every=3, eval_train=True)
    for prefix in ("test", "train"):
        evaluated = [round for round, _ in result.metric(f"{prefix}_accuracy")]
        assert evaluated == [3, 6, 7]
    _, hits = numpy_metrics(result.params, *FEDERATION.train)
    np.testing.assert_allclose(result.events[-1]["train_accuracy"], hits.mean())
    losses, _ = numpy_metrics(result.params, *FEDERATION.test)
    np.testing.assert_allclose(result.events[-1]["test_loss"], losses.mean(), rtol=1e-6)


def test_training_loss_of_evaluation_and_of_local_steps_have_different_names():
    plain = run(rounds=4, eval_every=2)
    for options in ({"eval_train": True}, {"per_client": True}):
        result = run(rounds=4, eval_every=2, **options)
        assert result.metric("local_loss") == plain.metric("train_loss")
        assert [round for round, _ in result.metric("train_loss")] == [2, 4]
        losses, _ = numpy_metrics(result.params, *FEDERATION.train)
        np.testing.assert_allclose(result.events[-1]["train_loss"], losses.mean(), rtol=1e-6)


def test_per_client_metrics_use_training_data_without_test_data_of_clients():
    result = run(per_client=True)
    losses, _ = numpy_metrics(result.params, *FEDERATION.train)
    ends = FEDERATION.offsets
    means = [losses[a:b].mean() for a, b in pairwise(ends)]
    np.testing.assert_allclose(result.events[-1]["train_loss_worst_client"], max(means), rtol=1e-6)
    assert "test_loss_worst_client" not in result.events[-1]


def test_target_stops_the_run():
    events = run(rounds=8, eval_every=2, seed=1).events
    target = events[3]["test_accuracy"]
    first = next(event for event in events if event.get("test_accuracy", -1) >= target)
    result = run(rounds=8, eval_every=2, seed=1, target=target)
    assert result.stopped == "target"
    assert len(result.events) == first["round"]
    assert run(rounds=3, target=1.0).stopped == "rounds"


def test_run_without_test_data():
    result = run(federation=make_federation(test_rows=0), per_client=True)
    assert "test_loss" not in result.events[-1]
    assert "train_loss_worst_client" in result.events[-1]
    with pytest.raises(FedraxError, match="needs test data"):
        run(federation=make_federation(test_rows=0), target=0.5)


def test_target_without_accuracy_is_rejected():
    with pytest.raises(FedraxError, match="metric accuracy"):
        run(task=replace(TASK, metrics={}), target=0.5)


def test_results_and_federations_print_as_a_few_lines():
    result = run(rounds=3, eval_every=2, per_client=True)
    printed = repr(result).splitlines()
    assert printed[0].startswith("Result: 3 rounds (rounds), scan") and "array" not in repr(result)
    assert f"  test loss: {result.events[-1]['test_loss']:.4g}" in printed
    sizes = FEDERATION.sizes
    described = repr(FEDERATION).splitlines()
    assert described[0].endswith(f"8 clients of {sizes.min()} to {sizes.max()} training samples, {sizes.sum()} in all")
    assert described[1:] == ["  x float32 [4], y int32 []: 3 classes", "  23 test samples"]
