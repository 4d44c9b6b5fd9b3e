"""Results of methods as data: the table of a comparison and the rounds of its runs, also read from directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from fedrax.config.arguments import checked_arguments
from fedrax.errors import FedraxError
from fedrax.report import comparison_table
from fedrax.report.report_data import about_repeated, gather
from fedrax.report.runs import MethodRuns, MethodSummary, main_metric, summarize_all, target_of


class MethodResults:
    """Runs of methods with their table, as data and as text: what `SavedResults` and the result of `compare` share.

    Example:
        >>> method = fedrax.experiments.Experiment("FedAvg", run=fedrax.Settings(rounds=1, cohort_size=2))
        >>> comparison = fedrax.experiments.Comparison("one", (method,), seeds=(0,), target=None)
        >>> results: fedrax.report.MethodResults = fedrax.compare(comparison, directory="shared", progress=False)
        >>> results.table()["method", "seeds"].rows(), results.metric
        ([('FedAvg', 1)], 'test_accuracy')
    """

    methods: Sequence[MethodRuns]
    """The runs of each method."""

    @property
    def target(self) -> float | None:
        """The target accuracy of the costs in the table.

        The requested one, that of the runs, or 95 % of the best method's final accuracy.
        """
        return self._target[0]

    @property
    def _target(self) -> tuple[float | None, bool]:
        """The target, and whether it was given."""
        raise NotImplementedError

    @property
    def metric(self) -> str:
        """The metric that methods are compared by."""
        return main_metric(self.methods)

    @property
    def rows(self) -> list[MethodSummary]:
        """The table, a row for each method."""
        return summarize_all(self.methods, self.target, self.metric)

    def legend(self) -> str:
        """Explain the target and the columns of the table.

        Returns:
            A line to print below the table.
        """
        return comparison_table.legend(*self._target, self.rows)

    def to_polars(self) -> pl.DataFrame:
        """Return every round of every run as a Polars table.

        Returns:
            The columns ``method`` and ``seed``, and those of events; null where an event lacks a value.
        """
        rows = []
        for method in self.methods:
            for run in method.runs:
                of_run = {"method": method.label, "seed": run.seed}
                rows += [of_run | event | of_run for event in run.events]  # a method may report a value of that name
        return pl.DataFrame(rows, infer_schema_length=None)

    def table(self) -> pl.DataFrame:
        """Return the table as numbers, for instance for ``write_csv``.

        Returns:
            A row for each method, with means over its seeds and, in columns ``NAME_std``, their sample standard
            deviations; columns without any value are left out.
        """
        return comparison_table.data_frame(self.rows, self.metric)

    def to_latex(self) -> str:
        """Return the table for LaTeX with the package booktabs.

        Returns:
            A ``tabular``: mean ± sample standard deviation over seeds, the best of each column bold.
        """
        return comparison_table.latex(self.rows, self.target, self.metric)

    def to_markdown(self) -> str:
        """Return the table as Markdown.

        Returns:
            Mean ± sample standard deviation over seeds, the best of each column bold.
        """
        return comparison_table.markdown(self.rows, self.target, self.metric)

    def _repr_markdown_(self) -> str:
        return repr(self)


@dataclass(frozen=True, repr=False)
class SavedResults(MethodResults):
    """Results that were read from directories.

    Example:
        >>> method = fedrax.experiments.Experiment("FedAvg", run=fedrax.Settings(rounds=2, cohort_size=2))
        >>> comparison = fedrax.experiments.Comparison("one", (method,), seeds=(0, 1), target=None)
        >>> _ = fedrax.compare(comparison, directory="saved", progress=False)
        >>> fedrax.report.read_results("saved").to_polars().select("seed", "round").rows()
        [(0, 1), (0, 2), (1, 1), (1, 2)]
    """

    methods: Sequence[MethodRuns]
    requested_target: float | None = None
    """The requested target accuracy."""
    repeated: Sequence[Path] = ()
    """Directories that are left out, because a run of ``methods`` has the same settings and seed."""
    search_lines: Sequence[str] = ()
    """What the searches of the comparisons printed: the settings that they selected, and warnings."""

    def warnings(self) -> list[str]:
        """Why the table may be unfair: best values at an end of a grid, and different numbers of trials.

        Returns:
            Lines; none without a search.
        """
        return [line for line in self.search_lines if line.startswith("warning")]

    @property
    def _target(self) -> tuple[float | None, bool]:
        return target_of(self.methods, self.requested_target)

    def legend(self) -> str:
        """Explain the target and the columns of the table, and name the runs that are left out.

        Returns:
            A line to print below the table.
        """
        return " ".join(part for part in (super().legend(), about_repeated(self.repeated)) if part)

    def __repr__(self) -> str:
        """The table in Markdown, and what its columns are."""
        legend = self.legend()
        return "\n".join([self.to_markdown(), *[legend] * bool(legend), *self.warnings()])


@checked_arguments
def read_results(*directories: Path | str, target: float | None = None) -> SavedResults:
    """Read runs and comparisons as one table of methods.

    Runs that differ only in their seeds are one method. No code that an experiment names is run.

    Args:
        *directories: Run directories, or directories of several runs such as that of a comparison; runs may be
            unfinished.
        target: Target accuracy of the costs in the table; by default the comparison's, the one at which all runs stop,
            or 95 % of the best method's final accuracy.

    Returns:
        The methods with their runs.

    Raises:
        FedraxError: If a directory holds no run, or one is damaged.

    Example:
        >>> method = fedrax.experiments.Experiment("FedAvg", run=fedrax.Settings(rounds=1, cohort_size=2))
        >>> comparison = fedrax.experiments.Comparison("one", (method,), seeds=(0,), target=None)
        >>> _ = fedrax.compare(comparison, directory="read", progress=False)
        >>> fedrax.report.read_results("read").table()["method", "seeds", "state"].row(0)
        ('FedAvg', 1, 'finished')
    """
    if not directories:
        raise FedraxError("no directory given: read_results(DIR, ...)")
    data = gather([Path(directory) for directory in directories], target)
    searches = [source.search for source in data.sources if source.search is not None]
    lines = [line for search in searches for line in search.lines]
    return SavedResults(data.methods, data.target if data.given else None, data.repeated, lines)
