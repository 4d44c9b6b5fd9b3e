"""The study of what to try first: a rule is found where there is one, and what is shipped is what the runs give."""

import dataclasses
import json
import os

import numpy as np
import pytest

from benchmarks import advice, advice_report, advice_rules, advice_study
from benchmarks.advice_rules import FEATURES, Rule, Shortlist, Trained, fitted, make, on_new_data, record, shortlists
from benchmarks.sessions import Session
from fedrax.analysis import shortlist
from fedrax.data import Iid
from fedrax.models import Logistic


def pairs(drifts: list[float], accuracies: list[dict[str, float]]) -> list[Trained]:
    """Pairs with these measured drifts; the making seeds and the scoring seeds give the same accuracies."""
    rest = dict.fromkeys(FEATURES, 1.0)
    each = zip(drifts, accuracies, strict=True)

    def seeds(value: float) -> dict[str, float]:
        return dict.fromkeys("01234", value)

    return [
        Trained(str(i), str(i), rest | {"drift": drift}, {}, {method: seeds(value) for method, value in scores.items()})
        for i, (drift, scores) in enumerate(each)
    ]


def test_a_threshold_is_found_where_there_is_one():
    drifts = [0.1, 0.5, 3.0, 0.2, 4.0, 5.0, 0.3, 6.0, 0.4, 7.0, 0.6, 8.0]
    some = pairs(drifts, [{"A": 0.9, "B": 0.8} if drift < 1 else {"A": 0.7, "B": 0.9} for drift in drifts])
    made = make(some, ["A", "B"])
    assert made.rule[:3] == ("A", "B", "drift")
    assert made.rule.threshold == pytest.approx(1.8)  # between 0.6 and 3.0
    assert made.by_threshold == 0 < made.always_one
    assert record(made.rule, some) == (0 + 12, 12, 0.0, 0.0)
    assert record(Rule("A", "A"), some) == (6, 12, pytest.approx(10.0), pytest.approx(20.0))


def test_where_nothing_decides_it_is_mostly_always_one_method():
    """Methods whose order on a pair has nothing to do with what was measured: a threshold is a mistake, and rare."""
    mistakes = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        drawn = [{"A": 0.9, "B": 0.9 + 0.012 * rng.normal(), "C": 0.86} for _ in range(11)]
        made = make(pairs(rng.uniform(0.1, 5, 11).tolist(), drawn), ["A", "B", "C"])
        mistakes += made.rule.feature is not None
        assert made.rule.feature is not None or made.rule.text() in ("always A", "always B")
    assert mistakes <= 4


def test_the_shortlist_is_the_one_whose_best_is_most_often_close(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(advice_rules, "CANDIDATES", ("FedAvg", "A", "B", "C"))
    ends = [{"FedAvg": 0.7, "A": 0.9 if i % 2 else 0.8, "B": 0.8 if i % 2 else 0.9, "C": 0.6} for i in range(8)]
    tried = [{"FedAvg": 0.7, "A": end["A"], "B": end["B"], "C": 0.95} for end in ends]  # C only looks the best
    each = zip(pairs([1.0] * 8, ends), tried, strict=True)
    some = [dataclasses.replace(pair, tried=t, tried_ends=pair.ends) for pair, t in each]
    assert fitted(some, shortlists()) == Shortlist(("FedAvg", "A", "B"))
    assert record(Shortlist(("FedAvg", "A", "B")), some) == (8, 8, 0.0, 0.0)
    assert record(Shortlist(("FedAvg", "A", "B", "C")), some)[0] == 0
    elsewhere = {name: {seed: value - 0.03 for seed, value in end.items()} for name, end in some[0].ends.items()}
    worse = dataclasses.replace(some[0], tried_ends=elsewhere)  # the trials found another step size
    assert record(Shortlist(("FedAvg", "A", "B")), [worse]) == (0, 1, pytest.approx(3.0), pytest.approx(3.0))


def test_new_data_is_met_with_advice_made_of_other_data():
    """Each of three data sets has a method of its own that is best: what is made of the others never has it."""
    names = ["A", "B", "C"]
    ends = [{name: 0.9 if name == names[i % 3] else 0.7 for name in names} for i in range(9)]
    some = [dataclasses.replace(pair, data=names[i % 3]) for i, pair in enumerate(pairs([1.0] * 9, ends))]
    told = on_new_data(some, lambda rest: fitted(rest, [Rule(name, name) for name in names]))
    assert told[:2] == (0, 9) and told.short == pytest.approx(20.0)


def test_what_is_shipped_is_what_the_runs_give():
    session = Session.latest(advice.RAW)
    found = advice_report.Found.of(advice_rules.pairs_of(session))
    assert [pair.name for pair in found.pairs] == [pair.name for pair in advice_study.PAIRS]
    content = advice_report.shipped(session, found)
    assert json.loads(advice_report.SHIPPED.read_text()) == json.loads(json.dumps(content))
    page = (advice_report.RESULTS / "advice.md").read_text()
    assert page == "\n\n".join(advice_report.sections(session, found)) + "\n"


def test_a_method_is_tuned_on_held_out_rows_and_scored_with_other_seeds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(advice_study, "ROUNDS", 3)
    monkeypatch.setattr(shortlist, "RATES", (1e-4, 0.5, 1e38))
    pair = advice_study.Pair("digits", Iid(10), Logistic(), cohort=2)
    found = advice.trained(pair, shortlist.METHODS["FedAvg"], *pair.build())
    assert found["best"] == {"local.lr": 0.5}
    assert found["validation"][2] is None  # it diverged
    assert found["chosen"] == found["validation"][1] > found["validation"][0]
    assert list(found["test"]) == ["0", "1", "2", "3", "4"]
    assert all(0.5 < accuracy < 1 for accuracy in found["test"].values())


def test_pairs_have_names_of_their_own_and_only_some_need_files():
    names = [pair.name for pair in advice_study.PAIRS]
    assert len(set(names)) == len(names)
    assert sum(not pair.needs_files for pair in advice_study.PAIRS) >= 12
    assert all(os.sep not in name for name in names)
