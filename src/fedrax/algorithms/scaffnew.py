"""Scaffnew, or ProxSkip: local steps that accelerate (Mishchenko, Malinovsky, Stich and Richtarik 2022)."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.config.annotations import Bound
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters."""

    params: Tree


class Client(NamedTuple):
    """h_i, which becomes the gradient of f_i at the optimum."""

    control: Tree


class Moved(NamedTuple):
    """State between the two phases of a round: h_i, and the local parameters."""

    control: Tree
    params: Tree


@hyperparameters
class Scaffnew(Algorithm):
    """Local steps along g_i - h_i until communication (probability p per step), then h_i <- h_i + p / eta (x - x_i).

    Whether to communicate is a random draw after each step that all clients share. A round therefore has T local steps,
    where T is geometric with mean 1 / p and equal for the whole cohort (``local.steps`` must be unset). Then x is the
    mean of the x_i. The second exchange of the round sends it to the same cohort, which updates h_i with it (Algorithm
    2). With full participation in every round, this x is also the broadcast of the next round, so it would have to be
    sent only once.

    The paper assumes full participation. With cohorts of S of N clients this is TAMUNA without compression (Condat et
    al. 2023) at chi = 1. The h_i still sum to zero, but the proof requires chi <= N (S - 1) / (S (N - 1)) < 1. With S =
    1 all h_i stay zero, and it is local SGD.

    Example:
        >>> method = fedrax.algorithms.Scaffnew(local=fedrax.LocalSGD(lr=0.1), p=0.1)
        >>> method.p
        0.1
    """

    local: LocalSGD = LocalSGD()
    """Local training of each client; the number of steps is random and must be unset."""
    p: Annotated[float, Bound(gt=0, le=1)] = 0.2
    """p: the probability of communication after a local step."""

    traits = Traits(uniform_weights=True, no_statistics=True)
    """Uniform weights, since the h_i sum to zero; running statistics would be needed in the second phase."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """First the local steps, then x is broadcast."""
        back = Phase(self.broadcast, self.renew, lambda server, cohort: (server, {}))
        return (Phase(self.broadcast, self.client, self.server), back)

    def check(self) -> None:
        """Raise FedraxError for a fixed number of local steps, and steps that are not along gradients."""
        if self.local.steps is not None or self.local.epochs is not None:
            raise FedraxError("Scaffnew draws the number of local steps: leave local.steps and local.epochs out, set p")
        between = ("momentum", "clip", "prox", "optimizer")
        used = next((name for name in between if getattr(self.local, name) is not None), None)
        if used is not None:
            raise FedraxError(f"Scaffnew takes x - x_i for eta times gradients: unset local.{used}")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params)

    def init_client(self, params: Tree) -> Client:
        """h_i = 0."""
        return Client(tree.zeros_like(params))

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """T local steps from the global parameters."""
        steps = geometric(data.key("steps", shared=True), self.p)
        result = self.local.run(
            data.with_steps(steps), message, lambda gradient, x, step: tree.sub(gradient, state.control)
        )
        delta = tree.sub(result.params, message)
        info = {**result.info, "local_steps": result.steps}
        return ClientOutput(upload=delta, state=Moved(state.control, result.params), info=info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """x is the mean of the x_i."""
        return Server(tree.add(server.params, cohort.mean)), {}

    def renew(self, message: Tree, state: Moved, data: ClientData) -> ClientOutput:
        """Update h_i by the distance to the mean.

        Args:
            message: pytree x, the new global parameters.
            state: the client's x_i and h_i after the local steps.
            data: the client's data; only its round number is read.

        Returns:
            An empty upload and the new h_i as client state.
        """
        lr: Array = jnp.asarray(self.local.step_size(data.round))
        # A schedule may have brought the learning rate down to zero: such steps say nothing of the gradient.
        rate = jnp.where(lr > 0, self.p / jnp.where(lr > 0, lr, 1), 0)
        control = tree.add_scaled(state.control, rate, tree.sub(message, state.params))
        return ClientOutput(upload=(), state=Client(control))


def geometric(key: Array, p: Array | float) -> Array:
    """A geometric random number, int32: 1 + floor(log U / log(1 - p)) with U uniform on (0, 1].

    Computed in float32 for every dtype of the run, so that runs in float32 and float64 draw the same numbers.
    """
    uniform = 1 - jax.random.uniform(key, (), jnp.float32)
    failures = jnp.log(uniform) / jnp.log1p(-jnp.asarray(p, jnp.float32))
    return 1 + jnp.floor(failures).astype(jnp.int32)
