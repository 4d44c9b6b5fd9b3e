"""Requests for the loss of the current model on clients' training samples, before a cohort is sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict

from fedrax.contract.task import Task
from fedrax.flower.executor import DeliveryState
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.registry import ClientRegistry, log
from fedrax.flower.serialization import pack, record_bytes
from fedrax.simulation.candidate_losses import ANSWER_BYTES
from fedrax.tree import Tree

REQUEST, ANSWER = "ask", "loss"
"""Names of the records in messages to clients and in their replies. They are part of the protocol."""


@dataclass
class LossRequests:
    """Asks clients for the mean loss of a model on their training samples."""

    task: Task
    registry: ClientRegistry
    delivery: DeliveryState
    dtype: str
    asked: int = 0
    """Number of clients that were asked last."""

    def __call__(self, round: int, model: Tree, clients: np.ndarray) -> dict[int, float]:
        """The loss of each client that replies, for ``model`` as (parameters, running statistics)."""
        packed, contents, self.asked = pack(model), {}, len(clients)
        for client in map(int, clients):
            clients_of_run, frozen = self.registry.num_clients, self.registry.frozen
            own = RoundInstructions(round, 0, client, clients_of_run, 1.0, -1, [0, 0], self.dtype, frozen)
            contents[client] = RecordDict({"model": packed, REQUEST: ConfigRecord(), **own.record()})
        name = f"losses before round {round + 1}"
        replies = self.registry.send_and_receive(MessageType.EVALUATE, contents, name) if contents else {}
        self.delivery.bytes_down += len(contents) * record_bytes(packed)
        losses = {}
        for client in sorted(replies):
            loss = _loss_in(replies[client])
            if loss is None:
                log.warning("%s: client %d is left out: its reply has no finite loss", name, client)
                continue
            losses[client] = loss
            self.delivery.bytes_up += ANSWER_BYTES
        return losses


def _loss_in(reply: RecordDict) -> float | None:
    """The loss in a reply; None where it is missing or not finite."""
    answer: Any = reply.get(ANSWER)
    value = answer.get("mean") if isinstance(answer, ConfigRecord) else None
    return value if isinstance(value, float) and math.isfinite(value) else None
