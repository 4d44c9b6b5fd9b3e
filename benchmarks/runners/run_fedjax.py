"""FedJAX: ``fed_avg`` with the ``jit`` backend."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

import jax
import numpy as np

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 still calls what newer JAX has moved
    setattr(jax, "tree_map", jax.tree_util.tree_map)  # noqa: B010 - FedJAX looks it up there

import fedjax
from fedjax.algorithms import fed_avg
from fedjax.version import __version__ as fedjax_version

from benchmarks.runners.jax_models import cross_entropy, evaluate, model_of, parameters
from benchmarks.timing import RoundClock, report, runner_arguments


class Ragged(fedjax.ClientDataset):
    """A client whose batches end with its samples, the last one padded under a mask: FedJAX's own training fills
    it from the next epoch.
    """

    def shuffle_repeat_batch(self, hparams: Any = None, **kwargs):
        batches = self.padded_batch(batch_size=hparams.batch_size)
        return [batch for _ in range(hparams.num_epochs) for batch in batches]


def main() -> None:
    _, workload, arrays = runner_arguments("FedJAX.", channels_last=True)
    predict = model_of(workload)
    x, y = arrays.x, arrays.y.astype(np.int32)
    kind = Ragged if (np.diff(arrays.offsets) % workload.batch).any() else fedjax.ClientDataset
    clients = [kind({"x": x[arrays.rows(k)], "y": y[arrays.rows(k)]}) for k in range(workload.clients)]

    def loss(params, batch, key):
        return cross_entropy(predict(params, batch["x"]), batch["y"], batch.get(fedjax.EXAMPLE_MASK_KEY))

    gradient = jax.grad(loss)
    with fedjax.for_each_client_backend("jit"):
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
    report(clock, versions, *evaluate(workload, state.params, arrays))


if __name__ == "__main__":
    main()
