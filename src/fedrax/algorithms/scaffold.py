"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al. 2020)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.contract.traits import Traits
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, the control variate c, and the server optimizer's state."""

    params: Tree
    control: Tree
    optimizer: Tree


class Client(NamedTuple):
    """The client's control variate c_i."""

    control: Tree


class Message(NamedTuple):
    """x and c."""

    params: Tree
    control: Tree


class Upload(NamedTuple):
    """Delta_i and Delta c_i."""

    params: Tree
    control: Tree


@hyperparameters
class Scaffold(Algorithm):
    """d = g_i - c_i + c; after every round c = mean of c_i over all clients.

    With ``local.clip`` the corrected gradient is clipped at every step; with ``local.prox`` it is SCAFFOLD-Prox.

    Example:
        >>> method = fedrax.algorithms.Scaffold(local=fedrax.LocalSGD(lr=0.1, steps=5), option="I")
        >>> method.option
        'I'
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    option: Literal["I", "II"] = "II"
    """How c_i is computed: I, the full gradient at x; II, the mean gradient of the local steps; both without weight
    decay and momentum."""

    traits = Traits(uniform_weights=True, control_variates=("control",))
    """Uniform weights: c is the mean of the c_i."""

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; c = 0."""
        return Server(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def init_client(self, params: Tree) -> Client:
        """c_i = 0."""
        return Client(tree.zeros_like(params))

    def broadcast(self, server: Server) -> Message:
        """x and c."""
        return Message(server.params, server.control)

    def client(self, message: Message, state: Client, data: ClientData) -> ClientOutput:
        """Corrected local steps, then the new c_i."""
        shift = tree.sub(message.control, state.control)

        def direction(gradient: Tree, x: Tree, step: Step) -> Tree:
            return tree.add(gradient, shift)

        along_the_way = self.option == "II" and not (self.local.steps_are_gradients and data.unchanged_steps)
        result = self.local.run(data, message.params, direction, mean_gradient=along_the_way)
        info = result.info
        delta = tree.sub(result.params, message.params)
        if self.option == "I":
            _, control = self.local.full_gradient(data, message.params)
            info = {**info, "gradients": info["gradients"] + data.size}
        elif along_the_way:
            control = result.mean_gradient
        else:  # Option II: the mean direction, -Delta_i / (T eta), is the mean gradient - c_i + c.
            total_lr = self.local.step_size(data.round) * result.steps
            renewed = jax.tree.map(lambda d, s: (-d / total_lr - s).astype(d.dtype), delta, shift)
            # A schedule may have brought the learning rate down to zero: such steps say nothing of the gradient.
            control = tree.where(total_lr > 0, renewed, state.control)
        upload = Upload(delta, tree.sub(control, state.control))
        return ClientOutput(upload=upload, state=Client(control), info=info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """x by the server optimizer, c <- c + S/N mean Delta c_i."""
        params, optimizer = self.server_optimizer.step(
            server.params, server.optimizer, cohort.mean.params, cohort.round
        )
        share = jnp.asarray(cohort.size, float) / cohort.num_clients
        control = tree.add_scaled(server.control, share, cohort.mean.control)
        return Server(params, control, optimizer), {}
