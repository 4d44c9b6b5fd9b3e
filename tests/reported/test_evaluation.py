"""Reports about losses, metrics and what is chosen by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedrax
from fedrax import FedAvg, FedraxWarning, Task, tune
from fedrax.contract import Model, supervised
from fedrax.participation import WeightedBySamples
from fedrax.personalization import Personalized
from tests.reported.problems import FEDERATION, LOCAL, START, TASK, TEST_OFFSETS, X, Y, loss, run, run_cohorts
from tests.simulation.problems import without_times


def test_the_loss_of_a_constant_model_is_the_logarithm_of_the_classes():
    still = FedAvg(local=replace(LOCAL, schedule=optax.constant_schedule(0.0)))
    zeros = np.zeros((2, 3))
    event = run(still, rounds=1, params=zeros, per_client=True, eval_train=True).events[-1]
    means = [value for key, value in event.items() if key.endswith("loss") or "loss_client_" in key]
    deviations = [value for key, value in event.items() if key.endswith("loss_client_std")]
    assert len(means) > 5 and deviations
    expected = [0.0 if value in deviations else np.log(3) for value in means]
    np.testing.assert_allclose(means, expected, atol=1e-12)


def measured(lower_is_better: tuple[str, ...] = ()) -> Task:
    """A regression whose only metric is an error that falls."""

    def squared(outputs: Any, y: Any) -> Any:
        return (outputs[:, 0] - y) ** 2

    def absolute(outputs: Any, y: Any) -> Any:
        return jnp.abs(outputs[:, 0] - y)

    line = Model(lambda key: jnp.zeros((2, 1)), lambda w, x, key=None: x @ w, name="line")
    return supervised(line, squared, {"mae": absolute}, lower_is_better=lower_is_better)


def test_an_error_is_not_maximized_in_silence():
    slopes = fedrax.Federation.from_arrays(X[:10], X[:10] @ [1.0, -2.0], offsets=[0, 5, 10])
    options: dict[str, Any] = {"metric": "mae", "rounds": 2, "cohort_size": 2, "validation": 0.4}
    grid = {"local.lr": (1e-6, 0.3)}
    with pytest.warns(FedraxWarning, match="larger values of the metric 'mae'.*lower_is_better"):
        tune(FedAvg(local=LOCAL), measured(), slopes, grid, **options)
    found = tune(FedAvg(local=LOCAL), measured(("mae",)), slopes, grid, **options)
    assert found.best.point == {"local.lr": 0.3}


def test_the_model_after_the_last_round_may_be_the_best():
    seen: dict[int, tuple[float, float]] = {}

    def look(snapshot: fedrax.simulation.Snapshot) -> None:
        right = loss(np.asarray(snapshot.params), X[10:], Y[10:]).mean()
        seen[snapshot.event["round"]] = snapshot.event["test_loss"], right

    run(FedAvg(local=LOCAL), rounds=3, eval_every=2, callbacks=[look])
    assert list(seen) == [2, 3]
    np.testing.assert_allclose(*zip(*seen.values(), strict=True), rtol=1e-10)


def test_the_initial_parameters_are_evaluated_in_round_0(tmp_path: Path):
    method, options = FedAvg(local=LOCAL), {"rounds": 4, "eval_every": 2}
    seen: list[int] = []
    first = run(method, **options, eval_first=True, callbacks=[lambda snapshot: seen.append(snapshot.event["round"])])
    none = {"clients": 0, "bytes_down": 0, "bytes_up": 0, "gradients": 0}
    assert first.events[0].items() >= ({"round": 0} | none).items() and "train_loss" not in first.events[0]
    assert first.events[0]["test_loss"] == pytest.approx(loss(START, X[10:], Y[10:]).mean(), rel=1e-12)
    assert seen == [round for round, _ in first.metric("test_loss")] == [0, 2, 4]
    assert without_times(first.events[1:]) == without_times(run(method, **options).events)
    assert "Result: 4 rounds" in repr(first)
    part = options | {"rounds": 2, "directory": tmp_path / "a"}
    run(method, **part, eval_first=True)
    resumed = run(method, **part | {"rounds": 4}, eval_first=True, resume=True)
    assert without_times(resumed.events) == without_times(first.events)
    assert without_times(fedrax.simulation.read_events(tmp_path / "a")) == without_times(first.events)
    together, apart = (
        fedrax.sweep(
            [method], TASK, FEDERATION, [0, 1], mode=mode, rounds=2, cohort_size=2, eval_every=1, eval_first=True
        )
        for mode in ("vectorized", "sequential")
    )
    for one, other in zip(together[0], apart[0], strict=True):
        assert [e["round"] for e in one.events] == [e["round"] for e in other.events] == [0, 1, 2]
        assert one.events[0]["test_loss"] == pytest.approx(other.events[0]["test_loss"])


def test_no_round_evaluates_only(tmp_path: Path):
    method, options = FedAvg(local=LOCAL), {"eval_every": 2}
    alone = run(method, rounds=0, directory=tmp_path, **options)
    assert [event["round"] for event in alone.events] == [0] and alone.stopped == "rounds"
    np.testing.assert_array_equal(alone.params, START)
    assert alone.events[0]["test_loss"] == pytest.approx(loss(START, X[10:], Y[10:]).mean(), rel=1e-12)
    more = run(method, rounds=2, directory=tmp_path, resume=True, **options)
    assert without_times(more.events) == without_times(run(method, rounds=2, eval_first=True, **options).events)


def test_personal_metrics_are_those_of_all_clients():
    model = Model(lambda key: {"w": START, "b": np.zeros(3)}, lambda p, x, key=None: x @ p["w"] + p["b"], name="affine")
    task = fedrax.classification(model)
    result = run_cohorts(Personalized(FedAvg(local=LOCAL), personal_params=("b",)), [[0], [0]], task=task)
    own = [result.algorithm.personal(result.params, result.client_state(i)) for i in range(3)]
    biases = [np.asarray(params["b"]) for params in own]
    assert np.abs(biases[0]).max() > 0.01 and not np.any(biases[1:])
    right = 0.0
    for i, bias in enumerate(biases):
        rows = slice(10 + TEST_OFFSETS[i], 10 + TEST_OFFSETS[i + 1])
        right += ((X[rows] @ np.asarray(result.params["w"]) + bias).argmax(1) == Y[rows]).sum()
    assert result.events[-1]["test_personal_accuracy"] == pytest.approx(right / 21)


def test_samples_are_counted_once():
    method, both = FedAvg(local=LOCAL), {"participation": WeightedBySamples(), "weights": "samples"}
    with pytest.warns(FedraxWarning, match="counted twice"):
        run(method, rounds=1, cohort_size=1, **both)
