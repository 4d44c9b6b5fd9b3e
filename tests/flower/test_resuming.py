"""A federation resumes: the server from its checkpoint, the clients from their directories."""

from __future__ import annotations

import dataclasses
import logging
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
from fedrax.report import read_results, read_run
from fedrax.simulation import Interrupted, read_events
from tests.flower.messages import (
    INITIAL_PARAMS,
    SIZES,
    TASK,
    SerializingGrid,
    assert_close,
    client_samples,
    run_federation,
)
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
"""Client states, carried optimizers, two phases, personal models and the previous local model."""


class ServerCrash(Exception):
    """Ends the server."""


def make_grid(algorithm: Algorithm, folder: Path, stop_at: int | None = None) -> SerializingGrid:
    """Six clients with directories, under new node numbers; the server ends in round ``stop_at``."""
    app = client_app(algorithm, TASK, client_samples, seed=0, directory=folder)
    grid = SerializingGrid(app, len(SIZES))

    def lose(message: Message, client: int) -> bool:
        training = message.metadata.message_type == MessageType.TRAIN
        if training and stop_at is not None and message.metadata.group_id == f"round {stop_at}" and client == 4:
            raise ServerCrash  # some clients have done their work
        return False

    grid.lose = lose
    return grid


def run(algorithm: Algorithm, folder: Path, stop_at: int | None = None, **changes: Any) -> Any:
    """Five rounds of all clients in a directory."""
    grid = make_grid(algorithm, folder / "clients", stop_at)
    settings = {
        "rounds": 5,
        "cohort_size": 6,
        "params": INITIAL_PARAMS,
        "directory": folder / "server",
        "eval_every": 2,
    }
    return run_federation(algorithm, grid, **(settings | changes))


@pytest.mark.parametrize("algorithm", slow_cases(METHODS, 3), ids=lambda method: type(method).__name__)
def test_resumed_federation_equals_an_uninterrupted_one(algorithm: Algorithm, tmp_path: Path):
    """The server ends two rounds after it was resumed, seconds before a checkpoint of methods without client states."""
    uninterrupted = run(algorithm, tmp_path / "whole")
    run(algorithm, tmp_path / "cut", rounds=1)
    with pytest.raises(ServerCrash):
        run(algorithm, tmp_path / "cut", resume=True, stop_at=4)
    assert len(read_events(tmp_path / "cut" / "server")) == 3
    gone_on = run(algorithm, tmp_path / "cut", resume=True)
    assert_close((gone_on.server, gone_on.statistics), (uninterrupted.server, uninterrupted.statistics), 0)
    assert [event["round"] for event in gone_on.events] == [1, 2, 3, 4, 5]
    assert gone_on.events[-1]["test_loss"] == uninterrupted.events[-1]["test_loss"]


def test_signal_ends_a_federation_after_its_round_with_a_checkpoint(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    whole = run(method, tmp_path / "whole")
    grid = make_grid(method, tmp_path / "cut" / "clients")

    def interrupt(message: Message, client: int) -> bool:
        if message.metadata.group_id == "round 3" and client == 4:
            signal.raise_signal(signal.SIGTERM)  # a second signal would end this process
        return False

    grid.lose = interrupt
    settings = {"rounds": 5, "cohort_size": 6, "params": INITIAL_PARAMS, "directory": tmp_path / "cut" / "server"}
    with pytest.raises(Interrupted):
        run_federation(method, grid, **settings, eval_every=2)
    done = len(read_events(tmp_path / "cut" / "server"))
    assert 2 <= done <= 3  # whether rounds are counted from 0 or 1
    resumed = run(method, tmp_path / "cut", resume=True)
    assert_close(resumed.server, whole.server, 0)


def test_finished_federation_continues_with_more_rounds(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    uninterrupted = run(method, tmp_path / "whole", rounds=3)
    run(method, tmp_path / "more", rounds=2)
    more = run(method, tmp_path / "more", rounds=3, resume=True)
    assert_close(more.server, uninterrupted.server, 0)


def test_resumed_federation_keeps_the_spent_budget(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    uninterrupted = run(method, tmp_path / "whole", rounds=2, seed=None)
    run(method, tmp_path / "more", rounds=1, seed=None)
    with caplog.at_level(logging.WARNING, "flwr"):
        more = run(method, tmp_path / "more", rounds=2, resume=True, seed=None)
    assert "was interrupted" not in caplog.text
    assert more.events[-1]["epsilon"] == uninterrupted.events[-1]["epsilon"]


def test_interrupted_round_is_accounted_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Its replies may have been observed, and the repeated round has different noise."""
    method = ClientDP(FedAvg(local=LOCAL), noise=5.0)
    with pytest.raises(ServerCrash):
        run(method, tmp_path, stop_at=4, seed=None)
    with caplog.at_level(logging.WARNING, "flwr"):
        gone_on = run(method, tmp_path, resume=True, seed=None)
    assert [event["round"] for event in gone_on.events] == [1, 2, 3, 4, 5]
    assert gone_on.spent is not None and gone_on.spent.count == 6
    assert "round 4 was interrupted after its clients were asked" in caplog.text
    saved = read_run(tmp_path / "server")
    against = "against all but the server, which adds noise; not amplified by sampling"
    assert saved.privacy == f"presence of a client; {against}; delta 1e-05"
    assert f"epsilon: {saved.privacy}." in read_results(tmp_path / "server").legend()


def test_different_run_does_not_resume(tmp_path: Path):
    run(Scaffold(local=LOCAL), tmp_path)
    with pytest.raises(FedraxError, match=r"belongs to another run: its method \(local.lr .*, and here 0.1\) differs"):
        run(Scaffold(local=dataclasses.replace(LOCAL, lr=0.1)), tmp_path, resume=True)
    with pytest.raises(FedraxError, match="holds a run already"):
        run(Scaffold(local=LOCAL), tmp_path)
    with pytest.raises(FedraxError, match="resume needs a directory"):
        run(Scaffold(local=LOCAL), tmp_path, directory=None, resume=True)


def test_new_run_does_not_use_client_states_of_an_old_one(tmp_path: Path):
    method = Scaffold(local=LOCAL)
    first = run(method, tmp_path, directory=None)
    again = run(method, tmp_path, directory=None)
    assert_close(again.server, first.server, 0)


@pytest.mark.parametrize("damage", [b"", b"no archive", None])
def test_damaged_client_state_raises_a_clear_error_of_the_client(
    damage: bytes | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    method = Scaffold(local=LOCAL)
    run(method, tmp_path, directory=None, rounds=1)
    (file,) = (tmp_path / "clients" / "client-2").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-40] + b"x" * 40 if damage is None else damage)
    again = run(method, tmp_path, directory=None, rounds=1)
    assert again.events[0]["clients"] == 5 and "client-2" in caplog.text
