"""A federation inside one process, to try an app out before it is deployed: real messages, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):
    """A Grid whose nodes are calls of a ClientApp in this process, one after another.

    node_configs: what each node's Context has as ``node_config``; or how many nodes there are, whose ``partition-id``
    are then 0, 1, ... The server is node 1, as Flower has it, and the others are numbered from 2.
    """

    def __init__(self, app: ClientApp, node_configs: int | Sequence[Mapping[str, Any]]):
        if isinstance(node_configs, int):
            node_configs = [{"partition-id": k, "num-partitions": node_configs} for k in range(node_configs)]
        self.app = app
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1  # of who makes messages in this process
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={})
            for node, config in enumerate(node_configs, 2)
        }
        self._replies: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Run) -> None:
        """There is one run, numbered 1."""

    @property
    def run(self) -> Run:
        """Of no SuperLink."""
        return Run.create_empty(run_id=1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As ``Message`` does."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Have the nodes answer."""
        ids = []
        for message in messages:
            self._sent += 1
            ids.append(str(self._sent))
            message.metadata.__dict__["_message_id"] = ids[-1]  # as Flower's own grids write it
            self._replies[ids[-1]] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Their answers."""
        return [self._replies.pop(number) for number in list(message_ids) if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Both."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        try:
            return self.app(message, self.contexts[node])
        except Exception as error:  # as a SuperNode does
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)
