"""Names and labels with special characters are displayed verbatim, or rejected before the first run."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedrax.data import Federation
from fedrax.data.plot import save_label_counts
from tests.cli.conftest import TINY

LABELS = [r"$\\bad{$", "[/b]", "[red]x", "_x", "<script>alert(1)</script>", ":smile:", "a|b", "`*c*`", "$x$ and $"]


OWN_MODEL = """
from fedrax.models import Linear

def model(input_shape, num_outputs):
    return Linear().build(input_shape, num_outputs)
"""


def comparison(labels: list[str], more: str = "") -> str:
    """A file with a method for each label."""
    shared = (
        TINY.replace('name = "tiny"', "")
        .replace("rounds = 4", "rounds = 1")
        .replace("eval_every = 2", "eval_every = 1")
    )
    return more + shared + "".join(f'[[compare]]\nlabel = "{label}"\n' for label in labels)


def test_labels_are_displayed_verbatim(tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(comparison(LABELS, 'name = "$[/b]_<b>"\nseeds = [0]\n'))
    outcome = fedrax("compare", "x.toml", "--out", "c")
    assert outcome.status == 0, outcome.err
    labels = [label.replace("\\\\", "\\") for label in LABELS]
    for label in labels:
        assert label in outcome.out
    table = (tmp_path / "c" / "table.md").read_text()
    assert "<script>" not in table and table.count("\n") == 2 + len(labels)
    picture = ElementTree.parse(tmp_path / "c" / "curves.svg")  # SVG contains text as paths, with the text in comments
    assert picture.getroot().tag.endswith("svg")
    drawn = (tmp_path / "c" / "curves.svg").read_text()
    assert drawn.count("line2d") > 4 * len(labels)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a/b", "a-b"], "are alike"),
        (["x" * 100 + "1", "x" * 100 + "2"], "are alike"),
        (["A", "a"], "are alike"),
        (["same", "same"], "two methods are called 'same'"),
        (["table.md"], "name of a file"),
        (["comparison.json"], "name of a file"),
        (["\\u0007bell"], "is empty or not printable"),
        (["two\\nlines"], "is empty or not printable"),
        ([" "], "is empty or not printable"),
    ],
)
def test_invalid_labels_are_rejected_before_the_first_run(labels: list[str], message: str, tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(comparison(labels))
    outcome = fedrax("compare", "x.toml", "--out", "c")
    assert outcome.status == 2 and message in outcome.err and not (tmp_path / "c").exists()


def test_all_seeds_are_checked_before_the_first_round(tmp_path: Path, fedrax: Any):
    (tmp_path / "x.toml").write_text(comparison(["a"], "seeds = [0, 1099511627776]\n"))
    outcome = fedrax("compare", "x.toml", "--out", "c")
    assert outcome.status == 2 and "seed" in outcome.err and not (tmp_path / "c").exists()


def test_class_names_are_displayed_verbatim(tmp_path: Path, fedrax: Any):
    names = ("$\\bad{$", "_hidden", "\x07bell", "<b>")
    y = np.arange(12) % 4
    made = Federation.from_arrays(np.ones((12, 2)), y, np.arange(12) % 3, class_names=names, name="$d$[/b]")
    for path in save_label_counts(made, tmp_path / "picture"):
        assert path.stat().st_size > 0
    ElementTree.parse(tmp_path / "picture.svg")
    rows = "".join(f"{i},{i % 3},{names[i % 4]}\n" for i in range(24) if i % 4 != 2)
    (tmp_path / "d.csv").write_text("a,user,label\n" + rows)
    outcome = fedrax(
        "partition", "--data", "csv", "--data.path", "d.csv", "--data.client", "user", "--partition", "natural"
    )
    assert outcome.status == 0 and "$\\bad{$" in outcome.out and "_hidden" in outcome.out, outcome.err


def test_folder_names_that_are_not_utf8(tmp_path: Path, fedrax: Any):
    """Runs can be written there; paths in experiment files are rejected."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    few = ("--partition.clients", 4, "--run.cohort-size", 2, "--run.rounds", 1, "--quiet")
    assert fedrax("run", "--model", "mine.py:model", *few, "--out", folder / "r").status == 0
    assert fedrax("resume", folder / "r", "--run.rounds", 2, "--quiet").status == 0
    (folder / "d.csv").write_text("a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))
    outcome = fedrax("run", "--data", "csv", "--data.path", folder / "d.csv", *few)
    assert outcome.status == 2 and "d.csv cannot be encoded as UTF-8" in outcome.err and outcome.err.count("\n") == 1


def test_messages_contain_no_control_characters(tmp_path: Path, fedrax: Any):
    """Names of columns and classes in warnings and errors are escaped."""
    (tmp_path / "d.csv").write_text("\x1b[31mred,\x1b]0;title\x07\n1,2\n")
    for command in (("run",), ("partition",), ("compare", "--algorithms", "fedavg")):
        outcome = fedrax(*command, "--data", "csv", "--data.path", "d.csv")
        assert outcome.status == 2 and "[31mred" in outcome.err and "\x1b" not in outcome.err + outcome.out
    rows = "".join(f"{i % 5},\x1b[3{i % 3}m,{i % 2}\n" for i in range(40))
    (tmp_path / "n.csv").write_text("a,\x1b[1mb,label\n" + rows)
    flags = ("--data.path", "n.csv", "--partition", "iid", "--partition.clients", 4, "--run.cohort-size", 2)
    common = (*flags, "--run.rounds", 1, "--model", "logistic")
    for outcome in (
        fedrax("run", "--data", "csv", *common),
        fedrax("compare", "--algorithms", "fedavg", "--seeds", 0, "--data", "csv", *common),
    ):
        assert outcome.status == 0 and "is 3 features" in outcome.err and "\x1b" not in outcome.err + outcome.out
