"""Tables, images and files of unusual kinds: right numbers, or a sentence."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import DirichletClasses, load
from fedrax.data.dataset import train_test_split
from fedrax.data.readers.assembly import encode_labels
from fedrax.data.readers.huggingface import _column_kind
from fedrax.data.readers.tabular import scale_notes
from fedrax.errors import FedraxError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_feature_that_is_constant_but_for_rounding(tmp_path: Path):
    """The mean of three times 0.1 is not 0.1: its deviation is none all the same, and that of all clients serves."""
    train = write(
        tmp_path / "tr.csv", "c,a,b,label\nA,0.1,1,x\nA,0.1,2,y\nA,0.1,4,x\nB,0.3,5,y\nB,0.5,3,x\nB,0.9,2,y\n"
    )
    test = write(tmp_path / "te.csv", "c,a,b,label\nA,0.2,1,x\n")
    found = load("csv", path=train, test_path=test, client="c", standardize="client")
    np.testing.assert_array_equal(found.train.x[:3, 0], 0)
    overall = np.std([0.1, 0.1, 0.1, 0.3, 0.5, 0.9])
    np.testing.assert_allclose(found.test.x[:, 0], 0.1 / overall, rtol=1e-5)
    one = write(tmp_path / "t2.csv", "a,b,label\n0.1,1,x\n0.1,2,y\n0.1,5,x\n")
    other = write(tmp_path / "e2.csv", "a,b,label\n0.2,1,x\n")
    found = load("csv", path=one, test_path=other)
    assert "columns of one number in all training rows: 1, such as 'a'" in found.notes
    np.testing.assert_array_equal(found.train.x[:, 0], 0)
    np.testing.assert_allclose(found.test.x[:, 0], 0.1, rtol=1e-5)
    assert scale_notes(np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]])) == []


def test_a_column_without_values_in_one_file(tmp_path: Path):
    full = write(tmp_path / "a.csv", "x,dose,label\n1,10,a\n2,20,b\n3,30,a\n")
    empty = write(tmp_path / "b.csv", "x,dose,label\n1,,a\n2,,b\n")
    found = load("csv", path=full, test_path=empty, missing="mean")
    np.testing.assert_allclose(found.test.x[:, 1], 0, atol=1e-6)
    assert found.train.x.shape == (3, 2)


def test_texts_that_are_all_digits_in_one_file(tmp_path: Path):
    """As in one file of all rows: codes of which a site has digits alone, and numbers one of which is missing."""
    for site, codes in (("a", "fr4f"), ("b", "4444"), ("c", "r4rf")):
        rows = "".join(f"{code},{i},{i % 2}\n" for i, code in enumerate(codes))
        write(tmp_path / f"sites/{site}.csv", "drive,x,label\n" + rows)
    made = load("csv", path=tmp_path / "sites", columns=("drive",), test_fraction=0.0)
    assert made.feature_names == ("drive=4", "drive=f", "drive=r") and made.client_names == ("a", "b", "c")
    assert made.train.x[made.train_clients == 1].tolist() == [[1, 0, 0]] * 4
    train = write(tmp_path / "train.csv", "x,label\n" + "".join(f"{i},{i % 2}\n" for i in range(9)))
    test = write(tmp_path / "test.csv", "x,label\n1,0\nNA,1\n")
    with pytest.raises(FedraxError, match=r"train.csv and .*test.csv: column 'x' holds .* in 1 of 11 rows texts: 'NA'"):
        load("csv", path=train, test_path=test)
    nothing = write(tmp_path / "nothing.csv", "x,label\n")
    for files, name in (({"path": train, "test_path": nothing}, "nothing"), ({"path": tmp_path / "sites"}, "sites/d")):
        write(tmp_path / "sites/d.csv", "drive,x,label\n")
        with pytest.raises(FedraxError, match=f"{name}.csv holds no rows"):
            load("csv", **files)


def test_classes_and_clients_of_test_rows_alone_are_told_of(tmp_path: Path):
    train = write(tmp_path / "train.csv", "who,x,label\n" + "".join(f"A,{i},{'pq'[i % 2]}\n" for i in range(9)))
    test = write(tmp_path / "test.csv", "who,x,label\nA,1,p\nB,2,r\nC,3,r\n")
    notes = load("csv", path=train, test_path=test, client="who").notes
    assert "2 test rows are of the class 'r', of which there are no training rows" in notes
    assert "2 test rows are of 2 clients such as 'B', of which there are no training rows" in notes


def test_one_long_text(tmp_path: Path):
    """As arrays of texts of one length, these would take terabytes."""
    rows = "ok,1,a\n" * 3000 + "z" * 2_000_000 + ",2,b\n"
    found = load("csv", path=write(tmp_path / "m.csv", "note,x,label\n" + rows))
    assert found.train.x.shape[1] == 3
    labels = np.array(["b", "a", "z" * 10_000_000, "a"], object)
    codes, names = encode_labels(labels)
    assert codes.tolist() == [1, 0, 2, 0] and names[:2] == ("a", "b")


def png16(value: int) -> bytes:
    """2 x 2 pixels of 16 bits a channel."""
    part = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)
    body = zlib.compress((b"\0" + struct.pack(">6H", *[value] * 6)) * 2)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", body) + part(b"IEND", b"")


def test_colors_of_sixteen_bits_are_refused(tmp_path: Path):
    for name, value in (("a", 200), ("b", 4000)):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_bytes(png16(value))
    with pytest.raises(FedraxError, match="more than 8 bits a channel"):
        load("image_folder", path=tmp_path / "images", size=(2, 2), test_fraction=0.0)


def test_groups_that_a_file_does_not_name(tmp_path: Path):
    data = {"users": ["u1", "u2"], "user_data": {u: {"x": [[1.0, 2.0], [3.0, 4.0]], "y": [0, 1]} for u in ("u1", "u2")}}
    file = write(tmp_path / "one.json", json.dumps(data))
    with pytest.raises(FedraxError, match="names no hierarchies for its users"):
        load("leaf", path=file, clients="hierarchies")
    assert load("leaf", path=file).client_names == ("u1", "u2")


def test_kinds_of_whole_numbers_without_a_sign():
    digits = load("digits")
    by = np.arange(len(digits.train.y)) % 3
    one, other = (replace(digits, partition_by=by.astype(kind)) for kind in (np.uint64, np.int32))
    parts = [DirichletClasses(5, 0.5).assign(data, 0) for data in (one, other)]
    for mine, theirs in zip(*parts, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_bytes_are_images_and_no_texts():
    pl = pytest.importorskip("polars")
    assert [_column_kind(dtype) for dtype in (pl.Binary, pl.String, pl.Int8, pl.List(pl.Int8))] == [
        "image", "text", "number", "list",
    ]  # fmt: skip


@pytest.mark.parametrize("labels", ["auto", "numbers", "classes"])
def test_a_target_in_which_a_few_texts_stand(tmp_path: Path, labels: str):
    """They would make a class of every number."""
    rows = "".join(f"{i},{i / 10}\n" for i in range(8))
    path = write(tmp_path / "p.csv", f"a,price\n{rows}8,NA\n9,NA\n")
    if labels == "classes":
        assert len(load("csv", path=path, label="price", labels="classes").class_names) == 9
        return
    with pytest.raises(
        FedraxError, match=r"'price' holds numbers, and in 2 of 10 rows texts: 'NA'\. Remove those rows; lab|no number"
    ):
        load("csv", path=path, label="price", labels=labels)


def test_cells_of_quotes_alone_are_missing(tmp_path: Path):
    """As programs write them that put everything into quotes."""
    path = write(tmp_path / "q.csv", '"sex","age","label"\n"f","1","x"\n"","2","y"\n"m","3","x"\n"f","4","y"\n')
    with pytest.raises(FedraxError, match="'sex' has missing values, 1 of them"):
        load("csv", path=path)
    assert "sex missing" in load("csv", path=path, missing="mean").feature_names
    unlabeled = write(tmp_path / "u.csv", '"a","label"\n"1","x"\n"2",""\n')
    with pytest.raises(FedraxError, match="'label' has missing values"):
        load("csv", path=unlabeled)


def test_clients_without_a_row_for_the_test_are_told(tmp_path: Path):
    rows = "".join(f"{c},{i},{'xy'[i % 2]}\n" for c, n in (("A", 10), ("B", 3), ("C", 1)) for i in range(n))
    made = load("csv", path=write(tmp_path / "c.csv", "c,a,label\n" + rows), client="c", standardize="client")
    assert any("2 of 3 clients have too few rows to keep 0.2 of them" in note for note in made.notes)
    assert any("1 clients have one training row" in note for note in made.notes)


def test_many_clients_are_standardized_in_one_pass(tmp_path: Path):
    """In a pass over all rows for each client these would take minutes."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(20_000), 5)
    values = rng.normal(size=len(owners)) * owners
    rows = "".join(f"{c},{v:.6g},{'xy'[i % 2]}\n" for i, (c, v) in enumerate(zip(owners, values, strict=True)))
    path = write(tmp_path / "m.csv", "c,a,label\n" + rows)
    made = load("csv", path=path, client="c", standardize="client", test_fraction=0.0)
    of_client = made.train.x[:, 0].reshape(-1, 5)
    np.testing.assert_allclose(of_client.mean(1), 0, atol=1e-4)
    np.testing.assert_allclose(of_client[1:].std(1), 1, atol=1e-3)


def test_a_share_whose_product_lies_just_below_a_whole_number():
    train, test = train_test_split(np.zeros(100), 0.29, np.random.default_rng(0))
    assert (len(train), len(test)) == (71, 29)


def test_categories_that_no_memory_holds(tmp_path: Path):
    """A feature for each of 80,000 names in 100,000 rows."""
    path = write(
        tmp_path / "n.csv", "name,a,label\n" + "".join(f"n{i},{i % 7},{'xy'[i % 2]}\n" for i in range(100_000))
    )
    with pytest.raises(FedraxError, match=r"takes 32 GB in 100,000 rows, too much: column 'name' has 80,000 different"):
        load("csv", path=path, max_categories=1_000_000)


def test_categories_that_this_process_may_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write(tmp_path / "n.csv", "name,label\n" + "".join(f"n{i},{'xy'[i % 2]}\n" for i in range(40)))
    monkeypatch.setattr("fedrax.data.readers.tabular.host_memory", lambda: 4096)  # as in a container
    with pytest.raises(FedraxError, match=r"'name' has 32 different texts; leave it out by drop\.$"):
        load("csv", path=path)


def test_far_test_rows_are_told_of(tmp_path: Path):
    train = write(tmp_path / "a.csv", "x,label\n1e-30,a\n2e-30,b\n")
    test = write(tmp_path / "b.csv", "x,label\n1e30,a\n")
    with pytest.raises(FedraxError, match=r"b\.csv: column 'x' .* once it is standardized: .* standardize = \"none\""):
        load("csv", path=train, test_path=test)
    assert load("csv", path=train, test_path=test, standardize="none").test.x.max() > 9e29


def test_options_without_effect_are_refused(tmp_path: Path):
    path = write(tmp_path / "a.csv", "a,label\n1,x\n2,y\n")
    with pytest.raises(FedraxError, match="test_fraction has no effect where test_path holds the test rows: leave it"):
        load("csv", path=path, test_path=path, test_fraction=0.5)
    assert len(load("csv", path=path, test_path=path, test_fraction=0.0).test.y) == 2
    vectors = json.dumps({"users": ["u"], "user_data": {"u": {"x": [[1.0], [2.0]], "y": [0, 1]}}})
    with pytest.raises(FedraxError, match="tokens, length have no effect on vectors of numbers: leave them out"):
        load("leaf", path=write(tmp_path / "v.json", vectors), tokens="words", length=3)
    texts = json.dumps({"users": ["u"], "user_data": {"u": {"x": ["ab", "cd"], "y": [0, 1]}}})
    with pytest.raises(FedraxError, match="shape has no effect on texts"):
        load("leaf", path=write(tmp_path / "t.json", texts), shape=[2])
    with pytest.raises(FedraxError, match="min_count has no effect on characters"):
        load("leaf", path=tmp_path / "t.json", tokens="characters", min_count=1)


def test_kinds_to_partition_by_in_which_a_few_texts_stand(tmp_path: Path):
    """With labels = "classes" too, where the labels themselves may be so."""
    rows = "".join(f"{i},{'NA' if i == 3 else i / 2},{i % 2}\n" for i in range(9))
    path = write(tmp_path / "k.csv", "a,age,label\n" + rows)
    with pytest.raises(FedraxError, match="'age' holds numbers, and in 1 of 9 rows texts: 'NA'"):
        load("csv", path=path, labels="classes", partition_by="age", drop=("age",))


def test_texts_that_are_no_categories(tmp_path: Path):
    """Messages of newsgroups, with line ends in them: words are read elsewhere."""
    rows = "".join(f'"Hello all,\n this ""is"" message {i}\nregards",{"ab"[i % 2]}\n' for i in range(80))
    with pytest.raises(FedraxError, match="max_categories; what huggingface reads from Parquet tables may be texts"):
        load("csv", path=write(tmp_path / "news.csv", "text,label\n" + rows))


def test_a_number_far_beyond_those_of_training(tmp_path: Path):
    train = write(tmp_path / "a.csv", "a,label\n" + "".join(f"{1 + i * 1e-9},{i % 2}\n" for i in range(9)))
    with pytest.raises(FedraxError, match="'a' holds numbers beyond 32-bit floats once it is standardized"):
        load("csv", path=train, test_path=write(tmp_path / "b.csv", "a,label\n3e38,1\n"))


def test_classes_that_differ_in_capitals_are_told_of(tmp_path: Path):
    path = write(tmp_path / "c.csv", "a,label\n1,Yes\n2,no\n3,yes\n")
    assert (
        "warning: 'label' has classes that differ in capitals alone, such as 'Yes' and 'yes'"
        in load("csv", path=path).notes
    )


def test_measured_whole_numbers_that_all_differ_number_no_rows(tmp_path: Path):
    """Sixty incomes among thousands differ by chance; sixty numbers below a hundred, or sixty that rise, do not."""
    rng = np.random.default_rng(0)
    shuffled, incomes = rng.permutation(90)[:60], rng.choice(40_000, 60, replace=False)
    visits = np.sort(rng.choice(40_000, 60, replace=False))
    rows = "".join(f"{a},{b},{c},{i % 2}\n" for i, (a, b, c) in enumerate(zip(shuffled, incomes, visits, strict=True)))
    notes = load("csv", path=write(tmp_path / "t.csv", "patient,income,visit,label\n" + rows)).notes
    told = [note.split("'")[1] for note in notes if "is another whole number in every row" in note]
    assert told == ["patient", "visit"]


def test_what_other_programs_write_for_missing_values_is_told_of(tmp_path: Path):
    rows = [("NA" if i % 9 == 0 else "xy"[i % 2], "N/A" if i % 8 == 0 else "AB"[i % 2], i) for i in range(40)]
    text = "".join(f"{vote},{clinic},{'?' if i % 10 == 0 else 'fm'[i % 2]}\n" for vote, clinic, i in rows)
    path = write(tmp_path / "t.csv", "vote,clinic,sex\n" + text)
    notes = load("csv", path=path, label="vote", client="clinic").notes
    assert (
        "warning: 'NA', in 5 rows of 'vote', is a class as any other: remove those rows if it stands for none" in notes
    )
    assert any("'N/A', in 5 rows of 'clinic', is a client as any other" in note for note in notes)
    assert "'?', in 4 rows of 'sex', is a category as any other (missing_as)" in notes


def test_numbers_most_of_which_are_missing_are_no_categories(tmp_path: Path):
    rows = "".join(f"{'NA' if i % 3 else 50 + i},{i % 5},{i % 2}\n" for i in range(60))
    path = write(tmp_path / "t.csv", "age,x,label\n" + rows)
    with pytest.raises(FedraxError, match="'age' holds numbers, and in 40 of 60 rows texts: 'NA'"):
        load("csv", path=path)
    assert load("csv", path=path, missing_as=("NA",), missing="mean").feature_names == ("age", "x")


def test_sentences_of_tables_say_what_helps(tmp_path: Path):
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
