"""Robust aggregation: a rule that some lying clients cannot move far, in place of the mean."""

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
from fedrax.robust.attacked_clients import Attacked, refuse_other_ways
from fedrax.robust.rules import Median, Rule
from fedrax.tree import Tree


@hyperparameters
class Robust(Wrapper):
    """``inner``'s server is handed a robust aggregate of the uploads where it expects their mean.

    In every phase; the rule sees each upload as ``inner`` receives it, decoded. All uploads of a cohort are in each
    device's memory at once.

    Example:
        >>> method = fedrax.robust.Robust(inner=fedrax.FedAvg(), rule=fedrax.robust.Median())
        >>> method.own_traits.stacked_uploads
        True
    """

    inner: Algorithm = FedAvg()
    rule: Rule = Median()
    """How uploads are put together: see :mod:`fedrax.robust.rules`."""

    def check(self) -> None:
        """Refuse an attack inside, which would come after the defense."""
        if wrapped_in(self.inner, Attacked) is not None:
            raise FedraxError("clients attack before the server defends itself: put Attacked around Robust")

    @property
    def own_traits(self) -> Traits:
        """The rule sees all uploads; rules that count clients take uniform weights only."""
        return Traits(stacked_uploads=True, uniform_weights=getattr(self.rule, "uniform_weights", False))

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Nothing may pass the rule by."""
        output = client(message, state, data)
        refuse_other_ways(self.inner, output, "Robust")
        return output, own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """The rule's aggregate in place of the mean."""
        if jax.tree.leaves(cohort.uploads):
            anybody = cohort.size > 0
            kept = lambda r, m: jnp.where(anybody, r, m).astype(m.dtype)  # noqa: E731
            robust = jax.tree.map(kept, self.rule(cohort), cohort.mean)
            cohort = cohort._replace(mean=robust)
        state, info = server(state, cohort)
        return state, own, info
