"""What to try first: a rule made of one half of a study's tasks, with its record on the other half.

``python -m benchmarks.advice`` has made the study, the rule and the record, and writes them to ``advice.json`` here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import mean
from typing import Any

from fedrax.diagnosis.diagnosis import Diagnosis

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
    """The number that the choice follows, or that there is none."""
    close: int
    tasks: int
    """The rule was within 1 point of the best tuned method on ``close`` of ``tasks`` that it was not made of."""
    short: float
    """Points of accuracy below the best on them, in the mean."""
    close_again: int
    tasks_again: int
    """The same on the tasks that it was made of, with other seeds."""

    def line(self) -> str:
        """A sentence."""
        best = f"within 1 point of the best of {len(study()['methods'])} tuned methods"
        new = f"on {self.close} of {self.tasks} tasks that the rule was not made of"
        again = f"with other seeds on {self.close_again} of the {self.tasks_again} that it was made of"
        price = f" ({self.price})" if self.price else ""
        mean_short = f"({self.short:.2g} points below it in the mean)"
        return f"{self.method}{price}, {self.reason}; {best} {new} {mean_short}, and {again}"


@cache
def study() -> dict[str, Any]:
    """What the study left: its methods, rules with their records, and pairs."""
    return json.loads(resources.files("fedrax.diagnosis").joinpath("advice.json").read_text(encoding="utf-8"))


def advise(made: Diagnosis) -> list[Advice]:
    """The first advice of each rule."""
    return [_advice(rule, made) for rule in study()["rules"]]


def _advice(rule: dict[str, Any], made: Diagnosis) -> Advice:
    name, at = rule["feature"], rule["threshold"]
    if name is None:
        method, reason = rule["below"], "whatever was measured (no threshold did better)"
    else:
        value = float(getattr(made, name))
        below = value <= at
        method = rule["below"] if below else rule["above"]
        reason = f"since {name.replace('_', ' ')} is {value:.3g}, {'at most' if below else 'above'} {at:.3g}"
    new, again = rule["record"], rule["again"]
    counts = new["close"], new["pairs"], new["short"], again["close"], again["pairs"]
    return Advice(rule["among"], method, study()["methods"][method], reason, *counts)


def like_yours(made: Diagnosis) -> tuple[float, float, dict[str, float]]:
    """(least, largest, points below the best by method): of the study's pairs whose drift is nearest to this one's."""
    apart = lambda pair: abs(math.log(max(pair["drift"], 1e-9)) - math.log(max(made.drift, 1e-9)))  # noqa: E731
    nearest = sorted(study()["pairs"], key=apart)[:NEAREST]
    drifts = [pair["drift"] for pair in nearest]
    short = {method: mean(pair["short"][method] for pair in nearest) for method in study()["methods"]}
    return min(drifts), max(drifts), dict(sorted(short.items(), key=lambda item: item[1]))


def lines(made: Diagnosis) -> list[str]:
    """What to try first, a sentence each."""
    first, *others = advise(made)
    told = [f"try first      {first.line()}; FedAvg on {study()['fedavg']['close']} of the first"]
    told += [f"               of {other.among}: {other.line()}" for other in others if other.method != first.method]
    low, high, short = like_yours(made)
    listed = ", ".join(f"{method} {points:.1f}" for method, points in short.items())
    return [
        *told,
        f"alike          on the {NEAREST} tasks of the study with the drift nearest to this one's, {low:.2g} to"
        f" {high:.2g}, mean points below the best: {listed}",
        "step sizes     these are of methods tuned each for itself: try step sizes with each (fedrax compare --grid)",
    ]
