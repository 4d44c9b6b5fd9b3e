"""FedSGD, FedAvg (McMahan et al. 2017) and FedProx (Li et al. 2020).

FedAvgM, FedAdagrad, FedAdam and FedYogi are FedAvg with another ``server_optimizer``; CELGC (communication
efficient local gradient clipping, Liu et al. 2022) is FedAvg with ``local.clip``.
"""

from __future__ import annotations

from typing import Any

from fedrax import tree
from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.averaging import Averaging, Server
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, proximal_term
from fedrax.contract.traits import Traits
from fedrax.errors import warn
from fedrax.optim.schedules import Constant
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


@hyperparameters
class FedAvg(Averaging):
    """Average of local SGD: x <- x + eta_g sum_i p_i Delta_i with Delta_i = x_i - x.

    Example:
        >>> method = fedrax.algorithms.FedAvg(local=fedrax.LocalSGD(lr=0.1, steps=5))
        >>> method.local.steps
        5
    """

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD from the global parameters."""
        result = self.local.run(data, message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)


@hyperparameters
class FedProx(Averaging):
    """FedAvg with the proximal term mu/2 |x_i - x|^2 in the local loss.

    Its gradient mu (x_i - x) is added to g_i before local momentum.

    Example:
        >>> method = fedrax.algorithms.FedProx(local=fedrax.LocalSGD(lr=0.1, steps=5), mu=0.01)
        >>> method.mu
        0.01
    """

    mu: NonNegative = 0.1
    """Strength of the proximal term."""

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local SGD on the loss with the proximal term."""
        result = self.local.run(data.with_term(proximal_term(self.mu, message)), message)
        return ClientOutput(upload=tree.sub(result.params, message), info=result.info)


@hyperparameters
class FedSGD(Algorithm):
    """Mean of the clients' full gradients: x <- x - lr sum_i p_i grad f_i(x).

    Also known as DSGD. The step is the server optimizer's; ``local`` gives reduction and weight decay.

    Example:
        >>> method = fedrax.algorithms.FedSGD(server_optimizer=fedrax.optim.SGD(lr=0.5))
        >>> method.server_optimizer.lr
        0.5
    """

    local: LocalSGD = LocalSGD(batch_size="full", steps=1)
    """Reduction and weight decay of the gradient."""
    server_optimizer: ServerOptimizer = SGD(lr=0.1)
    """Optimizer that the server applies to the mean gradient."""

    traits = Traits(no_statistics=True)
    """Running statistics need mini-batches."""

    def check(self) -> None:
        """Raise FedraxError for options of several local steps, and warn of options without effect."""
        hints = {"momentum": "set server_optimizer.momentum"}
        self.local.takes_one_gradient("FedSGD", "momentum", "clip", "prox", "optimizer", hints=hints)
        if self.local.lr not in (LocalSGD.lr, getattr(self.server_optimizer, "lr", None)):
            warn(
                "local.lr is ignored by FedSGD, whose learning rate is the server's: set server_optimizer.lr",
            )
        if self.local.schedule != Constant():
            warn("FedSGD has the server's learning rate, and local.schedule is ignored: set server_optimizer.schedule")
        if self.local.blocks is not None:
            warn("local.blocks is ignored by FedSGD, which takes the gradient of all of a client's data")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, self.server_optimizer.init(params))

    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """The client's full gradient."""
        loss, gradient = self.local.full_gradient(data, message)
        gradient = self.local.decayed(gradient, message)
        return ClientOutput(upload=gradient, info={"loss": loss, "gradients": data.size.astype(float)})

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer against the mean gradient."""
        descent = tree.scale(-1, cohort.mean)
        params, state = self.server_optimizer.step(server.params, server.optimizer, descent, cohort.round)
        return Server(params, state), {}
