"""The study of ``benchmarks.advice`` as a page, and as what ``fedrax diagnose`` reads."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.advice_rules import (
    CLOSE,
    DEAR,
    FEATURES,
    BestValidated,
    Made,
    Record,
    Rule,
    Shortlist,
    Trained,
    fitted,
    make,
    on_new_data,
    pairs_of,
    record,
    shortlists,
)
from benchmarks.advice_study import BATCH, CANDIDATES, ROUNDS, SCORING, STEPS, TUNING, VALIDATION
from benchmarks.pages import markdown_table, write_page
from benchmarks.sessions import RESULTS, Session
from fedrax.analysis import trials
from fedrax.analysis.shortlist import METHODS, RATES

SHIPPED = Path(__file__).parents[1] / "src" / "fedrax" / "diagnosis" / "advice.json"
GROUPS = {"any method": list(METHODS), "one gradient a step": [m for m in METHODS if m not in DEAR]}
"""Among which methods there is a rule."""


@dataclass(frozen=True)
class Found:
    """What is made of every second pair, and how it does on the others."""

    pairs: list[Trained]
    rules: dict[str, Made]
    shortlist: Shortlist

    @classmethod
    def of(cls, pairs: list[Trained]) -> Found:
        """Made of these."""
        used = pairs[::2]
        rules = {name: make(used, methods) for name, methods in GROUPS.items()}
        return cls(pairs, rules, fitted(used, shortlists()))

    @property
    def used(self) -> list[Trained]:
        """The pairs that it is made of."""
        return self.pairs[::2]

    @property
    def unseen(self) -> list[Trained]:
        """The others."""
        return self.pairs[1::2]

    @cached_property
    def new_data(self) -> dict[str, Record]:
        """How the rules and the shortlist do on data that none of their pairs had."""
        rules = {
            name: on_new_data(self.pairs, lambda some, methods=methods: make(some, methods).rule)
            for name, methods in GROUPS.items()
        }
        return rules | {"shortlist": on_new_data(self.pairs, lambda some: fitted(some, shortlists()))}


def write(session: Session, out: Path) -> list[Path]:
    """The page and, where it goes beside the runs, what ``fedrax diagnose`` reads."""
    found = Found.of(pairs_of(session))
    page = write_page(out / "advice.md", sections(session, found))
    if out.resolve() != RESULTS:
        return [page]
    part = SHIPPED.with_suffix(".part")
    part.write_text(json.dumps(shipped(session, found), indent=1) + "\n")
    os.replace(part, SHIPPED)
    return [page, SHIPPED]


def shipped(session: Session, found: Found) -> dict[str, Any]:
    """For the package: the shortlist and the rules with their records, and what methods came to on each pair."""
    new = found.new_data

    def records(name: str, choice: Rule | Shortlist) -> dict[str, Any]:
        of = {"record": record(choice, found.unseen), "again": record(choice, found.used), "new": new[name]}
        return {part: numbers._asdict() for part, numbers in of.items()}

    return {
        "session": session.header["id"],
        "methods": {name: method.price for name, method in METHODS.items()},
        "shortlist": found.shortlist._asdict() | records("shortlist", found.shortlist),
        "rules": [
            {"among": name, **made.rule._asdict(), **records(name, made.rule)} for name, made in found.rules.items()
        ],
        "fedavg": record(Rule("FedAvg", "FedAvg"), found.unseen)._asdict(),
        "pairs": [
            {
                "name": pair.name,
                "drift": float(f"{pair.measured['drift']:.4g}"),
                "short": {m: round(points, 2) for m, points in pair.short(SCORING).items()},
            }
            for pair in found.pairs
        ],
    }


def sections(session: Session, found: Found) -> list[str]:
    """The page."""
    return [
        "# What to try first",
        introduction(session, found.pairs),
        "## The advice",
        shortlist_text(found.shortlist),
        *(rule_text(name, made, len(found.used)) for name, made in found.rules.items()),
        records_text(found.pairs),
        records_table(found),
        "## Points below the best",
        f"Test accuracy, mean over seeds {_list(SCORING)}; pairs marked * made the advice, with seeds {_list(TUNING)}.",
        shortfall_table(found.pairs),
        "## Method by method",
        *(method_text(name, found.pairs) for name in METHODS),
        "## What was measured of the pairs",
        features_text(),
        features_table(found.pairs),
    ]


def introduction(session: Session, pairs: list[Trained]) -> str:
    """What was done."""
    rates, held = ", ".join(f"{rate:g}" for rate in RATES), f"{100 * VALIDATION:.0f} %"
    return (
        f"Written by `python -m benchmarks.advice` on {session.header['date']} from session `{session.header['id']}` of"
        f" `advice.jsonl`. {len(METHODS)} methods on {len(pairs)} pairs of data and partition, {ROUNDS} rounds of"
        f" {STEPS} local steps on batches of {BATCH} (LoSAC: on one of its blocks). Each is tuned over `local.lr` in"
        f" {rates} and the values of one more number where it has one, by {held} of each client's rows held out, with"
        f" seeds {_list(TUNING)}; a seed decides the start, the cohorts and the batches. What is scored has been"
        f" trained on the other {100 * (1 - VALIDATION):.0f} %, never again on all rows. All methods have the same"
        " rounds and the same steps, though GradMA takes up to three gradients a step and EPISODE two exchanges a"
        f" round. The advice is made of every second pair, by test rows with seeds {_list(TUNING)}; its records are by"
        f" test rows with seeds {_list(SCORING)}: of the pairs that it is not made of, of those that it is, and of each"
        " data set's pairs with advice that is made of the pairs of all other data.\n\n"
        f"{session.machine_text()}"
    )


def shortlist_text(shortlist: Shortlist) -> str:
    """What ``fedrax diagnose`` tries and why."""
    rows = f"{100 * trials.SHARE:.0f} % of each client's rows"
    return (
        f"**Tried on the task itself: the best of {_list(shortlist.methods)}.** Each at every point of its grid with"
        f" {trials.SEEDS} seeds, by {rows} held out, in the mean of the last quarter of {trials.EVALUATIONS}"
        f" evaluations, as `fedrax diagnose` does where that takes little. It is scored at the point that was the best,"
        f" other advice at the points of the tuning. The shortlist is the one of FedAvg and up to three of"
        f" {_list(CANDIDATES[1:])} whose best was most often within 1 point of the best of all."
    )


def _list(names: Any) -> str:
    return ", ".join(map(str, names[:-1])) + f" and {names[-1]}"


def rule_text(name: str, made: Made, count: int) -> str:
    """A rule and why it is of its kind."""
    return (
        f"**Not tried, of {name}: {made.rule.text()}.** On each of {count} pairs with the rule made of the pairs of all"
        f" other data, and the seeds that it is made of: always one method is over 1 point below the best on"
        f" {made.always_one}, a threshold on one of the numbers that `fedrax diagnose` measures on {made.by_threshold};"
        " it would have to be better by more than two standard deviations."
    )


def records_text(pairs: list[Trained]) -> str:
    """What the columns and rows of the next table are."""
    return (
        "Mean short: points of test accuracy below the best of all methods, mean over the pairs; worst: the most. The"
        f" rows *always* and *all {len(METHODS)} tuned* are made of no pairs: under *data not used* they stand with all"
        f" {len(pairs)}. Of all {len(METHODS)} tuned the best is chosen with {len(TUNING)} seeds after the last round,"
        f" of the shortlist with {trials.SEEDS} seeds over the last quarter of a run."
    )


def records_table(found: Found) -> str:
    """How often the advice, and each method always, are within a point of the best."""
    new = found.new_data
    advice: dict[str, Any] = {"**the best of the shortlist**": (found.shortlist, new["shortlist"])}
    for name, made in found.rules.items():
        advice[f"**the rule ({name})**"] = made.rule, new[name]
    advice[f"all {len(METHODS)} tuned, the best on held-out rows"] = BestValidated(), None
    advice |= {f"always {name}": (Rule(name, name), None) for name in METHODS}
    lines = []
    for name, (choice, on_new) in advice.items():
        cells = [name]
        for part in (record(choice, found.unseen), record(choice, found.used), on_new or record(choice, found.pairs)):
            cells += [f"{part.close} of {part.pairs}", f"{part.short:.2f}", f"{part.worst:.1f}"]
        lines.append(cells)
    head = ("first advice", "within 1 point: pairs not used", "mean short", "worst")
    head += ("pairs used, other seeds", "mean short", "worst", "data not used", "mean short", "worst")
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


def features_text() -> str:
    """What the numbers are."""
    return (
        "Along a run of FedAvg, with f the mean of the N clients' f_i and S of them a round. dissimilarity: the largest"
        " sqrt(mean |grad f_i|^2) / |grad f| of the run. The next four are medians over the run. apart:"
        " sqrt(mean |grad f_i - grad f|^2) / |grad f|. noise: the deviation of a local batch's gradient from its"
        " client's, over |grad f|. cohort_noise: apart times sqrt((N - S) / ((N - 1) S)), how far a cohort's mean"
        " gradient is from grad f, over |grad f|. drift: how far clients' updates of a round are from their mean, over"
        " its length. growth: L1 |grad f| / (L0 + L1 |grad f|) at the largest gradient, by the fit"
        " |Hess f| = L0 + L1 |grad f|: the share of the curvature that grows with the gradient."
    )


def features_table(pairs: list[Trained]) -> str:
    """The numbers by which a rule may go."""
    lines = [[pair.name, *(f"{pair.measured[feature]:.2f}" for feature in FEATURES)] for pair in pairs]
    return markdown_table(("", *FEATURES), lines)
