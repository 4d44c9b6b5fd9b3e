"""The directory of a comparison, and in it those of its methods.

A method's runs are in the directory that its label names. If that holds runs with other settings, they are in LABEL-2,
so that after a change of one method only its runs are repeated. A directory that holds runs with other settings, and
none that the comparison can use, belongs to another comparison.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedrax import files
from fedrax.experiments import experiment
from fedrax.experiments.comparison import (
    OUTPUTS,
    SHARED_KEYS,
    Comparison,
    OtherExperimentError,
    RunJob,
    differences,
    safe_name,
    saved_run,
)

_RUNS = ("*/seed-*", "*/*=*/seed-*", "search/*/*=*/seed-*")
"""Patterns of run directories in that of a comparison; the name of a point of a grid contains an equals sign."""


class Output(NamedTuple):
    """Where the runs of a comparison are."""

    comparison: Comparison
    """The comparison with the directories of its methods."""
    directory: Path
    notes: tuple[str, ...] = ()
    """Which new directories it starts, and why, for the user."""


def choose_output(spec: Comparison, directory: Path | None = None) -> Output:
    """The directories of a comparison and its methods.

    Args:
        spec: The comparison.
        directory: The directory of the comparison; by default the first of runs/NAME, runs/NAME-2, ... that does not
            belong to another comparison.

    Returns:
        The directories.

    Raises:
        OtherExperimentError: If ``directory`` belongs to another comparison; the message has the difference.
        FedraxError: If a run in it cannot be read.
    """
    if directory is not None:
        return _output_in(spec, directory)
    places, problem = _numbered(Path("runs") / safe_name(spec.name)), None
    while True:
        out = next(places)
        try:
            found = _output_in(spec, out)
        except OtherExperimentError as error:
            problem = problem or error.problem
            continue
        new = () if problem is None or out.exists() else (f"{problem}: the results are in {out}",)
        return found._replace(notes=(*new, *found.notes))


def _numbered(place: Path) -> Iterator[Path]:
    """PLACE, PLACE-2, PLACE-3, ..."""
    return itertools.chain([place], (place.with_name(f"{place.name}-{n}") for n in itertools.count(2)))


def _output_in(spec: Comparison, out: Path) -> Output:
    """The directories of the methods in that of a comparison; raises OtherExperimentError if it is of another one."""
    _check_shared(spec, out)
    moved: dict[Path, Path] = {}
    notes, problems, useful = [], [], False
    for label in spec.candidates:
        for jobs in (spec.final_runs(label), spec.possible_trials(label)):
            if not jobs:
                continue
            place, problem = _place_of(spec, jobs, out)
            has_runs = next((out / place).glob("**/experiment.toml"), None) is not None
            useful |= has_runs
            if problem is not None:
                moved[jobs[0].directory] = place
                problems.append(problem)
                notes += [f"{problem}: the new runs of {label} are in {out / place}"] * (not has_runs)
    if renamed := _other_methods(spec, out):
        notes.append(f"{out} also has runs of {', '.join(renamed)}, which fedrax show and fedrax report include")
    if problems and not useful:
        raise OtherExperimentError(problems[0])
    placed = dataclasses.replace(spec, directories=moved)
    for job in placed.possible_runs():
        saved_run(job.spec, job.directory_in(out))
    return Output(placed, out, tuple(notes))


def _other_methods(spec: Comparison, out: Path) -> list[str]:
    """The labels of methods that have runs in a directory and are not in the comparison, as after a new label."""
    found = {str(experiment.read_file(file).get("name", "")) for file in out.glob("*/seed-*/experiment.toml")}
    return sorted(found - {method.name for method in spec.methods})


def _place_of(spec: Comparison, jobs: Sequence[RunJob], out: Path) -> tuple[Path, str | None]:
    """(directory for the runs of a method, how it differs from the one that its label names if it is not that one)."""
    named, places, problem = jobs[0].directory, _numbered(jobs[0].directory), None
    others = {*OUTPUTS, *(safe_name(method.name).casefold() for method in spec.methods)}
    while True:
        place = next(places)
        if place != named and place.name.casefold() in others:
            continue
        found = _conflict(spec, jobs, out, place)
        if found is None:
            return place, problem
        problem = problem or found


def _conflict(spec: Comparison, jobs: Sequence[RunJob], out: Path, directory: Path) -> str | None:
    """How saved runs in a directory of a method differ from planned ones, apart from their seeds; None if they do not.

    The settings that Optuna proposes are not known in advance, so they are not compared.
    """
    first, ignored = jobs[0].spec, ["run.seed"]
    folders = {directory / job.path.relative_to(job.directory).parent: job.spec for job in jobs}
    pattern = "seed-*/experiment.toml"
    if spec.is_sampled(first.name):
        ignored += [path.removesuffix(".name") for path, _ in spec.grids[first.name].axes]
        folders, pattern = {directory: first}, f"*/{pattern}"
    for folder, planned in folders.items():
        for file in sorted(files.join_without_links(out, folder).glob(pattern)):
            saved, wanted = experiment.read_file(file), experiment.to_table(planned)
            if found := differences(_without(saved, ignored), _without(wanted, ignored)):
                return f"{file.parent} holds a run with other settings ({found})"
    return None


def _check_shared(spec: Comparison, out: Path) -> None:
    """Raise OtherExperimentError for runs on other data, or with another partition, model or task.

    Settings of the model that a grid varies are not compared.
    """
    ours = experiment.to_table(spec.methods[0])
    varied = [path for own in spec.grids.values() for path, _ in own.axes if path.startswith("model.")]
    for runs in _RUNS:
        differing = {"validation"} if runs.startswith("search") else set()
        shared = [key for key in SHARED_KEYS if key not in differing]
        for file in sorted(out.glob(f"{runs}/experiment.toml")):
            saved = experiment.read_file(file)
            if found := differences(
                *(_without({key: table.get(key) for key in shared}, varied) for table in (saved, ours))
            ):
                raise OtherExperimentError(f"{file.parent} holds a run of another comparison ({found})")


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
