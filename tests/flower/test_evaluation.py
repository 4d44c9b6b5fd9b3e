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
    OWNER,
    ROUNDS,
    SIZES,
    START,
    TASK,
    Serialized,
    X,
    Y,
    assert_close,
    deployed,
    own,
    start,
)

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
OWN_TEST = Federation.from_arrays(
    X, Y, OWNER, test=(X[::-1], Y[::-1]), test_client_ids=OWNER[::-1], num_classes=3, shuffle=False
)
SIMULATED: dict[str, Any] = {"rounds": ROUNDS, "cohort_size": 3, "plan": "scan", "devices": 1}


def grid_of(algorithm: Any, data: Any = own, task: Any = TASK) -> Serialized:
    """Six clients of a method."""
    return Serialized(client_app(algorithm, task, data, seed=0), len(SIZES))


def of_clients(events: list[dict]) -> dict[str, float]:
    """The last event's metrics."""
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
def test_clients_evaluate_on_their_own(method: Any):
    """The global model and their own ones, over all samples and over clients."""
    there = simulate(method, TASK, OWN_TEST, params=START, per_client=True, **SIMULATED)
    here = deployed(method, grid_of(method, OWN_TEST), test=None, params=START, per_client=True)
    ours, theirs = of_clients(here.events), of_clients(there.events)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_metrics_by_name_are_those_of_the_simulation(caplog: pytest.LogCaptureFixture):
    """Clients send sums, of which a mean over all labels is computed; other metrics need the server's samples."""
    method, task = FedAvg(local=LOCAL), classification(Logistic().build((4,), 3), metrics=["perplexity", "auc"])
    there = simulate(method, task, OWN_TEST, params=START, per_client=True, **SIMULATED)
    with caplog.at_level(logging.WARNING, "flwr"):
        here = deployed(method, grid_of(method, OWN_TEST, task), task, test=None, params=START, per_client=True)
    assert "auc need all test samples together" in caplog.text
    ours, theirs = of_clients(here.events), of_clients(there.events)
    assert ours == pytest.approx({name: value for name, value in theirs.items() if "auc" not in name}, rel=1e-4)
    assert "test_perplexity_worst_client" in ours and "test_auc" in theirs


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
def test_one_whose_metrics_make_no_sense_is_left_out(
    record: str, name: str, value: Any, caplog: pytest.LogCaptureFixture
):
    """It neither spoils the mean nor adds to what is told of a round."""
    method = Scaffold(local=LOCAL)
    grid = grid_of(method, OWN_TEST)

    def change(reply: Message, client: int) -> None:
        if client == 2 and reply.metadata.message_type == MessageType.EVALUATE:
            reply.content.config_records[record][name] = value

    grid.change = change
    with caplog.at_level(logging.WARNING, "flwr"):
        here = deployed(method, grid, test=None, rounds=1)
    assert "client 2 is left out of the evaluation" in caplog.text
    assert of_clients(here.events).keys() == {"test_loss", "test_accuracy"}
    assert here.events[-1]["test_accuracy"] <= 1


def test_clients_without_test_samples_are_not_asked_to_evaluate(caplog: pytest.LogCaptureFixture):
    method, asked = Scaffold(local=LOCAL), []

    def data(context: Any) -> Any:
        return (own(context), own(context)) if context.node_config["partition-id"] % 2 else own(context)

    for given in (data, own):
        grid = grid_of(method, given)
        grid.lose = lambda message, client: asked.append((message.metadata.message_type, client)) or False
        deployed(method, grid, test=None, rounds=1)
    assert [client for kind, client in asked if kind == MessageType.EVALUATE] == [1, 3, 5]
    assert "no client has test samples" in caplog.text


class Normed(nn.Module):
    """A layer, its batch norm, and another layer."""

    @nn.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        """Logits."""
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(5)(x))
        return nn.Dense(3)(nn.relu(x))


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("where", ["with the mean", "at home"])
def test_running_statistics_travel_or_stay(where: str):
    task, inner = classification(from_linen(Normed(), X[:1])), FedAvg(local=LocalSGD(lr=0.05, steps=2, batch_size=3))
    at_home = Personalized(inner, personal_params=("*BatchNorm*",), statistics=True)
    method = inner if where == "with the mean" else at_home
    there = simulate(method, task, OWN_TEST, **SIMULATED)
    here = deployed(method, grid_of(method, OWN_TEST, task), task, test=None)
    assert jax.tree.leaves(there.statistics)
    assert_close((here.params, here.statistics), (there.params, there.statistics), 5e-5)
    for name, value in of_clients(there.events).items():
        np.testing.assert_allclose(of_clients(here.events)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"weights": "samples"}])
def test_settings_mean_the_same(changes: dict[str, Any]):
    task, method = classification(MLP(hidden=(5,)).build((4,), 3)), FedAvg(local=LOCAL)
    federation = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)
    there = simulate(method, task, federation, **SIMULATED, **changes)
    here = deployed(method, grid_of(method, task=task), task, **changes)
    assert_close(here.params, there.params, 1e-12 if "dtype" in changes else 2e-5)


def test_what_clients_have_by_the_second_part_is_not_sent_again():
    """Mime sends x, s and c: in its second part c alone."""
    task, method = classification(MLP(hidden=(5,)).build((4,), 3)), Mime(local=LOCAL)
    federation = Federation.from_arrays(X, Y, OWNER, test=(X, Y), num_classes=3, shuffle=False)
    params = start(task)
    there = simulate(method, task, federation, params=params, **SIMULATED)
    here = deployed(method, grid_of(method, task=task), task, params=params)
    sent, counted = (np.diff([event["bytes_down"] for event in run.events]).tolist() for run in (here, there))
    assert sent == counted
    assert_close(here.params, there.params)


def test_a_run_leaves_events_and_its_model(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    here = deployed(method, grid_of(method), directory=tmp_path / "run", eval_every=2)
    events = read_events(tmp_path / "run")
    assert [event["round"] for event in events] == [1, 2, 3, 4] and events == here.events
    assert ["test_loss" in event for event in events] == [False, True, False, True]
    model = fedrax.simulation.load_model(tmp_path / "run", like=TASK.init(jax.random.key(0)))
    assert_close(model, here.model, 0)
    np.testing.assert_allclose(here.predict(X), TASK.outputs(model, X), rtol=1e-5)
    with pytest.raises(FedraxError, match="no client states: in a federation on Flower they stay at the clients"):
        here.client_model(0)
    assert (tmp_path / "run" / "environment.json").is_file()
    with pytest.raises(FedraxError, match="holds a run already"):
        deployed(method, grid_of(method), directory=tmp_path / "run")


def test_a_run_that_is_stopped_leaves_the_model_of_its_last_round(tmp_path: Path):
    """Rounds of real clients are worth more than a file: the next evaluation may never come."""
    method, grid = Scaffold(local=LOCAL), grid_of(Scaffold(local=LOCAL))

    def stop(message: Message, client: int) -> bool:
        if message.metadata.group_id == "round 3":
            raise KeyboardInterrupt
        return False

    grid.lose = stop
    with pytest.raises(KeyboardInterrupt):
        deployed(method, grid, directory=tmp_path / "run", eval_every=4)
    model = fedrax.simulation.load_model(tmp_path / "run" / "model.safetensors", like=TASK.init(jax.random.key(0)))
    assert_close(model, deployed(method, grid_of(method), rounds=2).params, 0)


def test_it_evaluates_before_the_first_round(tmp_path: Path):
    method, options = Scaffold(local=LOCAL), {"eval_every": 1, "eval_first": True}
    whole = deployed(method, grid_of(method), rounds=2, **options)
    assert [event["round"] for event in whole.events] == [0, 1, 2] and whole.events[0]["clients"] == 0
    there = simulate(method, TASK, FEDERATION, rounds=0, cohort_size=COHORT)
    assert whole.events[0]["test_loss"] == pytest.approx(there.events[0]["test_loss"], rel=1e-5)
    alone = deployed(method, grid_of(method), rounds=0, directory=tmp_path / "run", **options)
    assert [event["round"] for event in alone.events] == [0]


def test_it_ends_at_a_target_or_where_a_callback_says_so():
    method = Scaffold(local=LOCAL)
    reached = deployed(method, grid_of(method), target=0.01, eval_every=1)
    asked = deployed(method, grid_of(method), callbacks=[lambda snapshot: snapshot.event["round"] == 2], eval_every=1)
    assert (reached.stopped, len(reached.events)) == ("target", 1)
    assert (asked.stopped, len(asked.events)) == ("callback", 2)


def test_a_private_run_spends_for_all_that_were_asked_and_ends_with_its_budget():
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    grid = grid_of(method)
    grid.lose = lambda message, client: client == 0 and message.metadata.message_type == MessageType.TRAIN
    whole = deployed(method, grid, rounds=6, cohort_size=6, seed=None)
    assert whole.spent is not None and whole.spent.count == 6
    budget = whole.events[2]["epsilon"] + 1e-6
    ended = deployed(method, grid_of(method), rounds=6, cohort_size=6, seed=None, epsilon_budget=budget)
    assert (ended.stopped, len(ended.events)) == ("budget", 3)
    assert ended.spent is not None and ended.spent.epsilon <= budget


def test_a_round_that_diverges_has_been_spent():
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    grid = grid_of(method)

    def spoil(reply: Message, client: int) -> None:
        if reply.metadata.message_type == MessageType.TRAIN:
            sent = reply.content.array_records["sent"]
            for name, a in sent.items():
                sent[name] = Array(a.dtype, a.shape, a.stype, b"\xff" * len(a.data))  # of which each is no number

    grid.change = spoil
    with pytest.raises(NonFiniteError) as told:
        deployed(method, grid, seed=None)
    assert told.value.result is not None and told.value.result.spent is not None
    assert (told.value.result.spent.count, told.value.result.events) == (1, [])


def test_noise_that_others_can_draw_is_warned_of():
    method = SampleDP(FedAvg(local=LocalSGD(lr=0.05, steps=2)), noise=2.0)
    with pytest.warns(FedraxWarning, match="leave seed out"):
        deployed(method, grid_of(method), rounds=1)


def test_noise_in_bands_is_rejected():
    """It is for rounds that lie apart, and who will be there then is not known."""
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0, bands=2)
    with pytest.raises(FedraxError, match="set bands to 1"):
        deployed(method, grid_of(method), rounds=1)


@pytest.mark.parametrize(
    ("changes", "words"),
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
def test_settings_of_simulations_and_wrong_ones_raise_a_clear_error(changes: dict[str, Any], words: str):
    method = Scaffold(local=LOCAL)
    with pytest.raises(FedraxError, match=words):
        deployed(method, grid_of(method), **changes)


def test_a_task_that_does_not_fit_is_the_servers_to_say():
    """Not round after round the clients'."""
    task = dataclasses.replace(TASK, loss=lambda params, batch, key: TASK.loss(params, batch, key).sum())
    method = FedAvg(local=LOCAL)
    with pytest.raises(FedraxError, match="one number for each sample"):
        deployed(method, grid_of(method, task=task), task)
    wide = classification(MLP(hidden=(5,)).build((7,), 3))
    with pytest.raises(FedraxError, match="x float32"):
        deployed(method, grid_of(method, task=wide), wide)


def test_data_may_be_lists():
    """Of numbers, as they come from a file; two rows are no pairs."""
    method = FedAvg(local=LOCAL)
    lists, arrays = (
        deployed(method, grid_of(method, data), rounds=1)
        for data in (lambda c: (X[:2].tolist(), Y[:2].tolist()), lambda c: (X[:2], Y[:2]))
    )
    assert_close(lists.params, arrays.params, 0)


@pytest.mark.parametrize(
    "data",
    [lambda context: 3, lambda context: (X, Y, X), lambda context: (X, Y[:3]), lambda context: (X, Y.astype(str))],
)
def test_data_that_are_none_raise_a_clear_error_of_the_client(data: Any):
    grid = LocalGrid(client_app(Scaffold(local=LOCAL), TASK, data), 1)
    with pytest.raises(FedraxError, match="0 of 1 clients were connected"):
        federate(grid, Scaffold(local=LOCAL), TASK, clients=1, wait=0)
