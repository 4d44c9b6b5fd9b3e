"""Reports about losses, metrics, and choices by metrics."""

from __future__ import annotations

from dataclasses import replace
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
from tests.reported.problems import LOCAL, START, TEST_OFFSETS, X, Y, loss, run, run_cohorts


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
    """A regression task whose only metric is an error."""

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
