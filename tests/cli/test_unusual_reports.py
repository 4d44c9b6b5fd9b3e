"""What is shown of unusual runs: privacy without a bound, numbers of any size, names that are alike, odd settings."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fedrax.report import search_plots
from fedrax.report.html import page
from fedrax.report.report_data import gather
from fedrax.report.svg import ChartCurve, chart
from fedrax.tuning.selection import SearchRange, SearchResult, Trial
from tests.cli.test_outputs import EVENT, RUN
from tests.cli.test_report import Page, browse


def make(folder: Path, *events: dict[str, Any], seed: int = 0) -> None:
    """The directory of a run with an event a round, of which these are the metrics."""
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(RUN.replace("seed = 0", f"seed = {seed}"))
    bare = {name: value for name, value in json.loads(EVENT).items() if name != "test_accuracy"}
    lines = [json.dumps(bare | {"round": r} | event) for r, event in enumerate(events, 1)]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_comparison(folder: Path, choices: dict[str, Any] | None = None) -> dict[str, Any]:
    """The file of a comparison, whose search tried these."""
    kept: dict[str, Any] = {"name": folder.name, "methods": []}
    if choices is not None:
        kept["search"] = {"methods": choices, "validation": 0.2, "seeds": [0]}
    (folder / "comparison.json").write_text(json.dumps(kept))
    return kept


def charts_of(text: str) -> list[dict[str, Any]]:
    """What a page's script is given, which must be JSON."""
    found = re.findall(r'data-curves="([^"]*)"', text)
    return [json.loads(html.unescape(data), parse_constant=pytest.fail) for data in found]


def test_runs_without_a_bound_of_privacy_are_read_like_others(tmp_path: Path, fedrax: Any):
    make(tmp_path / "r", *({"test_accuracy": 0.5, "epsilon": None, "epsilon_paper": 3.5 * r} for r in (1, 2)))
    outcome = fedrax("show", "r")
    assert outcome.status == 0 and "epsilon by the paper" in outcome.out and " 7 " in outcome.out, outcome
    assert fedrax("report", "r").status == 0
    assert "whole: 2 rounds" in fedrax("doctor", "r").out


def test_the_head_names_the_models_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder, model in (("a", "logistic"), ("b", "2nn")):
        make(Path(folder), {"test_accuracy": 0.5})
        Path(folder, "experiment.toml").write_text(RUN.replace("logistic", model))
    assert "model logistic, 2nn · seed 0" in page(gather([Path("a"), Path("b")]))


def test_directories_of_one_name_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder, accuracy in (("a", 0.3), ("b", 0.9)):
        make(Path(folder, "x", "m", "seed-0"), {"test_accuracy": accuracy})
        make_comparison(Path(folder, "x"))
    material = gather([Path("a/x"), Path("b/x")])
    assert [method.label for method in material.methods] == ["a/x: tiny", "b/x: tiny"]
    assert re.findall(r'class="best">([^<]*)', page(material)) == ["0.9000", "0.9000 (1)"]


@pytest.mark.parametrize("losses", [(1e200, 3e200), (1.7e308, 1.2e308)])
def test_losses_that_cannot_be_squared_or_summed(losses: tuple[float, float], tmp_path: Path, fedrax: Any):
    for seed, loss in enumerate(losses):
        make(tmp_path / "r" / str(seed), {"test_loss": 2.0}, {"test_loss": loss}, seed=seed)
    outcome = fedrax("show", "r", "--json", "--curves", "c")
    assert outcome.status == 0, outcome.err
    (row,) = json.loads(outcome.out, parse_constant=pytest.fail)["methods"]
    assert row["loss"]["mean"] == pytest.approx(losses[0] / 2 + losses[1] / 2)
    assert row["loss"]["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert fedrax("report", "r").status == 0
    charts = charts_of((tmp_path / "r" / "report.html").read_text())
    assert len(charts) == 3
    for data in charts:
        assert data["series"][0]["points"][-1][1] == pytest.approx(row["loss"]["mean"])


def test_what_is_not_finite_is_null_in_json(tmp_path: Path, fedrax: Any):
    for seed, loss in enumerate((-1.7e308, 1.7e308)):
        make(tmp_path / "r" / str(seed), {"test_loss": loss}, seed=seed)
    (row,) = json.loads(fedrax("show", "r", "--json").out, parse_constant=pytest.fail)["methods"]
    assert row["loss"] == {"mean": 0.0, "std": None}
    assert fedrax("report", "r").status == 0
    assert charts_of((tmp_path / "r" / "report.html").read_text())


def test_seeds_that_end_in_different_rounds_are_drawn_to_their_ends(tmp_path: Path):
    make(tmp_path / "0", {}, {"test_accuracy": 0.5}, {"test_accuracy": 0.6})
    make(tmp_path / "1", {}, {"test_accuracy": 0.5}, {}, {"test_accuracy": 0.7}, seed=1)
    assert 'class="run"' in page(gather([tmp_path]))


def test_each_run_is_shown_once_and_seeds_together(tmp_path: Path):
    for seed in (0, 1):
        make(tmp_path / "runs" / f"x-seed{seed}", {"test_accuracy": 0.5}, seed=seed)
    for asked in (["runs", "runs/x-seed1"], ["runs/x-seed0", "runs/x-seed1"], ["runs/x-seed1", "runs"]):
        (method,) = gather([tmp_path / place for place in asked]).methods
        assert sorted(run.seed for run in method.runs) == [0, 1] and method.label == "tiny"
    make(tmp_path / "runs" / "c" / "m" / "seed-5", {"test_accuracy": 0.5}, seed=5)
    make_comparison(tmp_path / "runs" / "c")
    methods = gather([tmp_path / "runs", tmp_path / "runs" / "c"]).methods
    assert {method.label: len(method.runs) for method in methods} == {"c: tiny": 1, "runs: tiny": 2}


def test_settings_that_are_lists_are_shown(tmp_path: Path, fedrax: Any):
    make(tmp_path / "r", {"test_accuracy": 0.5})
    deep: Any = 3
    for _ in range(50):
        deep = [deep]
    for last, status in (({"name": "steps", "at": [1]}, 0), (deep, 2)):
        tried = ([3, 6], [5.5], "none", last)
        trials = [{"point": {"algorithm.milestones": value}, "value": 1.0, "rounds": 1} for value in tried]
        make_comparison(tmp_path / "r", {"m": {"metric": "loss", "trials": trials}})
        outcome = fedrax("report", "r")
        assert outcome.status == status, outcome.err
    assert "is damaged" in outcome.err
    assert "[3, 6]" in Page((tmp_path / "r" / "report.html").read_text()).texts


def test_values_that_were_drawn_are_dots(tmp_path: Path):
    """Of a file that does not say so, as earlier ones do not, they are a line."""
    make(tmp_path / "r", {"test_accuracy": 0.5})
    trials = tuple(Trial({"algorithm.local.lr": 0.01 * k}, 1.0 + k, 1) for k in range(1, 31))
    choice = SearchResult("loss", True, trials, {"algorithm.local.lr": SearchRange(0.001, 1.0, True)})
    kept = make_comparison(tmp_path / "r", search_plots.values({"m": choice}))
    search = gather([tmp_path / "r"]).sources[0].search
    assert search is not None and search.choices == {"m": choice}
    drawn = section(page(gather([tmp_path / "r"])))
    assert "polyline" not in drawn and drawn.count('class="dot"') == 30
    del kept["search"]["methods"]["m"]["ranges"]
    make_comparison(tmp_path / "r", kept["search"]["methods"])
    assert 'polyline class="mean"' in section(page(gather([tmp_path / "r"])))


def section(text: str) -> str:
    """That of the search."""
    return text.split('id="how-settings-were-chosen"')[1].split("</section>")[0]


LATE = chart([ChartCurve("m", 0, [(1234567.0, 0.5, 0.0), (2345678.0, 0.6, 0.0)])], "rounds", "test accuracy")


def test_late_rounds_keep_their_place():
    (data,) = charts_of(LATE)
    assert [point[0] for point in data["series"][0]["points"]] == [1234567, 2345678]
    assert "m, 2345678: 0.6" in LATE


def test_a_browser_tells_late_rounds_in_full(tmp_path: Path):
    script = resources.files("fedrax.report").joinpath("page.js").read_text("utf-8")
    moved = (
        "const s = document.querySelector('svg[data-curves]'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.right - 5, clientY: b.top + 9}));"
    )
    body = f"<body>{LATE}<script>{script}</script><script>{moved}</script></body>"
    (tmp_path / "late.html").write_text(f'<!doctype html><meta charset="utf-8">{body}')
    assert "rounds 2345678" in browse(tmp_path / "late.html")
