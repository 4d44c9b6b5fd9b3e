"""What is in messages: vectors of the parameters' kind, alone and summed up over the rounds that somebody saw.

Nothing here knows a method. A message is a pytree, and whatever in it has the structure and shapes of the parameters
may be a gradient, a model, an increment of either, or a state's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.errors import FedraxError
from fedrax.simulation.results.message_recorder import RecordedExchange, RecordedUpload
from fedrax.tree import Tree


def parameter_vectors(message: Tree, params: Tree) -> dict[str, Tree]:
    """The parts of a message with the structure and shapes of the parameters.

    Args:
        message: Any pytree that was sent.
        params: The model's parameters.

    Returns:
        The parts by their path in the message; "" is the path of the whole.

    Example:
        >>> message = {"model": {"w": jnp.ones(2)}, "count": jnp.ones(())}
        >>> list(fedrax.attacks.parameter_vectors(message, {"w": jnp.zeros(2)}))
        ['model']
    """
    parts = jax.tree_util.tree_flatten_with_path(message, is_leaf=lambda part: _alike(part, params))[0]
    return {_path(path): part for path, part in parts if _alike(part, params)}


def parts(message: Tree, params: Tree) -> tuple[Tree, ...]:
    """The message cut into vectors of the parameters' kind and the arrays besides them, floating ones only."""
    found = jax.tree.leaves(message, is_leaf=lambda part: _alike(part, params))
    floating = lambda part: all(jnp.issubdtype(jnp.result_type(a), jnp.floating) for a in jax.tree.leaves(part))  # noqa: E731
    return tuple(part for part in found if floating(part))


def without_whole_numbers(read: Tree, sent: Tree) -> Tree:
    """What was ``read`` of a message without what traveled as whole numbers, where reading keeps its structure.

    Counts of signs, say, have no derivative, and would drown what has one.
    """
    if jax.tree.structure(read) != jax.tree.structure(sent):
        return read
    floating = lambda r, s: r if jnp.issubdtype(jnp.result_type(s), jnp.floating) else None  # noqa: E731
    return jax.tree.map(floating, read, sent)


def decoded(algorithm: Algorithm, exchange: RecordedExchange) -> RecordedUpload:
    """What the server reads of what a client sent: the upload received, and what it sent besides."""
    return exchange.sent._replace(upload=algorithm.phases[exchange.phase].receive(exchange.sent.upload))


def _alike(part: Any, params: Tree) -> bool:
    if jax.tree.structure(part) != jax.tree.structure(params):
        return False
    return [jnp.shape(a) for a in jax.tree.leaves(part)] == [jnp.shape(a) for a in jax.tree.leaves(params)]


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


class CandidateGradient(NamedTuple):
    """A vector made of messages that may be a gradient of a client's data, and where it was taken, as far as known.

    Example:
        >>> params = {"w": jnp.zeros(2)}
        >>> fedrax.attacks.CandidateGradient("phase 1, params, last", params, {"w": jnp.ones(2)}).name
        'phase 1, params, last'
    """

    name: str
    """Phase, part of the message, and what was made of it."""
    params: Tree
    """The parameters that the client had been sent."""
    vector: Tree
    """The candidate for the gradient at ``params``, of their structure and shapes."""


def of_one_client(exchanges: Sequence[RecordedExchange]) -> list[RecordedExchange]:
    """The exchanges in order. FedraxError where there are none, or of several clients."""
    clients = {one.client for one in exchanges}
    if len(clients) != 1:
        raise FedraxError(f"an attack needs the messages of one client, not of {len(clients)}")
    return sorted(exchanges, key=lambda one: (one.round, one.phase))


def candidate_gradients(
    algorithm: Algorithm, exchanges: Sequence[RecordedExchange], params: Tree
) -> list[CandidateGradient]:
    """What could be the gradient of a client's data at a point that the attacker knows.

    Each vector of the client's messages, in the last one ("last"), summed up over all ("sum", which turns increments
    of a state that began at zero into the state), and less the one before ("difference"). A vector descends where it
    is a gradient with the sign turned round, so each is there with both signs. None where part of the parameters stays
    at home: then nobody knows where a gradient was taken.

    Args:
        algorithm: The method that was run.
        exchanges: The messages of one client that the attacker saw; a server saw all of them.
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
    exchanges = of_one_client(exchanges)
    found: list[CandidateGradient] = []
    for p in sorted({one.phase for one in exchanges}):
        series = [one for one in exchanges if one.phase == p]
        histories = [parameter_vectors(decoded(algorithm, one), params) for one in series]
        at = _parameters(exchanges, series[-1], params)
        for name in () if at is None else histories[-1]:
            history = [one[name] for one in histories]
            made = {"last": history[-1]}
            if len(history) > 1:
                total = history[0]
                for vector in history[1:]:
                    total = tree.add(total, vector)
                made |= {"sum": total, "difference": tree.sub(history[-1], history[-2])}
            for what, vector in made.items():
                label = f"phase {p + 1}, {name}, {what}"
                found += [
                    CandidateGradient(label, at, vector),
                    CandidateGradient(f"{label}, negative", at, tree.scale(-1, vector)),
                ]
    return found


def _parameters(exchanges: Sequence[RecordedExchange], last: RecordedExchange, params: Tree) -> Tree | None:
    """The parameters sent with an exchange, or in an earlier phase of its round.

    None if the client was not sent all parameters and has others that the attacker does not know.
    """
    for one in sorted((one for one in exchanges if one.round == last.round), key=lambda one: -one.phase):
        sent_down = parameter_vectors(one.received, params)
        if one.phase <= last.phase and sent_down:
            return sent_down.get("params", next(iter(sent_down.values())))
    return None
