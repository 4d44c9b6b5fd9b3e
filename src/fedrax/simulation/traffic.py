"""One round of one client, traced: the bytes that travel, and the program itself, by which a run is known again."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from fedrax import tree
from fedrax.config.user_errors import collecting_errors, explained, refuse
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.contract.checks import checked_init, checked_message, checked_round
from fedrax.contract.client_data import ClientAssignment
from fedrax.errors import FedraxError, warn
from fedrax.simulation.round import (
    ClientRecord,
    ClientSums,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    SingleClientExecutor,
    run_round,
)
from fedrax.tree import Tree
from fedrax.xla import dependent_leaves, output_sources, peak_bytes, phase_scope, read_scope


class ShapeTracer(SingleClientExecutor):
    """A round of one client, for the shapes of what travels.

    What breaks the contract's rules goes into ``broken``, and the round goes on with something in its place, so that
    one that breaks several hears of all of them.
    """

    def __init__(self, *inputs: Any, broken: list[FedraxError]):
        super().__init__(*inputs)
        self.broken = broken
        self.initial = None if broken else self.record  # of a broken init_client it is not known
        self.received: list[Tree] = []
        self.sent: list[Tree] = []

    def broadcast(self, p: int, server: Any) -> Tree:
        """As every executor."""
        self.params = self.algorithm.params(server)
        with collecting_errors(self.algorithm, self.broken):
            return checked_message(self.algorithm, super().broadcast(p, server))
        return self.params

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor."""
        with collecting_errors(self.algorithm, self.broken):
            return super().server(p, server, gathered)
        return server, {}

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """The one client, or where it is broken one that sends zeros in place of parameters."""
        with collecting_errors(self.algorithm, self.broken), phase_scope(p):
            return self._client(p, message, statistics)
        none = ClientSums(tree.zeros_like(self.params), (), {}, (), jnp.int32(self.program.num_clients))
        return PhaseResult(none, ((), ()), self.round_inputs.assignments.client, self.round_inputs.assignments.weight)

    def _client(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        gathered = super().clients(p, message, statistics)
        output = self.finished[-1].output
        self.received.append(message)
        self.sent.append((output.upload, output.each, output.total))
        # running statistics go down with the first message and up with the last upload
        if p == 0 and not self.algorithm.traits.personal_statistics:
            self.received.append(statistics)
            self.sent.append(statistics)
        return gathered


class TracedRound(NamedTuple):
    """A round of one client, not yet compiled."""

    bytes_down: int
    """To the client, from the shapes of the algorithm's messages."""
    bytes_up: int
    """From the client, from the shapes of its uploads."""
    program: ClosedJaxpr
    """What the algorithm and the task compute."""

    @property
    def peak_bytes(self) -> int:
        """Bytes that a client at work takes; what the server makes is there once for all of them."""
        made = self.program.jaxpr
        of_client = [e for e in made.eqns if read_scope(str(e.source_info.name_stack))[0] is not None]
        return peak_bytes(made.replace(eqns=of_client))


def trace_round(
    program: RoundProgram,
    algorithm: Algorithm,
    params: Tree,
    statistics: Tree,
    record: ClientRecord,
    samples: Tree,
    place: ClientAssignment,
    broken: list[FedraxError],
) -> TracedRound:
    """A round of one client by its shapes.

    The first time that the algorithm is traced: what breaks the contract's rules is refused here, in a sentence.
    place: of any client, its fields of shape [1, ...]. broken: what is known to be wrong already.
    """

    def one_round(
        params: Tree, statistics: Tree, record: ClientRecord, samples: Tree, place: ClientAssignment = place
    ) -> tuple[Tree, Tree, Tree]:
        round_inputs = RoundInputs(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.tree.map(jnp.asarray, place))
        executor = ShapeTracer(program, algorithm, round_inputs, jax.random.key(0), record, samples, broken=broken)
        server = checked_init(algorithm, params, algorithm.init(tree.rebuilt(params), program.num_clients))
        after = run_round(executor, server, statistics)[0]
        with collecting_errors(algorithm, broken):
            checked_round(algorithm, server, after)
        return executor.received, executor.sent, after

    shapes = jax.eval_shape(lambda *trees: trees, params, statistics, record, samples)
    try:
        with explained(algorithm):
            made, (received, sent, _) = jax.make_jaxpr(one_round, return_shape=True)(*shapes)
    except FedraxError as error:
        refuse([*broken, error])
        raise
    refuse(broken)
    outcome = lambda work, p, v, k, x: one_round(p, v, k, x, place._replace(work=work))[1:]  # noqa: E731
    if place.work is not None and not dependent_leaves(outcome, place.work, *shapes):
        warn(f"no client of {type(algorithm).__name__} does less work for being slow: stragglers count for nothing")
    return TracedRound(_bytes_once(received, output_sources(made)), tree.num_bytes(sent), made)


def _bytes_once(received: list[Tree], origins: list) -> int:
    """Of what a client receives: what came in an earlier part of the round is not sent again. origins: of each leaf."""
    total, known, rest = 0, set(), iter(origins)
    for part in received:
        leaves = jax.tree.leaves(part)
        new = [(leaf, next(rest)) for leaf in leaves]
        total += tree.num_bytes([leaf for leaf, origin in new if origin not in known])
        known.update(origin for _, origin in new)
    return total
