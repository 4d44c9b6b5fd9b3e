"""Evaluation of the global model on a data set, in chunks of samples that are spread over the devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import xla
from fedrax.contract.task import OfOutputs
from fedrax.errors import FedraxError, warn
from fedrax.host_memory import release_pages
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS, CodeFingerprint, optimize, optimize_forward

Metrics = dict[str, float | None]
"""Metrics by name, None where one is not defined for the samples."""
_ROWS_ON_CPU, _ROWS = 16, 100
"""Samples of a chunk. Activations of 16 images mostly fit a core's cache; accelerators need larger chunks."""
STREAMED_BYTES = 16 << 20
"""Bytes of streamed samples that are sent to the devices at a time."""
_ERRORS = {"loss", "error", "mae", "mse", "rmse", "mape", "nll", "perplexity"}
"""Words in the names of metrics of which smaller values usually are better."""
OUTPUTS = "outputs of the model"
"""Key of the model's outputs beside the metrics' names."""


def sample_values(task: Any, params: Tree, samples: Any) -> dict[str, Array]:
    """Loss and every metric of each sample."""
    return {name: values for name, values in evaluate_samples(task, params, samples).items() if name != OUTPUTS}


def evaluate_samples(task: Any, params: Tree, samples: Any) -> dict[str, Array]:
    """Loss and metrics of each sample, and the model's outputs where ``whole_set`` metrics need them."""
    return optimize(optimize_forward(partial(_evaluate, task)))(params, samples)


def _evaluate(task: Any, params: Tree, samples: Any) -> dict[str, Array]:
    outputs = cache(lambda: task.outputs(params, samples.x))  # computed once for all metrics that use them

    def value(metric: Any) -> Array:
        shared = isinstance(metric, OfOutputs) and metric.outputs is task.outputs
        return metric.of(outputs(), samples) if shared else metric(params, samples)

    metrics = {"loss": task.evaluation_loss, **task.metrics}
    values = {name: value(metric) for name, metric in metrics.items()}
    return values | {OUTPUTS: outputs()} if task.whole_set else values


class TracedEvaluation(NamedTuple):
    """The traced evaluation, a part of a run's identity."""

    programs: tuple[ClosedJaxpr, ...]
    """The traced programs."""
    words: str
    """Names of the metrics, and fingerprints of the ``whole_set`` metrics, which are not traced."""


def trace_evaluation(task: Any, params: Tree, variables: Tree, samples: Any) -> TracedEvaluation:
    """Trace the evaluation of ``variables`` (see ``with_statistics``) on a chunk of samples of these shapes."""
    few = jax.tree.map(lambda a: jax.ShapeDtypeStruct((min(len(a), _ROWS_ON_CPU), *a.shape[1:]), a.dtype), samples)
    made = [jax.make_jaxpr(partial(_evaluate, task))(variables, few)]
    if task.measures is not None:
        made.append(jax.make_jaxpr(task.measures)(params))
    names = (
        sorted(task.metrics),
        {name: CodeFingerprint(metric).describe() for name, metric in sorted(task.whole_set.items())},
    )
    return TracedEvaluation(tuple(made), repr(names))


def parameter_metrics(task: Any, params: Tree) -> dict[str, float]:
    """The task's measures of the parameters, which need no data."""
    if task.measures is None:
        return {}
    return {name: float(value) for name, value in _compiled_measures(task, CodeFingerprint(task))(params).items()}


@xla.owned_cache()
def _compiled_measures(task: Any, code: CodeFingerprint) -> Callable:
    return jax.jit(task.measures)


def _rows_of_a_chunk() -> int:
    return _ROWS_ON_CPU if jax.default_backend() == "cpu" else _ROWS


def chunk_starts(rows: int, devices: int, most: int) -> tuple[int, np.ndarray]:
    """(samples of a chunk, first row of each chunk); all devices have the same number, the last chunks may overlap."""
    chunk = min(most, rows)
    per_device = -(-rows // (chunk * devices))
    return chunk, np.minimum(np.arange(per_device * devices) * chunk, rows - chunk)


@xla.owned_cache()
def compiled_evaluation(
    task: Any, mesh: Mesh, rows: int, most: int, code: CodeFingerprint
) -> tuple[Callable, np.ndarray]:
    """(function (params, samples) -> values by name [chunks, rows of a chunk], first row of each chunk).

    most: rows of a chunk, as of :func:`_rows_of_a_chunk`.
    """
    chunk, starts = chunk_starts(rows, mesh.devices.size, most)

    def on_device(params: Tree, samples: Any, starts: Array) -> dict[str, Array]:
        def one(start: Array) -> dict[str, Array]:
            part = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), samples)
            return evaluate_samples(task, params, part)

        # gathered, so that every process of several has all values
        return jax.lax.all_gather(jax.lax.map(one, starts), CLIENT_AXIS, tiled=True)

    sharded = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(), P(CLIENT_AXIS)), out_specs=P(), check_vma=False)
    # int32 whatever jax_enable_x64 is: given int64, JAX crashes where threads that differ in that call it at once
    return xla.jit(sharded), starts.astype(np.int32)


@xla.owned_cache()
def compiled_chunks(task: Any, mesh: Mesh, code: CodeFingerprint) -> Callable:
    """Function (params, samples [chunks, rows, ...]) -> values by name [chunks, rows]."""

    def on_device(params: Tree, chunks: Any) -> dict[str, Array]:
        return jax.lax.map(lambda part: evaluate_samples(task, params, part), chunks)

    return xla.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(CLIENT_AXIS)), out_specs=P(CLIENT_AXIS), check_vma=False),
    )


class Evaluator:
    """Evaluates loss and metrics on one data set, whose samples are on the devices."""

    def __init__(self, task: Any, mesh: Mesh, samples: Any, offsets: np.ndarray | None = None):
        self.rows = len(jax.tree.leaves(samples)[0])
        self.samples = jax.device_put(samples, NamedSharding(mesh, P()))
        self.task, self.offsets, self._undefined = task, offsets, UndefinedMetrics(task)
        self._run, self._starts = compiled_evaluation(task, mesh, self.rows, _rows_of_a_chunk(), CodeFingerprint(task))

    def per_sample(self, params: Tree) -> dict[str, np.ndarray]:
        """Loss and metrics of every sample, float64 [rows] by name; outputs [rows, ...] where metrics need them."""
        result = {}
        self._collect(result, self._starts, self._run(params, self.samples, self._starts))
        return result

    def _collect(self, result: dict[str, np.ndarray], starts: np.ndarray, values: dict[str, Array]) -> None:
        for name, chunks in values.items():
            found = np.asarray(chunks)
            flat = result.setdefault(name, np.empty((self.rows, *found.shape[2:])))
            rows = starts[:, None] + np.arange(found.shape[1])
            flat[rows.reshape(-1)] = found.reshape(-1, *found.shape[2:])

    def __call__(self, params: Tree, prefix: str, per_client: bool = False) -> Metrics:
        """The metrics as ``{prefix}_{name}``; with ``per_client`` also the statistics of `over_clients`."""
        found, result = self.per_sample(params), {}
        outputs = found.pop(OUTPUTS, None)
        for name, values in found.items():
            result[f"{prefix}_{name}"] = metric_of_means(self.task, name, values.mean(0))
        if outputs is not None:
            result |= whole_set_metrics(self.task, outputs, np.asarray(self.samples[1]), f"{prefix}_")
        self._undefined.warn_of(result)
        if per_client and self.offsets is not None:
            sizes = np.diff(self.offsets)
            each = {name: means_of_clients(self.task, name, values, self.offsets) for name, values in found.items()}
            if outputs is not None:
                each |= whole_set_of_clients(self.task, outputs, np.asarray(self.samples[1]), self.offsets)
            for name, values in each.items():
                lower = is_lower_better(self.task, name)
                result |= over_clients(values, sizes, f"{prefix}_{name}", lower, range(len(sizes)))
            self._undefined.warn_of_clients(each, sizes)
        return result


def metric_of_means(task: Any, name: str, means: np.ndarray) -> float | None:
    """A metric from the mean, or the means [k], of its values over samples."""
    finish = getattr(task.metrics.get(name), "finish", None)
    return float(means) if finish is None else finish(means)


def means_of_clients(task: Any, name: str, values: np.ndarray, offsets: np.ndarray) -> list[float | None]:
    """A metric of each client's samples from its values [rows] or [rows, k], None without samples."""
    # the last offset ends the last client: rows after it are of clients outside the federation
    sums = np.add.reduceat(np.append(values, np.zeros_like(values[:1]), 0), offsets)[:-1]
    return values_of_clients(task, name, sums, np.diff(offsets))


def values_of_clients(task: Any, name: str, sums: np.ndarray, sizes: np.ndarray) -> list[float | None]:
    """A metric of each client's samples from the sums [N] or [N, k] of its values, None without samples."""
    means = (sums.T / np.maximum(sizes, 1)).T
    found = means.tolist() if means.ndim == 1 else [metric_of_means(task, name, mean) for mean in means]
    return [value if size else None for value, size in zip(found, sizes, strict=True)]


def whole_set_metrics(task: Any, outputs: np.ndarray, y: np.ndarray, prefix: str = "") -> Metrics:
    """The ``whole_set`` metrics of these samples; NaN where an output is not finite."""
    if not np.isfinite(outputs).all():
        return {f"{prefix}{name}": np.nan for name in task.whole_set}
    values: dict[str, Any] = {}
    for name, metric in task.whole_set.items():
        value = metric(outputs, y)
        values |= (
            {f"{name}_{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    for name, value in values.items():
        if value is not None and np.shape(value) != ():
            raise FedraxError(
                f"the metric {name!r} of a whole set returns an array of shape {np.shape(value)}: return one number,"
                " None, or a dictionary of numbers by name; compute other values from task.outputs(result.model, x)"
                " after the run"
            )
    return {f"{prefix}{name}": None if value is None else float(value) for name, value in values.items()}


def whole_set_of_clients(
    task: Any, outputs: np.ndarray, y: np.ndarray, offsets: np.ndarray
) -> dict[str, list[float | None]]:
    """The ``whole_set`` metrics of each client's samples, None without samples."""
    rows = [slice(start, end) for start, end in pairwise(offsets)]
    found = [whole_set_metrics(task, outputs[r], y[r]) if r.stop > r.start else {} for r in rows]
    return {name: [each.get(name) for each in found] for name in dict.fromkeys(key for each in found for key in each)}


def split_finite(metrics: Metrics) -> tuple[Metrics, str | None]:
    """The metrics that are finite or not defined, and the name of one that is neither: of a loss where there is one."""
    kept = {name: value for name, value in metrics.items() if value is None or np.isfinite(value)}
    lost = [name for name in metrics if name not in kept]
    return kept, min(lost, key=lambda name: not name.endswith("_loss"), default=None)


class UndefinedMetrics:
    """Warns of metrics that are not defined for the samples, once for each."""

    def __init__(self, task: Any):
        self._task, self._warned = task, set[str]()

    def warn_of(self, metrics: Metrics) -> None:
        """Warn of each metric that is None."""
        for key in [key for key, value in metrics.items() if value is None]:
            self._tell(key, f"{key} is undefined (null)", key)

    def warn_of_clients(self, each: Mapping[str, Sequence[float | None]], sizes: np.ndarray) -> None:
        """Warn of each metric that is None for clients with samples."""
        having = int((sizes > 0).sum())
        for name, values in each.items():
            missing = having - sum(value is not None for value in values)
            everywhere = missing == having and any(key.endswith(f"_{name}") for key in self._warned)
            if missing and not everywhere:  # of all samples together it is undefined, too
                self._tell(f"{name} of clients", f"{name} is undefined (null) for {missing} of {having} clients", name)

    def _tell(self, key: str, what: str, name: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(f"{what}: {self._reason(name)}")

    def _reason(self, name: str) -> str:
        """Why a metric is None."""
        metrics = {**self._task.metrics, **self._task.whole_set}
        own = [known for known in metrics if f"_{known}_" in f"_{name}_"]
        return getattr(metrics[max(own, key=len)], "undefined", "") or "its function returned None" if own else ""


def non_finite_remedy(task: Any, key: str) -> str:
    """The remedy where the metric ``key`` of an event is not finite and the losses are."""
    if any(key.endswith(f"_{name}") for name in task.whole_set):
        return ", though the loss is: of a whole set a metric is None where it is not defined"
    if any(key.endswith(f"_{name}") for name in task.metrics):
        return (
            ", though the loss is: a metric has a value for every sample; metrics that are defined for all samples"
            " together belong into the task's whole_set"
        )
    return ""


PERSONAL = "personal_"
"""Prefix of the metrics of the clients' personal models."""


def is_lower_better(task: Any, name: str) -> bool:
    """Whether smaller values of a metric are better, also of the personal models."""
    name = name.removeprefix(PERSONAL)
    return name == "loss" or name in task.lower_is_better


def warn_of_direction(task: Any, name: str) -> None:
    """Warn of a metric that is named as an error, where larger values count as better."""
    words = set(re.split(r"[^a-z]+", name.lower()))
    if words & _ERRORS and not is_lower_better(task, name):
        warn(
            f"larger values of the metric {name!r} count as better, and its name is that of an error: name it in the"
            f" task's lower_is_better=({name!r},)"
        )


def over_clients(
    values: Sequence[float | None],
    sizes: np.ndarray,
    key: str,
    lower_is_better: bool,
    numbers: Sequence[int] | None = None,
) -> Metrics:
    """Statistics of a metric over the clients for which it is defined.

    Args:
        values: the metric of each client's samples, [N]; None where it is not defined.
        sizes: samples of each client, [N].
        key: the metric's key in events, the prefix of the results.
        lower_is_better: whether the worst client is that with the largest value.
        numbers: the clients' numbers in the federation, [N]; None where they are not reported.

    Returns:
        The worst client's value, number of samples and number (of several such clients the first), 10th, 50th and
        90th percentile, mean and standard deviation; None where no client has a value.
    """
    having = [i for i, value in enumerate(values) if value is not None]
    if not having:
        parts = ("worst_client", "worst_client_samples", "client_p10", "client_p50", "client_p90", "client_mean")
        parts = (*parts, "client_std", *["worst_client_number"] * (numbers is not None))
        return dict.fromkeys(f"{key}_{part}" for part in parts)
    defined = np.array([values[i] for i in having], float)
    worst = int(defined.argmax() if lower_is_better else defined.argmin())
    with np.errstate(invalid="ignore"):  # losses of a diverged model may be infinite
        percentiles = {f"{key}_client_p{p}": float(np.percentile(defined, p)) for p in (10, 50, 90)}
        mean, deviation = float(defined.mean()), float(defined.std())
    return {
        f"{key}_worst_client": float(defined[worst]),
        f"{key}_worst_client_samples": int(sizes[having[worst]]),
        **({} if numbers is None else {f"{key}_worst_client_number": int(numbers[having[worst]])}),
        **percentiles,
        f"{key}_client_mean": mean,
        f"{key}_client_std": deviation,
    }


class StreamedEvaluator(Evaluator):
    """Evaluator for samples on the host: chunks are sent while the devices compute the previous ones."""

    def __init__(
        self,
        task: Any,
        mesh: Mesh,
        samples: Any,
        offsets: np.ndarray | None = None,
        piece_bytes: int = STREAMED_BYTES,
    ):
        self.task, self.offsets, self._undefined = task, offsets, UndefinedMetrics(task)
        self.rows, self.samples = len(jax.tree.leaves(samples)[0]), samples
        self._chunk, self._starts = chunk_starts(self.rows, mesh.devices.size, _rows_of_a_chunk())
        self._run, self._sharding = (
            compiled_chunks(task, mesh, CodeFingerprint(task)),
            NamedSharding(mesh, P(CLIENT_AXIS)),
        )
        row_bytes = sum(a.nbytes for a in jax.tree.leaves(samples)) / self.rows
        # two at least: a loop with one iteration is compiled to other code, which may round differently

        at_once = max(2, int(piece_bytes / (row_bytes * self._chunk * mesh.devices.size)))
        self._at_once = min(at_once * mesh.devices.size, len(self._starts))

    def per_sample(self, params: Tree) -> dict[str, np.ndarray]:
        """Loss and metrics of every sample, float64 [rows] by name."""
        result, before = {}, None
        for first in range(0, len(self._starts), self._at_once):
            starts = self._starts[np.minimum(np.arange(first, first + self._at_once), len(self._starts) - 1)]
            values = self._run(params, jax.device_put(self._take(starts), self._sharding))
            if before is not None:
                self._collect(result, *before)
            before = starts, values
        if before is not None:
            self._collect(result, *before)
        return result

    def _take(self, starts: np.ndarray) -> Any:
        def take(array: np.ndarray) -> np.ndarray:
            piece = np.stack([array[start : start + self._chunk] for start in starts])
            release_pages(array)
            return piece

        return jax.tree.map(take, self.samples)
