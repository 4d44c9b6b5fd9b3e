"""Event sinks: lines of JSON, TensorBoard, Weights & Biases, MLflow.

Each is a :class:`fedrax.simulation.Sink` for ``simulate(..., sinks=[...])``. The last three need optional packages,
imported when the sink is made. The progress line is in :mod:`fedrax.simulation.results.progress`.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from fedrax.errors import FedraxError
from fedrax.files import flatten
from fedrax.simulation.results.events import Event, RunInfo


class JsonSink:
    """Writes each event as a line of JSON.

    Args:
        file: An open text file; standard output by default.

    Example:
        >>> import io
        >>> lines = io.StringIO()
        >>> sink = fedrax.report.JsonSink(lines)
        >>> sink.event({"round": 1, "test_accuracy": 0.5})
        >>> lines.getvalue().strip()
        '{"round": 1, "test_accuracy": 0.5}'
    """

    def __init__(self, file: TextIO | None = None):
        self._file = file

    def start(self, run: RunInfo) -> None:
        """Nothing to write yet.

        Args:
            run: Facts about the run.
        """

    def event(self, event: Event) -> None:
        """Write the event.

        Args:
            event: The event of a round.
        """
        print(json.dumps(event), file=self._file or sys.stdout, flush=True)

    def finish(self, result: Any | None) -> None:
        """Nothing to close.

        Args:
            result: The result, None for a run that failed.
        """


class TensorBoardSink:
    """Logs the numbers of events against rounds for TensorBoard (the extra ``tensorboard``).

    Args:
        directory: Directory of the log.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("tensorboardX"):
        ...     sink = fedrax.report.TensorBoardSink("runs/first/tensorboard")
    """

    def __init__(self, directory: Path | str):
        self._module = _optional("tensorboardX", "TensorBoard", "tensorboard")
        self._directory = str(directory)
        self._writer: Any = None

    def start(self, run: RunInfo) -> None:
        """Open the log.

        Args:
            run: Facts about the run.
        """
        if Path(self._directory).is_symlink():
            raise FedraxError(f"{self._directory} is a symbolic link, in which no log is written: remove it.")
        with self._file_errors():
            self._writer = self._module.SummaryWriter(self._directory)

    def event(self, event: Event) -> None:
        """Log every number.

        Args:
            event: The event of a round.
        """
        with self._file_errors():
            for name, value in numbers(event).items():
                self._writer.add_scalar(name, value, event["round"])

    def finish(self, result: Any | None) -> None:
        """Close the log.

        Args:
            result: The result, None for a run that failed.
        """
        with self._file_errors():
            self._writer.close()

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        """Raise errors of the file system as FedraxError."""
        try:
            yield
        except OSError as error:
            raise FedraxError(f"cannot write TensorBoard's log {self._directory}: {error.strerror}.") from error


class WandbSink:
    """Logs a run to Weights & Biases (the extra ``wandb``); its environment variables (WANDB_MODE, ...) apply.

    Args:
        project: Name of the project.
        name: Name of the run.
        config: Settings shown with the run.
        directory: Directory of its files.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("wandb"):
        ...     sink = fedrax.report.WandbSink("heterogeneity", name="scaffold")
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        directory: Path | str | None = None,
    ):
        self._module = _optional("wandb", "Weights & Biases", "wandb")
        self._options: dict[str, Any] = {"project": project, "name": name, "config": dict(config or {})}
        self._options["dir"] = None if directory is None else Path(directory)
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        """Start the run.

        Args:
            run: Facts about the run.
        """
        if self._options["dir"] is not None:
            self._options["dir"].mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._module.init(**self._options)
        except Exception as error:  # the package's errors have no common base but this
            raise FedraxError(
                f"Weights & Biases cannot start ({error}); WANDB_MODE=offline needs no account."
            ) from error

    def event(self, event: Event) -> None:
        """Log every number.

        Args:
            event: The event of a round.
        """
        self._run.log(numbers(event), step=event["round"])

    def finish(self, result: Any | None) -> None:
        """End the run.

        Args:
            result: The result; None marks the run as failed.
        """
        self._run.finish(exit_code=0 if result is not None else 1)


class MlflowSink:
    """Logs a run to MLflow (the extra ``mlflow``), whose environment variables apply (MLFLOW_TRACKING_URI, ...).

    Args:
        experiment: Name of MLflow's experiment.
        name: Name of the run.
        config: Settings logged as parameters.

    Example:
        >>> import importlib.util
        >>> if importlib.util.find_spec("mlflow"):
        ...     sink = fedrax.report.MlflowSink("heterogeneity", name="scaffold")
    """

    def __init__(self, experiment: str, name: str | None = None, config: Mapping[str, Any] | None = None):
        self._module = _optional("mlflow", "MLflow", "mlflow")
        self._experiment, self._name, self._config = experiment, name, dict(config or {})

    def start(self, run: RunInfo) -> None:
        """Start the run and log its settings.

        Args:
            run: Facts about the run.
        """
        started = False
        try:
            self._module.set_experiment(self._experiment)
            self._module.start_run(run_name=self._name)
            started = True
            self._module.log_params(flatten(self._config))
        except Exception as error:  # the package's errors have no common base but this
            if started:
                with suppress(Exception):
                    self.finish(None)
            raise FedraxError(f"MLflow cannot start: {(str(error).splitlines() or [repr(error)])[0]}") from error

    def event(self, event: Event) -> None:
        """Log every number.

        Args:
            event: The event of a round.
        """
        self._module.log_metrics(numbers(event), step=event["round"])

    def finish(self, result: Any | None) -> None:
        """End the run.

        Args:
            result: The result; None marks the run as failed.
        """
        self._module.end_run("FINISHED" if result is not None else "FAILED")


def numbers(event: Event) -> dict[str, float]:
    """The numbers of an event except its round."""
    return {k: v for k, v in event.items() if k != "round" and isinstance(v, int | float) and not isinstance(v, bool)}


def _optional(module: str, title: str, extra: str) -> Any:
    """Import an optional package; raises FedraxError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise FedraxError(f"{title} needs the package {module}: pip install 'fedrax[{extra}]'.") from error
