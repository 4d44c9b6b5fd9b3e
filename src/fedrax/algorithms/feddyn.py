"""FedDyn: federated learning with dynamic regularization (Acar et al. 2021)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters x and h, the mean of all clients' lambda_i."""

    params: Tree
    dual: Tree


class Client(NamedTuple):
    """lambda_i; if the local problem was solved exactly, it is the gradient of f_i at the client's last x_i."""

    dual: Tree


@hyperparameters
class FedDyn(Algorithm):
    """Clients minimize f_i(x_i) - <lambda_i, x_i> + alpha/2 |x_i - x|^2, with momentum on the gradient of the sum.

    Then lambda_i <- lambda_i - alpha (x_i - x), and over the S clients of the cohort, of N,
    h <- h - alpha/N sum (x_i - x) and x <- mean x_i - h / alpha. Algorithm 1, with the same alpha for all clients; the
    authors' code multiplies it by mean(n) / n_i at a client with n_i samples.

    Example:
        >>> method = fedrax.algorithms.FedDyn(local=fedrax.LocalSGD(lr=0.1, steps=5), alpha=0.1)
        >>> method.alpha
        0.1
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    alpha: Positive = 0.1
    """Strength of the proximal term; the server moves by h / alpha."""

    traits = Traits(uniform_weights=True, control_variates=("dual",))
    """Uniform weights: h is the mean of the lambda_i."""

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; h = 0."""
        return Server(params, tree.zeros_like(params))

    def init_client(self, params: Tree) -> Client:
        """lambda_i = 0."""
        return Client(tree.zeros_like(params))

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """Local steps on the regularized loss, then the new lambda_i."""

        def regularized(gradient: Tree, x: Tree) -> Tree:
            step = lambda g, dual, a, b: (g - dual + self.alpha * (a - b)).astype(g.dtype)  # noqa: E731
            return jax.tree.map(step, gradient, state.dual, x, message)

        result = self.local.run(data.with_term(regularized), message)
        delta = tree.sub(result.params, message)
        dual = tree.add_scaled(state.dual, -self.alpha, delta)
        return ClientOutput(upload=delta, state=Client(dual), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """h <- h - alpha S/N mean Delta_i, x <- x + mean Delta_i - h / alpha."""
        share = jnp.asarray(cohort.size, float) / cohort.num_clients
        dual = tree.add_scaled(server.dual, -self.alpha * share, cohort.mean)
        params = tree.add_scaled(tree.add(server.params, cohort.mean), -1 / self.alpha, dual)
        # Where no client participated, there is no mean that h would be taken off again: x has its -h / alpha already.
        return Server(tree.where(cohort.size > 0, params, server.params), dual), {}
