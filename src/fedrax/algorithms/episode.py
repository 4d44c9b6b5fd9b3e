"""EPISODE (Crawshaw et al. 2023): episodic gradient clipping with periodic resampled corrections.

The paper's other methods are options elsewhere: CELGC is FedAvg with ``local.clip``; SCAFFOLD with clipping is
Scaffold with ``local.clip``; EPISODE without clipping is :class:`Episode` with no ``gamma``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from fedrax import tree
from fedrax.algorithms.mime import Message, Server
from fedrax.config.hyperparameters import Positive, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.errors import FedraxError
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


@hyperparameters
class Episode(Algorithm):
    """d = g_i - G_i + G; all steps of all clients are clipped in a round where |G| > gamma / eta, none otherwise.

    A clipped step is -gamma d / |d|. gamma and eta decay together (``local.schedule``). Source: Algorithm 1.

    Example:
        >>> method = fedrax.algorithms.Episode(local=fedrax.LocalSGD(lr=0.1, steps=5), gamma=1.0)
        >>> method.gamma
        1.0
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    gamma: Positive | None = None
    """Length of a clipped step; None: EPISODE without clipping."""

    def check(self) -> None:
        """Raise FedraxError for options that conflict with clipping by G."""
        if self.local.clip is not None:
            raise FedraxError("Episode clips by its gamma: unset local.clip")
        if self.local.optimizer is not None and self.gamma is not None:
            raise FedraxError("Episode's gamma is the length of a plain step: unset local.optimizer or gamma")

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Two phases: the resampled gradients G_i, then the local steps."""
        return (
            Phase(lambda server: server.params, self.resample, self.center),
            Phase(self.broadcast, self.client, self.server),
        )

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, tree.zeros_like(params), self.server_optimizer.init(params))

    def resample(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Phase 1: compute G_i, with weight decay; it is the client state that phase 2 receives.

        Args:
            message: pytree of the global parameters x.
            state: client state before the round; not read.
            data: the client's data.

        Returns:
            G_i with weight decay, as upload and as the client's state for phase 2.
        """
        fresh = data.resampled()
        loss, gradient = Step(self.local, fresh, 0).gradient(message)
        gradient = self.local.decayed(gradient, message)
        info = {"loss": loss, "gradients": self.local.samples(fresh, 1)}
        return ClientOutput(upload=gradient, state=gradient, info=info)

    def center(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Phase 1: G.

        Args:
            server: server state.
            cohort: the cohort's aggregate, whose ``mean`` is that of the G_i.

        Returns:
            The server state with G in ``gradient``, and an empty info.
        """
        return server._replace(gradient=cohort.mean), {}

    def broadcast(self, server: Server) -> Message:
        """Phase 2: x and G."""
        return Message(server.params, server.gradient)

    def client(self, message: Message, state: Tree, data: ClientData) -> ClientOutput:
        """Phase 2: corrected local steps, which are clipped if |G| > gamma / eta."""
        shift = tree.sub(message.gradient, state)
        # gamma / eta, which the schedule leaves constant; equality counts as not clipped
        threshold = jnp.inf if self.gamma is None else self.gamma / self.local.lr
        clipped = tree.norm(message.gradient) > threshold

        def direction(gradient: Tree, x: Tree, step: Step) -> Tree:
            d = tree.add(gradient, shift)
            if self.gamma is None:
                return d
            length = tree.norm_of(jnp.add, gradient, shift)
            shrink = jnp.where(clipped & (length > 0), threshold / jnp.where(length > 0, length, 1), 1)
            return tree.scale(shrink, d)

        result = self.local.run(data, message.params, direction)
        info = {**result.info, "clipped": clipped.astype(jnp.float32)}
        return ClientOutput(upload=tree.sub(result.params, message.params), info=info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer on the mean update."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return server._replace(params=params, optimizer=state), {}


class ParallelServer(NamedTuple):
    """Global parameters."""

    params: Tree


@hyperparameters
class NaiveParallelClip(Algorithm):
    """One step per round on the cohort's mean mini-batch gradient G: x <- x - min(eta, gamma / |G|) G.

    eta is ``local.lr`` and gamma is ``local.clip``. Batch size, schedule and proximal operator are fields of ``local``,
    too.

    Example:
        >>> method = fedrax.algorithms.NaiveParallelClip(local=fedrax.LocalSGD(lr=0.1, steps=1, clip=1.0))
        >>> method.local.clip
        1.0
    """

    local: LocalSGD = LocalSGD(steps=1)
    """Mini-batch size, learning rate, clipping threshold and proximal operator of the one step of a round."""

    def check(self) -> None:
        """Raise FedraxError for options of several local steps."""
        self.local.takes_one_gradient("NaiveParallelClip", "momentum", "optimizer")

    def init(self, params: Tree, num_clients: int) -> ParallelServer:
        """Server state before the first round."""
        return ParallelServer(params)

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """The gradient on one batch."""
        fresh = data.resampled()
        loss, gradient = self.local.one_gradient(fresh, message)
        info = {"loss": loss, "gradients": self.local.samples(fresh, 1)}
        return ClientOutput(upload=self.local.decayed(gradient, message), info=info)

    def server(self, server: ParallelServer, cohort: Cohort) -> tuple[ParallelServer, Info]:
        """The clipped step; no step without clients."""
        lr = self.local.step_size(cohort.round)
        moved, info = self.local.move(server.params, cohort.mean, lr, cohort.round)
        return ParallelServer(tree.where(cohort.size > 0, moved, server.params)), info
