"""What the clients' gradients say at one point: how far apart they are, how noisy, and where local steps lead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.client_data import ClientData, Layout, Place
from fedrax.contract.local import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.simulation.round import Keys, Program, Rounds, client_data, turn_of
from fedrax.tree import Tree

AT_ONCE = 32
"""Samples whose single gradients are taken side by side: their memory is so many times that of the parameters."""


class Gradients(NamedTuple):
    """Of N clients with losses f_i at one point x; f = mean_i f_i."""

    loss: Array
    """f(x)."""
    mean: Array
    """|grad f|."""
    norms: Array
    """|grad f_i|, [N]."""

    @property
    def apart(self) -> Array:
        """The root mean square over clients of |grad f_i - grad f|."""
        return jnp.sqrt(jnp.maximum(jnp.mean(self.norms**2) - self.mean**2, 0))


class Drift(NamedTuple):
    """Of the updates that N clients make by their local steps from one point."""

    steps: Array
    """Their mean number of local steps."""
    mean: Array
    """|mean_i Delta_i|."""
    apart: Array
    """The root mean square over clients of |Delta_i - mean_j Delta_j|."""


class Clients:
    """The clients of a federation as algorithms see them, outside of any run: one after another, in one program."""

    def __init__(self, task: Task, federation: Federation, seed: int = 0):
        if task.loss_and_statistics is not None:
            raise FedraxError(
                "a model with running statistics mixes the samples of a batch: its clients have no gradients of their"
                " own that could be compared"
            )
        self.task, self.federation = task, federation
        self.program = Program(task, Layout.of(federation.sizes), federation.num_clients, chunk=0)
        self.samples = Batch(*map(jnp.asarray, federation.train))
        self.key = jax.random.key(seed)
        self._measure = jax.jit(self._gradients)
        self._walk = jax.jit(self._drift)
        self._scatter = jax.jit(self._noise)

    def gradients(self, params: Tree) -> Gradients:
        """One pass over the data."""
        return jax.device_get(self._measure(self.samples, params))

    def drift(self, params: Tree, local: LocalSGD, round: int) -> Drift:
        """One round's local steps of every client, those of ``local``."""
        return jax.device_get(self._walk(self.samples, params, local, jnp.int32(round)))

    def noise(self, params: Tree, rows: np.ndarray) -> float:
        """sigma with sigma^2 = mean_i E |grad f_ij - grad f_i|^2 over the samples j of client i.

        rows: int [N, m], rows of ``train`` to look at, m of each client, repeated where it has fewer (-1). With all
        rows it is exact, with fewer an estimate without bias, for clients with two samples looked at.
        """
        return float(np.sqrt(self._scatter(self.samples, params, jnp.asarray(rows), self.federation.sizes)))

    def _each(self, samples: Tree, round: Array, measure: Callable, start: Tree) -> Tree:
        """``measure(total, i, data)`` over all clients i."""
        n = self.program.num_clients
        numbers = jnp.arange(n, dtype=jnp.int32)
        offsets, sizes = (a.astype(np.int32) for a in (self.federation.offsets[:-1], self.federation.sizes))
        places = Place(numbers, numbers, jnp.asarray(offsets), jnp.asarray(sizes), jnp.ones(n))
        everyone = Rounds(round, jnp.float32(n), jnp.int32(n), places)
        keys = Keys(jax.random.split(jax.random.fold_in(self.key, round), n), self.key)

        def body(i: Array, total: Tree) -> Tree:
            return measure(total, i, client_data(self.program, samples, turn_of(everyone, keys, i)))

        return jax.lax.fori_loop(0, n, body, start)

    def _gradients(self, samples: Tree, params: Tree) -> Gradients:
        n = self.program.num_clients

        def add(total: tuple, i: Array, data: ClientData) -> tuple:
            loss, gradient = data.full_gradient(params)
            return total[0] + loss, tree.add(total[1], gradient), total[2].at[i].set(tree.norm(gradient))

        start = (jnp.zeros(()), tree.zeros_like(params), jnp.zeros(n))
        loss, mean, norms = self._each(samples, jnp.int32(0), add, start)
        return Gradients(loss / n, tree.norm(mean) / n, norms)

    def _drift(self, samples: Tree, params: Tree, local: LocalSGD, round: Array) -> Drift:
        n = self.program.num_clients

        def add(total: tuple, i: Array, data: ClientData) -> tuple:
            update = tree.sub(local.run(data, params).params, params)
            steps = jnp.asarray(local.num_steps(data), float)
            return total[0] + steps, tree.add(total[1], update), total[2] + tree.dot(update, update)

        start = (jnp.zeros(()), tree.zeros_like(params), jnp.zeros(()))
        steps, mean, squares = self._each(samples, round, add, start)
        length = tree.norm(mean) / n
        return Drift(steps / n, length, jnp.sqrt(jnp.maximum(squares / n - length**2, 0)))

    def _noise(self, samples: Batch, params: Tree, rows: Array, sizes: Array) -> Array:
        def norms(batch: Batch, inside: Array) -> tuple[Tree, Array]:
            one = lambda sample: jax.grad(self._loss)(params, jax.tree.map(lambda a: a[None], sample))  # noqa: E731
            each = jax.vmap(one)(batch)
            each = jax.tree.map(lambda g: jnp.where(inside.reshape(-1, *(1,) * (g.ndim - 1)), g, 0), each)
            return jax.tree.map(lambda g: g.sum(0), each), tree.dot(each, each)

        def of_client(own: Array) -> Array:
            parts = jnp.pad(own, (0, -len(own) % AT_ONCE), constant_values=-1).reshape(-1, AT_ONCE)

            def add(total: tuple, part: Array) -> tuple:
                batch = jax.tree.map(lambda a: a[jnp.maximum(part, 0)], samples)
                return jax.tree.map(jnp.add, total, norms(batch, part >= 0)), None

            (mean, squares), _ = jax.lax.scan(add, (tree.zeros_like(params), jnp.zeros(())), parts)
            m = jnp.sum(own >= 0)
            return jnp.maximum(squares / m - tree.dot(mean, mean) / m**2, 0)  # among the m rows

        seen = jnp.sum(rows >= 0, axis=1)
        among = jax.lax.map(of_client, rows)
        whole = among * seen / jnp.maximum(seen - 1, 1) * (sizes - 1) / sizes
        known = (seen > 1) | (sizes == 1)
        return jnp.sum(jnp.where(known, whole, 0)) / jnp.maximum(jnp.sum(known), 1)

    def _loss(self, params: Tree, sample: Batch) -> Array:
        return self.task.evaluation_loss(params, sample).sum()


def gradient_dissimilarity(task: Task, federation: Federation, params: Tree | None = None, seed: int = 0) -> float:
    """mean_i |grad f_i|^2 / |grad f|^2 with f = mean_i f_i over the N clients, f_i the mean loss of client i.

    1 when all gradients agree; the B^2 of (G, B)-bounded dissimilarity with G = 0 (SCAFFOLD, A1; FedProx,
    Definition 3). ``params``: where; by default the initial parameters of a run with this seed. One pass over
    the data. Infinite where the mean gradient is zero.
    """
    start = task.init(jax.random.fold_in(jax.random.key(seed), 0)) if params is None else params
    found = Clients(task, federation, seed).gradients(start)
    return float(np.mean(found.norms**2) / found.mean**2) if found.mean > 0 else float("inf")
