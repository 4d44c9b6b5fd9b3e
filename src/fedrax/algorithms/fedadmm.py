"""FedADMM: the alternating direction method of multipliers with inexact local steps (LoSAC paper, Appendix E).

It minimizes (1/N) sum_i f_i + Psi in consensus form: every client stores a copy x_i of the server's z and a multiplier
pi_i for the constraint x_i = z. In Eq. 74 the factor 1/N is part of f_i. Here f_i is the same as in every other method,
and Psi is multiplied by N instead.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import Positive, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError
from fedrax.optim.proximal import Prox
from fedrax.tree import Tree


class Server(NamedTuple):
    """z, and the sum over all N clients of their last pi_i + rho x_i."""

    params: Tree
    total: Tree


class Client(NamedTuple):
    """x_i and pi_i."""

    model: Tree
    dual: Tree


@hyperparameters
class FedADMM(Algorithm):
    """x_i <- (rho eta z - eta pi_i + x_i - eta g_i) / (1 + rho eta), pi_i <- pi_i + rho (x_i - z) (Algorithm 3).

    The server minimizes over z, given the last pi_i + rho x_i of all clients. It stores only their sum; clients upload
    the change of their term.

    Example:
        >>> method = fedrax.algorithms.FedADMM(local=fedrax.LocalSGD(lr=0.1, steps=5), rho=1.0)
        >>> method.rho
        1.0
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    rho: Positive = 5.0
    """Penalty parameter: strength of the coupling of x_i and z, to be tuned together with the learning rate. If rho eta
    T is far above 1, a round is one gradient descent step with learning rate 1 / rho, for any eta and T; if it is far
    below 1, the method diverges.
    """
    prox: Prox | None = None
    """Regularizer Psi, on the server."""
    server_steps: PositiveInt = 1
    """Proximal steps (Eq. 81) that the server takes on z in each round."""
    server_lr: Positive | None = None
    """eta_g, learning rate of these steps; None: 1 / (N rho), for which one step gives the minimum (Eq. 82)."""

    traits = Traits(uniform_weights=True, own_models=True)
    """The server's problem has uniform weights, and clients start from their own models."""

    def check(self) -> None:
        """Raise FedraxError for options of local steps that Algorithm 3 does not define."""
        for name in ("momentum", "clip", "optimizer"):
            if getattr(self.local, name) is not None:
                raise FedraxError(f"FedADMM has its own local steps: unset local.{name}")
        if self.local.prox is not None:
            raise FedraxError("FedADMM applies its regularizer on the server: set prox instead of local.prox")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round: x_i = z and pi_i = 0, then the first steps on z."""
        total = tree.scale(num_clients * self.rho, params)
        return Server(self._minimized(params, total, num_clients), total)

    def init_client(self, params: Tree) -> Client:
        """x_i = z before the first steps on it, pi_i = 0."""
        return Client(params, tree.zeros_like(params))

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """Local steps from the client's own x_i, with z fixed; uploads the change of pi_i + rho x_i."""
        lr = self.local.step_size(data.round)

        def direction(gradient: Tree, x: Tree, step: Step, dual: Tree) -> tuple[Tree, Tree]:
            d = jax.tree.map(
                lambda g, pi, a, z: ((g + pi + self.rho * (a - z)) / (1 + self.rho * lr)).astype(g.dtype),
                *(gradient, dual, x, message),
            )  # x - eta d is Eq. 83
            moved = tree.add_scaled(x, -lr, d)
            return d, tree.add_scaled(dual, self.rho, tree.sub(moved, message))  # Eq. 84

        result = self.local.run(data, state.model, direction, state.dual)
        change = tree.add_scaled(tree.sub(result.memory, state.dual), self.rho, tree.sub(result.params, state.model))
        return ClientOutput(upload=change, state=Client(result.params, result.memory), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Update the cohort's terms of the sum, then take the steps on z with which the next round begins."""
        total = tree.add_scaled(server.total, jnp.asarray(cohort.size, float), cohort.mean)
        return Server(self._minimized(server.params, total, cohort.num_clients), total), {}

    def _minimized(self, z: Tree, total: Tree, num_clients: int) -> Tree:
        """Eq. 81: z <- prox_{eta_g N Psi}(z - eta_g (N rho z - sum_i (pi_i + rho x_i))), step by step."""
        lr = 1 / (num_clients * self.rho) if self.server_lr is None else self.server_lr

        def step(_: int, z: Tree) -> Tree:
            z = tree.add_scaled(z, -lr, tree.sub(tree.scale(num_clients * self.rho, z), total))
            return z if self.prox is None else self.prox(z, num_clients * lr)

        return jax.lax.fori_loop(0, self.server_steps, step, z)
