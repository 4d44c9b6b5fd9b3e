"""Client registry: which Flower nodes are the clients of a federation, and messages to them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedrax.errors import FedraxError
from fedrax.flower.instructions import is_digest, other_weights
from fedrax.inputs import from_flat
from fedrax.version import VERSION

log = getLogger("flwr")
"""Flower's logger: its output is shown by ``flwr run`` and ``flwr log``."""
NOT_INTRODUCED = "did not introduce itself"
"""Words of the warning about a node that did not reply to the query for its data, or with an error."""
_MAX_INTEGER = 1 << 31
"""Bound of the integers that a client may send: they are stored as int32."""
_MAX_ARRAYS = 64
"""Most arrays of a sample, so that a malformed introduction cannot occupy the server."""
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
_TYPES = {name: np.dtype(jax.numpy.dtype(name)) for name in _NAMES.split()}
"""Allowed dtypes of samples."""
_APP_ERROR = re.compile(r"<class '(?:.*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)
"""A SuperNode's text about an exception of its app."""
POLL_SECONDS = 1.0
"""Longest pause between two requests for the list of nodes or for replies."""


class Traffic(NamedTuple):
    """Bytes of the contents of all messages so far: arrays, their names, instructions and evaluations."""

    wire_bytes_down: int = 0
    """Bytes sent to clients."""
    wire_bytes_up: int = 0
    """Bytes received from clients."""


@dataclass
class ClientRegistry:
    """The clients 0 to N - 1 of a federation and their nodes."""

    grid: Grid
    timeout: float
    """Seconds to wait for replies."""
    frozen: str = ""
    """Digest of the server's frozen parameters; clients with another one are rejected."""
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """Numbers of training samples n_i, [N]."""
    test_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """Numbers of test samples, [N]."""
    samples: Any = None
    """Shapes and dtypes of one sample, (x [1, ...], y [1, ...])."""
    node_of: dict[int, int] = field(default_factory=dict)
    """The node of each client."""
    by_number: bool = False
    """Whether all nodes have a partition-id, so that a client is recognized when it restarts as another node."""
    introduced: set[int] = field(default_factory=set)
    """Nodes that have replied to the query for their data, correctly or not."""
    retry_at: dict[int, float] = field(default_factory=dict)
    """Time from which a node that did not reply is queried again."""
    problems: dict[int, str] = field(default_factory=dict)
    """Why nodes are no clients: the last warning about each, which is logged once and not at each query."""
    traffic: Traffic = field(default_factory=Traffic)
    """Bytes that the run has sent and received."""

    @property
    def num_clients(self) -> int:
        """Number of clients N."""
        return len(self.sizes)

    def wait_for_clients(self, count: int, wait: float) -> None:
        """Wait until ``count`` nodes have introduced themselves, which become the clients.

        Raises FedraxError after ``wait`` seconds, and for clients whose samples have different shapes or dtypes. A
        grid without ``nodes_may_join`` is not waited for: it has all nodes from the start.
        """
        wait = wait if getattr(self.grid, "nodes_may_join", True) else 0.0
        found: dict[int, Mapping[str, Any]] = {}
        known, shown = found, -1
        due = time.monotonic() + wait
        while len(self.node_of) < count:
            connected = set(self.grid.get_node_ids())
            found |= self._introductions(connected)
            known = {node: facts for node, facts in found.items() if node in connected}
            self._assign_numbers(known, count)
            if len(self.node_of) < count:
                if time.monotonic() > due:
                    problems = [text for node, text in self.problems.items() if node in connected]
                    raise FedraxError(_too_few_message(len(self.node_of), known, count, wait, problems))
                if shown != (shown := len(self.node_of)):
                    log.info("fedrax: %d of %d clients have registered", shown, count)
                time.sleep(POLL_SECONDS)
        for node in sorted(set(known) - set(self.node_of.values())):
            number = known[node].get("client")
            message = "node %d (partition-id %s) is ignored: another node has its number or the %d clients are complete"
            log.warning(message, node, number, count)
        facts = [found[self.node_of[client]] for client in range(count)]
        self.sizes, self.test_sizes = (np.array([one[name] for one in facts], int) for name in ("size", "test_size"))
        kinds = [_sample_kinds(one) for one in facts]
        if odd := [client for client in range(count) if kinds[client] != kinds[0]]:
            words = [f"client {client} {_describe_samples(kinds[client])}" for client in (0, odd[0])]
            raise FedraxError(f"clients have samples of different shapes or dtypes: {' and '.join(words)}")
        named = [client for client in range(count) if facts[client]["names"]]
        if odd := [client for client in named if facts[client]["names"] != facts[named[0]]["names"]]:
            raise FedraxError(
                f"client {named[0]} and client {odd[0]} have classes or features of other names or in another order,"
                " and their numbers would differ in meaning: return data sets of the same class_names and"
                " feature_names, or number the classes and return (x, y)"
            )
        made = {name: jax.ShapeDtypeStruct((1, *shape), _TYPES[kind]) for name, (kind, shape) in kinds[0].items()}
        y = made.pop("y")
        self.samples = from_flat(made), y

    def _assign_numbers(self, known: Mapping[int, Mapping[str, Any]], count: int) -> None:
        """Number the clients by their nodes' partition-ids, or in the order of node IDs if one has none.

        If two nodes have the same number, the later one is taken: a restarted node is listed twice for a while.
        """
        self.by_number = all("client" in facts for facts in known.values())
        numbers = {node: facts["client"] for node, facts in known.items()} if self.by_number else {}
        pairs = [(numbers.get(node, k), node) for k, node in enumerate(known if self.by_number else sorted(known))]
        self.node_of = {number: node for number, node in pairs if number < count}

    def available(self) -> np.ndarray:
        """The clients whose nodes are connected, sorted; restarted clients are found by their partition-ids."""
        connected = set(self.grid.get_node_ids())
        if self.by_number and not connected.issuperset(self.node_of.values()):
            for node, facts in self._introductions(connected).items():
                client = facts.get("client")
                if client in self.node_of and self.node_of[client] not in connected:
                    self.node_of[client] = node
        return np.array(sorted(client for client, node in self.node_of.items() if node in connected), int)

    def send_and_receive(self, kind: str, contents: Mapping[int, RecordDict], group: str) -> dict[int, RecordDict]:
        """Send messages to clients and wait for the replies; clients that fail or are late are left out.

        Args:
            kind: Flower's message type.
            contents: content of the message to each client.
            group: label of the messages, used in warnings.
        """
        messages = [
            Message(content, self.node_of[client], kind, ttl=self.timeout, group_id=group)
            for client, content in contents.items()
        ]
        replies = self._exchange(messages)
        found = {}
        for client in contents:
            reply = replies.get(node := self.node_of[client])
            if isinstance(reply, RecordDict):
                found[client] = reply
            elif reply is None:
                log.warning("%s: client %d (node %d) did not reply in time", group, client, node)
            else:
                log.warning("%s: client %d (node %d) failed: %s", group, client, node, reply)
        return found

    def _exchange(self, messages: Sequence[Message]) -> dict[int, RecordDict | str]:
        """Replies within the timeout by node: contents, or text of an error."""
        sent, received = sum(_content_bytes(message.content) for message in messages), 0
        ids = self.grid.push_messages(messages)
        to = [message.metadata.dst_node_id for message in messages]
        waiting = {number: node for number, node in zip(ids, to, strict=False) if number}  # rejected ones have no ID
        began, found = time.monotonic(), {}
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                # by message ID: an error reply may name the server's node as its source
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    found[node] = (
                        _APP_ERROR.sub(r"\1: \2", str(reply.error.reason)) if reply.has_error() else reply.content
                    )
                    received += 0 if reply.has_error() else _content_bytes(reply.content)
            passed = time.monotonic() - began
            if passed > self.timeout or not waiting:
                break
            time.sleep(min(max(0.1, passed / 10), POLL_SECONDS))
        self.traffic = Traffic(self.traffic.wire_bytes_down + sent, self.traffic.wire_bytes_up + received)
        return found

    def _introductions(self, nodes: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Query the data of nodes that have not introduced themselves.

        A node that does not reply is queried again only after ten times the waiting time, so that it does not delay
        the other clients.
        """
        began = time.monotonic()
        new = sorted(node for node in set(nodes) - self.introduced if self.retry_at.get(node, began) <= began)
        replies = self._exchange([Message(RecordDict(), node, MessageType.QUERY, ttl=self.timeout) for node in new])
        passed = time.monotonic() - began
        for node in new:
            if not isinstance(reply := replies.get(node), RecordDict):
                self.retry_at[node] = began + passed + 10 * max(passed, POLL_SECONDS)
                self._warn(node, f"node {node} {NOT_INTRODUCED}: {reply or 'it did not reply in time'}")
        contents = {node: reply for node, reply in replies.items() if isinstance(reply, RecordDict)}
        found: dict[int, Any] = {node: content.get("client") for node, content in contents.items()}
        wrong = [node for node, facts in found.items() if not _is_valid_introduction(facts)]
        for node in [node for node, facts in found.items() if node not in wrong and facts["frozen"] != self.frozen]:
            facts = found.pop(node)
            name = f"client {facts['client']} (node {node})" if "client" in facts else f"node {node}"
            self.retry_at[node] = began + passed + 10 * max(passed, POLL_SECONDS)  # its file may be replaced
            self._warn(node, other_weights(name, facts["frozen"], self.frozen))
        self.introduced |= set(found)
        for node, facts in found.items():
            version = facts.get("version") if isinstance(facts, ConfigRecord) else None
            if node in wrong:
                self._warn(node, f"node {node} sent a malformed introduction: is it a fedrax client?")
            else:
                self.problems.pop(node, None)
            if isinstance(version, str) and version != VERSION:
                log.warning("node %d has fedrax %.40s, and the server %s: install the same", node, version, VERSION)
        return {node: dict(facts) for node, facts in found.items() if node not in wrong}

    def _warn(self, node: int, text: str) -> None:
        """Log why a node is no client, unless the last query of this node gave the same reason."""
        if self.problems.get(node) != text:
            log.warning("%s", text)
        self.problems[node] = text


def _content_bytes(content: RecordDict) -> int:
    """Bytes of a message's records and of all names in them; Flower's ``count_bytes`` fails on empty values."""
    arrays = [(name, array.data) for record in content.array_records.values() for name, array in record.items()]
    others = (*content.config_records.values(), *content.metric_records.values())
    facts = [(name, value) for record in others for name, value in record.items()]
    names = sum(map(len, (*content, *(name for name, _ in (*arrays, *facts)))))
    return names + sum(len(data) for _, data in arrays) + sum(_value_bytes(value) for _, value in facts)


def _value_bytes(value: Any) -> int:
    """Bytes of a value in a record: numbers have eight."""
    if isinstance(value, list):
        return sum(map(_value_bytes, value))
    return len(value) if isinstance(value, str | bytes) else 8


def _too_few_message(
    connected: int, known: Mapping[int, Mapping[str, Any]], count: int, wait: float, problems: Sequence[str]
) -> str:
    """The error for fewer than ``count`` clients."""
    words = f"{connected} of {count} clients were connected after {wait:g} seconds"
    if problems:
        return f"{words}: {'; '.join(problems[:3])}"
    if connected == len(known):
        return f"{words}: start their SuperNodes, and look at the warnings above"
    numbers = ", ".join(str(facts["client"]) for facts in known.values())
    return f"{words}: their partition-ids must be the numbers 0 to {count - 1}, and are {numbers}"


def _is_valid_introduction(facts: Any) -> bool:
    """Whether a reply to the query has the number, sizes, shapes and dtypes of a client's samples."""
    if not isinstance(facts, ConfigRecord):
        return False
    whole: list[Any] = [facts.get(name, 0) for name in ("client", "test_size", "size")]
    if not all(type(n) is int and 0 <= n < _MAX_INTEGER for n in whole) or not whole[-1]:
        return False
    names = _array_names(facts)
    shapes = [facts.get(f"{name}_shape") for name in names]
    if not (is_digest(facts.get("frozen")) and is_digest(facts.get("names"))):
        return False
    lists = all(isinstance(s, list) and all(type(n) is int and 0 <= n < _MAX_INTEGER for n in s) for s in shapes)
    known = all(isinstance(kind := facts[f"{name}_type"], str) and kind in _TYPES for name in names)
    try:
        from_flat(dict.fromkeys(name for name in names if name != "y"))
    except FedraxError:
        return False
    return lists and known and "y" in names and len(names) <= _MAX_ARRAYS


def _array_names(facts: Mapping[str, Any]) -> list[str]:
    """The names of the arrays of a client's samples: x or, of several inputs, x_mask or x_0, and y."""
    return sorted(key.removesuffix("_type") for key in facts if key.endswith("_type"))


def _describe_samples(kinds: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Shapes and dtypes of a client's samples as text."""
    return ", ".join(f"{name} {kind} {list(shape)}" for name, (kind, shape) in kinds.items())


def _sample_kinds(facts: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape of a sample) of each array of a client's samples, by name."""
    return {name: (facts[f"{name}_type"], tuple(facts[f"{name}_shape"])) for name in _array_names(facts)}
