"""FedBuff (Nguyen et al. 2022): federated learning with buffered asynchronous aggregation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import NonNegative, NonNegativeInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, summed_dtype
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, the uploads in transit, and the server optimizer's state.

    coming: leaves [max_delay + 1, ...]; row d is the sum of the uploads that arrive after d more server steps.
    """

    params: Tree
    coming: Tree
    optimizer: Tree


class Upload(NamedTuple):
    """Delta_i and its staleness tau_i: the number of server steps from the client's start to the upload's arrival."""

    params: Tree
    delay: Array


@hyperparameters
class FedBuff(Algorithm):
    """Server steps on the mean of the K uploads that arrived since the last step, weighted by staleness.

    x <- x + eta_g / K sum_i (1 + tau_i)^-power Delta_i, where Delta_i is computed by local steps from the x of tau_i
    steps before. Algorithms 1 and 2; power 1/2 is the scaling of section 5. Delays are defined by the participation
    policy :class:`fedrax.participation.Asynchronous`, and K is ``cohort_size``; without delays this is FedAvg. A round
    contains the clients that start between two server steps. They compute at once and their uploads are delayed, which
    gives the same numbers as clients that compute during the delay. Inside a ``ClientDP`` that adds noise at the
    server, the sum of every delay has independent noise, and a step receives the noise of ``max_delay`` + 1 rounds: set
    ``max_delay`` no larger than the delays are.

    Example:
        >>> method = fedrax.algorithms.FedBuff(local=fedrax.LocalSGD(lr=0.1, steps=5), max_delay=4)
        >>> method.max_delay
        4
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    power: NonNegative = 0.5
    """Exponent of the decay of an upload's weight with its delay; 0: no decay."""
    max_delay: NonNegativeInt = 10
    """The largest delay in rounds; the server state has max_delay + 1 vectors of the model's size. Larger delays raise
    FedraxError, except for uploads that arrive after the last round."""

    @property
    def traits(self) -> Traits:
        """Uniform weights; uploads may arrive ``max_delay`` rounds late."""
        return Traits(uniform_weights=True, max_staleness=self.max_delay)

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round, without uploads in transit."""
        coming = jax.tree.map(lambda p: jnp.zeros((self.max_delay + 1, *p.shape), p.dtype), params)
        return Server(params, coming, self.server_optimizer.init(params))

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD, and the round in which the upload arrives."""
        result = self.local.run(data, message)
        delay = jnp.int32(0) if data.delay is None else data.delay
        told = jnp.minimum(delay, self.max_delay + 1)  # of what comes after the run, whatever was followed of it
        info = result.info | {"delay": told.astype(jnp.float32)}
        return ClientOutput(upload=Upload(tree.sub(result.params, message), delay), info=info)

    def receive(self, upload: Upload) -> Tree:
        """(1 + tau)^-power Delta in row tau of the uploads in transit."""

        def placed(delta: Array) -> Array:
            kind = summed_dtype(delta.dtype)
            here = jnp.arange(self.max_delay + 1) == upload.delay
            scaled = delta.astype(kind) * (1 + upload.delay.astype(kind)) ** -self.power
            return here.reshape(-1, *[1] * delta.ndim) * scaled

        return jax.tree.map(placed, upload.params)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step on the uploads that have arrived; the others advance by one round."""
        begun = jnp.asarray(cohort.size, float)
        count = begun if cohort.expected is None else jnp.asarray(cohort.expected, float)  # K; at first more begin
        coming = tree.add_scaled(server.coming, begun / count, cohort.mean)
        arrived = jax.tree.map(lambda rows: rows[0], coming)
        coming = jax.tree.map(lambda rows: jnp.roll(rows, -1, 0).at[-1].set(0), coming)
        params, state = self.server_optimizer.step(server.params, server.optimizer, arrived, cohort.round)
        return Server(params, coming, state), {}
