"""Upcycled-FL (Yin et al. 2024, Algorithm 1): the server moves twice a round."""

from __future__ import annotations

from typing import Any, Literal

import jax

from fedrax.algorithms.fedavg import FedAvg
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase
from fedrax.contract.client_data import ClientData
from fedrax.contract.hyperparameters import NonNegative, hyperparameters
from fedrax.contract.schedules import Constant, Schedule
from fedrax.tree import Tree


def _extrapolate(old: Tree, new: Tree, factor: Any) -> Tree:
    return jax.tree.map(lambda o, n: (n + factor * (n - o)).astype(n.dtype), old, new)


@hyperparameters
class Upcycled(Algorithm):
    """After the inner round took x- to x, the server moves on without the clients: x <- x + a (x - x-).

    A round is two iterations of the paper. Around FedAvg this equals FedAvg with server step 1 + a, and so for
    Scaffold when its states are not extrapolated: what changes is then the count of iterations that touch data,
    which the privacy accounting rewards.
    """

    inner: Algorithm = FedAvg()
    a: NonNegative = 0.5
    """Extrapolation: mu / (mu + lambda_m) for FedProx (Eq. 6), lambda_m / 2 in Algorithm 1; tuned in 0.1-0.9."""
    schedule: Schedule = Constant()
    """Factor on ``a`` by round."""
    extrapolate: Literal["none", "server", "both"] = "none"
    """Also extrapolate the inner method's correction states: the server's, or the server's and the clients'."""

    @property
    def uniform_weights(self) -> bool:
        """As the inner algorithm."""
        return self.inner.uniform_weights

    @property
    def fixed_cohort(self) -> bool:
        """As the inner algorithm."""
        return self.inner.fixed_cohort

    @property
    def largest_cohort(self) -> int | None:
        """As the inner method."""
        return self.inner.largest_cohort

    @property
    def corrections(self) -> tuple[str, ...]:
        """As the inner algorithm."""
        return self.inner.corrections

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The inner phases; the last one's server (and clients, where asked for) move on."""
        *first, last = self.inner.phases

        def client(message: Any, state: Any, data: ClientData) -> ClientOutput:
            output = last.client(message, state, data)
            if self.extrapolate != "both":
                return output
            return output._replace(state=self._corrections(state, output.state, data.round))

        def server(server: Any, cohort: Cohort) -> tuple[Any, Info]:
            new, info = last.server(server, cohort)
            factor = self.a * self.schedule(cohort.round)
            moved = new._replace(params=_extrapolate(server.params, new.params, factor))
            if self.extrapolate != "none":
                moved = self._corrections(server, moved, cohort.round)
            return moved, info

        return (*first, Phase(last.broadcast, client, server))

    def _corrections(self, old: Any, new: Any, round: Any) -> Any:
        factor = self.a * self.schedule(round)
        names = [name for name in self.corrections if name in getattr(new, "_fields", ())]
        moved = {n: _extrapolate(getattr(old, n), getattr(new, n), factor) for n in names}
        return new._replace(**moved) if moved else new

    def init(self, params: Tree, num_clients: int) -> Any:
        """The inner algorithm's."""
        return self.inner.init(params, num_clients)

    def init_client(self, params: Tree) -> Tree:
        """The inner algorithm's."""
        return self.inner.init_client(params)


def upcycle(algorithm: Algorithm, a: float = 0.5, **options: Any) -> Upcycled:
    """``algorithm`` with the extra server move; see :class:`Upcycled`."""
    return Upcycled(inner=algorithm, a=a, **options)
