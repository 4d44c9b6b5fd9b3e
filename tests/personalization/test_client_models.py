"""The model of each client after a run: ``Result.client_model`` and ``Result.predict``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import Algorithm, FedAvg, FedraxError, LocalSGD
from fedrax.algorithms import PFedMe
from fedrax.compression import QuantizedBroadcast, TopK
from fedrax.contract import Batch, Variables
from fedrax.experiments import experiment, load_result
from fedrax.personalization import Ditto, Personalized
from fedrax.simulation import client_metrics
from tests.personalization.test_personal_layers import LAYERS, NORM_TASK
from tests.simulation.problems import FEDERATION, OFF_DEVICE, run

LOCAL = LocalSGD(lr=0.1, steps=3, batch_size=4)
FEDBN = Personalized(FedAvg(local=LOCAL), personal_params=("norm/*",), statistics=True)
SETTINGS: dict[str, Any] = {"rounds": 3, "cohort_size": 4, "per_client": True}
OFFSETS = FEDERATION.offsets


def rows(client: int) -> slice:
    return slice(OFFSETS[client], OFFSETS[client + 1])


@pytest.mark.parametrize("plan", ["scan", "vmap", "loop", "debug"])
@pytest.mark.parametrize(
    ("method", "task"),
    [
        (FEDBN, NORM_TASK),
        (Personalized(FedAvg(local=LOCAL), personal_params=("output/*",)), LAYERS),
        (Ditto(FedAvg(local=LOCAL)), LAYERS),
        (PFedMe(local=LOCAL), LAYERS),
        (fedrax.Upcycled(Personalized(FedAvg(local=LOCAL), personal_params=("output/*",))), LAYERS),
    ],
    ids=["FedBN", "head", "Ditto", "pFedMe", "wrapped"],
)
def test_client_models_have_the_reported_losses(method: Algorithm, task: fedrax.Task, plan: str):
    result = run(method, task=task, plan=plan, **SETTINGS)
    reported = client_metrics(result, task, FEDERATION)
    x, y = FEDERATION.train
    for client in range(FEDERATION.num_clients):
        mine = Batch(x[rows(client)], y[rows(client)])
        losses = task.evaluation_loss(result.client_model(client), mine)
        assert float(losses.mean()) == pytest.approx(reported["personal_loss"][client], rel=1e-5)
        outputs = result.predict(mine.x, client=client)
        assert type(outputs) is np.ndarray and len(outputs) == len(mine.x)
        assert (outputs.argmax(-1) == mine.y).mean() == pytest.approx(reported["personal_accuracy"][client])


def test_without_personal_models_every_client_has_the_global_model():
    for task in (LAYERS, NORM_TASK):
        result = run(FedAvg(local=LOCAL), task=task, rounds=1)
        jax.tree.map(np.testing.assert_array_equal, result.client_model(2), result.model)
        x = FEDERATION.test.x
        np.testing.assert_allclose(result.predict(x), task.outputs(result.model, x), rtol=1e-6)
        np.testing.assert_array_equal(result.predict(x), result.predict(x, client=2))


def test_resumed_run_has_the_models_of_all_clients(tmp_path: Path):
    uninterrupted = run(FEDBN, task=NORM_TASK, **SETTINGS)
    run(FEDBN, task=NORM_TASK, **SETTINGS | {"rounds": 2}, directory=tmp_path)
    for _ in range(2):  # the second time, the run is finished
        again = run(FEDBN, task=NORM_TASK, **SETTINGS, directory=tmp_path, resume=True)
        assert client_metrics(again, NORM_TASK, FEDERATION).equals(client_metrics(uninterrupted, NORM_TASK, FEDERATION))
        for client in range(FEDERATION.num_clients):
            jax.tree.map(np.testing.assert_array_equal, again.client_model(client), uninterrupted.client_model(client))


def test_run_directory_contains_the_models(tmp_path: Path):
    """The global model without data and code; client models with the experiment, also before the last round."""
    table = {
        "data": {"name": "synthetic", "devices": 4},
        "partition": {"name": "natural"},
        "model": {"name": "logistic"},
        "algorithm": {"name": "ditto", "inner": {"name": "fedavg"}},
        "run": {"rounds": 3, "cohort_size": 2, "eval_every": 1},
    }
    directory = tmp_path / "a"
    spec = experiment.from_table(table, "made")
    algorithm, task, federation = experiment.build(spec)
    result = fedrax.simulate(algorithm, task, federation, spec.run, directory=directory)
    jax.tree.map(np.testing.assert_array_equal, fedrax.simulation.load_model(directory), result.model)
    with pytest.raises(FedraxError, match=r"no experiment.toml: .*load_model .*resume=True"):
        load_result(directory)
    experiment.write(spec, directory / "experiment.toml")
    with pytest.raises(FedraxError, match=f"the first of 1 below it is {directory}"):
        load_result(tmp_path)
    names = sorted(path.name for path in directory.iterdir())
    x = federation.train.x[:5]
    for _ in range(2):
        again = load_result(directory)
        assert again.stopped == "rounds" and again.events == result.events
        assert client_metrics(again, task, federation).equals(client_metrics(result, task, federation))
        np.testing.assert_array_equal(again.predict(x), result.predict(x))
        for client in range(4):
            np.testing.assert_array_equal(again.predict(x, client), result.predict(x, client))
    assert sorted(path.name for path in directory.iterdir()) == names
    longer = dataclasses.replace(spec, run=dataclasses.replace(spec.run, rounds=9))
    experiment.write(longer, directory / "experiment.toml")
    assert load_result(directory).stopped == "checkpoint" and not np.array_equal(
        result.predict(x, 0), result.predict(x)
    )


def test_result_without_client_states_explains_why(tmp_path: Path):
    made: dict[str, Any] = {"directory": tmp_path, "rounds": 1}
    run(FEDBN, task=NORM_TASK, keep_clients=False, **made)
    again = run(FEDBN, task=NORM_TASK, resume=True, **made)
    assert isinstance(again.model, Variables) and len(again.predict(FEDERATION.test.x))
    with pytest.raises(FedraxError, match="no client states: the run was finished with keep_clients=False"):
        again.client_model(0)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FedraxError, match=r"has no model.safetensors: it is not a run directory, or"):
        fedrax.simulation.load_model(tmp_path)
    run(FEDBN, task=NORM_TASK, resume=True, **made)  # as of a run that was killed before it wrote its model
    found = fedrax.simulation.load_model(tmp_path, like=again.model)
    jax.tree.map(np.testing.assert_array_equal, found, again.model)


@pytest.mark.parametrize(
    "method",
    [
        QuantizedBroadcast(FedAvg(local=LOCAL)),
        fedrax.Scaffold(local=LOCAL),
        Ditto(FedAvg(local=LOCAL)),
        FEDBN,
        fedrax.Upcycled(FedAvg(local=LOCAL)),
        TopK(FedAvg(local=LOCAL), fraction=0.5),
    ],
    ids=lambda method: type(method).__name__,
)
def test_global_model_has_the_reported_loss(method: Algorithm, tmp_path: Path):
    """From the result, after a resume, and from the directory."""
    settings: dict[str, Any] = {"task": NORM_TASK, "rounds": 3, "eval_every": 1, "directory": tmp_path}
    result = run(method, **settings)
    again = run(method, **settings, resume=True)
    loaded = fedrax.simulation.load_model(tmp_path, like=NORM_TASK.init(jax.random.key(0)))
    for model in (result.model, again.model, loaded):
        losses = NORM_TASK.evaluation_loss(model, Batch(*FEDERATION.test))
        assert float(losses.mean()) == pytest.approx(result.events[-1]["test_loss"], rel=1e-5)


def test_client_models_of_spilled_states():
    away, here = (run(FEDBN, task=NORM_TASK, **SETTINGS, **options) for options in (OFF_DEVICE, {}))
    for client in range(FEDERATION.num_clients):
        jax.tree.map(np.testing.assert_array_equal, away.client_model(client), here.client_model(client))


def test_runs_of_a_sweep_have_the_models_of_their_clients():
    alone = run(FEDBN, task=NORM_TASK, seed=3, **SETTINGS)
    ((lane,),) = fedrax.sweep([FEDBN], NORM_TASK, FEDERATION, seeds=[3], **SETTINGS)
    for client in (0, 4):
        for a, b in zip(*(jax.tree.leaves(r.client_model(client)) for r in (alone, lane)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("client", [-1, FEDERATION.num_clients, 1.5, "a"])
def test_unknown_client_is_rejected(client: Any):
    result = run(FedAvg(local=LOCAL), task=LAYERS, rounds=1)
    for use in (result.client_model, result.client_state, lambda c: result.predict(FEDERATION.test.x, client=c)):
        with pytest.raises(FedraxError, match=f"clients are numbered from 0 to {FEDERATION.num_clients - 1}"):
            use(client)


def test_parameters_without_their_statistics_are_rejected():
    result = run(FedAvg(local=LOCAL), task=NORM_TASK, rounds=1)
    x, y = FEDERATION.test
    uses = [
        lambda: NORM_TASK.outputs(result.params, x),
        lambda: NORM_TASK.evaluation_loss(result.params, Batch(x, y)),
        lambda: NORM_TASK.metrics["accuracy"](result.params, Batch(x, y)),
        lambda: NORM_TASK.loss(result.params, Batch(x, y), jax.random.key(0)),
    ]
    for use in uses:
        with pytest.raises(FedraxError, match=r"has running statistics: pass .*Variables\(params, statistics\)"):
            use()
    assert isinstance(result.client_model(0), Variables)
