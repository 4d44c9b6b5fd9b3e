"""Mime, MimeLite and MimeSVRG (Karimireddy et al. 2021): local steps that mimic a centralized optimizer.

The momentum s belongs to the server and is fixed during the local steps; clients have no state.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import jax

from fedrax import tree
from fedrax.config.hyperparameters import Decay, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.optim.server import SGD, ServerOptimizer
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
class CenteredGradients(Algorithm):
    """Two phases: the cohort's mean full gradient c at x, then local steps that use it."""

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Two phases: the full gradients, then the local steps."""
        return (
            Phase(lambda server: server.params, self.measure, self.center),
            Phase(self.broadcast, self.client, self.server),
        )

    def init(self, params: Tree, num_clients: int) -> Any:
        """Server state before the first round."""
        return Server(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def measure(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Phase 1: the client's full gradient at x, including weight decay like every gradient in Mime."""
        loss, gradient = self.local.full_gradient(data, message)
        gradient = self.local.decayed(gradient, message)
        return ClientOutput(upload=gradient, info={"loss": loss, "gradients": data.size.astype(float)})

    def center(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """Phase 1: c."""
        return server._replace(gradient=cohort.mean), {}

    def broadcast(self, server: Any) -> Any:
        """Phase 2: x and c."""
        return Message(server.params, server.gradient)

    @abstractmethod
    def direction(self, message: Any, corrected: Tree) -> Tree:
        """Phase 2: the direction of a local step; corrected: g_i(x_i; xi) - g_i(x; xi) + c."""

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Phase 2: corrected local steps, two gradients each."""

        def direction(gradient: Tree, x: Tree, step: Step) -> Tree:
            at_start = self.local.decayed(step.gradient(message.params)[1], message.params)
            corrected = jax.tree.map(lambda g, g0, c: g - g0 + c, gradient, at_start, message.gradient)
            return self.direction(message, corrected)

        result = self.local.run(data, message.params, direction)
        info = {**result.info, "gradients": 2 * result.info["gradients"]}
        return ClientOutput(upload=tree.sub(result.params, message.params), info=info)

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """One step of the server optimizer on the mean update."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return server._replace(params=params, optimizer=state), {}


@hyperparameters
class MimeSVRG(CenteredGradients):
    """d = g_i(x_i; xi) - g_i(x; xi) + c, with c = mean over the cohort of grad f_j(x).

    Example:
        >>> method = fedrax.algorithms.MimeSVRG(local=fedrax.LocalSGD(lr=0.1, steps=5))
        >>> method.local.steps
        5
    """

    def direction(self, message: Message, corrected: Tree) -> Tree:
        """Phase 2: the corrected gradient."""
        return corrected


class MimeServer(NamedTuple):
    """Global parameters, the cohort's mean gradient at x, the momentum s, and the server optimizer's state."""

    params: Tree
    gradient: Tree
    momentum: Tree
    optimizer: Tree


class MimeMessage(NamedTuple):
    """x, the cohort's mean gradient c there, and s."""

    params: Tree
    gradient: Tree
    momentum: Tree


def _mixed(beta: Any, gradient: Tree, momentum: Tree) -> Tree:
    """(1 - beta) g + beta s."""
    return tree.add_scaled(tree.scale(1 - beta, gradient), beta, momentum)


def _renewed(beta: Any, gradient: Tree, momentum: Tree, cohort: Cohort) -> Tree:
    """The next s; unchanged in a round without clients, which has no gradient."""
    return tree.where(cohort.size > 0, _mixed(beta, gradient, momentum), momentum)


@hyperparameters
class Mime(CenteredGradients):
    """d = (1 - beta)(g_i(x_i; xi) - g_i(x; xi) + c) + beta s; after the round s <- (1 - beta) c + beta s.

    s is zero at first. beta = 0 is MimeSVRG.

    Example:
        >>> method = fedrax.algorithms.Mime(local=fedrax.LocalSGD(lr=0.1, steps=5), beta=0.9)
        >>> method.beta
        0.9
    """

    beta: Decay = 0.9
    """Weight of the momentum against the corrected gradient."""

    def init(self, params: Tree, num_clients: int) -> MimeServer:
        """Server state before the first round; s = 0."""
        zeros = tree.zeros_like(params)
        return MimeServer(params, zeros, zeros, self.server_optimizer.init(params))

    def broadcast(self, server: MimeServer) -> MimeMessage:
        """Phase 2: x, c and s."""
        return MimeMessage(server.params, server.gradient, server.momentum)

    def direction(self, message: MimeMessage, corrected: Tree) -> Tree:
        """Phase 2: MimeSVRG's direction and the momentum."""
        return _mixed(self.beta, corrected, message.momentum)

    def server(self, server: MimeServer, cohort: Cohort) -> tuple[MimeServer, Info]:
        """One step of the server optimizer on the mean update, and the new s."""
        server, info = super().server(server, cohort)
        return server._replace(momentum=_renewed(self.beta, server.gradient, server.momentum, cohort)), info


class LiteServer(NamedTuple):
    """Global parameters, the momentum s, and the server optimizer's state."""

    params: Tree
    momentum: Tree
    optimizer: Tree


class LiteMessage(NamedTuple):
    """x and s."""

    params: Tree
    momentum: Tree


class LiteUpload(NamedTuple):
    """Delta_i and grad f_i(x)."""

    params: Tree
    gradient: Tree


@hyperparameters
class MimeLite(Algorithm):
    """d = (1 - beta) g_i(x_i; xi) + beta s, in one exchange; then s <- (1 - beta) mean grad f_i(x) + beta s.

    s is zero at first. beta = 0 is FedAvg.

    Example:
        >>> method = fedrax.algorithms.MimeLite(local=fedrax.LocalSGD(lr=0.1, steps=5), beta=0.9)
        >>> method.beta
        0.9
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    beta: Decay = 0.9
    """Weight of the momentum against the client's gradient."""

    def init(self, params: Tree, num_clients: int) -> LiteServer:
        """Server state before the first round; s = 0."""
        return LiteServer(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def broadcast(self, server: LiteServer) -> LiteMessage:
        """x and s."""
        return LiteMessage(server.params, server.momentum)

    def client(self, message: LiteMessage, state: Any, data: ClientData) -> ClientOutput:
        """Local steps with the server's momentum, and the full gradient at x."""

        def direction(gradient: Tree, x: Tree, step: Step) -> Tree:
            return _mixed(self.beta, gradient, message.momentum)

        _, at_start = self.local.full_gradient(data, message.params)
        at_start = self.local.decayed(at_start, message.params)
        result = self.local.run(data, message.params, direction)
        info = {**result.info, "gradients": result.info["gradients"] + data.size}
        return ClientOutput(upload=LiteUpload(tree.sub(result.params, message.params), at_start), info=info)

    def server(self, server: LiteServer, cohort: Cohort) -> tuple[LiteServer, Info]:
        """One step of the server optimizer on the mean update, and the new s."""
        delta, gradient = cohort.mean
        params, state = self.server_optimizer.step(server.params, server.optimizer, delta, cohort.round)
        return LiteServer(params, _renewed(self.beta, gradient, server.momentum, cohort), state), {}
