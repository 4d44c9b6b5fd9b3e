"""The contract of an algorithm: what every executor calls.

An algorithm is a frozen dataclass: its fields are hyperparameters, its methods pure functions on pytrees.
It never sees loops over clients, devices, files or networks. One round has one or several **phases**; in each

1. ``broadcast(server) -> message`` is sent to every client of the cohort,
2. ``client(message, state, data) -> ClientOutput`` runs on each of them,
3. ``receive(upload)`` decodes each upload (dequantizes, unmasks) before averaging,
4. ``server(server, cohort) -> server, info`` updates the server state from the mean of the cohort, or where the phase
   is ``stacked`` from the single uploads.

The **client state** that a phase returns goes to the next phase of the same client in this round, that of the last
phase to its next round. An earlier phase may return a state of any form, and passes on what it does not change; the
last one returns the form of ``init_client``. Only the latter is stored between rounds, so that values which are needed
between two phases use no memory per client of the federation.

An algorithm is a subclass with ``init``, ``client`` and ``server``, and ``init_client`` where clients have a state; the
other methods have defaults. CONTRIBUTING.md shows a complete one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
from jax import Array

from fedrax.config.hyperparameters import hyperparameters
from fedrax.contract.client_data import ClientData
from fedrax.contract.traits import Traits
from fedrax.errors import FedraxError
from fedrax.prng.keys import NamedKeys
from fedrax.tree import Tree

if TYPE_CHECKING:
    from fedrax.contract.local_training import LocalSGD
    from fedrax.privacy.releases import Release

Info = dict[str, Array]


class ClientOutput(NamedTuple):
    """What one client returns at the end of a phase.

    ``upload``, ``each`` and ``total`` are sent to the server and count as bytes up.

    Example:
        >>> output = fedrax.ClientOutput(upload={"w": jnp.ones(2)}, info={"loss": jnp.float32(0.5)})
        >>> output.state
        ()
    """

    upload: Tree
    """Averaged over the cohort with the aggregation weights after ``receive``, in float32 at least."""
    state: Tree = ()
    """The client's next state; it is not sent."""
    info: Info = {}  # noqa: RUF012 - never mutated
    """Metrics, averaged over the cohort; ``gradients`` (evaluations of one sample's gradient) are summed."""
    each: Tree = ()
    """Sent to the server and stacked there, one entry per client."""
    total: Tree = ()
    """Summed over the cohort: integers exactly modulo 2^32, floats in float32 at least."""


class Cohort(NamedTuple):
    """The uploads of a phase as the server sees them: aggregated over the S clients of the cohort.

    Example:
        >>> fedrax.Cohort._fields[:3]
        ('mean', 'each', 'total')
    """

    mean: Tree
    """sum_i p_i receive(upload_i), with weights p_i; float32 at least. They sum to one over the cohort, except under a
    participation policy with inverse probabilities (`ImportanceSampling`), where only their expectation does. It is
    zero in a round without clients, which `Poisson` sampling allows."""
    each: Tree
    """The ``each`` of the clients, one row for each on a leading axis: the first S rows are the cohort's in ascending
    order of client numbers, under every plan and on any number of devices. Where rounds differ in size, further rows
    hold no client: mask them by ``real``."""
    total: Tree
    """The sum of the clients' ``total``."""
    clients: Array
    """int32; the client of each row, ascending; rows beyond the cohort have ``num_clients``, which is out of range:
    index with ``.at[clients].set(..., mode="drop")``."""
    weights: Array
    """p_i of each row; zero beyond the cohort."""
    size: Array
    """S, as a float."""
    num_clients: int
    """N, all clients of the federation."""
    round: Array
    """The number of this round, from 0."""
    keys: NamedKeys
    """The server's random keys of this round and phase; see :meth:`key`."""
    uploads: Tree = ()
    """Where the phase is ``stacked``: every receive(upload_i), in rows as those of ``each``; zero beyond the cohort,
    float32 at least. An empty tuple elsewhere."""
    expected: Any = None
    """The expected S where the size of the cohort varies, as with `Poisson` sampling or an availability trace;
    otherwise ``size``; a float."""

    @property
    def real(self) -> Array:
        """bool; whether a row of ``each``, ``uploads``, ``clients`` and ``weights`` holds a client of the cohort."""
        return self.clients < self.num_clients

    def key(self, name: str) -> Array:
        """The server's random key for one purpose in this phase; different in every wrapper.

        Args:
            name: the purpose; any text.

        Returns:
            A JAX random key.
        """
        return self.keys(name)


def unchanged(upload: Tree) -> Tree:
    """The default of ``receive``: uploads are averaged as they are."""
    return upload


class Phase(NamedTuple):
    """One exchange between the server and the cohort; the fields are the functions of :class:`Algorithm`.

    Example:
        >>> [phase.stacked for phase in fedrax.FedAvg().phases]
        [False]
    """

    broadcast: Callable[[Any], Tree]
    """server state -> message."""
    client: Callable[[Any, Any, ClientData], ClientOutput]
    """(message, client state, data) -> output."""
    server: Callable[[Any, Cohort], tuple[Any, Info]]
    """(server state, cohort) -> (server state, info)."""
    receive: Callable[[Tree], Tree] = unchanged
    """upload -> what is averaged."""
    stacked: bool = False
    """Whether the server sees the uploads one by one, as ``cohort.uploads``, beside their mean."""


@hyperparameters
class Algorithm(ABC):
    """Base class of all algorithms: the defaults of the contract.

    Subclasses define ``init``, ``client`` and ``server``, and ``init_client`` where clients have a state. Concrete
    algorithms are final: shared code belongs into a base (:class:`fedrax.Averaging`) or a function.

    Example:
        >>> fedrax.FedAvg().init({"w": jnp.zeros(2)}, num_clients=10).params["w"].shape
        (2,)
    """

    traits: ClassVar[Traits] = Traits()
    """What the method requires and declares. Where it depends on fields, define it as a property."""

    # -- a round ---------------------------------------------------------------------------------------

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of one round."""
        return (Phase(self.broadcast, self.client, self.server, self.receive, self.traits.stacked_uploads),)

    @abstractmethod
    def init(self, params: Tree, num_clients: int) -> Any:
        """Create the server state before the first round.

        Args:
            params: pytree of the global parameters.
            num_clients: N, the number of clients of the federation.

        Returns:
            A NamedTuple with a field ``params``, unless ``params`` and ``with_params`` are overridden.
        """

    def init_client(self, params: Tree) -> Tree:
        """Create the state of a client that has not participated yet.

        Args:
            params: the initial global parameters.

        Returns:
            A pytree of arrays; () for none.
        """
        return ()

    def broadcast(self, server: Any) -> Tree:
        """Compute the message that the server sends to every client of the cohort.

        Args:
            server: the server state.

        Returns:
            A pytree of arrays; by default the global parameters.
        """
        return self.params(server)

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """Run one client's local work.

        Args:
            message: the broadcast message.
            state: the client state.
            data: the client's data in this round.

        Returns:
            The upload, the next client state and metrics.
        """
        raise FedraxError(f"{type(self).__name__} must define client")

    def receive(self, upload: Tree) -> Tree:
        """Decode an upload on the server, before aggregation.

        Args:
            upload: the upload of one client.

        Returns:
            A pytree of arrays, which is averaged over the cohort.
        """
        return upload

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """Update the server state from the aggregated uploads.

        Args:
            server: the server state.
            cohort: the aggregated uploads of the round.

        Returns:
            The next server state and the info of the round.
        """
        raise FedraxError(f"{type(self).__name__} must define server")

    # -- queries of the simulator and of wrappers --------------------------------------------------------------

    @property
    def local_steps(self) -> LocalSGD | None:
        """The settings of the clients' local steps, or None. They are used for load balancing and for checks."""
        return getattr(self, "local", None)

    def params(self, server: Any) -> Tree:
        """Read the global parameters from a server state.

        Args:
            server: the server state.

        Returns:
            The global parameters.
        """
        return server.params

    def with_params(self, server: Any, params: Tree) -> Any:
        """Replace the global parameters in a server state.

        Args:
            server: the server state.
            params: pytree of the global parameters.

        Returns:
            The new server state.
        """
        return server._replace(params=params)

    def personal(self, params: Tree, state: Any) -> Tree | None:
        """Compute the parameters of a client's personal model.

        Args:
            params: pytree of the global parameters.
            state: the client state.

        Returns:
            The personal parameters; None where the method has no personal models.
        """
        return None

    def map_control_variates(self, function: Callable[..., Tree], state: Any, *others: Any) -> Any:
        """Apply a function to the control variates of a state.

        Args:
            function: (control variate, those of ``others``...) -> new control variate.
            state: a server state or a client state.
            others: further states with the same fields.

        Returns:
            The state with the new control variates.
        """
        names = [name for name in self.traits.control_variates if name in getattr(state, "_fields", ())]
        if not names:
            return state
        made = {name: function(getattr(state, name), *(getattr(other, name) for other in others)) for name in names}
        return state._replace(**made)

    def releases(self) -> tuple[Release, ...]:
        """List what one round releases about a client's data, for the accountant of :mod:`fedrax.privacy`.

        Float hyperparameters must be concrete numbers here.

        Returns:
            The releases of one round; () where nothing is protected.
        """
        return ()


def init_local_state(algorithm: Algorithm, params: Tree) -> Tree:
    """The state of the local optimizer of a client if it is carried over rounds (`LocalSGD.carry`); otherwise ()."""
    local = algorithm.local_steps
    return () if local is None else local.init_carried(params)


def keeps(init: Callable[[Tree], Tree]) -> bool:
    """Whether ``init`` makes a state that is not empty; true also if it needs certain names or shapes of the model."""
    try:
        return jax.eval_shape(init, {"any": jax.ShapeDtypeStruct((1,), "float32")}) != ()
    except Exception:  # user code may look up a layer
        return True


def is_algorithm(value: Any) -> bool:
    """Whether ``value`` is a concrete algorithm class."""
    concrete = isinstance(value, type) and issubclass(value, Algorithm) and not inspect.isabstract(value)
    return concrete and value is not Algorithm


def summed_dtype(dtype: Any) -> Any:
    """The dtype in which values of ``dtype`` are averaged: float32 at least, or complex."""
    inexact = jax.numpy.issubdtype(dtype, jax.numpy.inexact)  # JAX promotes no integers of four bits
    return jax.numpy.promote_types(dtype, jax.numpy.float32) if inexact else jax.numpy.dtype("float32")
