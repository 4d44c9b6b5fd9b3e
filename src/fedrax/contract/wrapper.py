"""Wrappers: methods around another method, which forward the whole contract and can be nested."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, Info, Phase, init_local_state, keeps
from fedrax.contract.checks import kind
from fedrax.contract.client_data import ClientData
from fedrax.contract.hooks import same_structure
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError, unknown
from fedrax.tree import Tree

if TYPE_CHECKING:
    from fedrax.privacy.releases import Release


class Wrapped(NamedTuple):
    """The state of the inner method together with the wrapper's own state.

    Example:
        >>> fedrax.contract.Wrapped(inner=(), own=jnp.int32(0)).inner
        ()
    """

    inner: Any
    """The state of the inner method."""
    own: Any
    """The wrapper's own state."""


def model_in(message: Any, like: Tree) -> Tree | None:
    """The model in a message: ``message`` or its field ``params``, whichever has the structure and shapes of ``like``.

    ``message`` itself is tried first, because a model may have a field ``params``. None if neither matches.
    """
    return next((part for part in (message, getattr(message, "params", None)) if same_structure(part, like)), None)


@hyperparameters
class Wrapper(Algorithm):
    """Base of methods around another method ``inner``: it forwards the whole contract, so that wrappers nest.

    Override the methods ``around_...`` to change a phase, ``init_own`` and ``init_client_own`` to add a state of the
    wrapper at the server or at the clients. Without such a state, states are those of ``inner``; with one, they are
    :class:`Wrapped`. To change the local loss, gradients or steps, pass ``inner`` a modified ``data``: see
    ``with_loss``, ``with_gradient``, ``with_term`` and ``with_direction`` of :class:`fedrax.ClientData`.

    Example:
        >>> class Halved(fedrax.Wrapper):
        ...     def around_receive(self, receive, upload):
        ...         return fedrax.tree.scale(0.5, receive(upload))
        >>> Halved(fedrax.FedAvg()).local_steps.lr
        0.1
    """

    inner: Algorithm
    """The inner method."""

    own_traits: ClassVar[Traits] = Traits()
    """What the wrapper requires and declares in addition to ``inner``. Where it depends on fields, define it as a
    property."""

    def __init_subclass__(cls, **more: Any) -> None:
        """Raise FedraxError for methods that would never be called, or take wrong arguments."""
        super().__init_subclass__(**more)
        for name, function in vars(cls).items():
            if name == "traits":
                raise FedraxError(f"{cls.__name__}.traits would replace those of the inner method: define own_traits")
            if f"around_{name}" in _HOOKS:
                raise FedraxError(f"{cls.__name__}.{name} would never be called: define around_{name}")
            if name.startswith("around_") and name not in _HOOKS:
                raise unknown(f"method of {cls.__name__}:", name, _HOOKS)
            if name in _HOOKS and inspect.isfunction(function):
                needed = list(inspect.signature(getattr(Wrapper, name)).parameters)
                try:
                    inspect.signature(function).bind(*needed)
                except TypeError:
                    said = f"write def {name}({', '.join(needed)})"
                    raise FedraxError(f"{cls.__name__}.{name} has a wrong signature: {said}") from None

    # -- for wrappers to override ------------------------------------------------------------------------------

    def around_client(
        self, client: Callable, message: Any, state: Any, own: Tree, data: ClientData, last: bool
    ) -> tuple[ClientOutput, Tree]:
        """Run one client's work, by default that of ``inner``.

        Args:
            client: the inner method's client function (message, state, data).
            message: the broadcast message.
            state: ``inner``'s client state.
            own: the wrapper's own state.
            data: the client's data in this round.
            last: whether this is the last phase of the round.

        Returns:
            The output with ``inner``'s client state, and the wrapper's own state.
        """
        return client(message, state, data), own

    def around_server(
        self, server: Callable, state: Any, own: Tree, cohort: Cohort, last: bool
    ) -> tuple[Any, Tree, Info]:
        """Update the server state, by default as ``inner`` does.

        Args:
            server: the inner method's server function (state, cohort).
            state: ``inner``'s server state.
            own: the wrapper's own state.
            cohort: the aggregated uploads of the round.
            last: whether this is the last phase of the round.

        Returns:
            ``inner``'s next state, the wrapper's own state and the info.
        """
        state, info = server(state, cohort)
        return state, own, info

    def around_broadcast(self, broadcast: Callable, state: Any, own: Tree) -> Tree:
        """Compute the broadcast message, by default that of ``inner``.

        Args:
            broadcast: the inner method's broadcast function.
            state: ``inner``'s server state.
            own: the wrapper's own state.

        Returns:
            The message.
        """
        return broadcast(state)

    def around_receive(self, receive: Callable, upload: Tree) -> Tree:
        """Decode an upload at the server, by default as ``inner`` does.

        Args:
            receive: the inner method's receive function.
            upload: the upload of one client.

        Returns:
            What is averaged over the cohort.
        """
        return receive(upload)

    def init_own(self, params: Tree, num_clients: int) -> Tree:
        """Create the wrapper's own server state; by default there is none.

        Args:
            params: pytree of the global parameters.
            num_clients: N, the number of clients of the federation.

        Returns:
            A pytree of arrays; () for none.
        """
        return ()

    def init_client_own(self, params: Tree) -> Tree:
        """Create the wrapper's own client state; by default there is none.

        Args:
            params: pytree of the global parameters.

        Returns:
            A pytree of arrays; () for none.
        """
        return ()

    # -- the contract, forwarded -------------------------------------------------------------------------------

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of ``inner`` with the wrapper around each."""
        inner = self.inner.phases
        if self.inner.traits.plain_sum and (self.own_traits.stacked_uploads or self._decodes):
            noisy = self.inner
            while isinstance(noisy, Wrapper) and noisy.inner.traits.plain_sum:
                noisy = noisy.inner
            raise FedraxError(
                f"the noise of {type(noisy).__name__} is calibrated to a plain sum of uploads, which"
                f" {type(self).__name__} changes: put {type(self).__name__} inside, or add the noise at the clients"
            )
        return tuple(self._phase(phase, last=phase is inner[-1]) for phase in inner)

    @property
    def _decodes(self) -> bool:
        """Whether the wrapper decodes uploads before they are summed."""
        return type(self).around_receive is not Wrapper.around_receive

    @property
    def _has_state(self) -> bool:
        """Whether the states of server and clients are :class:`Wrapped`."""
        mine = type(self)
        return mine.init_own is not Wrapper.init_own or mine.init_client_own is not Wrapper.init_client_own

    def _split_state(self, state: Any) -> tuple[Any, Tree]:
        return (state.inner, state.own) if self._has_state else (state, ())

    def _join_state(self, inner: Any, own: Tree) -> Any:
        if self._has_state:
            return Wrapped(inner, own)
        if jax.tree.leaves(own):
            name = type(self).__name__
            raise FedraxError(
                f"{name} returns a state of its own without an initial one: define init_own(params, num_clients) for"
                " the server, init_client_own(params) for a client"
            )
        return inner

    def _phase(self, phase: Phase, last: bool) -> Phase:
        def inside(message: Any, state: Any, data: ClientData) -> ClientOutput:
            return phase.client(message, state, data.inside())

        name = type(self).__name__

        def broadcast(server: Any) -> Tree:
            message = self.around_broadcast(phase.broadcast, *self._split_state(server))
            if message is None:
                raise FedraxError(f"{name}.around_broadcast returns nothing: return what the server sends")
            return message

        def client(message: Any, state: Any, data: ClientData) -> ClientOutput:
            mine, own = self._split_state(state)
            returned = self.around_client(inside, message, mine, own, data, last)
            output, own = _check_tuple(f"{name}.around_client", returned, 2, "the pair output, own")
            if not isinstance(output, ClientOutput):
                raise FedraxError(
                    f"{name}.around_client returns {kind(output)} in place of the output: output._replace(upload=...)"
                    " changes a part of what client(message, state, data) returns"
                )
            return output._replace(state=self._join_state(output.state, own))

        def server(server: Any, cohort: Cohort) -> tuple[Any, Info]:
            mine, own = self._split_state(server)
            deeper = lambda state, cohort: phase.server(state, cohort._replace(keys=cohort.keys.inside()))  # noqa: E731
            returned = self.around_server(deeper, mine, own, cohort, last)
            state, own, info = _check_tuple(f"{name}.around_server", returned, 3, "state, own, info")
            if type(state) is tuple and type(mine) is not tuple:
                raise FedraxError(
                    f"{name}.around_server returns a pair instead of the state: server(state, cohort) returns the pair"
                    " state, info; unpack it"
                )
            if not isinstance(info, dict):
                raise FedraxError(
                    f"{name}.around_server returns {kind(info)} in place of the info: return a dictionary"
                )
            return self._join_state(state, own), info

        receive = lambda upload: self.around_receive(phase.receive, upload)  # noqa: E731
        return Phase(broadcast, client, server, receive, phase.stacked or self.own_traits.stacked_uploads)

    def init(self, params: Tree, num_clients: int) -> Any:
        """The state of ``inner`` with the wrapper's own."""
        return self._join_state(self.inner.init(params, num_clients), self.init_own(params, num_clients))

    def init_client(self, params: Tree) -> Tree:
        """The state of ``inner`` with the wrapper's own."""
        return self._join_state(self.inner.init_client(params), self.init_client_own(params))

    @property
    def traits(self) -> Traits:
        """Those of ``inner`` and the wrapper's own."""
        return self.inner.traits | self.own_traits

    @property
    def local_steps(self) -> LocalSGD | None:
        """As ``inner``."""
        return self.inner.local_steps

    def releases(self) -> tuple[Release, ...]:
        """As ``inner``. A wrapper that adds noise, or uploads more of the data, overrides this."""
        return self.inner.releases()

    def params(self, server: Any) -> Tree:
        """As ``inner``."""
        return self.inner.params(self._split_state(server)[0])

    def with_params(self, server: Any, params: Tree) -> Any:
        """As ``inner``."""
        mine, own = self._split_state(server)
        return self._join_state(self.inner.with_params(mine, params), own)

    def personal(self, params: Tree, state: Any) -> Tree | None:
        """As ``inner``."""
        return self.inner.personal(params, self._split_state(state)[0])

    def map_control_variates(self, function: Callable[..., Tree], state: Any, *others: Any) -> Any:
        """As ``inner``."""
        mine, own = self._split_state(state)
        return self._join_state(
            self.inner.map_control_variates(function, mine, *(self._split_state(other)[0] for other in others)), own
        )


_HOOKS = ("around_client", "around_server", "around_broadcast", "around_receive", "init_own", "init_client_own")


def _check_tuple(where: str, returned: Any, length: int, what: str) -> tuple:
    """The output of a wrapper's method, checked to be a tuple of ``length``."""
    if type(returned) is not tuple or len(returned) != length:
        raise FedraxError(f"{where} returns {kind(returned)}: return {what}")
    return returned


def wrapped_in(algorithm: Algorithm, kind: type[Wrapper]) -> Wrapper | None:
    """The outermost wrapper of a kind around or inside ``algorithm``, itself included; None where there is none."""
    while isinstance(algorithm, Wrapper):
        if isinstance(algorithm, kind):
            return algorithm
        algorithm = algorithm.inner
    return None


def uploads_depend_on_state(algorithm: Algorithm) -> bool:
    """Whether uploads may depend on client states; true if there are any, unless `Traits.unsent_state` excludes it."""
    if isinstance(algorithm, Wrapper):
        own, keeps_state = algorithm.own_traits, keeps(algorithm.init_client_own)
        if uploads_depend_on_state(algorithm.inner):
            return True
    else:
        own, keeps_state = algorithm.traits, keeps(algorithm.init_client) or keeps(partial(init_local_state, algorithm))
    return own.personal_statistics or (keeps_state and not own.unsent_state)
