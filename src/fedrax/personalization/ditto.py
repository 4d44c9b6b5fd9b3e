"""Ditto: a personal model at each client beside any global model (Li, Hu, Beirami and Smith 2021)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import NonNegative, hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.client_data import ClientData, TrainState
from fedrax.contract.local_training import LocalSGD, proximal_term
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapped, Wrapper, model_in
from fedrax.errors import FedraxError, warn
from fedrax.tree import Tree


@hyperparameters
class Ditto(Wrapper):
    """Each client of the cohort also trains a personal model v_i: v_i <- v_i - eta (g_i(v_i) + lambda (v_i - x)).

    x are the broadcast global parameters. ``inner`` trains them: FedAvg in Algorithm 1, or any other method. v_i is
    initialized to the initial parameters and is client state: it is never sent. With lambda = 0 each client trains
    alone. Running statistics (batch norm) are those of the global model.

    Example:
        >>> method = fedrax.personalization.Ditto(inner=fedrax.FedAvg(), lam=0.5)
        >>> method.lam
        0.5
    """

    inner: Algorithm = FedAvg()
    lam: NonNegative = 1.0
    """lambda, weight of the proximal term that pulls personal models toward the global model."""
    own_steps: LocalSGD | None = None
    """Local steps of v_i; None takes those of ``inner``, on the same mini-batches. Their optimizer is initialized in
    each round."""

    own_traits = Traits(unsent_state=True)
    """The client state v_i is not sent."""

    def check(self) -> None:
        """Raise FedraxError if neither ``own_steps`` nor ``inner`` has local steps; warn if ``carry`` is ignored."""
        if self._steps is None:
            raise FedraxError(f"{type(self.inner).__name__} has no local steps that Ditto could use: set own_steps")
        if self.own_steps is not None and self.own_steps.carry:
            warn("the optimizer of own_steps is initialized in each round, and own_steps.carry is ignored")

    @property
    def _steps(self) -> LocalSGD | None:
        """Local steps of the personal model."""
        return self.inner.local_steps if self.own_steps is None else self.own_steps

    def init_client_own(self, params: Tree) -> Tree:
        """Return the initial personal model: the initial parameters."""
        return params

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run the client of ``inner``, in the last phase after the local steps of v_i."""
        if not last:
            return client(message, state, data), own
        x = model_in(message, own)
        if x is None:
            raise FedraxError(
                f"Ditto needs a broadcast message with the parameters, or a field params of it, in the last phase, and"
                f" {type(self.inner).__name__} has none: wrap another method"
            )

        assert self._steps is not None
        steps = dataclasses.replace(self._steps, carry=False)
        separate = data.with_carried(TrainState(data.carried.statistics))
        result = steps.run(separate.with_term(proximal_term(self.lam, x)), own)
        output = client(message, state, data)
        if self.own_steps is None and len(self.inner.phases) > 1 and data.carried.params is None:
            raise FedraxError(
                f"{type(self.inner).__name__} takes its local steps in another phase than the last: set own_steps"
            )
        gradients = output.info.get("gradients", 0) + result.info["gradients"]
        return output._replace(info={**output.info, "gradients": gradients}), result.params

    def personal(self, params: Tree, state: Wrapped) -> Tree:
        """Return the personal model v_i."""
        return state.own
