"""The study of ``benchmarks.advice`` as a rule, its record, and a page.

The rule is made of every second pair with the seeds of tuning. Its record is of other seeds, of the other pairs apart.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, NamedTuple

from benchmarks.advice_study import BATCH, METHODS, RATES, ROUNDS, SCORING, STEPS, TUNING, VALIDATION
from benchmarks.pages import markdown_table, write_page
from benchmarks.sessions import RESULTS, Session

SHIPPED = Path(__file__).parents[1] / "src" / "fedrax" / "diagnosis" / "advice.json"
FEATURES = ("dissimilarity", "apart", "noise", "cohort_noise", "drift", "growth")
DEAR = ("GradMA",)
"""Methods of more than one gradient a local step."""
CLOSE = 1.0
"""Points of accuracy below the best that are as good."""
POINTS = 100.0
Scores = dict[str, float]


@dataclass(frozen=True)
class Trained:
    """A pair of data and partition: what was measured of it, and what each method came to."""

    name: str
    measured: dict[str, float]
    best: dict[str, dict[str, float]]
    """Each method's point, chosen on held-out rows."""
    ends: dict[str, dict[str, float]]
    """Accuracy of each method at that point on test rows, by seed."""

    def short(self, seeds: tuple[int, ...]) -> Scores:
        """Points of accuracy that each method is below the best of all, mean over seeds."""
        scores = {method: mean(found[str(seed)] for seed in seeds) for method, found in self.ends.items()}
        return {method: POINTS * (max(scores.values()) - value) for method, value in scores.items()}

    @cached_property
    def made(self) -> Scores:
        """What rules are made of: ``short`` with the seeds of tuning."""
        return self.short(TUNING)

    def highest(self, seeds: tuple[int, ...]) -> float:
        """The best method's accuracy in percent."""
        return POINTS * max(mean(found[str(seed)] for seed in seeds) for found in self.ends.values())


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

    def text(self) -> str:
        """In words."""
        if self.feature is None:
            return f"always {self.below}"
        return f"{self.below} where {self.feature} is at most {self.threshold:.3g}, else {self.above}"


def pairs_of(session: Session) -> list[Trained]:
    """The pairs on which all methods have run."""
    found: dict[str, dict[str | None, Any]] = {}
    for run in session.runs:
        found.setdefault(run["pair"], {})[run.get("method")] = run
    return [
        Trained(
            name,
            runs[None]["diagnosis"],
            {m: runs[m]["best"] for m in METHODS},
            {m: runs[m]["test"] for m in METHODS},
        )
        for name, runs in found.items()
        if {None, *METHODS} <= runs.keys()
    ]


# -- the rule ----------------------------------------------------------------------------------------------------------


def constants(methods: list[str]) -> list[Rule]:
    """Always one method."""
    return [Rule(method, method) for method in methods]


def stumps(pairs: list[Trained], methods: list[str]) -> list[Rule]:
    """One threshold on one measured number, between two of the pairs."""
    made = []
    for feature in FEATURES:
        values = sorted({pair.measured[feature] for pair in pairs})
        for low, high in itertools.pairwise(values):
            made += [
                Rule(below, above, feature, (low + high) / 2)
                for below in methods
                for above in methods
                if below != above
            ]
    return made


def misses(rule: Rule, pairs: list[Trained]) -> tuple[int, float]:
    """(pairs on which the rule is over a point below the best, mean points below it), with the seeds of tuning."""
    short = [pair.made[rule.pick(pair.measured)] for pair in pairs]
    return sum(points > CLOSE for points in short), mean(short)


def fitted(pairs: list[Trained], rules: list[Rule]) -> Rule:
    """The rule of fewest misses, of equal ones the nearest to the best in the mean."""
    return min(rules, key=lambda rule: misses(rule, pairs))


def left_out(pairs: list[Trained], rules: Any) -> list[int]:
    """Whether the rule made of all other pairs misses each pair; ``rules``: pairs -> candidates."""
    rest = [[other for other in pairs if other is not pair] for pair in pairs]
    return [misses(fitted(others, rules(others)), [pair])[0] for pair, others in zip(pairs, rest, strict=True)]


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


def record(rule: Rule, pairs: list[Trained]) -> Record:
    """How the rule's first advice does; the best is of all methods."""
    short = [pair.short(SCORING)[rule.pick(pair.measured)] for pair in pairs]
    return Record(sum(points <= CLOSE for points in short), len(pairs), mean(short), max(short))


# -- what is written ---------------------------------------------------------------------------------------------------


def write(session: Session, out: Path) -> list[Path]:
    """The page and, where it goes beside the runs, the rules for ``fedrax diagnose``."""
    pairs = pairs_of(session)
    rules = rules_of(pairs)
    page = write_page(out / "advice.md", sections(session, pairs, rules))
    if out.resolve() != RESULTS:
        return [page]
    part = SHIPPED.with_suffix(".part")
    content = shipped(session, pairs, {name: made.rule for name, made in rules.items()})
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, SHIPPED)
    return [page, SHIPPED]


def rules_of(pairs: list[Trained]) -> dict[str, Made]:
    """The rule of all methods, and that of the cheaper ones; made of every second pair."""
    groups = {"any method": list(METHODS), "one gradient a step": [m for m in METHODS if m not in DEAR]}
    return {name: make(pairs[::2], methods) for name, methods in groups.items()}


def shipped(session: Session, pairs: list[Trained], rules: dict[str, Rule]) -> dict[str, Any]:
    """For the package: the rules with their records, on other pairs and again on their own; what methods came to."""
    used, unseen = pairs[::2], pairs[1::2]

    def told(name: str, rule: Rule) -> dict[str, Any]:
        records = {"record": record(rule, unseen)._asdict(), "again": record(rule, used)._asdict()}
        return {"among": name, **rule._asdict(), **records}

    return {
        "session": session.header["id"],
        "methods": {name: method.price for name, method in METHODS.items()},
        "rules": [told(name, rule) for name, rule in rules.items()],
        "fedavg": record(Rule("FedAvg", "FedAvg"), unseen)._asdict(),
        "pairs": [
            {
                "name": pair.name,
                "drift": float(f"{pair.measured['drift']:.4g}"),
                "short": {m: round(points, 2) for m, points in pair.short(SCORING).items()},
            }
            for pair in pairs
        ],
    }


def sections(session: Session, pairs: list[Trained], made: dict[str, Made]) -> list[str]:
    """The page."""
    used, unseen = pairs[::2], pairs[1::2]
    return [
        "# What to try first",
        introduction(session, pairs),
        "## The rule",
        *(rule_text(name, found, len(used)) for name, found in made.items()),
        records_table(used, unseen, {name: found.rule for name, found in made.items()}),
        "## Points below the best",
        f"Test accuracy, mean over seeds {_list(SCORING)}; pairs marked * made the rule, with seeds {_list(TUNING)}.",
        shortfall_table(pairs),
        "## Method by method",
        *(method_text(name, pairs) for name in METHODS),
        "## What was measured of the pairs",
        features_table(pairs),
    ]


def introduction(session: Session, pairs: list[Trained]) -> str:
    """What was done."""
    rates, held = ", ".join(f"{rate:g}" for rate in RATES), f"{100 * VALIDATION:.0f} %"
    return (
        f"Written by `python -m benchmarks.advice` on {session.header['date']} from session `{session.header['id']}` of"
        f" `advice.jsonl`. {len(METHODS)} methods on {len(pairs)} pairs of data and partition, {ROUNDS} rounds of"
        f" {STEPS} local steps on batches of {BATCH} (LoSAC: on one of its blocks). Each is tuned over `local.lr` in"
        f" {rates} and the values of one more number where it has one, by {held} of each client's rows held out, with"
        f" seeds {_list(TUNING)}; a seed decides the start, the cohorts and the batches. All methods have the same"
        " rounds and the same steps, though GradMA takes up to three gradients a step and EPISODE two exchanges a"
        f" round. The rule is made of every second pair, by test rows with seeds {_list(TUNING)}; its record is by test"
        f" rows with seeds {_list(SCORING)}. It is always one method, unless a threshold on one of the numbers that"
        " `fedrax diagnose` measures is more often within 1 point of the best, on pairs left out of its making and by"
        " more than two standard deviations.\n\n"
        f"{session.machine_text()}"
    )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"


def rule_text(name: str, made: Made, count: int) -> str:
    """A rule and why it is of its kind."""
    return (
        f"**Of {name}: {made.rule.text()}.** On each of {count} pairs with the rule made of the others, and the seeds"
        f" that it is made of: always one method is over 1 point below the best on {made.always_one}, a threshold on"
        f" {made.by_threshold}."
    )


def records_table(used: list[Trained], unseen: list[Trained], rules: dict[str, Rule]) -> str:
    """How often the rules, and each method always, are within a point of the best."""
    advice = {f"**the rule ({name})**": rule for name, rule in rules.items()}
    always = {f"always {name}": Rule(name, name) for name in METHODS}
    lines = []
    for name, rule in (advice | always).items():
        cells = [name]
        for found in (record(rule, unseen), record(rule, used)):
            cells += [f"{found.close} of {found.pairs}", f"{found.short:.2f}", f"{found.worst:.1f}"]
        lines.append(cells)
    head = ("first advice", "within 1 point: pairs not used", "mean short", "worst")
    head += ("within 1 point: the rule's pairs, other seeds", "mean short", "worst")
    return markdown_table(head, lines)


def shortfall_table(pairs: list[Trained]) -> str:
    """A line a pair."""
    lines = []
    for i, pair in enumerate(pairs):
        short = pair.short(SCORING)
        cells = [f"**{short[m]:.1f}**" if short[m] <= CLOSE else f"{short[m]:.1f}" for m in METHODS]
        lines.append([f"{pair.name}{'' if i % 2 else ' *'}", f"{pair.highest(SCORING):.1f}", *cells])
    return markdown_table(("", "best, %", *METHODS), lines)


def method_text(name: str, pairs: list[Trained]) -> str:
    """When a method wins and when it fails, in the pairs of this study."""
    short = {pair.name: pair.short(SCORING) for pair in pairs}
    close = sum(points[name] <= CLOSE for points in short.values())
    worst = max(short, key=lambda pair: short[pair][name])
    rates = [pair.best[name]["local.lr"] for pair in pairs]
    ends = sum(rate in (RATES[0], RATES[-1]) for rate in rates)
    text = (
        f"**{name}** is within 1 point of the best on {close} of {len(pairs)} pairs, and most below it on *{worst}*:"
        f" {short[worst][name]:.1f} points. "
    )
    if name != "FedAvg":
        ahead = {pair: points["FedAvg"] - points[name] for pair, points in short.items()}
        top, low = max(ahead, key=ahead.__getitem__), min(ahead, key=ahead.__getitem__)
        better = sum(points > CLOSE for points in ahead.values())
        worse = sum(points < -CLOSE for points in ahead.values())
        text += f"Against FedAvg it is over 1 point ahead on {better} pairs and over 1 point behind on {worse}"
        text += f"; most ahead on *{top}* ({ahead[top]:+.1f}), most behind on *{low}* ({ahead[low]:+.1f}). "
    if METHODS[name].price:
        text += f"Its price beside FedAvg: {METHODS[name].price}. "
    return (
        text
        + f"Its chosen `local.lr`: {median(rates):g} in the median, {min(rates):g} to {max(rates):g}"
        + (f"; on {ends} pairs at an end of the grid." if ends else ".")
    )


def features_table(pairs: list[Trained]) -> str:
    """The numbers by which a rule may go."""
    lines = [[pair.name, *(f"{pair.measured[feature]:.2f}" for feature in FEATURES)] for pair in pairs]
    return markdown_table(("", *FEATURES), lines)
