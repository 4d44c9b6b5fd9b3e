"""LoSAC (Chen et al.) and FedSaga: SAGA for the global objective and for the local objectives.

Client i's data is cut once into M blocks. f_ij is block j's share of f_i = sum_j f_ij, so that
g_ij = M grad f_ij estimates grad f_i. With ``local.reduction = "sum"`` (the paper's) f_i is the sum of the
client's sample losses, with "mean" their mean.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedrax import tree
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.local_training import LocalSGD, Step
from fedrax.contract.table import VectorTable
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError
from fedrax.optim.server import SGD, ServerOptimizer
from fedrax.tree import Tree


class Server(NamedTuple):
    """Global parameters and phi, the estimate of the sum of all clients' gradients."""

    params: Tree
    gradient_sum: Tree


class Client(NamedTuple):
    """y_ij: the last g_ij of each block."""

    block_gradients: VectorTable


class Message(NamedTuple):
    """x and phi."""

    params: Tree
    gradient_sum: Tree


class Upload(NamedTuple):
    """Delta x_i and Delta phi_i."""

    params: Tree
    gradient_sum: Tree


class _Memory(NamedTuple):
    gradient_sum: Tree
    block_gradients: VectorTable


def _num_blocks(local: LocalSGD, name: str) -> int:
    if local.blocks is None:
        raise FedraxError(f"{name} stores a gradient for each of M fixed blocks: set local.blocks")
    return local.blocks


def _zero_blocks(params: Tree, num_blocks: int) -> VectorTable:
    return VectorTable(jax.tree.map(lambda x: jnp.zeros((num_blocks, *x.shape), x.dtype), params))


@hyperparameters
class LoSAC(Algorithm):
    """Local steps along phi_i / N - y_ij + g_ij(x_i), refreshing phi_i and y_ij after each (paper Eq. 11-13).

    The printed server rule, x + (1/N) sum Delta x_i and phi + (N/S) sum Delta phi_i with g_ij = M grad f_ij, makes phi
    about M N / S times the sum of gradients that it should be by Eq. 12. At equal learning rates the printed form
    therefore takes larger effective steps than other methods; tune the learning rate of each method in comparisons. The
    consistent reading is a SAGA table with consistent scaling.

    Example:
        >>> method = fedrax.algorithms.LoSAC(local=fedrax.LocalSGD(lr=0.1, steps=5, blocks=5), reading="consistent")
        >>> method.reading
        'consistent'
    """

    local: LocalSGD = LocalSGD(steps=5, blocks=5)
    """Local training of each client; ``blocks`` is M, the number of data blocks with a stored gradient."""
    reading: Literal["printed", "consistent", "auto"] = "auto"
    """Scaling of Eq. 11-13: as printed, or such that Eq. 12 holds. auto: as printed, but consistent with a proximal
    operator, because the printed scaling would solve the problem with a weaker regularizer.
    """

    @property
    def consistent(self) -> bool:
        """Whether the consistent reading is in force."""
        return self.reading == "consistent" or (self.reading == "auto" and self.local.prox is not None)

    @property
    def traits(self) -> Traits:
        """phi is a plain sum over clients; with the printed scales its factor depends on S."""
        return Traits(uniform_weights=True, fixed_cohort=not self.consistent, control_variates=("gradient_sum",))

    def check(self) -> None:
        """Raise FedraxError without blocks, and for momentum, which the paper's steps do not have."""
        _num_blocks(self.local, "LoSAC")
        if self.local.momentum is not None:
            raise FedraxError("LoSAC has no local momentum: unset local.momentum")

    def init(self, params: Tree, num_clients: int) -> Server:
        """Server state before the first round; phi = 0."""
        return Server(params, tree.zeros_like(params))

    def init_client(self, params: Tree) -> Client:
        """y_ij = 0."""
        return Client(_zero_blocks(params, _num_blocks(self.local, "LoSAC")))

    def broadcast(self, server: Server) -> Message:
        """x and phi."""
        return Message(server.params, server.gradient_sum)

    def client(self, message: Message, state: Client, data: ClientData) -> ClientOutput:
        """Eq. 11: x_i, phi_i and y_ij in this order, with one block gradient per step."""
        blocks = _num_blocks(self.local, "LoSAC")
        share = 1 / blocks if self.consistent else 1.0

        def direction(gradient: Tree, x: Tree, step: Step, memory: _Memory) -> tuple[Tree, _Memory]:
            change = tree.sub(gradient, memory.block_gradients[step.block])
            d = tree.add_scaled(change, 1 / data.num_clients, memory.gradient_sum)
            gradient_sum = tree.add_scaled(memory.gradient_sum, share, change)
            return d, _Memory(gradient_sum, memory.block_gradients.put(step.block, gradient))

        result = self.local.run(data, message.params, direction, _Memory(message.gradient_sum, state.block_gradients))
        upload = Upload(
            tree.sub(result.params, message.params),
            tree.sub(result.memory.gradient_sum, message.gradient_sum),
        )
        return ClientOutput(upload=upload, state=Client(result.memory.block_gradients), info=result.info)

    def server(self, server: Server, cohort: Cohort) -> tuple[Server, Info]:
        """Eq. 13, or x + mean Delta x_i and phi + sum Delta phi_i in the consistent reading."""
        clients = float(cohort.num_clients)
        size = jnp.asarray(cohort.size, float)
        lr, weight = (1.0, size) if self.consistent else (size / clients, clients)
        params = tree.add_scaled(server.params, lr, cohort.mean.params)
        return Server(params, tree.add_scaled(server.gradient_sum, weight, cohort.mean.gradient_sum)), {}


class SagaServer(NamedTuple):
    """Global parameters and the server optimizer's state."""

    params: Tree
    optimizer: Tree


class SagaClient(NamedTuple):
    """phi~_i = sum_j grad f_ij(z_ij), and its terms y_ij."""

    gradient_sum: Tree
    block_gradients: VectorTable


@hyperparameters
class FedSaga(Algorithm):
    """FedAvg with SAGA on each client: d = M grad f_ij(x_i) - M y_ij + phi~_i (LoSAC paper, Eq. 9).

    The server steps by the mean over the cohort. The paper prints (1/N) sum_S Delta_i (Algorithm 1, line 6), which is a
    ``server_optimizer`` of ``lr = S / N``.

    Example:
        >>> method = fedrax.algorithms.FedSaga(local=fedrax.LocalSGD(lr=0.1, steps=5, blocks=5))
        >>> method.local.blocks
        5
    """

    local: LocalSGD = LocalSGD(steps=5, blocks=5)
    """Local training of each client; ``blocks`` is M, the number of data blocks with a stored gradient."""
    server_optimizer: ServerOptimizer = SGD()
    """Optimizer that the server applies to the mean update."""

    def check(self) -> None:
        """Raise FedraxError without blocks, and for momentum."""
        _num_blocks(self.local, "FedSaga")
        if self.local.momentum is not None:
            raise FedraxError("FedSaga has no local momentum: unset local.momentum")

    def init(self, params: Tree, num_clients: int) -> SagaServer:
        """Server state before the first round."""
        return SagaServer(params, self.server_optimizer.init(params))

    def init_client(self, params: Tree) -> SagaClient:
        """phi~_i = 0, y_ij = 0."""
        return SagaClient(tree.zeros_like(params), _zero_blocks(params, _num_blocks(self.local, "FedSaga")))

    def client(self, message: Tree, state: SagaClient, data: ClientData) -> ClientOutput:
        """SAGA steps on the client's own objective."""
        blocks = _num_blocks(self.local, "FedSaga")

        def direction(gradient: Tree, x: Tree, step: Step, memory: SagaClient) -> tuple[Tree, SagaClient]:
            change = tree.sub(gradient, memory.block_gradients[step.block])
            d = tree.add(change, memory.gradient_sum)
            gradient_sum = tree.add_scaled(memory.gradient_sum, 1 / blocks, change)
            return d, SagaClient(gradient_sum, memory.block_gradients.put(step.block, gradient))

        result = self.local.run(data, message, direction, state)
        delta = tree.sub(result.params, message)
        return ClientOutput(upload=delta, state=result.memory, info=result.info)

    def server(self, server: SagaServer, cohort: Cohort) -> tuple[SagaServer, Info]:
        """One step of the server optimizer on the mean update."""
        params, state = self.server_optimizer.step(server.params, server.optimizer, cohort.mean, cohort.round)
        return SagaServer(params, state), {}
