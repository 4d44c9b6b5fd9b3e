"""What an attacker sees of one client over some rounds: for audits, in many runs that differ in their randomness."""

from __future__ import annotations

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
from fedrax.tree import Tree

_SIDE_BY_SIDE = 64
_CLIENT, _SERVER = 0, 1


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
) -> np.ndarray:
    """What is seen of a federation whose only client has the samples ``client``, float [runs, numbers].

    seen: by the "server", all that the client sends in each phase of ``rounds`` rounds; by the "public", the
    parameters after each round. Each run begins with ``params`` and has random keys of its own; the same ``seed`` gives
    the same ones, so two worlds to be told apart take two seeds.
    """

    keys = jax.random.split(jax.random.key(seed), runs)
    samples = Batch(jnp.asarray(client.x), jnp.asarray(client.y))
    return np.asarray(_program(task, rounds, seen, min(_SIDE_BY_SIDE, runs))(algorithm, params, samples, keys))


@lru_cache(maxsize=8)
def _program(task: Task, rounds: int, seen: str, side_by_side: int) -> Callable[..., Array]:
    """The compiled function (algorithm, params, samples, keys) -> what is seen with each key: of both worlds."""

    def run(algorithm: Algorithm, params: Tree, samples: Batch, key: Array) -> Array:
        found: list[Tree] = []
        server, state = algorithm.init(params, 1), algorithm.init_client(params)
        for r in range(rounds):
            of_round = jax.random.fold_in(key, r)
            for p, phase in enumerate(algorithm.phases):
                own = jax.random.fold_in(of_round, _CLIENT)
                facts = {"round": r, "num_clients": 1, "cohort_size": 1, "phase": p}
                data = ClientData.alone(task, samples.x, samples.y, own, **facts)
                output = phase.client(phase.broadcast(server), state, data)
                received = jax.tree.map(lambda u: u.astype(summed_dtype(u.dtype)), phase.receive(output.upload))
                cohort = _cohort(received, output, r, jax.random.fold_in(jax.random.fold_in(of_round, _SERVER), p))
                if phase.stacked:
                    cohort = cohort._replace(uploads=jax.tree.map(lambda u: u[None], received))
                state, (server, _) = output.state, phase.server(server, cohort)
                if seen == "server":
                    found.append((output.upload, output.each, output.total))
            if seen == "public":
                found.append(algorithm.params(server))
        return jnp.concatenate([jnp.ravel(leaf).astype(jnp.float32) for leaf in jax.tree.leaves(found)])

    def all_runs(algorithm: Algorithm, params: Tree, samples: Batch, keys: Array) -> Array:
        return jax.lax.map(partial(run, algorithm, params, samples), keys, batch_size=side_by_side)

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
