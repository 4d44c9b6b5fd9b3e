"""A round of `benchmarks.networks` as a user of Flax would write it without fedrax: ``... run_jax_network NAME``.

A jitted SGD step, called for each batch of each client.
"""

from __future__ import annotations

import inspect
import itertools
import json
import statistics
import sys
import time
from typing import Any

from benchmarks.network_cases import CASES, CLIENTS, LEARNING_RATE
from benchmarks.timing import RESULT_PREFIX

ROUNDS = 4


def main() -> None:
    print(RESULT_PREFIX + json.dumps(measure(sys.argv[1])), flush=True)


def measure(name: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """Seconds of a round, seconds from process start to the end of the first round, number of parameters."""
    started = time.monotonic()
    import jax
    import optax

    from benchmarks.runners.linen_networks import network

    case, module = CASES[name], network(name)
    x, y = case.arrays()
    training = {"train": True} if "train" in inspect.signature(module.__call__).parameters else {}

    @jax.jit
    def step(params: Any, rest: Any, x: Any, y: Any, key: Any) -> tuple[Any, Any]:
        def loss(params: Any) -> tuple[Any, Any]:
            variables, rngs = {"params": params, **rest}, {"dropout": key}
            outputs, after = module.apply(variables, x, **training, rngs=rngs, mutable=list(rest))
            return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), after

        gradients, after = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, gradients), after

    @jax.jit
    def add(total: Any, part: Any) -> Any:
        return jax.tree.map(lambda t, p: t + p / CLIENTS, total, part)

    server = dict(jax.jit(module.init)(jax.random.key(0), x[:1]))
    key, ends = jax.random.key(1), []
    for _ in range(rounds):
        total = jax.tree.map(lambda p: 0 * p, server)
        for _ in range(CLIENTS):
            params, rest = server["params"], {name: part for name, part in server.items() if name != "params"}
            for first in range(0, len(x), case.batch):
                key, own = jax.random.split(key)
                params, rest = step(params, rest, x[first : first + case.batch], y[first : first + case.batch], own)
            total = add(total, {"params": params, **rest})
        server = jax.block_until_ready(total)
        ends.append(time.monotonic())
    return {
        "round": statistics.median(after - before for before, after in itertools.pairwise(ends)),
        "first": ends[0] - started,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(server["params"])),
    }


if __name__ == "__main__":
    main()
