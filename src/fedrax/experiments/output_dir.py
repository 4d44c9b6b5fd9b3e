"""Check that the runs in an output directory belong to the comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedrax import files
from fedrax.experiments import experiment
from fedrax.experiments.comparison import (
    SHARED,
    SHARED_KEYS,
    Comparison,
    OtherExperimentError,
    first_difference,
    safe_name,
    saved_run,
)

_RUNS = ("*/seed-*", "*/*=*/seed-*", "search/*/*=*/seed-*")
"""Patterns of run directories in that of a comparison; the name of a point of a grid contains an equals sign."""


def check_output_dir(spec: Comparison, out: Path) -> None:
    """Raise OtherExperimentError for a directory with runs of another comparison."""
    for job in spec.possible_runs():
        saved_run(job.spec, job.directory_in(out))
    _check_sampled(spec, out)
    _check_shared(spec, out)


def _check_shared(spec: Comparison, out: Path) -> None:
    """Raise OtherExperimentError for runs on other data, or with another partition, model or task."""
    ours = experiment.to_table(spec.methods[0])
    for runs in _RUNS:
        shared = (*SHARED, "normalize") if runs.startswith("search") else SHARED_KEYS  # validation differs
        for file in sorted(out.glob(f"{runs}/experiment.toml")):
            other = first_difference(experiment.read_file(file), ours, shared)
            if other is not None:
                problem = f"holds a run of another comparison, which differs in {other}"
                raise OtherExperimentError(f"{file.parent} {problem}: choose another --out.")


def _check_sampled(spec: Comparison, out: Path) -> None:
    """Raise OtherExperimentError for trials of another search by Optuna.

    The proposed settings are not known in advance, so trials are compared without the settings of the grid and the
    seed.
    """
    for method in spec.methods:
        if not spec.is_sampled(method.name):
            continue
        paths = [*(path.removesuffix(".name") for path, _ in spec.grids[method.name].axes), "run.seed"]
        ours = dataclasses.replace(spec.candidates[method.name][0][1], validation=spec.search.validation)
        wanted = _without(experiment.to_table(ours), paths)
        for file in sorted(
            files.join_without_links(out, Path("search", safe_name(method.name))).glob("*/seed-*/experiment.toml")
        ):
            if _without(experiment.read_file(file), paths) != wanted:
                raise OtherExperimentError(f"{file.parent} holds a trial of another comparison: choose another --out.")


def _without(table: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """A copy of a nested table without the entries at some paths."""
    plain = json.loads(json.dumps(table))
    for path in paths:
        *outer, last = path.split(".")
        inner: Any = plain
        for key in outer:
            inner = inner.get(key, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner.pop(last, None)
    return plain
