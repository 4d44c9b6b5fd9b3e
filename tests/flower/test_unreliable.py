"""Clients that fail, reconnect, lose their state or send malformed messages."""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedrax import Episode, FedAvg, FedraxError, LocalSGD, LoSAC, Scaffold, simulate
from fedrax.algorithms import PFedMe
from fedrax.compression import Quantized
from fedrax.data import Dataset, as_samples
from fedrax.flower import LocalGrid, client_app, federate, registry
from fedrax.flower.instructions import RoundInstructions
from fedrax.simulation import NonFiniteError, Script
from tests.flower.messages import (
    FEDERATION,
    INITIAL_PARAMS,
    SIZES,
    TASK,
    SerializingGrid,
    X,
    Y,
    assert_close,
    client_samples,
    run_federation,
)

LOCAL = LocalSGD(lr=0.05, steps=3, batch_size=4)
METHOD = Scaffold(local=LOCAL)
ALL = list(range(len(SIZES)))
ORDER = RoundInstructions(0, 0, 1, 6, 3.0, -1, [1, 2], "float32", "")


def make_grid(algorithm: Any = METHOD, seed: int | None = 0) -> SerializingGrid:
    """A grid with six clients of a method."""
    return SerializingGrid(client_app(algorithm, TASK, client_samples, seed=seed), len(SIZES))


def simulated(cohorts: list[list[int]], algorithm: Any = METHOD) -> Any:
    """Parameters after simulated rounds with these cohorts."""
    return _simulated(tuple(map(tuple, cohorts)), algorithm)


@cache
def _simulated(cohorts: tuple[tuple[int, ...], ...], algorithm: Any) -> Any:
    settings: dict[str, Any] = {"plan": "scan", "devices": 1, "params": INITIAL_PARAMS, "rounds": len(cohorts)}
    script = Script(cohorts=[list(cohort) for cohort in cohorts])
    return simulate(algorithm, TASK, FEDERATION, script=script, **settings).params


def is_round(message: Message, number: int) -> bool:
    """Whether a message belongs to this round, counted as in events."""
    return message.metadata.message_type == MessageType.TRAIN and message.metadata.group_id == f"round {number}"


def malformed_reply(how: str) -> Any:
    """A function that modifies client 2's reply in round 2."""

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
def test_malformed_replies_are_ignored(how: str, caplog: pytest.LogCaptureFixture):
    grid = make_grid()
    grid.change = malformed_reply(how)
    with caplog.at_level(logging.WARNING, "flwr"):
        federated = run_federation(METHOD, grid, params=INITIAL_PARAMS, rounds=3, cohort_size=6)
    assert_close(federated.params, simulated([ALL, [c for c in ALL if c != 2], ALL]))
    assert "round 2: client 2 is left out: its reply" in caplog.text


def test_replies_that_decode_to_infinity_are_ignored(caplog: pytest.LogCaptureFixture):
    """Finite integers and a finite scale, whose product overflows."""
    method = Quantized(FedAvg(local=LOCAL))
    grid = make_grid(method)

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
    federated = run_federation(method, grid, params=INITIAL_PARAMS, rounds=3, cohort_size=6)
    assert_close(federated.params, simulated([ALL, [c for c in ALL if c != 2], ALL], method))
    assert "round 2: client 2 is left out: its reply has values that are not finite" in caplog.text


def test_clients_may_have_64_bit_samples():
    def data(context: Any) -> Any:
        x, y = client_samples(context)
        return (x.astype(np.float64) if context.node_config["partition-id"] == 1 else x), y

    federated = run_federation(
        METHOD, SerializingGrid(client_app(METHOD, TASK, data, seed=0), 6), params=INITIAL_PARAMS, rounds=2
    )
    assert_close(federated.params, run_federation(METHOD, make_grid(), params=INITIAL_PARAMS, rounds=2).params)


def test_reconnected_client_keeps_its_identity():
    grid = make_grid()
    node = next(node for node in grid.contexts if grid.contexts[node].node_config["partition-id"] == 3)

    def reconnect(event: Any) -> None:
        if event.event["round"] == 1:
            grid.away = grid.contexts.pop(node)  # type: ignore[attr-defined]
        elif event.event["round"] == 2:
            grid.contexts[99] = grid.away  # type: ignore[attr-defined]

    federated = run_federation(
        METHOD, grid, params=INITIAL_PARAMS, rounds=3, cohort_size=6, eval_every=1, callbacks=[reconnect]
    )
    assert [event["clients"] for event in federated.events] == [6, 5, 6]
    assert_close(federated.params, simulated([ALL, [c for c in ALL if c != 3], ALL]))


def test_client_without_its_state_starts_with_the_initial_one(caplog: pytest.LogCaptureFixture):
    grid = make_grid()

    def forget(event: Any) -> None:
        grid.contexts[2].state.clear()

    with caplog.at_level(logging.WARNING, "flwr"):
        federated = run_federation(
            METHOD, grid, params=INITIAL_PARAMS, rounds=2, cohort_size=6, eval_every=1, callbacks=[forget]
        )
    assert "round 2: client 0 has lost its state" in caplog.text
    assert [event["clients"] for event in federated.events] == [6, 6] and np.isfinite(federated.events[-1]["test_loss"])


def test_client_without_initial_parameters_is_sent_them_again():
    """pFedMe's clients need the initial parameters: a client that lost them is left out of one round."""
    method = PFedMe()
    grid = make_grid(method)

    def forget(event: Any) -> None:
        if event.event["round"] == 1:
            grid.contexts[2].state.clear()

    federated = run_federation(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[forget])
    assert [event["clients"] for event in federated.events] == [6, 5, 6]


def test_evaluation_messages_also_deliver_the_initial_parameters():
    """A client is sent them once, with its first message, and keeps them until its first round counts."""
    method = PFedMe()
    both = lambda context: (client_samples(context), client_samples(context))  # noqa: E731
    grid = SerializingGrid(client_app(method, TASK, both, seed=0), len(SIZES))
    grid.lose = lambda message, client: client == 1 and is_round(message, 2)
    grid.change = malformed_reply("data")
    federated = run_federation(method, grid, test=None, rounds=4, cohort_size=6, eval_every=1)
    assert [event["clients"] for event in federated.events] == [6, 4, 6, 6]


def test_client_with_a_rejected_reply_keeps_the_initial_parameters():
    """If the server rejects all replies of the first round, clients remain unchanged."""
    method = PFedMe()
    grid = make_grid(method)

    def make_infinite(reply: Message, client: int) -> None:
        if reply.metadata.group_id == "round 1":
            del reply.content["sent"]

    grid.change = make_infinite
    federated = run_federation(method, grid, rounds=3, cohort_size=6)
    assert [event["clients"] for event in federated.events] == [0, 6, 6]


def test_round_without_replies_changes_nothing():
    grid = make_grid()
    grid.lose = lambda message, client: is_round(message, 2)
    federated = run_federation(METHOD, grid, params=INITIAL_PARAMS, rounds=3, cohort_size=6)
    assert [event["clients"] for event in federated.events] == [6, 0, 6]
    assert np.isfinite(federated.events[-1]["test_loss"])


def test_rounds_wait_for_the_minimal_number_of_clients():
    """All clients if the method needs a fixed cohort, otherwise one; waiting has a limit."""
    fixed = LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))
    for method, leaving, counted in ((fixed, [2], [6, 0, 6]), (METHOD, [2, 3, 4, 5, 6, 7], [6, 0, 6])):
        grid, away, looks = make_grid(method), {}, []

        def come_back(grid: Any = grid, away: Any = away, looks: Any = looks) -> Any:
            looks.append(len(grid.contexts))
            grid.contexts |= away if len(looks) > 4 else {}  # twice at the start and in round 1, twice in round 2
            return list(grid.contexts)

        def leave(event: Any, grid: Any = grid, away: Any = away, leaving: Any = leaving) -> None:
            if event.event["round"] == 1:
                away |= {node: grid.contexts.pop(node) for node in leaving}

        grid.get_node_ids = come_back  # type: ignore[method-assign]
        federated = run_federation(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[leave], timeout=0.1)
        assert [event["clients"] for event in federated.events] == counted
        looks.clear()
        grid.contexts |= away
        federated = run_federation(method, grid, rounds=3, cohort_size=6, eval_every=1, callbacks=[leave], timeout=30.0)
        assert [event["clients"] for event in federated.events] == [6, 6, 6] and 6 - len(leaving) in looks


def test_method_with_fixed_cohort_skips_incomplete_rounds():
    method = LoSAC(local=LocalSGD(lr=0.02, steps=2, blocks=2))
    grid = make_grid(method)
    grid.lose = lambda message, client: is_round(message, 2) and client == 4
    federated = run_federation(method, grid, rounds=3, cohort_size=6)
    assert [event["clients"] for event in federated.events] == [6, 0, 6]


def test_client_that_replies_to_one_phase_only_keeps_its_state():
    """EPISODE's second phase without client 1, which then continues from its state."""
    method = Episode(local=LocalSGD(lr=0.05, steps=2, batch_size=4))
    grid = make_grid(method)
    parts: list[int] = []

    def lose(message: Message, client: int) -> bool:
        if client == 1 and is_round(message, 2):
            parts.append(1)
        return client == 1 and len(parts) == 2 and is_round(message, 2)

    grid.lose = lose
    federated = run_federation(method, grid, params=INITIAL_PARAMS, rounds=3, cohort_size=6)
    assert len(parts) == 2 and federated.events[-1]["clients"] == 6 and np.isfinite(federated.events[-1]["test_loss"])


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
def test_client_rejects_malformed_messages(order: dict[str, Any]):
    grid = make_grid()
    facts = {k: v for k, v in (vars(ORDER) | order).items() if v is not None}
    content = RecordDict({"instructions": ConfigRecord(facts), "down": ArrayRecord()})
    (reply,) = grid.send_and_receive([Message(content, 3, MessageType.TRAIN)])
    assert reply.has_error() and "FedraxError" in str(reply.error.reason)


@pytest.mark.parametrize("content", [{}, {"down": ArrayRecord()}, {"instructions": ConfigRecord({"round": 1})}])
def test_client_rejects_messages_of_other_apps(content: dict[str, Any]):
    grid = make_grid()
    for kind in (MessageType.TRAIN, MessageType.EVALUATE):
        (reply,) = grid.send_and_receive([Message(RecordDict(content), 3, kind)])
        assert reply.has_error() and "malformed message" in str(reply.error.reason)


def test_diverged_run_raises_a_clear_error():
    """No client's upload is finite; earlier rounds are kept."""

    def data(context: Any) -> Any:
        """Equal large samples with different labels, which no model fits."""
        x, y = client_samples(context)
        return np.full_like(x, 1e30), np.arange(len(y)) % 3

    grid = SerializingGrid(client_app(METHOD, TASK, data), len(SIZES))
    with pytest.raises(
        NonFiniteError, match="round 1: no client's reply is finite: lower the learning rate"
    ) as printed:
        run_federation(METHOD, grid, params=INITIAL_PARAMS)
    assert printed.value.result is not None and printed.value.result.stopped == "diverged"
    assert_close(printed.value.result.params, INITIAL_PARAMS, 0)


def test_run_without_any_reply_raises_a_clear_error(caplog: pytest.LogCaptureFixture):
    """The errors of all clients are logged."""
    grid = make_grid()
    grid.lose = lambda message, client: message.metadata.message_type == MessageType.TRAIN
    with caplog.at_level(logging.WARNING, "flwr"), pytest.raises(FedraxError, match="no round received enough replies"):
        run_federation(METHOD, grid, rounds=2, cohort_size=6)
    assert "round 2: client 4 (node 6) failed: it took too long" in caplog.text


class GridWithSilentNode(SerializingGrid):
    """A grid with an additional node that never replies, and that joins as another node leaves."""

    queries = 0

    def get_node_ids(self) -> Any:
        """Node numbers including the silent one."""
        return [*super().get_node_ids(), 99]

    def push_messages(self, messages: Any) -> Any:
        """Push the messages that can be answered."""
        there = [message for message in messages if message.metadata.dst_node_id != 99]
        self.queries += len(messages) - len(there)
        ids = dict(zip(map(id, there), super().push_messages(there), strict=True))
        return [ids.get(id(message), "never") for message in messages]


def test_silent_node_does_not_block_rounds():
    grid = GridWithSilentNode(client_app(METHOD, TASK, client_samples, seed=0), len(SIZES))

    def leave(event: Any) -> None:
        grid.contexts.pop(4, None)

    federated = run_federation(METHOD, grid, rounds=4, cohort_size=6, eval_every=1, callbacks=[leave], timeout=0.3)
    assert [event["clients"] for event in federated.events] == [6, 5, 5, 5]
    assert grid.queries == 1


def test_too_few_clients_raise_a_clear_error():
    with pytest.raises(FedraxError, match="6 of 7 clients were connected after 0 seconds"):
        federate(make_grid(), METHOD, TASK, clients=7, wait=0)


def test_error_of_the_data_function_is_logged_once_and_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Client 2 has no file until its third query."""
    monkeypatch.setattr(registry, "POLL_SECONDS", 0.01)
    queries = []

    def data(context: Any) -> Any:
        if context.node_config["partition-id"] == 2 and len(queries) < 3:
            queries.append(2)
            raise FileNotFoundError("own.csv")
        return client_samples(context)

    app = client_app(METHOD, TASK, data, seed=0)
    with caplog.at_level(logging.INFO, "flwr"):
        federated = run_federation(METHOD, SerializingGrid(app, len(SIZES)), rounds=1, cohort_size=6)
    assert caplog.text.count("fedrax: 5 of 6 clients have registered") == 1
    assert len(queries) == 3 and federated.events[-1]["clients"] == 6
    assert caplog.text.count("did not introduce itself") == 1
    wanted = (
        "introduce itself: DataFunctionError: the function data of client 2 failed (FileNotFoundError in test_unrel"
    )
    assert wanted in caplog.text
    queries.clear()
    with pytest.raises(
        FedraxError, match=r"5 of 6 clients .*client 2 failed \(FileNotFoundError in test_unreliable.py"
    ):
        run_federation(METHOD, SerializingGrid(app, len(SIZES)), wait=0)


def test_grid_in_one_process_ends_at_the_first_error_of_a_client():
    """In every message: the data function fails for client 3 at its introduction, or later in training."""
    for later in (False, True):
        calls: list[int] = []

        def data(context: Any, calls: list[int] = calls, later: bool = later) -> Any:
            calls.append(context.node_config["partition-id"])
            if calls[-1] == 3 and (not later or calls.count(3) > 1):
                raise KeyError("age")
            return client_samples(context)

        grid = LocalGrid(client_app(METHOD, TASK, data, seed=0), len(SIZES))
        with pytest.raises(
            FedraxError, match=r"client 3 failed: KeyError: 'age' \(.*test_unreliable.py, line .* in data"
        ):
            federate(grid, METHOD, TASK, clients=len(SIZES), rounds=1, cohort_size=6, test=(X, Y))
        assert len(calls) == len(set(calls)) + (4 if later else 0)


def test_grid_in_one_process_is_not_waited_for():
    """It has no further clients."""
    grid = LocalGrid(client_app(METHOD, TASK, client_samples), len(SIZES))
    began = time.monotonic()
    with pytest.raises(FedraxError, match="6 of 7 clients were connected"):
        federate(grid, METHOD, TASK, clients=7, wait=60)
    assert time.monotonic() - began < 30


def test_inconsistent_numbers_of_clients_raise_a_clear_error():
    grid = SerializingGrid(client_app(METHOD, TASK, client_samples), [{"partition-id": k} for k in (0, 2, 2)])
    with pytest.raises(FedraxError, match="must be the numbers 0 to 2, and are 0, 2, 2"):
        federate(grid, METHOD, TASK, clients=3, wait=0)


def test_restarted_node_is_counted_once(caplog: pytest.LogCaptureFixture):
    """The SuperLink lists the stopped node until its heartbeat is overdue; it is not a client."""
    grid = make_grid()
    gone, last = grid.contexts.pop(3), grid.contexts.pop(7)
    order = [{3: gone}, {98: gone}, {7: last}]

    def look() -> Any:
        grid.contexts |= order.pop(0) if order else {}
        return list(grid.contexts)

    grid.get_node_ids = look  # type: ignore[method-assign]
    asked = []
    grid.lose = lambda message, client: asked.append(client + 2) or False
    with caplog.at_level(logging.WARNING, "flwr"):
        federated = run_federation(METHOD, grid, params=INITIAL_PARAMS, rounds=1, cohort_size=6)
    assert "node 3 (partition-id 1) is ignored" in caplog.text
    assert federated.events[-1]["clients"] == 6 and asked.count(98) == 2 and asked.count(3) == 1


def test_clients_with_different_kinds_of_samples_raise_a_clear_error():
    def data(context: Any) -> Any:
        x, y = client_samples(context)
        return (x[:, :2] if context.node_config["partition-id"] == 1 else x), y

    grid = SerializingGrid(client_app(METHOD, TASK, data), len(SIZES))
    with pytest.raises(FedraxError, match=r"dtypes: client 0 x float32 \[4\], .* and client 1 x float32 \[2\]"):
        federate(grid, METHOD, TASK, clients=6)


@pytest.mark.parametrize("names", ["class_names", "feature_names"])
def test_clients_with_other_names_of_classes_or_features_raise_a_clear_error(names: str):
    """Their numbers would mean something else. Clients without names are not compared."""

    def data(context: Any) -> Any:
        client, (x, y) = context.node_config["partition-id"], client_samples(context)
        if client == 0:
            return x, y
        samples = as_samples(x, y)
        known: dict[str, Any] = {"class_names": ("a", "b", "c"), "feature_names": tuple("pqrs")}
        if client == 4:
            known[names] = known[names][::-1]
        return Dataset("own", samples, samples.map(lambda a: a[:0]), 3, **known)

    grid = SerializingGrid(client_app(METHOD, TASK, data), len(SIZES))
    with pytest.raises(FedraxError, match="client 1 and client 4 have classes or features of other names"):
        federate(grid, METHOD, TASK, clients=6)


def log_of_introduction(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> str:
    """Log of the server if node 4 introduces itself with these changes."""
    grid = make_grid()

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
        {"names": "no, yes"},
    ],
    ids=str,
)
def test_malformed_introductions_are_ignored(changes: dict[str, Any], caplog: pytest.LogCaptureFixture):
    assert "node 4 sent a malformed introduction" in log_of_introduction(changes, caplog)


def test_different_version_is_logged(caplog: pytest.LogCaptureFixture):
    assert "node 4 has fedrax 0.0.7, and the server" in log_of_introduction({"version": "0.0.7", "size": -1}, caplog)
