"""Partial personalization: some of the model's parameters are personal and stay on the clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
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

_OTHER_MESSAGE = (
    "Personalized wraps methods that broadcast parameters and upload an update of them: the {direction} of {method} has"
    " another structure"
)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Placeholder:
    """Stands in a message for a personal parameter, which is not sent."""

    shape: tuple[int, ...]
    dtype: str


@hyperparameters
class Personalized(Wrapper):
    """Partial personalization: parameters whose names match ``personal_params`` are neither sent nor averaged.

    A client starts its local steps from the broadcast shared parameters and its own personal parameters, and keeps the
    trained personal parameters as client state. The global model holds their initial values. Names are paths such as
    ``output/weight`` (``fedrax.tree.leaf_names``), patterns are those of a shell.

    With the last layers personal this is FedPer (Arivazhagan et al. 2019), with the first layers LG-FedAvg (Liang et
    al. 2020), with normalization layers and their statistics FedBN (Li et al. 2021). Local steps train all parameters
    together (FedSim in Pillutla et al. 2022). With ``alternate`` they train the personal parameters first and the
    shared ones afterwards (FedAlt, ibid.); with the last layers personal this is FedRep (Collins et al. 2021).

    The inner method must have one phase, broadcast parameters and upload an update of them, and nothing else: momentum,
    gradients and norms of updates would reveal personal parameters. Clients' models are evaluated as personal models.

    Example:
        >>> method = fedrax.personalization.Personalized(inner=fedrax.FedAvg(), personal_params=("output/*",))
        >>> method.personal_params
        ('output/*',)
    """

    inner: Algorithm = FedAvg()
    personal_params: tuple[str, ...] = ()
    """Patterns of the names of personal parameters."""
    statistics: bool = False
    """Whether the model's running statistics (batch norm) are personal too."""
    alternate: LocalSGD | None = None
    """Local steps of the personal parameters, with the shared ones frozen; the steps of ``inner`` then train only the
    shared ones. Their optimizer is initialized in each round."""

    def check(self) -> None:
        """Raise FedraxError for inner methods that are not supported; warn of fields that are ignored."""
        if len(self.inner.phases) > 1 or self.inner.traits.control_variates:
            raise FedraxError(
                "Personalized wraps methods of one phase without control variates, and"
                f" {type(self.inner).__name__} is none: wrap another method"
            )
        if self.inner.traits.own_models:
            raise FedraxError(
                f"clients of {type(self.inner).__name__} start from their own models, and Personalized wraps methods"
                " whose clients start from the broadcast parameters: wrap another method"
            )
        if self.alternate is not None and any(release.unit == "sample" for release in self.inner.releases()):
            raise FedraxError(
                f"the steps of alternate use samples without the noise of {type(self.inner).__name__}, and uploads"
                " depend on their result: unset alternate"
            )
        if self.alternate is not None and not self.personal_params:
            raise FedraxError(
                "the steps of alternate train personal parameters, and there are none: set personal_params"
            )
        if not (self.personal_params or self.statistics):
            warn("nothing is personal, so that Personalized has no effect: set personal_params")
        if self.alternate is not None and self.alternate.carry:
            warn("the optimizer of alternate is initialized in each round, and alternate.carry is ignored")

    @property
    def own_traits(self) -> Traits:
        """Running statistics are personal if ``statistics`` is set."""
        return Traits(personal_statistics=self.statistics)

    def _personal_names(self, params: Tree) -> set[str]:
        """Names of the personal parameters."""
        names = tree.leaf_names(params)
        found = tree.matching_names(names, self.personal_params, "personal_params")
        if len(found) == len(names):
            raise FedraxError("personal_params matches all parameters, and none is left to train together: name fewer")
        return found

    def init_client_own(self, params: Tree) -> dict[str, Tree]:
        """Return the initial personal parameters, by name."""
        return {name: _by_name(params)[name] for name in sorted(self._personal_names(params))}

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """Broadcast the shared parameters."""
        message = broadcast(state)
        if not same_structure(message, self.inner.params(state)):
            raise FedraxError(_OTHER_MESSAGE.format(direction="broadcast", method=type(self.inner).__name__))
        return _without(message, self._personal_names(message))

    def around_client(
        self, client: Callable, message: Any, state: Any, own: dict, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run the client of ``inner`` on the client's model, and upload the update of the shared parameters."""
        first = None if self.alternate is None else self._train_personal(message, own, data)
        if first is not None:
            own = {name: _by_name(first.params)[name] for name in own}
            data = _with_frozen(data, own)
        output = client(_filled(message, own), state, data)
        if data.carried.params is None:
            raise FedraxError(
                f"Personalized wraps methods with local steps, and {type(self.inner).__name__} has none: wrap another"
                " method"
            )
        trained = _by_name(data.carried.params)
        if list(_by_name(output.upload)) != list(trained) or jax.tree.leaves((output.each, output.total)):
            raise FedraxError(_OTHER_MESSAGE.format(direction="upload", method=type(self.inner).__name__))
        upload = _without(output.upload, own)
        if first is None:
            return output._replace(upload=upload), {name: trained[name] for name in own}
        info = {**output.info, "gradients": output.info["gradients"] + first.info["gradients"]}
        return output._replace(upload=upload, info=info), own

    def _train_personal(self, message: Any, own: dict, data: ClientData) -> LocalResult:
        """Train the personal parameters with the shared ones frozen (``alternate``)."""
        assert self.alternate is not None
        data.refuse_uncounted("local steps of personal parameters")
        start = _filled(message, own)
        shared = {name: leaf for name, leaf in _by_name(start).items() if name not in own}
        separate = _with_frozen(data.with_carried(TrainState(data.carried.statistics)), shared)
        return dataclasses.replace(self.alternate, carry=False).run(separate, start)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """Decode an upload for ``inner``: the update of personal parameters is zero."""
        return receive(_filled(upload, {}))

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """Run the server of ``inner`` with the personal parameters frozen: noise and weight decay would change them."""
        new, info = server(state, cohort)
        before = self.inner.params(state)
        frozen = {name: _by_name(before)[name] for name in self._personal_names(before)}
        return self.inner.with_params(new, _replaced(self.inner.params(new), frozen)), own, info

    def personal(self, params: Tree, state: Wrapped) -> Tree:
        """Return the personal model of ``inner`` if it has one, else shared and personal parameters together."""
        combined = _filled(_without(params, state.own), state.own)
        inner = self.inner.personal(combined, state.inner)
        return combined if inner is None else inner


def _by_name(params: Tree) -> dict[str, Tree]:
    """The leaves of a tree by name."""
    names = tree.leaf_names(params)
    leaves = dict(zip(names, jax.tree.leaves(params), strict=True))
    if len(leaves) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FedraxError(f"two parameters have the name {twice!r}, by which personal_params selects: rename one")
    return leaves


def _with_frozen(data: ClientData, frozen: dict[str, Tree]) -> ClientData:
    """The client's data with local steps that do not change the parameters in ``frozen``."""

    def with_frozen(losses: Callable) -> Callable:
        def loss(params: Tree, batch: Tree, key: Array) -> Array:
            return losses(_replaced(params, frozen), batch, key)  # the gradient with respect to them is zero

        return loss

    def without_frozen(direction: Tree, params: Tree, step: Any) -> Tree:
        # Weight decay and momentum would change them in spite of a zero gradient.
        zeros = {name: jnp.zeros_like(leaf) for name, leaf in _by_name(direction).items() if name in frozen}
        return _replaced(direction, zeros)

    return data.with_loss(with_frozen).with_direction(without_frozen)


def _replaced(params: Tree, values: dict[str, Tree]) -> Tree:
    """``params`` with the leaves named in ``values`` replaced."""
    leaves = [values.get(name, leaf) for name, leaf in _by_name(params).items()]
    return jax.tree.structure(params).unflatten(leaves)


def _without(params: Tree, names: Collection[str]) -> Tree:
    """``params`` with the leaves called ``names`` replaced by placeholders."""
    parts = [Placeholder(a.shape, a.dtype.name) if name in names else a for name, a in _by_name(params).items()]
    return jax.tree.structure(params).unflatten(parts)


def _filled(params: Tree, own: dict[str, Tree]) -> Tree:
    """``params`` with placeholders replaced by the leaves of ``own`` of their names, or by zeros where it has none."""
    leaves, structure = jax.tree.flatten(params, is_leaf=lambda part: isinstance(part, Placeholder))
    names = tree.leaf_names(structure.unflatten([0] * len(leaves)))

    def fill(name: str, a: Any) -> Any:
        if not isinstance(a, Placeholder):
            return a
        return own[name] if name in own else jnp.zeros(a.shape, a.dtype)

    return structure.unflatten(map(fill, names, leaves))
