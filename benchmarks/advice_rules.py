"""The study of ``benchmarks.advice``: rules and shortlists, how they are made, and their records.

The rule and the shortlist to try are made of every second pair with the seeds of tuning. Their records are of other
seeds, of the other pairs apart; and how either does on data that none of its pairs had is a record of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any, NamedTuple, TypeVar

import numpy as np

from benchmarks.advice_study import AT_THEIRS, CANDIDATES, PAIRS, SCORING, TRIALS, TUNING
from benchmarks.sessions import Session
from fedrax.analysis.shortlist import METHODS

FEATURES = ("dissimilarity", "apart", "noise", "cohort_noise", "drift", "growth")
DEAR = ("GradMA",)
"""Methods of more than one gradient a local step."""
CLOSE = 1.0
"""Points of accuracy below the best that are as good."""
POINTS = 100.0
LISTED = 4
"""Methods on a shortlist, at most."""
Scores = dict[str, float]


@dataclass(frozen=True)
class Trained:
    """A pair of data and partition: what was measured of it, and what each method came to."""

    name: str
    data: str
    """The data set's name: what is learnt of one of its pairs may be of that data alone."""
    measured: dict[str, float]
    best: dict[str, dict[str, float]]
    """Each method's point, chosen on held-out rows."""
    ends: dict[str, dict[str, float]]
    """Accuracy of each method at that point on test rows, by seed."""
    validated: Scores = field(default_factory=dict)
    """Accuracy of each method at that point on held-out rows, by the seeds of tuning."""
    tried: Scores = field(default_factory=dict)
    """What ``fedrax diagnose`` finds of the methods that it may try."""
    tried_ends: dict[str, dict[str, float]] = field(default_factory=dict)
    """Accuracy of these on test rows, by seed, at the points that it finds."""
    _short: dict[tuple[int, ...], Scores] = field(default_factory=dict, repr=False, compare=False)

    def short(self, seeds: tuple[int, ...]) -> Scores:
        """Points of accuracy that each method is below the best of all, mean over seeds; asked for by every rule."""
        if seeds not in self._short:
            self._short[seeds] = self._compared(seeds)
        return self._short[seeds]

    def _compared(self, seeds: tuple[int, ...]) -> Scores:
        scores = {method: mean(found[str(seed)] for seed in seeds) for method, found in self.ends.items()}
        return {method: POINTS * (max(scores.values()) - value) for method, value in scores.items()}

    @property
    def made(self) -> Scores:
        """What rules are made of: ``short`` with the seeds of tuning."""
        return self.short(TUNING)

    def highest(self, seeds: tuple[int, ...]) -> float:
        """The best method's accuracy in percent."""
        return POINTS * max(mean(found[str(seed)] for seed in seeds) for found in self.ends.values())

    def short_of_trials(self, method: str, seeds: tuple[int, ...]) -> float:
        """Points that a method is below the best of all at the point that trials found; negative where it is above."""
        return self.highest(seeds) - POINTS * mean(self.tried_ends[method][str(seed)] for seed in seeds)


class Rule(NamedTuple):
    """``below`` where the measured ``feature`` is at most ``threshold``, else ``above``; ``below`` without one."""

    below: str
    above: str
    feature: str | None = None
    threshold: float | None = None

    def pick(self, measured: dict[str, float]) -> str:
        """The method to try first."""
        if self.feature is None or self.threshold is None:
            return self.below
        return self.below if measured[self.feature] <= self.threshold else self.above

    def first(self, pair: Trained) -> str:
        """The method to try first on a pair."""
        return self.pick(pair.measured)

    def short(self, pair: Trained, seeds: tuple[int, ...]) -> float:
        """Points that it is below the best, tuned."""
        return pair.short(seeds)[self.first(pair)]

    def text(self) -> str:
        """In words."""
        if self.feature is None:
            return f"always {self.below}"
        return f"{self.below} where {self.feature} is at most {self.threshold:.3g}, else {self.above}"


class Shortlist(NamedTuple):
    """The best of these methods on rows that clients hold out, each at its own best point."""

    methods: tuple[str, ...]

    def first(self, pair: Trained) -> str:
        """The method to try first on a pair; one that diverged is none."""
        return max(self.methods, key=lambda method: pair.tried.get(method, 0.0))

    def short(self, pair: Trained, seeds: tuple[int, ...]) -> float:
        """Points that it is below the best, at the point at which it was the best of the trials."""
        return pair.short_of_trials(self.first(pair), seeds)


Choice = Rule | Shortlist
Chosen = TypeVar("Chosen", Rule, Shortlist)


class BestValidated(NamedTuple):
    """The best of all methods on held-out rows."""

    def short(self, pair: Trained, seeds: tuple[int, ...]) -> float:
        """Points that it is below the best."""
        return pair.short(seeds)[max(pair.validated, key=pair.validated.__getitem__)]


def pairs_of(session: Session) -> list[Trained]:
    """The pairs on which all methods have run."""
    found: dict[str, dict[str | None, Any]] = {}
    for run in session.runs:
        found.setdefault(run["pair"], {})[run.get("method")] = run
    return [
        Trained(
            pair.name,
            pair.data,
            runs[None]["diagnosis"],
            {m: runs[m]["best"] for m in METHODS},
            {m: runs[m]["test"] for m in METHODS},
            {m: runs[m]["chosen"] or 0.0 for m in METHODS},
            {m: trial["score"] for m, trial in runs[TRIALS]["trials"].items()},
            runs[AT_THEIRS]["test"],
        )
        for pair in PAIRS
        if {None, *METHODS, TRIALS, AT_THEIRS} <= (runs := found.get(pair.name, {})).keys()
    ]


# -- the rule ----------------------------------------------------------------------------------------------------------


def constants(methods: list[str]) -> list[Rule]:
    """Always one method."""
    return [Rule(method, method) for method in methods]


def stumps(pairs: list[Trained], methods: list[str]) -> list[Rule]:
    """One threshold on one measured number, between two of the pairs, with the best method of either side.

    Misses and points add up over the sides, so that the best of each is the best of both.
    """
    short = np.array([[pair.made[method] for method in methods] for pair in pairs])
    cost = (short > CLOSE) * 1e6 + short  # fewest misses first
    made = []
    for feature in FEATURES:
        values = np.array([pair.measured[feature] for pair in pairs])
        order = np.argsort(values, kind="stable")
        values, sums = values[order], cost[order].cumsum(axis=0)
        for i in np.flatnonzero(np.diff(values)):
            below, above = sums[i].argmin(), (sums[-1] - sums[i]).argmin()
            if below != above:
                made.append(Rule(methods[below], methods[above], feature, float(values[i] + values[i + 1]) / 2))
    return made or constants(methods)


def shortlists() -> list[Shortlist]:
    """FedAvg, and up to ``LISTED - 1`` others."""
    others = [name for name in CANDIDATES if name != "FedAvg"]
    sizes = range(1, LISTED)
    return [Shortlist(("FedAvg", *some)) for size in sizes for some in itertools.combinations(others, size)]


def misses(choice: Choice, pairs: list[Trained]) -> tuple[int, float]:
    """(pairs on which the choice is over a point below the best, mean points below it), with the seeds of tuning."""
    short = [choice.short(pair, TUNING) for pair in pairs]
    return sum(points > CLOSE for points in short), mean(short)


def fitted(pairs: list[Trained], choices: Sequence[Chosen]) -> Chosen:
    """The choice of fewest misses, of equal ones the nearest to the best in the mean."""
    return min(choices, key=lambda choice: misses(choice, pairs))


def without(data: str, pairs: list[Trained]) -> list[Trained]:
    """The pairs of all other data."""
    return [pair for pair in pairs if pair.data != data]


def left_out(pairs: list[Trained], rules: Any) -> list[int]:
    """Whether the rule made of the pairs of all other data misses each pair; ``rules``: pairs -> candidates."""
    made = {data: fitted(others := without(data, pairs), rules(others)) for data in {pair.data for pair in pairs}}
    return [misses(made[pair.data], [pair])[0] for pair in pairs]


class Made(NamedTuple):
    """The rule, and how many pairs left out of their making the two kinds of rules miss."""

    rule: Rule
    always_one: int
    by_threshold: int


def make(pairs: list[Trained], methods: list[str]) -> Made:
    """Always one method, unless a threshold misses fewer of the pairs left out by more than two standard deviations.

    Of the sum of the differences, which are 1, 0 or -1 a pair.
    """
    kinds: tuple[Any, ...] = (lambda _: constants(methods), lambda some: stumps(some, methods))
    one, threshold = (left_out(pairs, kind) for kind in kinds)
    gains = [a - b for a, b in zip(one, threshold, strict=True)]
    better = sum(gains) > 2 * stdev(gains) * len(gains) ** 0.5
    return Made(fitted(pairs, kinds[better](pairs)), sum(one), sum(threshold))


class Record(NamedTuple):
    """A rule on pairs, by test rows of the scoring seeds."""

    close: int
    """Pairs where it is within a point of the best."""
    pairs: int
    short: float
    """Mean points below the best."""
    worst: float


def record(choice: Choice | BestValidated, pairs: list[Trained]) -> Record:
    """How a first advice does; the best is of all methods."""
    return _record([choice.short(pair, SCORING) for pair in pairs])


def _record(short: list[float]) -> Record:
    return Record(sum(points <= CLOSE for points in short), len(short), mean(short), max(short))


def on_new_data(pairs: list[Trained], made_of: Callable[[list[Trained]], Choice]) -> Record:
    """How choices do that were made of the pairs of all other data, on each data set in turn."""
    short = []
    for data in sorted({pair.data for pair in pairs}):
        choice = made_of(without(data, pairs))
        short += [choice.short(pair, SCORING) for pair in pairs if pair.data == data]
    return _record(short)
