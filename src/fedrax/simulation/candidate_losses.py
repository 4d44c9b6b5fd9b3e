"""Losses of the global model on the training samples of single clients, for policies that ask before they sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedrax import tree, xla
from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.simulation.evaluation import STREAMED_BYTES, evaluate_samples
from fedrax.simulation.results.events import Event
from fedrax.tree import Tree
from fedrax.xla import CodeFingerprint

_ROWS = 256
"""Samples evaluated at a time."""
ANSWER_BYTES = 4
"""Bytes of a client's answer: a loss in float32."""


class CandidateLosses:
    """Mean losses of clients that are asked, and the traffic of asking them.

    Args:
        task: the task.
        federation: the clients' data.
        resident: the training samples on the devices; None if they are streamed from the host.
        params: parameters of the model, or their shapes.
        statistics: its running statistics.
    """

    def __init__(self, task: Task, federation: Federation, resident: Any, params: Tree, statistics: Tree):
        self.federation, self.resident = federation, resident
        self.model_bytes = tree.num_bytes((params, statistics))
        self._rows = 0
        """Room for samples, which grows only, to avoid recompilation."""
        row_bytes = sum(a[:1].nbytes for a in jax.tree.leaves(Batch(*federation.train)))
        self._streamed_rows = max(1, STREAMED_BYTES // (row_bytes * _ROWS)) * _ROWS
        self._run = _compiled_losses(task, CodeFingerprint(task))

    def __call__(self, model: Tree, clients: np.ndarray) -> np.ndarray:
        """The mean loss of ``model`` (with its running statistics) on the samples of each client, float64 [d]."""
        if not len(clients):
            return np.zeros(0)
        sizes, starts = self.federation.sizes[clients], self.federation.offsets[clients]
        rows = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        largest = np.sort(self.federation.sizes)[-len(clients) :].sum()
        self._rows = max(self._rows, -(-int(largest) // _ROWS) * _ROWS)
        if self.resident is not None:
            found = [self._run(model, self.resident, self._padded(rows, self._rows))]
        else:
            count = min(self._rows, self._streamed_rows)
            found = [
                self._of_streamed(model, rows[first : first + count], count) for first in range(0, len(rows), count)
            ]
        losses = np.concatenate([np.asarray(part, float).ravel() for part in found])[: len(rows)]
        return np.add.reduceat(losses, np.cumsum(sizes) - sizes) / sizes

    def _of_streamed(self, model: Tree, rows: np.ndarray, count: int) -> Array:
        """The losses of samples on the host, padded to ``count``."""
        padded = np.resize(rows, count)
        samples = jax.tree.map(lambda a: a[padded], Batch(*self.federation.train))
        return self._run(model, samples, self._padded(np.arange(count), count))

    @staticmethod
    def _padded(rows: np.ndarray, count: int) -> np.ndarray:
        """``rows``, repeated to ``count``, by chunk."""
        return np.resize(rows, count).astype(np.int32).reshape(-1, _ROWS)

    def traffic(self, event: Event, asked: int) -> Event:
        """The entries of an event with the bytes of asking ``asked`` clients: the model to each, and its answer."""
        down, up = event["bytes_down"] + asked * self.model_bytes, event["bytes_up"] + asked * ANSWER_BYTES
        return {"bytes_down": down, "bytes_up": up, "asked": asked}


@xla.owned_cache()
def _compiled_losses(task: Any, code: CodeFingerprint) -> Callable:
    """Function (model, samples, rows [chunks, k]) -> the loss of each row [chunks, k]."""

    def losses(model: Tree, samples: Any, rows: Array) -> Array:
        def one(chunk: Array) -> Array:
            return evaluate_samples(task, model, jax.tree.map(lambda a: jnp.asarray(a)[chunk], samples))["loss"]

        return jax.lax.map(one, rows)

    return xla.jit(losses)
