"""Recorded messages to and from clients, on every executor."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import fedrax
from fedrax import tree
from fedrax.simulation import MessageSelection
from tests.simulation.problems import LOCAL, OFF_DEVICE, SCAFFOLD, run, state_of

MIME = fedrax.algorithms.MimeSVRG(local=LOCAL)
FULL_PARTICIPATION = tuple(range(8))


def sender_of_each(result: fedrax.Result) -> list[tuple[int, int, int]]:
    return [(one.round, one.client, one.phase) for one in result.exchanges]


@pytest.fixture(scope="module")
def scanned() -> fedrax.Result:
    """A method with two phases; some rounds and clients are recorded."""
    return run(MIME, plan="scan", record=MessageSelection(clients=(4, 1, 6), rounds=(1, 3)), rounds=3)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "options", [{"plan": "vmap"}, {"plan": "loop"}, {"plan": "debug"}, OFF_DEVICE | {"plan": "scan"}]
)
def test_recorded_messages_are_the_same_on_every_plan(scanned: fedrax.Result, options: dict[str, Any]) -> None:
    other = run(MIME, record=MessageSelection(clients=(1, 4, 6), rounds=(3, 1)), rounds=3, **options)
    assert (
        sender_of_each(other)
        == sender_of_each(scanned)
        == [(1, 6, 0), (1, 6, 1), (3, 4, 0), (3, 4, 1), (3, 6, 0), (3, 6, 1)]
    )
    for one, two in zip(scanned.exchanges, other.exchanges, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(two)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_recording_does_not_change_the_run(scanned: fedrax.Result) -> None:
    for a, b in zip(state_of(scanned), state_of(run(MIME, plan="scan", rounds=3)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_server_step_follows_from_the_recorded_messages() -> None:
    """SCAFFOLD in NumPy from the messages: x and c of the next round, and the c_i of every client."""
    result = run(SCAFFOLD, plan="scan", record=MessageSelection(clients=FULL_PARTICIPATION), trajectory=True, rounds=3)
    control = [np.zeros(12 + 3) for _ in FULL_PARTICIPATION]
    flat = lambda values: np.concatenate([np.ravel(a) for a in jax.tree.leaves(values)])  # noqa: E731
    for round in (1, 2, 3):
        mine = [one for one in result.exchanges if one.round == round]
        assert len(mine) == 3
        x, c = flat(mine[0].received.params), flat(mine[0].received.control)
        np.testing.assert_allclose(c, np.mean(control, axis=0), atol=1e-6)
        moved = np.mean([flat(one.sent.upload.params) for one in mine], axis=0)
        np.testing.assert_allclose(flat(result.trajectory[round - 1]), x + moved, atol=1e-6)
        for one in mine:
            control[one.client] = control[one.client] + flat(one.sent.upload.control)
    for client in FULL_PARTICIPATION:
        np.testing.assert_allclose(flat(result.client_state(client).control), control[client], atol=1e-6)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    "algorithm",
    [fedrax.compression.Quantized(inner=SCAFFOLD, bits=4), fedrax.compression.TopK(inner=fedrax.FedAvg(local=LOCAL))],
)
def test_recorded_messages_are_encoded(algorithm: fedrax.Algorithm) -> None:
    """Compressed, with the numbers of bytes in events."""
    result = run(algorithm, plan="scan", record=MessageSelection(clients=FULL_PARTICIPATION), rounds=1)
    event = result.events[0]
    assert sum(tree.num_bytes(one.sent) for one in result.exchanges) == event["bytes_up"]
    assert sum(tree.num_bytes((one.received, one.statistics)) for one in result.exchanges) == event["bytes_down"]
    inner = run(algorithm.inner, plan="scan", rounds=1)  # type: ignore[attr-defined]
    assert event["bytes_up"] < inner.events[0]["bytes_up"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (MessageSelection(clients=(8,)), "no client 8 to record: they go from 0 to 7"),
        (MessageSelection(rounds=(0,)), "no round 0 to record: they go from 1 to 4"),
        (MessageSelection(clients=()), "one client at least"),
        (MessageSelection(clients=(True,)), "no client True"),
        (MessageSelection(max_bytes=400), "the record would take"),
        ((0, 1), "record must be a MessageSelection or None, not a tuple"),
    ],
)
def test_invalid_selections_are_rejected(record: Any, message: str) -> None:
    with pytest.raises(fedrax.FedraxError, match=message):
        run(record=record)


def test_clients_and_rounds_may_be_arrays() -> None:
    arrays, lists = (MessageSelection(clients=make((1, 4, 6)), rounds=make((1, 3))) for make in (np.array, list))
    assert (
        sender_of_each(run(SCAFFOLD, record=arrays, rounds=3))
        == sender_of_each(run(SCAFFOLD, record=lists, rounds=3))
        != []
    )


def test_resumed_run_has_no_recorded_messages(tmp_path: Any) -> None:
    with pytest.raises(fedrax.FedraxError, match="messages of earlier rounds: leave record out"):
        run(record=MessageSelection(), directory=tmp_path / "run", resume=True)
