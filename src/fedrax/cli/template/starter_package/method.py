"""The method: FedAvg whose uploads are clipped."""

import jax.numpy as jnp

from fedrax import Averaging, ClientOutput, hyperparameters, tree
from fedrax.contract import Positive


@hyperparameters
class ClippedAvg(Averaging):
    """FedAvg; the norm of each upload is at most ``limit``, a key of [algorithm] in experiment.toml."""

    limit: Positive = 1.0

    def client(self, message, state, data):
        """Run the local steps from the global parameters, and upload the clipped update."""
        result = self.local.run(data, message)
        update = tree.sub(result.params, message)
        factor = jnp.minimum(1, self.limit / jnp.maximum(tree.norm(update), 1e-12))
        return ClientOutput(upload=tree.scale(factor, update), info=result.info)
