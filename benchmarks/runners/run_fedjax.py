"""FedJAX: ``fed_avg`` with the ``jit`` backend, or on several devices with ``pmap``."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 uses names that newer JAX has moved
    setattr(jax, "tree_map", jax.tree_util.tree_map)  # noqa: B010 - FedJAX looks it up there

import fedjax
from fedjax.algorithms import fed_avg
from fedjax.core import for_each_client
from fedjax.version import __version__ as fedjax_version

from benchmarks.runners.jax_models import cross_entropy, evaluate, model_of, parameters
from benchmarks.timing import RoundClock, report, runner_arguments


class RestoredJax:
    """JAX with functions that the pmap backend calls and JAX 0.10 removed, and shards without a device axis."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax, name)

    @staticmethod
    def _on_devices(stacked: Any, devices: list[jax.Device]) -> Any:
        return jax.device_put(stacked, NamedSharding(Mesh(np.array(devices), "devices"), PartitionSpec("devices")))

    def device_put_sharded(self, shards: list[Any], devices: list[jax.Device]) -> Any:
        return self._on_devices(jax.tree.map(lambda *each: np.stack(each), *shards), devices)

    def device_put_replicated(self, value: Any, devices: list[jax.Device]) -> Any:
        return self._on_devices(jax.tree.map(lambda each: np.stack([each] * len(devices)), value), devices)

    def device_put(self, shard: jax.Array, device: jax.Device) -> jax.Array:
        return jax.device_put(np.asarray(shard)[0], device)


for_each_client.jax = RestoredJax()


class Ragged(fedjax.ClientDataset):
    """A client whose last batch of an epoch is padded with a mask, where FedJAX fills it from the next epoch."""

    def shuffle_repeat_batch(self, hparams: Any = None, **kwargs):
        batches = self.padded_batch(batch_size=hparams.batch_size)
        return [batch for _ in range(hparams.num_epochs) for batch in batches]


def main() -> None:
    options, workload, arrays = runner_arguments("FedJAX.", channels_last=True, devices=1)
    jax.config.update("jax_num_cpu_devices", options.devices)
    predict = model_of(workload)
    x, y = arrays.x, arrays.y.astype(np.int32)
    kind = Ragged if (np.diff(arrays.offsets) % workload.batch).any() else fedjax.ClientDataset
    clients = [kind({"x": x[arrays.rows(k)], "y": y[arrays.rows(k)]}) for k in range(workload.clients)]

    def loss(params, batch, key):
        return cross_entropy(predict(params, batch["x"]), batch["y"], batch.get(fedjax.EXAMPLE_MASK_KEY))

    gradient = jax.grad(loss)
    with fedjax.for_each_client_backend("pmap" if options.devices > 1 else "jit"):
        algorithm = fed_avg.federated_averaging(
            gradient,
            fedjax.optimizers.sgd(workload.learning_rate),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch, num_epochs=workload.epochs, skip_shuffle=True),
        )
    state = algorithm.init(parameters(workload, arrays.initial))
    key = jax.random.PRNGKey(0)

    clock = RoundClock()
    clock.start()
    for cohort in arrays.cohorts:
        key, round_key = jax.random.split(key)
        keys = jax.random.split(round_key, workload.cohort)
        picked = [(int(k), clients[int(k)], keys[i]) for i, k in enumerate(cohort)]
        state, _ = algorithm.apply(state, picked)
        jax.block_until_ready(state.params)
        clock.tick()

    versions = {"fedjax": fedjax_version, "jax": jax.__version__}
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    report(clock, versions, *evaluate(workload, state.params, arrays), peak and round(peak / 2**20, 1))


if __name__ == "__main__":
    main()
