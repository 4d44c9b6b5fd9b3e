"""The page of all items of the four papers: its figures are those of result files, and it is up to date."""

import re
from pathlib import Path

import pytest

from fedrax import FedraxError
from papers import items, page

TABLE = """# A table

| S | method | ours | gap | ours |
|---|---|---|---|---|
| 10 | A | 1.50 ± 0.25 | -2 | 1,000 |
| 100 | A | 2.50 (1 seed) | +1 | 7e-3 |
| 100 | B | - | +4 | 10 |

## Held out

| S | method | ours |
|---|---|---|
| 10 | A | 9.00 |
"""
LIST = """title = "P: a paper"
[[item]]
number = "1.1"
kind = "figure"
item = "Figure 1"
status = "reproduced"
results = ["results/t.md"]
found = "It is {a:.1f}."
values.a = { file = "results/t.md", row = "100 | A", column = "ours" }
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with the list of one paper, p, and a result."""
    monkeypatch.setattr(items, "ROOT", tmp_path)
    folder = tmp_path / "papers" / "p"
    (folder / "results").mkdir(parents=True)
    (folder / "results" / "t.md").write_text(TABLE)
    (folder / "items.toml").write_text(LIST)
    return folder


def test_page_is_up_to_date() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(), "run `python -m papers.page`"


def test_items_of_the_papers_are_listed_once() -> None:
    for part, (name, count) in enumerate(zip(items.PAPERS, (41, 32, 35, 33), strict=True), 1):
        assert [one.number for one in items.read(name).items] == [f"{part}.{i + 1}" for i in range(count)]


@pytest.mark.parametrize("name", items.PAPERS)
def test_figures_in_the_text_of_readmes_are_those_of_the_results(name: str) -> None:
    text = " ".join((items.ROOT / "papers" / name / "README.md").read_text(encoding="utf-8").split())
    for one in items.read(name).prose:
        assert items.sentence(name, one.found, one.values) in text


def test_values_are_found_by_row_column_and_section(paper: Path) -> None:
    def of(**value: object) -> float:
        return items.value("p", "x", {"x": {"file": "results/t.md"} | value})

    assert of(row="100 | A", column="ours") == 2.5
    assert of(row="10 | A", column="ours", section="") == 1.5
    assert of(row="10 | A", column="ours", section="", deviation=True) == 0.25
    assert of(row="10 | A", column="ours", section="Held out") == 9
    assert of(row="10 | A", column="ours 2") == 1000
    assert of(row="10", column="gap") == -2  # not the row with a 10 further on
    assert of(row="100 | A", column="ours 2") == 0.007
    assert of(column="gap", of="median size") == 2
    assert of(column="gap", of="max", starts="100") == 4
    assert of(row="A", column="gap", of="count") == 2
    assert items.value("p", "d", {
        "a": {"file": "results/t.md", "row": "100 | A", "column": "ours"},
        "b": {"file": "results/t.md", "row": "10 | A", "column": "gap"},
        "q": {"quotient": ["a", "b"]},
        "d": {"difference": ["q", "a"]},
    }) == -3.75  # fmt: skip
    with pytest.raises(FedraxError, match=r"2 numbers in column 'ours' of rows with '10 \| A'"):
        of(row="10 | A", column="ours")
    with pytest.raises(FedraxError, match="0 numbers in column 'ours' of rows with 'B'"):
        of(row="B", column="ours")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('row = "100 | A"', 'row = "50 | A"', "0 numbers in column 'ours' of rows with '50"),
        ('["results/t.md"]', '["results/u.md"]', "no file papers/p/results/u.md"),
        ('["results/t.md"]', '["results/t.md::test_it"]', "no test test_it in papers/p/results/t.md"),
        ('["results/t.md"]', "[]", "1.1 is reproduced without results"),
        ("{a:.1f}", "2.5", "has a figure that is in no result file"),
        ("{a:.1f}", "2", "does not use a"),
        ("{a:.1f}", "{b}", "does not use a"),
        ('"reproduced"', '"differs"', "1.1 is 'differs' without a reason"),
        ('"reproduced"', '"done"', "'done' is none of reproduced, differs"),
        ("number", "numbre", "unknown numbre"),
    ],
)
def test_lists_with_missing_results_are_rejected(paper: Path, before: str, after: str, message: str) -> None:
    (one,) = items.read("p").items
    assert items.sentence("p", one.found, one.values) == "It is 2.5."
    (paper / "items.toml").write_text(LIST.replace(before, after))
    with pytest.raises(FedraxError, match=re.escape(message)):
        [page.evidence("p", one) for one in items.read("p").items]


def test_settings_and_printed_numbers_may_be_typed(paper: Path) -> None:
    text = "At (10, 0.01) and `lr = 0.1` as in Theorem 6.2 (printed: 74.5)."
    assert items.sentence("p", text, {}) == text
