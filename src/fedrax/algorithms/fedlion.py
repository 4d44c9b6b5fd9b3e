"""FedLion (Tang and Chang 2024): local steps of Lion, uploaded as sums of signs in short integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import Decay, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, summed_dtype
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.errors import FedraxError
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters, and m, the mean of the clients' last momenta."""

    params: Tree
    momentum: Tree


class Upload(NamedTuple):
    """(x - x_i) / eta, integers between -T and T in the narrowest dtype that can represent them, and m_i."""

    steps: Tree
    momentum: Tree


class Local(NamedTuple):
    """Memory of the local steps: m_i, and the sum of the signs."""

    momentum: Tree
    steps: Tree


@hyperparameters
class FedLion(Algorithm):
    """x_i <- x_i - eta sign(beta1 m_i + (1 - beta1) g_i), then m_i <- beta2 m_i + (1 - beta2) g_i, from m_i = m.

    After T steps the server takes x <- x - eta mean_i sum_t sign(...) and m <- mean_i m_i. Algorithm 1; eta, how far
    every parameter moves in a step, is ``local.lr``. The sum of T signs takes four bits a parameter up to T = 7, eight
    up to T = 127.

    Example:
        >>> method = fedrax.algorithms.FedLion(local=fedrax.LocalSGD(lr=1e-3, steps=5), beta1=0.95)
        >>> method.beta1
        0.95
    """

    local: LocalSGD = LocalSGD(lr=1e-3)
    """Local training of each client: learning rate, number of steps, mini-batch size."""
    beta1: Decay = 0.9
    """Weight of the momentum against the gradient in the sign of a step."""
    beta2: Decay = 0.99
    """Decay of the momentum."""

    def check(self) -> None:
        """Raise FedraxError for options with which a step is not eta times a sign."""
        for name in ("momentum", "weight_decay", "clip", "prox", "optimizer"):
            if getattr(self.local, name) is not None:
                hint = "set beta1 and beta2" if name == "momentum" else f"unset local.{name}"
                raise FedraxError(f"FedLion's steps are signs, which are counted: {hint}")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; m = 0."""
        return Server(params, tree.zeros_like(params))

    def broadcast(self, server: Server) -> Server:
        """x and m."""
        return server

    def client(self, message: Server, state: Any, data: ClientData) -> ClientOutput:
        """Steps of Lion, starting with the global momentum."""

        def direction(gradient: Tree, x: Tree, step: Step, own: Local) -> tuple[Tree, Local]:
            mixed = tree.add_scaled(tree.scale(self.beta1, own.momentum), 1 - self.beta1, gradient)
            signs = jax.tree.map(jnp.sign, mixed)
            momentum = tree.add_scaled(tree.scale(self.beta2, own.momentum), 1 - self.beta2, gradient)
            return signs, Local(momentum, jax.tree.map(lambda n, s: n + s.astype(n.dtype), own.steps, signs))

        none = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int32), message.params)
        result = self.local.run(data, message.params, direction, memory=Local(message.momentum, none))
        kind = shortest(self.local.most_steps(data))
        steps = jax.tree.map(lambda n: n.astype(kind), result.memory.steps)
        return ClientOutput(upload=Upload(steps, result.memory.momentum), info=result.info)

    def receive(self, upload: Upload) -> Upload:
        """The integers as floats."""
        floats = lambda n, m: n.astype(summed_dtype(m.dtype))  # noqa: E731
        return upload._replace(steps=jax.tree.map(floats, upload.steps, upload.momentum))

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """The mean of the clients' models and momenta."""
        eta = self.local.step_size(cohort.round)
        momentum = tree.where(cohort.size > 0, cohort.mean.momentum, server.momentum)
        return Server(tree.add_scaled(server.params, -eta, cohort.mean.steps), momentum), {}


def shortest(largest: int | None) -> Any:
    """The narrowest integer dtype for values between -``largest`` and ``largest``; None: unknown."""
    kinds = (jnp.int4, jnp.int8, jnp.int16)
    return next((kind for kind in kinds if largest is not None and largest <= jnp.iinfo(kind).max), jnp.int32)
