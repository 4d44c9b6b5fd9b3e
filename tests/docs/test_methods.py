"""Every method has one page in the documentation, with its citations."""

from collections import Counter
from pathlib import Path

from docs.method_pages import FOLDER, REFERENCES, TITLES, facts, front_matter, references
from fedrax.experiments.method_registry import algorithms

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


def test_the_facts_of_a_page_describe_its_class():
    text = facts(PAGES["scaffold"])
    for heading in ("## Example", "## Hyper-parameters", "## Cost", "## Results", "## Code", "## Citation"):
        assert heading in text
    assert "| `option` | `'II'` |" in text  # the field with its default
    assert "| Scaffold | 2 | 2 | 1 | 1 |" in text  # two vectors in both directions, one phase, a state of one model
    assert "def client(" in text and "@inproceedings{karimireddy2020," in text
