"""signSGD with majority vote, and SIGNUM (Bernstein, Wang, Azizzadenesheli and Anandkumar 2018)."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.compression.packing import Signs, TernarySigns
from fedrax.config.hyperparameters import Decay, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters."""

    params: Tree


class Client(NamedTuple):
    """m_i, the client's momentum; an empty tuple without one."""

    momentum: Tree


@hyperparameters
class SignSGD(Algorithm):
    """One step per round: clients upload the signs of their gradients; x <- x - eta sign(sum of signs).

    The gradient is that of one mini-batch. With ``beta`` the signs are those of m_i <- beta m_i + (1 - beta) g_i, which
    is client state (SIGNUM). The server applies weight decay, x <- x - eta (sign(...) + decay x). A tie leaves x
    unchanged. Algorithm 3; eta is ``local.lr``.

    Example:
        >>> method = fedrax.algorithms.SignSGD(local=fedrax.LocalSGD(lr=1e-3, steps=1), beta=0.9)
        >>> method.beta
        0.9
    """

    local: LocalSGD = LocalSGD(lr=1e-3, steps=1)
    """Mini-batch size, learning rate and weight decay; one step per round."""
    beta: Decay | None = None
    """Momentum on the clients."""
    abstain: bool = True
    """Whether a gradient of zero is an abstention, as for the embedding of a word that the client does not have; a
    sign then takes 8/5 bits. False: as in the paper, zero votes as a positive gradient, and a sign takes one bit."""

    traits = Traits(uniform_weights=True)
    """Uniform weights: each client has one vote."""

    def check(self) -> None:
        """Raise FedraxError for options of several local steps."""
        hints = {"momentum": "set beta"}
        self.local.takes_one_gradient("SignSGD", "momentum", "clip", "prox", "optimizer", hints=hints)

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params)

    def init_client(self, params: Tree) -> Client:
        """m_i = 0."""
        return Client(() if self.beta is None else tree.zeros_like(params))

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """The signs of the gradient, or of the momentum."""
        loss, gradient = self.local.one_gradient(data, message)
        if self.beta is not None:
            gradient = tree.add(tree.scale(self.beta, state.momentum), tree.scale(1 - self.beta, gradient))
            state = Client(gradient)
        info = {"loss": loss, "gradients": self.local.samples(data, 1)}
        votes = TernarySigns if self.abstain else Signs
        return ClientOutput(upload=votes.of(gradient), state=state, info=info)

    def receive(self, upload: Signs | TernarySigns) -> Tree:
        """1, -1 and, for an abstention, 0."""
        return upload.values()

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step along the majority of signs; no step without clients."""
        votes = majority(cohort.mean, jnp.asarray(cohort.size))
        direction = self.local.decayed(votes, server.params)
        step = jnp.where(cohort.size > 0, -self.local.step_size(cohort.round), 0)
        return Server(tree.add_scaled(server.params, step, direction)), {}


def majority(mean: Tree, voters: Array) -> Tree:
    """The signs of the mean vote; 0 for a tie, whose mean is zero up to rounding.

    Any other mean is at least the weight of one vote. The magnitude of votes does not matter, because a wrapper may
    have scaled all of them equally.
    """
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(mean)]))
    voters = voters.astype(largest.dtype)
    least = largest * jnp.minimum(4 * jnp.finfo(largest.dtype).eps * voters, 0.25 / voters)
    return jax.tree.map(lambda leaf: jnp.where(jnp.abs(leaf) > least, jnp.sign(leaf), 0), mean)
