"""Observation models: which vectors an attack matches, and how candidate data produce them.

:func:`as_gradient` treats a vector as the gradient at known parameters (Zhu et al. 2019). :func:`as_client_program`
runs the method's client on the candidate data, round by round with the messages that the client received, and matches
its uploads; the attack differentiates through all local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.attacks.messages import decode_upload, drop_integer_leaves, exchanges_of_one_client, floating_parts
from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.client_data import ClientData, Reduction, TrainState
from fedrax.contract.hooks import LossHook
from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError
from fedrax.simulation.results.message_recorder import RecordedExchange
from fedrax.simulation.round import ClientRecord, run_client_phase
from fedrax.tree import Tree

Predict = Callable[[Any, Batch, int | None], tuple[Tree, ...]]


class Observation(NamedTuple):
    """Observed vectors, and a function that predicts them from candidate data.

    Example:
        >>> seen = fedrax.attacks.Observation(lambda known, data, classes: (data.x - known,), 1.0, (jnp.zeros(3),))
        >>> len(seen.target)
        1
    """

    predict: Predict
    """(known, candidate data, classes) -> predicted vectors; hashable. ``classes`` is C if the candidate's labels are
    probabilities [n, C], None if they are labels [n]."""
    known: Any
    """Arrays that the adversary knows."""
    target: tuple[Tree, ...]
    """Observed vectors."""


def expected_loss(classes: int) -> LossHook:
    """The expected local loss for label probabilities [B, C]: sum_c p_c loss(x, c)."""

    def rule(losses: Callable) -> Callable:
        def expected(params: Tree, batch: Batch, key: Array) -> Array:
            shape = batch.y.shape[:1]
            per_class = [losses(params, Batch(batch.x, jnp.full(shape, c, jnp.int32)), key) for c in range(classes)]
            return (jnp.stack(per_class, 1) * batch.y).sum(1)

        return expected

    return rule


def _client(task: Task, data: Batch, key: Array, classes: int | None, **facts: Any) -> ClientData:
    """Client data with the candidate samples; with ``classes``, labels are probabilities."""
    client = ClientData.alone(task, *data, key, **facts)
    return client if classes is None else client.with_loss(expected_loss(classes))


# -- gradient -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradient:
    """Prediction of `as_gradient`: the full gradient at known parameters."""

    task: Task
    reduction: Reduction

    def __call__(self, known: tuple[Tree, Tree], data: Batch, classes: int | None) -> tuple[Tree, ...]:
        params, statistics = known
        client = _client(self.task, data, jax.random.key(0), classes, round=0, num_clients=1, cohort_size=1)
        return (client.with_carried(TrainState(statistics)).full_gradient(params, self.reduction)[1],)


@checked_arguments
def as_gradient(
    task: Task, params: Tree, gradient: Tree, reduction: Reduction = "mean", statistics: Tree = ()
) -> Observation:
    """Observation of a client's full gradient at ``params`` (Zhu et al. 2019).

    Args:
        task: The learning task.
        params: The parameters at which the gradient was taken.
        gradient: The gradient, with the structure of ``params``.
        reduction: Whether the loss is the "mean" or the "sum" over the client's samples.
        statistics: The client's model statistics; empty for models without statistics.

    Returns:
        The observation for :meth:`Attack.invert`.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> params = task.init(jax.random.key(0))
        >>> view = fedrax.attacks.as_gradient(task, params, jax.tree.map(jnp.ones_like, params))
        >>> len(view.target)
        1
    """
    return Observation(_Gradient(task, reduction), (params, statistics), (gradient,))


# -- client program ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """Prediction of `as_client_program`: the uploads of the client in the matched rounds."""

    task: Task
    rounds: tuple[int, ...]
    """Round of each exchange, from 0."""
    phases: tuple[int, ...]
    """Phase of each exchange."""
    matched: tuple[bool, ...]
    """Whether the upload of each exchange is matched."""
    is_method: bool
    """Whether the algorithm is the observed method itself, not a substitute for it."""
    num_clients: int
    cohort_size: int

    def __call__(self, known: tuple, data: Batch, classes: int | None) -> tuple[Tree, ...]:
        algorithm, params, key, received = known
        kept, found = ClientRecord.at_first(algorithm, params, ()), []
        for k, (message, statistics) in enumerate(received):
            round, p = self.rounds[k], self.phases[k]
            drawn = jax.random.fold_in(key, round)
            facts = {"round": round, "num_clients": self.num_clients, "cohort_size": self.cohort_size, "phase": p}
            client = _client(self.task, data, drawn, classes, **facts)
            done = run_client_phase(p, algorithm, message, kept, statistics, client)
            kept, output = done.record, done.output
            if self.matched[k]:
                upload = drop_integer_leaves(done.received, output.upload) if self.is_method else done.received
                read = upload, output.each, output.total
                found += [part for values in read for part in floating_parts(values, params)]
        return tuple(found)


@checked_arguments
def as_client_program(
    task: Task,
    algorithm: Algorithm,
    params: Tree,
    exchanges: Sequence[RecordedExchange],
    num_clients: int,
    cohort_size: int,
    *,
    matched: Sequence[int] | None = None,
    program: Algorithm | None = None,
    key: Array | None = None,
) -> Observation:
    """Observation of the uploads of a client that ran ``algorithm`` on the unknown data.

    The exchanges are run in order, with the client state carried from one to the next. Mini-batches are drawn in
    another order than the client's, because the adversary does not know its random key. Leaves that are sent as
    integers are not matched unless ``program`` is given, because they have no derivative.

    Args:
        task: The learning task.
        algorithm: The observed method.
        params: The initial parameters of the run, which initialize the client state.
        exchanges: The messages of one client that the server or an eavesdropper observed.
        num_clients: Number of clients of the federation.
        cohort_size: Number of clients in a round.
        matched: The rounds, counted from 1, whose uploads are matched; all by default. The others only update the
            client state, which suffices for an eavesdropper if the state depends on the last few rounds only.
        program: A method to run instead of ``algorithm``, for example the method inside a quantizing wrapper, which has
            no derivative.
        key: The adversary's guess of the client's random key.

    Returns:
        The observation for :meth:`Attack.invert`.

    Raises:
        FedraxError: The exchanges are not those of exactly one client, or have none of the rounds in ``matched``.

    Example:
        >>> method, task = fedrax.algorithms.FedSGD(), fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> federation = fedrax.Federation.from_arrays(np.eye(2, dtype=np.float32), np.arange(2), np.arange(2))
        >>> params, record = task.init(jax.random.key(0)), fedrax.simulation.MessageSelection(clients=(0,))
        >>> run = fedrax.simulate(method, task, federation, params=params, rounds=1, cohort_size=2, record=record)
        >>> len(fedrax.attacks.as_client_program(task, method, params, run.exchanges, 2, 2).target)
        1
    """
    exchanges = exchanges_of_one_client(exchanges)
    rounds = {exchange.round for exchange in exchanges}
    if matched is not None and not set(matched) & rounds:
        raise FedraxError(f"none of the rounds in matched was observed: observed are {sorted(rounds)}")
    chosen = tuple(matched is None or exchange.round in matched for exchange in exchanges)
    read = [decode_upload(algorithm, exchange) for exchange, use in zip(exchanges, chosen, strict=True) if use]
    if is_method := program is None or program is algorithm:
        sent = [exchange.sent.upload for exchange, use in zip(exchanges, chosen, strict=True) if use]
        read = [r._replace(upload=drop_integer_leaves(r.upload, s)) for r, s in zip(read, sent, strict=True)]
    target = tuple(part for upload in read for values in upload[:3] for part in floating_parts(values, params))
    run = _Program(
        task,
        tuple(exchange.round - 1 for exchange in exchanges),
        tuple(exchange.phase for exchange in exchanges),
        chosen,
        is_method,
        num_clients,
        cohort_size,
    )
    received = [(exchange.received, exchange.statistics) for exchange in exchanges]
    key = jax.random.key(0) if key is None else key
    return Observation(run, (program or algorithm, params, key, received), target)
