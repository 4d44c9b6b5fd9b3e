"""Parts of the model that stay on the clients: partial personalization."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedrax import tree
from fedrax.algorithms.fedavg import FedAvg
from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info
from fedrax.contract.client_data import ClientData, TrainState
from fedrax.contract.hooks import same_structure
from fedrax.contract.local_training import LocalResult, LocalSGD
from fedrax.contract.traits import Traits
from fedrax.contract.wrapper import Wrapped, Wrapper
from fedrax.errors import FedraxError, warn
from fedrax.tree import Tree

_SENDS = "Personalized needs parameters sent down and an update of them sent up: {} sends something else {}"


@jax.tree_util.register_static
@dataclass(frozen=True)
class Stays:
    """In the place of an array that stays at home."""

    shape: tuple[int, ...]
    dtype: str


@hyperparameters
class Personalized(Wrapper):
    """Parameters whose names match ``at_home`` stay on each client: they do not travel, and nobody averages them.

    A client starts its local steps from the global parameters with its own in their places, and keeps what the steps
    make of these; the global model holds their starting values. Names are paths such as ``output/weight``
    (``fedrax.tree.leaf_names``), patterns those of a shell. With the last layers at home this is FedPer (Arivazhagan et
    al. 2019), with the first ones LG-FedAvg (Liang et al. 2020), with normalization and its statistics FedBN (Li et al.
    2021). All layers move at once (FedSim in Pillutla et al. 2022); with ``alternate`` what stays moves first and the
    rest then (FedAlt, the same), which with the last layers at home is FedRep (Collins et al. 2021).

    For methods of one phase that send parameters down and an update of them up, and nothing besides: momentum,
    gradients and lengths of updates would tell of what stays. The clients' own models are evaluated as personal ones.

    Example:
        >>> method = fedrax.personalization.Personalized(inner=fedrax.FedAvg(), at_home=("output/*",))
        >>> method.at_home
        ('output/*',)
    """

    inner: Algorithm = FedAvg()
    at_home: tuple[str, ...] = ()
    """Patterns of the names of parameters that stay."""
    statistics: bool = False
    """Whether the model's running statistics (batch norm) stay too."""
    alternate: LocalSGD | None = None
    """Local steps of what stays, the rest held fixed; ``inner``'s then move the rest alone. Their optimizer, if they
    have one, begins anew in every round."""

    def check(self) -> None:
        """Refuse methods whose states or phases know the parameters that stay, and warn of what has no effect."""
        if len(self.inner.phases) > 1 or self.inner.traits.control_variates:
            raise FedraxError("Personalized goes around methods of one phase that do not correct for drift")
        if self.inner.traits.own_models:
            raise FedraxError(
                f"clients of {type(self.inner).__name__} go on from models of their own: Personalized needs those that"
                " start from what they are sent"
            )
        if self.alternate is not None and any(release.unit == "sample" for release in self.inner.releases()):
            raise FedraxError(
                f"the steps of alternate look at samples without the noise of {type(self.inner).__name__}, and what"
                " goes up starts from where they end: leave alternate out"
            )
        if self.alternate is not None and not self.at_home:
            raise FedraxError("the steps of alternate move what stays at home, and nothing does: set at_home")
        if not (self.at_home or self.statistics):
            warn("nothing stays at home, so that Personalized changes nothing: set at_home")
        if self.alternate is not None and self.alternate.carry:
            warn("the optimizer of alternate begins anew in every round, and alternate.carry counts for nothing")

    @property
    def own_traits(self) -> Traits:
        """Running statistics stay at the clients as the field says."""
        return Traits(personal_statistics=self.statistics)

    def _names(self, params: Tree) -> set[str]:
        names = tree.leaf_names(params)
        matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in self.at_home}
        for pattern in (pattern for pattern in matches if not matches[pattern]):
            raise FedraxError(f"no parameter is called {pattern!r}, which should stay at home: {', '.join(names)}")
        found = {name for matching in matches.values() for name in matching}
        if len(found) == len(names):
            raise FedraxError("all parameters stay at home: nothing is left to learn together")
        return found

    def init_client_own(self, params: Tree) -> dict[str, Tree]:
        """The parameters at home, by name."""
        return {name: _named(params)[name] for name in sorted(self._names(params))}

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """Without what stays."""
        message = broadcast(state)
        if not same_structure(message, self.inner.params(state)):
            raise FedraxError(_SENDS.format(type(self.inner).__name__, "down"))
        return _without(message, self._names(message))

    def around_client(
        self, client: Callable, message: Any, state: Any, own: dict, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Local steps of the client's own model; its update goes up without what stays."""
        first = None if self.alternate is None else self._alternated(message, own, data)
        if first is not None:
            own = {name: _named(first.params)[name] for name in own}
            data = data.with_loss(partial(_holding, own)).with_direction(partial(_resting, own))
        output = client(_filled(message, own), state, data)
        if data.carried.params is None:
            raise FedraxError(
                f"Personalized goes around methods with local steps, and {type(self.inner).__name__} has none"
            )
        ends = _named(data.carried.params)
        if list(_named(output.upload)) != list(ends) or jax.tree.leaves((output.each, output.total)):
            raise FedraxError(_SENDS.format(type(self.inner).__name__, "up"))
        upload = _without(output.upload, own)
        if first is None:
            return output._replace(upload=upload), {name: ends[name] for name in own}
        info = {**output.info, "gradients": output.info["gradients"] + first.info["gradients"]}
        return output._replace(upload=upload, info=info), own

    def _alternated(self, message: Any, own: dict, data: ClientData) -> LocalResult:
        """Steps of what stays."""
        assert self.alternate is not None
        data.refuse_uncounted("steps of what stays at home")
        start = _filled(message, own)
        rest = {name: leaf for name, leaf in _named(start).items() if name not in own}
        apart = data.with_carried(TrainState(data.carried.statistics)).with_loss(partial(_holding, rest))
        apart = apart.with_direction(partial(_resting, rest))
        return dataclasses.replace(self.alternate, carry=False).run(apart, start)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """What ``inner`` receives: no update of what stays."""
        return receive(_filled(upload, {}))

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """``inner``'s step, of which what stays at home takes no part: noise, decay and attacks are not for it."""
        new, info = server(state, cohort)
        before = self.inner.params(state)
        kept = {name: _named(before)[name] for name in self._names(before)}
        return self.inner.with_params(new, _placed(self.inner.params(new), kept)), own, info

    def personal(self, params: Tree, state: Wrapped) -> Tree:
        """The global parameters with the client's own, or the whole model that a client has of ``inner``."""
        mine = _filled(_without(params, state.own), state.own)
        inner = self.inner.personal(mine, state.inner)
        return mine if inner is None else inner


def _named(params: Tree) -> dict[str, Tree]:
    names = tree.leaf_names(params)
    named = dict(zip(names, jax.tree.leaves(params), strict=True))
    if len(named) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FedraxError(f"two parameters are called {twice!r}: what stays at home goes by its name")
    return named


def _holding(fixed: dict[str, Tree], losses: Callable) -> Callable:
    """The loss with the parameters named in ``fixed`` held there, so that their gradient is zero."""

    def loss(params: Tree, batch: Tree, key: Array) -> Array:
        return losses(_placed(params, fixed), batch, key)

    return loss


def _resting(fixed: dict[str, Tree], direction: Tree, params: Tree, step: Any) -> Tree:
    """The direction without what is held, which weight decay and momentum would move."""
    return _placed(direction, {name: jnp.zeros_like(leaf) for name, leaf in _named(direction).items() if name in fixed})


def _placed(params: Tree, values: dict[str, Tree]) -> Tree:
    leaves = [values.get(name, leaf) for name, leaf in _named(params).items()]
    return jax.tree.structure(params).unflatten(leaves)


def _without(params: Tree, names: Collection[str]) -> Tree:
    parts = [Stays(a.shape, a.dtype.name) if name in names else a for name, a in _named(params).items()]
    return jax.tree.structure(params).unflatten(parts)


def _filled(params: Tree, own: dict[str, Tree]) -> Tree:
    """``own`` where something stays at home, zero where ``own`` says nothing."""
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda part: isinstance(part, Stays))
    names = tree.leaf_names(structure.unflatten([0] * len(leaves)))

    def fill(name: str, a: Any) -> Any:
        if not isinstance(a, Stays):
            return a
        return own[name] if name in own else jnp.zeros(a.shape, a.dtype)

    return structure.unflatten(map(fill, names, leaves))
