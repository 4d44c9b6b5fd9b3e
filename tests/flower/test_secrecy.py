"""What a client keeps secret: its random keys, and its data in error messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict

from fedrax import Algorithm, Episode, FedAvg, FedraxError, LocalSGD, Scaffold
from fedrax.algorithms import Mime
from fedrax.data import load
from fedrax.flower import LocalGrid, client_app
from fedrax.privacy import SampleDP
from tests.flower.messages import INITIAL_PARAMS, SIZES, TASK, SerializingGrid, client_samples, run_federation

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
METHOD = Scaffold(local=LOCAL)


def make_grid(algorithm: Algorithm, seed: int | None = 0) -> SerializingGrid:
    """A grid with six clients of a method."""
    return SerializingGrid(client_app(algorithm, TASK, client_samples, seed=seed), len(SIZES))


@pytest.mark.parametrize("kind", ["ValueError", "FedraxError"])
def test_client_errors_do_not_contain_data(kind: str, tmp_path: Path):
    """The server and its logs receive the errors, also those of a reader, whose text names a value of a cell."""
    Path(tmp_path / "own.csv").write_text("age,ill\nJane Doe,1\n40,0\n50,1\n")

    def data(context: Any) -> Any:
        if kind == "FedraxError":
            return load("csv", path=tmp_path / "own.csv", label="ill")
        raise ValueError("could not convert 'Jane Doe' to a number")

    app = client_app(METHOD, TASK, data)
    query = Message(RecordDict(), 2, MessageType.QUERY)
    (reply,) = SerializingGrid(app, 1).send_and_receive([query])
    line = data.__code__.co_firstlineno + (2 if kind == "FedraxError" else 3)
    assert f"client 0 failed ({kind} in test_secrecy.py, line {line}): see" in str(reply.error.reason)
    assert "Jane Doe" not in str(reply.error.reason)
    with pytest.raises(
        FedraxError, match=rf"client 0 failed: .*'Jane Doe'.* \(.*test_secrecy.py, line {line}, in data"
    ):
        LocalGrid(app, 1).send_and_receive([query])


def largest_difference(a: Any, b: Any) -> float:
    """Largest difference between two trees."""
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def replies_of_client_0(grid: SerializingGrid, messages: list[Message]) -> list[Message]:
    """Replies of client 0 to these messages, in this order."""
    return [next(iter(grid.send_and_receive([Message(one.content, 2, MessageType.TRAIN)]))) for one in messages]


def record_round(method: Algorithm) -> tuple[SerializingGrid, list[Message]]:
    """A grid, and the messages of its one round to client 0, before delivery."""
    grid, seen = make_grid(method, seed=None), []

    def note(message: Message, client: int) -> bool:
        if client == 0 and message.metadata.message_type == MessageType.TRAIN:
            seen.append(message)
        return False

    grid.lose = note
    run_federation(method, grid, rounds=1, cohort_size=6, seed=None)
    grid.contexts[2].state.clear()
    return grid, list(seen)


def test_repeated_round_has_different_noise():
    """Otherwise the difference of two replies would have no noise."""
    method = SampleDP(FedAvg(local=LocalSGD(lr=0.05, steps=1)), noise=2.0)
    grid, (order,) = record_round(method)
    sent = [reply.content.array_records["sent"] for reply in replies_of_client_0(grid, [order, order])]
    first, second = (np.concatenate([np.frombuffer(a.data, "f4") for a in one.values()]) for one in sent)
    assert np.abs(first - second).min() > 1e-6


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [Mime(local=LOCAL), METHOD, Episode(local=LOCAL)], ids=lambda m: type(m).__name__)
def test_phases_of_a_round_are_not_repeated(method: Algorithm):
    """All phases of a round use the key of the first one."""
    grid, messages = record_round(method)
    again = [*messages, *messages[1:]]
    assert [reply.has_error() for reply in replies_of_client_0(grid, again)] == [False] * len(messages) + [True] * len(
        messages[1:]
    )
    left = set(grid.contexts[2].state)
    assert not left & {"fedrax.received", "fedrax.secret"}, left


def test_noise_and_batches_are_random_without_a_seed():
    batches = FedAvg(local=LocalSGD(lr=0.5, steps=2, batch_size=2))
    secret = [
        run_federation(batches, make_grid(batches, seed=None), params=INITIAL_PARAMS, rounds=1, cohort_size=6)
        for _ in range(2)
    ]
    given = [
        run_federation(batches, make_grid(batches), params=INITIAL_PARAMS, rounds=1, cohort_size=6) for _ in range(2)
    ]
    assert largest_difference(secret[0].params, secret[1].params) > 1e-3
    assert largest_difference(given[0].params, given[1].params) == 0
