"""FedExP: federated averaging with extrapolation (Jhunjhunwala, Wang and Joshi 2023)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters."""

    params: Tree


class Upload(NamedTuple):
    """Delta_i and |Delta_i|^2."""

    params: Tree
    squared_norm: Array


@hyperparameters
class FedExP(Algorithm):
    """x <- x + eta_g Delta with eta_g = max(1, sum_i p_i |Delta_i|^2 / (2 (|Delta|^2 + epsilon))).

    Algorithm 1. The norm of Delta = sum_i p_i Delta_i is small if the clients' updates point in different directions;
    the server step is then longer than FedAvg's. Events have eta_g as ``server_lr``.

    Example:
        >>> method = fedrax.algorithms.FedExP(local=fedrax.LocalSGD(lr=0.1, steps=5), epsilon=0.01)
        >>> method.epsilon
        0.01
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    epsilon: Positive = 1e-3
    """Bounds the step where the updates cancel."""

    @property
    def traits(self) -> Traits:
        """Weights that sum to one: the extrapolation compares a mean with a squared mean."""
        return Traits(normalized_weights=True)

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD from the global parameters; the update and its squared norm are uploaded."""
        result = self.local.run(data, message)
        delta = tree.sub(result.params, message)
        return ClientOutput(upload=Upload(delta, tree.dot(delta, delta)), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """The extrapolated step."""
        delta, squared_norm = cohort.mean
        lr = jnp.maximum(1.0, squared_norm / (2 * (tree.dot(delta, delta) + self.epsilon)))
        return Server(tree.add_scaled(server.params, lr, delta)), {"server_lr": lr}
