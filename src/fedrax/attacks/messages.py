"""Candidate gradients in recorded messages, for any method.

A message is a pytree. Each part of it with the structure and shapes of the parameters may be a gradient, a model, a
difference of either, or a difference of client states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm
from fedrax.errors import FedraxError
from fedrax.simulation.results.message_recorder import RecordedExchange, RecordedUpload
from fedrax.tree import Tree


@checked_arguments
def parameter_vectors(message: Tree, params: Tree) -> dict[str, Tree]:
    """The parts of a message with the structure and shapes of the parameters.

    Args:
        message: Any pytree that was sent.
        params: The model's parameters.

    Returns:
        The parts by their path in the message; the path of the message itself is "".

    Example:
        >>> message = {"model": {"w": jnp.ones(2)}, "count": jnp.ones(())}
        >>> list(fedrax.attacks.parameter_vectors(message, {"w": jnp.zeros(2)}))
        ['model']
    """
    parts = jax.tree_util.tree_flatten_with_path(message, is_leaf=lambda part: _matches_params(part, params))[0]
    return {_path(path): part for path, part in parts if _matches_params(part, params)}


def floating_parts(message: Tree, params: Tree) -> tuple[Tree, ...]:
    """The floating-point parts of a message: those with the structure of the parameters, and all other arrays."""
    parts = jax.tree.leaves(message, is_leaf=lambda part: _matches_params(part, params))
    return tuple(part for part in parts if all(map(_is_floating, jax.tree.leaves(part))))


def drop_integer_leaves(decoded: Tree, sent: Tree) -> Tree:
    """The decoded message without leaves that were sent as integers, if decoding keeps the tree structure.

    Integers such as counts of signs have zero derivative and would dominate the distance.
    """
    if jax.tree.structure(decoded) != jax.tree.structure(sent):
        return decoded
    return jax.tree.map(lambda value, encoded: value if _is_floating(encoded) else None, decoded, sent)


def _is_floating(array: Any) -> bool:
    """Whether an array has a floating-point dtype."""
    return jnp.issubdtype(jnp.result_type(array), jnp.floating)


def decode_upload(algorithm: Algorithm, exchange: RecordedExchange) -> RecordedUpload:
    """What a client sent, with the upload as the server decodes it."""
    return exchange.sent._replace(upload=algorithm.phases[exchange.phase].receive(exchange.sent.upload))


def _matches_params(part: Any, params: Tree) -> bool:
    """Whether a part has the structure and shapes of the parameters."""
    if jax.tree.structure(part) != jax.tree.structure(params):
        return False
    return [np.shape(a) for a in jax.tree.leaves(part)] == [np.shape(a) for a in jax.tree.leaves(params)]


def _path(path: tuple) -> str:
    """A path as a string with slashes."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


class CandidateGradient(NamedTuple):
    """A vector derived from messages that may be a gradient of a client's data, and the parameters of this gradient.

    Example:
        >>> params = {"w": jnp.zeros(2)}
        >>> fedrax.attacks.CandidateGradient("phase 1, params, last", params, {"w": jnp.ones(2)}).name
        'phase 1, params, last'
    """

    name: str
    """Phase, part of the message, and how the vector is derived from it."""
    params: Tree
    """The parameters that the client received."""
    vector: Tree
    """The candidate for the gradient at ``params``, of their structure and shapes."""


def exchanges_of_one_client(exchanges: Sequence[RecordedExchange]) -> list[RecordedExchange]:
    """The exchanges by round and phase; FedraxError unless they are of exactly one client."""
    clients = {exchange.client for exchange in exchanges}
    if len(clients) != 1:
        raise FedraxError(f"an attack needs the messages of one client, not of {len(clients)}")
    return sorted(exchanges, key=lambda exchange: (exchange.round, exchange.phase))


@checked_arguments
def candidate_gradients(
    algorithm: Algorithm, exchanges: Sequence[RecordedExchange], params: Tree
) -> list[CandidateGradient]:
    """List vectors that may be the gradient of a client's data at parameters that the adversary knows.

    For each vector in the client's messages these are its last value ("last"), the sum over all messages ("sum", which
    recovers a state from its increments), and the last minus the second last value ("difference"), each also with the
    opposite sign. There are no candidates if the client keeps personal parameters, because the adversary does not know
    where the gradient was taken.

    Args:
        algorithm: The method that was run.
        exchanges: The messages of one client that the adversary observed; the server observes all of them.
        params: Parameters of the model, for their structure and shapes.

    Returns:
        The candidates, phase by phase.

    Raises:
        FedraxError: The exchanges are not those of exactly one client.

    Example:
        >>> method, model = fedrax.algorithms.FedSGD(), fedrax.models.Logistic().build((2,), 2)
        >>> federation = fedrax.Federation.from_arrays(np.eye(2, dtype=np.float32), np.arange(2), np.arange(2))
        >>> task, record = fedrax.classification(model), fedrax.simulation.MessageSelection(clients=(0,))
        >>> params = task.init(jax.random.key(0))
        >>> run = fedrax.simulate(method, task, federation, params=params, rounds=1, cohort_size=2, record=record)
        >>> len(fedrax.attacks.candidate_gradients(method, run.exchanges, params))
        2
    """
    exchanges = exchanges_of_one_client(exchanges)
    candidates: list[CandidateGradient] = []
    for p in sorted({exchange.phase for exchange in exchanges}):
        series = [exchange for exchange in exchanges if exchange.phase == p]
        histories = [parameter_vectors(decode_upload(algorithm, exchange), params) for exchange in series]
        at = _parameters(exchanges, series[-1], params)
        for name in () if at is None else histories[-1]:
            history = [vectors[name] for vectors in histories]
            derived = {"last": history[-1]}
            if len(history) > 1:
                total = history[0]
                for vector in history[1:]:
                    total = tree.add(total, vector)
                derived |= {"sum": total, "difference": tree.sub(history[-1], history[-2])}
            for how, vector in derived.items():
                label = f"phase {p + 1}, {name}, {how}"
                candidates += [
                    CandidateGradient(label, at, vector),
                    CandidateGradient(f"{label}, negative", at, tree.scale(-1, vector)),
                ]
    return candidates


def _parameters(exchanges: Sequence[RecordedExchange], last: RecordedExchange, params: Tree) -> Tree | None:
    """The parameters sent with an exchange, or in an earlier phase of its round.

    None if the client received only part of the parameters.
    """
    same_round = [exchange for exchange in exchanges if exchange.round == last.round]
    for exchange in sorted(same_round, key=lambda exchange: -exchange.phase):
        received = parameter_vectors(exchange.received, params)
        if exchange.phase <= last.phase and received:
            return received.get("params", next(iter(received.values())))
    return None
