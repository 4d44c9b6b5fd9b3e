"""Base of FedAvg and its relatives: local training from the global parameters and a server optimizer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters and the server optimizer's state."""

    params: Tree
    optimizer: Tree


@hyperparameters
class Averaging(Algorithm):
    """Base of FedAvg and its relatives: x <- x + eta_g sum_i p_i Delta_i.

    Subclasses define ``client``, which uploads Delta_i. The server optimizer takes the mean update as a negative
    gradient (FedAvgM, FedAdam, FedYogi).

    Example:
        >>> isinstance(fedrax.FedAvg(), fedrax.Averaging)
        True
    """

    local: LocalSGD = LocalSGD()
    """Local training."""
    server_optimizer: ServerOptimizer = SGD()
    """The server optimizer, applied to the mean update."""

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round."""
        return Server(params, self.server_optimizer.init(params))

    @abstractmethod
    def client(self, message: Tree, state: Any, data: ClientData) -> ClientOutput:
        """Local training from the global parameters ``message``; uploads Delta_i."""

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """One step of the server optimizer on the mean update."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return Server(params, state), {}
