"""What the global model is worth: on the server's test samples, or on those that the clients have."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from flwr.app import ConfigRecord, MessageType, RecordDict

from fedrax.contract.model import with_statistics
from fedrax.contract.task import Batch, Task
from fedrax.data.dataset import as_samples
from fedrax.errors import FedraxError
from fedrax.flower.executor import DeliveryState
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.registry import ClientRegistry, log
from fedrax.flower.schema import shapes_of_samples
from fedrax.flower.serialization import packed
from fedrax.simulation.evaluation import Evaluator, is_lower_better, over_clients, parameter_metrics, sample_values
from fedrax.simulation.executors.choose import make_mesh
from fedrax.tree import Tree

Evaluate = Callable[[Tree, Tree, RoundInstructions, np.ndarray], dict[str, float]]
"""(parameters, statistics, the order of a round, clients that are there) -> metrics by the names that events have."""


def evaluate_on_server(task: Task, test: tuple[Any, Any], samples: Batch) -> Evaluate:
    """On test samples (x [n, ...], y [n, ...]), which are like the clients' ``samples``."""
    _check_test(test, samples)
    x, y = (np.asarray(part) for part in test)
    evaluator = Evaluator(task, make_mesh(1), Batch(*as_samples(x, y)))

    def evaluate(params: Tree, statistics: Tree, order: RoundInstructions, there: np.ndarray) -> dict[str, float]:
        return parameter_metrics(task, params) | evaluator(with_statistics(params, statistics), "test")

    return evaluate


def evaluate_on_clients(task: Task, nodes: ClientRegistry, traffic: DeliveryState, per_client: bool) -> Evaluate:
    """Evaluate on the test samples of the available clients; only sums over a client's samples leave it.

    Metrics are means over samples, with statistics over clients where ``per_client``.
    """
    if not nodes.test_sizes.any():
        log.warning("no client has test samples, and the server has none: nothing is evaluated")

    def evaluate(params: Tree, statistics: Tree, order: RoundInstructions, there: np.ndarray) -> dict[str, float]:
        model, contents = packed((params, statistics)), {}
        of_one = _names(task, with_statistics(params, statistics), shapes_of_samples(nodes.samples))
        for client in map(int, there[nodes.test_sizes[there] > 0]):
            own = RoundInstructions(**{**vars(order), "client": client, "counted": traffic.counted.get(client, -1)})
            contents[client] = RecordDict({"model": model, **own.record()})
            traffic.introduce(client, nodes.node_of[client], contents[client])
        replies = nodes.ask(MessageType.EVALUATE, contents, f"evaluation {order.round + 1}")
        for client in contents:
            traffic.heard(client, nodes.node_of[client], client in replies)
        found = []
        for client, reply in replies.items():
            if (one := _sums_of(reply, of_one)) is not None:
                found.append(one)
            else:
                log.warning("client %d is left out of the evaluation: its sums are none of this task", client)
        return parameter_metrics(task, params) | _metrics(task, found, per_client)

    return evaluate


def _names(task: Task, variables: Tree, samples: Any) -> set[str]:
    """What a client says of its samples, of the global model and maybe of its own."""
    names = jax.eval_shape(partial(sample_values, task), variables, samples)
    return {f"{kind}{name}" for kind in ("", "personal_") for name in names}


def _sums_of(reply: RecordDict, names: set[str]) -> tuple[int, dict[str, float]] | None:
    """(test samples of a client, finite sums of metrics over them); None for anything else."""
    rows, sums = reply.get("rows"), reply.get("sums")
    if not isinstance(rows, ConfigRecord) or not isinstance(sums, ConfigRecord):
        return None
    count, known = rows.get("test"), bool(sums) and set(sums) <= names
    numbers = all(isinstance(value, float) and math.isfinite(value) for value in sums.values())
    return (count, dict(sums)) if type(count) is int and 0 < count < 2**31 and known and numbers else None  # type: ignore[return-value]


def _metrics(task: Task, found: list[tuple[int, dict[str, float]]], per_client: bool) -> dict[str, float]:
    """Means over all samples of those clients that say them."""
    metrics: dict[str, float] = {}
    for name in sorted({name for _, sums in found for name in sums}):
        mine = [(rows, sums[name]) for rows, sums in found if name in sums]
        rows, values = np.array([r for r, _ in mine]), np.array([value for _, value in mine])
        metrics[f"test_{name}"] = float(values.sum() / rows.sum())
        if per_client:
            lower = is_lower_better(task, name.removeprefix("personal_"))
            metrics |= over_clients(values, rows, f"test_{name}", lower)
    return metrics


def _check_test(test: Any, samples: Batch) -> None:
    """FedraxError for test samples that are no pair, or of another shape than the clients'."""
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise FedraxError("test is a pair (x, y) of the server's own test samples; None has the clients evaluate")
    shapes = [jax.numpy.shape(part)[1:] for part in test]
    wanted = [part.shape[1:] for part in samples]
    if shapes != wanted:
        raise FedraxError(f"test has samples of shape {shapes}, and the clients' are {wanted}")
