"""Who the clients of a federation are: nodes of Flower that have said what they have, and the messages to them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import jax
import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedrax.errors import FedraxError
from fedrax.version import VERSION

log = getLogger("flwr")
"""Flower's own, which reaches whoever follows the run."""
_LARGEST = 1 << 31
_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
_TYPES = {name: np.dtype(jax.numpy.dtype(name)) for name in _NAMES.split()}
"""Of samples."""
PAUSE = 1.0
"""Seconds between two looks at who is there."""


@dataclass
class ClientRegistry:
    """The clients 0 to N - 1 and the nodes that they are on."""

    grid: Grid
    timeout: float
    """Seconds to wait for answers."""
    sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """n_i, [N]."""
    test_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, int))
    """The numbers of test samples, [N]."""
    samples: Any = None
    """Shapes and types of one sample, x [1, ...] and y [1, ...]."""
    node_of: dict[int, int] = field(default_factory=dict)
    """The node of each client."""
    by_number: bool = False
    """Whether nodes know their client's number, so that one that comes back is known again."""
    asked: set[int] = field(default_factory=set)
    """Nodes that have said who they are, or were not to be understood."""
    not_before: dict[int, float] = field(default_factory=dict)
    """When to ask a node again that gave no answer."""

    @property
    def num_clients(self) -> int:
        """N."""
        return len(self.sizes)

    def gather(self, count: int, wait: float) -> None:
        """Wait until ``count`` nodes have said who they are, for so many seconds at most; they are the clients."""
        found: dict[int, Mapping[str, Any]] = {}
        known = found
        due = time.monotonic() + wait
        while len(self.node_of) < count:
            there = set(self.grid.get_node_ids())
            found |= self._introductions(there)
            known = {node: facts for node, facts in found.items() if node in there}
            self._number(known, count)
            if len(self.node_of) < count:
                if time.monotonic() > due:
                    raise FedraxError(_too_few(len(self.node_of), known, count, wait))
                time.sleep(PAUSE)
        for node in sorted(set(known) - set(self.node_of.values())):
            log.warning("node %d (partition-id %s) is none of the clients", node, known[node].get("client"))
        facts = [found[self.node_of[client]] for client in range(count)]
        self.sizes, self.test_sizes = (np.array([one[name] for one in facts], int) for name in ("size", "test_size"))
        kinds = [_kind(one) for one in facts]
        if odd := [client for client in range(count) if kinds[client] != kinds[0]]:
            words = [f"client {client} {_said(kinds[client])}" for client in (0, odd[0])]
            raise FedraxError(f"clients have samples of different kinds: {' and '.join(words)}")
        x_type, x_shape, y_type, y_shape = kinds[0]
        struct = lambda shape, kind: jax.ShapeDtypeStruct((1, *shape), _TYPES[kind])  # noqa: E731
        self.samples = (struct(x_shape, x_type), struct(y_shape, y_type))

    def _number(self, known: Mapping[int, Mapping[str, Any]], count: int) -> None:
        """Number the clients by their nodes' partition-ids, otherwise in the order of nodes.

        Of two nodes with one number the later counts, since a restarted node is listed twice for a while.
        """
        self.by_number = all("client" in facts for facts in known.values())
        numbers = {node: facts["client"] for node, facts in known.items()} if self.by_number else {}
        pairs = [(numbers.get(node, k), node) for k, node in enumerate(known if self.by_number else sorted(known))]
        self.node_of = {number: node for number, node in pairs if number < count}

    def available(self) -> np.ndarray:
        """The clients whose nodes are there now, sorted; one that has come back under another number is known again."""
        there = set(self.grid.get_node_ids())
        if self.by_number and not there.issuperset(self.node_of.values()):
            for node, facts in self._introductions(there).items():
                client = facts.get("client")
                if client in self.node_of and self.node_of[client] not in there:
                    self.node_of[client] = node
        return np.array(sorted(client for client, node in self.node_of.items() if node in there), int)

    def ask(self, kind: str, contents: Mapping[int, RecordDict], group: str) -> dict[int, RecordDict]:
        """Send each client its content and wait for the answers: those that came, and were no errors, by client."""
        messages = [
            Message(content, self.node_of[client], kind, ttl=self.timeout, group_id=group)
            for client, content in contents.items()
        ]
        answers = self._exchange(messages)
        found = {}
        for client in contents:
            answer = answers.get(node := self.node_of[client])
            if isinstance(answer, RecordDict):
                found[client] = answer
            elif answer is None:
                log.warning("%s: client %d (node %d) has not answered in time", group, client, node)
            else:
                log.warning("%s: client %d (node %d) could not answer: %s", group, client, node, answer)
        return found

    def _exchange(self, messages: Sequence[Message]) -> dict[int, RecordDict | str]:
        """What nodes have answered in time: contents, or the words of an error."""
        ids = self.grid.push_messages(messages)
        to = [message.metadata.dst_node_id for message in messages]
        waiting = {number: node for number, node in zip(ids, to, strict=False) if number}  # none of what is refused
        began, found = time.monotonic(), {}
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)  # an error's node may be the server's own
                if node is not None:
                    found[node] = str(reply.error.reason) if reply.has_error() else reply.content
            passed = time.monotonic() - began
            if passed > self.timeout or not waiting:
                break
            time.sleep(min(max(0.1, passed / 10), PAUSE))
        return found

    def _introductions(self, nodes: Iterable[int]) -> dict[int, Mapping[str, Any]]:
        """Query nodes that have not introduced themselves.

        A node that does not reply is queried again only after ten times that waiting time, so that it does not delay
        the other clients.
        """
        began = time.monotonic()
        new = sorted(node for node in set(nodes) - self.asked if self.not_before.get(node, began) <= began)
        answers = self._exchange([Message(RecordDict(), node, MessageType.QUERY, ttl=self.timeout) for node in new])
        passed = time.monotonic() - began
        for node in new:
            if not isinstance(answer := answers.get(node), RecordDict):
                self.not_before[node] = began + passed + 10 * max(passed, PAUSE)
                log.warning("node %d did not introduce itself: %s", node, answer or "it has not answered in time")
        answers = {node: answer for node, answer in answers.items() if isinstance(answer, RecordDict)}
        self.asked |= set(answers)
        found = {node: content.get("client") for node, content in answers.items()}
        wrong = [node for node, facts in found.items() if not _makes_sense(facts)]
        for node, facts in found.items():
            version = facts.get("version") if isinstance(facts, ConfigRecord) else None
            if node in wrong:
                log.warning("node %d sent a malformed introduction: is it a fedrax client?", node)
            if isinstance(version, str) and version != VERSION:
                log.warning("node %d has fedrax %.40s, and the server %s: install the same", node, version, VERSION)
        return {node: dict(facts) for node, facts in found.items() if node not in wrong}  # type: ignore[arg-type]


def _too_few(there: int, known: Mapping[int, Mapping[str, Any]], count: int, wait: float) -> str:
    words = f"{there} of {count} clients were there after {wait:g} seconds"
    if there == len(known):
        return f"{words}: start their SuperNodes, and look at the warnings above"
    numbers = ", ".join(str(facts["client"]) for facts in known.values())
    return f"{words}: their partition-ids must be the numbers 0 to {count - 1}, and these are {numbers}"


def _makes_sense(facts: Any) -> bool:
    if not isinstance(facts, ConfigRecord):
        return False
    whole: list[Any] = [facts.get(name, 0) for name in ("client", "test_size", "size")]
    shapes = [facts.get(f"{part}_shape") for part in "xy"]
    types = [facts.get(f"{part}_type") for part in "xy"]
    lists = all(isinstance(s, list) and all(type(n) is int and 0 <= n < _LARGEST for n in s) for s in shapes)
    numbers = all(type(n) is int and 0 <= n < _LARGEST for n in whole) and whole[-1] > 0
    return lists and numbers and all(isinstance(name, str) and name in _TYPES for name in types)


def _said(kind: tuple[str, tuple[int, ...], str, tuple[int, ...]]) -> str:
    x_type, x_shape, y_type, y_shape = kind
    return f"x {x_type} {list(x_shape)}, y {y_type} {list(y_shape)}"


def _kind(facts: Mapping[str, Any]) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    return facts["x_type"], tuple(facts["x_shape"]), facts["y_type"], tuple(facts["y_shape"])
