"""One round of one client, traced: the bytes that travel, and the program itself, by which a run is known again."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr

from fedrax import tree
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import checked_init, checked_message, checked_round, explained
from fedrax.contract.client_data import Place
from fedrax.simulation.round import (
    Executor,
    Gathered,
    Kept,
    Program,
    Rounds,
    add_client,
    client_keys,
    no_sums,
    run_client,
    run_round,
    turn_of,
)
from fedrax.tree import Tree


class Counting(Executor):
    """A round of one client, for the shapes of what travels."""

    def __init__(self, program: Program, algorithm: Algorithm, here: Rounds, key: Array, kept: Kept, samples: Tree):
        super().__init__(program, algorithm, here, key)
        self.kept, self.initial, self.samples = kept, kept, samples
        self.received: list[Tree] = []
        self.sent: list[Tree] = []

    def clients(self, p: int, message: Tree, statistics: Tree) -> Gathered:
        """The one client."""
        places = self.here.places
        turn = turn_of(self.here, client_keys(self.round_key, places.client), 0)
        inputs = (checked_message(self.algorithm, message), self.kept, statistics, self.samples, turn)
        done = run_client(self.program, p, self.algorithm, *inputs)
        self.received.append(message)
        self.sent.append((done.output.upload, done.output.each, done.output.total))
        # running statistics go down with the first message and up with the last upload
        if p == 0 and not self.algorithm.statistics_at_home:
            self.received.append(statistics)
            self.sent.append(statistics)
        sums = no_sums(self.program, self.algorithm, p, self.initial, done)
        sums = add_client(self.program, sums, done, places.weight[0], jnp.bool_(True), places.client[0])
        self.kept = done.kept
        return Gathered(sums, jax.tree.map(lambda a: a[None], done.single), places.client, places.weight)


class TracedRound(NamedTuple):
    """A round of one client, not yet compiled."""

    bytes_down: int
    """To the client, from the shapes of the algorithm's messages."""
    bytes_up: int
    """From the client, from the shapes of its uploads."""
    program: ClosedJaxpr
    """What the algorithm and the task compute."""


def trace_round(
    program: Program, algorithm: Algorithm, params: Tree, statistics: Tree, kept: Kept, samples: Tree, place: Place
) -> TracedRound:
    """A round of one client by its shapes.

    The first time that the algorithm is traced: what breaks the contract's rules is refused here, in a sentence.
    place: of any client, its fields of shape [1, ...].
    """

    def one_round(params: Tree, statistics: Tree, kept: Kept, samples: Tree) -> tuple[Tree, Tree, Tree]:
        here = Rounds(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.tree.map(jnp.asarray, place))
        executor = Counting(program, algorithm, here, jax.random.key(0), kept, samples)
        server = checked_init(algorithm, params, algorithm.init(params, program.num_clients))
        after = run_round(executor, server, statistics)[0]
        checked_round(algorithm, server, after)
        return executor.received, executor.sent, after

    with explained(algorithm):
        shapes = jax.eval_shape(lambda *trees: trees, params, statistics, kept, samples)
        made, (received, sent, _) = jax.make_jaxpr(one_round, return_shape=True)(*shapes)
    return TracedRound(tree.num_bytes(received), tree.num_bytes(sent), made)
