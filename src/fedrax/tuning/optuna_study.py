"""Optuna's search of one method (the extra optuna): instead of every point of a grid, and for ranges.

The tree-structured Parzen estimator (Bergstra et al. 2011) proposes a few points, is told their values, and proposes
the next. Its proposals depend on the seed and the values only, so that an interrupted search proposes the same points
again, whose runs are finished, and continues.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fedrax.errors import FedraxError
from fedrax.tuning.selection import SearchRange, SearchResult, Trial, metric_of

BATCH = 5
"""Points proposed at once. It does not depend on the number of workers, so that proposals do not either."""
DIGITS = 4
"""Significant digits of a proposed number."""


class OptunaStudy:
    """The search of one method.

    Args:
        axes: Paths with a list of values or a range for each.
        trials: Number of points to try.
        seed: Seed of the estimator.
        lower_is_better: Whether smaller values of the metric are better.
    """

    def __init__(
        self,
        axes: Sequence[tuple[str, tuple[Any, ...] | SearchRange]],
        trials: int,
        seed: int,
        lower_is_better: bool,
    ):
        self._axes, self._left, self._lower = axes, trials, lower_is_better
        self._asked: list[Any] = []
        self._trials: list[Trial] = []
        try:
            optuna = importlib.import_module("optuna")
        except ImportError as error:
            raise FedraxError("trials need the package optuna: pip install optuna") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _no_warnings():
            sampler = optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
            direction = "minimize" if lower_is_better else "maximize"
            self._study = optuna.create_study(sampler=sampler, direction=direction)

    @property
    def done(self) -> bool:
        """Whether all trials have been proposed."""
        return self._left == 0

    def ask(self) -> list[dict[str, Any]]:
        """The next points, which may contain duplicates; none if the search is done."""
        with _no_warnings():
            self._asked = [self._study.ask() for _ in range(min(BATCH, self._left))]
            self._left -= len(self._asked)
            return [{path: _value(trial, path, values) for path, values in self._axes} for trial in self._asked]

    def tell(self, trials: Sequence[Trial]) -> None:
        """Report the trials of the last points; a diverged one is worse than any other."""
        worst = math.inf if self._lower else -math.inf
        with _no_warnings():
            for asked, trial in zip(self._asked, trials, strict=True):
                self._study.tell(asked, worst if trial.value is None else trial.value)
        self._trials += trials

    def result(self, metric: str) -> SearchResult:
        """All trials without duplicates."""
        ranges = {path: values for path, values in self._axes if isinstance(values, SearchRange)}
        trials = [self._trials[i] for i in _first_occurrences([trial.point for trial in self._trials])]
        return SearchResult(metric_of(trials, metric), self._lower, tuple(trials), ranges)


def distinct(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The points without duplicates."""
    return [points[i] for i in _first_occurrences(points)]


def _first_occurrences(points: Sequence[Any]) -> list[int]:
    """Positions of the first occurrence of each point; points may not be hashable."""
    return [i for i, point in enumerate(points) if point not in points[:i]]


def _value(trial: Any, path: str, values: tuple[Any, ...] | SearchRange) -> Any:
    """The value that Optuna proposes for a path."""
    if not isinstance(values, SearchRange):
        return values[trial.suggest_categorical(path, range(len(values)))]
    if values.is_integer:
        return trial.suggest_int(path, values.low, values.high, log=values.log)
    found = trial.suggest_float(path, values.low, values.high, log=values.log)
    return min(max(float(f"{found:.{DIGITS}g}"), values.low), values.high)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Ignore Optuna's warnings about experimental features: its version is bounded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
