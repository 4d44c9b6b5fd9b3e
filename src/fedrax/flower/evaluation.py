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
from fedrax.data.dataset import Samples, as_samples
from fedrax.errors import FedraxError
from fedrax.flower.executor import DeliveryState
from fedrax.flower.instructions import RoundInstructions
from fedrax.flower.registry import ClientRegistry, log
from fedrax.flower.schema import shapes_of_samples
from fedrax.flower.serialization import pack
from fedrax.inputs import arrays_of, named_inputs, same_form
from fedrax.simulation.evaluation import (
    Evaluator,
    Metrics,
    UndefinedMetrics,
    is_lower_better,
    metric_of_means,
    over_clients,
    parameter_metrics,
    sample_values,
    values_of_clients,
)
from fedrax.simulation.executors.execution_plan import make_mesh
from fedrax.tree import Tree

Evaluate = Callable[[Tree, Tree, RoundInstructions, np.ndarray], Metrics]
"""(parameters, statistics, instructions of a round, available clients) -> metrics by their names in events."""


def evaluate_on_server(task: Task, test: tuple[Any, Any], samples: Batch) -> Evaluate:
    """Evaluate on test samples (x [n, ...], y [n, ...]) of the shapes of the clients' ``samples``."""
    evaluator = Evaluator(task, make_mesh(1), Batch(*_checked_test(test, samples)))

    def evaluate(params: Tree, statistics: Tree, instructions: RoundInstructions, available: np.ndarray) -> Metrics:
        return parameter_metrics(task, params) | evaluator(with_statistics(params, statistics), "test")

    return evaluate


def evaluate_on_clients(task: Task, registry: ClientRegistry, delivery: DeliveryState, per_client: bool) -> Evaluate:
    """Evaluate on the test samples of the available clients; only sums over a client's samples leave it.

    Metrics are means over samples, with statistics over clients where ``per_client``.
    """
    if not registry.test_sizes.any():
        log.warning("no client has test samples, and the server has none: nothing is evaluated")
    if task.whole_set:
        log.warning(
            "%s need all test samples together, which the clients do not send: give the server test samples (test=)",
            ", ".join(task.whole_set),
        )
    return _on_clients(task, registry, delivery, per_client)


def evaluate_on_both(
    on_server: Evaluate, task: Task, registry: ClientRegistry, delivery: DeliveryState, per_client: bool
) -> Evaluate:
    """Evaluate the global model on the server's test samples, and on the clients' what the server cannot evaluate.

    That is personal models and, where ``per_client``, statistics over clients.
    """
    if not registry.test_sizes.any():
        log.warning("no client has test samples: personal models and statistics over clients are not evaluated")
        return on_server
    on_clients = _on_clients(task, registry, delivery, per_client)

    def evaluate(params: Tree, statistics: Tree, instructions: RoundInstructions, available: np.ndarray) -> Metrics:
        state = params, statistics, instructions, available
        return on_clients(*state) | on_server(*state)

    return evaluate


def _on_clients(task: Task, registry: ClientRegistry, delivery: DeliveryState, per_client: bool) -> Evaluate:
    """The evaluation on the clients' test samples."""
    undefined = UndefinedMetrics(task)

    def evaluate(params: Tree, statistics: Tree, instructions: RoundInstructions, available: np.ndarray) -> Metrics:
        model, contents = pack((params, statistics)), {}
        shapes = _metric_shapes(task, with_statistics(params, statistics), shapes_of_samples(registry.samples))
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
            if (one := _parse_sums(reply, shapes)) is not None:
                sums.append(one)
            else:
                log.warning("client %d is left out of the evaluation: its metrics are not those of this task", client)
        with_samples, total = int((registry.test_sizes > 0).sum()), int(registry.test_sizes.sum())
        if len(sums) < with_samples:
            text = "round %d: the test metrics are over %d of %d clients, %d of %d test samples"
            log.warning(text, instructions.round + 1, len(sums), with_samples, sum(rows for rows, _ in sums), total)
        metrics = _aggregate_metrics(task, sums, per_client)
        undefined.warn_of({name: value for name, value in metrics.items() if "_client" not in name})
        return parameter_metrics(task, params) | metrics | ({"evaluated_clients": len(sums)} if with_samples else {})

    return evaluate


def _metric_shapes(task: Task, variables: Tree, samples: Any) -> dict[str, tuple[int, ...]]:
    """The metrics that a client may send, of the global and the personalized model, and the shape of each sum."""
    values = jax.eval_shape(partial(sample_values, task), variables, samples)
    return {f"{kind}{name}": value.shape[1:] for kind in ("", "personal_") for name, value in values.items()}


def _parse_sums(reply: RecordDict, shapes: dict[str, tuple[int, ...]]) -> tuple[int, dict[str, np.ndarray]] | None:
    """(number of test samples, sums of metrics over them); None where the reply is malformed or not finite."""
    rows, sums = reply.get("rows"), reply.get("sums")
    if not isinstance(rows, ConfigRecord) or not isinstance(sums, ConfigRecord):
        return None
    count, known = rows.get("test"), bool(sums) and set(sums) <= set(shapes)
    if type(count) is not int or not 0 < count < 2**31 or not known:
        return None
    found: dict[str, np.ndarray] = {}
    for name, value in sums.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, float) and math.isfinite(number) for number in numbers):
            return None
        found[name] = np.array(value, float)
    return (count, found) if all(value.shape == shapes[name] for name, value in found.items()) else None


def _aggregate_metrics(task: Task, replies: list[tuple[int, dict[str, np.ndarray]]], per_client: bool) -> Metrics:
    """Means over all test samples of the clients that sent the metric."""
    metrics: Metrics = {}
    for name in sorted({name for _, sums in replies for name in sums}):
        sent = [(rows, sums[name]) for rows, sums in replies if name in sums]
        rows, values = np.array([r for r, _ in sent]), np.array([value for _, value in sent])
        own = name.removeprefix("personal_")
        metrics[f"test_{name}"] = metric_of_means(task, own, values.sum(0) / rows.sum())
        if per_client:
            each = values_of_clients(task, own, values, rows)
            metrics |= over_clients(each, rows, f"test_{name}", is_lower_better(task, own))
    return metrics


def _checked_test(test: Any, samples: Batch) -> Samples:
    """The test samples; FedraxError if they are not a pair, or differ in shape from the clients'."""
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise FedraxError(
            "test is a pair (x, y) of the server's test samples: leave it out to evaluate on the clients' test samples"
        )
    found = as_samples(*test)
    shapes, wanted = ([a.shape[1:] for a in (*arrays_of(x), y)] for x, y in (found, samples))
    if not same_form(found.x, samples.x) or shapes != wanted:
        names = [", ".join(name for name, _ in named_inputs(part.x)) for part in (found, samples)]
        raise FedraxError(
            f"test has samples ({names[0]}, y) of shapes {shapes}, and the clients' are ({names[1]}, y) of shapes"
            f" {wanted}: they must agree"
        )
    return found
