"""MimeSVRG (Karimireddy et al. 2021): SVRG corrections with a full gradient of the cohort, two phases a round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.contract.hyperparameters import hyperparameters
from fedrax.contract.local import LocalSGD, Step
from fedrax.contract.server_optimizers import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, the cohort's mean gradient at x, and the server optimizer's state."""

    params: Tree
    gradient: Tree
    optimizer: Tree


class Message(NamedTuple):
    """The global parameters x and the cohort's mean gradient there."""

    params: Tree
    gradient: Tree


@hyperparameters
class MimeSVRG(Algorithm):
    """d = g_i(x_i; xi) - g_i(x; xi) + c, with c = mean over the cohort of grad f_j(x)."""

    local: LocalSGD = LocalSGD()
    server_optimizer: ServerOptimizer = SGD()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """First the full gradients, then the local steps."""
        return (
            Phase(lambda server: server.params, self.measure, self.center),
            Phase(self.broadcast, self.client, self.server),
        )

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def measure(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Phase 1: the client's full gradient at x."""
        loss, gradient = data.full_gradient(message, self.local.reduction)
        return ClientOutput(upload=gradient, info={"loss": loss, "gradients": data.size.astype(float)})

    def center(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Phase 1: c."""
        return server._replace(gradient=cohort.mean), {}

    def broadcast(self, server: Server) -> Message:
        """Phase 2: x and c."""
        return Message(server.params, server.gradient)

    def client(self, message: Message, state: Any, data: ClientData) -> ClientOutput:
        """Phase 2: local steps with SVRG's correction, two gradients each."""

        def direction(gradient: Tree, x: Tree, memory: Any, step: Step) -> tuple[Tree, Any]:
            _, at_start = step.gradient(message.params)
            return jax.tree.map(lambda g, g0, c: g - g0 + c, gradient, at_start, message.gradient), memory

        result = self.local.run(data, message.params, direction)
        info = {**result.info, "gradients": 2 * result.info["gradients"]}
        return ClientOutput(upload=tree.sub(result.params, message.params), info=info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer on the mean update."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return server._replace(params=params, optimizer=state), {}
