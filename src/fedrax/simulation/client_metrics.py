"""What a model is worth to each client, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from fedrax.contract.task import Batch, Task
from fedrax.data import Federation
from fedrax.errors import FedraxError
from fedrax.simulation.evaluation import OUTPUTS, Evaluator, whole_set_values
from fedrax.simulation.executors.choose import make_mesh
from fedrax.simulation.results.result import OfEach, Result

if TYPE_CHECKING:
    import polars as pl


def per_client(result: Result, task: Task, federation: Federation) -> pl.DataFrame:
    """Loss and metrics of the final global model on each client's own data, a row a client.

    Columns: client (its name, or its number), train_samples, samples (those evaluated on), the loss and every metric,
    means over them, and ``whole_set`` metrics of a client's samples together, null where they are not defined. Where
    clients have models of their own, or ``finetune`` was set, what these are worth follows, as ``personal_accuracy`` or
    ``finetuned_loss``; not of another federation than the run's, nor of a run that was only read. Evaluated on are the
    clients' test samples, or their training samples where test data belong to nobody; a client without test samples has
    nulls.

    Raises FedraxError for a result of another model.
    """
    import polars as pl

    owned = federation.test_offsets is not None
    samples, offsets = (federation.test, federation.test_offsets) if owned else (federation.train, federation.offsets)
    assert offsets is not None
    params = result.variables
    if jax.tree.structure(jax.eval_shape(task.init, jax.random.key(0))) != jax.tree.structure(params):
        raise FedraxError("the result is not of this task: its parameters have other names")
    params = jax.tree.map(np.asarray, params)  # of a run on several devices; here one is enough
    values = Evaluator(task, make_mesh(1), Batch(*samples)).per_sample(params)
    sizes, columns = np.diff(offsets), {}
    for name, each in values.items():
        if name not in ("loss", *task.metrics):
            continue
        sums = np.add.reduceat(np.append(each, 0.0), offsets)[:-1]
        columns[name] = [float(total / size) if size else None for total, size in zip(sums, sizes, strict=True)]
    if task.whole_set:
        rows = [slice(start, start + size) for start, size in zip(offsets[:-1], sizes, strict=True)]
        undefined = dict.fromkeys(task.whole_set)
        at = [whole_set_values(task, values[OUTPUTS][r], samples.y[r]) if r.stop > r.start else undefined for r in rows]
        columns |= {name: [found[name] for found in at] for name in task.whole_set}
    if result.of_each is not None and result.of_each.digest == OfEach.digest_of(samples.y, offsets):
        for name, found in result.of_each.values.items():
            columns[name] = [None if np.isnan(value) else float(value) for value in found]
    names = [federation.client_name(i) for i in range(federation.num_clients)]
    return pl.DataFrame({"client": names, "train_samples": federation.sizes, "samples": sizes, **columns})
