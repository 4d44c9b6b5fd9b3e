"""Whether a directory is a comparison's own: what it holds already must be that comparison's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrax import files
from fedrax.experiments import experiment
from fedrax.experiments.comparison import (
    OF_METHODS,
    SHARED,
    Comparison,
    OtherExperimentError,
    differing,
    safe_name,
    state_of,
)

_RUNS = ("*/seed-*", "*/*=*/seed-*", "search/*/*=*/seed-*")
"""Where runs lie below the directory of a comparison; that of a point has an equals sign in its name."""


def check_ours(spec: Comparison, out: Path) -> None:
    """AnotherExperiment where a directory holds runs of another comparison."""
    for job in spec.possible():
        state_of(job.spec, job.inside(out))
    _check_sampled(spec, out)
    _check_shared(spec, out)


def _check_shared(spec: Comparison, out: Path) -> None:
    """AnotherExperiment where ``out`` holds runs on other data, or with another model or task."""
    ours = experiment.to_table(spec.methods[0])
    for runs in _RUNS:
        shared = (*SHARED, "normalize") if runs.startswith("search") else OF_METHODS  # trials hold rows out
        for file in sorted(out.glob(f"{runs}/experiment.toml")):
            other = differing(experiment.read_file(file), ours, shared)
            if other is not None:
                said = f"holds a run of another comparison, which differs in {other}"
                raise OtherExperimentError(f"{file.parent} {said}: choose another --out.")


def _check_sampled(spec: Comparison, out: Path) -> None:
    """AnotherExperiment where ``out`` holds trials of another search.

    A method's differ in the settings of its grid, with a name in what it names, and in the seed. Which settings Optuna
    will propose is not known beforehand.
    """
    for method in spec.methods:
        if not spec.is_sampled(method.name):
            continue
        paths = [*(path.removesuffix(".name") for path, _ in spec.grids[method.name].axes), "run.seed"]
        ours = dataclasses.replace(spec.candidates[method.name][0][1], validation=spec.search.validation)
        wanted = _without(experiment.to_table(ours), paths)
        for file in sorted(files.inside(out, Path("search", safe_name(method.name))).glob("*/seed-*/experiment.toml")):
            if _without(experiment.read_file(file), paths) != wanted:
                raise OtherExperimentError(f"{file.parent} holds a trial of another comparison: choose another --out.")


def _without(table: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A table of tables without what lies at some paths."""
    plain = json.loads(json.dumps(table))
    for path in paths:
        *outer, last = path.split(".")
        inner: Any = plain
        for key in outer:
            inner = inner.get(key, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner.pop(last, None)
    return plain
