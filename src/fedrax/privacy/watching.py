"""What an attacker sees of one client over some rounds: for audits, in many runs that differ in their randomness."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax.contract.algorithm import Algorithm, ClientOutput, Cohort, summed_dtype
from fedrax.contract.client_data import ClientData
from fedrax.contract.task import Batch, Task
from fedrax.errors import FedraxError
from fedrax.tree import Tree

Drawn = Literal["always", "poisson", "fixed"]
"""How the watched client comes into a round: it is always there; by a coin of its own, and else nobody is; or drawn,
and else a bystander with data of its own is."""
MOST_ROUNDS, MOST_BYTES = 1000, 4 << 30
"""Rounds, which are laid out one after another in the program, and bytes of what is seen of all runs of a world."""
_SIDE_BY_SIDE = 64
_CLIENT, _SERVER, _DRAW = 0, 1, 2


def watch(
    algorithm: Algorithm,
    task: Task,
    params: Tree,
    client: Batch,
    runs: int,
    *,
    rounds: int = 1,
    seen: Literal["server", "public"] = "server",
    seed: int = 0,
    drawn: Drawn = "always",
    rate: float = 1.0,
    bystander: Batch | None = None,
) -> np.ndarray:
    """What is seen of a federation whose only client has the samples ``client``, float [runs, numbers].

    seen: by the "server", all that the client sends in each phase of ``rounds`` rounds; by the "public", the
    parameters after each round. Each run begins with ``params`` and has random keys of its own; the same ``seed`` gives
    the same ones, so two worlds to be told apart take two seeds. drawn, rate: how the client comes into a round, and
    with which chance; 0 is a world without it. bystander: samples of the same shape of the client in its place.

    Raises FedraxError where draws are to hide a client from the server, and for more than memory should hold.
    """
    if drawn != "always" and seen == "server":
        raise FedraxError("the server knows who takes part: the draw of cohorts hides nobody from it")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise FedraxError(f"a client is watched for 1 to {MOST_ROUNDS} rounds, not {rounds}")
    keys = jax.random.split(jax.random.key(seed), runs)
    samples = Batch(jnp.asarray(client.x), jnp.asarray(client.y))
    other = samples if bystander is None else Batch(jnp.asarray(bystander.x), jnp.asarray(bystander.y))
    program = _program(task, rounds, seen, min(_SIDE_BY_SIDE, runs), drawn)
    given = (algorithm, params, (samples, other), jnp.float32(rate), keys)
    seen_numbers = math.prod(jax.eval_shape(program, *given).shape)
    if 4 * seen_numbers > MOST_BYTES:
        raise FedraxError(
            f"{runs:,} runs show {seen_numbers:.2g} numbers, over {MOST_BYTES >> 30} GiB: take fewer runs"
        )
    return np.asarray(program(*given))


@lru_cache(maxsize=8)
def _program(task: Task, rounds: int, seen: str, side_by_side: int, drawn: Drawn) -> Callable[..., Array]:
    """The compiled function (algorithm, params, samples, rate, keys) -> what is seen with each key: of all worlds."""

    def run(algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], rate: Array, key: Array) -> Array:
        found: list[Tree] = []
        server, states = algorithm.init(params, 1), (algorithm.init_client(params),) * 2
        for r in range(rounds):
            of_round = jax.random.fold_in(key, r)
            there = jax.random.uniform(jax.random.fold_in(of_round, _DRAW)) < rate
            choose = partial(jax.tree.map, lambda a, b: a if drawn == "always" else jnp.where(there, a, b))  # noqa: B023
            samples = choose(*clients) if drawn == "fixed" else clients[0]
            state = choose(*states) if drawn == "fixed" else states[0]
            for p, phase in enumerate(algorithm.phases):
                own = jax.random.fold_in(of_round, _CLIENT)
                facts = {"round": r, "num_clients": 1, "cohort_size": 1, "phase": p}
                data = ClientData.alone(task, samples.x, samples.y, own, **facts)
                output = phase.client(phase.broadcast(server), state, data)
                received = jax.tree.map(lambda u: u.astype(summed_dtype(u.dtype)), phase.receive(output.upload))
                cohort = _cohort(received, output, r, jax.random.fold_in(jax.random.fold_in(of_round, _SERVER), p))
                if drawn == "poisson":
                    nothing = jax.tree.map(jnp.zeros_like, received)
                    cohort = cohort._replace(mean=choose(received, nothing), size=there.astype(jnp.float32))
                if phase.stacked:
                    cohort = cohort._replace(uploads=jax.tree.map(lambda u: u[None], received))
                state, (server, _) = output.state, phase.server(server, cohort)
                if seen == "server":
                    found.append((output.upload, output.each, output.total))
            states = choose(state, states[0]), choose(states[1], state)
            if seen == "public":
                found.append(algorithm.params(server))
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(found)])

    def all_runs(algorithm: Algorithm, params: Tree, clients: tuple[Batch, Batch], rate: Array, keys: Array) -> Array:
        return jax.lax.map(partial(run, algorithm, params, clients, rate), keys, batch_size=side_by_side)

    return jax.jit(all_runs)


def _cohort(received: Tree, output: ClientOutput, round: int, key: Array) -> Cohort:
    """The cohort of the one client."""
    one = jnp.float32(1)
    return Cohort(
        mean=received,
        each=jax.tree.map(lambda e: e[None], output.each),
        total=output.total,
        clients=jnp.zeros(1, jnp.int32),
        weights=jnp.ones(1),
        size=one,
        num_clients=1,
        round=jnp.int32(round),
        key=key,
        expected=one,
    )
