"""Flower grid in one process, to test an app before it is deployed: real messages, no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedrax.config.user_errors import innermost_user_frame
from fedrax.errors import FedraxError
from fedrax.flower.client import DataFunctionError


class LocalGrid(Grid):
    """A Flower Grid whose nodes are calls of a ClientApp in this process, one after another.

    The server is node 1, as in Flower, and the clients' nodes are numbered from 2. An error of the app is raised as
    FedraxError with the client, the error and its place, where a server on a network would leave the client out.

    Args:
        app: the clients' app.
        node_configs: the ``node_config`` of each node's Context, or the number of nodes, whose ``partition-id`` then
            are 0, 1, ...

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> data = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> grid = fedrax.flower.LocalGrid(fedrax.flower.client_app(fedrax.FedAvg(), task, data), 2)
        >>> grid.get_node_ids()
        [2, 3]
    """

    nodes_may_join = False
    """Whether nodes may connect later, for which :func:`fedrax.flower.federate` waits."""

    def __init__(self, app: ClientApp, node_configs: int | Sequence[Mapping[str, Any]]):
        if isinstance(node_configs, int):
            node_configs = [{"partition-id": k, "num-partitions": node_configs} for k in range(node_configs)]
        self.app = app
        # Flower's Message() reads the identity of the process that makes it
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config=dict(config), state=RecordDict(), run_config={})
            for node, config in enumerate(node_configs, 2)
        }
        self._replies: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run, with ID 1.

        Args:
            run: ignored.
        """

    @property
    def run(self) -> Run:
        """The run, without a SuperLink."""
        return Run.create_empty(run_id=1)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message.

        Args:
            content: records of the message.
            message_type: Flower's message type.
            dst_node_id: the receiving node.
            group_id: label of the messages of one round.
            ttl: seconds until the message expires.

        Returns:
            The message.
        """
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """List the nodes.

        Returns:
            The IDs of all clients' nodes.
        """
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Call the app for each message and store the replies.

        Args:
            messages: messages to the nodes.

        Returns:
            The IDs of the messages.
        """
        ids = []
        for message in messages:
            self._sent += 1
            ids.append(str(self._sent))
            message.metadata.__dict__["_message_id"] = ids[-1]  # Flower's grids set it the same way
            self._replies[ids[-1]] = self._reply(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return stored replies.

        Args:
            message_ids: IDs that ``push_messages`` returned.

        Returns:
            The replies that have not been pulled yet.
        """
        return [self._replies.pop(number) for number in list(message_ids) if number in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and pull their replies.

        Args:
            messages: messages to the nodes.
            timeout: ignored.

        Returns:
            The replies.
        """
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        """The app's reply; raises FedraxError where it fails."""
        node = message.metadata.dst_node_id
        context = self.contexts[node]
        try:
            return self.app(message, context)
        except Exception as error:
            client = context.node_config.get("partition-id", f"of node {node}")
            raise FedraxError(f"client {client} failed: {_described(error)}") from error


def _described(error: Exception) -> str:
    """The type and text of an error, and the line of user code that has raised it."""
    cause = error.__cause__ if isinstance(error, DataFunctionError) and error.__cause__ else error
    frame = innermost_user_frame(cause)
    place = "" if frame is None else f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    kind = "" if isinstance(cause, FedraxError) else f"{type(cause).__name__}: "
    return f"{kind}{cause}{place}"
