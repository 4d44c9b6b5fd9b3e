"""Several algorithms, several seeds, one partition: what is compared, and running it.

A comparison is an experiment file with ``seeds``, optionally a ``target`` accuracy, and a table ``[[compare]]``
for each method: an algorithm's table, with a ``label`` if the name does not tell methods apart. What all methods
share may stand in ``[algorithm]``.

    seeds = [0, 1, 2]

    [algorithm]
    local = { lr = 0.1, epochs = 1 }

    [[compare]]
    name = "fedavg"

    [[compare]]
    name = "fedprox"
    label = "FedProx, mu = 1"
    mu = 1.0
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from fedrax import files
from fedrax.contract.fields import describe
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.experiments.config import Reader, Table
from fedrax.experiments.experiment import Experiment
from fedrax.report.runs import Method, Run, read_run

OUTPUTS = ("table.md", "comparison.json", "curves.png", "curves.svg")
"""What stands beside the methods' directories."""
SHARED = ("data", "partition", "model", "run")


@dataclass(frozen=True)
class Comparison:
    """Methods, as experiments that differ in their names (the methods' labels) and algorithms, and seeds."""

    name: str
    methods: tuple[Experiment, ...]
    seeds: tuple[int, ...]
    target: float | None
    """Accuracy whose cost in rounds, bytes and seconds is reported; runs go on after it."""

    def check(self) -> None:
        """Refuse a comparison that is none."""
        self._check_labels()
        if not self.methods:
            raise FedraxError("there is nothing to compare: give [[compare]] tables, or several files or algorithms.")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise FedraxError(f"seeds must be different whole numbers, not {list(self.seeds)}.")
        if self.target is not None and not 0 < self.target <= 1:
            raise FedraxError(f"the target is an accuracy in (0, 1], not {self.target}.")
        for run, _ in self.planned():
            try:
                run.check()
            except FedraxError as error:
                raise FedraxError(f"{run.name}, seed {run.run.seed}: {error}") from error

    def _check_labels(self) -> None:
        """Each method needs a directory of its own."""
        places: dict[str, str] = {name: name for name in OUTPUTS}
        for label in (method.name for method in self.methods):
            if not label.strip() or not label.isprintable():
                raise FedraxError(f"the label {label!r} is not a line of text.")
            other = places.setdefault(safe_name(label).casefold(), label)
            if other in OUTPUTS:
                raise FedraxError(f"the label {label!r} is the name of a file of the comparison: choose another.")
            if other is not label:
                same = (
                    f"two methods are called {label!r}" if other == label else f"{other!r} and {label!r} are too alike"
                )
                raise FedraxError(f"{same}: give them labels whose directories differ.")

    def planned(self) -> list[tuple[Experiment, Path]]:
        """Every run and its directory below the comparison's, seed by seed."""
        return [
            (
                dataclasses.replace(method, run=dataclasses.replace(method.run, seed=seed)),
                Path(safe_name(method.name)) / f"seed-{seed}",
            )
            for seed in self.seeds
            for method in self.methods
        ]


def safe_name(name: str) -> str:
    """``name`` as part of a file name: letters, digits, ".", "_", "=" and "-"."""
    made = "".join(c if c.isalnum() or c in "._=-" else "-" for c in name).strip(".-")
    return made[:100] or "unnamed"


def from_table(table: Mapping[str, Any], source: str, folder: Path = Path()) -> Comparison:
    """The comparison that a table describes; a table without ``[[compare]]`` is one method."""
    reader = Reader(source, folder)
    shared = {key: value for key, value in table.items() if key not in ("compare", "seeds", "target")}
    entries = table.get("compare", [{}])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise FedraxError(f"{source}: compare must be tables, [[compare]].")
    seeds = reader.value(describe(tuple[int, ...]), table.get("seeds", [0, 1, 2]), "seeds")
    target = reader.value(describe(float | None), table["target"], "target") if "target" in table else None
    methods, base = [], shared.get("algorithm", {})
    if not isinstance(base, Mapping):
        raise FedraxError(f"{source}: [algorithm] must be a table, not {base!r}.")
    for number, entry in enumerate(entries, 1):
        where = f"{source}, [[compare]] {number}" if "compare" in table else source
        algorithm = merged(base, {key: value for key, value in entry.items() if key != "label"})
        made = Reader(where, folder).fields(Experiment, {**shared, "algorithm": algorithm}, "", Experiment())
        label = entry.get("label", made.algorithm_name)
        if not isinstance(label, str):
            raise FedraxError(f"{where}: the label must be a string, not {label!r}.")
        methods.append(dataclasses.replace(made, name=label))
    name = reader.value(describe(str), table.get("name", Path(source).stem), "name")
    return Comparison(name, tuple(methods), seeds, target)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """``base`` with the keys of ``over`` put in, table by table."""
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        both[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return both


def read(paths: list[Path]) -> Comparison:
    """The comparison of one file, or of the methods of several that share data, partition, model and run."""
    parts = [from_table(experiment.read_file(path), str(path), path.parent) for path in paths]
    first = parts[0]
    for path, part in zip(paths[1:], parts[1:], strict=True):
        for name in SHARED:
            mine, other = (_without_seed(getattr(p.methods[0], name)) if p.methods else None for p in (part, first))
            if mine != other:
                raise FedraxError(f"{path} and {paths[0]} differ in [{name}]: a comparison needs the same for all.")
    methods = tuple(method for part in parts for method in part.methods)
    return dataclasses.replace(first, methods=methods)


def _without_seed(part: Any) -> Any:
    return dataclasses.replace(part, seed=0) if type(part).__name__ == "Settings" else part


def state_of(spec: Experiment, directory: Path) -> Run | None:
    """The run of ``spec`` that ``directory`` holds, None if it holds none; FedraxError if it is of another."""
    file = directory / "experiment.toml"
    if not file.exists():
        return None
    with files.reading(file, files.MAX_FILE) as kept:
        same = kept.read() == tomlkit.dumps(experiment.to_table(spec)).encode()
    if not same:
        raise FedraxError(f"{directory} holds a run of another experiment: choose another --out.")
    return read_run(directory)


def methods_in(comparison: Comparison, out: Path) -> list[Method]:
    """The comparison's runs as they are on disk, method by method."""
    runs: dict[str, list[Run]] = {method.name: [] for method in comparison.methods}
    for spec, place in comparison.planned():
        run = state_of(spec, out / place)
        if run is not None:
            runs[spec.name].append(run)
    return [Method(label, found) for label, found in runs.items() if found]
