"""Loss and metrics of the global parameters on a data set, in chunks spread over the devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax.simulation.engine import AXIS
from fedrax.tree import Tree

_ROWS = 100
"""Of one chunk: a convolution's columns take half a megabyte an image."""


def sample_values(task: Any, params: Tree, samples: Any) -> dict[str, Array]:
    """Loss and every metric of each sample."""
    values = {"loss": task.loss(params, samples, jax.random.key(0))}
    return values | {name: metric(params, samples) for name, metric in task.metrics.items()}


@lru_cache(maxsize=16)
def compiled_evaluation(task: Any, mesh: Mesh, rows: int) -> tuple[Callable, np.ndarray]:
    """(function (params, samples) -> values by name [chunks, rows of a chunk], first row of each chunk)."""
    chunk = min(_ROWS, rows)
    per_device = -(-rows // (chunk * mesh.devices.size))
    starts = np.minimum(np.arange(per_device * mesh.devices.size) * chunk, rows - chunk)  # the last may overlap

    def on_device(params: Tree, samples: Any, starts: Array) -> dict[str, Array]:
        def one(start: Array) -> dict[str, Array]:
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), samples)
            return sample_values(task, params, part)

        # gathered, so that every process of several has all values
        return jax.lax.all_gather(jax.lax.map(one, starts), AXIS, tiled=True)

    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P(), check_vma=False)
    return jax.jit(sharded), starts


class Evaluator:
    """Per-sample loss and metrics on one data set, which it keeps on the devices."""

    def __init__(self, task: Any, mesh: Mesh, samples: Any, offsets: np.ndarray | None = None):
        self.rows = len(jax.tree.leaves(samples)[0])
        self.samples = jax.device_put(samples, NamedSharding(mesh, P()))
        self.offsets = offsets
        self._run, self._starts = compiled_evaluation(task, mesh, self.rows)

    def per_sample(self, params: Tree) -> dict[str, np.ndarray]:
        """Loss and metrics of every sample, float64 [rows] by name."""
        result = {}
        for name, values in self._run(params, self.samples, self._starts).items():
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
                # the last offset ends the last client: rows after it are of clients outside the federation
                sums = np.add.reduceat(np.append(values, 0.0), self.offsets)[:-1]
                by_client = sums[sizes > 0] / sizes[sizes > 0]
                worst = by_client.max() if name == "loss" else by_client.min()
                result[f"{prefix}_{name}_worst_client"] = float(worst)
                result[f"{prefix}_{name}_client_mean"] = float(by_client.mean())
                result[f"{prefix}_{name}_client_std"] = float(by_client.std())
        return result
