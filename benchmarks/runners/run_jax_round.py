"""A round as JAX users write it by hand: one jitted function, ``vmap`` over clients, ``scan`` over local steps.

The convolutions of G1 and G6 are products with patches, which is faster on GPUs than the grouped convolutions that
``vmap`` makes of the clients' kernels; the other networks are the Flax modules.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.runners.jax_models import cross_entropy, evaluate
from benchmarks.runners.linen_models import module_of, parameters
from benchmarks.timing import RoundClock, report, runner_arguments
from benchmarks.workloads import Workload


def convolution(layer: Any, x: Array, padding: int) -> Array:
    """One product with the patches of all images."""
    height, width, channels, _ = layer["kernel"].shape
    x = jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    rows, columns = x.shape[1] - height + 1, x.shape[2] - width + 1
    patches = [x[:, i : i + rows, j : j + columns] for i in range(height) for j in range(width)]
    return jnp.concatenate(patches, -1) @ layer["kernel"].reshape(height * width * channels, -1) + layer["bias"]


def pooled(x: Array) -> Array:
    """Max pooling of 2x2."""
    n, rows, columns, channels = x.shape
    return x.reshape(n, rows // 2, 2, columns // 2, 2, channels).max((2, 4))


def dropped(x: Array, rate: float, key: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def dense(layer: Any, x: Array) -> Array:
    return x @ layer["kernel"] + layer["bias"]


def dropped_conv_net(params: Any, x: Array, key: Array) -> Array:
    for name in ("convs_0", "convs_1"):
        x = jax.nn.relu(convolution(params[name], x, 0))
    first, second = jax.random.split(key)
    x = jax.nn.relu(dense(params["fc1"], dropped(pooled(x), 0.25, first).reshape(len(x), -1)))
    return dense(params["fc2"], dropped(x, 0.5, second))


def pooled_conv_net(params: Any, x: Array, key: Array) -> Array:
    for name in ("convs_0", "convs_1"):
        x = pooled(jax.nn.relu(convolution(params[name], x, 2)))
    return dense(params["fc2"], jax.nn.relu(dense(params["fc1"], x.reshape(len(x), -1))))


BY_HAND = {"DroppedConvNet": dropped_conv_net, "PooledConvNet": pooled_conv_net}


def merged(trained: Any, frozen: Any) -> Any:
    """Two trees of parameters as one."""
    if not (isinstance(trained, dict) and isinstance(frozen, dict)):
        return trained
    both = {name: merged(trained[name], frozen[name]) for name in trained.keys() & frozen.keys()}
    return {**frozen, **trained, **both}


def make_round(workload: Workload, size: int) -> Any:
    """(parameters, frozen parameters, samples [N, size, ...], labels, cohort [S], key) -> parameters."""
    apply: Any = BY_HAND.get(workload.network)
    if apply is None:
        module = module_of(workload)
        apply = lambda params, x, key: module.apply({"params": params}, x)  # noqa: E731

    def loss(params: Any, frozen: Any, x: Array, y: Array, key: Array) -> Array:
        return cross_entropy(apply(merged(params, frozen), x, key), y)

    def client(params: Any, frozen: Any, x: Array, y: Array, key: Array) -> Any:
        steps = size // workload.batch

        def step(params: Any, inputs: Any) -> tuple[Any, None]:
            gradient = jax.grad(loss)(params, frozen, *inputs)
            return jax.tree.map(lambda w, g: w - workload.learning_rate * g, params, gradient), None

        batches = (a.reshape(steps, workload.batch, *a.shape[1:]) for a in (x, y))
        return jax.lax.scan(step, params, (*batches, jax.random.split(key, steps)))[0]

    @partial(jax.jit, donate_argnums=0)
    def one_round(params: Any, frozen: Any, x: Array, y: Array, cohort: Array, key: Array) -> Any:
        keys = jax.random.split(key, workload.cohort)
        ends = jax.vmap(client, (None, None, 0, 0, 0))(params, frozen, x[cohort], y[cohort], keys)
        return jax.tree.map(lambda w: w.mean(0), ends)

    return one_round


def main() -> None:
    arguments, workload, arrays = runner_arguments("JAX by hand.", channels_last=True)
    size = arrays.size(0)
    by_client = lambda a: jnp.asarray(a.reshape(workload.clients, size, *a.shape[1:]))  # noqa: E731
    x, y, cohorts = by_client(arrays.x), by_client(arrays.y.astype("int32")), jnp.asarray(arrays.cohorts, jnp.int32)
    trained, frozen = (
        parameters({name: w for name, w in arrays.initial.items() if workload.is_trained(name) == kind})
        for kind in (True, False)
    )
    one_round, key, clock = make_round(workload, size), jax.random.key(0), RoundClock()
    with jax.default_matmul_precision({"highest": "highest"}.get(arguments.precision, "tensorfloat32")):
        clock.start()
        for r, cohort in enumerate(cohorts):
            trained = jax.block_until_ready(one_round(trained, frozen, x, y, cohort, jax.random.fold_in(key, r)))
            clock.tick()
    found = evaluate(workload, merged(trained, frozen), arrays)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    report(clock, {"jax": jax.__version__}, *found, peak and round(peak / 2**20, 1))


if __name__ == "__main__":
    main()
