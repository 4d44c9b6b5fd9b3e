"""MIFA (Gu et al. 2021): memory-augmented averaging for arbitrary unavailability of clients."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.contract.vectors import ServerVectors
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, the memory's mean over all N clients, the memory itself and the optimizer's state.

    memory: N vectors if the server stores them, an empty tuple if the clients do.
    """

    params: Tree
    mean: Tree
    memory: ServerVectors | tuple[()]
    optimizer: Tree


@hyperparameters
class MIFA(Algorithm):
    """Server steps on the mean of the last updates of all N clients, including absent ones (zero at first).

    What is stored for a client is G_i = Delta_i / eta with the eta of its last participation, and the server step uses
    the eta of the current round (Algorithm 1). Under a ``local.schedule``, older updates therefore do not have a larger
    weight than new ones. With constant eta this is the same as storing Delta_i.

    Example:
        >>> method = fedrax.algorithms.MIFA(local=fedrax.LocalSGD(lr=0.1, steps=5), memory="server")
        >>> method.memory
        'server'
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean of all clients' last updates."""
    memory: Literal["clients", "server"] = "clients"
    """Where G_i is stored: at the clients, which upload the change, or at the server, to which clients upload G_i."""

    traits = Traits(uniform_weights=True)
    """Uniform weights."""

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; the memory is zero."""
        zeros = tree.zeros_like(params)
        memory = ServerVectors.zeros(num_clients, params) if self.memory == "server" else ()
        return Server(params, zeros, memory, self.server_optimizer.init(params))

    def init_client(self, params: Tree) -> Tree:
        """G_i = 0."""
        return tree.zeros_like(params) if self.memory == "clients" else ()

    def client(self, message: Tree, state: Tree, data: ClientData) -> ClientOutput:
        """Local SGD; uploads the update, or its change since the client's last one."""
        result, factor = self.local.run(data, message), self.local.schedule(data.round)
        delta = tree.scale(1 / jnp.where(factor > 0, factor, 1), tree.sub(result.params, message))
        if self.memory == "server":
            return ClientOutput(upload=(), each=ServerVectors.of(delta), info=result.info)
        return ClientOutput(upload=tree.sub(delta, state), state=delta, info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Replace the cohort's entries of the memory and step on its mean."""
        memory = server.memory
        if isinstance(memory, ServerVectors):
            memory = memory.accumulate(cohort.clients, jnp.zeros(len(cohort.clients)), cohort.each)
            mean = memory.combine(jnp.full(cohort.num_clients, 1 / cohort.num_clients))
        else:
            share = jnp.asarray(cohort.size, float) / cohort.num_clients
            mean = tree.add_scaled(server.mean, share, cohort.mean)
        step = tree.scale(self.local.schedule(cohort.round), mean)
        params, optimizer = self.server_optimizer.step(server.params, server.optimizer, step, cohort.round)
        return Server(params, mean, memory, optimizer), {}
