"""Message schemas: the shapes of broadcast message and upload in each phase, known to server and clients."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.assignment import ClientAssignment
from fedrax.contract.task import Batch
from fedrax.contract.task_checks import shape_of_batch
from fedrax.simulation.round import (
    ClientRecord,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    SingleClientExecutor,
    run_round,
)
from fedrax.tree import Tree
from fedrax.xla import dependent_leaves


class MessageSchema(NamedTuple):
    """Shapes and dtypes of what a phase sends and stores."""

    message: Tree
    """The broadcast message."""
    sent: ClientOutput
    """The upload with what belongs to it; its client state is not sent."""
    statistics: Tree
    """The model's running statistics, sent with the last phase's upload; empty in other phases."""
    kept: ClientRecord
    """The client state after the phase."""


class _MessageTracer(SingleClientExecutor):
    """Executor of a round of one client that records the broadcast messages."""

    def __init__(self, *inputs: Any):
        super().__init__(*inputs)
        self.messages: list[Tree] = []

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """Record the message and run the phase."""
        self.messages.append(message)
        return super().clients(p, message, statistics)


def message_schemas(
    program: RoundProgram, algorithm: Algorithm, params: Tree, statistics: Tree, samples: Batch
) -> list[MessageSchema]:
    """Trace one round and return the schema of each phase.

    Args:
        program: the round's static description.
        algorithm: the algorithm.
        params: shapes of the parameters.
        statistics: shapes of the model's running statistics.
        samples: shapes of a batch of samples.
    """
    assignment = placeholder_assignment()

    def one_round(algorithm: Algorithm, params: Tree, statistics: Tree, samples: Batch) -> list[MessageSchema]:
        round_inputs = RoundInputs(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.tree.map(jnp.asarray, assignment))
        kept = ClientRecord.at_first(algorithm, params, statistics)
        executor = _MessageTracer(program, algorithm, round_inputs, jax.random.key(0), kept, samples)
        run_round(executor, algorithm.init(tree.rebuilt(params), program.num_clients), statistics)
        phases = zip(executor.messages, executor.finished, strict=True)
        return [MessageSchema(message, done.output, done.statistics, done.record) for message, done in phases]

    # the algorithm is an input as of the client's program, which then finds the trace of the client's part
    found = jax.eval_shape(one_round, algorithm, params, statistics, samples)
    return [one._replace(statistics=one.statistics if p == len(found) - 1 else ()) for p, one in enumerate(found)]


def placeholder_assignment() -> ClientAssignment:
    """An assignment in a round of one client, to trace with."""
    zero = np.zeros(1, np.int32)
    return ClientAssignment(zero, zero, zero, zero, np.ones(1, np.float32))


def shapes_of_samples(samples: Any) -> Batch:
    """Shapes of samples (x, y), with the dtypes that JAX computes in."""
    return jax.tree.map(lambda a: shape_of_batch(a, len(a)), Batch(*samples))


def needs_initial_parameters(algorithm: Algorithm, params: Tree, statistics: Tree) -> bool:
    """Whether the initial client state depends on the values of the starting parameters, not only on their shapes."""

    def initial_record(start: tuple[Tree, Tree]) -> ClientRecord:
        return ClientRecord.at_first(algorithm, *start)

    return bool(dependent_leaves(initial_record, (params, statistics)))
