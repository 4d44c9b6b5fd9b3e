"""What several files of one comparison may not differ in, and what does not go together in one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import TINY, Outcome


@pytest.mark.parametrize("name", ["normalize = false", "validation = 0.3", "seeds = [5, 6]", "target = 0.9"])
def test_files_that_differ_in_more_than_their_methods(
    name: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """One of them would be taken for all, and each run's directory would say its own."""
    (tmp_path / "x.toml").write_text(TINY)
    (tmp_path / "y.toml").write_text(f"{name}\n{TINY}")
    refused = fedrax("compare", "x.toml", "y.toml")
    assert refused.status == 2 and f"differ in {name.split()[0]}: a comparison needs the same for all" in refused.err


def test_rows_that_are_held_out_twice(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    """A trial of the search and a final run would be one."""
    (tmp_path / "x.toml").write_text(f"validation = 0.2\n{TINY}")
    refused = fedrax("compare", "x.toml", "--grid", "algorithm.local.lr=0.1,0.2")
    assert refused.status == 2 and "leave validation out here, and set it in [search]" in refused.err


def test_methods_added_to_a_file_see_its_rows(fedrax: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(f"normalize = false\nvalidation = 0.2\nseeds = [0]\n{TINY}")
    made = fedrax("compare", "x.toml", "--algorithms", "fedprox", "--out", "c")
    assert made.status == 0, made.err
    tables = [file.read_text() for file in sorted((tmp_path / "c").rglob("experiment.toml"))]
    assert len(tables) == 2
    assert all("normalize = false" in table and "validation = 0.2" in table for table in tables)


@pytest.mark.parametrize("grid", ["", "grid = { algorithm.local.lr = [0.1, 0.2] }"])
def test_a_method_that_the_data_do_not_fit_is_named_before_anything_runs(
    grid: str, fedrax: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Hours of other methods, or of a search for their settings, would come before it."""
    blocks = '[[compare]]\nname = "losac"\nlabel = "too many"\nlocal = { steps = 2, blocks = 5000 }\n'
    (tmp_path / "x.toml").write_text(f'{TINY}\n[[compare]]\nname = "fedprox"\n{grid}\n{blocks}')
    refused = fedrax("compare", "x.toml", "--out", "c")
    assert refused.status == 2 and refused.err.splitlines()[-1].startswith("fedrax: too many: local.blocks = 5000")
    assert not list(tmp_path.rglob("events.jsonl"))
