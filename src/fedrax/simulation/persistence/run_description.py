"""Description of a run, ``run.json``: where its clients are, its method and its settings, for reports and repairs.

A run of an experiment file has these in ``experiment.toml``; runs that Python code starts have no other description.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedrax.config.annotations import fields_of, snake_case
from fedrax.contract.algorithm import Algorithm
from fedrax.errors import FedraxError
from fedrax.files import MAX_FILE, open_regular_file, write_text
from fedrax.simulation.results.events import RunInfo

FILE, EXPERIMENT = "run.json", "experiment.toml"
_NONE = "none"
"""None in the tables of experiments."""
_LONGEST = 200
"""Most characters of a text and items of a list; longer lists are described by their length."""


@dataclass(frozen=True)
class RunDescription:
    """Content of ``run.json``."""

    runtime: str
    """As in :class:`RunInfo`: "simulation" or "federation"."""
    plan: str
    """The execution plan, as text."""
    experiment: dict[str, Any] | None
    """The tables ``algorithm`` and ``run`` as in an experiment file; None for a run of an experiment file."""
    privacy: str | None = None
    """What the epsilon of a private run bounds, as text; None without epsilon."""

    @property
    def federation(self) -> bool:
        """Whether the clients were nodes of a federation."""
        return self.runtime == "federation"


def write_description(
    directory: Path, info: RunInfo, algorithm: Algorithm, settings: Mapping[str, Any], privacy: str | None
) -> None:
    """Write ``run.json`` atomically.

    Args:
        directory: the run directory.
        info: facts about the run.
        algorithm: the method.
        settings: the settings of the run by name; None for a secret seed.
        privacy: what the epsilon of a private run bounds.
    """
    experiment = None
    if not (directory / EXPERIMENT).exists():
        experiment = {"algorithm": _plain(algorithm), "run": {name: _plain(item) for name, item in settings.items()}}
    described = dataclasses.asdict(RunDescription(info.runtime, info.plan, experiment, privacy))
    write_text(directory / FILE, json.dumps(described, indent=1) + "\n")


def read_description(directory: Path) -> RunDescription | None:
    """Read ``run.json``; None where it is missing. Raises FedraxError for a damaged file."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        with open_regular_file(path, MAX_FILE) as file:
            found = json.loads(file.read().decode())
        runtime, plan, experiment = found["runtime"], found["plan"], found["experiment"]
        privacy = found.get("privacy")
        if runtime not in ("simulation", "federation") or not isinstance(plan, str):
            raise ValueError("it names neither a simulation nor a federation")
        if not (experiment is None or isinstance(experiment, dict)):
            raise ValueError("its experiment is no table")
        if not (privacy is None or isinstance(privacy, str)):
            raise ValueError("its privacy is no text")
        return RunDescription(runtime, plan, experiment, privacy)
    except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise FedraxError(f"{path} does not describe a run: {error!r:.200}.") from error


def _table(value: Any) -> dict[str, Any]:
    """The fields of a dataclass instance, as in an experiment file; values that no file can hold are described."""
    try:
        classes = {name: field.classes for name, field in fields_of(type(value)).items()}
    except FedraxError:  # the annotations of user code may not be evaluable
        classes = dict.fromkeys((field.name for field in dataclasses.fields(value)), ())
    items = {name: (getattr(value, name), known) for name, known in classes.items()}
    return {name: _table(item) if known == (type(item),) else _plain(item) for name, (item, known) in items.items()}


def _is_object(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _name_of(value: Any) -> str:
    """The name of an object's class in experiment files."""
    name = type(value).__name__
    return name.lower() if isinstance(value, Algorithm) else snake_case(name)


def _plain(value: Any) -> Any:
    """A value that JSON can hold: numbers, strings and lists as they are, others as text."""
    if value is None:
        return _NONE
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        short = len(value) <= _LONGEST
        return [_plain(item) for item in value] if short else f"{len(value)} values"
    if _is_object(value):
        return {"name": _name_of(value)} | _table(value)
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        if value.shape or value.dtype.kind not in "biuf":
            return f"{value.dtype} {list(value.shape)}"
        value = value.item()
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = str(value) if isinstance(value, str | Path | float) else getattr(value, "__qualname__", type(value).__name__)
    return text[:_LONGEST]
