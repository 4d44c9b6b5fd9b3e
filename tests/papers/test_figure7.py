"""The commands that reproduce LoSAC's Figure 7 and search its constants, on small matrices."""

import sys
from pathlib import Path

import pytest
import tomlkit

from fedrax.experiments import comparison
from fedrax.report.runs import SavedRun
from papers.losac import __main__ as losac
from papers.losac import figure7

SMALL = {"dim": 6, "rank": 2, "clients": 6, "samples": 40, "test_samples": 0}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two methods on matrices with six rows; the directory of results."""
    table = tomlkit.parse(figure7.FILE.read_text()).unwrap()
    table["data"] |= SMALL
    table["run"] |= {"cohort_size": 3, "rounds": 60, "eval_every": 20}
    table["algorithm"]["local"]["lr"] = 0.02
    table["compare"] = [entry for entry in table["compare"] if entry["label"] in ("LoSAC-Prox (consistent)", "FedADMM")]
    (tmp_path / "figure7.toml").write_text(tomlkit.dumps(table))
    monkeypatch.setattr(figure7, "FILE", tmp_path / "figure7.toml")
    return tmp_path / "results"


def command(what: str, results: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table that a command writes."""
    arguments = [what, "--out", str(results.parent / "runs"), "--results", str(results), "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["losac", *arguments])
    assert losac.main() == 0
    return (results / f"{what}.md").read_text()


@pytest.mark.slow
def test_figure7_draws_and_prints_every_rank(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure7, "RANKS", (2,))
    text = command("figure7", small, monkeypatch)
    cells = next(line for line in text.splitlines() if "LoSAC-Prox (consistent)" in line).split(" | ")
    assert cells[0] == "| 2"
    assert float(cells[4].split(" ")[0]) < 1.4  # initially the norm of the true matrix, sqrt(2)
    assert "| 2 | FedADMM |" in text
    assert (small / "figure7.png").stat().st_size > 10_000


@pytest.mark.slow
def test_search_varies_one_constant_after_another(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure7, "VARIED", {"lambda": (50.0,)})
    text = command("figure7-search", small, monkeypatch)
    assert "| the file's | LoSAC-Prox (consistent) |" in text
    # this regularizer is so strong that the matrix becomes zero
    assert "| lambda = 50.0 | LoSAC-Prox (consistent) | 0.0 | - | 1.4142 | 0 |" in text


@pytest.mark.parametrize(("what", "value"), [*figure7.settings()])
def test_settings_are_valid_experiments(what: str | None, value: float) -> None:
    table = figure7.changed(tomlkit.parse(figure7.FILE.read_text()).unwrap(), what, value)
    spec = comparison.from_table(table, "test")
    spec.check()
    assert spec.seeds == (0, 1, 2)
    weights = [getattr(m.algorithm, "prox", None) or m.algorithm.local.prox for m in spec.methods]  # type: ignore[attr-defined]
    given = [prox.weight / weights[0].weight for prox in weights]
    assert given == pytest.approx([1, 50, 1, 1, 1, 1])  # M N / S = 50
    assert weights[0].weight == pytest.approx(value if what == "lambda" else 0.2)


def test_exact_from_is_the_round_from_which_the_rank_stays_correct() -> None:
    events = [{"round": 10 * k, "rank": rank} for k, rank in enumerate([4, 9, 4, 4])]
    assert figure7.exact_from(SavedRun(Path(), {}, events, None), 4) == 20
    assert figure7.exact_from(SavedRun(Path(), {}, events[:2], None), 4) is None
    assert figure7.exact_from(SavedRun(Path(), {}, [{"round": 7, "rank": 4}, {"round": 8}], None), 4) == 7
