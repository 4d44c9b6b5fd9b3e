"""Settings chosen by Optuna (the extra optuna), in place of every point of a grid: ranges, and grids too large.

The tree-structured Parzen estimator (Bergstra et al. 2011) proposes a few settings at once, learns how they came out,
and proposes the next. Seed and outcomes decide what it proposes: the same search again proposes the same, finds those
runs finished, and goes on behind them.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from fedrax.errors import FedraxError
from fedrax.experiments.comparison import Comparison
from fedrax.experiments.search.grid import SearchRange, SettingPoint
from fedrax.tuning.selection import SearchResult, Trial

AT_ONCE = 5
"""Settings that are proposed before any of them is known; the same number wherever runs are made."""
DIGITS = 4
"""Significant digits of a proposed number."""


class OptunaStudy:
    """The search of one method."""

    def __init__(self, comparison: Comparison, label: str, lower_is_better: bool):
        assert comparison.search.trials is not None
        self._axes, self._left = comparison.grids[label].axes, comparison.search.trials
        self._lower = lower_is_better
        self._asked: list[Any] = []
        self._trials: list[Trial] = []
        try:
            optuna = importlib.import_module("optuna")
        except ImportError as error:
            raise FedraxError("trials need the package optuna: pip install optuna") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        with _no_warnings():
            sampler = optuna.samplers.TPESampler(seed=comparison.search_seeds[0] % 2**32, constant_liar=True)
            direction = "minimize" if lower_is_better else "maximize"
            self._study = optuna.create_study(sampler=sampler, direction=direction)

    @property
    def done(self) -> bool:
        """Whether all trials have been made."""
        return self._left == 0

    def ask(self) -> list[SettingPoint]:
        """The next settings, of which some may be the same; none if it is done."""
        with _no_warnings():
            self._asked = [self._study.ask() for _ in range(min(AT_ONCE, self._left))]
            self._left -= len(self._asked)
            return [{path: _value(trial, path, values) for path, values in self._axes} for trial in self._asked]

    def tell(self, trials: Sequence[Trial]) -> None:
        """How the settings came out; those that diverged are worse than any other."""
        worst = math.inf if self._lower else -math.inf
        with _no_warnings():
            for asked, trial in zip(self._asked, trials, strict=True):
                self._study.tell(asked, worst if trial.value is None else trial.value)
        self._trials += trials

    def choice(self, metric: str) -> SearchResult:
        """All that was tried."""
        ranges = {path: values for path, values in self._axes if isinstance(values, SearchRange)}
        trials = [self._trials[i] for i in _first_of_each([trial.point for trial in self._trials])]
        return SearchResult(metric, self._lower, tuple(trials), ranges)


def unlike(points: Sequence[SettingPoint]) -> list[SettingPoint]:
    """The points without those that are there twice."""
    return [points[i] for i in _first_of_each(points)]


def _first_of_each(points: Sequence[Any]) -> list[int]:
    return [i for i, point in enumerate(points) if point not in points[:i]]


def _value(trial: Any, path: str, values: tuple[Any, ...] | SearchRange) -> Any:
    if not isinstance(values, SearchRange):
        return values[trial.suggest_categorical(path, range(len(values)))]
    if values.whole:
        return trial.suggest_int(path, values.low, values.high, log=values.log)
    found = trial.suggest_float(path, values.low, values.high, log=values.log)
    return min(max(float(f"{found:.{DIGITS}g}"), values.low), values.high)


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Optuna warns of what it may change; that is bounded by the version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
