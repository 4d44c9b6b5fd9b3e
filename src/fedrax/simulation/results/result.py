"""What a simulation returns."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from fedrax.contract.model import Params, with_statistics
from fedrax.errors import FedraxError, unknown
from fedrax.escaping import for_picture
from fedrax.privacy.ledger import Spent
from fedrax.simulation.persistence.model_file import save_model
from fedrax.simulation.results.events import Event
from fedrax.simulation.results.message_recorder import RecordedExchange
from fedrax.tree import Tree

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Snapshot:
    """What a callback sees of a run, after an evaluation; arrays are on the host."""

    event: Event
    """The round's event, with its metrics."""
    params: Tree
    """The global parameters."""
    statistics: Tree
    """The model's running statistics; empty where it has none."""

    def __repr__(self) -> str:
        """A line, and the round's metrics."""
        return "\n".join([f"Snapshot: round {self.event['round']}", *_metric_lines(self.event)])

    @property
    def variables(self) -> Params:
        """As :attr:`Result.variables`: those of now."""
        return with_statistics(self.params, self.statistics)

    def save(self, path: Path | str) -> None:
        """As :meth:`Result.save`: the model as it is now."""
        save_model(path, self.params, self.statistics)


class PersonalMetrics(NamedTuple):
    """What clients' own models, personal and fine-tuned ones, are worth to each."""

    values: dict[str, np.ndarray]
    """Means over each client's samples, [N] by name (``personal_accuracy``); NaN for a client without samples."""
    digest: int
    """Of the labels that were evaluated on, and whose they are."""

    @staticmethod
    def digest_of(y: np.ndarray, offsets: np.ndarray) -> int:
        """The digest of labels [n, ...], grouped by client."""
        return zlib.crc32(np.ascontiguousarray(y).data, zlib.crc32(np.ascontiguousarray(offsets).data))


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run."""

    params: Tree
    """The global parameters after the last round."""
    server: Any
    """The algorithm's server state."""
    events: list[Event]
    """One a round; see :mod:`fedrax.simulation.results.events`."""
    plan: str
    """How rounds were executed, in words."""
    stopped: str
    """"rounds"; "target", "budget" or "callback" where the target accuracy, the privacy budget or a callback ended the
    run early; "diverged" where a number stopped being finite (:func:`fedrax.sweep`): what there is, is of the rounds
    before, and not what clients keep."""
    directory: Path | None = None
    spent: Spent | None = None
    """What a private run has spent."""
    lower_is_better: tuple[str, ...] = ()
    """The task's metrics of which a smaller value is better."""
    statistics: Tree = ()
    """The model's running statistics after the last round, averaged over clients; empty where it has none."""
    trajectory: list[Tree] = field(default_factory=list)
    """The global parameters after every round, or after those asked for, on the host."""
    exchanges: list[RecordedExchange] = field(default_factory=list)
    """What recorded clients were sent and sent, round by round, where asked for: see :class:`MessageSelection`."""
    store: Tree = ()
    """What clients keep, a row each."""
    homes: dict[int, int] = field(default_factory=dict)
    """The row of each client that took part."""
    initial_client: Any = None
    """What a client keeps before it takes part."""
    personal_metrics: PersonalMetrics | None = None
    """What clients' own models were worth to each in the last evaluation; None of a run without such models, or of
    one that was read from a directory."""

    def __repr__(self) -> str:
        """A few lines: how far it came, and the last numbers of what was evaluated."""
        last: dict[str, float] = {}
        for event in self.events:
            last |= event
        sent = (last.get("bytes_down", 0) + last.get("bytes_up", 0)) / 1e6
        lines = [f"Result: {len(self.events)} rounds ({self.stopped}), {self.plan}, {sent:.4g} MB sent"]
        lines += _metric_lines(last)
        lines += [] if self.spent is None else [f"  {self.spent}"]
        return "\n".join([*lines, *([f"  kept in {self.directory}"] if self.directory else [])])

    @property
    def variables(self) -> Params:
        """What the task's functions take: the parameters, with the running statistics where the model has some."""
        return with_statistics(self.params, self.statistics)

    def client_state(self, client: int) -> Tree:
        """The state of a client: leaves as in the algorithm's client state (its initial one if it never took part).

        FedraxError where the result does not have it: of a run that diverged, or that was read from the directory of a
        finished one with ``keep_clients=False``.
        """
        if self.initial_client is None:
            why = "this run diverged" if self.stopped == "diverged" else "this run was finished without keep_clients"
            raise FedraxError(f"{why}: what its clients keep is not in its result")
        if client not in self.homes:
            return self.initial_client.state
        return jax.tree.map(lambda a: a[self.homes[client]], self.store.state)

    def metric(self, name: str) -> list[tuple[int, float]]:
        """(round, value) wherever events hold a value of ``name``; FedraxError for one that no event holds."""
        self._check_known(name)
        return [(event["round"], event[name]) for event in self.events if event.get(name) is not None]

    def cost_to_target(self, metric: str, value: float) -> dict[str, float] | None:
        """Rounds, bytes (both ways, all clients) and seconds until ``metric`` first reaches ``value``, or None.

        A metric whose smaller values are better, as the task says, reaches a value from above, others from below.
        FedraxError for one that no event holds.
        """
        self._check_known(metric)
        return cost_to_target(self.events, metric, value, self.lower_is_better)

    def _check_known(self, name: str) -> None:
        known = dict.fromkeys(key for event in self.events for key in event)
        if name not in known and self.events:
            raise unknown("metric of this run:", name, known)

    def to_polars(self) -> pl.DataFrame:
        """The events as a table, a row each round; null where an event does not hold a column."""
        import polars as pl

        return pl.DataFrame(self.events, infer_schema_length=None)

    def to_pandas(self) -> Any:
        """The same for pandas, with NaN where an event does not hold a column; FedraxError without that package."""
        try:
            import pandas
        except ImportError:
            raise FedraxError(
                "to_pandas needs the package pandas: pip install 'fedrax[pandas]'; to_polars does not."
            ) from None
        return pandas.DataFrame(self.events)

    def plot(self, *metrics: str) -> Figure:
        """Curves against rounds, one below the other, as a matplotlib figure: ``result.plot().savefig("run.png")``.

        metrics: names in events; by default the test metrics, or the training loss where there are none. FedraxError
        for a name that no event holds.
        """
        from matplotlib.figure import Figure

        known = dict.fromkeys(name for event in self.events for name in event if name != "round")
        whole = [name for name in known if name.startswith("test_") and "_client" not in name]
        chosen = metrics or tuple(whole) or ("train_loss",)
        figure = Figure(figsize=(6, 0.6 + 2.4 * len(chosen)), layout="constrained")
        for axes, name in zip(figure.subplots(len(chosen), 1, squeeze=False)[:, 0], chosen, strict=True):
            axes.plot(*zip(*self.metric(name), strict=True), marker="o" if len(self.metric(name)) <= 20 else None)
            axes.set_ylabel(for_picture(name.replace("_", " ")))
            axes.grid(color="0.92")
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[-1].set_xlabel("communication rounds")
        return figure

    def save(self, path: Path | str) -> None:
        """Write the model, parameters and running statistics, as a safetensors file for :func:`fedrax.load`.

        FedraxError where it cannot be written, or for parameters that are no arrays of numbers.
        """
        save_model(path, self.params, self.statistics)


NO_CLIENTS: dict[str, Any] = {"store": (), "homes": {}, "initial_client": None, "personal_metrics": None}
"""Fields of a result without what clients keep: of a run that diverged, whose clients have worked on in that round, or
in later ones beside other runs; of a finished one that did not keep it."""


def _metric_lines(values: Event) -> list[str]:
    """A line for each metric; what there is over clients is one, too."""
    lines = []
    for name in values:
        if not name.startswith(("train_", "test_")) or "_client" in name:
            continue
        lines.append(f"  {name.replace('_', ' ')}: {values[name]:.4g}")
        over = {key: values.get(f"{name}_{key}") for key in ("worst_client", "client_p10", "client_p50", "client_p90")}
        if None not in over.values():
            worst, low, middle, high = (f"{value:.4g}" for value in over.values())
            samples = values.get(f"{name}_worst_client_samples")
            lines.append(
                f"    over clients: {low}, {middle}, {high} (10, 50, 90 %); worst {worst}, of {samples} samples"
            )
    return lines


def cost_to_target(
    events: list[Event], metric: str, value: float, lower_is_better: tuple[str, ...] = ("mse",)
) -> dict[str, float] | None:
    """As :meth:`Result.cost_to_target`, from events; ``lower_is_better`` names metrics besides the loss."""
    words = metric.split("_")
    falls = "loss" in words or any(f"_{name}" in f"_{metric}" for name in lower_is_better)
    for event in events:
        here = event.get(metric)
        if here is not None and (here <= value if falls else here >= value):
            return {
                "rounds": event["round"],
                "bytes": event["bytes_down"] + event["bytes_up"],
                "seconds": event["seconds"],
            }
    return None
