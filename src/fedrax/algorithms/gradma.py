"""GradMA (Luo et al. 2023): directions corrected at the workers, at the server with a memory of updates, or at both.

A correction projects a direction onto the cone of vectors with no negative inner product with any of a few stored
vectors (:mod:`fedrax.optim.cone`). These are gradients at earlier points and x_i - x at a worker, and the clients'
updates at the server.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import Decay, NonNegativeInt, Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.averaging import Averaging
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalResult, LocalSGD, Step
from fedrax.contract.traits import Traits
from fedrax.contract.vectors import ServerVectors
from fedrax.optim.cone import multipliers, project_to_cone
from fedrax.tree import Tree

Scope = Literal["vector", "leaf"]


class Server(NamedTuple):
    """Global parameters, m~, and the memory of the clients' updates (an empty tuple without memory)."""

    params: Tree
    momentum: Tree
    memory: Any


class Memory(NamedTuple):
    """D in slots: D[i] = scale_i v_i, so that decay changes only the scales and v never underflows."""

    vectors: ServerVectors
    """v."""
    scale: Array
    """[m]."""
    gram: Array
    """Inner products of the v, [1, m, m], or [leaves, m, m] if there is one quadratic program for each leaf."""
    owner: Array
    """int32 [m]: the client in each slot, num_clients in a free one."""
    count: Array
    """int32 [m]: the number of participations of the slot's client since it was added (the paper's counter)."""
    entered: Array
    """int32 [m]: the round in which it entered."""


def corrected_steps(algorithm: GradMAW | GradMA, x: Tree, state: Tree, data: ClientData) -> tuple[LocalResult, Tree]:
    """Local steps along the corrected gradients (Algorithm 2), and the client's next state.

    Two gradients need not be computed again: in the first step the one at x, and in the second step the one at the
    previous point, which is x.
    """
    local, remembers = algorithm.local, algorithm.previous == "local"

    def direction(p: Tree, x_i: Tree, step: Step, before: Tree) -> tuple[Tree, Tree]:
        def gradient(at: Tree) -> Tree:
            return local.decayed(step.gradient(at)[1], at)

        def corrected() -> Tree:
            at_x = jax.lax.cond(step.index > 0, lambda: gradient(x), lambda: p) if remembers else gradient(x)
            at_previous = jax.lax.cond(step.index == 1, lambda: at_x, lambda: gradient(before))
            columns = lambda previous, start, here, x: (previous, start, here - x)  # noqa: E731
            return project_to_cone(p, (at_previous, at_x, x_i, x), columns, algorithm.scope == "leaf")

        # At x itself, with no other point before, the columns are p, p and zero.
        return corrected() if remembers else jax.lax.cond(step.index > 0, corrected, lambda: p), x_i

    result = local.run(data, x, direction, state if remembers else x)
    steps = local.num_steps(data)
    known = local.samples(data, jnp.minimum(steps, 2)) + (0 if remembers else local.samples(data, 1))
    info = result.info | {"gradients": 3 * local.samples(data, steps) - known}
    return result._replace(info=info), result.params if remembers else ()


@hyperparameters
class GradMAW(Averaging):
    """GradMA at the workers only: local steps along p~ (Algorithm 7).

    p~ is the nearest vector to the gradient with no negative inner product with three vectors: x_i - x, and the
    gradients on the same batch at the previous point and at x.

    Example:
        >>> method = fedrax.algorithms.GradMAW(local=fedrax.LocalSGD(lr=0.1, steps=5), scope="vector")
        >>> method.scope
        'vector'
    """

    previous: Literal["global", "local"] = "global"
    """x_{-1}: the global parameters x (what the authors ran), or the worker's last local model (as printed)."""
    scope: Scope = "vector"
    """One quadratic program over the whole vector (as printed), or one for each leaf (what the authors ran)."""

    def init_client(self, params: Tree) -> Tree:
        """The last local model: at first the starting parameters."""
        return params if self.previous == "local" else ()

    def client(self, message: Tree, state: Tree, data: ClientData) -> ClientOutput:
        """Corrected local steps from the global parameters."""
        result, state = corrected_steps(self, message, state, data)
        return ClientOutput(upload=tree.sub(result.params, message), state=state, info=result.info)


@hyperparameters
class ServerMemory(Algorithm):
    """Base of the methods with GradMA's server (Algorithms 3, 4 and 8).

    m = beta1 m~ + d with d = sum_i p_i d_i and d_i = x - x_i. D[i] is the sum of client i's updates, which decays by
    the factor beta2 in each round. m~ is the nearest vector to m with no negative inner product with any D[i]; x <- x -
    lr m~. Without memory it is FedAvgM.
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_lr: Positive = 1.0
    """eta_g."""
    beta1: Decay = 0.5
    """Momentum of the server's direction."""
    beta2: Decay = 0.5
    """Decay of a stored update per round."""
    memory: NonNegativeInt = 100
    """Number of clients whose updates are stored: 0, or at least the cohort size; larger numbers than that of all
    clients mean all. A full memory drops, among the clients outside the cohort, the one with the fewest participations
    since it was added (in a tie the earliest one, then the one with the smallest number).
    """
    scope: Scope = "vector"
    """One quadratic program over the whole vector (as printed), or one for each leaf (what the authors ran)."""

    @property
    def traits(self) -> Traits:
        """The memory holds all of the cohort, or no client."""
        return Traits(largest_cohort=self.memory or None)

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round, with an empty memory."""
        m = min(self.memory, num_clients)
        zeros = tree.zeros_like(params)
        if m == 0:
            return Server(params, zeros, ())
        leaves = jax.tree.leaves(params)
        none = jnp.zeros(m, jnp.int32)
        gram = jnp.zeros((len(leaves) if self.scope == "leaf" else 1, m, m), leaves[0].dtype)
        scale = jnp.zeros(m, leaves[0].dtype)
        vectors = ServerVectors.zeros(m, params)
        return Server(params, zeros, Memory(vectors, scale, gram, none + num_clients, none, none))

    @abstractmethod
    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local steps; d_i is uploaded as in :meth:`output`."""

    def output(self, update: Tree, info: Info, state: Tree = ()) -> ClientOutput:
        """Upload d_i for each client separately if the server stores it, otherwise for the mean."""
        if self.memory:
            return ClientOutput(upload=(), each=ServerVectors.of(update), info=info, state=state)
        return ClientOutput(upload=update, info=info, state=state)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Algorithm 3: store the cohort's updates in the memory, then step along m~."""
        if not self.memory:
            momentum = tree.add_scaled(cohort.mean, self.beta1, server.momentum)
            return self._step(server, momentum, ()), {}
        m = tree.add_scaled(cohort.each.combine(cohort.weights), self.beta1, server.momentum)
        slots, is_new = take_slots(server.memory, cohort.clients, cohort.num_clients)
        memory, inner = self._remember(server.memory, cohort, slots, is_new, m)
        # without memory of the past, absent clients add no constraints
        live = (memory.owner < cohort.num_clients) & ((memory.scale > 0) | (self.beta2 > 0))
        z = jax.vmap(multipliers)(jnp.where(live[:, None] & live, memory.gram, 0), jnp.where(live, inner, 0))
        momentum = tree.add(m, memory.vectors.combine(z))
        conditions = jnp.mean(jnp.sum(z > 0, axis=1, dtype=jnp.float32))
        return self._step(server, momentum, memory), {"conditions": conditions}

    def _step(self, server: Server, momentum: Tree, memory: Any) -> Server:
        return Server(tree.add_scaled(server.params, -self.server_lr, momentum), momentum, memory)

    def _remember(self, memory: Memory, cohort: Cohort, slots: Array, is_new: Array, m: Tree) -> tuple[Memory, Array]:
        """The memory after this round, and the inner products of its vectors with m, [1 or leaves, slots]."""
        put = lambda table, values: table.at[slots].set(values, mode="drop")  # noqa: E731
        get = lambda table: table.at[slots].get(mode="clip")  # noqa: E731
        scale = self.beta2 * memory.scale
        vectors = memory.vectors.accumulate(slots, jnp.where(is_new, 0, get(scale)), cohort.each)
        rows, inner = vectors.products(slots, m)
        if self.scope == "vector":
            rows, inner = rows.sum(0, keepdims=True), inner.sum(0, keepdims=True)
        gram = memory.gram.at[:, slots].set(rows, mode="drop")
        gram = gram.at[:, :, slots].set(rows.transpose(0, 2, 1), mode="drop")
        memory = Memory(
            vectors,
            put(scale, 1).astype(memory.scale.dtype),
            gram,
            put(memory.owner, cohort.clients),
            put(memory.count, jnp.where(is_new, 1, get(memory.count) + 1)),
            put(memory.entered, jnp.where(is_new, cohort.round, get(memory.entered))),
        )
        return memory, inner

    def remembered(self, server: Server) -> dict[int, Tree]:
        """D[i] of every client in the memory, for inspection."""
        if not self.memory:
            return {}
        memory, vectors = jax.tree.map(np.asarray, server.memory), server.memory.vectors.rows
        row = lambda k: jax.tree.map(lambda v: memory.scale[k] * v[k], vectors)  # noqa: E731
        return {int(memory.owner[k]): row(k) for k in np.flatnonzero(memory.count)}


def take_slots(memory: Memory, clients: Array, num_clients: int) -> tuple[Array, Array]:
    """The slot of each client of the cohort, and whether it is new (Algorithm 4).

    clients: in ascending order. A client without a slot gets an index beyond the last one.
    """
    room = len(memory.owner)
    real = clients < num_clients
    same = real[:, None] & (memory.owner == clients[:, None])
    known, present = same.any(1), same.any(0)
    is_new = real & ~known
    group = jnp.where(memory.count == 0, 0, jnp.where(present, 2, 1))  # free, to be dropped, to be kept
    order = jnp.lexsort((memory.owner, memory.entered, memory.count, group))
    before = jnp.cumsum(is_new) - 1  # new clients with smaller numbers, for a new one
    slot = jnp.where(known, jnp.argmax(same, axis=1), order[jnp.clip(before, 0, room - 1)])
    return jnp.where(real, slot, room), is_new


@hyperparameters
class GradMAS(ServerMemory):
    """GradMA at the server only: m = beta1 m~ + d, corrected by the server memory. See :class:`ServerMemory`.

    Example:
        >>> method = fedrax.algorithms.GradMAS(local=fedrax.LocalSGD(lr=0.1, steps=5))
        >>> method.local.steps
        5
    """

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD; d_i is uploaded."""
        result = self.local.run(data, message)
        return self.output(tree.sub(message, result.params), result.info)


@hyperparameters
class GradMA(ServerMemory):
    """GradMA: corrected steps on the workers and on the server (Algorithm 1).

    Example:
        >>> method = fedrax.algorithms.GradMA(local=fedrax.LocalSGD(lr=0.1, steps=5), previous="local")
        >>> method.previous
        'local'
    """

    previous: Literal["global", "local"] = "global"
    """x_{-1}: the global parameters x (what the authors ran), or the worker's last local model (as printed)."""

    def init_client(self, params: Tree) -> Tree:
        """The last local model: at first the starting parameters."""
        return params if self.previous == "local" else ()

    def client(self, message: Tree, state: Tree, data: ClientData) -> ClientOutput:
        """Corrected local steps; d_i is uploaded."""
        result, state = corrected_steps(self, message, state, data)
        return self.output(tree.sub(message, result.params), result.info, state)
