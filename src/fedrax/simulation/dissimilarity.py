"""How much the clients' gradients disagree: a measure of heterogeneity that needs a model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.client_data import Layout, Place
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.simulation.round import Keys, Program, Rounds, client_data
from fedrax.tree import Tree


def gradient_dissimilarity(task: Task, federation: Federation, params: Tree | None = None, seed: int = 0) -> float:
    """mean_i |grad f_i|^2 / |grad f|^2 with f = mean_i f_i over the N clients, f_i the mean loss of client i.

    1 when all gradients agree; the B^2 of (G, B)-bounded dissimilarity with G = 0 (SCAFFOLD, A1; FedProx,
    Definition 3). ``params``: where; by default the initial parameters of a run with this seed. One pass over
    the data, without dropout of its own for each client. Infinite where the mean gradient is zero.
    """
    start = task.init(jax.random.fold_in(jax.random.key(seed), 0)) if params is None else params
    samples, clients = Batch(*map(jnp.asarray, federation.train)), federation.num_clients
    program = Program(task, Layout.of(federation.sizes), clients, chunk=0)

    @jax.jit
    def both(samples: Batch, offsets: Array, sizes: Array) -> tuple[Array, Array]:
        numbers = jnp.arange(clients, dtype=jnp.int32)
        places = Place(numbers, numbers, offsets, sizes, jnp.ones(clients))
        everyone = Rounds(jnp.int32(0), jnp.float32(clients), jnp.int32(clients), places)
        keys = Keys(jnp.broadcast_to(jax.random.key(seed), clients), jax.random.key(seed))

        def add(i: Array, total: tuple) -> tuple:
            data = client_data(program, samples, everyone, keys, i)
            gradient = data.full_gradient(start)[1]
            return tree.add(total[0], gradient), total[1] + tree.dot(gradient, gradient)

        mean, squares = jax.lax.fori_loop(0, clients, add, (tree.zeros_like(start), jnp.zeros(())))
        mean = tree.scale(1 / clients, mean)
        return squares / clients, tree.dot(mean, mean)

    squares, of_mean = both(samples, federation.offsets[:-1].astype(np.int32), federation.sizes.astype(np.int32))
    return float(squares) / float(of_mean) if float(of_mean) > 0 else float("inf")
