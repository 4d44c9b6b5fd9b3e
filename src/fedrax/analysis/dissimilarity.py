"""Dissimilarity and noise of client gradients, and the drift of local updates, at given parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.arguments import checked_arguments
from fedrax.contract.client_data import ClientAssignment, ClientData, Layout, Reduction
from fedrax.contract.initialization import initial_parameters
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.data.federation import take_rows
from fedrax.errors import FedraxError
from fedrax.host_memory import is_memory_mapped
from fedrax.prng.keys import DIAGNOSIS, INITIALIZATION, purpose_key
from fedrax.simulation.round import ClientKeys, RoundInputs, RoundProgram, client_data, client_inputs
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, optimize

LITTLE = 0.3
"""Ratio below which a deviation is called small: of client gradients, noise or drift to the mean gradient or update."""
CHUNK = 32
"""Per-sample gradients computed in one vmap: their memory is this many times that of the parameters."""


class ClientGradients(NamedTuple):
    """Gradients of N clients with losses f_i and weights p_i at x; f = sum_i p_i f_i, means over clients use p_i."""

    loss: Array
    """f(x)."""
    mean: Array
    """|grad f|."""
    norms: Array
    """|grad f_i|, [N]."""
    spread: Array
    """sqrt(mean_i |grad f_i - grad f|^2)."""


class UpdateDrift(NamedTuple):
    """Drift of the updates Delta_i that N clients compute by local steps from x, in expectation over mini-batches.

    Estimates from two local trainings of each client with independent mini-batches: the product of their noises is
    zero in expectation.
    """

    steps: Array
    """mean_i T_i, the local steps."""
    mean: Array
    """|mean_i E Delta_i|."""
    spread: Array
    """sqrt(mean_i |E Delta_i - mean_j E Delta_j|^2)."""


class RunningVariance(NamedTuple):
    """Weighted mean and variance of a stream of pytrees, by the stable updates of Chan, Golub and LeVeque (1983)."""

    count: Array
    """The sum of the weights."""
    mean: Tree
    """The weighted mean."""
    squares: Array
    """The weighted sum of squared distances from the mean."""

    @classmethod
    def none(cls, like: Tree) -> RunningVariance:
        """The state of an empty stream."""
        return cls(jnp.zeros(()), tree.zeros_like(like), jnp.zeros(()))

    @classmethod
    def of_rows(cls, rows: Tree, valid: Array) -> RunningVariance:
        """The state of the rows [n, ...] where ``valid`` [n] is true."""
        count = jnp.sum(valid).astype(float)

        def mask(a: Array) -> Array:
            return valid.reshape(-1, *(1,) * (a.ndim - 1))

        mean = jax.tree.map(lambda a: jnp.where(mask(a), a, 0).sum(0) / jnp.maximum(count, 1), rows)
        left = jax.tree.map(lambda a, m: jnp.where(mask(a), a - m, 0), rows, mean)
        return cls(count, mean, tree.dot(left, left))

    def joined(self, other: RunningVariance) -> RunningVariance:
        """The state of both streams together."""
        count, between = self.count + other.count, tree.sub(other.mean, self.mean)
        share = other.count / _or_one(count)
        squares = self.squares + other.squares + self.count * share * tree.dot(between, between)
        return RunningVariance(count, tree.add_scaled(self.mean, share, between), squares)

    def with_one(self, one: Tree, weight: Array) -> RunningVariance:
        """The state with one more pytree."""
        return self.joined(RunningVariance(weight, one, jnp.zeros(())))

    @property
    def deviation(self) -> Array:
        """The root mean square distance from the mean."""
        return jnp.sqrt(self.squares / _or_one(self.count))


def _or_one(count: Array) -> Array:
    """``count``, or 1 to divide by if it is zero."""
    return jnp.where(count > 0, count, 1)


class ClientProbe:
    """Measures gradients, their variance and local updates of all clients at given parameters, outside of a run.

    Gradients are those of the loss in evaluation mode, so that dropout adds no dissimilarity; local steps train as in a
    run.

    Args:
        task: The task.
        federation: The clients.
        seed: Seed of mini-batches.
        weights: N p_i, [N], by default ones.
        reduction: Whether f_i is the mean or the sum of the losses of its samples.
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
            raise FedraxError(
                "models with running statistics cannot be measured, since the gradient of a sample depends on its"
                " mini-batch: use group norm instead of batch norm"
            )
        self.federation, self.loss = federation, task.evaluation_loss
        self.reduction: Reduction = reduction
        self.weights = jnp.asarray(np.ones(federation.num_clients) if weights is None else weights, float)
        without_dropout = dataclasses.replace(task, loss=lambda params, batch, key: self.loss(params, batch))
        self.evaluating, self.training = (
            RoundProgram(of, Layout.of(federation.sizes), federation.num_clients, chunk=0, code=CodeFingerprint(of))
            for of in (without_dropout, task)
        )
        self.samples = jax.tree.map(jnp.asarray, Batch(*federation.train))
        self.key = purpose_key(seed, DIAGNOSIS)
        self._measure = jax.jit(self._gradients)
        self._train = jax.jit(self._drift)
        self._variances = jax.jit(self._noise)

    def gradients(self, params: Tree) -> ClientGradients:
        """Gradients of all clients: one pass over the data."""
        return jax.device_get(self._measure(self.samples, params))

    def drift(self, params: Tree, local: LocalSGD, round: int) -> UpdateDrift:
        """Updates of all clients by the local steps of ``round``, with a fresh local optimizer; two trainings each."""
        local = dataclasses.replace(local, carry=False)
        return jax.device_get(self._train(self.samples, params, local, jnp.int32(round)))

    def variances(self, params: Tree, rows: np.ndarray) -> np.ndarray:
        """sigma_i^2 = E |grad f_ij - grad f_i|^2 over the samples j of client i, [N].

        rows: int [N, m], rows of ``train``, -1 where a client has fewer than m. Exact with all rows, unbiased with at
        least two of them.
        """
        found = np.asarray(self._variances(self.samples, params, jnp.asarray(rows), self.federation.sizes))
        return found * self.federation.sizes.astype(float) ** 2 if self.reduction == "sum" else found

    def _each(
        self, program: RoundProgram, samples: Tree, round: Array, measure: Callable, start: Tree, draws: int
    ) -> Tree:
        """Fold ``measure(total, i, *data)`` over the clients i; ``data`` are ``draws`` copies with independent keys."""
        n = program.num_clients
        numbers = jnp.arange(n, dtype=jnp.int32)
        offsets, sizes = (a.astype(np.int32) for a in (self.federation.offsets[:-1], self.federation.sizes))
        assignments = ClientAssignment(numbers, numbers, jnp.asarray(offsets), jnp.asarray(sizes), jnp.ones(n))
        everyone = RoundInputs(round, jnp.float32(n), jnp.int32(n), assignments)
        of_draws = jax.random.split(jax.random.fold_in(self.key, round), draws)
        keys = [ClientKeys(jax.random.split(key, n), self.key) for key in of_draws]

        def body(i: Array, total: Tree) -> Tree:
            return measure(
                total, i, *(client_data(program, samples, client_inputs(program, everyone, k, i)) for k in keys)
            )

        return jax.lax.fori_loop(0, n, body, start)

    def _gradients(self, samples: Tree, params: Tree) -> ClientGradients:
        """See :meth:`gradients`; compiled."""
        n = self.evaluating.num_clients

        def add(total: tuple, i: Array, data: ClientData) -> tuple:
            loss, gradient = data.full_gradient(params, self.reduction)
            weight, norms = self.weights[i], total[2].at[i].set(tree.norm(gradient))
            return total[0] + weight * loss, total[1].with_one(gradient, weight), norms

        start = (jnp.zeros(()), RunningVariance.none(params), jnp.zeros(n))
        loss, all_, norms = self._each(self.evaluating, samples, jnp.int32(0), add, start, draws=1)
        return ClientGradients(loss / n, tree.norm(all_.mean), norms, all_.deviation)

    def _drift(self, samples: Tree, params: Tree, local: LocalSGD, round: Array) -> UpdateDrift:
        """See :meth:`drift`; compiled."""
        n = self.training.num_clients

        def add(total: tuple, i: Array, *data: ClientData) -> tuple:
            one, other = (tree.sub(local.run(each, params).params, params) for each in data)
            steps = jnp.asarray(local.num_steps(data[0]), float)
            sums, differences = tree.scale(0.5, tree.add(one, other)), tree.scale(0.5, tree.sub(one, other))
            weight = self.weights[i]
            return total[0] + weight * steps, total[1].with_one(sums, weight), total[2].with_one(differences, weight)

        none = RunningVariance.none(params)
        steps, sums, differences = self._each(self.training, samples, round, add, (jnp.zeros(()), none, none), draws=2)
        # <a, b> = |(a + b) / 2|^2 - |(a - b) / 2|^2, for the means and for the deviations from them
        mean = tree.dot(sums.mean, sums.mean) - tree.dot(differences.mean, differences.mean)
        spread = sums.squares - differences.squares
        return UpdateDrift(steps / n, jnp.sqrt(jnp.maximum(mean, 0)), jnp.sqrt(jnp.maximum(spread / n, 0)))

    def _noise(self, samples: Batch, params: Tree, rows: Array, sizes: Array) -> Array:
        """See :meth:`variances`, for losses that are means; compiled."""

        def one(params: Tree, sample: Batch) -> Tree:
            return jax.grad(self._loss)(params, jax.tree.map(lambda a: a[None], sample))

        single = optimize(jax.vmap(one, (None, 0)))

        def of_client(own: Array) -> Array:
            parts = jnp.pad(own, (0, -len(own) % CHUNK), constant_values=-1).reshape(-1, CHUNK)

            def add(total: RunningVariance, part: Array) -> tuple[RunningVariance, None]:
                each = single(params, jax.tree.map(lambda a: a[jnp.maximum(part, 0)], samples))
                return total.joined(RunningVariance.of_rows(each, part >= 0)), None

            return jax.lax.scan(add, RunningVariance.none(params), parts)[0].squares

        drawn = jnp.sum(rows >= 0, axis=1)
        return jax.lax.map(of_client, rows) / jnp.maximum(drawn - 1, 1) * (sizes - 1) / sizes

    def _loss(self, params: Tree, sample: Batch) -> Array:
        """The loss of a batch of one sample."""
        return self.loss(params, sample).sum()


@checked_arguments
def gradient_dissimilarity(
    task: Task,
    federation: Federation,
    params: Tree | None = None,
    seed: int = 0,
    weights: Literal["uniform", "samples"] = "uniform",
) -> float:
    """B = sqrt(mean_i |grad f_i|^2) / |grad f| with f = mean_i f_i over the N clients, f_i the mean loss of client i.

    1 when all gradients agree; the B of (G, B)-bounded dissimilarity with G = 0 (SCAFFOLD, A1; FedProx, Definition 3),
    and the one that `diagnose` measures along a run. sqrt(B^2 - 1) is the root mean square distance of client gradients
    from their mean, relative to its norm. Computed in evaluation mode, without dropout, in one pass over the data.

    Args:
        task: The task.
        federation: The clients and their data.
        params: Where to measure; by default the initial parameters of a run with this seed.
        seed: Seed of the initial parameters.
        weights: Weights of clients in both means: equal, or proportional to their numbers of samples.

    Returns:
        B, infinite where the mean gradient is zero.

    Example:
        >>> same = fedrax.Federation.from_arrays(np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1]), np.zeros(4, int))
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> round(fedrax.analysis.gradient_dissimilarity(task, same), 3)  # one client
        1.0
    """
    start = initial_parameters(task, purpose_key(seed, INITIALIZATION), params)

    def at_least_float32(a: Any) -> Array:
        return jnp.asarray(a, jnp.promote_types(jnp.asarray(a).dtype, jnp.float32))

    start = jax.tree.map(at_least_float32, start)  # sums of float16 overflow
    sizes = federation.sizes / federation.sizes.mean() if weights == "samples" else np.ones(federation.num_clients)
    found = ClientProbe(task, federation, seed, sizes).gradients(start)
    return float(np.sqrt(np.average(found.norms**2, weights=sizes)) / found.mean) if found.mean > 0 else float("inf")


def shuffled_over_clients(federation: Federation, seed: int) -> Federation | None:
    """The federation with its training samples shuffled over the clients; None if they are memory-mapped."""
    if any(map(is_memory_mapped, federation.train.arrays)):
        return None
    order = np.random.default_rng([seed, 1]).permutation(len(federation.train.y))
    return dataclasses.replace(federation, train=take_rows(federation.train, order))


def relative_distance(value: float) -> float:
    """The root mean square distance of client gradients from their mean, relative to its norm, from B."""
    return math.sqrt(max(value**2 - 1, 0))


def describe_dissimilarity(value: float, model: str, rounds: int = 0) -> str:
    """A line that says how to read the gradient dissimilarity B of a model after some rounds."""
    where = f"model {model} after {rounds} rounds of FedAvg" if rounds else f"untrained model {model}"
    if not math.isfinite(value):
        return f"dissimilarity  B is infinite for the {where}: its mean gradient is zero"
    distance = relative_distance(value)
    reading = verdict(
        distance,
        f"small (below {LITTLE:g}): FedAvg is hard to beat",
        f"large ({LITTLE:g} or more): compare methods that correct client drift with FedAvg",
    )
    return (
        f"dissimilarity  B = {value:.3g} for the {where} (equal gradients: 1): the distance of a client's gradient from"
        f" the mean gradient is {distance:.2g} times the norm of the mean, {reading}"
    )


def verdict(ratio: float, little: str, much: str) -> str:
    """One of two texts, by the size of a ratio."""
    return little if ratio < LITTLE else much
