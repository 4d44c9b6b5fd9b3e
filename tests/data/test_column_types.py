"""Which columns of a table are numbers, categories or identifiers, with missing values and several files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrax.data import load
from fedrax.data.readers.assembly import encode_labels
from fedrax.errors import FedraxError
from tests.data.text_files import write


def test_column_may_be_empty_in_the_test_file(tmp_path: Path):
    full = write(tmp_path / "a.csv", "x,dose,label\n1,10,a\n2,20,b\n3,30,a\n")
    empty = write(tmp_path / "b.csv", "x,dose,label\n1,,a\n2,,b\n")
    dataset = load("csv", path=full, test_path=empty, missing="mean")
    np.testing.assert_allclose(dataset.test.x[:, 1], 0, atol=1e-6)
    assert dataset.train.x.shape == (3, 2)


def test_column_types_are_inferred_over_all_files_together(tmp_path: Path):
    """A column is categorical even if one file has only digits in it, and numeric only if all files agree."""
    for site, codes in (("a", "fr4f"), ("b", "4444"), ("c", "r4rf")):
        rows = "".join(f"{code},{i},{i % 2}\n" for i, code in enumerate(codes))
        write(tmp_path / f"sites/{site}.csv", "drive,x,label\n" + rows)
    dataset = load("csv", path=tmp_path / "sites", columns=("drive",), test_fraction=0.0)
    assert dataset.feature_names == ("drive=4", "drive=f", "drive=r") and dataset.client_names == ("a", "b", "c")
    assert dataset.train.x[dataset.train_clients == 1].tolist() == [[1, 0, 0]] * 4
    train = write(tmp_path / "train.csv", "x,label\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    test = write(tmp_path / "test.csv", "x,label\n1,0\nNA,1\n")
    with pytest.raises(FedraxError, match=r"train.csv and .*test.csv: column 'x' holds .* in 1 of 11 rows texts: 'NA'"):
        load("csv", path=train, test_path=test)
    nothing = write(tmp_path / "nothing.csv", "x,label\n")
    for files, name in (({"path": train, "test_path": nothing}, "nothing"), ({"path": tmp_path / "sites"}, "sites/d")):
        write(tmp_path / "sites/d.csv", "drive,x,label\n")
        with pytest.raises(FedraxError, match=f"{name}.csv holds no rows"):
            load("csv", **files)


def test_long_texts_are_not_stored_in_arrays_of_fixed_width(tmp_path: Path):
    """One long text would make NumPy's fixed-width string arrays take terabytes."""
    rows = "ok,1,a\n" * 3000 + "z" * 2_000_000 + ",2,b\n"
    dataset = load("csv", path=write(tmp_path / "m.csv", "note,x,label\n" + rows))
    assert dataset.train.x.shape[1] == 3
    labels = np.array(["b", "a", "z" * 10_000_000, "a"], object)
    codes, names = encode_labels(labels)
    assert codes.tolist() == [1, 0, 2, 0] and names[:2] == ("a", "b")


@pytest.mark.parametrize("labels", ["auto", "numbers", "classes"])
def test_numeric_target_with_a_few_texts_is_rejected(tmp_path: Path, labels: str):
    """Otherwise every number would become a class."""
    rows = "".join(f"{i},{i / 10}\n" for i in range(8))
    path = write(tmp_path / "p.csv", f"a,price\n{rows}8,NA\n9,NA\n")
    if labels == "classes":
        assert len(load("csv", path=path, label="price", labels="classes").class_names) == 9
        return
    with pytest.raises(
        FedraxError, match=r"'price' holds numbers, and in 2 of 10 rows texts: 'NA'\. Remove those rows; lab|no number"
    ):
        load("csv", path=path, label="price", labels=labels)


def test_numeric_partition_column_with_a_few_texts_is_rejected(tmp_path: Path):
    """Also with labels = "classes", where numeric labels with texts are allowed."""
    rows = "".join(f"{i},{'NA' if i == 3 else i / 2},{i % 2}\n" for i in range(9))
    path = write(tmp_path / "k.csv", "a,age,label\n" + rows)
    with pytest.raises(FedraxError, match="'age' holds numbers, and in 1 of 9 rows texts: 'NA'"):
        load("csv", path=path, labels="classes", partition_by="age", drop=("age",))


def test_empty_quoted_cells_are_missing_values(tmp_path: Path):
    """Some programs quote every cell."""
    path = write(tmp_path / "q.csv", '"sex","age","label"\n"f","1","x"\n"","2","y"\n"m","3","x"\n"f","4","y"\n')
    with pytest.raises(FedraxError, match="'sex' has missing values, 1 of them"):
        load("csv", path=path)
    assert "sex missing" in load("csv", path=path, missing="mean").feature_names
    unlabeled = write(tmp_path / "u.csv", '"a","label"\n"1","x"\n"2",""\n')
    with pytest.raises(FedraxError, match="'label' has missing values"):
        load("csv", path=unlabeled)


def test_mostly_missing_numbers_are_not_categories(tmp_path: Path):
    rows = "".join(f"{'NA' if i % 3 else 50 + i},{i % 5},{i % 2}\n" for i in range(60))
    path = write(tmp_path / "t.csv", "age,x,label\n" + rows)
    with pytest.raises(FedraxError, match="'age' holds numbers, and in 40 of 60 rows texts: 'NA'"):
        load("csv", path=path)
    assert load("csv", path=path, missing_as=("NA",), missing="mean").feature_names == ("age", "x")


def test_distinct_measured_integers_are_not_row_identifiers(tmp_path: Path):
    """Sixty incomes below 40,000 are distinct by chance; sixty integers below ninety, or in rising order, are not."""
    rng = np.random.default_rng(0)
    shuffled, incomes = rng.permutation(90)[:60], rng.choice(40_000, 60, replace=False)
    visits = np.sort(rng.choice(40_000, 60, replace=False))
    rows = "".join(f"{a},{b},{c},{i % 2}\n" for i, (a, b, c) in enumerate(zip(shuffled, incomes, visits, strict=True)))
    notes = load("csv", path=write(tmp_path / "t.csv", "patient,income,visit,label\n" + rows)).notes
    column_names = [note.split("'")[1] for note in notes if "has a different integer in every row" in note]
    assert column_names == ["patient", "visit"]


def test_free_text_is_rejected_as_a_category(tmp_path: Path):
    """Newsgroup messages with line breaks; as texts they are read word by word."""
    rows = "".join(f'"Hello all,\n this ""is"" message {i}\nregards",{"ab"[i % 2]}\n' for i in range(80))
    path = write(tmp_path / "news.csv", "text,label\n" + rows)
    with pytest.raises(FedraxError, match=r"max_categories, or read it as texts, texts = \['text'\]"):
        load("csv", path=path)
    assert load("csv", path=path, texts=["text"], length=9).train.x.shape == (64, 9)


def test_one_hot_columns_that_exceed_memory_are_rejected(tmp_path: Path):
    """80,000 one-hot columns of 100,000 rows."""
    path = write(
        tmp_path / "n.csv", "name,a,label\n" + "".join(f"n{i},{i % 7},{'xy'[i % 2]}\n" for i in range(100_000))
    )
    with pytest.raises(FedraxError, match=r"takes 32 GB for 100,000 rows, too much: column 'name' has 80,000 distinct"):
        load("csv", path=path, max_categories=1_000_000)


def test_one_hot_columns_that_exceed_the_process_limit_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "n.csv", "name,label\n" + "".join(f"n{i},{'xy'[i % 2]}\n" for i in range(40)))
    monkeypatch.setattr("fedrax.data.readers.tabular.host_memory", lambda: 4096)  # for example the limit of a container
    with pytest.raises(FedraxError, match=r"'name' has 32 distinct texts; leave it out by drop\.$"):
        load("csv", path=path)
