"""Reports about state between rounds, checkpoints, random numbers and deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedrax import FedAvg, Federation, FedraxError, LocalSGD, classification
from fedrax.contract import Model, Variables
from fedrax.optim import Adam
from fedrax.personalization import Personalized
from tests.reported.problems import FEDERATION, LOCAL, START, TASK, X, Y, rows_of, run, run_cohorts


def centered(v: Any, x: Any, key: Any = None) -> Any:
    """Softmax regression on x minus its running mean."""
    return (x - v.statistics["mean"]) @ v.params


def train(v: Any, x: Any, key: Any) -> Any:
    """The same with the batch mean, and the new statistics."""
    mean = x.mean(0)
    moved = {"mean": 0.9 * v.statistics["mean"] + 0.1 * mean, "batches": v.statistics["batches"] + 1}
    return (x - mean) @ v.params, moved


def centered_task() -> Any:
    """A task with this model, whose mean starts at zero."""
    start = Variables(jnp.asarray(START), {"mean": jnp.zeros(2), "batches": jnp.int32(0)})
    return classification(Model(lambda key: start, centered, name="centered", train=train))


COUNTS = (2, 4, 6)
WHOLE = Federation.from_arrays(X[:12], Y[:12], offsets=np.array([0, 2, 6, 12]), num_classes=3, shuffle=False)
"""Clients whose numbers of rows are multiples of the batch size two."""
BATCHES = LocalSGD(lr=0.5, epochs=1, batch_size=2, order="stored")


def moved_means() -> list[np.ndarray]:
    """Running mean of each client after its batches."""
    means = []
    for first, count in zip((0, 2, 6), COUNTS, strict=True):
        mean = np.zeros(2)
        for row in range(first, first + count, 2):
            mean = 0.9 * mean + 0.1 * X[row : row + 2].mean(0)
        means.append(mean)
    return means


def test_running_statistics_are_averaged_with_the_weights_of_the_models():
    method, task = FedAvg(local=BATCHES), centered_task()
    result = run_cohorts(method, [[0, 1, 2]], federation=WHOLE, task=task, weights="samples")
    right = sum(n * mean for n, mean in zip(COUNTS, moved_means(), strict=True)) / 12
    np.testing.assert_allclose(result.statistics["mean"], right, rtol=1e-10)
    assert result.statistics["batches"].dtype == jnp.int32
    assert int(result.statistics["batches"]) == 2  # 28 / 12, from 1, 2 and 3 batches


def test_server_optimizers_leave_running_statistics_alone():
    method = FedAvg(local=BATCHES, server_optimizer=Adam(lr=0.1))
    result = run_cohorts(method, [[0, 1, 2]], federation=WHOLE, task=centered_task())
    np.testing.assert_allclose(result.statistics["mean"], sum(moved_means()) / 3, rtol=1e-10)
    assert np.abs(np.asarray(result.params) - START).max() > 0.01


def test_a_resumed_run_keeps_the_round_and_the_state_of_the_server(tmp_path: Path):
    server = Adam(lr=0.1, schedule=optax.exponential_decay(1.0, 1, 0.5))
    method = FedAvg(local=LOCAL, server_optimizer=server)
    uninterrupted = run(method, rounds=4)
    run(method, rounds=2, directory=tmp_path / "run")
    resumed = run(method, rounds=4, directory=tmp_path / "run", resume=True)
    assert [event["round"] for event in resumed.events] == [1, 2, 3, 4]
    np.testing.assert_array_equal(resumed.params, uninterrupted.params)
    np.testing.assert_array_equal(resumed.server.optimizer.m, uninterrupted.server.optimizer.m)


def test_global_generators_are_neither_read_nor_moved():
    import random

    found = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
        method = FedAvg(local=LocalSGD(lr=0.5, steps=2, batch_size=2))
        found.append(run(method, rounds=3).params)
        assert before == (random.getstate(), np.random.get_state()[1].tolist())  # noqa: NPY002
    np.testing.assert_array_equal(*found)


def test_frozen_arrays_stay_and_are_not_sent():
    body = np.random.default_rng(2).normal(size=(2, 2))
    kept = body.copy()
    model = Model(lambda key: jnp.asarray(START), lambda w, x, key=None: jnp.tanh(x @ body) @ w, name="frozen")
    result = run_cohorts(FedAvg(local=LOCAL), [[0, 1]], task=classification(model))
    np.testing.assert_array_equal(body, kept)
    assert result.events[-1]["bytes_up"] == 2 * START.nbytes  # two clients
    y = START
    for _ in range(2):
        chances = np.exp(np.tanh(X[rows_of(0)] @ body) @ y)
        errors = chances / chances.sum(1, keepdims=True) - np.eye(3)[Y[rows_of(0)]]
        y = y - 0.5 * np.tanh(X[rows_of(0)] @ body).T @ errors / 3
    alone = run_cohorts(FedAvg(local=LOCAL), [[0]], task=classification(model))
    np.testing.assert_allclose(alone.params, y, rtol=1e-10)


def affine(p: Any, x: Any, key: Any = None) -> Any:
    """Softmax regression with a bias."""
    return x @ p["w"] + p["b"]


def log_loss(logits: np.ndarray, y: np.ndarray) -> float:
    """Mean cross entropy."""
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]).mean())


def scaled(p: Any, x: Any, key: Any = None) -> Any:
    """A model with a scalar parameter."""
    return p["scale"] * (x @ p["w"])


def test_a_parameter_without_axes_travels():
    from fedrax.flower import LocalGrid, client_app, federate

    start = {"scale": jnp.asarray(0.7), "w": jnp.asarray(START)}
    task = classification(Model(lambda key: start, scaled, name="scaled"))
    method = FedAvg(local=LOCAL)
    options: dict[str, Any] = {"rounds": 2, "cohort_size": 2, "dtype": "float64", "seed": 3}
    deployed = federate(LocalGrid(client_app(method, task, FEDERATION, seed=3), 3), method, task, clients=3, **options)
    simulated = run(method, task=task, **options)
    assert deployed.params["scale"].shape == () and float(deployed.params["scale"]) != 0.7
    for name in start:
        np.testing.assert_allclose(deployed.params[name], simulated.params[name], rtol=1e-10)


def test_the_server_and_the_clients_evaluate():
    from fedrax.flower import LocalGrid, client_app, federate

    model = Model(lambda key: {"w": jnp.asarray(START), "b": jnp.zeros(3)}, affine, name="affine")
    method, task = Personalized(FedAvg(local=LOCAL), personal_params=("b",)), classification(model)
    options: dict[str, Any] = {"rounds": 2, "cohort_size": 2, "dtype": "float64", "seed": 3, "per_client": True}
    grid = LocalGrid(client_app(method, task, FEDERATION, seed=3), 3)
    deployed = federate(grid, method, task, clients=3, test=(X[10:15], Y[10:15]), **options).events[-1]
    simulated = run(method, task=task, **options)
    event, params = simulated.events[-1], {name: np.asarray(a) for name, a in simulated.params.items()}
    right = {name: value for name, value in event.items() if "client" in name or "personal" in name}
    right["test_loss"] = log_loss(X[10:15] @ params["w"] + params["b"], Y[10:15])
    assert {"test_personal_accuracy", "test_accuracy_worst_client"} <= right.keys()
    for name, value in right.items():
        if not name.endswith("_worst_client_number"):  # clients of a federation report sums without their number
            assert deployed[name] == pytest.approx(value, rel=1e-6), name


def test_a_client_without_samples_is_named():
    from fedrax.flower import LocalGrid, client_app, federate

    def data(context: Any) -> Any:
        rows = slice(0) if context.node_config["partition-id"] == 1 else rows_of(context.node_config["partition-id"])
        return X[rows], Y[rows]

    method = FedAvg(local=LOCAL)
    grid = LocalGrid(client_app(method, TASK, data), 3)
    with pytest.raises(FedraxError, match=r"client 1 failed: .* needs training samples"):
        federate(grid, method, TASK, clients=3, rounds=1, cohort_size=3)
    with pytest.raises(FedraxError, match="client 1 has no training rows"):
        Federation.from_arrays(X[:10], Y[:10], offsets=[0, 3, 3, 10])
