"""Table columns as features: categories, missing values, standardization and names, against NumPy."""

from pathlib import Path

import numpy as np
import pytest

from fedrax.data import Federation, Iid, Natural, load
from fedrax.data.heterogeneity import label_counts
from fedrax.errors import FedraxError

ROWS = [
    ("A", 60.0, "m", 1000.0, "yes"),
    ("A", 70.0, "f", 3000.0, "no"),
    ("A", None, "m", 5000.0, "no"),
    ("B", 30.0, None, 100.0, "yes"),
    ("B", 50.0, "f", 100.0, "no"),
    ("C", 40.0, "x", 700.0, "yes"),
]
TEST = [("A", 80.0, "f", 3000.0, "no"), ("C", 45.0, "z", None, "yes"), ("D", 10.0, "m", 0.0, "no")]


def write(path: Path, rows: list) -> Path:
    cells = [",".join("" if cell is None else str(cell) for cell in row) for row in rows]
    path.write_text("\n".join(["hospital,age,sex,dose,label", *cells]) + "\n")
    return path


@pytest.fixture
def table_options(tmp_path: Path) -> dict:
    """Options of the reader for both files."""
    files = {"path": write(tmp_path / "train.csv", ROWS), "test_path": write(tmp_path / "test.csv", TEST)}
    return {**files, "client": "hospital", "missing": "mean"}


AGE = np.array([60, 70, np.nan, 30, 50, 40, 80, 45, 10])
DOSE = np.array([1000, 3000, 5000, 100, 100, 700, 3000, np.nan, 0])


def test_features_are_standardized_by_the_training_rows(table_options: dict) -> None:
    dataset = load("csv", **table_options)
    assert dataset.feature_names == ("age", "sex=f", "sex=m", "sex=x", "sex missing", "dose")
    x = np.concatenate([dataset.train.x, dataset.test.x])
    for column, raw in ((0, AGE), (5, DOSE)):
        expected = (raw - np.nanmean(raw[:6])) / np.nanstd(raw[:6])
        expected[np.isnan(raw)] = 0
        np.testing.assert_allclose(x[:, column], expected, rtol=1e-5, atol=1e-6)
    sexes = [row[2] for row in ROWS + TEST]
    for column, sex in enumerate(("f", "m", "x", None), 1):
        assert x[:, column].tolist() == [float(mine == sex) for mine in sexes]
    printed = " ".join(dataset.notes)
    for words in ("1 missing values of 'age' are the mean", "50", "1 test rows have texts of 'sex'", "all clients"):
        assert words in printed
    assert dataset.class_names == ("no", "yes") and dataset.client_names == ("A", "B", "C", "D")


def test_features_are_standardized_by_client(table_options: dict) -> None:
    dataset = load("csv", **table_options, standardize="client", drop=("sex",))
    x, owner = np.concatenate([dataset.train.x, dataset.test.x]), np.array(list("AAABBCACD"))
    for column, raw in ((0, AGE), (1, DOSE)):
        expected = np.empty(9)
        overall = np.nanmean(raw[:6]), np.nanstd(raw[:6])
        for client in "ABCD":
            own = raw[:6][(owner[:6] == client) & ~np.isnan(raw[:6])]
            center = own.mean() if len(own) else overall[0]
            scale = own.std() if len(own) > 1 and own.std() > 0 else overall[1]
            expected[owner == client] = np.nan_to_num((raw[owner == client] - center) / scale)
        np.testing.assert_allclose(x[:, column], expected, rtol=1e-5, atol=1e-6)
    assert "training rows of each client" in " ".join(dataset.notes)


def test_features_without_standardization(table_options: dict) -> None:
    dataset = load("csv", **table_options, standardize="none", columns=("dose", "age"))
    assert dataset.feature_names == ("dose", "age")
    assert dataset.train.x.tolist() == [list(row) for row in zip(DOSE[:6], [60, 70, 50, 30, 50, 40], strict=True)]
    assert any("range from 12.9 ('age') to 1.79e+03 ('dose')" in note for note in dataset.notes)


def test_options_missing_as_and_categorical(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("ward,x,label\n" + "1,?,3\n2,4,5\n1,6,7\n" * 4)
    options = {"path": path, "missing": "mean", "missing_as": ("?",), "categorical": ("ward",)}
    dataset = load("csv", **options, labels="numbers", standardize="none", test_fraction=0)
    assert dataset.num_classes is None and dataset.train.y.dtype == np.float32
    assert dataset.train.x[:3].tolist() == [[1, 0, 5], [0, 1, 4], [1, 0, 6]]


def test_numbers_with_a_few_texts_are_no_categories(tmp_path: Path) -> None:
    """An age column with some "NA" would become forty features."""
    path = tmp_path / "t.csv"
    path.write_text("age,stage,label\n" + "".join(f"{20 + i % 40},{'I' * (i % 3 + 1)},{i % 2}\n" for i in range(80)))
    with path.open("a") as file:
        file.write("NA,II,0\n ?,I,1\n")
    message = r"column 'age' holds numbers, and in 2 of 82 rows texts: 'NA', '\?'\. missing_as names"
    with pytest.raises(FedraxError, match=message):
        load("csv", path=path)
    dataset = load("csv", path=path, missing_as=("NA", "?"), missing="mean")
    assert dataset.feature_names == ("age", "stage=I", "stage=II", "stage=III")
    assert len(load("csv", path=path, categorical=("age",)).feature_names) > 40


def test_row_numbers_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,x,label\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(60)))
    assert [
        note for note in load("csv", path=path).notes if "a different integer in every row" in note and "'id'" in note
    ]
    assert not any("'x' is another" in note for note in load("csv", path=path).notes)


def test_many_integer_labels_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,label\n" + "".join(f"{i % 7},{100 + i}\n" for i in range(60)))
    assert any('labels = "numbers" makes a regression' in note for note in load("csv", path=path).notes)
    for options in (dict(labels="numbers"), dict(labels="classes"), dict(max_categories=100)):
        assert not any("regression" in note for note in load("csv", path=path, **options).notes)


def test_labels_that_name_the_rows_are_noted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,label\n" + "".join(f"{i % 7},film {i}\n" for i in range(20)))
    assert any(
        "'label' has 20 classes in 20 rows: it may be an ID or a date" in n for n in load("csv", path=path).notes
    )
    path.write_text("x,label\n" + "".join(f"{i % 7},film {i % 9}\n" for i in range(20)))
    assert not any("it may be an ID" in note for note in load("csv", path=path).notes)


def test_clients_keep_their_names(table_options: dict) -> None:
    federation = Federation.from_dataset(load("csv", **table_options), Natural(), seed=0)
    assert federation.client_names == ("A", "B", "C") and federation.client_name(1) == "B"
    assert label_counts(federation).tolist() == [[2, 1], [1, 1], [0, 1]]
    assert Federation.from_dataset(load("csv", **table_options), Iid(clients=2), seed=0).client_name(1) == "1"
    by_hand = Federation.from_arrays(np.zeros((3, 2)), np.zeros(3, int), np.array(["b", "a", "b"]))
    assert by_hand.client_names == ("a", "b")
