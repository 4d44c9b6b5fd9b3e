"""Every method has one page in the documentation, with its pseudocode, hyper-parameters and citations."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from docs.method_pages import (
    FOLDER,
    PAPERS,
    RANGES,
    REFERENCES,
    ROUND,
    TITLES,
    facts,
    findings,
    front_matter,
    references,
    tables_naming,
    typeset_round,
)
from fedrax.config.annotations import fields_of
from fedrax.experiments.method_registry import algorithms
from papers.episode.text import GAMMAS
from papers.gradma.search import AXES
from papers.upcycled.grid import EXTRAPOLATIONS, METHODS

KINDS = {kind.__name__: kind for kind in algorithms().values()}

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md") if path.stem != "index"}


def test_every_method_has_one_page():
    named = Counter(name for text in PAGES.values() for name in front_matter(text)["methods"])
    assert named == Counter(kind.__name__ for kind in algorithms().values())


def test_the_index_lists_every_page():
    lines = (FOLDER / "index.md").read_text(encoding="utf-8").splitlines()
    assert Counter(line for line in lines if line in PAGES) == Counter(list(PAGES))


def test_citations_are_those_of_the_bibliography():
    cited = {key for text in PAGES.values() for key in front_matter(text).get("cite", [])}
    assert cited == references(REFERENCES.read_text(encoding="utf-8")).keys()


def test_results_are_those_of_reproduced_papers():
    assert {name for text in PAGES.values() for name in front_matter(text).get("papers", [])} <= TITLES.keys()
    assert all((Path(FOLDER).parents[1] / "papers" / name).is_dir() for name in TITLES)


def test_every_table_of_a_paper_is_on_the_page_of_its_methods():
    """FedDyn was run for Upcycled-FL and for GradMA."""
    text = facts(PAGES["feddyn"])
    assert (
        "[GradMA](../_generated/papers/gradma.md)" in text and "[Upcycled-FL](../_generated/papers/upcycled.md)" in text
    )
    for page, text in PAGES.items():
        for paper, tables in tables_naming(text).items():
            assert tables and all((PAPERS / paper / "results" / f"{table}.md").is_file() for table in tables)
            assert all(f"(#papers-{paper}-{table})" in facts(text) for table in tables), page
    named = tables_naming(PAGES["feddyn"])["gradma"]
    tables = {file.stem: file.read_text(encoding="utf-8") for file in (PAPERS / "gradma/results").glob("*.md")}
    assert set(named) == {name for name, table in tables.items() if re.search(r"^\|.*FedDyn", table, re.MULTILINE)}


def test_the_facts_of_a_page_describe_its_class():
    text = facts(PAGES["scaffold"])
    for heading in ("## Example", "## Hyper-parameters", "## Cost", "## Results", "## Code", "## Citation"):
        assert heading in text
    assert "| `option` | `'II'` |" in text  # the field with its default
    assert "| Scaffold | 2 | 2 | 1 | 1 |" in text  # two vectors in both directions, one phase, a state of one model
    assert "def client(" in text and "@inproceedings{karimireddy2020," in text


def test_the_results_of_a_page_name_its_method():
    lines = findings(PAGES["fedcm"], ["losac"]).splitlines()
    assert lines and all("FedCM" in line and re.search(r"\(LoSAC, \*[a-z ]+\*\): .*\d", line) for line in lines)
    assert "](#papers-losac-tuned)" in findings(PAGES["fedcm"], ["losac"])


@pytest.mark.parametrize("page", PAGES)
def test_every_page_has_the_pseudocode_of_its_methods(page: str):
    rounds = [match[1] for match in ROUND.finditer(PAGES[page])]
    assert len(rounds) == 1
    lines = [line.split(": ", 1) for line in rounds[0].splitlines() if line]
    assert {side for side, _ in lines} - {"title"} == {"server", "client"}
    assert all(text.count("$") % 2 == 0 and text.count("{") == text.count("}") for _, text in lines)
    several = len(front_matter(PAGES[page])["methods"]) > 1
    assert any(side == "title" for side, _ in lines) == several


def test_pseudocode_is_grouped_by_side():
    page = "```{round}\nserver: send $x$\nclient: repeat:\nclient: - a step\nserver: $x$\n```"
    shown = ROUND.sub(typeset_round, page)
    assert [line for line in shown.splitlines() if "side" in line] == [
        ":::{container} side server",
        ":::{container} side client",
        ":::{container} side server",
    ]
    assert "- repeat:\n  - a step\n:::" in shown


def test_sensible_values_are_those_of_existing_fields():
    assert all(
        any(field in kind.__dataclass_fields__ for kind in ([KINDS[name]] if name != "all" else KINDS.values()))
        for name, fields in RANGES.items()
        for field in fields
    )


@pytest.mark.parametrize("name", KINDS)
def test_every_number_has_sensible_values_that_contain_the_default(name: str):
    for field in dataclasses.fields(KINDS[name]):
        types = fields_of(KINDS[name])[field.name].types
        if not any(one.type in (int, float) and not one.repeated for one in types):
            continue
        values = RANGES[name][field.name]
        if "from" not in values:
            assert values["advice"]
            continue
        assert values["from"] < values["to"] and values["source"]
        assert field.default is None or values["from"] <= field.default <= values["to"]
        for bound in (bound for one in types for bound in one.bounds):
            assert bound.ge is None or values["from"] >= bound.ge
            assert bound.gt is None or values["from"] > bound.gt
            assert bound.le is None or values["to"] <= bound.le
            assert bound.lt is None or values["to"] < bound.lt


def test_ranges_from_reproduced_papers_are_their_grids():
    grids = {
        ("GradMA", "server_lr"): AXES["server step (GradMA)"][1],
        ("GradMA", "beta1"): AXES["beta1 (GradMA)"][1],
        ("GradMA", "beta2"): AXES["beta2"][1],
        ("GradMA", "memory"): AXES["memory"][1],
        ("FedDyn", "alpha"): AXES["alpha"][1],
        ("PFedMe", "lam"): METHODS["pFedMe"].axes["lambda"],
        ("PFedMe", "inner_lr"): METHODS["pFedMe"].axes["inner lr"],
        ("Upcycled", "a"): EXTRAPOLATIONS[1:],  # 0 is the method without it
    }
    for (name, field), grid in grids.items():
        assert (RANGES[name][field]["from"], RANGES[name][field]["to"]) == (min(grid), max(grid))
    assert RANGES["Episode"]["gamma"]["from"] == min(GAMMAS)
    assert RANGES["FedProx"]["mu"]["from"] <= min(AXES["mu"][1]) and max(AXES["mu"][1]) <= RANGES["FedProx"]["mu"]["to"]


def test_the_range_of_noise_gives_the_privacy_loss_of_its_source():
    pytest.importorskip("dp_accounting")
    from fedrax.privacy import Accountant, CohortSampling, Release

    noise, sampling = RANGES["ClientDP"]["noise"], CohortSampling("poisson", rate=0.01)
    least, most = (
        Accountant([Release(noise=noise[end], seen="public")], delta=1e-5, cohorts=sampling).bound(1000).epsilon
        for end in ("from", "to")
    )
    assert f"ε = {least:.0f} to {most:.1g} after 1,000 Poisson rounds at rate 1 %, δ = 10⁻⁵" in noise["source"]
