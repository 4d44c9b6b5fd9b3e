"""Upcycled-FL (Yin et al. 2024, Algorithm 1): the server moves twice per round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax

from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.arguments import checked_arguments
from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.wrapper import Wrapper
from fedrax.errors import FedraxError, warn
from fedrax.optim.schedules import Constant, Schedule
from fedrax.tree import Tree


@hyperparameters
class Upcycled(Wrapper):
    """After the inner round changed x- to x, the server extrapolates without the clients: x <- x + a (x - x-).

    A round is two iterations of the paper. Around FedAvg this equals FedAvg with server learning rate 1 + a; the same
    holds for Scaffold if its control variates are not extrapolated. The difference is that fewer iterations access
    data, which reduces the privacy loss.

    Example:
        >>> method = fedrax.algorithms.Upcycled(inner=fedrax.FedProx(), a=0.5)
        >>> method.a
        0.5
    """

    inner: Algorithm = FedAvg()
    a: NonNegative = 0.5
    """Extrapolation: mu / (mu + lambda_m) for FedProx (Eq. 6), lambda_m / 2 in Algorithm 1."""
    schedule: Schedule = Constant()
    """Factor on ``a`` by round."""
    extrapolate: Literal["none", "server", "both"] = "none"
    """Also extrapolate the inner method's control variates: the server's, or the server's and the clients'."""

    def check(self) -> None:
        """Warn if ``extrapolate`` is set for a method without control variates."""
        if self.extrapolate != "none" and not self.inner.traits.control_variates:
            warn(
                f"{type(self.inner).__name__} has no control variates, and extrapolate ="
                f" {self.extrapolate!r} is ignored"
            )

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Extrapolate the client's control variates, where asked for."""
        output = client(message, state, data)
        if last and self.extrapolate == "both":
            moved = self.inner.map_control_variates(self._extrapolation(data.round), output.state, state)
            output = output._replace(state=moved)
        return output, own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """After the last phase extrapolate the parameters, and the server's control variates where asked for."""
        new, info = server(state, cohort)
        before, after = self.inner.params(state), self.inner.params(new)
        if not last and any(x is not y for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)):
            raise FedraxError(
                f"Upcycled extrapolates the change of the parameters in the last phase of a round, but"
                f" {type(self.inner).__name__} changes them in an earlier phase: wrap another method"
            )
        if last:
            move = self._extrapolation(cohort.round)
            new = self.inner.with_params(new, move(after, before))
            if self.extrapolate != "none":
                new = self.inner.map_control_variates(move, new, state)
        return new, own, info

    def _extrapolation(self, round: Any) -> Callable[[Tree, Tree], Tree]:
        factor = self.a * self.schedule(round)
        return lambda new, old: jax.tree.map(lambda n, o: (n + factor * (n - o)).astype(n.dtype), new, old)


@checked_arguments
def upcycle(algorithm: Algorithm, a: float = 0.5, **options: Any) -> Upcycled:
    """``algorithm`` with the extra server move; see :class:`Upcycled`.

    Args:
        algorithm: the method to wrap.
        a: extrapolation factor.
        **options: further fields of :class:`Upcycled`.

    Returns:
        The wrapped method.

    Example:
        >>> method = fedrax.algorithms.upcycle(fedrax.FedProx(), a=0.25)
        >>> method.a
        0.25
    """
    return Upcycled(inner=algorithm, a=a, **options)
