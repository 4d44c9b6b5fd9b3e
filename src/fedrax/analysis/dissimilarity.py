"""What the clients' gradients say at one point: how far apart they are, how noisy, and where local steps lead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.contract.client_data import ClientAssignment, ClientData, Layout, Reduction
from fedrax.contract.initialization import starting_parameters
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.prng.keys import DIAGNOSIS, INITIALIZATION, purpose_key
from fedrax.simulation.round import Keys, Program, Rounds, client_data, client_task
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, optimize

AT_ONCE = 32
"""Samples whose single gradients are taken side by side: their memory is so many times that of the parameters."""

MIXING = (
    "a model with running statistics mixes the samples of a batch: its clients have no gradients of their own that"
    " could be compared"
)


class Gradients(NamedTuple):
    """Of N clients with losses f_i and weights p_i at one point x; f = sum_i p_i f_i, and means over clients are by
    these weights.
    """

    loss: Array
    """f(x)."""
    mean: Array
    """|grad f|."""
    norms: Array
    """|grad f_i|, [N]."""
    apart: Array
    """The root mean square over clients of |grad f_i - grad f|."""


class Drift(NamedTuple):
    """Of the updates Delta_i that N clients make by their local steps from one point, over the draws of batches.

    Estimates from two walks of each client with other draws, whose noise has no product in the mean.
    """

    steps: Array
    """Their mean number of local steps, by the clients' weights."""
    mean: Array
    """|mean_i E Delta_i|, by the same."""
    apart: Array
    """The root mean square over clients of |E Delta_i - mean_j E Delta_j|, by the same."""


class Spread(NamedTuple):
    """Of some trees, without differences of large numbers (Chan, Golub and LeVeque 1983)."""

    count: Array
    """Their number, or the sum of their weights."""
    mean: Tree
    squares: Array
    """The sum of their squared distances from the mean."""

    @classmethod
    def none(cls, like: Tree) -> Spread:
        """Of no tree."""
        return cls(jnp.zeros(()), tree.zeros_like(like), jnp.zeros(()))

    @classmethod
    def of_rows(cls, rows: Tree, inside: Array) -> Spread:
        """Of those rows [n, ...] for which ``inside`` is true."""
        count = jnp.sum(inside).astype(float)
        over = lambda a: inside.reshape(-1, *(1,) * (a.ndim - 1))  # noqa: E731
        mean = jax.tree.map(lambda a: jnp.where(over(a), a, 0).sum(0) / jnp.maximum(count, 1), rows)
        left = jax.tree.map(lambda a, m: jnp.where(over(a), a - m, 0), rows, mean)
        return cls(count, mean, tree.dot(left, left))

    def joined(self, other: Spread) -> Spread:
        """Of all of both."""
        count, between = self.count + other.count, tree.sub(other.mean, self.mean)
        share = other.count / _or_one(count)
        squares = self.squares + other.squares + self.count * share * tree.dot(between, between)
        return Spread(count, tree.add_scaled(self.mean, share, between), squares)

    def with_one(self, one: Tree, weight: Array) -> Spread:
        """With one more."""
        return self.joined(Spread(weight, one, jnp.zeros(())))

    @property
    def apart(self) -> Array:
        """The root mean square of their distances from the mean."""
        return jnp.sqrt(self.squares / _or_one(self.count))


def _or_one(count: Array) -> Array:
    return jnp.where(count > 0, count, 1)


class Clients:
    """The clients of a federation as algorithms see them, outside of any run: one after another, in one program.

    Gradients are those of the loss in evaluation mode, so that dropout does not count as what sets clients apart; local
    steps are those of training.

    weights: N p_i, [N], by default ones. reduction: whether f_i is the mean or the sum of the losses of its samples.
    """

    def __init__(
        self,
        task: Task,
        federation: Federation,
        seed: int = 0,
        weights: np.ndarray | None = None,
        reduction: Reduction = "mean",
    ):
        if task.loss_and_statistics is not None:
            raise FedraxError(MIXING)
        self.federation, self.loss = federation, task.evaluation_loss
        self.reduction: Reduction = reduction
        self.weights = jnp.asarray(np.ones(federation.num_clients) if weights is None else weights, float)
        still = dataclasses.replace(task, loss=lambda params, batch, key: self.loss(params, batch))
        self.still, self.training = (
            Program(of, Layout.of(federation.sizes), federation.num_clients, chunk=0, code=CodeFingerprint(of))
            for of in (still, task)
        )
        self.samples = Batch(*map(jnp.asarray, federation.train))
        self.key = purpose_key(seed, DIAGNOSIS)
        self._measure = jax.jit(self._gradients)
        self._walk = jax.jit(self._drift)
        self._scatter = jax.jit(self._noise)

    def gradients(self, params: Tree) -> Gradients:
        """One pass over the data."""
        return jax.device_get(self._measure(self.samples, params))

    def drift(self, params: Tree, local: LocalSGD, round: int) -> Drift:
        """One round's local steps of every client, those of ``local`` with an optimizer that starts anew, twice."""
        local = dataclasses.replace(local, carry=False)
        return jax.device_get(self._walk(self.samples, params, local, jnp.int32(round)))

    def variances(self, params: Tree, rows: np.ndarray) -> np.ndarray:
        """sigma_i^2 = E |grad f_ij - grad f_i|^2 over the samples j of client i, [N].

        rows: int [N, m], rows of ``train`` to look at, m of each client, -1 where it has fewer. With all rows it is
        exact, with fewer, of which there are to be two, an estimate without bias.
        """
        found = np.asarray(self._scatter(self.samples, params, jnp.asarray(rows), self.federation.sizes))
        return found * self.federation.sizes.astype(float) ** 2 if self.reduction == "sum" else found

    def _each(self, program: Program, samples: Tree, round: Array, measure: Callable, start: Tree, draws: int) -> Tree:
        """``measure(total, i, *data)`` over all clients i, whose data differ in their random keys alone."""
        n = program.num_clients
        numbers = jnp.arange(n, dtype=jnp.int32)
        offsets, sizes = (a.astype(np.int32) for a in (self.federation.offsets[:-1], self.federation.sizes))
        places = ClientAssignment(numbers, numbers, jnp.asarray(offsets), jnp.asarray(sizes), jnp.ones(n))
        everyone = Rounds(round, jnp.float32(n), jnp.int32(n), places)
        of_draws = jax.random.split(jax.random.fold_in(self.key, round), draws)
        keys = [Keys(jax.random.split(key, n), self.key) for key in of_draws]

        def body(i: Array, total: Tree) -> Tree:
            return measure(
                total, i, *(client_data(program, samples, client_task(program, everyone, k, i)) for k in keys)
            )

        return jax.lax.fori_loop(0, n, body, start)

    def _gradients(self, samples: Tree, params: Tree) -> Gradients:
        n = self.still.num_clients

        def add(total: tuple, i: Array, data: ClientData) -> tuple:
            loss, gradient = data.full_gradient(params, self.reduction)
            weight, norms = self.weights[i], total[2].at[i].set(tree.norm(gradient))
            return total[0] + weight * loss, total[1].with_one(gradient, weight), norms

        start = (jnp.zeros(()), Spread.none(params), jnp.zeros(n))
        loss, all_, norms = self._each(self.still, samples, jnp.int32(0), add, start, draws=1)
        return Gradients(loss / n, tree.norm(all_.mean), norms, all_.apart)

    def _drift(self, samples: Tree, params: Tree, local: LocalSGD, round: Array) -> Drift:
        n = self.training.num_clients

        def add(total: tuple, i: Array, *data: ClientData) -> tuple:
            one, other = (tree.sub(local.run(each, params).params, params) for each in data)
            half = lambda a: tree.scale(0.5, a)  # noqa: E731
            steps = jnp.asarray(local.num_steps(data[0]), float)
            sums, differences = half(tree.add(one, other)), half(tree.sub(one, other))
            weight = self.weights[i]
            return total[0] + weight * steps, total[1].with_one(sums, weight), total[2].with_one(differences, weight)

        none = Spread.none(params)
        steps, sums, differences = self._each(self.training, samples, round, add, (jnp.zeros(()), none, none), draws=2)
        # <a, b> = |(a + b) / 2|^2 - |(a - b) / 2|^2, of means and of what is left of them
        mean = tree.dot(sums.mean, sums.mean) - tree.dot(differences.mean, differences.mean)
        apart = sums.squares - differences.squares
        return Drift(steps / n, jnp.sqrt(jnp.maximum(mean, 0)), jnp.sqrt(jnp.maximum(apart / n, 0)))

    def _noise(self, samples: Batch, params: Tree, rows: Array, sizes: Array) -> Array:
        one = lambda params, sample: jax.grad(self._loss)(params, jax.tree.map(lambda a: a[None], sample))  # noqa: E731
        single = optimize(jax.vmap(one, (None, 0)))

        def of_client(own: Array) -> Array:
            parts = jnp.pad(own, (0, -len(own) % AT_ONCE), constant_values=-1).reshape(-1, AT_ONCE)

            def add(total: Spread, part: Array) -> tuple[Spread, None]:
                each = single(params, jax.tree.map(lambda a: a[jnp.maximum(part, 0)], samples))
                return total.joined(Spread.of_rows(each, part >= 0)), None

            return jax.lax.scan(add, Spread.none(params), parts)[0].squares

        seen = jnp.sum(rows >= 0, axis=1)
        return jax.lax.map(of_client, rows) / jnp.maximum(seen - 1, 1) * (sizes - 1) / sizes

    def _loss(self, params: Tree, sample: Batch) -> Array:
        return self.loss(params, sample).sum()


def gradient_dissimilarity(task: Task, federation: Federation, params: Tree | None = None, seed: int = 0) -> float:
    """mean_i |grad f_i|^2 / |grad f|^2 with f = mean_i f_i over the N clients, f_i the mean loss of client i.

    1 when all gradients agree; the B^2 of (G, B)-bounded dissimilarity with G = 0 (SCAFFOLD, A1; FedProx,
    Definition 3). ``params``: where; by default the initial parameters of a run with this seed. In evaluation mode:
    without dropout. One pass over the data. Infinite where the mean gradient is zero.
    """
    start = starting_parameters(task, purpose_key(seed, INITIALIZATION), params)
    wide = lambda a: jnp.asarray(a, jnp.promote_types(jnp.asarray(a).dtype, jnp.float32))  # noqa: E731
    start = jax.tree.map(wide, start)  # sums in a short format overflow
    found = Clients(task, federation, seed).gradients(start)
    return float(np.mean(found.norms**2) / found.mean**2) if found.mean > 0 else float("inf")
