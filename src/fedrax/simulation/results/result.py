"""Result of a simulation, and the snapshots that callbacks receive."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedrax import xla
from fedrax.config.arguments import checked_arguments
from fedrax.contract.model import Params, Variables, with_statistics
from fedrax.errors import FedraxError, unknown, warn
from fedrax.escaping import escape_matplotlib
from fedrax.inputs import arrays_of, map_inputs
from fedrax.simulation.persistence.model_file import save_model
from fedrax.simulation.process import numeric_context
from fedrax.simulation.results.events import Event, rounds_done
from fedrax.simulation.results.message_recorder import RecordedExchange
from fedrax.tree import Tree

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

    from fedrax.contract.algorithm import Algorithm
    from fedrax.contract.task import Task
    from fedrax.privacy.ledger import PrivacySpent

_BATCH = 1024
"""Samples of one evaluation of the model in ``predict``."""


@xla.owned_cache()
def _compiled_outputs(outputs: Any) -> Any:
    """The compiled outputs of a task, so that predictions of one task share their programs."""
    return xla.jit(outputs)


@dataclass(frozen=True, repr=False)
class Snapshot:
    """State of a run after an evaluation, as callbacks receive it; arrays are on the host.

    Example:
        >>> fedrax.simulation.Snapshot({"round": 3, "test_loss": 0.5}, params={"w": np.zeros(2)}, statistics=())
        Snapshot: round 3
          test loss: 0.5
    """

    event: Event
    """The round's event, with its metrics."""
    params: Tree
    """The global parameters."""
    statistics: Tree
    """The model's running statistics; empty where it has none."""

    def __repr__(self) -> str:
        """The round and its metrics."""
        return "\n".join([f"Snapshot: round {self.event['round']}", *_metric_lines(self.event)])

    @property
    def model(self) -> Params:
        """The global model as the task's functions take it: parameters, or `Variables` with running statistics."""
        return with_statistics(self.params, self.statistics)

    def save(self, path: Path | str) -> None:
        """Write the model as a safetensors file for :func:`fedrax.simulation.load_model`.

        Args:
            path: the file.
        """
        save_model(path, self.params, self.statistics)


class PersonalMetrics(NamedTuple):
    """Metrics of the clients' personal and fine-tuned models, for each client."""

    values: dict[str, np.ndarray]
    """Means over each client's samples, [N] by name (``personal_accuracy``); NaN for a client without samples."""
    digest: int
    """Digest of the labels that were evaluated on and of the clients they belong to."""

    @staticmethod
    def digest_of(y: np.ndarray, offsets: np.ndarray) -> int:
        """The digest of labels [n, ...], grouped by client."""
        return zlib.crc32(np.ascontiguousarray(y).data, zlib.crc32(np.ascontiguousarray(offsets).data))


@dataclass(frozen=True, repr=False)
class Result:
    """Result of a run.

    Example:
        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> federation = fedrax.Federation.from_arrays(x, y, client_ids=[0, 0, 1, 1], test=(x, y), num_classes=2)
        >>> task = fedrax.classification(fedrax.models.Logistic().build((4,), 2))
        >>> result = fedrax.simulate(fedrax.FedAvg(), task, federation, rounds=2, cohort_size=2, progress=False)
        >>> [round for round, accuracy in result.metric("test_accuracy")]
        [1, 2]
    """

    params: Tree
    """The global parameters after the last round."""
    server: Any
    """The algorithm's server state."""
    events: list[Event]
    """One event for each round."""
    plan: str
    """The execution plan, as text."""
    stopped: str
    """Why the run ended: ``"rounds"``, ``"target"``, ``"budget"`` (of privacy), ``"callback"``, or ``"diverged"`` where
    a number was not finite (:func:`fedrax.sweep`); the result then holds the rounds before and no client states.
    ``"checkpoint"`` where it has not ended, and the result is that of its last checkpoint."""
    directory: Path | None = None
    """The run directory, if the run has one."""
    spent: PrivacySpent | None = None
    """Privacy spent by a private run."""
    lower_is_better: tuple[str, ...] = ()
    """The task's metrics of which smaller values are better."""
    statistics: Tree = ()
    """The model's running statistics after the last round, averaged over clients; empty where it has none."""
    trajectory: list[Tree] = field(default_factory=list)
    """The global parameters after every round, or after those asked for, on the host."""
    exchanges: list[RecordedExchange] = field(default_factory=list)
    """Messages of the recorded clients, round by round; see :class:`MessageSelection`."""
    store: Tree = ()
    """Client states, [rows, ...]."""
    homes: dict[int, int] = field(default_factory=dict)
    """The row in ``store`` of each client that participated."""
    initial_client: Any = None
    """State of a client that has not participated."""
    algorithm: Algorithm | None = None
    """The method of the run."""
    task: Task | None = None
    """The task of the run."""
    num_clients: int = 0
    """N, the clients of the federation."""
    personal_metrics: PersonalMetrics | None = None
    """Metrics of personal and fine-tuned models in the last evaluation; None for runs without such models
    and for results without client states."""

    def __repr__(self) -> str:
        """Rounds, plan, traffic and the last value of every metric."""
        last: dict[str, float] = {}
        for event in self.events:
            last |= event
        sent = (last.get("bytes_down", 0) + last.get("bytes_up", 0)) / 1e6
        lines = [f"Result: {rounds_done(self.events)} rounds ({self.stopped}), {self.plan}, {sent:.4g} MB sent"]
        lines += _metric_lines(last)
        lines += [f"  {note}" for note in (self.task.notes if self.task is not None else ())]
        lines += [] if self.spent is None else [f"  {self.spent}"]
        return "\n".join([*lines, *([f"  kept in {self.directory}"] if self.directory else [])])

    @property
    def model(self) -> Params:
        """The global model as the task's functions take it: parameters, or `Variables` with running statistics.

        For instance ``task.outputs(result.model, x)``; :meth:`predict` does it in batches.
        """
        return with_statistics(self.params, self.statistics)

    def client_state(self, client: int) -> Tree:
        """Return the state of a client after the last round; the initial one if it never participated.

        Args:
            client: number of the client.

        Returns:
            The algorithm's client state.

        Raises:
            FedraxError: for an unknown client, for a run that diverged, and for one that was saved with
                ``keep_clients=False``.
        """
        return self._record(client).state

    def client_model(self, client: int) -> Params:
        """Return the model of a client after the last round, as the task's functions take it.

        Of a method with personal models these are the client's parameters, otherwise the global ones. Running
        statistics are those of the client where the method keeps them there (FedBN), otherwise the global ones.

        Args:
            client: number of the client.

        Returns:
            The parameters, or `Variables` where the model has running statistics.

        Raises:
            FedraxError: as :meth:`client_state`.
        """
        record, algorithm = self._record(client), self.algorithm
        own = None if algorithm is None else algorithm.personal(self.params, record.state)
        if isinstance(own, Variables):
            return own
        return with_statistics(self.params if own is None else own, record.statistics or self.statistics)

    def predict(self, x: Any, client: int | None = None) -> np.ndarray:
        """Compute the model's outputs in evaluation mode, in the run's dtype and with full precision of products.

        Args:
            x: inputs [n, ...] as the data set stores them, an array or several.
            client: number of a client, for the outputs of its model (see :meth:`client_model`); None: the global model.

        Returns:
            The outputs [n, ...], for instance logits.

        Raises:
            FedraxError: for a task without ``outputs``, for texts, and as :meth:`client_state`.
        """
        outputs = None if self.task is None else self.task.outputs
        if outputs is None:
            raise FedraxError("predict needs a task with outputs: give Task(..., outputs=...)")
        x = map_inputs(np.asarray, dict(x) if isinstance(x, Mapping) else x)
        if any(array.dtype.kind in "USO" for array in arrays_of(x)):
            raise FedraxError(
                "predict takes inputs as the data set stores them, not texts: encode texts with"
                " fedrax.data.encode_words and the federation's vocabulary, or fedrax.data.encode_texts"
            )
        rows, model = len(arrays_of(x)[0]), self.model if client is None else self.client_model(client)
        wide = any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(model))
        with numeric_context("float64" if wide else "float32"):  # as the run's evaluations
            compiled = _compiled_outputs(outputs)
            batches = (map_inputs(itemgetter(slice(at, at + _BATCH)), x) for at in range(0, max(1, rows), _BATCH))
            parts = [compiled(model, batch) for batch in batches]
            return np.concatenate([np.asarray(part) for part in parts])

    def _record(self, client: int) -> Any:
        """The record of a client, which is the initial one if it never participated."""
        if self.initial_client is None:
            raise FedraxError(f"this result has no client states: {self._why_without_clients()}")
        if not isinstance(client, int | np.integer) or not 0 <= client < self.num_clients:
            raise FedraxError(
                f"clients are numbered from 0 to {self.num_clients - 1}, and there is no client {client!r}"
            )
        if client not in self.homes:
            return self.initial_client
        return jax.tree.map(lambda a: a[self.homes[client]], self.store)

    def _why_without_clients(self) -> str:
        if self.stopped == "diverged":
            return "the run diverged, and they are those after the failure"
        if not self.num_clients:
            return "in a federation on Flower they stay at the clients"
        return "the run was finished with keep_clients=False, as those of a comparison are; run it again without"

    def metric(self, name: str) -> list[tuple[int, float]]:
        """Return all values of a metric.

        Args:
            name: name of the metric in events.

        Returns:
            (round, value) for each round that has a value; none where the metric is not defined, with a warning.

        Raises:
            FedraxError: for a name that no event has.
        """
        self._check_known(name)
        values = [(event["round"], event[name]) for event in self.events if event.get(name) is not None]
        if self.events and not values:
            warn(f"{name} is undefined (null) in every round that reports it: it has no values")
        return values

    def cost_to_target(self, metric: str, value: float) -> dict[str, float] | None:
        """Return the cost until a metric first reaches a target.

        Args:
            metric: name of the metric in events.
            value: the target, which is reached from above for metrics of which smaller values are better.

        Returns:
            ``rounds``, ``bytes`` (both directions, all clients), ``gradients`` (of single samples) and ``seconds``;
            None where it is not reached.

        Raises:
            FedraxError: for a name that no event has.
        """
        self._check_known(metric)
        return cost_to_target(self.events, metric, value, self.lower_is_better)

    def _check_known(self, name: str) -> None:
        known = dict.fromkeys(key for event in self.events for key in event)
        if name not in known and self.events:
            raise unknown("metric of this run:", name, known)

    def to_polars(self) -> pl.DataFrame:
        """Return the events as a Polars table.

        Returns:
            One row for each round; null where an event lacks a value.
        """
        import polars as pl

        return pl.DataFrame(self.events, infer_schema_length=None)

    def to_pandas(self) -> Any:
        """Return the events as a pandas table; raises FedraxError where pandas is not installed.

        Returns:
            One row for each round; NaN where an event lacks a value.
        """
        try:
            import pandas
        except ImportError:
            raise FedraxError(
                "to_pandas needs the package pandas: pip install 'fedrax[pandas]'; to_polars does not."
            ) from None
        return pandas.DataFrame(self.events)

    def plot(self, *metrics: str) -> Figure:
        """Plot metrics against rounds: ``result.plot().savefig("run.png")``.

        Args:
            *metrics: names in events; by default the test metrics, or the training loss where there are none.

        Returns:
            A matplotlib figure with one panel for each metric.

        Raises:
            FedraxError: for a name that no event has.
        """
        from matplotlib.figure import Figure

        known = dict.fromkeys(name for event in self.events for name in event if name != "round")
        whole = [name for name in known if name.startswith("test_") and "_client" not in name]
        chosen = metrics or tuple(whole) or ("train_loss",)
        figure = Figure(figsize=(6, 0.6 + 2.4 * len(chosen)), layout="constrained")
        for axes, name in zip(figure.subplots(len(chosen), 1, squeeze=False)[:, 0], chosen, strict=True):
            axes.plot(*zip(*self.metric(name), strict=True), marker="o" if len(self.metric(name)) <= 20 else None)
            axes.set_ylabel(escape_matplotlib(name.replace("_", " ")))
            axes.grid(color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[-1].set_xlabel("communication rounds")
        return figure

    def save(self, path: Path | str) -> None:
        """Write parameters and running statistics as a safetensors file for :func:`fedrax.simulation.load_model`.

        Args:
            path: the file.

        Raises:
            FedraxError: where it cannot be written, or for parameters that are not arrays of numbers.
        """
        save_model(path, self.params, self.statistics)


NO_CLIENTS: dict[str, Any] = {"store": (), "homes": {}, "initial_client": None, "personal_metrics": None}
"""Fields of a result without client states: of a run that diverged, whose client states are those after the failure,
and of a finished run that was saved without them."""


def _metric_lines(values: Event) -> list[str]:
    """One line for each metric, and one for its distribution over clients."""
    lines = []
    for name in values:
        if not name.startswith(("train_", "test_")) or "_client" in name:
            continue
        value = values[name]
        lines.append(f"  {name.replace('_', ' ')}: {'undefined' if value is None else f'{value:.4g}'}")
        over = {key: values.get(f"{name}_{key}") for key in ("worst_client", "client_p10", "client_p50", "client_p90")}
        if None not in over.values():
            worst, low, middle, high = (f"{value:.4g}" for value in over.values())
            samples = values.get(f"{name}_worst_client_samples")
            lines.append(
                f"    over clients: {low}, {middle}, {high} (10, 50, 90 %); worst {worst}, of {samples} samples"
            )
    return lines


@checked_arguments
def cost_to_target(
    events: list[Event], metric: str, value: float, lower_is_better: tuple[str, ...] = ("mse",)
) -> dict[str, float] | None:
    """Return the cost until a metric first reaches a target, from a list of events.

    Args:
        events: the events of a run.
        metric: name of the metric in events.
        value: the target, which is reached from above for the loss and metrics in ``lower_is_better``.
        lower_is_better: names of metrics besides the loss of which smaller values are better.

    Returns:
        ``rounds``, ``bytes`` (both directions, all clients), ``gradients`` (of single samples) and ``seconds``; None
        where the target is not reached.

    Example:
        >>> event = {"round": 1, "test_accuracy": 0.8, "bytes_down": 10, "bytes_up": 5, "gradients": 60, "seconds": 0.1}
        >>> fedrax.simulation.cost_to_target([event], "test_accuracy", 0.7)
        {'rounds': 1, 'bytes': 15, 'gradients': 60, 'seconds': 0.1}
    """
    words = metric.split("_")
    falls = "loss" in words or any(f"_{name}" in f"_{metric}" for name in lower_is_better)
    for event in events:
        here = event.get(metric)
        if here is not None and (here <= value if falls else here >= value):
            return {
                "rounds": event["round"],
                "bytes": event["bytes_down"] + event["bytes_up"],
                "gradients": event["gradients"],
                "seconds": event["seconds"],
            }
    return None
