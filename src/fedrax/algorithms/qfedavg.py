"""q-FedAvg: federated averaging for the fair objective q-FFL (Li, Sanjabi, Beirami and Smith 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.errors import FedraxError
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree

_TINY = 1e-10
"""Added to a client's loss, as in the authors' code: negative powers of zero are undefined."""


class Server(NamedTuple):
    """Global parameters and the server optimizer's state."""

    params: Tree
    optimizer: Tree


class Upload(NamedTuple):
    """F_i^q Delta_i and the normalization h_i, both in units of L = 1 / eta."""

    params: Tree
    scale: Array


@hyperparameters
class QFedAvg(Algorithm):
    """Minimizes sum_i p_i f_i^(q+1) / (q + 1): a greater q gives clients with large losses more weight. Algorithm 2.

    With F_i = f_i(x) over all of a client's data and L = 1 / eta for the unknown Lipschitz constant, client i sends
    F_i^q L Delta_i and h_i = q F_i^(q-1) |L Delta_i|^2 + L F_i^q, and x <- x + sum_i p_i F_i^q L Delta_i / sum_i p_i
    h_i. The losses must not be negative; as in the authors' code 1e-10 is added to them. q = 0 is FedAvg.

    Example:
        >>> method = fedrax.algorithms.QFedAvg(local=fedrax.LocalSGD(lr=0.1, steps=5), q=2.0)
        >>> method.q
        2.0
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    q: NonNegative = 1.0
    """q: strength of fairness; 0 is FedAvg."""

    def check(self) -> None:
        """1 / L is the clients' learning rate."""
        if not self.local.lr_is_step_size:
            raise FedraxError(
                "QFedAvg takes 1 / local.lr for the Lipschitz constant, and a finished local optimizer has its own step"
                " size: make it of local.lr, Optax.of(...) without a learning rate"
            )

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, self.server_optimizer.init(params))

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """F_i at the global parameters, then local SGD from there."""
        loss, _ = self.local.full_gradient(data, message)  # the compiler drops the gradient, which is unused
        result = self.local.run(data, message)
        delta, lr = tree.sub(result.params, message), self.local.step_size(data.round)
        power = (loss + _TINY) ** self.q
        curvature = self.q * (loss + _TINY) ** (self.q - 1) * tree.dot(delta, delta)
        # A schedule may have brought the learning rate down to zero, and with it Delta_i.
        scale = curvature / jnp.where(jnp.asarray(lr) > 0, lr, 1) + power
        upload = jax.tree.map(lambda d: (power * d).astype(d.dtype), delta)
        return ClientOutput(upload=Upload(upload, scale), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer on the reweighted mean of the updates."""
        update, scale = cohort.mean
        delta = tree.scale(1 / jnp.where(scale != 0, scale, 1), update)  # zero where no client participated
        params, state = self.server_optimizer.step(server.params, server.optimizer, delta, cohort.round)
        return Server(params, state), {}
