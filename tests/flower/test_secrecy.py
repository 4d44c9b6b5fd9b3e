"""What a client keeps secret: its random keys, and its data in error messages."""

from __future__ import annotations

import logging
from typing import Any

import jax
import numpy as np
import pytest
from flwr.app import Message, MessageType, RecordDict

from fedrax import Algorithm, Episode, FedAvg, LocalSGD, Scaffold
from fedrax.algorithms import Mime
from fedrax.flower import client_app
from fedrax.privacy import SampleDP
from tests.flower.messages import SIZES, START, TASK, Serialized, deployed, own

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
METHOD = Scaffold(local=LOCAL)


def grid_of(algorithm: Algorithm, seed: int | None = 0) -> Serialized:
    """Six clients of a method."""
    return Serialized(client_app(algorithm, TASK, own, seed=seed), len(SIZES))


def test_what_a_client_reads_is_not_in_its_errors(caplog: pytest.LogCaptureFixture):
    """Errors go to the server, and to the logs of whoever runs it."""

    def data(context: Any) -> Any:
        raise ValueError("could not convert 'Jane Doe' to a number")

    grid = Serialized(client_app(METHOD, TASK, data), 1)
    with caplog.at_level(logging.ERROR, "flwr"):
        (reply,) = grid.send_and_receive([Message(RecordDict(), 2, MessageType.QUERY)])
    assert str(reply.error.reason).endswith("failed (ValueError): see the client's log")
    assert "Jane Doe" in caplog.text


def farthest(a: Any, b: Any) -> float:
    """The largest difference between two trees."""
    return max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def asked(grid: Serialized, orders: list[Message]) -> list[Message]:
    """Client 0's answers to these messages, one after another."""
    return [next(iter(grid.send_and_receive([Message(one.content, 2, MessageType.TRAIN)]))) for one in orders]


def recorded(method: Algorithm) -> tuple[Serialized, list[Message]]:
    """A grid, and the messages of its one round to client 0, before it got them."""
    grid, seen = grid_of(method, seed=None), []

    def note(message: Message, client: int) -> bool:
        if client == 0 and message.metadata.message_type == MessageType.TRAIN:
            seen.append(message)
        return False

    grid.lose = note
    deployed(method, grid, rounds=1, cohort_size=6, seed=None)
    grid.contexts[2].state.clear()
    return grid, list(seen)


def test_a_round_that_is_asked_for_twice_has_other_noise():
    """Else the difference of the two would have none."""
    method = SampleDP(FedAvg(local=LocalSGD(lr=0.05, steps=1)), noise=2.0)
    grid, (order,) = recorded(method)
    sent = [reply.content.array_records["sent"] for reply in asked(grid, [order, order])]
    first, second = (np.concatenate([np.frombuffer(a.data, "f4") for a in one.values()]) for one in sent)
    assert np.abs(first - second).min() > 1e-6


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("method", [Mime(local=LOCAL), METHOD, Episode(local=LOCAL)], ids=lambda m: type(m).__name__)
def test_no_part_of_a_round_is_done_twice(method: Algorithm):
    """The key of a round's later parts is that of its first."""
    grid, orders = recorded(method)
    again = [*orders, *orders[1:]]
    assert [reply.has_error() for reply in asked(grid, again)] == [False] * len(orders) + [True] * len(orders[1:])
    left = set(grid.contexts[2].state)
    assert not left & {"fedrax.received", "fedrax.secret"}, left


def test_noise_and_batches_are_secret_unless_a_seed_is_given():
    batches = FedAvg(local=LocalSGD(lr=0.5, steps=2, batch_size=2))
    secret = [deployed(batches, grid_of(batches, seed=None), params=START, rounds=1, cohort_size=6) for _ in range(2)]
    given = [deployed(batches, grid_of(batches), params=START, rounds=1, cohort_size=6) for _ in range(2)]
    assert farthest(secret[0].params, secret[1].params) > 1e-3
    assert farthest(given[0].params, given[1].params) == 0
