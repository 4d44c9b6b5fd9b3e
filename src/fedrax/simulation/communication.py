"""The bytes a method sends, counted from the shapes of its own messages and uploads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, Cohort
from fedrax.contract.client_data import ClientData
from fedrax.contract.vectors import holds_vectors
from fedrax.simulation.engine import Program
from fedrax.tree import Tree


def message_bytes(program: Program, algorithm: Algorithm, params: Tree, state: Tree, samples: Tree) -> tuple[int, int]:
    """Bytes (down, up) of one client in one round, from the shapes of the algorithm's messages and uploads."""

    def one_round(params: Tree, state: Tree, samples: Tree) -> tuple[list[Tree], list[Tree]]:
        server, received, sent = algorithm.init(params, program.num_clients), [], []
        zero, one = jnp.int32(0), jnp.ones(1)
        blocks = getattr(getattr(algorithm, "local", None), "blocks", None)
        data = ClientData(
            program.task,
            program.layout,
            samples,
            offset=zero,
            size=jnp.int32(program.layout.largest),
            key=jax.random.key(0),
            round=zero,
            num_clients=program.num_clients,
            cohort_size=one[0],
            blocks=None if blocks is None else jnp.zeros((1,), jnp.int32),
        )
        for phase in algorithm.phases:
            message = phase.broadcast(server)
            if holds_vectors(message):
                raise TypeError(f"{type(algorithm).__name__} broadcasts Vectors: send what it makes of them")
            out = phase.client(message, state, data)
            each = jax.tree.map(lambda a: a[None], out.each)
            cohort = Cohort(out.upload, each, zero[None], one, one[0], program.num_clients, zero)
            server, state = phase.server(server, cohort)[0], out.state
            received.append(message)
            sent.append((out.upload, out.each))
        return received, sent

    received, sent = jax.eval_shape(one_round, params, state, samples)
    return tree.num_bytes(received), tree.num_bytes(sent)
