"""A federation resumes: the server from its checkpoint, the clients from their directories."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import optax
import pytest
from flwr.app import Message, MessageType

from fedrax import Algorithm, Episode, FedAvg, FedraxError, GradMA, LocalSGD, Scaffold
from fedrax.algorithms import PFedMe
from fedrax.flower import client_app
from fedrax.optim import Optax
from fedrax.privacy import ClientDP
from fedrax.simulation import Interrupted, read_events
from tests.flower.messages import SIZES, START, TASK, Serialized, assert_close, deployed, own
from tests.slow import slow_cases

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
MOMENTUM = dataclasses.replace(LOCAL, optimizer=Optax(optax.adam(0.01)), carry=True)
METHODS = [
    Scaffold(local=LOCAL),
    FedAvg(local=MOMENTUM),
    Episode(local=LOCAL),
    PFedMe(),
    GradMA(previous="local", local=LOCAL),
]
"""Client states, carried optimizers and two phases; personal models and the last local model."""


class PowerCut(Exception):
    """The end of the server."""


def grid_of(algorithm: Algorithm, folder: Path, stop_at: int | None = None) -> Serialized:
    """Six clients with folders of their own, under new numbers; the server ends before a round."""
    app = client_app(algorithm, TASK, own, seed=0, directory=folder)
    grid = Serialized(app, len(SIZES))

    def lose(message: Message, client: int) -> bool:
        training = message.metadata.message_type == MessageType.TRAIN
        if training and stop_at is not None and message.metadata.group_id == f"round {stop_at}" and client == 4:
            raise PowerCut  # when some clients have done their work already
        return False

    grid.lose = lose
    return grid


def run(algorithm: Algorithm, folder: Path, stop_at: int | None = None, **changes: Any) -> Any:
    """Five rounds of all clients, in a directory."""
    grid = grid_of(algorithm, folder / "clients", stop_at)
    settings = {"rounds": 5, "cohort_size": 6, "params": START, "directory": folder / "server", "eval_every": 2}
    return deployed(algorithm, grid, **(settings | changes))


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint after every round."""
    monkeypatch.setattr("fedrax.flower.driver._CHECKPOINT_SECONDS", 0.0)


@pytest.mark.parametrize("algorithm", slow_cases(METHODS, 3), ids=lambda method: type(method).__name__)
def test_a_resumed_federation_equals_an_uninterrupted_one(
    algorithm: Algorithm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fedrax.flower.driver._CHECKPOINT_SECONDS", 0.0)
    whole = run(algorithm, tmp_path / "whole")
    with pytest.raises(PowerCut):
        run(algorithm, tmp_path / "cut", stop_at=4)
    assert len(read_events(tmp_path / "cut" / "server")) == 3
    gone_on = run(algorithm, tmp_path / "cut", resume=True)
    assert_close((gone_on.server, gone_on.statistics), (whole.server, whole.statistics), 0)
    assert [event["round"] for event in gone_on.events] == [1, 2, 3, 4, 5]
    assert gone_on.events[-1]["test_loss"] == whole.events[-1]["test_loss"]


def test_a_signal_ends_a_federation_after_its_round_with_a_checkpoint(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    whole = run(method, tmp_path / "whole")
    grid = grid_of(method, tmp_path / "cut" / "clients")

    def interrupt(message: Message, client: int) -> bool:
        if message.metadata.group_id == "round 3" and client == 4:
            signal.raise_signal(signal.SIGTERM)  # which would end this process
        return False

    grid.lose = interrupt
    settings = {"rounds": 5, "cohort_size": 6, "params": START, "directory": tmp_path / "cut" / "server"}
    with pytest.raises(Interrupted):
        deployed(method, grid, **settings, eval_every=2)
    done = len(read_events(tmp_path / "cut" / "server"))
    assert 2 <= done <= 3  # whether rounds are counted from 0 or 1
    resumed = run(method, tmp_path / "cut", resume=True)
    assert_close(resumed.server, whole.server, 0)


def test_a_finished_federation_continues_with_more_rounds(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    whole = run(method, tmp_path / "whole", rounds=3)
    run(method, tmp_path / "more", rounds=2)
    more = run(method, tmp_path / "more", rounds=3, resume=True)
    assert_close(more.server, whole.server, 0)


def test_a_resumed_federation_keeps_the_spent_budget(tmp_path: Path):
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    whole = run(method, tmp_path / "whole", rounds=2, seed=None)
    run(method, tmp_path / "more", rounds=1, seed=None)
    more = run(method, tmp_path / "more", rounds=2, resume=True, seed=None)
    assert more.events[-1]["epsilon"] == whole.events[-1]["epsilon"]


def test_a_round_that_was_asked_for_is_spent_though_the_run_was_cut_off_in_it(tmp_path: Path):
    """Its clients' answers may have been heard, and the round that takes its place has other noise."""
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    with pytest.raises(PowerCut):
        run(method, tmp_path, stop_at=4, seed=None)
    gone_on = run(method, tmp_path, resume=True, seed=None)
    assert [event["round"] for event in gone_on.events] == [1, 2, 3, 4, 5]
    assert gone_on.spent is not None and gone_on.spent.count == 6


def test_another_run_does_not_resume(tmp_path: Path):
    run(Scaffold(local=LOCAL), tmp_path)
    with pytest.raises(FedraxError, match=r"belongs to another run: its method \(local.lr .*, and here 0.1\) differs"):
        run(Scaffold(local=dataclasses.replace(LOCAL, lr=0.1)), tmp_path, resume=True)
    with pytest.raises(FedraxError, match="holds a run already"):
        run(Scaffold(local=LOCAL), tmp_path)
    with pytest.raises(FedraxError, match="resume needs a directory"):
        run(Scaffold(local=LOCAL), tmp_path, directory=None, resume=True)


def test_a_new_run_does_not_take_up_what_clients_kept_in_an_old_one(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    first = run(method, tmp_path, directory=None)
    again = run(method, tmp_path, directory=None)
    assert_close(again.server, first.server, 0)


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_a_damaged_memory_raises_a_clear_error_of_the_client(
    damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    method = Scaffold(local=LOCAL)
    run(method, tmp_path, directory=None, rounds=1)
    (file,) = (tmp_path / "clients" / "client-2").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-40] + b"x" * 40 if damage is None else damage)
    again = run(method, tmp_path, directory=None, rounds=1)
    assert again.events[0]["clients"] == 5 and "client-2" in caplog.text
