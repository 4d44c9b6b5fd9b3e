"""Loss and metrics of the global parameters on a data set, in chunks spread over the devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax.simulation.engine import AXIS
from fedrax.tree import Tree

_ROWS = 500


def _values(task: Any, params: Tree, samples: Any) -> dict[str, Array]:
    """Loss and every metric of each sample."""
    values = {"loss": task.loss(params, samples, jax.random.key(0))}
    return values | {name: metric(params, samples) for name, metric in task.metrics.items()}


class Evaluator:
    """Per-sample loss and metrics on one data set, which it keeps on the devices."""

    def __init__(self, task: Any, mesh: Mesh, samples: Any, offsets: np.ndarray | None = None):
        self.rows = len(jax.tree.leaves(samples)[0])
        self.samples = jax.device_put(samples, NamedSharding(mesh, P()))
        self.offsets = offsets
        chunk = min(_ROWS, self.rows)
        per_device = -(-self.rows // (chunk * mesh.devices.size))

        def on_device(params: Tree, samples: Any) -> dict[str, Array]:
            first = jax.lax.axis_index(AXIS) * per_device

            def one(i: Array) -> dict[str, Array]:
                start = jnp.minimum((first + i) * chunk, self.rows - chunk)  # the last chunk may overlap
                part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), samples)
                return _values(task, params, part)

            return jax.lax.map(one, jnp.arange(per_device))

        self._starts = np.minimum(np.arange(per_device * mesh.devices.size) * chunk, self.rows - chunk)
        self._run = jax.jit(
            partial(jax.shard_map, mesh=mesh, in_specs=(P(), P()), out_specs=P(AXIS), check_vma=False)(on_device)
        )

    def per_sample(self, params: Tree) -> dict[str, np.ndarray]:
        """Loss and metrics of every sample, float64 [rows] by name."""
        result = {}
        for name, values in self._run(params, self.samples).items():
            flat, values = np.empty(self.rows), np.asarray(values)
            for start, chunk in zip(self._starts, values, strict=True):
                flat[start : start + len(chunk)] = chunk
            result[name] = flat
        return result

    def __call__(self, params: Tree, prefix: str, per_client: bool = False) -> dict[str, float]:
        """Means over samples as ``{prefix}_{name}``; per client also the worst, mean and deviation over clients.

        The worst client is the one with the largest loss, or the smallest value of any other metric.
        """
        result = {}
        for name, values in self.per_sample(params).items():
            result[f"{prefix}_{name}"] = float(values.mean())
            if per_client and self.offsets is not None:
                sizes = np.diff(self.offsets)
                sums = np.add.reduceat(np.append(values, 0.0), self.offsets[:-1])
                by_client = sums[sizes > 0] / sizes[sizes > 0]
                worst = by_client.max() if name == "loss" else by_client.min()
                result[f"{prefix}_{name}_worst_client"] = float(worst)
                result[f"{prefix}_{name}_client_mean"] = float(by_client.mean())
                result[f"{prefix}_{name}_client_std"] = float(by_client.std())
        return result
