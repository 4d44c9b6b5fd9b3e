"""Evaluation on each client's own data: of the global model, of personal models, and of fine-tuned copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fedrax import tree, xla
from fedrax.config.arguments import checked_arguments
from fedrax.config.user_errors import translate_errors
from fedrax.contract.algorithm import Algorithm
from fedrax.contract.checks import checked_personal
from fedrax.contract.client_data import ClientAssignment, TrainState
from fedrax.contract.local_training import LocalSGD
from fedrax.contract.model import with_statistics
from fedrax.contract.task import Batch, Task, Variables
from fedrax.data import Federation
from fedrax.errors import FedraxError, warn
from fedrax.host_memory import release_pages
from fedrax.prng.keys import FINETUNING, purpose_key
from fedrax.simulation.evaluation import (
    OUTPUTS,
    Evaluator,
    Metrics,
    UndefinedMetrics,
    evaluate_samples,
    is_lower_better,
    means_of_clients,
    metric_of_means,
    over_clients,
    values_of_clients,
    whole_set_metrics,
    whole_set_of_clients,
)
from fedrax.simulation.executors.compiled import Engine
from fedrax.simulation.executors.execution_plan import make_mesh
from fedrax.simulation.placement.client_states import read_rows
from fedrax.simulation.results.result import PersonalMetrics, Result
from fedrax.simulation.round import ClientRecord, RoundInputs, RoundProgram, client_data, client_inputs, client_keys
from fedrax.simulation.settings import Settings
from fedrax.tree import Tree
from fedrax.xla import CLIENT_AXIS

if TYPE_CHECKING:
    import polars as pl

_ROWS = 100
"""Samples of a client that are evaluated at a time."""
_AT_ONCE_BYTES = 64 << 20
"""Bytes of client states, and of streamed samples on a device, that one call takes."""


class EvaluationMetrics(NamedTuple):
    """Metrics of a state of the run."""

    overall: Metrics
    """Those of all samples as ``{test or train}_{kind}_{metric}``, and statistics over clients if asked for."""
    personal_metrics: PersonalMetrics | None


@dataclass(frozen=True, eq=False)
class PersonalEvaluator:
    """Evaluates each client's model on its own test samples, or on its training samples if test data have no owner."""

    task: Task
    federation: Federation
    settings: Settings
    program: RoundProgram
    engine: Engine
    initial: ClientRecord
    undefined: UndefinedMetrics
    outputs: jax.ShapeDtypeStruct | None
    """The outputs of a client's model for a sample [...], where ``whole_set`` metrics need them."""
    kinds: tuple[str, ...]
    """"personal", where the method has such models, "finetuned", where the settings ask for it."""

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        task: Task,
        federation: Federation,
        settings: Settings,
        program: RoundProgram,
        engine: Engine,
        start: Tree,
        statistics: Tree,
        initial: ClientRecord,
    ) -> PersonalEvaluator | None:
        """The evaluator that a run needs, None if it needs none."""
        personal = lambda x, state: checked_personal(algorithm, algorithm.personal(x, state), x)  # noqa: E731
        with translate_errors(algorithm):
            own = jax.eval_shape(personal, start, initial.state) is not None
        kinds = ("personal",) * own + ("finetuned",) * (settings.finetune is not None)
        if kinds and jax.process_count() > 1:
            raise FedraxError(
                "metrics of personal and fine-tuned models need a run of a single process: leave finetune out, or"
                " choose a method without personal models"
            )
        if "finetuned" in kinds and program.sharded_samples:
            raise FedraxError("fine-tuning needs the training samples on the devices: leave samples or finetune out")
        if not kinds:
            return None
        outputs = None
        if task.whole_set:
            few = jax.tree.map(lambda a: a[:1], Batch(*federation.train))
            made = jax.eval_shape(partial(evaluate_samples, task), with_statistics(start, statistics), few)[OUTPUTS]
            outputs = jax.ShapeDtypeStruct(made.shape[1:], made.dtype)
        return cls(task, federation, settings, program, engine, initial, UndefinedMetrics(task), outputs, kinds)

    def __call__(
        self,
        algorithm: Algorithm,
        params: Tree,
        statistics: Tree,
        store: Tree,
        homes: dict[int, int],
        initial: ClientRecord,
    ) -> EvaluationMetrics:
        """Evaluate all clients' models; ``initial`` is the state of clients that have not participated."""
        sums: list[dict] = []
        outputs = {kind: self._room_for_outputs() for kind in self.kinds if self.outputs is not None}
        for clients in self._groups:
            kept = read_rows(store, homes, initial, clients)
            sizes = np.diff(self._offsets)[clients]
            mine = (kept.state, kept.statistics)
            starts, samples = self._placed(clients)
            found = self._compiled(algorithm, params, statistics, mine, clients, starts, sizes, samples)
            found = jax.tree.map(np.asarray, found)
            for kind, whole in outputs.items():
                for client, size, own in zip(clients, sizes, found[kind].pop(OUTPUTS), strict=True):
                    whole[self._offsets[client] : self._offsets[client + 1]] = own[:size]
            sums.append(found)
        together = jax.tree.map(lambda *parts: np.concatenate(parts)[: self.federation.num_clients], *sums)
        overall: Metrics = {}
        per_client: dict[str, list[float | None]] = {}
        for kind, values in together.items():
            overall |= self._metrics(kind, values, outputs.get(kind))
            per_client |= self._of_clients(kind, values, outputs.get(kind))
        sizes = np.diff(self._offsets)
        self.undefined.warn_of(overall)
        if self.settings.per_client:
            self.undefined.warn_of_clients(per_client, sizes)
            for name, each in per_client.items():
                lower = is_lower_better(self.task, name.partition("_")[2])
                overall |= over_clients(each, sizes, f"{self._prefix}_{name}", lower, range(len(sizes)))
        means = {name: np.array([np.nan if v is None else v for v in each]) for name, each in per_client.items()}
        return EvaluationMetrics(overall, PersonalMetrics(means, self._digest))

    def _room_for_outputs(self) -> np.ndarray:
        """An array for the outputs of all samples [n, ...]."""
        assert self.outputs is not None
        return np.zeros((self._offsets[-1], *self.outputs.shape))

    def _metrics(self, kind: str, sums: dict[str, np.ndarray], outputs: np.ndarray | None) -> Metrics:
        """The metrics of all samples, each evaluated with its client's model."""
        prefix, rows = f"{self._prefix}_{kind}_", np.diff(self._offsets).sum()
        found = {f"{prefix}{name}": metric_of_means(self.task, name, of.sum(0) / rows) for name, of in sums.items()}
        return found if outputs is None else found | whole_set_metrics(self.task, outputs, self._labels[:rows], prefix)

    def _of_clients(
        self, kind: str, sums: dict[str, np.ndarray], outputs: np.ndarray | None
    ) -> dict[str, list[float | None]]:
        """The metrics of each client's samples."""
        sizes = np.diff(self._offsets)
        found = {name: values_of_clients(self.task, name, of, sizes) for name, of in sums.items()}
        if outputs is not None:
            found |= whole_set_of_clients(self.task, outputs, self._labels, self._offsets)
        return {f"{kind}_{name}": values for name, values in found.items()}

    @property
    def _labels(self) -> np.ndarray:
        return self.federation.train.y if self.federation.test_offsets is None else self.federation.test.y

    @cached_property
    def _digest(self) -> int:
        return PersonalMetrics.digest_of(self._labels, self._offsets)

    @property
    def _prefix(self) -> str:
        return "train" if self.federation.test_offsets is None else "test"

    @property
    def _offsets(self) -> np.ndarray:
        offsets = self.federation.test_offsets
        return self.federation.offsets if offsets is None else offsets

    @property
    def _streamed(self) -> bool:
        """Whether the samples to evaluate on are streamed from the host."""
        return self.program.sharded_samples and self.federation.test_offsets is None

    @cached_property
    def _samples(self) -> Batch:
        """The samples to evaluate on, on the devices."""
        if self.federation.test_offsets is None:
            assert self.engine.samples is not None
            return self.engine.samples
        return jax.device_put(Batch(*self.federation.test), NamedSharding(self.engine.mesh, P()))

    def _placed(self, clients: np.ndarray) -> tuple[np.ndarray, Batch]:
        """(first row of each client's samples, the samples on the devices); streamed samples of these clients only."""
        if not self._streamed:
            return self._offsets[clients], self._samples
        mine = clients.reshape(self.engine.devices, -1)
        first, last = self._offsets[mine[:, 0]], self._offsets[mine[:, -1] + 1]
        room = self._most_rows(mine.shape[1])

        def gather(array: np.ndarray) -> np.ndarray:
            rows = np.zeros((len(mine), room, *array.shape[1:]), array.dtype)
            for own, start, end in zip(rows, first, last, strict=True):
                own[: end - start] = array[start:end]
            release_pages(array)
            return rows.reshape(-1, *array.shape[1:])

        samples = jax.tree.map(gather, Batch(*self.federation.train))
        starts = self._offsets[mine] - first[:, None]
        return starts.reshape(-1), jax.device_put(samples, NamedSharding(self.engine.mesh, P(CLIENT_AXIS)))

    def _most_rows(self, each: int) -> int:
        """The most samples of ``each`` consecutive clients."""
        return int(np.diff(np.append(self._offsets[:-1:each], self._offsets[-1])).max())

    @cached_property
    def _groups(self) -> list[np.ndarray]:
        """All clients in groups of one size; the last group is padded with the last client."""
        clients, devices = self.federation.num_clients, self.engine.devices
        each_bytes = tree.num_bytes(self.initial)
        if self.outputs is not None:
            each_bytes += len(self.kinds) * self._chunks * self._rows * self.outputs.size * self.outputs.dtype.itemsize
        fits = max(1, _AT_ONCE_BYTES // max(1, each_bytes))
        each, train = -(-min(clients, fits) // devices), self.federation.train
        row_bytes = sum(part.nbytes for part in train.arrays) / len(train.y)
        # two at least: a loop of a single trip is compiled to other code, which may round otherwise
        while self._streamed and each > 2 and self._most_rows(each) * row_bytes > _AT_ONCE_BYTES:
            each = -(-each // 2)
        size = each * devices
        return [np.minimum(np.arange(first, first + size), clients - 1) for first in range(0, clients, size)]

    @cached_property
    def _compiled(self) -> Callable:
        mesh, by_client = self.engine.mesh, P(CLIENT_AXIS)
        train = self.engine.samples if "finetuned" in self.kinds else ()
        of_samples = by_client if self._streamed else P()
        where = (P(), P(), P(), by_client, by_client, by_client, by_client, of_samples, P())
        mapped = jax.shard_map(self._on_device, mesh=mesh, in_specs=where, out_specs=by_client, check_vma=False)
        evaluate: Callable = xla.jit(mapped)
        return lambda *inputs: evaluate(*inputs, train)

    def _on_device(
        self,
        algorithm: Algorithm,
        params: Tree,
        statistics: Tree,
        kept: tuple[Tree, Tree],
        clients: Array,
        starts: Array,
        sizes: Array,
        samples: Batch,
        train: Any,
    ) -> dict[str, dict[str, Array]]:
        """Sums over each client's samples, {kind: {metric: [clients]}}."""

        def one(at: tuple) -> dict[str, dict[str, Array]]:
            (state, own_statistics), client, start, size = at
            own, models = own_statistics or statistics, {}
            if "personal" in self.kinds:
                models["personal"] = algorithm.personal(params, state)
            if "finetuned" in self.kinds:
                models["finetuned"] = self._finetuned(algorithm, params, own, client, train)
            return {kind: self._sums(model, own, samples, start, size) for kind, model in models.items()}

        return jax.lax.map(one, (kept, clients, starts, sizes))

    def _sums(self, model: Tree, statistics: Tree, samples: Batch, start: Array, size: Array) -> dict[str, Array]:
        if statistics and not isinstance(model, Variables):
            model = Variables(model, statistics)
        last, rows = len(samples.y) - 1, self._rows

        def values(i: Array | int) -> tuple[dict[str, Array], Array | None]:
            lanes = i * rows + jnp.arange(rows)
            part = jax.tree.map(lambda a: a[jnp.minimum(start + lanes, last)], samples)
            found = evaluate_samples(self.task, model, part)
            outputs = found.pop(OUTPUTS, None)
            real = {name: jnp.where((lanes < size).reshape(-1, *[1] * (v.ndim - 1)), v, 0) for name, v in found.items()}
            return {name: value.sum(0) for name, value in real.items()}, outputs

        def add(i: Array, carry: tuple[dict[str, Array], Array | None]) -> tuple[dict[str, Array], Array | None]:
            (sums, outputs), (total, whole) = values(i), carry
            if outputs is not None and whole is not None:
                whole = jax.lax.dynamic_update_slice_in_dim(whole, outputs, i * rows, 0)
            return tree.add(total, sums), whole

        sums, outputs = jax.eval_shape(values, 0)
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), sums)
        room = None if outputs is None else jnp.zeros((self._chunks * rows, *outputs.shape[1:]), outputs.dtype)
        total, whole = jax.lax.fori_loop(0, -(-size // rows), add, (zero, room))
        return total if whole is None else total | {OUTPUTS: whole}

    @property
    def _rows(self) -> int:
        """Samples of a client that are evaluated at a time."""
        return min(_ROWS, int(np.diff(self._offsets).max()))

    @property
    def _chunks(self) -> int:
        """Chunks of samples of the largest client."""
        return -(-int(np.diff(self._offsets).max()) // self._rows)

    def _finetuned(self, algorithm: Algorithm, params: Tree, statistics: Tree, client: Array, train: Batch) -> Tree:
        """The global model after ``settings.finetune`` local epochs on the client's training samples."""
        local = dataclasses.replace(
            algorithm.local_steps or LocalSGD(), steps=None, blocks=None, epochs=self.settings.finetune, carry=False
        )
        offsets = jnp.asarray(self.federation.offsets, jnp.int32)
        zero, one = jnp.int32(0), jnp.ones(1)
        size = (offsets[client + 1] - offsets[client])[None]
        assignment = ClientAssignment(client[None], zero[None], offsets[client][None], size, one)
        here = RoundInputs(zero, one[0], jnp.int32(1), assignment)
        carried = TrainState(statistics)
        keys = client_keys(purpose_key(self.settings.seed, FINETUNING), assignment.client)
        data = client_data(self.program, train, client_inputs(self.program, here, keys, 0)).with_carried(carried)
        tuned = local.run(data.resampled(), params).params
        return with_statistics(tuned, carried.statistics)


_OWN_MODELS = tuple(f"{data}_{kind}_" for data in ("test", "train") for kind in ("personal", "finetuned"))
"""Prefixes of the metrics of models that each client has of its own."""


@checked_arguments
def client_metrics(result: Result, task: Task, federation: Federation) -> pl.DataFrame:
    """Evaluate the final global model on each client's own data.

    Clients are evaluated on their test samples, or on their training samples where test data have no owner. For
    personal methods, and with ``finetune``, metrics of these models follow (``personal_accuracy``,
    ``finetuned_loss``), if the federation is that of the run and the result has client states.

    Args:
        result: the result of a run.
        task: the run's task.
        federation: the clients to evaluate on.

    Returns:
        A table with one row for each client: ``client`` (name or number), ``train_samples``, ``samples`` (evaluated),
        the mean loss and metrics, and ``whole_set`` metrics; null where a value is not defined.

    Raises:
        FedraxError: where the result's model is not the task's.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=1, cohort_size=2)
        >>> fedrax.simulation.client_metrics(result, task, federation).columns
        ['client', 'train_samples', 'samples', 'accuracy', 'loss']
    """
    import polars as pl

    owned = federation.test_offsets is not None
    samples, offsets = (federation.test, federation.test_offsets) if owned else (federation.train, federation.offsets)
    assert offsets is not None
    params = result.model
    if jax.tree.structure(jax.eval_shape(task.init, jax.random.key(0))) != jax.tree.structure(params):
        raise FedraxError("the result is not of this task: its parameters have other names")
    params = jax.tree.map(np.asarray, params)  # a run may have used several devices; one is enough here

    values = Evaluator(task, make_mesh(1), Batch(*samples)).per_sample(params)
    sizes = np.diff(offsets)
    columns = {name: means_of_clients(task, name, each, offsets) for name, each in values.items() if name != OUTPUTS}
    if task.whole_set:
        columns |= whole_set_of_clients(task, values[OUTPUTS], samples.y, offsets)
    if result.personal_metrics is not None and result.personal_metrics.digest == PersonalMetrics.digest_of(
        samples.y, offsets
    ):
        for name, found in result.personal_metrics.values.items():
            columns[name] = [None if np.isnan(value) else float(value) for value in found]
    elif missing := sorted({key for event in result.events for key in event if key.startswith(_OWN_MODELS)}):
        warn(
            f"{missing[0]} of each client is not known: the result has no client states of this federation. A"
            " comparison keeps none; fedrax run with the experiment.toml of its run does"
        )
    UndefinedMetrics(task).warn_of_clients(columns, sizes)
    names = [federation.client_name(i) for i in range(federation.num_clients)]
    return pl.DataFrame({"client": names, "train_samples": federation.sizes, "samples": sizes, **columns})
