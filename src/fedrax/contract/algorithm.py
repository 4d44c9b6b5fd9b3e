"""The contract between an algorithm and whatever runs it.

An algorithm is a frozen dataclass: its fields are hyper-parameters, its methods pure functions on pytrees.
It never sees loops over clients, devices, files or networks. One round is one or several **phases**; in each

1. ``broadcast(server) -> message`` goes to every client of the cohort,
2. ``client(message, state, data) -> ClientOutput`` runs on each of them,
3. ``receive(upload)`` makes of each upload what is averaged: it decodes, dequantizes, unmasks,
4. ``server(server, cohort) -> server, info`` takes the cohort's mean in, or where the phase is ``stacked`` the uploads.

A client's **state** is what its next phase receives: a phase's returned state goes to the same client's next
phase in this round, the last phase's to its next round. Only the latter outlives the round, so something
needed between two phases costs nothing per client of the federation.

Writing an algorithm takes a subclass with ``init``, ``client`` and ``server`` (and ``init_client`` where a
client remembers something); the other methods have defaults. CONTRIBUTING.md shows one whole.
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
    """What one client hands back at the end of a phase.

    ``upload``, ``total`` and ``each`` are what travels, and count as bytes sent. ``upload`` is averaged over the
    cohort with the aggregation weights, once ``receive`` has decoded it: in float32 at least, whatever it traveled
    in. ``total`` is summed as it is, for masked or counted numbers: integers exactly, modulo 2^32, and floats in
    float32 at least. ``each`` reaches the server one per client (stacked), for methods whose server remembers
    clients. ``state`` stays on the client. ``info`` is for people: averaged over the cohort, except ``gradients``
    (evaluations of one sample's gradient), which is summed.
    """

    upload: Tree
    state: Tree = ()
    info: Info = {}  # noqa: RUF012 - never mutated
    each: Tree = ()
    total: Tree = ()


class Cohort(NamedTuple):
    """What the server sees of a phase: the S clients that took part."""

    mean: Tree
    """sum_i p_i receive(upload_i), with weights p_i that sum to one over the cohort; float32 at least. In a round that
    nobody joins, as of `Poisson` cohorts, it is zero."""
    each: Tree
    """The ``each`` of the clients, stacked on a leading axis of ``clients.shape``."""
    total: Tree
    """The sum of the clients' ``total``."""
    clients: Array
    """int32; the client of each entry of ``each``; entries beyond the cohort hold ``num_clients``, which is out
    of range: index with ``.at[clients].set(..., mode="drop")``."""
    weights: Array
    """p_i, in the order of ``clients``; zero beyond the cohort."""
    size: Array
    """S, as a float of the run's type."""
    num_clients: int
    """N, all clients of the federation."""
    round: Array
    """The number of this round, from 0."""
    keys: NamedKeys
    """The server's random keys of this round and phase; see :meth:`key`."""
    uploads: Tree = ()
    """Where the phase is ``stacked``: every receive(upload_i), on a leading axis of ``clients.shape``; zero beyond the
    cohort, float32 at least. An empty tuple elsewhere."""
    expected: Any = None
    """The S that was asked for where a round may have fewer clients or more, as of `Poisson` cohorts, of an
    availability trace or in turns; else ``size``; a float."""

    @property
    def real(self) -> Array:
        """bool, in the order of ``clients``: False beyond the cohort."""
        return self.clients < self.num_clients

    def key(self, name: str) -> Array:
        """The server's random key for the purpose ``name`` in this phase; different in every wrapper."""
        return self.keys(name)


def unchanged(upload: Tree) -> Tree:
    """An upload that travels as it is summed."""
    return upload


class Phase(NamedTuple):
    """One exchange between the server and the cohort; see the module's text."""

    broadcast: Callable[[Any], Tree]
    client: Callable[[Any, Any, ClientData], ClientOutput]
    server: Callable[[Any, Cohort], tuple[Any, Info]]
    receive: Callable[[Tree], Tree] = unchanged
    stacked: bool = False
    """Whether the server sees the uploads one by one, as ``cohort.uploads``, beside their mean."""


@hyperparameters
class Algorithm(ABC):
    """Base of all algorithms: the defaults of the contract.

    A class of this package is a base or an algorithm that is final: what users run is not changed by overriding. What
    several share is a base (:class:`fedrax.Averaging`) or a function.
    """

    traits: ClassVar[Traits] = Traits()
    """What the method requires and declares. Where it depends on fields, define it as a property."""

    # -- what a round is ---------------------------------------------------------------------------------------

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of one round."""
        return (Phase(self.broadcast, self.client, self.server, self.receive, self.traits.stacked_uploads),)

    @abstractmethod
    def init(self, params: Tree, num_clients: int) -> Any:
        """The server's state before the first round: a NamedTuple with the field ``params``, see :meth:`params`."""

    def init_client(self, params: Tree) -> Tree:
        """The state of a client that has not yet taken part; ``params`` are the initial ones."""
        return ()

    def broadcast(self, server: Any) -> Tree:
        """What the server sends to each client."""
        return self.params(server)

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """One client's work."""
        raise FedraxError(f"{type(self).__name__} must define client")

    def receive(self, upload: Tree) -> Tree:
        """What is averaged of an upload, on the server, before the next one arrives."""
        return upload

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """The server's next state from the cohort's uploads."""
        raise FedraxError(f"{type(self).__name__} must define server")

    # -- what others may ask -----------------------------------------------------------------------------------

    @property
    def local_steps(self) -> LocalSGD | None:
        """The rule of the clients' local steps, where there is one: by it devices are balanced and scripts checked."""
        return getattr(self, "local", None)

    def params(self, server: Any) -> Tree:
        """The global parameters in a server state."""
        return server.params

    def with_params(self, server: Any, params: Tree) -> Any:
        """The server state with other global parameters."""
        return server._replace(params=params)

    def personal(self, params: Tree, state: Any) -> Tree | None:
        """The parameters of a client's own model, from the global ones and its state; None: there is no such model."""
        return None

    def map_control_variates(self, function: Callable[..., Tree], state: Any, *others: Any) -> Any:
        """``state``, the server's or a client's, with ``function`` of its control variates and those of ``others``."""
        names = [name for name in self.traits.control_variates if name in getattr(state, "_fields", ())]
        if not names:
            return state
        made = {name: function(getattr(state, name), *(getattr(other, name) for other in others)) for name in names}
        return state._replace(**made)

    def releases(self) -> tuple[Release, ...]:
        """What one round lets out of a client's data, as :mod:`fedrax.privacy` counts it; floats must be numbers here.

        An empty tuple: nothing is protected. Mechanisms say what they do, and wrappers around them forward it.
        """
        return ()

    def init_local(self, params: Tree) -> Tree:
        """What the local steps carry from round to round on a client that has not taken part, beside its state."""
        local = self.local_steps
        return () if local is None else local.init_carried(params)


def keeps(init: Callable[[Tree], Tree]) -> bool:
    """Whether a state is anything but an empty tuple; also true of one that depends on the model's names or shapes."""
    try:
        return jax.eval_shape(init, {"any": jax.ShapeDtypeStruct((1,), "float32")}) != ()
    except Exception:  # a user's own may look for a layer
        return True


def is_algorithm(value: Any) -> bool:
    """Whether ``value`` is an algorithm class that can be made an object of."""
    concrete = isinstance(value, type) and issubclass(value, Algorithm) and not inspect.isabstract(value)
    return concrete and value is not Algorithm


def summed_dtype(dtype: Any) -> Any:
    """The type in which numbers of ``dtype`` are averaged: float32 at least, complex numbers as such."""
    inexact = jax.numpy.issubdtype(dtype, jax.numpy.inexact)  # JAX promotes no integers of four bits
    return jax.numpy.promote_types(dtype, jax.numpy.float32) if inexact else jax.numpy.dtype("float32")
