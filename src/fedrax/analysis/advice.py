"""What to try first: the best of a shortlist on the task itself, or a rule; each with its record in a study.

``python -m benchmarks.advice`` has made the study: the shortlist and the rule of one half of its tasks, the records on
the other half and on data that they had not seen. It writes them to ``advice.json`` here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import mean
from typing import Any

from fedrax.analysis.diagnosis import Diagnosis
from fedrax.analysis.trials import Trials, Tried

NEAREST = 5
"""Of the study's pairs those that are compared with a task."""


@dataclass(frozen=True)
class Advice:
    """A method to try first."""

    among: str
    """Which methods it was chosen from."""
    method: str
    price: str
    """What it costs beside FedAvg; empty: nothing."""
    reason: str
    """The numbers that the choice follows, or that there is none."""
    close: int
    tasks: int
    """Such advice was within 1 point of the best tuned method on ``close`` of ``tasks`` that it was not made of."""
    short: float
    """Points of accuracy below the best on them, in the mean."""
    close_new: int
    tasks_new: int
    """The same on all tasks, with advice made of those of other data sets."""

    def line(self) -> str:
        """A sentence."""
        price = f" ({self.price})" if self.price else ""
        return (
            f"{self.method}{price}, {self.reason}; such advice was within 1 point of accuracy of the best"
            f" of {len(study()['methods'])} tuned methods on {self.close} of {self.tasks} tasks that it was not made of"
            f" ({self.short:.2g} points below it in the mean), on new data sets on {self.close_new} of {self.tasks_new}"
        )


@cache
def study() -> dict[str, Any]:
    """What the study left: its methods, the shortlist and the rules with their records, and pairs."""
    return json.loads(resources.files("fedrax.analysis").joinpath("advice.json").read_text(encoding="utf-8"))


def shortlist() -> tuple[str, ...]:
    """The methods to try."""
    return tuple(study()["shortlist"]["methods"])


def advise(made: Diagnosis | None, trials: Trials | None = None) -> list[Advice]:
    """The first advice: of the trials, where there were any, then of each rule that needs no number unmeasured."""
    tried = [] if trials is None else [_of_trials(trials)]
    rules = [rule for rule in study()["rules"] if rule["feature"] is None or _has(made, rule["feature"])]
    return tried + [_of_rule(rule, made) for rule in rules]


def _has(made: Diagnosis | None, name: str) -> bool:
    """Whether a number could be measured: infinite is what is lost in noise."""
    return made is not None and math.isfinite(getattr(made, name))


def _of_trials(trials: Trials) -> Advice:
    first = trials.tried[0]
    method, records = first.method, study()["shortlist"]
    reason = f"the best of {len(trials.tried)} tried here, at {_settings(first)}"
    if {trial.method for trial in trials.tried} != set(records["methods"]):
        reason += f" (not all of {', '.join(records['methods'])}, of which the following is the record)"
    return Advice("methods tried", method, study()["methods"][method], reason, *_counts(records))


def _of_rule(rule: dict[str, Any], made: Diagnosis | None) -> Advice:
    name, at = rule["feature"], rule["threshold"]
    if name is None:
        method, reason = rule["below"], "whatever was measured (no threshold did better)"
    else:
        value = float(getattr(made, name))
        below = value <= at
        method = rule["below"] if below else rule["above"]
        reason = f"since {name.replace('_', ' ')} is {value:.3g}, {'at most' if below else 'above'} {at:.3g}"
    return Advice(rule["among"], method, study()["methods"][method], reason, *_counts(rule))


def _counts(records: dict[str, Any]) -> tuple[int, int, float, int, int]:
    unseen, new = records["record"], records["new"]
    return unseen["close"], unseen["pairs"], unseen["short"], new["close"], new["pairs"]


def _settings(trial: Tried) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in trial.point.items())


def like_yours(made: Diagnosis) -> tuple[float, float, dict[str, float]]:
    """(least, largest, points below the best by method): of the study's pairs whose drift is nearest to this one's."""
    apart = lambda pair: abs(math.log(max(pair["drift"], 1e-9)) - math.log(max(made.drift, 1e-9)))  # noqa: E731
    nearest = sorted(study()["pairs"], key=apart)[:NEAREST]
    drifts = [pair["drift"] for pair in nearest]
    short = {method: mean(pair["short"][method] for pair in nearest) for method in study()["methods"]}
    return min(drifts), max(drifts), dict(sorted(short.items(), key=lambda item: item[1]))


def lines(made: Diagnosis | None, trials: Trials | None = None, not_tried: str | None = None) -> list[str]:
    """What was tried and what to try first, a sentence each; ``not_tried``: why there are no trials."""
    told = [] if trials is None else _tried(trials)
    if found := advise(made, trials):
        first, *others = found
        told.append(f"try first      {first.line()}; FedAvg on {study()['fedavg']['close']} of the first")
        if trials is None:
            rest = [other for other in others if other.method != first.method]
            told += [f"               of {other.among}: {other.line()}" for other in rest]
    if trials is None and made is not None and math.isfinite(made.drift):
        low, high, short = like_yours(made)
        listed = ", ".join(f"{method} {points:.1f}" for method, points in short.items())
        told += [
            f"alike          on the {NEAREST} tasks of the study with the drift nearest to this one's, {low:.2g} to"
            f" {high:.2g}, mean points below the best: {listed}",
            "step sizes     these are of methods tuned each for itself: try step sizes with each (compare --grid)",
        ]
    if made is not None and made.clients == 1:
        told.append(
            "one client     none of the study's tasks had so few: methods against drift have nothing to correct"
        )
    if not_tried is not None:
        told.append(f"not tried      {not_tried}")
    return told


def _tried(trials: Trials) -> list[str]:
    unit, places = (100, 1) if trials.metric == "accuracy" else (1, 4)
    scores = [
        f"{trial.method} {unit * trial.score:.{places}f} ± {unit * trial.spread:.{places}f} ({_settings(trial)})"
        for trial in trials.tried
    ]
    what = "accuracy in %" if trials.metric == "accuracy" else "loss"
    of_rows = "± over seeds"
    if trials.metric == "accuracy":
        best = trials.tried[0].score
        of_rows += f"; other rows alone would move it by about {100 * math.sqrt(best * (1 - best) / trials.rows):.1f}"
    at_end = [trial.method for trial in trials.tried if trial.at_end]
    ends = f"; at the end of the step sizes tried: {', '.join(at_end)}" if at_end else ""
    return [
        f"tried          {trials.rounds} rounds of each at its own best step size, {what} on {trials.rows} rows that"
        f" clients hold out ({of_rows}): {', '.join(scores)}{ends}",
        *(f"left out       {reason}" for reason in trials.refused),
    ]
