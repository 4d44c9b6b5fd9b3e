"""Evaluation of the global model, on the server's test samples or on the clients'."""

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
from fedrax.flower.serialization import pack
from fedrax.simulation.evaluation import Evaluator, is_lower_better, over_clients, parameter_metrics, sample_values
from fedrax.simulation.executors.execution_plan import make_mesh
from fedrax.tree import Tree

Evaluate = Callable[[Tree, Tree, RoundInstructions, np.ndarray], dict[str, float]]
"""(parameters, statistics, instructions of a round, available clients) -> metrics by their names in events."""


def evaluate_on_server(task: Task, test: tuple[Any, Any], samples: Batch) -> Evaluate:
    """Evaluate on test samples (x [n, ...], y [n, ...]) of the shapes of the clients' ``samples``."""
    _check_test(test, samples)
    x, y = (np.asarray(part) for part in test)
    evaluator = Evaluator(task, make_mesh(1), Batch(*as_samples(x, y)))

    def evaluate(
        params: Tree, statistics: Tree, instructions: RoundInstructions, available: np.ndarray
    ) -> dict[str, float]:
        return parameter_metrics(task, params) | evaluator(with_statistics(params, statistics), "test")

    return evaluate


def evaluate_on_clients(task: Task, registry: ClientRegistry, delivery: DeliveryState, per_client: bool) -> Evaluate:
    """Evaluate on the test samples of the available clients; only sums over a client's samples leave it.

    Metrics are means over samples, with statistics over clients where ``per_client``.
    """
    if not registry.test_sizes.any():
        log.warning("no client has test samples, and the server has none: nothing is evaluated")

    def evaluate(
        params: Tree, statistics: Tree, instructions: RoundInstructions, available: np.ndarray
    ) -> dict[str, float]:
        model, contents = pack((params, statistics)), {}
        names = _metric_names(task, with_statistics(params, statistics), shapes_of_samples(registry.samples))
        for client in map(int, available[registry.test_sizes[available] > 0]):
            own = RoundInstructions(
                **{**vars(instructions), "client": client, "last_aggregated": delivery.last_aggregated.get(client, -1)}
            )
            contents[client] = RecordDict({"model": model, **own.record()})
            delivery.add_start(client, registry.node_of[client], contents[client])
        replies = registry.send_and_receive(MessageType.EVALUATE, contents, f"evaluation {instructions.round + 1}")
        for client in contents:
            delivery.record_reply(client, registry.node_of[client], client in replies)
        sums = []
        for client, reply in replies.items():
            if (one := _parse_sums(reply, names)) is not None:
                sums.append(one)
            else:
                log.warning("client %d is left out of the evaluation: its metrics are not those of this task", client)
        return parameter_metrics(task, params) | _aggregate_metrics(task, sums, per_client)

    return evaluate


def _metric_names(task: Task, variables: Tree, samples: Any) -> set[str]:
    """Names of the metrics that a client may send, of the global and the personalized model."""
    names = jax.eval_shape(partial(sample_values, task), variables, samples)
    return {f"{kind}{name}" for kind in ("", "personal_") for name in names}


def _parse_sums(reply: RecordDict, names: set[str]) -> tuple[int, dict[str, float]] | None:
    """(number of test samples, sums of metrics over them); None where the reply is malformed or not finite."""
    rows, sums = reply.get("rows"), reply.get("sums")
    if not isinstance(rows, ConfigRecord) or not isinstance(sums, ConfigRecord):
        return None
    count, known = rows.get("test"), bool(sums) and set(sums) <= names
    numbers = all(isinstance(value, float) and math.isfinite(value) for value in sums.values())
    return (count, dict(sums)) if type(count) is int and 0 < count < 2**31 and known and numbers else None  # type: ignore[return-value]


def _aggregate_metrics(task: Task, replies: list[tuple[int, dict[str, float]]], per_client: bool) -> dict[str, float]:
    """Means over all test samples of the clients that sent the metric."""
    metrics: dict[str, float] = {}
    for name in sorted({name for _, sums in replies for name in sums}):
        sent = [(rows, sums[name]) for rows, sums in replies if name in sums]
        rows, values = np.array([r for r, _ in sent]), np.array([value for _, value in sent])
        metrics[f"test_{name}"] = float(values.sum() / rows.sum())
        if per_client:
            lower = is_lower_better(task, name.removeprefix("personal_"))
            metrics |= over_clients(values, rows, f"test_{name}", lower)
    return metrics


def _check_test(test: Any, samples: Batch) -> None:
    """Raise FedraxError for test samples that are not a pair, or differ in shape from the clients'."""
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise FedraxError(
            "test is a pair (x, y) of the server's test samples: leave it out to evaluate on the clients' test samples"
        )
    shapes = [jax.numpy.shape(part)[1:] for part in test]
    wanted = [part.shape[1:] for part in samples]
    if shapes != wanted:
        raise FedraxError(f"test has samples (x, y) of shapes {shapes}, and the clients' are {wanted}: they must agree")
