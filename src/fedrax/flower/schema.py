"""What both ends know of a round before it: the shapes of what travels in each of its phases."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedrax import tree
from fedrax.contract.algorithm import Algorithm, ClientOutput
from fedrax.contract.assignment import ClientAssignment
from fedrax.contract.task import Batch
from fedrax.simulation.round import ClientRecord, PhaseResult, Program, Rounds, SingleClient, run_round
from fedrax.tree import Tree
from fedrax.xla import dependent_leaves


class MessageSchema(NamedTuple):
    """One phase, in shapes."""

    message: Tree
    """What goes to a client."""
    sent: ClientOutput
    """What comes from it, whose state stays there."""
    statistics: Tree
    """The model's running statistics, which come with the last phase's uploads."""
    kept: ClientRecord
    """What the client keeps after it."""


class _MessageTracer(SingleClient):
    """A round of one client, whose messages are noted."""

    def __init__(self, *inputs: Any):
        super().__init__(*inputs)
        self.messages: list[Tree] = []

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """As of every executor."""
        self.messages.append(message)
        return super().clients(p, message, statistics)


def message_schemas(
    program: Program, algorithm: Algorithm, params: Tree, statistics: Tree, samples: Batch
) -> list[MessageSchema]:
    """The phases of a round. All trees hold shapes: of the starting parameters and statistics, and of some samples."""
    place = placeholder_assignment()

    def one_round(params: Tree, statistics: Tree, samples: Batch) -> list[MessageSchema]:
        here = Rounds(jnp.int32(0), jnp.float32(1), jnp.int32(1), jax.tree.map(jnp.asarray, place))
        kept = ClientRecord.at_first(algorithm, params, statistics)
        executor = _MessageTracer(program, algorithm, here, jax.random.key(0), kept, samples)
        run_round(executor, algorithm.init(tree.rebuilt(params), program.num_clients), statistics)
        phases = zip(executor.messages, executor.finished, strict=True)
        return [MessageSchema(message, done.output, done.statistics, done.kept) for message, done in phases]

    found = jax.eval_shape(one_round, params, statistics, samples)
    return [one._replace(statistics=one.statistics if p == len(found) - 1 else ()) for p, one in enumerate(found)]


def placeholder_assignment() -> ClientAssignment:
    """A client's place in a round of one, for shapes."""
    zero = np.zeros(1, np.int32)
    return ClientAssignment(zero, zero, zero, zero, np.ones(1, np.float32))


def shapes_of_samples(samples: Any) -> Batch:
    """Shapes and types of samples (x, y) as they are computed with."""
    x, y = (jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for a in samples)
    return Batch(x, y)  # type: ignore[arg-type]


def needs_initial_parameters(algorithm: Algorithm, params: Tree, statistics: Tree) -> bool:
    """Whether what a client keeps at first is made of the starting parameters, and not of their shapes alone."""
    at_first = lambda start: ClientRecord.at_first(algorithm, *start)  # noqa: E731
    return bool(dependent_leaves(at_first, (params, statistics)))
