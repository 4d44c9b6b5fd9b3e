"""Audit game: an adversary's observations of one client, in many runs with independent randomness."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.config.arguments import checked_arguments
from fedrax.contract.algorithm import Algorithm, Info
from fedrax.contract.assignment import ClientAssignment, Layout
from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError
from fedrax.prng.keys import AUDIT, purpose_key
from fedrax.simulation.round import (
    ClientRecord,
    PhaseResult,
    RoundInputs,
    RoundProgram,
    SingleClientExecutor,
    run_round,
    run_server,
)
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint, OperandFormat

Participation = Literal["always", "poisson", "fixed"]
"""Participation of the audited client: in every round; in a round with some probability, else the cohort is empty; or
with some probability, else a bystander with other data replaces it."""
MAX_ROUNDS, MAX_BYTES = 1000, 4 << 30
"""Limits of the rounds, which are unrolled in the compiled program, and of the observations of all runs."""
_RUNS_AT_ONCE = 64
"""Runs that are vectorized."""
_DRAW = 2
"""Number folded into a round's key for the participation draw; the client's is 0."""


@checked_arguments
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
        runs: Number of runs, each with its own random keys.
        rounds: Rounds of each run.
        seen: "server" observes everything that the client sends in each phase; "public" observes everything that the
            server sends and reports, and the parameters after each round.
        seed: Seed of the random keys. The two hypotheses of an audit need different seeds.
        drawn: How the client participates.
        rate: Probability that the client participates in a round, unless ``drawn`` is "always"; 0 is the hypothesis
            without it.
        bystander: The samples of the client that replaces it if ``drawn`` is "fixed", of the same shape.
        size: Use only so many of the client's samples, from the first on; all by default.
        precision: The precision of the run's matrix products.

    Returns:
        The observed numbers, float [runs, numbers].

    Raises:
        FedraxError: ``drawn`` is not "always" for the adversary "server", there are too many rounds, or the result is
            too large for memory.

    Example:
        >>> model = fedrax.models.Logistic().build((2,), 2)
        >>> task, params = fedrax.classification(model), model.init(jax.random.key(0))
        >>> client = fedrax.contract.Batch(np.ones((1, 2), np.float32), np.array([0]))
        >>> method = fedrax.privacy.ClientDP(inner=fedrax.algorithms.FedSGD(), at="client")
        >>> fedrax.privacy.observe_client(method, task, params, client, runs=3).shape[0]
        3
    """
    if drawn != "always" and seen == "server":
        raise FedraxError(
            "the server knows the cohort, so that sampling hides no client from it: set drawn to 'always'"
        )
    if not 1 <= rounds <= MAX_ROUNDS:
        raise FedraxError(f"rounds must be 1 to {MAX_ROUNDS}, not {rounds}")
    keys = jax.random.split(purpose_key(seed, AUDIT), runs)
    samples = jax.tree.map(jnp.asarray, client)
    other = samples if bystander is None else jax.tree.map(jnp.asarray, bystander)
    options = _StaticOptions(task, rounds, seen, min(_RUNS_AT_ONCE, runs), drawn, size is not None, precision)
    program = _program(options, CodeFingerprint(algorithm, task))
    own = jnp.int32(len(samples.y) if size is None else size)
    given = (algorithm, params, (samples, other), own, jnp.float32(rate), keys)
    with jax.default_matmul_precision("highest"):  # as in a run
        seen_numbers = math.prod(jax.eval_shape(program, *given).shape)
        if 4 * seen_numbers > MAX_BYTES:
            raise FedraxError(
                f"{runs:,} runs give {seen_numbers:.2g} observed numbers, over {MAX_BYTES >> 30} GiB: use fewer runs"
            )
        return np.asarray(program(*given))


class _StaticOptions(NamedTuple):
    """Static options of the compiled program."""

    task: Task
    rounds: int
    seen: str
    runs_at_once: int
    drawn: Participation
    subset: bool
    """Whether the client may use fewer than all samples."""
    precision: OperandFormat


class _AuditedRound(SingleClientExecutor):
    """A round whose cohort is the audited client or, if it is not ``there``, empty."""

    def __init__(self, *inputs: Any, there: Array | None):
        super().__init__(*inputs)
        self.there = there
        self.sent: list[Tree] = []
        """Broadcast messages of all phases."""

    def broadcast(self, p: int, server: Any) -> Tree:
        """The broadcast message, which is also recorded."""
        self.sent.append(super().broadcast(p, server))
        return self.sent[-1]

    def clients(self, p: int, message: Tree, statistics: Tree) -> PhaseResult:
        """The result of the client or, if it is not there, of an empty cohort."""
        gathered = super().clients(p, message, statistics)
        if self.there is None:
            return gathered
        empty = jax.tree.map(jnp.zeros_like, gathered)
        empty = empty._replace(rows=empty.rows._replace(clients=jnp.full(1, self.program.num_clients)))
        return jax.tree.map(partial(jnp.where, self.there), gathered, empty)

    def server(self, p: int, server: Any, gathered: PhaseResult) -> tuple[Any, Info]:
        """The server step for a cohort of one client or none."""
        size = self.round_inputs.cohort_size if self.there is None else self.there.astype(jnp.float32)
        round_inputs = self.round_inputs._replace(cohort_size=size)
        return run_server(self.program, p, self.algorithm, server, gathered, round_inputs, self.round_key)


@lru_cache(maxsize=8)
def _program(options: _StaticOptions, code: CodeFingerprint) -> Callable[..., Array]:
    """The compiled function (algorithm, params, samples, size, rate, keys) -> observations [runs, numbers]."""

    def run(
        algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], size: Array, rate: Array, key: Array
    ) -> Array:
        observed: list[Tree] = []
        rows, always = len(clients[0].y), options.drawn == "always"
        layout = Layout(rows, rows - 1, 1) if options.subset else Layout(rows, rows, rows)
        program = RoundProgram(
            options.task, layout, 1, 0, precision=options.precision, expected_cohort_size=1.0, code=code
        )
        zero = jnp.zeros(1, jnp.int32)
        assignments = ClientAssignment(zero, zero, zero, size[None], jnp.ones(1))
        server, kept = algorithm.init(params, 1), (ClientRecord.at_first(algorithm, params, ()),) * 2
        for r in range(options.rounds):
            there = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, r), _DRAW)) < rate
            choose = partial(jax.tree.map, lambda a, b: a if always else jnp.where(there, a, b))  # noqa: B023
            participant = (choose(*kept), choose(*clients)) if options.drawn == "fixed" else (kept[0], clients[0])
            round_inputs = RoundInputs(jnp.int32(r), jnp.float32(1), jnp.int32(1), assignments)
            executor = _AuditedRound(
                program, algorithm, round_inputs, key, *participant, there=there if options.drawn == "poisson" else None
            )
            server, _, record, _ = run_round(executor, server, ())
            kept = choose(executor.record, kept[0]), choose(kept[1], executor.record)
            if options.seen == "server":
                observed += [(done.output.upload, done.output.each, done.output.total) for done in executor.finished]
            else:
                reported = {name: value for name, value in record.items() if name != "gradients"}
                observed += [executor.sent[1:], reported, executor.broadcast(0, server), algorithm.params(server)]
        unique = {
            id(leaf): leaf for leaf in jax.tree.leaves(observed)
        }  # most methods send their parameters, which are observed twice
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in unique.values()])

    def all_runs(
        algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], size: Array, rate: Array, keys: Array
    ) -> Array:
        one = partial(run, algorithm, params, clients, size, rate)
        return jax.lax.map(one, keys, batch_size=options.runs_at_once)

    return jax.jit(all_runs)
