"""Ditto: a model of each client's own beside any global one (Li, Hu, Beirami and Smith 2021)."""

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
    """Each client that takes part also moves a model v_i of its own: v_i <- v_i - eta (g_i(v_i) + lambda (v_i - x)).

    x are the global parameters that the client was sent. They, and all that travels, are those of ``inner``: FedAvg in
    Algorithm 1, or any other solver. v_i starts at the initial parameters and stays on its client. lambda = 0 is
    training alone. Running statistics (batch norm) are those of the global model.

    Example:
        >>> method = fedrax.personalization.Ditto(inner=fedrax.FedAvg(), lam=0.5)
        >>> method.lam
        0.5
    """

    inner: Algorithm = FedAvg()
    lam: NonNegative = 1.0
    """lambda: how near a client's own model stays to the global one."""
    own_steps: LocalSGD | None = None
    """The steps of v_i; by default as those of ``inner``, on the same batches. Their optimizer, if they have one,
    begins anew in every round."""

    own_traits = Traits(unsent_state=True)
    """v_i is not sent."""

    def check(self) -> None:
        """Refuse a method without local steps where it is to say what the own ones are; warn of a state to carry."""
        if self._steps is None:
            raise FedraxError(f"{type(self.inner).__name__} has no local steps that Ditto could take: set own_steps")
        if self.own_steps is not None and self.own_steps.carry:
            warn("the optimizer of own_steps begins anew in every round, and own_steps.carry counts for nothing")

    @property
    def _steps(self) -> LocalSGD | None:
        return self.inner.local_steps if self.own_steps is None else self.own_steps

    def init_client_own(self, params: Tree) -> Tree:
        """v_i, the initial parameters."""
        return params

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """``inner``'s part; in the last phase the steps of v_i too."""
        if not last:
            return client(message, state, data), own
        x = model_in(message, own)
        if x is None:
            raise FedraxError("Ditto needs parameters, or a field params of them, sent down in the last phase")

        assert self._steps is not None
        steps = dataclasses.replace(self._steps, carry=False)
        apart = data.with_carried(TrainState(data.carried.statistics))
        result = steps.run(apart.with_term(proximal_term(self.lam, x)), own)
        output = client(message, state, data)
        if self.own_steps is None and len(self.inner.phases) > 1 and data.carried.params is None:
            raise FedraxError(
                f"{type(self.inner).__name__} takes its local steps in another exchange than the last: set own_steps"
            )
        gradients = output.info.get("gradients", 0) + result.info["gradients"]
        return output._replace(info={**output.info, "gradients": gradients}), result.params

    def personal(self, params: Tree, state: Wrapped) -> Tree:
        """v_i."""
        return state.own
