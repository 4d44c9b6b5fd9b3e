"""Robust aggregation around any method: a robust rule in place of the mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapper, wrapped_in
from fedrax.errors import FedraxError
from fedrax.robust.attacked_clients import Attacked, check_uploads_only
from fedrax.robust.rules import Median, Rule
from fedrax.tree import Tree


@hyperparameters
class Robust(Wrapper):
    """The server of ``inner`` receives a robust aggregate of the uploads in place of their mean, in every phase.

    The rule sees uploads as ``inner`` receives them, decoded. All uploads of a cohort are in the memory of each device
    at once.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Median())
        >>> method.own_traits.stacked_uploads
        True
    """

    inner: Algorithm = FedAvg()
    rule: Rule = Median()
    """Robust aggregation rule, see :mod:`fedrax.robust.rules`."""

    def check(self) -> None:
        """Raise FedraxError for :class:`Attacked` inside, which would attack after the defense."""
        if wrapped_in(self.inner, Attacked) is not None:
            raise FedraxError("uploads are attacked before they are aggregated: put Attacked around Robust")

    @property
    def own_traits(self) -> Traits:
        """The rule needs all uploads; some rules are defined for uniform weights only."""
        return Traits(stacked_uploads=True, uniform_weights=getattr(self.rule, "uniform_weights", False))

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run the client of ``inner``; raise FedraxError if it sends anything that the rule would not see."""
        output = client(message, state, data)
        check_uploads_only(self.inner, output, "Robust")
        return output, own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """Run the server of ``inner`` on the robust aggregate."""
        if jax.tree.leaves(cohort.uploads):
            nonempty = cohort.size > 0
            aggregate = jax.tree.map(
                lambda r, m: jnp.where(nonempty, r, m).astype(m.dtype), self.rule(cohort), cohort.mean
            )
            cohort = cohort._replace(mean=aggregate)
        state, info = server(state, cohort)
        return state, own, info
