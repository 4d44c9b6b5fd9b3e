"""Notes and errors of the table reader about the contents of a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrax.data import load
from fedrax.errors import FedraxError
from tests.data.text_files import write


def test_classes_and_clients_of_test_rows_only_are_noted(tmp_path: Path):
    train = write(tmp_path / "train.csv", "who,x,label\n" + "".join(f"A,{i},{'pq'[i % 2]}\n" for i in range(9)))
    test = write(tmp_path / "test.csv", "who,x,label\nA,1,p\nB,2,r\nC,3,r\n")
    notes = load("csv", path=train, test_path=test, client="who").notes
    assert "2 test rows are of the class 'r', of which there are no training rows" in notes
    assert "2 test rows are of 2 clients such as 'B', of which there are no training rows" in notes


def test_clients_without_test_rows_are_noted(tmp_path: Path):
    rows = "".join(f"{c},{i},{'xy'[i % 2]}\n" for c, n in (("A", 10), ("B", 3), ("C", 1)) for i in range(n))
    dataset = load("csv", path=write(tmp_path / "c.csv", "c,a,label\n" + rows), client="c", standardize="client")
    assert any("2 of 3 clients have too few rows to keep 0.2 of them" in note for note in dataset.notes)
    assert any("1 clients have a single training row" in note for note in dataset.notes)


def test_classes_that_differ_only_in_case_are_noted(tmp_path: Path):
    path = write(tmp_path / "c.csv", "a,label\n1,Yes\n2,no\n3,yes\n")
    assert (
        "warning: 'label' has classes that differ in case only, such as 'Yes' and 'yes'" in load("csv", path=path).notes
    )


def test_common_codes_for_missing_values_are_noted(tmp_path: Path):
    rows = [("NA" if i % 9 == 0 else "xy"[i % 2], "N/A" if i % 8 == 0 else "AB"[i % 2], i) for i in range(40)]
    text = "".join(f"{vote},{clinic},{'?' if i % 10 == 0 else 'fm'[i % 2]}\n" for vote, clinic, i in rows)
    path = write(tmp_path / "t.csv", "vote,clinic,sex\n" + text)
    notes = load("csv", path=path, label="vote", client="clinic").notes
    assert (
        "warning: 'NA', in 5 rows of 'vote', is read as a class: remove those rows if it means a missing value" in notes
    )
    assert any("'N/A', in 5 rows of 'clinic', is read as a client" in note for note in notes)
    assert "'?', in 4 rows of 'sex', is read as a category (missing_as)" in notes


def test_errors_and_notes_name_the_remedy(tmp_path: Path):
    blanks = write(tmp_path / "b.csv", '"a" "b" "label"\n"x" 2 0\n"y" 3 1\n')
    with pytest.raises(FedraxError, match="if ' ' separates its columns, set separator to it"):
        load("csv", path=blanks)
    assert len(load("csv", path=blanks, separator=" ").feature_names) == 3
    same = write(tmp_path / "s.csv", "c,a,label\n" + "".join(f"{i % 5},{i},2.5\n" for i in range(15)))
    notes = load("csv", path=same, client="c").notes
    assert any("'label' is 2.5 in every row: there is nothing to predict" in note for note in notes)
    assert any("few rows of any client to keep 0.2 of them for the test, which is empty: raise" in n for n in notes)
    with pytest.raises(
        FedraxError, match=r"no feature left: label, client, columns and drop leave none of its columns"
    ):
        load("csv", path=same, client="c", drop=("a",))


def test_options_without_effect_are_rejected(tmp_path: Path):
    path = write(tmp_path / "a.csv", "a,label\n1,x\n2,y\n")
    with pytest.raises(FedraxError, match="test_fraction has no effect where test_path holds the test rows: leave it"):
        load("csv", path=path, test_path=path, test_fraction=0.5)
    assert len(load("csv", path=path, test_path=path, test_fraction=0.0).test.y) == 2
