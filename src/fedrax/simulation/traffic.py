"""Trace of one round with one client: bytes sent and received, and the program as a part of the run's identity."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from fedrax import tree
from fedrax.config.user_errors import collecting_errors, raise_collected, translate_errors
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.contract.checks import checked_init, checked_message, checked_round
from fedrax.contract.client_data import ClientAssignment
from fedrax.errors import FedraxError, warn, warnings_about
from fedrax.simulation.round import (
    ClientRecord,
    ClientRows,
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
    """Executor of a round with one client that records the shapes of messages and uploads.

    Violations of the algorithm contract are added to ``broken``, and the round continues with a placeholder value, so
    that one error message can report all of them.
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
            return checked_message(self.algorithm, p, super().broadcast(p, server))
        return self.params

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor."""
        with collecting_errors(self.algorithm, self.broken):
            return super().server(p, server, gathered)
        return server, {}

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """The result of the one client; zeros in the shape of the parameters if it violates the contract."""
        with collecting_errors(self.algorithm, self.broken), phase_scope(p):
            return self._client(p, message, statistics)
        none = ClientSums(tree.zeros_like(self.params), (), {}, (), jnp.int32(self.program.num_clients))
        assignments = self.round_inputs.assignments
        return PhaseResult(none, ClientRows(((), ()), assignments.client, assignments.weight))

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
    """Bytes sent to the client, from the shapes of the broadcast messages."""
    bytes_up: int
    """Bytes sent by the client, from the shapes of its uploads."""
    program: ClosedJaxpr
    """The traced computation of the algorithm and the task."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of one client's computation in bytes; the server's computation is not included."""
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
    assignment: ClientAssignment,
    broken: list[FedraxError],
) -> TracedRound:
    """Trace a round with one client; raises FedraxError for violations of the algorithm contract.

    This is the first time that the algorithm is traced. assignment: that of any client, with fields of shape [1, ...].
    broken: violations that are known already.
    """

    def one_round(
        algorithm: Algorithm,
        params: Tree,
        statistics: Tree,
        record: ClientRecord,
        samples: Tree,
        assignment: ClientAssignment = assignment,
    ) -> tuple[Tree, Tree, Tree]:
        round_inputs = RoundInputs(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.tree.map(jnp.asarray, assignment))
        executor = ShapeTracer(program, algorithm, round_inputs, jax.random.key(0), record, samples, broken=broken)
        server = checked_init(algorithm, params, algorithm.init(tree.rebuilt(params), program.num_clients))
        after = run_round(executor, server, statistics)[0]
        with collecting_errors(algorithm, broken):
            checked_round(algorithm, server, after)
        return executor.received, executor.sent, after

    # Float hyper-parameters are inputs, so that methods that differ in their values have one program.
    shapes = jax.eval_shape(lambda *trees: trees, algorithm, params, statistics, record, samples)
    try:
        with translate_errors(algorithm), warnings_about(type(algorithm).__name__):
            made, (received, sent, _) = jax.make_jaxpr(one_round, return_shape=True)(*shapes)
    except FedraxError as error:
        raise_collected([*broken, error])
        raise
    raise_collected(broken)
    outcome = lambda work, *trees: one_round(*trees, assignment=assignment._replace(work=work))[1:]  # noqa: E731
    if assignment.work is not None and not dependent_leaves(outcome, assignment.work, *shapes):
        warn(f"{type(algorithm).__name__} does the same work at slow clients: stragglers is ignored")
    return TracedRound(_bytes_once(received, output_sources(made)), tree.num_bytes(sent), made)


def _bytes_once(received: list[Tree], origins: list) -> int:
    """Bytes that a client receives, where an array that was sent in an earlier phase is counted once.

    origins: for each leaf, the variable of the program that it is.
    """
    total, known, rest = 0, set(), iter(origins)
    for part in received:
        leaves = jax.tree.leaves(part)
        new = [(leaf, next(rest)) for leaf in leaves]
        total += tree.num_bytes([leaf for leaf, origin in new if origin not in known])
        known.update(origin for _, origin in new)
    return total
