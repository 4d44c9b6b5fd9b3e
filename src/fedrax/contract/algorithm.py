"""The contract between an algorithm and whatever runs it.

An algorithm is a frozen dataclass: its fields are hyper-parameters, its methods pure functions on pytrees.
It never sees loops over clients, devices, files or networks. One round is one or several **phases**; in each

1. ``broadcast(server) -> message`` goes to every client of the cohort,
2. ``client(message, state, data) -> ClientOutput`` runs on each of them,
3. ``server(server, cohort) -> server, info`` takes the cohort's uploads in.

A client's **state** is what its next phase receives: a phase's returned state goes to the same client's next
phase in this round, the last phase's to its next round. Only the latter outlives the round, so something
needed between two phases costs nothing per client of the federation.

Writing an algorithm takes a subclass with ``init``, ``client`` and ``server`` (and ``init_client`` where a
client remembers something); ``broadcast`` defaults to the parameters. CONTRIBUTING.md shows one whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax import Array

from fedrax.contract.client_data import ClientData
from fedrax.contract.hyperparameters import hyperparameters
from fedrax.errors import FedraxError
from fedrax.tree import Tree

Info = dict[str, Array]


class ClientOutput(NamedTuple):
    """What one client hands back at the end of a phase.

    ``upload`` is averaged over the cohort with the aggregation weights; ``each`` reaches the server one per
    client (stacked), for methods whose server remembers clients. Both count as bytes sent. ``state`` stays on
    the client. ``info`` is for people: averaged over the cohort, except ``gradients`` (evaluations of one
    sample's gradient), which is summed.
    """

    upload: Tree
    state: Tree = ()
    info: Info = {}  # noqa: RUF012 - never mutated
    each: Tree = ()


class Cohort(NamedTuple):
    """What the server sees of a phase: the S clients that took part."""

    mean: Tree
    """sum_i p_i upload_i, with weights p_i that sum to one over the cohort."""
    each: Tree
    """The ``each`` of the clients, stacked on a leading axis of ``clients.shape``."""
    clients: Array
    """int32; the client of each entry of ``each``; entries beyond the cohort hold ``num_clients``, which is out
    of range: index with ``.at[clients].set(..., mode="drop")``."""
    weights: Array
    """p_i, in the order of ``clients``; zero beyond the cohort."""
    size: Array
    """S, as a float."""
    num_clients: int
    """N, all clients of the federation."""
    round: Array
    """The number of this round, from 0."""


class Phase(NamedTuple):
    """One exchange between the server and the cohort; see the module's text."""

    broadcast: Callable[[Any], Tree]
    client: Callable[[Any, Any, ClientData], ClientOutput]
    server: Callable[[Any, Cohort], tuple[Any, Info]]


class ServerState(Protocol):
    """What every server state has: a NamedTuple with the global parameters among its fields."""

    @property
    def params(self) -> Tree: ...

    def _replace(self, **changes: Any) -> Any: ...


@hyperparameters
class Algorithm:
    """Base of all algorithms: the defaults of the contract."""

    @property
    def uniform_weights(self) -> bool:
        """The method is defined for uniform aggregation weights only."""
        return False

    @property
    def fixed_cohort(self) -> bool:
        """The method's fixed point is wrong when the cohort's size varies between rounds."""
        return False

    @property
    def largest_cohort(self) -> int | None:
        """The most clients a round may have; None where any number is right."""
        return None

    @property
    def corrections(self) -> tuple[str, ...]:
        """Fields of the server's and clients' states that correct for drift (what a wrapper may extrapolate)."""
        return ()

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of one round."""
        return (Phase(self.broadcast, self.client, self.server),)

    def init(self, params: Tree, num_clients: int) -> Any:
        """The server's state before the first round."""
        raise TypeError(f"{type(self).__name__} must define init")

    def init_client(self, params: Tree) -> Tree:
        """The state of a client that has not yet taken part; ``params`` are the initial ones."""
        return ()

    def broadcast(self, server: Any) -> Tree:
        """What the server sends to each client."""
        return server.params

    def client(self, message: Any, state: Any, data: ClientData) -> ClientOutput:
        """One client's work."""
        raise TypeError(f"{type(self).__name__} must define client")

    def server(self, server: Any, cohort: Cohort) -> tuple[Any, Info]:
        """The server's next state from the cohort's uploads."""
        raise TypeError(f"{type(self).__name__} must define server")


def is_algorithm(value: Any) -> bool:
    """Whether ``value`` is a concrete algorithm class."""
    return isinstance(value, type) and issubclass(value, Algorithm) and value is not Algorithm


def check_settings(algorithm: Algorithm, weights: str, cohort_size: int, varying_cohort: bool) -> None:
    """Refuse aggregation weights or participation (``cohort_size`` clients at most) the method is not defined for."""
    name = type(algorithm).__name__
    if algorithm.uniform_weights and weights != "uniform":
        raise FedraxError(f"{name} is defined for uniform aggregation weights only: set weights to 'uniform'")
    if algorithm.fixed_cohort and varying_cohort:
        raise FedraxError(f"{name} converges to a wrong point when the cohort's size varies between rounds")
    if algorithm.largest_cohort is not None and cohort_size > algorithm.largest_cohort:
        limit = f"a memory of {algorithm.largest_cohort} clients is smaller than a cohort of {cohort_size}"
        raise FedraxError(f"{name} remembers every client of the cohort: {limit}")
