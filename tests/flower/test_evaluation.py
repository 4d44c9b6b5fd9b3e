"""Evaluation over messages, running statistics, private methods, and the output directory."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flwr.app import Array, Message, MessageType

import fedrax
from fedrax import FedAvg, FedraxError, FedraxWarning, LocalSGD, Scaffold, classification, simulate
from fedrax.algorithms import Mime
from fedrax.data import Federation
from fedrax.flower import LocalGrid, client_app, federate
from fedrax.models import MLP, Logistic, from_linen
from fedrax.personalization import Ditto, Personalized
from fedrax.privacy import ClientDP, SampleDP
from fedrax.simulation import NonFiniteError, read_events
from tests.flower.messages import (
    COHORT,
    FEDERATION,
    INITIAL_PARAMS,
    OWNER,
    ROUNDS,
    SIZES,
    TASK,
    SerializingGrid,
    X,
    Y,
    assert_close,
    client_samples,
    random_params,
    run_federation,
)

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
WITH_CLIENT_TESTS = Federation.from_arrays(
    X, Y, OWNER, test=(X[::-1], Y[::-1]), test_client_ids=OWNER[::-1], num_classes=3, shuffle=False
)
SIMULATED: dict[str, Any] = {"rounds": ROUNDS, "cohort_size": 3, "plan": "scan", "devices": 1}


def make_grid(algorithm: Any, data: Any = client_samples, task: Any = TASK) -> SerializingGrid:
    """A grid with six clients of a method."""
    return SerializingGrid(client_app(algorithm, task, data, seed=0), len(SIZES))


def client_metrics(events: list[dict]) -> dict[str, float]:
    """Client metrics of the last event."""
    return {name: value for name, value in events[-1].items() if name.startswith("test_")}


@pytest.mark.parametrize(
    "method",
    [
        Scaffold(local=LOCAL),
        Ditto(FedAvg(local=LOCAL)),
        Personalized(FedAvg(local=LOCAL), personal_params=("*weight",)),
    ],
    ids=lambda method: type(method).__name__,
)
def test_clients_evaluate_global_and_personal_models(method: Any):
    """Means over all samples and over clients."""
    simulated = simulate(method, TASK, WITH_CLIENT_TESTS, params=INITIAL_PARAMS, per_client=True, **SIMULATED)
    federated = run_federation(
        method, make_grid(method, WITH_CLIENT_TESTS), test=None, params=INITIAL_PARAMS, per_client=True
    )
    actual, desired = client_metrics(federated.events), client_metrics(simulated.events)
    assert actual.keys() == {name for name in desired if "number" not in name}  # nodes have no numbers in a federation
    for name, value in actual.items():
        np.testing.assert_allclose(value, desired[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_named_metrics_equal_those_of_the_simulation(caplog: pytest.LogCaptureFixture):
    """Clients send sums, from which means over all labels are computed; other metrics need the server's samples."""
    method, task = FedAvg(local=LOCAL), classification(Logistic().build((4,), 3), metrics=["perplexity", "auc"])
    simulated = simulate(method, task, WITH_CLIENT_TESTS, params=INITIAL_PARAMS, per_client=True, **SIMULATED)
    with caplog.at_level(logging.WARNING, "flwr"):
        federated = run_federation(
            method, make_grid(method, WITH_CLIENT_TESTS, task), task, test=None, params=INITIAL_PARAMS, per_client=True
        )
    assert "auc need all test samples together" in caplog.text
    actual, desired = client_metrics(federated.events), client_metrics(simulated.events)
    shared = {name: value for name, value in desired.items() if "auc" not in name and "number" not in name}
    assert actual == pytest.approx(shared, rel=1e-4)
    assert "test_perplexity_worst_client" in actual and "test_auc" in desired


@pytest.mark.parametrize(
    ("record", "name", "value"),
    [
        ("sums", "loss", float("nan")),
        ("sums", "accuracy", "all of them"),
        ("sums", "honesty", 1e9),
        ("sums", "loss", [0.5, 0.5]),
        ("rows", "test", 0),
        ("rows", "test", 2.0**70),
    ],
)
def test_invalid_client_metrics_are_ignored(record: str, name: str, value: Any, caplog: pytest.LogCaptureFixture):
    """They affect neither the mean nor the fields of the event."""
    method = Scaffold(local=LOCAL)
    grid = make_grid(method, WITH_CLIENT_TESTS)

    def change(reply: Message, client: int) -> None:
        if client == 2 and reply.metadata.message_type == MessageType.EVALUATE:
            reply.content.config_records[record][name] = value

    grid.change = change
    with caplog.at_level(logging.WARNING, "flwr"):
        federated = run_federation(method, grid, test=None, rounds=1)
    assert "client 2 is left out of the evaluation" in caplog.text
    assert client_metrics(federated.events).keys() == {"test_loss", "test_accuracy"}
    assert federated.events[-1]["test_accuracy"] <= 1


def test_metrics_without_some_clients_say_so(caplog: pytest.LogCaptureFixture):
    """Client 2 does not reply to the first evaluation, and has left before the second."""
    method = Scaffold(local=LOCAL)
    grid = make_grid(method, WITH_CLIENT_TESTS)
    grid.lose = lambda message, client: client == 2 and message.metadata.message_type == MessageType.EVALUATE

    def leave(event: Any) -> None:
        grid.contexts.pop(4, None)

    with caplog.at_level(logging.INFO, "flwr"):
        federated = run_federation(method, grid, test=None, rounds=2, eval_every=1, callbacks=[leave])
    assert [event["evaluated_clients"] for event in federated.events] == [5, 5]
    of = f"5 of 6 clients, {sum(SIZES) - SIZES[2]} of {sum(SIZES)} test samples"
    for number in (1, 2):
        assert f"round {number}: the test metrics are over {of}" in caplog.text
    assert "evaluated_clients 5" in caplog.text
    caplog.clear()
    federated = run_federation(method, make_grid(method, WITH_CLIENT_TESTS), test=None, rounds=1)
    assert federated.events[-1]["evaluated_clients"] == 6 and "test metrics are over" not in caplog.text


def test_clients_without_test_samples_are_not_asked_to_evaluate(caplog: pytest.LogCaptureFixture):
    method, asked = Scaffold(local=LOCAL), []

    def data(context: Any) -> Any:
        return (
            (client_samples(context), client_samples(context))
            if context.node_config["partition-id"] % 2
            else client_samples(context)
        )

    for given in (data, client_samples):
        grid = make_grid(method, given)
        grid.lose = lambda message, client: asked.append((message.metadata.message_type, client)) or False
        run_federation(method, grid, test=None, rounds=1)
    assert [client for kind, client in asked if kind == MessageType.EVALUATE] == [1, 3, 5]
    assert "no client has test samples" in caplog.text


class Normed(nn.Module):
    """Batch norm between two layers."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        """Logits."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(5)(x))
        return nn.Dense(3)(nn.relu(x))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("placement", ["with the mean", "at home"])
def test_running_statistics_are_averaged_or_kept_at_the_clients(placement: str):
    task, inner = classification(from_linen(Normed(), X[:1])), FedAvg(local=LocalSGD(lr=0.05, steps=2, batch_size=3))
    at_home = Personalized(inner, personal_params=("*BatchNorm*",), statistics=True)
    method = inner if placement == "with the mean" else at_home
    simulated = simulate(method, task, WITH_CLIENT_TESTS, **SIMULATED)
    federated = run_federation(method, make_grid(method, WITH_CLIENT_TESTS, task), task, test=None)
    assert jax.tree.leaves(simulated.statistics)
    assert_close((federated.params, federated.statistics), (simulated.params, simulated.statistics), 5e-5)
    for name, value in client_metrics(simulated.events).items():
        np.testing.assert_allclose(client_metrics(federated.events)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"weights": "samples"}])
def test_settings_have_the_effect_of_the_simulation(changes: dict[str, Any]):
    task, method = classification(MLP(hidden=(5,)).build((4,), 3)), FedAvg(local=LOCAL)
    federation = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)
    simulated = simulate(method, task, federation, **SIMULATED, **changes)
    federated = run_federation(method, make_grid(method, task=task), task, **changes)
    assert_close(federated.params, simulated.params, 1e-12 if "dtype" in changes else 2e-5)


def test_arrays_of_the_first_phase_are_not_sent_again():
    """Mime sends x, s and c, of which the second phase adds c only."""
    task, method = classification(MLP(hidden=(5,)).build((4,), 3)), Mime(local=LOCAL)
    federation = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)
    params = random_params(task)
    simulated = simulate(method, task, federation, params=params, **SIMULATED)
    federated = run_federation(method, make_grid(method, task=task), task, params=params)
    sent, counted = (np.diff([event["bytes_down"] for event in run.events]).tolist() for run in (federated, simulated))
    assert sent == counted
    assert_close(federated.params, simulated.params)


def test_run_directory_contains_events_and_model(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    federated = run_federation(method, make_grid(method), directory=tmp_path / "run", eval_every=2)
    events = read_events(tmp_path / "run")
    assert [event["round"] for event in events] == [1, 2, 3, 4] and events == federated.events
    assert ["test_loss" in event for event in events] == [False, True, False, True]
    model = fedrax.simulation.load_model(tmp_path / "run", like=TASK.init(jax.random.key(0)))
    assert_close(model, federated.model, 0)
    np.testing.assert_allclose(federated.predict(X), TASK.outputs(model, X), rtol=1e-5)
    with pytest.raises(FedraxError, match="no client states: in a federation on Flower they stay at the clients"):
        federated.client_model(0)
    assert (tmp_path / "run" / "environment.json").is_file()
    with pytest.raises(FedraxError, match="holds a run already"):
        run_federation(method, make_grid(method), directory=tmp_path / "run")


def test_stopped_run_writes_the_model_of_its_last_round(tmp_path: Path):
    """Not that of the last evaluation."""
    method, grid = Scaffold(local=LOCAL), make_grid(Scaffold(local=LOCAL))

    def stop(message: Message, client: int) -> bool:
        if message.metadata.group_id == "round 3":
            raise KeyboardInterrupt
        return False

    grid.lose = stop
    with pytest.raises(KeyboardInterrupt):
        run_federation(method, grid, directory=tmp_path / "run", eval_every=4)
    model = fedrax.simulation.load_model(tmp_path / "run" / "model.safetensors", like=TASK.init(jax.random.key(0)))
    assert_close(model, run_federation(method, make_grid(method), rounds=2).params, 0)


def test_evaluation_before_the_first_round(tmp_path: Path):
    method, options = Scaffold(local=LOCAL), {"eval_every": 1, "eval_first": True}
    whole = run_federation(method, make_grid(method), rounds=2, **options)
    assert [event["round"] for event in whole.events] == [0, 1, 2] and whole.events[0]["clients"] == 0
    simulated = simulate(method, TASK, FEDERATION, rounds=0, cohort_size=COHORT)
    assert whole.events[0]["test_loss"] == pytest.approx(simulated.events[0]["test_loss"], rel=1e-5)
    alone = run_federation(method, make_grid(method), rounds=0, directory=tmp_path / "run", **options)
    assert [event["round"] for event in alone.events] == [0]


def test_target_or_callback_ends_the_run():
    method = Scaffold(local=LOCAL)
    reached = run_federation(method, make_grid(method), target=0.01, eval_every=1)
    asked = run_federation(
        method, make_grid(method), callbacks=[lambda snapshot: snapshot.event["round"] == 2], eval_every=1
    )
    assert (reached.stopped, len(reached.events)) == ("target", 1)
    assert (asked.stopped, len(asked.events)) == ("callback", 2)


def test_private_run_accounts_for_all_asked_clients_and_ends_with_its_budget():
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    grid = make_grid(method)
    grid.lose = lambda message, client: client == 0 and message.metadata.message_type == MessageType.TRAIN
    whole = run_federation(method, grid, rounds=6, cohort_size=6, seed=None)
    assert whole.spent is not None and whole.spent.count == 6
    budget = whole.events[2]["epsilon"] + 1e-6
    ended = run_federation(method, make_grid(method), rounds=6, cohort_size=6, seed=None, epsilon_budget=budget)
    assert (ended.stopped, len(ended.events)) == ("budget", 3)
    assert ended.spent is not None and ended.spent.epsilon <= budget


def test_diverged_round_is_accounted_for():
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    grid = make_grid(method)

    def make_infinite(reply: Message, client: int) -> None:
        if reply.metadata.message_type == MessageType.TRAIN:
            sent = reply.content.array_records["sent"]
            for name, a in sent.items():
                sent[name] = Array(a.dtype, a.shape, a.stype, b"\xff" * len(a.data))  # each reply is not finite

    grid.change = make_infinite
    with pytest.raises(NonFiniteError) as printed:
        run_federation(method, grid, seed=None)
    assert printed.value.result is not None and printed.value.result.spent is not None
    assert (printed.value.result.spent.count, printed.value.result.events) == (1, [])


def test_noise_with_a_known_seed_is_warned_of():
    method = SampleDP(FedAvg(local=LocalSGD(lr=0.05, steps=2)), noise=2.0)
    with pytest.warns(FedraxWarning, match="leave seed out"):
        run_federation(method, make_grid(method), rounds=1)


def test_banded_noise_is_rejected():
    """It requires a minimal distance between the rounds of a client, which a federation cannot know in advance."""
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0, bands=2)
    with pytest.raises(FedraxError, match="set bands to 1"):
        run_federation(method, make_grid(method), rounds=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stragglers": 0.5}, "stragglers is a setting of simulations"),
        ({"plan": "vmap"}, "plan is a setting of simulations"),
        ({"round": 5}, "did you mean 'rounds'"),
        ({"cohort_size": 9}, "cannot sample 9 clients a round"),
        ({"test": X}, "test must be a pair or None"),
        ({"test": (X[:, :2], Y)}, "the clients' are"),
        ({"settings": fedrax.Settings(seed=3)}, "seed is a setting of simulations"),
    ],
)
def test_invalid_settings_and_those_of_simulations_raise_a_clear_error(changes: dict[str, Any], message: str):
    method = Scaffold(local=LOCAL)
    with pytest.raises(FedraxError, match=message):
        run_federation(method, make_grid(method), **changes)


def test_unsuitable_task_is_rejected_at_the_server():
    """Before the first round, not by the clients in every round."""
    task = dataclasses.replace(TASK, loss=lambda params, batch, key: TASK.loss(params, batch, key).sum())
    method = FedAvg(local=LOCAL)
    with pytest.raises(FedraxError, match="one number for each sample"):
        run_federation(method, make_grid(method, task=task), task)
    wide = classification(MLP(hidden=(5,)).build((7,), 3))
    with pytest.raises(FedraxError, match="x float32"):
        run_federation(method, make_grid(method, task=wide), wide)


def test_client_data_may_be_lists():
    """A list of two rows is not taken for a pair (training data, test data)."""
    method = FedAvg(local=LOCAL)
    lists, arrays = (
        run_federation(method, make_grid(method, data), rounds=1)
        for data in (lambda c: (X[:2].tolist(), Y[:2].tolist()), lambda c: (X[:2], Y[:2]))
    )
    assert_close(lists.params, arrays.params, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda context: 3, "must return .* not a int"),
        (lambda context: (X, Y, X), "must return .* not a tuple"),
        (lambda context: (X, Y[:3]), "not n samples with n labels"),
        (lambda context: (X, Y.astype(str)), "number the classes"),
    ],
)
def test_invalid_client_data_raise_a_clear_error_of_the_client(data: Any, words: str):
    grid = LocalGrid(client_app(Scaffold(local=LOCAL), TASK, data), 1)
    with pytest.raises(FedraxError, match=f"client 0 failed: .*{words}"):
        federate(grid, Scaffold(local=LOCAL), TASK, clients=1)
