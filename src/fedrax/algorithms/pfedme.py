"""pFedMe: personalized models with Moreau envelopes (Dinh, Tran and Nguyen 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from fedrax import tree
from fedrax.config.hyperparameters import Positive, PositiveInt, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.errors import FedraxError, warn
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters and the server optimizer's state."""

    params: Tree
    optimizer: Tree


class Client(NamedTuple):
    """theta_i, the personal model, after the last local step."""

    personal: Tree


@hyperparameters
class PFedMe(Algorithm):
    """On each batch theta ~ argmin f_i(theta; batch) + lambda/2 |theta - w|^2, then w <- w - eta lambda (w - theta).

    w starts at x in every round and x <- x + beta mean (w - x), where beta is ``server_optimizer.lr``. eta is
    ``local.lr``. Weight decay is part of f_i; clipping and a proximal operator apply to the step of w. The loss in
    events is the loss at w. Algorithm 1.

    Example:
        >>> method = fedrax.algorithms.PFedMe(local=fedrax.LocalSGD(lr=0.005, steps=5), lam=15.0)
        >>> method.lam
        15.0
    """

    local: LocalSGD = LocalSGD(lr=0.005)
    """Local training of w: learning rate eta, number of steps, mini-batch size."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""
    lam: Positive = 15.0
    """lambda: strength of the proximal term between theta and w."""
    inner_steps: PositiveInt = 5
    """K, gradient steps of theta on each batch."""
    inner_lr: Positive = 0.05
    """The learning rate of theta."""
    restart: bool = False
    """Start theta at w on each batch; otherwise it starts at x in each round and is carried over between batches."""

    def check(self) -> None:
        """Raise FedraxError for momentum, and warn of too large steps."""
        if self.local.momentum is not None:
            raise FedraxError("pFedMe's local steps follow w - theta and no gradient: unset local.momentum")
        product = self.local.lr * self.lam
        if product >= 1:
            warn(
                f"pFedMe: local.lr * lam is {self.local.lr:g} * {self.lam:g} = {product:g}: with 1 every step replaces"
                " w by the client's own model, with more it leaps beyond it; local.lr is usually far below 1 / lam",
            )

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, self.server_optimizer.init(params))

    def init_client(self, params: Tree) -> Client:
        """The initial parameters."""
        return Client(params)

    def personal(self, params: Tree, state: Client) -> Tree:
        """theta_i."""
        return state.personal

    def client(self, message: Tree, state: Client, data: ClientData) -> ClientOutput:
        """w and theta from the global parameters."""

        def towards_own(gradient: Tree, w: Tree, step: Step, theta: Tree) -> tuple[Tree, Tree]:
            theta = self._personalized(w if self.restart else theta, w, step, data)
            return tree.scale(self.lam, tree.sub(w, theta)), theta

        result = self.local.run(data, message, towards_own, memory=message)
        # Nothing uses the gradient at w: those of theta are what counts.
        info = {**result.info, "gradients": self.inner_steps * result.info["gradients"]}
        return ClientOutput(upload=tree.sub(result.params, message), state=Client(result.memory), info=info)

    def _personalized(self, theta: Tree, w: Tree, step: Step, data: ClientData) -> Tree:
        """K steps theta <- theta - inner_lr (grad f_i(theta; batch) + lambda (theta - w))."""

        def descend(_: Any, theta: Tree) -> Tree:
            gradient = self.local.decayed(step.gradient(theta)[1], theta)
            return jax.tree.map(
                lambda t, g, a: (t - self.inner_lr * (g + self.lam * (t - a))).astype(t.dtype), theta, gradient, w
            )

        return jax.lax.fori_loop(0, self.inner_steps, descend, theta, unroll=data.unroll or None)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """x <- (1 - beta) x + beta mean w."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return Server(params, state), {}
