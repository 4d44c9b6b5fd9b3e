"""What an attacker sees of one client over some rounds: for audits, in many runs that differ in their randomness."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.contract.algorithm import Algorithm, Info
from fedrax.contract.assignment import ClientAssignment, Layout
from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError
from fedrax.prng.keys import AUDIT, purpose_key
from fedrax.simulation.round import ClientRecord, PhaseResult, Program, Rounds, SingleClient, run_round, serve
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, OperandFormat

Participation = Literal["always", "poisson", "fixed"]
"""How the watched client comes into a round: it is always there; by a coin of its own, and else nobody is; or drawn,
and else a bystander with data of its own is."""
MOST_ROUNDS, MOST_BYTES = 1000, 4 << 30
"""Rounds, which are laid out one after another in the program, and bytes of what is seen of all runs of a world."""
_SIDE_BY_SIDE = 64
_DRAW = 2
"""Of the keys of a round the one of the draw; the client's is 0."""


def observe_client(
    algorithm: Algorithm,
    task: Task,
    params: Tree,
    client: Batch,
    runs: int,
    *,
    rounds: int = 1,
    seen: Literal["server", "public"] = "server",
    seed: int = 0,
    drawn: Participation = "always",
    rate: float = 1.0,
    bystander: Batch | None = None,
    size: int | None = None,
    precision: OperandFormat = "highest",
) -> np.ndarray:
    """What an adversary observes of a federation with one client, in many runs that differ in their randomness.

    Args:
        algorithm: The method that is run.
        task: The learning task.
        params: The parameters that each run begins with.
        client: The samples of the client.
        runs: How many runs to make, each with random keys of its own.
        rounds: Rounds of each run.
        seen: "server" observes everything that the client sends in each phase; "public" observes everything that the
            server sends and reports, and the parameters after each round.
        seed: Determines the random keys. Two worlds to be told apart need two seeds.
        drawn: How the client comes into a round.
        rate: The probability that the client is in a round, where it is drawn; 0 is a world without it.
        bystander: The samples of the client that takes its place with "fixed" draws, of the same shape.
        size: Use only so many of the client's samples, from the first on; all by default.
        precision: The precision of the run's matrix products.

    Returns:
        The observed numbers, float [runs, numbers].

    Raises:
        FedraxError: Draws are to hide a client from the server, there are too many rounds, or the result is too large
            for memory.

    Example:
        >>> model = fedrax.models.Logistic().build((2,), 2)
        >>> task, params = fedrax.classification(model), model.init(jax.random.key(0))
        >>> client = fedrax.contract.Batch(np.ones((1, 2), np.float32), np.array([0]))
        >>> method = fedrax.privacy.ClientDP(inner=fedrax.algorithms.FedSGD(), at="client")
        >>> fedrax.privacy.observe_client(method, task, params, client, runs=3).shape[0]
        3
    """
    if drawn != "always" and seen == "server":
        raise FedraxError("the server knows who takes part: the draw of cohorts hides nobody from it")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise FedraxError(f"a client is watched for 1 to {MOST_ROUNDS} rounds, not {rounds}")
    keys = jax.random.split(purpose_key(seed, AUDIT), runs)
    samples = Batch(jnp.asarray(client.x), jnp.asarray(client.y))
    other = samples if bystander is None else Batch(jnp.asarray(bystander.x), jnp.asarray(bystander.y))
    known = _Known(task, rounds, seen, min(_SIDE_BY_SIDE, runs), drawn, size is not None, precision)
    program = _program(known, CodeFingerprint(algorithm, task))
    own = jnp.int32(len(samples.y) if size is None else size)
    given = (algorithm, params, (samples, other), own, jnp.float32(rate), keys)
    with jax.default_matmul_precision("highest"):  # as in a run
        seen_numbers = math.prod(jax.eval_shape(program, *given).shape)
        if 4 * seen_numbers > MOST_BYTES:
            raise FedraxError(
                f"{runs:,} runs show {seen_numbers:.2g} numbers, over {MOST_BYTES >> 30} GiB: take fewer runs"
            )
        return np.asarray(program(*given))


class _Known(NamedTuple):
    """What a program is compiled for."""

    task: Task
    rounds: int
    seen: str
    side_by_side: int
    drawn: Participation
    some: bool
    """Whether the client may have less than all samples."""
    precision: OperandFormat


class _Watched(SingleClient):
    """A round with the watched client or, where it is not ``there``, with nobody as the server has it."""

    def __init__(self, *inputs: Any, there: Array | None):
        super().__init__(*inputs)
        self.there = there
        self.sent: list[Tree] = []
        """By the server, to everybody."""

    def broadcast(self, p: int, server: Any) -> Tree:
        """As every executor; and it is noted."""
        self.sent.append(super().broadcast(p, server))
        return self.sent[-1]

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """What the client brings or, where it is not there, what a phase without clients does."""
        gathered = super().clients(p, message, statistics)
        if self.there is None:
            return gathered
        nobody = jax.tree.map(jnp.zeros_like, gathered)._replace(clients=jnp.full(1, self.program.num_clients))
        return jax.tree.map(partial(jnp.where, self.there), gathered, nobody)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """As every executor, of a cohort of one or none."""
        size = self.here.cohort_size if self.there is None else self.there.astype(jnp.float32)
        here = self.here._replace(cohort_size=size)
        return serve(self.program, p, self.algorithm, server, gathered, here, self.round_key)


@lru_cache(maxsize=8)
def _program(known: _Known, code: CodeFingerprint) -> Callable[..., Array]:
    """The compiled function (algorithm, params, samples, size, rate, keys) -> observations of all worlds by key."""

    def run(
        algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], size: Array, rate: Array, key: Array
    ) -> Array:
        found: list[Tree] = []
        rows, always = len(clients[0].y), known.drawn == "always"
        layout = Layout(rows, rows - 1, 1) if known.some else Layout(rows, rows, rows)
        program = Program(known.task, layout, 1, 0, precision=known.precision, expected=1.0, code=code)
        zero = jnp.zeros(1, jnp.int32)
        places = ClientAssignment(zero, zero, zero, size[None], jnp.ones(1))
        server, kept = algorithm.init(params, 1), (ClientRecord.at_first(algorithm, params, ()),) * 2
        for r in range(known.rounds):
            there = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, r), _DRAW)) < rate
            choose = partial(jax.tree.map, lambda a, b: a if always else jnp.where(there, a, b))  # noqa: B023
            who = (choose(*kept), choose(*clients)) if known.drawn == "fixed" else (kept[0], clients[0])
            here = Rounds(jnp.int32(r), jnp.float32(1), jnp.int32(1), places)
            executor = _Watched(program, algorithm, here, key, *who, there=there if known.drawn == "poisson" else None)
            server, _, record, _ = run_round(executor, server, ())
            kept = choose(executor.kept, kept[0]), choose(kept[1], executor.kept)
            if known.seen == "server":
                found += [(done.output.upload, done.output.each, done.output.total) for done in executor.finished]
            else:
                said = {name: value for name, value in record.items() if name != "gradients"}
                found += [executor.sent[1:], said, executor.broadcast(0, server), algorithm.params(server)]
        once = {id(leaf): leaf for leaf in jax.tree.leaves(found)}  # most methods send their parameters
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in once.values()])

    def all_runs(
        algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], size: Array, rate: Array, keys: Array
    ) -> Array:
        one = partial(run, algorithm, params, clients, size, rate)
        return jax.lax.map(one, keys, batch_size=known.side_by_side)

    return jax.jit(all_runs)
