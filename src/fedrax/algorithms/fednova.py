"""FedNova: normalized averaging of clients that take different numbers of steps (Wang et al. 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.hyperparameters import Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, proximal_term
from fedrax.errors import FedraxError
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters and the server optimizer's state."""

    params: Tree
    optimizer: Tree


class Upload(NamedTuple):
    """Delta_i / |a_i|_1, and |a_i|_1 itself, whose mean is tau_eff."""

    direction: Tree
    length: Array


@hyperparameters
class FedNova(Algorithm):
    """x <- x + eta_g tau_eff sum_i p_i Delta_i / |a_i|_1 with tau_eff = sum_i p_i |a_i|_1.

    The local steps end at x - eta sum_k a_ik g_ik, where g_ik is the gradient of step k. Each update is divided by the
    sum of its a_ik, so that the weight of a client does not depend on its number of steps, and the fixed point is not
    biased toward clients with many steps. (With ``mu`` the authors' code uses sum_i p_i T_i as tau_eff.)

    Example:
        >>> method = fedrax.algorithms.FedNova(local=fedrax.LocalSGD(lr=0.1, steps=5), mu=0.01)
        >>> method.mu
        0.01
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    mu: Positive | None = None
    """Strength of a proximal term mu/2 |x_i - x|^2 in the local loss, as FedProx has it."""

    def check(self) -> None:
        """Raise FedraxError for local steps whose |a_i|_1 has no closed form."""
        between = ("clip", "weight_decay", "prox", "optimizer")
        used = next((name for name in between if getattr(self.local, name) is not None), None)
        if used is not None:
            raise FedraxError(f"FedNova's normalization has no closed form with local.{used}: unset it")
        if self.mu is not None and self.local.momentum is not None:
            raise FedraxError("FedNova supports local momentum or a proximal term: unset local.momentum or mu")
        if self.mu is not None and not self.local.lr * self.mu < 1:
            raise FedraxError("FedNova needs local.lr * mu below 1, or its local steps overshoot the proximal term")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, self.server_optimizer.init(params))

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local steps from the global parameters; the normalized update is uploaded."""
        if self.mu is not None:
            data = data.with_term(proximal_term(self.mu, message))
        result = self.local.run(data, message)
        length = self._length(result.steps, data.round)
        direction = tree.scale(1 / length, tree.sub(result.params, message))
        return ClientOutput(upload=Upload(direction, length), info=result.info)

    def _length(self, steps: Array, round: Array) -> Array:
        """|a|_1 of T steps: section 4.1."""
        if self.local.momentum is not None:
            rho = self.local.momentum
            return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        if self.mu is not None:
            shrink = self.local.step_size(round) * self.mu
            # (1 - (1 - s)^T) / s without cancellation for small s; a schedule may bring s down to zero, where it is T.
            total = -jnp.expm1(steps * jnp.log1p(-shrink)) / jnp.where(shrink > 0, shrink, 1)
            return jnp.where(shrink > 0, total, steps)
        return steps

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer on tau_eff times the mean normalized update."""
        direction, tau = cohort.mean
        params, state = self.server_optimizer.step(
            server.params, server.optimizer, tree.scale(tau, direction), cohort.round
        )
        return Server(params, state), {"tau_eff": tau}
