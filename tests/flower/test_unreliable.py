"""Clients that fail, reconnect, lose their state or send malformed messages."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedrax import Episode, FedAvg, FedraxError, LocalSGD, LoSAC, Scaffold, simulate
from fedrax.algorithms import PFedMe
from fedrax.compression import Quantized
from fedrax.flower import client_app, federate
from fedrax.flower.instructions import RoundInstructions
from fedrax.simulation import NonFiniteError, Script
from tests.flower.messages import FEDERATION, SIZES, START, TASK, Serialized, assert_close, deployed, own

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
METHOD = Scaffold(local=LOCAL)
ALL = list(range(len(SIZES)))
ORDER = RoundInstructions(0, 0, 1, 6, 3.0, -1, [1, 2], "float32")


def grid_of(algorithm: Any = METHOD, seed: int | None = 0) -> Serialized:
    """Six clients of a method."""
    return Serialized(client_app(algorithm, TASK, own, seed=seed), len(SIZES))


def simulated(cohorts: list[list[int]], algorithm: Any = METHOD) -> Any:
    """The parameters after rounds of these clients."""
    return _simulated(tuple(map(tuple, cohorts)), algorithm)


@cache
def _simulated(cohorts: tuple[tuple[int, ...], ...], algorithm: Any) -> Any:
    settings: dict[str, Any] = {"plan": "scan", "devices": 1, "params": START, "rounds": len(cohorts)}
    script = Script(cohorts=[list(cohort) for cohort in cohorts])
    return simulate(algorithm, TASK, FEDERATION, script=script, **settings).params


def is_round(message: Message, number: int) -> bool:
    """Whether a message belongs to this round, as events count them."""
    return message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == f"round {number}"


def spoiled(how: str) -> Any:
    """Changes client 2's answer in round 2."""

    def change(reply: Message, client: int) -> None:
        if client != 2 or not reply.has_content() or reply.metadata.group_id != "round 2":
            return
        sent = reply.content["sent"]
        assert isinstance(sent, ArrayRecord)
        name, array = next(iter(sent.items()))
        if how == "missing":
            del sent[name]
        elif how == "more":
            sent["99 more"] = array
        elif how == "no record":
            del reply.content["sent"]
        elif how == "another record":
            reply.content["sent"] = ConfigRecord({"upload": 1.0})
        elif how == "not finite":
            numbers = np.frombuffer(array.data, array.dtype).copy()
            numbers[0] = np.nan
            sent[name] = Array(array.dtype, array.shape, array.stype, numbers.tobytes())
        else:
            parts = {"type": array.dtype, "shape": array.shape, "stype": array.stype, "data": array.data}
            parts |= {"type": {"type": "float64"}, "shape": {"shape": (7, 7)}, "stype": {"stype": "numpy.ndarray"}}.get(
                how, {"data": array.data[:-4]}
            )
            sent[name] = Array(*parts.values())

    return change


@pytest.mark.parametrize(
    "how", ["missing", "more", "no record", "another record", "not finite", "type", "shape", "stype", "data"]
)
def test_an_answer_that_makes_no_sense_is_left_out(how: str, caplog: pytest.LogCaptureFixture):
    grid = grid_of()
    grid.change = spoiled(how)
    with caplog.at_level(logging.WARNING, "flwr"):
        here = deployed(METHOD, grid, params=START, rounds=3, cohort_size=6)
    assert_close(here.params, simulated([ALL, [c for c in ALL if c != 2], ALL]))
    assert "round 2: client 2 is left out: its reply" in caplog.text


def test_a_reply_that_makes_the_model_infinite_is_left_out(caplog: pytest.LogCaptureFixture):
    """Whole numbers and a scale, finite both, whose product is not."""
    method = Quantized(FedAvg(local=LOCAL))
    grid = grid_of(method)

    def change(reply: Message, client: int) -> None:
        if client != 2 or reply.metadata.group_id != "round 2":
            return
        sent = reply.content["sent"]
        assert isinstance(sent, ArrayRecord)
        scales = [(name, array) for name, array in sent.items() if array.dtype == "float32" and not array.shape]
        assert scales
        for name, array in scales:
            sent[name] = Array("float32", (), array.stype, np.float32(3e38).tobytes())

    grid.change = change
    here = deployed(method, grid, params=START, rounds=3, cohort_size=6)
    assert_close(here.params, simulated([ALL, [c for c in ALL if c != 2], ALL], method))
    assert "round 2: client 2 is left out: its reply has values that are not finite" in caplog.text


def test_numbers_of_64_bits_are_of_the_same_kind():
    def data(context: Any) -> Any:
        x, y = own(context)
        return (x.astype(np.float64) if context.node_config["partition-id"] == 1 else x), y

    here = deployed(METHOD, Serialized(client_app(METHOD, TASK, data, seed=0), 6), params=START, rounds=2)
    assert_close(here.params, deployed(METHOD, grid_of(), params=START, rounds=2).params)


def test_a_client_that_reconnects_keeps_its_identity():
    grid = grid_of()
    node = next(node for node in grid.contexts if grid.contexts[node].node_config["partition-id"] == 3)

    def moving(event: Any) -> None:
        if event.event["round"] == 1:
            grid.away = grid.contexts.pop(node)  # type: ignore[attr-defined]
        elif event.event["round"] == 2:
            grid.contexts[99] = grid.away  # type: ignore[attr-defined]

    here = deployed(METHOD, grid, params=START, rounds=3, cohort_size=6, eval_every=1, callbacks=[moving])
    assert [event["clients"] for event in here.events] == [6, 5, 6]
    assert_close(here.params, simulated([ALL, [c for c in ALL if c != 3], ALL]))


def test_a_client_that_lost_its_state_starts_with_the_initial_one(caplog: pytest.LogCaptureFixture):
    grid = grid_of()

    def forget(event: Any) -> None:
        grid.contexts[2].state.clear()

    with caplog.at_level(logging.WARNING, "flwr"):
        here = deployed(METHOD, grid, params=START, rounds=2, cohort_size=6, eval_every=1, callbacks=[forget])
    assert "round 2: client 0 has lost its state" in caplog.text
    assert [event["clients"] for event in here.events] == [6, 6] and np.isfinite(here.events[-1]["test_loss"])


def test_a_client_that_lost_the_initial_parameters_is_sent_them_again():
    """pFedMe's clients begin with the starting parameters: one without them is left out once."""
    method = PFedMe()
    grid = grid_of(method)

    def forget(event: Any) -> None:
        if event.event["round"] == 1:
            grid.contexts[2].state.clear()

    here = deployed(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[forget])
    assert [event["clients"] for event in here.events] == [6, 5, 6]


def test_an_evaluation_also_delivers_the_initial_parameters():
    """A client is sent the start once, with its first message of either kind, and needs it until its round counts."""
    method = PFedMe()
    both = lambda context: (own(context), own(context))  # noqa: E731
    grid = Serialized(client_app(method, TASK, both, seed=0), len(SIZES))
    grid.lose = lambda message, client: client == 1 and is_round(message, 2)
    grid.change = spoiled("data")
    here = deployed(method, grid, test=None, rounds=4, cohort_size=6, eval_every=1)
    assert [event["clients"] for event in here.events] == [6, 4, 6, 6]


def test_a_client_whose_reply_was_lost_keeps_the_initial_parameters():
    """A first round of which the server can make no use leaves the clients as they were."""
    method = PFedMe()
    grid = grid_of(method)

    def spoil(reply: Message, client: int) -> None:
        if reply.metadata.group_id == "round 1":
            del reply.content["sent"]

    grid.change = spoil
    here = deployed(method, grid, rounds=3, cohort_size=6)
    assert [event["clients"] for event in here.events] == [0, 6, 6]


def test_a_round_without_replies_changes_nothing():
    grid = grid_of()
    grid.lose = lambda message, client: is_round(message, 2)
    here = deployed(METHOD, grid, params=START, rounds=3, cohort_size=6)
    assert [event["clients"] for event in here.events] == [6, 0, 6]
    assert np.isfinite(here.events[-1]["test_loss"])


def test_a_round_waits_for_as_many_as_it_needs():
    """All clients of a method for a fixed cohort, one of any other; and not for ever."""
    fixed = LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))
    for method, leaving, counted in ((fixed, [2], [6, 0, 6]), (METHOD, [2, 3, 4, 5, 6, 7], [6, 0, 6])):
        grid, away, looks = grid_of(method), {}, []

        def come_back(grid: Any = grid, away: Any = away, looks: Any = looks) -> Any:
            looks.append(len(grid.contexts))
            grid.contexts |= away if len(looks) > 4 else {}  # twice at the start and in round 1, twice in round 2
            return list(grid.contexts)

        def leave(event: Any, grid: Any = grid, away: Any = away, leaving: Any = leaving) -> None:
            if event.event["round"] == 1:
                away |= {node: grid.contexts.pop(node) for node in leaving}

        grid.get_node_ids = come_back  # type: ignore[method-assign]
        here = deployed(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[leave], timeout=0.1)
        assert [event["clients"] for event in here.events] == counted
        looks.clear()
        grid.contexts |= away
        here = deployed(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[leave], timeout=30.0)
        assert [event["clients"] for event in here.events] == [6, 6, 6] and 6 - len(leaving) in looks


def test_a_method_for_a_fixed_cohort_leaves_such_a_round_out():
    method = LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))
    grid = grid_of(method)
    grid.lose = lambda message, client: is_round(message, 2) and client == 4
    here = deployed(method, grid, rounds=3, cohort_size=6)
    assert [event["clients"] for event in here.events] == [6, 0, 6]


def test_a_client_that_replies_to_one_phase_only_keeps_its_state():
    """EPISODE's second part without client 1, which then goes on from what it kept."""
    method = Episode(local=LocalSGD(lr=0.05, steps=2, batch_size=4))
    grid = grid_of(method)
    parts: list[int] = []

    def lose(message: Message, client: int) -> bool:
        if client == 1 and is_round(message, 2):
            parts.append(1)
        return client == 1 and len(parts) == 2 and is_round(message, 2)

    grid.lose = lose
    here = deployed(method, grid, params=START, rounds=3, cohort_size=6)
    assert len(parts) == 2 and here.events[-1]["clients"] == 6 and np.isfinite(here.events[-1]["test_loss"])


@pytest.mark.parametrize(
    "order",
    [
        {"round": -1},
        {"round": 2**40},
        {"phase": 9},
        {"client": 6},
        {"client": -1},
        {"num_clients": 0},
        {"dtype": "object"},
        {"shared": [2**40, 1]},
        {"shared": "no"},
        {"cohort_size": float("nan")},
        {"cohort_size": 3},
        {"last_aggregated": "x"},
        {"round": None},
    ],
)
def test_a_client_refuses_orders_that_make_no_sense(order: dict[str, Any]):
    grid = grid_of()
    facts = {k: v for k, v in (vars(ORDER) | order).items() if v is not None}
    content = RecordDict({"instructions": ConfigRecord(facts), "down": ArrayRecord()})
    (reply,) = grid.send_and_receive([Message(content, 3, MessageType.TRAIN)])
    assert reply.has_error() and "FedraxError" in str(reply.error.reason)


@pytest.mark.parametrize("content", [{}, {"down": ArrayRecord()}, {"instructions": ConfigRecord({"round": 1})}])
def test_a_client_refuses_messages_of_others(content: dict[str, Any]):
    grid = grid_of()
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        (reply,) = grid.send_and_receive([Message(RecordDict(content), 3, kind)])
        assert reply.has_error() and "malformed message" in str(reply.error.reason)


def test_a_run_that_diverges_raises_a_clear_error():
    """All clients' numbers are not finite; the rounds before are not lost."""

    def data(context: Any) -> Any:
        """Equal large samples with different labels: no step fits them all."""
        x, y = own(context)
        return np.full_like(x, 1e30), np.arange(len(y)) % 3

    grid = Serialized(client_app(METHOD, TASK, data), len(SIZES))
    with pytest.raises(NonFiniteError, match="round 1: no client's reply is finite: lower the learning rate") as told:
        deployed(METHOD, grid, params=START)
    assert told.value.result is not None and told.value.result.stopped == "diverged"
    assert_close(told.value.result.params, START, 0)


def test_a_run_that_nobody_answers_raises_a_clear_error(caplog: pytest.LogCaptureFixture):
    """Not a result; and of each client it is said why."""
    grid = grid_of()
    grid.lose = lambda message, client: message.metadata.message_type == MessageType.TRAIN
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(FedraxError, match="no round received enough replies"):
        deployed(METHOD, grid, rounds=2, cohort_size=6)
    assert "round 2: client 4 (node 6) failed: it took too long" in caplog.text


class Silent(Serialized):
    """One more node is there that never answers, and as it comes another goes."""

    queries = 0

    def get_node_ids(self) -> Any:
        """With the silent one."""
        return [*super().get_node_ids(), 99]

    def push_messages(self, messages: Any) -> Any:
        """As far as they can be answered."""
        there = [message for message in messages if message.metadata.dst_node_id != 99]
        self.queries += len(messages) - len(there)
        ids = dict(zip(map(id, there), super().push_messages(there), strict=True))
        return [ids.get(id(message), "never") for message in messages]


def test_a_node_that_never_answers_does_not_hold_up_the_rounds():
    grid = Silent(client_app(METHOD, TASK, own, seed=0), len(SIZES))

    def leave(event: Any) -> None:
        grid.contexts.pop(4, None)

    here = deployed(METHOD, grid, rounds=4, cohort_size=6, eval_every=1, callbacks=[leave], timeout=0.3)
    assert [event["clients"] for event in here.events] == [6, 5, 5, 5]
    assert grid.queries == 1


def test_too_few_clients_raise_a_clear_error():
    with pytest.raises(FedraxError, match="6 of 7 clients were connected after 0 seconds"):
        federate(grid_of(), METHOD, TASK, clients=7, wait=0)


def test_numbers_that_do_not_fit_raise_a_clear_error():
    grid = Serialized(client_app(METHOD, TASK, own), [{"partition-id": k} for k in (0, 2, 2)])
    with pytest.raises(FedraxError, match="must be the numbers 0 to 2, and are 0, 2, 2"):
        federate(grid, METHOD, TASK, clients=3, wait=0)


def test_a_node_that_is_started_again_before_the_start_is_one(caplog: pytest.LogCaptureFixture):
    """The SuperLink lists the one that is gone until it misses its heartbeats; it is not among the clients."""
    grid = grid_of()
    gone, last = grid.contexts.pop(3), grid.contexts.pop(7)
    order = [{3: gone}, {98: gone}, {7: last}]

    def look() -> Any:
        grid.contexts |= order.pop(0) if order else {}
        return list(grid.contexts)

    grid.get_node_ids = look  # type: ignore[method-assign]
    asked = []
    grid.lose = lambda message, client: asked.append(client + 2) or False
    with caplog.at_level(logging.WARNING, "flwr"):
        here = deployed(METHOD, grid, params=START, rounds=1, cohort_size=6)
    assert "node 3 (partition-id 1) is ignored" in caplog.text
    assert here.events[-1]["clients"] == 6 and asked.count(98) == 2 and asked.count(3) == 1


def test_samples_of_different_kinds_raise_a_clear_error():
    def data(context: Any) -> Any:
        x, y = own(context)
        return (x[:, :2] if context.node_config["partition-id"] == 1 else x), y

    grid = Serialized(client_app(METHOD, TASK, data), len(SIZES))
    with pytest.raises(FedraxError, match=r"dtypes: client 0 x float32 \[4\], .* and client 1 x float32 \[2\]"):
        federate(grid, METHOD, TASK, clients=6)


def introduced(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """What the server says where node 4 introduces itself with these changes."""
    grid = grid_of()

    def change(reply: Message, client: int) -> None:
        if client == 2 and reply.metadata.message_type == MessageType.QUERY:
            reply.content.config_records["client"].update(changes)

    grid.change = change
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(FedraxError, match="5 of 6 clients were connected"):
        federate(grid, METHOD, TASK, clients=6, wait=0)
    return caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"x_type": "f4,f4"},
        {"x_type": "|V8"},
        {"y_type": "(2,3)f4"},
        {"y_type": 3},
        {"x_shape": [-1]},
        {"size": 0},
        {"client": -1},
        {"test_size": 2.0},
    ],
    ids=str,
)
def test_introductions_that_make_no_sense_are_left_out(changes: dict[str, Any], caplog: pytest.LogCaptureFixture):
    assert "node 4 sent a malformed introduction" in introduced(changes, caplog)


def test_another_version_is_noted(caplog: pytest.LogCaptureFixture):
    assert "node 4 has fedrax 0.0.7, and the server" in introduced({"version": "0.0.7", "size": -1}, caplog)
