"""Comparisons: several algorithms and seeds on one partition.

A comparison is an experiment file with ``seeds``, optionally a ``target`` accuracy, and a table ``[[compare]]``
for each method: an algorithm's table, with a ``label`` if the name is not unique. ``[algorithm]`` holds settings that
all methods share; a setting that a wrapper does not have is for the method inside. A ``grid`` lists settings that are
selected on validation data; a method's own replaces the common one. A method's table ``run`` changes settings of the
run for it alone, and a table ``finetuning`` those of its fine-tuning.

    seeds = [0, 1, 2]
    grid = { algorithm.local.lr = [0.01, 0.03, 0.1, 0.3] }

    [search]
    validation = 0.2

    [algorithm]
    local = { epochs = 1 }

    [[compare]]
    name = "fedavg"

    [[compare]]
    name = "fedprox"
    label = "FedProx"
    grid = { algorithm.local.lr = [0.01, 0.03, 0.1], algorithm.mu = [0.01, 0.1, 1.0] }
    run = { rounds = 200 }
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from fedrax import files
from fedrax.config.annotations import Bound, describe_type
from fedrax.config.hyperparameters import PositiveInt, check
from fedrax.errors import FedraxError, warnings_about
from fedrax.escaping import format_settings, printable_line
from fedrax.experiments import experiment
from fedrax.experiments.experiment import COMPARISON_KEYS, Experiment
from fedrax.experiments.nesting import shared_by, with_tables
from fedrax.experiments.search import grid
from fedrax.experiments.search.grid import Grid, SettingPoint
from fedrax.experiments.serialization import METHODS, Reader, names_another
from fedrax.experiments.user_code import Trust, trust_in
from fedrax.report.runs import MethodRuns, SavedRun, read_run
from fedrax.simulation.settings import Seed, Settings

OUTPUTS = (
    "table.md", "comparison.json", "curves.png", "curves.svg", "grid.png", "grid.svg", "report.html", "search",
)  # fmt: skip
"""Files of a comparison beside the directories of its methods."""
SHARED = ("data", "partition", "model", "task")
"""Tables of an experiment that all methods share."""
SAMPLE_KEYS = ("normalize", "client_test", "validation")
"""Keys of an experiment about its samples, which all methods share."""
PLAN_KEYS = ("seeds", "target", "search")
"""Keys of a comparison, which all its files share."""
SHARED_KEYS = (*SHARED, *SAMPLE_KEYS)
"""Tables and keys that may not differ between methods."""


_BESIDE_ALGORITHM = ("label", "grid", "run", "finetuning")
"""Keys of a method's table that are not settings of its algorithm."""
_LISTED = 4
"""Most differing settings that a message lists."""


class OtherExperimentError(FedraxError):
    """A directory holds runs of another comparison."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}: choose another --out.")
        self.problem = problem


@dataclass(frozen=True)
class SearchSettings:
    """How the settings of a grid are chosen: the table ``[search]``."""

    validation: Annotated[float, Bound(gt=0, lt=1)] = 0.2
    """Share of each client's training rows that is held out; the final runs train on all rows."""
    seeds: tuple[Seed, ...] = ()
    """Seeds of the runs of the search; by default the first seed of the comparison."""
    metric: str | None = None
    """Metric after the last round; by default accuracy, or the loss without it."""
    trials: PositiveInt | None = None
    """Number of settings of each method that Optuna tries instead of the whole grid; ranges need it."""


@dataclass(frozen=True)
class Comparison:
    """Methods to compare on the same data, model and task, with several seeds.

    Example:
        >>> methods = tuple(
        ...     fedrax.experiments.Experiment(name=name, algorithm=algorithm)
        ...     for name, algorithm in [("FedAvg", fedrax.FedAvg()), ("SCAFFOLD", fedrax.Scaffold())]
        ... )
        >>> comparison = fedrax.experiments.Comparison("drift", methods, seeds=(0, 1), target=None)
        >>> len(comparison.runs({}))
        4
    """

    name: str
    """Name of the comparison."""
    methods: tuple[Experiment, ...]
    """Experiments that differ in their names (the labels of the methods), algorithms and run settings."""
    seeds: tuple[int, ...]
    """Seeds of the runs of each method."""
    target: float | None
    """Accuracy whose cost in rounds, bytes and seconds is reported; runs continue after it."""
    grids: Mapping[str, Grid] = field(default_factory=dict)
    """The grids of the methods that have one, by label."""
    search: SearchSettings = SearchSettings()
    """How settings are selected."""
    run: Settings = field(default_factory=Settings)
    """Run settings of the methods without their own."""
    directories: Mapping[Path, Path] = field(default_factory=dict)
    """Directories of runs in that of the comparison, where the ones that labels name hold runs with other settings;
    :func:`compare` sets it."""

    def __repr__(self) -> str:
        """A line, and one for each method."""
        seeds, target = ", ".join(map(str, self.seeds)), "" if self.target is None else f", target {self.target:g}"
        lines = [f"Comparison {self.name!r}: {len(self.methods)} methods, seeds {seeds}{target}"]
        for method in self.methods:
            lines.append(f"  {method.name}: {method.algorithm!r}{self._tried(method.name)}")
        return "\n".join(lines)

    def _tried(self, label: str) -> str:
        """The size of a method's search."""
        own = self.grids.get(label)
        if own is None:
            return ""
        if label in self.fixed:
            return f"; {format_settings(self.fixed[label])}"
        return f"; {self.search.trials} trials" if self.is_sampled(label) else f"; a grid of {own.size} points"

    def check(self) -> None:
        """Raise FedraxError for a comparison that cannot be run."""
        self._check_labels()
        if not self.methods:
            raise FedraxError("there is nothing to compare: give [[compare]] tables, or several files or algorithms.")
        self._check_shared()
        for what, seeds in (("seeds", self.seeds), ("the seeds of the search", self.search_seeds)):
            if not seeds or len(set(seeds)) != len(seeds):
                raise FedraxError(f"{what} must be different whole numbers, not {list(seeds)}.")
        if self.target is not None and not 0 < self.target <= 1:
            raise FedraxError(f"the target is an accuracy in (0, 1], not {self.target}.")
        check(self.search, "search")
        self._check_search()
        for job in self.possible_runs():
            try:
                with warnings_about(job.spec.name):
                    job.spec.check()
            except FedraxError as error:
                raise FedraxError(f"{job.title}: {error}") from error

    def _check_shared(self) -> None:
        """Raise FedraxError where methods differ in data, partition, model or task."""
        first, *others = self.methods
        wanted = experiment.to_table(first)
        for method in others:
            other = first_difference(experiment.to_table(method), wanted)
            if other is not None:
                raise FedraxError(
                    f"{method.name} and {first.name} differ in {other}: a comparison needs the same for all."
                )

    def _check_search(self) -> None:
        """Raise FedraxError for too many trials, and for grids that the search cannot evaluate."""
        trials = self.search.trials
        if trials is not None and trials > grid.LARGEST:
            raise FedraxError(f"{trials:,} trials are too many (limit: {grid.LARGEST:,}).")
        for label, found in self.searched.items():
            if any(method.validation for method in self.methods if method.name == label):
                raise FedraxError(
                    f"the grid of {label}: the search holds out its own validation rows: leave validation out here, and"
                    " set it in [search]."
                )
            if found.ranges and trials is None:
                path, values = next(iter(found.ranges.items()))
                raise FedraxError(
                    f"the grid of {label}: {path} is a range, {values}: set the number of values for Optuna to try with"
                    " --trials N or trials in [search]."
                )

    def _check_labels(self) -> None:
        """Raise FedraxError for labels that are not distinct directory names."""
        directories: dict[str, str] = {name: name for name in OUTPUTS}
        for label in (method.name for method in self.methods):
            if not label.strip() or not label.isprintable():
                raise FedraxError(f"the label {label!r} is empty or not printable.")
            other = directories.setdefault(safe_name(label).casefold(), label)
            if other in OUTPUTS:
                raise FedraxError(f"the label {label!r} is the name of a file of the comparison: choose another.")
            if other is not label:
                same = f"two methods are called {label!r}" if other == label else f"{other!r} and {label!r} are alike"
                raise FedraxError(f"{same}: give them labels with different directory names.")

    @property
    def search_seeds(self) -> tuple[int, ...]:
        """Seeds of the runs of the search."""
        return self.search.seeds or self.seeds[:1]

    @property
    def fixed(self) -> dict[str, SettingPoint]:
        """The only point of each grid that has a single one, by label: there is nothing to search."""
        return {label: own.points()[0] for label, own in self.grids.items() if not own.ranges and own.size == 1}

    @property
    def searched(self) -> dict[str, Grid]:
        """The grids with several points, by label."""
        return {label: own for label, own in self.grids.items() if own.ranges or own.size > 1}

    def is_sampled(self, label: str) -> bool:
        """Whether Optuna selects the settings of a method that are tried.

        Args:
            label: The method.

        Returns:
            True for a grid with ranges or with more points than trials.
        """
        own, trials = self.grids.get(label), self.search.trials
        return own is not None and trials is not None and (bool(own.ranges) or own.size > trials)

    @cached_property
    def candidates(self) -> dict[str, list[tuple[SettingPoint, Experiment]]]:
        """The points of each method's grid with its experiment there, one empty point for a method without a grid.

        For sampled grids the points of `Grid.ends`, which cover every value and every end of a range.
        """
        found: dict[str, list[tuple[SettingPoint, Experiment]]] = {}
        for method in self.methods:
            own = self.grids.get(method.name)
            points = [{}] if own is None else own.ends() if self.is_sampled(method.name) else own.points()
            found[method.name] = [(point, self.experiment_at(method, point)) for point in points]
        return found

    @cached_property
    def _made(self) -> dict[tuple[str, str], Experiment]:
        """Experiments by method and point: reading one from a table takes milliseconds."""
        return {}

    @property
    def first_candidate(self) -> Experiment:
        """The first method at the first point of its grid; with settings outside of a grid it may be impossible."""
        return self.candidates[self.methods[0].name][0][1]

    def experiment_at(self, method: Experiment, point: SettingPoint) -> Experiment:
        """The experiment of a method at a point of its grid.

        Args:
            method: The method.
            point: A value for each path of the grid.

        Returns:
            The experiment with the values.
        """
        key = method.name, repr(point)
        if key not in self._made:
            own = self.grids.get(method.name, Grid(()))
            self._made[key] = grid.with_settings(method, point, f"the grid of {method.name}", own.folder, own.trust)
        return self._made[key]

    def runs(self, chosen: Mapping[str, SettingPoint]) -> list[RunJob]:
        """Every run of the comparison, seed by seed.

        Args:
            chosen: Selected settings of the methods with grids, by label.

        Returns:
            The runs.
        """
        points = [(method, chosen.get(method.name, {})) for method in self.methods]
        specs = [(point, self.experiment_at(method, point)) for method, point in points]
        return [self._job(spec, seed, point) for seed in self.seeds for point, spec in specs]

    def _job(self, spec: Experiment, seed: int, point: SettingPoint) -> RunJob:
        """The run of an experiment with one seed."""
        named = Path("search" if spec.validation else "", safe_name(spec.name))
        return RunJob.of(spec, seed, point, self.directories.get(named, named))

    def final_runs(self, label: str) -> list[RunJob]:
        """The runs of a method at every setting that the search may select.

        Args:
            label: The method.

        Returns:
            The runs, with every seed.
        """
        return [self._job(spec, seed, point) for point, spec in self.candidates[label] for seed in self.seeds]

    def possible_trials(self, label: str) -> list[RunJob]:
        """The runs of the search of a method; with ranges, those of `candidates`.

        Args:
            label: The method.

        Returns:
            The runs; none for a method without a search.
        """
        points = self.candidates[label] if label in self.searched else []
        return self.search_runs_at(label, [point for point, _ in points])

    def search_runs(self, label: str) -> list[RunJob]:
        """The runs of the grid search of a method, point by point.

        Args:
            label: The method.

        Returns:
            The runs; none for a method without a grid or with a grid of one point, or whose settings Optuna selects.
        """
        if label not in self.searched or self.is_sampled(label):
            return []
        return self.search_runs_at(label, [point for point, _ in self.candidates[label]])

    def search_runs_at(self, label: str, points: Sequence[SettingPoint]) -> list[RunJob]:
        """The runs that evaluate some settings of a method on validation data.

        Args:
            label: The method.
            points: The settings.

        Returns:
            A run for each point and seed of the search.
        """
        method = next(method for method in self.methods if method.name == label)
        held = [
            (p, dataclasses.replace(self.experiment_at(method, p), validation=self.search.validation)) for p in points
        ]
        return [self._job(spec, seed, point) for point, spec in held for seed in self.search_seeds]

    def possible_runs(self) -> Iterator[RunJob]:
        """Every run that the comparison may make, whatever settings are selected.

        Yields:
            The runs.
        """
        for label in self.candidates:
            yield from self.search_runs(label)
            yield from self.final_runs(label)


@dataclass(frozen=True)
class RunJob:
    """A run of a comparison and its directory below that of the comparison."""

    spec: Experiment
    path: Path
    """The directory, relative to that of the comparison."""
    title: str
    """Label, settings and seed, for messages."""
    directory: Path
    """The directory of the runs of its method, which contains its own."""
    point: SettingPoint = field(default_factory=dict)
    """Its settings at the paths of the grid."""

    @classmethod
    def of(cls, spec: Experiment, seed: int, point: SettingPoint, directory: Path) -> RunJob:
        """The run of an experiment with one seed, in the directory of its method."""
        path = directory / (grid.point_directory(point) if point else "") / f"seed-{seed}"
        words = f" ({format_settings(point)})" if point else ""
        run = dataclasses.replace(spec.run, seed=seed)
        return cls(dataclasses.replace(spec, run=run), path, f"{spec.name}{words}, seed {seed}", directory, point)

    def directory_in(self, out: Path) -> Path:
        """The run's directory in that of the comparison; raises FedraxError if a link leads out of it."""
        return files.join_without_links(out, self.path)


def safe_name(name: str) -> str:
    """``name`` as part of a file name: letters, digits, ".", "_", "=" and "-"."""
    made = "".join(c if c.isalnum() or c in "._=-" else "-" for c in name).strip(".-")
    return made[:100] or "unnamed"


def from_table(table: Mapping[str, Any], source: str, folder: Path = Path(), trust: Trust = "beside") -> Comparison:
    """Read a comparison from a table; a table without ``[[compare]]`` is one method."""
    reader = Reader(source, folder, trust=trust, also_known=COMPARISON_KEYS)
    shared = {key: value for key, value in table.items() if key not in COMPARISON_KEYS}
    entries = table.get("compare", [{}])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping | str) for entry in entries):
        raise FedraxError(f'{source}: compare must be tables, [[compare]], or names: compare = ["fedavg", "scaffold"].')
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in entries]
    seeds = reader.value(describe_type(tuple[int, ...]), table.get("seeds", [0, 1, 2]), "seeds")
    target = reader.value(describe_type(float | None), table["target"], "target") if "target" in table else None
    search = reader.fields(SearchSettings, table.get("search", {}), "search", SearchSettings())
    common = grid.from_table(table["grid"], source, folder, trust) if "grid" in table else None
    methods, grids, base = [], {}, shared.get("algorithm", {})
    if not isinstance(base, Mapping):
        raise FedraxError(f"{source}: [algorithm] must be a table, not {base!r}.")
    run = reader.fields(Settings, shared.get("run", {}), "run", Settings())
    for number, entry in enumerate(entries, 1):
        where = f"{source}, [[compare]] {number}" if "compare" in table else source
        _check_seed(entry, where)
        own = with_tables({key: value for key, value in entry.items() if key not in _BESIDE_ALGORITHM})
        reader = Reader(where, folder, trust=trust, also_known=COMPARISON_KEYS)
        algorithm = merge_tables(shared_by(base, own, reader), own)
        parts = {**shared, "algorithm": algorithm, "run": merge_tables(shared.get("run", {}), entry.get("run", {}))}
        if "finetuning" in entry:
            parts["finetuning"] = merge_tables(shared.get("finetuning", {}), entry["finetuning"])
        made = reader.fields(Experiment, parts, "", Experiment())
        label = entry.get("label", made.method_name)
        if not isinstance(label, str):
            raise FedraxError(f"{where}: the label must be a string, not {label!r}.")
        methods.append(dataclasses.replace(made, name=label))
        own_grid = grid.from_table(entry["grid"], where, folder, trust) if "grid" in entry else common
        if own_grid is not None:
            grids[label] = own_grid
    name = reader.value(describe_type(str), table.get("name", Path(source).stem), "name")
    return Comparison(name, tuple(methods), seeds, target, grids, search, run)


def _check_seed(table: Mapping[str, Any], where: str) -> None:
    """Raise FedraxError for run.seed, which would be ignored."""
    run = table.get("run")
    if isinstance(run, Mapping) and "seed" in run:
        raise FedraxError(
            f"{where}: run.seed is for a single run: write seeds = [{run['seed']}] at the top, outside of all tables."
        )


def merge_tables(base: Any, over: Any) -> Any:
    """``base`` updated with ``over``, recursively.

    A table of ``over`` that names another class replaces that of ``base``, except for tables of methods, whose settings
    are shared by all methods.
    """
    if not isinstance(base, Mapping) or not isinstance(over, Mapping):
        return over if over else base
    both = dict(base)
    for key, value in over.items():
        old = both.get(key)
        if (
            isinstance(old, Mapping)
            and isinstance(value, Mapping)
            and (key in METHODS or not names_another(old, value))
        ):
            value = merge_tables(old, value)
        both[key] = value
    return both


def read(paths: list[Path]) -> Comparison:
    """Read the comparison of one file, or of several files that share data, partition, model and run."""
    tables = [experiment.read_file(path) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if "compare" in table:
            _check_seed(table, str(path))
    parts = [
        from_table(table, str(path), path.parent, trust_in(path)) for table, path in zip(tables, paths, strict=True)
    ]
    first = parts[0]
    for path, part, table in zip(paths[1:], parts[1:], tables[1:], strict=True):
        differences = [f"[{name}]" for name in SHARED if _of_first(part, name) != _of_first(first, name)]
        differences += [name for name in SAMPLE_KEYS if _of_first(part, name) != _of_first(first, name)]
        differences += [name for name in PLAN_KEYS if name in table and getattr(part, name) != getattr(first, name)]
        if dataclasses.replace(part.run, seed=0) != dataclasses.replace(first.run, seed=0):
            differences.append("[run]")
        if differences:
            raise FedraxError(f"{path} and {paths[0]} differ in {differences[0]}: a comparison needs the same for all.")
    methods = tuple(method for part in parts for method in part.methods)
    grids = {label: own for part in parts for label, own in part.grids.items()}
    return dataclasses.replace(first, methods=methods, grids=grids)


def _of_first(part: Comparison, name: str) -> Any:
    """A setting of the first method, None without methods."""
    return getattr(part.methods[0], name) if part.methods else None


def saved_run(spec: Experiment, directory: Path) -> SavedRun | None:
    """Read the run of ``spec`` in ``directory``, None if there is none.

    Raises:
        OtherExperimentError: If the directory holds a run of another experiment.
    """
    file = directory / "experiment.toml"
    if not file.exists():
        return None
    if found := differences(files.read_toml(file), experiment.to_table(spec)):
        raise OtherExperimentError(f"{directory} holds a run with other settings ({found})")
    return read_run(directory)


def differences(saved: Mapping[str, Any], planned: Mapping[str, Any]) -> str:
    """The settings in which a saved experiment differs from a planned one, as text; empty if there are none."""
    there, here = (files.flatten(table, keep_empty=True) for table in (saved, planned))
    found = [path for path in {**here, **there} if repr(there.get(path)) != repr(here.get(path))]
    found.sort(key=lambda path: not path.endswith(".name"))  # other classes have other settings
    words = [f"{path} {there.get(path, 'unset')} there, {here.get(path, 'unset')} here" for path in found[:_LISTED]]
    words += [f"{len(found) - _LISTED} more"] * (len(found) > _LISTED)
    return printable_line("; ".join(words))


def first_difference(
    one: Mapping[str, Any], other: Mapping[str, Any], shared: Sequence[str] = SHARED_KEYS
) -> str | None:
    """The first shared table or key in which two experiments differ, None if there is none."""
    return next((f"[{name}]" if name in SHARED else name for name in shared if one.get(name) != other.get(name)), None)


def saved_methods(comparison: Comparison, out: Path, chosen: Mapping[str, SettingPoint]) -> list[MethodRuns]:
    """The saved runs of a comparison, method by method."""
    runs: dict[str, list[SavedRun]] = {method.name: [] for method in comparison.methods}
    for job in comparison.runs(chosen):
        run = saved_run(job.spec, job.directory_in(out))
        if run is not None:
            runs[job.spec.name].append(run)
    return [MethodRuns(label, found) for label, found in runs.items() if found]
