"""What an attacker matches: messages, and how candidate data would have made them.

Two ways of reading messages. :func:`as_gradient` takes a vector for the gradient at known parameters, as Zhu et al.
(2019) do. :func:`as_client_program` runs the method's own client on the candidate data, round after round on what the
client was sent, and matches what it sends: whatever the method does is differentiated through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax.attacks.messages import decoded, of_one_client, parts, without_whole_numbers
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.client_data import ClientData, Reduction, TrainState
from fedrax.contract.hooks import LossHook
from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError
from fedrax.simulation.results.message_recorder import RecordedExchange
from fedrax.simulation.round import ClientRecord, take_part
from fedrax.tree import Tree

Predict = Callable[[Any, Batch, int | None], tuple[Tree, ...]]


class Observation(NamedTuple):
    """What an attacker saw and how it came about.

    Example:
        >>> seen = fedrax.attacks.Observation(lambda known, data, classes: (data.x - known,), 1.0, (jnp.zeros(3),))
        >>> len(seen.target)
        1
    """

    predict: Predict
    """(known, candidate data, classes) -> what these data would have made; hashable. classes: C where the candidate's
    labels are chances [n, C], None where they are labels."""
    known: Any
    """Arrays that the attacker knows."""
    target: tuple[Tree, ...]
    """Vectors that were seen."""


def expected_loss(classes: int) -> LossHook:
    """The local loss for labels that are chances [B, C]: sum_c p_c loss(x, c). For one-hot chances the loss itself."""

    def rule(losses: Callable) -> Callable:
        def expected(params: Tree, batch: Batch, key: Array) -> Array:
            shape = batch.y.shape[:1]
            of = [losses(params, Batch(batch.x, jnp.full(shape, c, jnp.int32)), key) for c in range(classes)]
            return (jnp.stack(of, 1) * batch.y).sum(1)

        return expected

    return rule


def _client(task: Task, data: Batch, key: Array, classes: int | None, **facts: Any) -> ClientData:
    client = ClientData.alone(task, *data, key, **facts)
    return client if classes is None else client.with_loss(expected_loss(classes))


# -- a vector as the gradient -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradient:
    task: Task
    reduction: Reduction

    def __call__(self, known: tuple[Tree, Tree], data: Batch, classes: int | None) -> tuple[Tree, ...]:
        params, statistics = known
        client = _client(self.task, data, jax.random.key(0), classes, round=0, num_clients=1, cohort_size=1)
        return (client.with_carried(TrainState(statistics)).full_gradient(params, self.reduction)[1],)


def as_gradient(
    task: Task, params: Tree, gradient: Tree, reduction: Reduction = "mean", statistics: Tree = ()
) -> Observation:
    """The view that ``gradient`` is the client's full gradient at ``params`` (Zhu et al. 2019).

    Args:
        task: The learning task.
        params: The parameters at which the gradient was taken.
        gradient: The gradient, with the structure of ``params``.
        reduction: Whether the loss is the "mean" or the "sum" over the client's samples.
        statistics: The model's statistics that the client had, where it has any.

    Returns:
        The observation to give to :meth:`Attack.invert`.

    Example:
        >>> task = fedrax.classification(fedrax.models.Logistic().build((2,), 2))
        >>> params = task.init(jax.random.key(0))
        >>> view = fedrax.attacks.as_gradient(task, params, jax.tree.map(jnp.ones_like, params))
        >>> len(view.target)
        1
    """
    return Observation(_Gradient(task, reduction), (params, statistics), (gradient,))


# -- the client's program ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    task: Task
    rounds: tuple[int, ...]
    """Of each exchange, from 0."""
    phases: tuple[int, ...]
    matched: tuple[bool, ...]
    own: bool
    """Whether it is the method itself that is run."""
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
            done = take_part(p, algorithm, message, kept, statistics, client)
            kept, output = done.kept, done.output
            if self.matched[k]:
                upload = without_whole_numbers(done.received, output.upload) if self.own else done.received
                read = upload, output.each, output.total
                found += [part for values in read for part in parts(values, params)]
        return tuple(found)


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
    """The view that the client ran its method on the data that are looked for.

    The exchanges are run in order, and the client's state is carried from one to the next. Batches other than the full
    one are drawn in another order than the client's, since the attacker does not know its random key. What travels as
    whole numbers is not matched where the method itself is run, because it has no derivative.

    Args:
        task: The learning task.
        algorithm: The method whose messages were seen.
        params: The parameters at the start of the run, from which a client's state begins.
        exchanges: The messages of one client that the server or an eavesdropper saw.
        num_clients: Clients of the federation.
        cohort_size: Clients of a round.
        matched: The rounds, counted from 1, whose messages are matched; all by default. The others only move the
            client's state, which helps an eavesdropper where the state depends on the last few rounds alone.
        program: The method whose client is run, where it differs from ``algorithm``: for example the one inside a
            wrapper that rounds and so has no derivative.
        key: The attacker's guess of the key of the client's random draws.

    Returns:
        The observation to give to :meth:`Attack.invert`.

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
    exchanges = of_one_client(exchanges)
    rounds = {one.round for one in exchanges}
    if matched is not None and not set(matched) & rounds:
        raise FedraxError(f"none of the rounds to match was seen: they are {sorted(rounds)}")
    chosen = tuple(matched is None or one.round in matched for one in exchanges)
    read = [decoded(algorithm, one) for one, use in zip(exchanges, chosen, strict=True) if use]
    if own := program is None or program is algorithm:
        sent = [one.sent.upload for one, use in zip(exchanges, chosen, strict=True) if use]
        read = [r._replace(upload=without_whole_numbers(r.upload, s)) for r, s in zip(read, sent, strict=True)]
    target = tuple(part for one in read for values in one[:3] for part in parts(values, params))
    run = _Program(
        task,
        tuple(one.round - 1 for one in exchanges),
        tuple(one.phase for one in exchanges),
        chosen,
        own,
        num_clients,
        cohort_size,
    )
    received = [(one.received, one.statistics) for one in exchanges]
    key = jax.random.key(0) if key is None else key
    return Observation(run, (program or algorithm, params, key, received), target)
