"""Reports are self-contained pages that a browser renders safely for any names."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fedrax.cli import main
from fedrax.report import search_plots
from fedrax.report.html import page
from fedrax.report.report_data import gather
from fedrax.report.svg import ChartCurve, chart
from fedrax.tuning.selection import SearchRange, SearchResult, Trial
from tests.cli.conftest import TINY
from tests.cli.test_hostile_names import LABELS, comparison
from tests.cli.test_outputs import EVENT, RUN

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "input", "wbr"}


class Page(HTMLParser):
    """Parsed page: checked to be well-formed, with its texts, and its elements with attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.texts.append(data)


def browse(page: Path, *options: str) -> str:
    """The document after a headless browser has run its scripts without network."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to render the page")
    profile = page.parent / "profile"
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *options]
    command += ["--proxy-server=127.0.0.1:9", "--virtual-time-budget=2000", "--dump-dom", page.resolve().as_uri()]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.fixture(scope="module")
def comparison_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a comparison with a grid, two methods, two seeds and metrics per client."""
    folder = tmp_path_factory.mktemp("compared")
    methods = '[[compare]]\nname = "fedavg"\n[[compare]]\nname = "scaffold"\n'
    head = "seeds = [0, 1]\ngrid = { algorithm.local.lr = [0.01, 3e38] }\n"
    (folder / "x.toml").write_text(head + TINY.replace('name = "fedavg"', "") + methods)
    file, out = str(folder / "x.toml"), str(folder / "c")
    assert main(["compare", file, "--out", out, "--quiet", "--run.per-client"]) == 0
    assert main(["report", out]) == 0
    return folder / "c"


def test_comparison_page_is_self_contained(comparison_page: Path):
    text = (comparison_page / "report.html").read_text()
    page, table = Page(text), json.loads((comparison_page / "comparison.json").read_text())
    shown = " ".join(page.texts)
    for row in table["methods"]:
        assert f"{row['accuracy']['mean']:.4f} ± {row['accuracy']['std']:.4f}" in shown
    headings = ("Hyper-parameter search", "Settings that differ")
    for words in (*headings, "local.lr 0.01", "worst client", "8 clients of", "jax", "c/scaffold"):
        assert words in shown, words
    lasts = [
        json.loads((run.parent / "events.jsonl").read_text().splitlines()[-1])
        for run in comparison_page.glob("[!s]*/**/experiment.toml")
    ]
    worst = [last for last in lasts if "train_accuracy_worst_client_number" in last]
    assert len(worst) == len(lasts) >= 2
    for last in worst:
        keys = ("worst_client_number", "worst_client", "worst_client_samples")
        number, value, samples = (last[f"train_accuracy_{key}"] for key in keys)
        assert re.search(rf">{number}(?: \([^)]*\))?</td><td>{value:.4g}</td><td>{samples}</td>", text), last
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "base", "form") and "src" not in attributes
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
        assert all((value or "").startswith("#") for name, value in attributes.items() if name == "href")
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'sha256-")
    circles = sum(tag == "circle" for tag, _ in page.elements)
    assert (
        circles > 60 and "every run diverged" in shown
    )  # points of curves and of the partition, and the end of the grid


def test_browser_shows_values_under_the_pointer(comparison_page: Path):
    text = (comparison_page / "report.html").read_text()
    moved = (
        "const s = document.querySelector('svg[data-curves]'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.right - 5, clientY: b.top + 9}));"
    )
    loose = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    (comparison_page / "moved.html").write_text(loose.replace("</body>", f"<script>{moved}</script></body>"))
    found = browse(comparison_page / "moved.html")
    tip = found[found.index('<div id="tip"') :].split("</body>")[0]
    value = json.loads((comparison_page / "comparison.json").read_text())["methods"][0]["accuracy"]
    assert "communication rounds 4" in tip and f"{value['mean']:.4g} ± {value['std']:.4g}" in tip
    assert 'data-ready="yes"' in browse(
        comparison_page / "report.html"
    )  # the page's script is allowed by its content security policy


@pytest.mark.parametrize(
    ("width", "medium"), [(400, "screen"), (1200, "screen"), (1025, "print")], ids=["narrow", "wide", "printed"]
)
def test_page_fits_narrow_wide_and_printed_media(comparison_page: Path, width: int, medium: str):
    """On narrow screens tables scroll; printed pages are 271 mm wide."""
    measured = (
        "const over = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().width &&"
        " e.getBoundingClientRect().right > innerWidth + 1);"
        "const scrolling = over.filter(e => getComputedStyle(e.closest('.scroll') || e).overflowX == 'auto');"
        "document.documentElement.dataset.over = over.length - scrolling.length;"
        "document.documentElement.dataset.wide = document.documentElement.scrollWidth > innerWidth;"
    )
    loose = re.sub(
        r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", (comparison_page / "report.html").read_text()
    )
    if medium == "print":
        loose = loose.replace("@media print {", "@media all {").replace("@media screen", "@media speech")
        for labels in ("fedavg", "scaffold"):  # eight methods
            loose = re.sub(rf"(<th>{labels}</th>)", r"\1" * 4, loose)
    (comparison_page / "cut.html").write_text(loose.replace("</body>", f"<script>{measured}</script></body>"))
    found = browse(comparison_page / "cut.html", f"--window-size={width},900", "--hide-scrollbars")
    assert 'data-over="0"' in found and 'data-wide="false"' in found


def test_names_cannot_inject_scripts(tmp_path: Path, fedrax: Any):
    """Names of methods, comparisons, clients, settings and directories, and one that closes every kind of quote."""
    break_out = "\\\"'></script></style></title></svg><script>document.documentElement.dataset.broken='yes'</script>"
    image = "<img src=x onerror=document.documentElement.dataset.broken='yes'>"
    head = f'name = "{break_out}"\nseeds = [0]\n'
    (tmp_path / "x.toml").write_text(comparison([*LABELS, break_out, image], head))
    assert fedrax("compare", "x.toml", "--out", "<b>c", "--quiet").status == 0
    for path in (tmp_path / "<b>c").glob("**/clients.json"):
        kept = json.loads(path.read_text())
        kept |= {"data": break_out + "\u202e\x07", "classes": [image] * len(kept["classes"])}
        kept["names"] = [f"{image}\ud800{i}" for i in range(len(kept["names"]))]
        path.write_text(json.dumps(kept))
    outcome = fedrax("report", "<b>c", "--title", break_out)
    assert outcome.status == 0, outcome.err
    text = (tmp_path / "<b>c" / "report.html").read_text()
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1 and "img" not in {tag for tag, _ in page.elements}
    assert all(c.isprintable() or c == "\n" for c in set(text))
    shown = "".join(page.texts)
    for label in LABELS:
        assert label.replace("\\\\", "\\") in shown
    found = browse(tmp_path / "<b>c" / "report.html")
    assert 'data-ready="yes"' in found and "data-broken" not in found


@pytest.mark.slow
def test_running_failed_and_unstarted_runs_are_shown(tmp_path: Path, fedrax: Any, tiny: Path):
    assert fedrax("run", tiny, "--out", "r/0", "--quiet").status == 0
    shutil.copytree(tmp_path / "r/0", tmp_path / "r/1")
    (tmp_path / "r/1/experiment.toml").write_text(
        (tmp_path / "r/0/experiment.toml").read_text().replace("seed = 0", "seed = 1", 2)
    )
    lines = (tmp_path / "r/0/events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "r/1/events.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    for name in ("clients.json", "environment.json"):
        (tmp_path / "r/1" / name).unlink()
    (tmp_path / "r/2").mkdir()
    (tmp_path / "r/2/experiment.toml").write_text(RUN)
    assert fedrax("run", tiny, "--out", "lost", "--quiet", "--algorithm.local.lr", "3e38").status == 2
    outcome = fedrax("report", "r", "lost", "--out", "page.html", "--target", "0.5")
    assert outcome.status == 0, outcome.err
    shown = " ".join(Page((tmp_path / "page.html").read_text()).texts)
    for words in ("round 2 of 4", "round 0 of 4", "diverged in round 1", "fedrax resume r/1", "rounds to 0.5"):
        assert words in shown, words


def test_run_without_events_is_shown(tmp_path: Path, fedrax: Any):
    (tmp_path / "r").mkdir()
    (tmp_path / "r/experiment.toml").write_text(RUN)
    assert fedrax("report", "r").status == 0
    assert "No round has finished." in (tmp_path / "r/report.html").read_text()


BIG = "1" + "0" * 400
TRIAL = {"point": {"algorithm.local.lr": 77}, "value": 1, "rounds": 1}
METHOD = {"metric": "loss", "trials": [TRIAL]}
GRID = {"name": "x", "methods": [], "search": {"methods": {"a": METHOD}, "validation": 0.2, "seeds": [0]}}
DAMAGED = {
    "nothing": ({}, "holds no run"),
    "event": ({"events.jsonl": EVENT[:-2] + ", }\n"}, "line 1, is not an event"),
    "large number": ({"events.jsonl": EVENT.replace("0.5", BIG)}, "line 1, is not an event"),
    "clients are a list": ({"clients.json": "[]"}, "is not the summary of a run's clients"),
    "clients unlike": ({"clients.json": '{"clients": 3}'}, "is not the summary of a run's clients"),
    "clients cut": ({"clients.json": '{"clients": 3'}, "is not the summary of a run's clients"),
    "machine": ({"environment.json": "[1]"}, "does not describe the machine of a run"),
    "comparison": ({"comparison.json": '{"name": "x", "methods": [3]}'}, "is damaged"),
    "comparison cut": ({"comparison.json": '{"name": '}, "is damaged"),
    "grid": ({"comparison.json": json.dumps(GRID).replace("77", BIG)}, "is damaged"),
    "deep": ({"comparison.json": "[" * 100_000}, "is damaged"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_directories_raise_a_clear_error(name: str, tmp_path: Path, fedrax: Any):
    files, message = DAMAGED[name]
    (tmp_path / "r").mkdir()
    for file, text in ({"experiment.toml": RUN, "events.jsonl": EVENT} | files if files else {}).items():
        (tmp_path / "r" / file).write_text(text)
    outcome = fedrax("report", "r")
    assert outcome.status == 2 and message in outcome.err and outcome.err.count("\n") == 1, outcome.err
    assert not (tmp_path / "r" / "report.html").exists()


def test_missing_directories_and_malformed_targets_are_rejected(tmp_path: Path, fedrax: Any):
    assert "no directory given" in fedrax("report").err
    assert "accuracy in (0, 1]" in fedrax("report", "x", "--target", "3").err


def make(folder: Path, *events: dict[str, Any], seed: int = 0) -> None:
    """A run directory with one event for each entry of the metrics."""
    folder.mkdir(parents=True)
    (folder / "experiment.toml").write_text(RUN.replace("seed = 0", f"seed = {seed}"))
    bare = {name: value for name, value in json.loads(EVENT).items() if name != "test_accuracy"}
    lines = [json.dumps(bare | {"round": r} | event) for r, event in enumerate(events, 1)]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def make_comparison(folder: Path, search_results: dict[str, Any] | None = None) -> dict[str, Any]:
    """The file of a comparison with these results of its search."""
    kept: dict[str, Any] = {"name": folder.name, "methods": []}
    if search_results is not None:
        kept["search"] = {"methods": search_results, "validation": 0.2, "seeds": [0]}
    (folder / "comparison.json").write_text(json.dumps(kept))
    return kept


def charts_of(text: str) -> list[dict[str, Any]]:
    """The data of the page's charts, which must be valid JSON."""
    found = re.findall(r'data-curves="([^"]*)"', text)
    return [json.loads(html.unescape(data), parse_constant=pytest.fail) for data in found]


def test_runs_with_undefined_epsilon_are_shown(tmp_path: Path, fedrax: Any):
    make(tmp_path / "r", *({"test_accuracy": 0.5, "epsilon": None, "epsilon_paper": 3.5 * r} for r in (1, 2)))
    outcome = fedrax("show", "r")
    assert outcome.status == 0 and "epsilon by the paper" in outcome.out and " 7 " in outcome.out, outcome
    assert fedrax("report", "r").status == 0
    assert "intact: 2 rounds" in fedrax("doctor", "r").out


def test_header_names_the_models_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder, model in (("a", "logistic"), ("b", "2nn")):
        make(Path(folder), {"test_accuracy": 0.5})
        Path(folder, "experiment.toml").write_text(RUN.replace("logistic", model))
    assert "model logistic, 2nn · seed 0" in page(gather([Path("a"), Path("b")]))


def test_directories_with_equal_names_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for folder, accuracy in (("a", 0.3), ("b", 0.9)):
        make(Path(folder, "x", "m", "seed-0"), {"test_accuracy": accuracy})
        make_comparison(Path(folder, "x"))
    material = gather([Path("a/x"), Path("b/x")])
    assert [method.label for method in material.methods] == ["a/x: tiny", "b/x: tiny"]
    assert re.findall(r'class="best">([^<]*)', page(material)) == ["0.9000", "0.9000 (1)"]


@pytest.mark.parametrize("losses", [(1e200, 3e200), (1.7e308, 1.2e308)])
def test_losses_near_overflow_are_shown(losses: tuple[float, float], tmp_path: Path, fedrax: Any):
    for seed, loss in enumerate(losses):
        make(tmp_path / "r" / str(seed), {"test_loss": 2.0}, {"test_loss": loss}, seed=seed)
    outcome = fedrax("show", "r", "--json", "--curves", "c")
    assert outcome.status == 0, outcome.err
    (row,) = json.loads(outcome.out, parse_constant=pytest.fail)["methods"]
    assert row["loss"]["mean"] == pytest.approx(losses[0] / 2 + losses[1] / 2)
    assert row["loss"]["std"] == pytest.approx(abs(losses[0] - losses[1]) / 2**0.5)
    assert fedrax("report", "r").status == 0
    charts = charts_of((tmp_path / "r" / "report.html").read_text())
    assert len(charts) == 4
    for data in charts:
        assert data["series"][0]["points"][-1][1] == pytest.approx(row["loss"]["mean"])


def test_json_contains_null_for_nonfinite_values(tmp_path: Path, fedrax: Any):
    for seed, loss in enumerate((-1.7e308, 1.7e308)):
        make(tmp_path / "r" / str(seed), {"test_loss": loss}, seed=seed)
    (row,) = json.loads(fedrax("show", "r", "--json").out, parse_constant=pytest.fail)["methods"]
    assert row["loss"] == {"mean": 0.0, "std": None}
    assert fedrax("report", "r").status == 0
    assert charts_of((tmp_path / "r" / "report.html").read_text())


def test_curves_extend_to_the_longest_seed(tmp_path: Path):
    make(tmp_path / "0", {}, {"test_accuracy": 0.5}, {"test_accuracy": 0.6})
    make(tmp_path / "1", {}, {"test_accuracy": 0.5}, {}, {"test_accuracy": 0.7}, seed=1)
    assert 'class="run"' in page(gather([tmp_path]))


def test_header_shows_the_common_mean_of_methods_that_tie(tmp_path: Path):
    for name, values in (("a", (0.4, 0.6)), ("b", (0.45, 0.55))):
        for seed, value in enumerate(values):
            make(tmp_path / name / f"seed-{seed}", {"test_accuracy": value}, seed=seed)
            file = tmp_path / name / f"seed-{seed}" / "experiment.toml"
            file.write_text(file.read_text().replace('name = "tiny"', f'name = "{name}"'))
    head = page(gather([tmp_path / "a", tmp_path / "b"])).partition("<main>")[0]
    assert "<b>2 methods</b><span>0.5000 test accuracy</span>" in head


def test_runs_are_shown_once_and_grouped_by_method(tmp_path: Path):
    for seed in (0, 1):
        make(tmp_path / "runs" / f"x-seed{seed}", {"test_accuracy": 0.5}, seed=seed)
    for asked in (["runs", "runs/x-seed1"], ["runs/x-seed0", "runs/x-seed1"], ["runs/x-seed1", "runs"]):
        (method,) = gather([tmp_path / place for place in asked]).methods
        assert sorted(run.seed for run in method.runs) == [0, 1] and method.label == "tiny"
    make(tmp_path / "runs" / "c" / "m" / "seed-5", {"test_accuracy": 0.5}, seed=5)
    make_comparison(tmp_path / "runs" / "c")
    methods = gather([tmp_path / "runs", tmp_path / "runs" / "c"]).methods
    assert {method.label: len(method.runs) for method in methods} == {"c: tiny": 1, "runs: tiny": 2}


def test_methods_read_back_are_printed_in_a_line_each(tmp_path: Path):
    make(tmp_path / "a" / "seed-0", {"test_accuracy": 0.5})
    make(tmp_path / "a" / "seed-1", seed=1)
    (method,) = gather([tmp_path / "a"]).methods
    states = ", ".join(f"1 run {run.state}" for run in method.runs)
    assert repr(method) == f"MethodRuns('tiny', {states})" and method.runs[0].state != method.runs[1].state
    assert repr(method.runs[0]) == f"SavedRun('{tmp_path}/a/seed-0', seed 0, {method.runs[0].state})"


def test_list_settings_are_shown(tmp_path: Path, fedrax: Any):
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


def test_random_search_is_drawn_as_points(tmp_path: Path):
    """A file without the field, as older ones are, is drawn as a line."""
    make(tmp_path / "r", {"test_accuracy": 0.5})
    trials = tuple(Trial({"algorithm.local.lr": 0.01 * k}, 1.0 + k, 1) for k in range(1, 31))
    choice = SearchResult("loss", True, trials, {"algorithm.local.lr": SearchRange(0.001, 1.0, True)})
    kept = make_comparison(tmp_path / "r", search_plots.values({"m": choice}))
    search = gather([tmp_path / "r"]).sources[0].search
    assert search is not None and search.results == {"m": choice}
    drawn = section(page(gather([tmp_path / "r"])))
    assert "polyline" not in drawn and drawn.count('class="dot"') == 30
    del kept["search"]["methods"]["m"]["ranges"]
    make_comparison(tmp_path / "r", kept["search"]["methods"])
    assert 'polyline class="mean"' in section(page(gather([tmp_path / "r"])))


def section(text: str) -> str:
    """The section about the search."""
    return text.split('id="hyper-parameter-search"')[1].split("</section>")[0]


LATE = chart([ChartCurve("m", 0, [(1234567.0, 0.5, 0.0), (2345678.0, 0.6, 0.0)])], "rounds", "test accuracy")


def test_ticks_of_large_round_numbers_are_distinct():
    (data,) = charts_of(LATE)
    assert [point[0] for point in data["series"][0]["points"]] == [1234567, 2345678]
    assert "m, 2345678: 0.6" in LATE


def test_browser_shows_large_round_numbers_in_full(tmp_path: Path):
    script = resources.files("fedrax.report").joinpath("page.js").read_text("utf-8")
    moved = (
        "const s = document.querySelector('svg[data-curves]'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.right - 5, clientY: b.top + 9}));"
    )
    body = f"<body>{LATE}<script>{script}</script><script>{moved}</script></body>"
    (tmp_path / "late.html").write_text(f'<!doctype html><meta charset="utf-8">{body}')
    assert "rounds 2345678" in browse(tmp_path / "late.html")
