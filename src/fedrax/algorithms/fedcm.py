"""FedCM: client-level momentum from the last global update (Xu et al. 2021)."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.annotations import Bound
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.errors import FedraxError
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, the momentum (the cohort's last mean direction), and the server optimizer's state."""

    params: Tree
    momentum: Tree
    optimizer: Tree


class Message(NamedTuple):
    """x and the momentum."""

    params: Tree
    momentum: Tree


class Upload(NamedTuple):
    """Delta_i, and T_i, by which the server divides it."""

    params: Tree
    steps: Array


class Received(NamedTuple):
    """What is averaged: Delta_i and Delta_i / T_i."""

    params: Tree
    step: Tree


@hyperparameters
class FedCM(Algorithm):
    """d = alpha g_i + (1 - alpha) m, with m = -sum_i p_i Delta_i / (eta T_i) of the last round, initially zero.

    Algorithm 2 of the paper, whose server learning rate is ours times eta T. alpha = 1 is FedAvg.

    Example:
        >>> method = fedrax.algorithms.FedCM(local=fedrax.LocalSGD(lr=0.1, steps=5), alpha=0.1)
        >>> method.alpha
        0.1
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    alpha: Annotated[float, Bound(gt=0, le=1)] = 0.1
    """Weight of the client's gradient against the momentum."""

    def check(self) -> None:
        """Raise FedraxError for a local optimizer: the momentum is in units of eta."""
        if self.local.optimizer is not None:
            raise FedraxError("FedCM divides updates by the length of plain local steps: unset local.optimizer")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; no momentum yet."""
        return Server(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def broadcast(self, server: Server) -> Message:
        """x and the momentum."""
        return Message(server.params, server.momentum)

    def client(self, message: Message, state: Any, data: ClientData) -> ClientOutput:
        """Local steps along gradient and momentum."""

        def direction(gradient: Tree, x: Tree, step: Step) -> Tree:
            return tree.add_scaled(tree.scale(self.alpha, gradient), 1 - self.alpha, message.momentum)

        result = self.local.run(data, message.params, direction)
        return ClientOutput(upload=Upload(tree.sub(result.params, message.params), result.steps), info=result.info)

    def receive(self, upload: Upload) -> Received:
        """Clients may take different numbers of steps."""
        return Received(upload.params, tree.scale(1 / upload.steps, upload.params))

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Take one step of the server optimizer on the mean update, and update the momentum."""
        lr = jnp.asarray(self.local.step_size(cohort.round))
        renewed = tree.scale(-1 / jnp.where(lr > 0, lr, 1), cohort.mean.step)
        # without clients, or with a scheduled learning rate of zero, there is no new direction
        momentum = tree.where((lr > 0) & (cohort.size > 0), renewed, server.momentum)
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean.params, cohort.round)
        return Server(params, momentum, state), {}
