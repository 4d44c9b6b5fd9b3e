"""Readers of images in tables, CSV files and OpenML on small files, valid and broken."""

import gzip
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from PIL import Image

from fedrax.data import Dataset, load
from fedrax.data.readers.images import read_image_table
from fedrax.data.readers.tabular import load_csv
from fedrax.errors import FedraxError
from fedrax.experiments import experiment


@pytest.fixture(autouse=True)
def _directories(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDRAX_DATA", raising=False)


def jpeg(color, size=(32, 32), kind="PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, kind)
    return buffer.getvalue()


def write_images(path: Path, images: list, labels: list, column: str = "label") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pl.DataFrame({"img": [{"bytes": b, "path": None} for b in images], column: labels})
    table.write_parquet(path)
    return path


# Image tables


def test_image_table_is_decoded_once(tmp_path, monkeypatch):
    path = write_images(tmp_path / "pets" / "train.parquet", [jpeg((9, 8, 7)), jpeg((1, 2, 3))], [1, 0])
    images, labels, names = read_image_table(path, "label", (32, 32))
    assert images.shape == (2, 32, 32, 3) and (images[0] == (9, 8, 7)).all() and list(labels) == [1, 0]
    assert names == ()
    (cached,) = (tmp_path / "cache/images").iterdir()
    monkeypatch.setattr(Image, "open", lambda *a, **k: pytest.fail("decoded again"))
    assert np.array_equal(read_image_table(path, "label", (32, 32))[0], images)
    monkeypatch.undo()
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "cache"))
    cached.write_bytes(cached.read_bytes()[:100])  # a damaged cache is not used
    assert np.array_equal(read_image_table(path, "label", (32, 32))[0], images)
    assert np.array_equal(np.load(cached), images)


def test_different_file_of_the_same_name_has_another_cache(tmp_path):
    path = write_images(tmp_path / "pets" / "train.parquet", [jpeg((9, 8, 7))], [0])
    read_image_table(path, "label", (32, 32))
    write_images(path, [jpeg((50, 60, 70))], [0])
    assert (read_image_table(path, "label", (32, 32))[0] == (50, 60, 70)).all()


def test_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "file"))
    path = write_images(tmp_path / "pets" / "train.parquet", [jpeg((9, 8, 7), kind="JPEG")], [0])
    assert read_image_table(path, "label", (32, 32))[0].shape == (1, 32, 32, 3)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ([jpeg((0, 0, 0), size=(33, 32))], [0], r"\(33, 32\), not \(32, 32\)"),
        ([b"no image"], [0], "row 0: not a readable"),
        ([jpeg((0, 0, 0))[:60]], [0], "row 0: not a readable"),
        ([None], [0], "row 0: not a readable"),
        ([jpeg((0, 0, 0), kind="GIF")], [0], "row 0: not a readable"),
        ([jpeg((0, 0, 0))], [None], "missing values|integer column"),
        ([jpeg((0, 0, 0))] * 2, [0, None], "missing values"),
        ([jpeg((0, 0, 0))], ["cat"], "integer column"),
    ],
)
def test_broken_image_tables_are_rejected(tmp_path, images, labels, message):
    path = write_images(tmp_path / "train.parquet", images, labels)
    with pytest.raises(FedraxError, match=message):
        read_image_table(path, "label", (32, 32))


def test_image_table_requires_its_columns_and_parquet(tmp_path):
    path = write_images(tmp_path / "train.parquet", [jpeg((0, 0, 0))], [0], column="lable")
    with pytest.raises(FedraxError, match="did you mean 'lable'"):
        read_image_table(path, "label", (32, 32))
    pl.DataFrame({"img": [1], "label": [0]}).write_parquet(path)
    with pytest.raises(FedraxError, match="encoded bytes"):
        read_image_table(path, "label", (32, 32))
    path.write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(FedraxError, match="cannot be read as a Parquet"):
        read_image_table(path, "label", (32, 32))


def test_images_of_tables_are_pixels(tmp_path):
    for part in ("train", "test"):
        write_images(tmp_path / "cifar10" / f"{part}.parquet", [jpeg((0, 0, 0))] * 2, [1, 9])
    dataset = load("cifar10", tmp_path)
    assert dataset.pixels and dataset.preprocess() is not None


def test_cifar_labels_are_checked(tmp_path):
    write_images(tmp_path / "cifar10" / "train.parquet", [jpeg((0, 0, 0))], [10])
    write_images(tmp_path / "cifar10" / "test.parquet", [jpeg((0, 0, 0))], [9])
    with pytest.raises(FedraxError, match=r"0 .. 9, found 10"):
        load("cifar10", tmp_path)


# CSV


CSV = "age,user,height,label\n" + "".join(f"{i},{'ab'[i % 2]},{i}.5,{'no' if i < 10 else 'yes'}\n" for i in range(20))


def test_csv_with_clients(tmp_path):
    path = tmp_path / "people.csv"
    path.write_text(CSV)
    dataset = load("csv", path=path, client="user", standardize="none")
    assert dataset.class_names == ("no", "yes") and dataset.train.x.dtype == np.float32
    assert dataset.train_clients is not None and dataset.test_clients is not None
    assert list(np.bincount(dataset.train_clients)) == [8, 8] and list(np.bincount(dataset.test_clients)) == [
        2,
        2,
    ]
    everything = np.concatenate([dataset.train.x, dataset.test.x])
    assert sorted(everything[:, 0]) == list(range(20)) and (everything[:, 1] == everything[:, 0] + 0.5).all()


def test_csv_with_a_test_file_and_real_targets(tmp_path):
    (tmp_path / "train.csv").write_text("a,b,label\n1,2,0.5\n3,4,1.5\n")
    (tmp_path / "test.csv").write_text("a,b,label\n5,6,2.5\n")
    dataset = load("csv", path=tmp_path / "train.csv", test_path=tmp_path / "test.csv", standardize="none")
    assert dataset.num_classes is None and dataset.train.x.tolist() == [[1, 2], [3, 4]]
    assert dataset.test.y.tolist() == [2.5] and dataset.test.y.dtype == np.float32
    (tmp_path / "test.csv").write_text("a,c,label\n5,6,2.5\n")
    with pytest.raises(FedraxError, match=r"test.csv has no column 'b', which .*train.csv has: set different"):
        load("csv", path=tmp_path / "train.csv", test_path=tmp_path / "test.csv")


HOSPITALS = {
    "east": "age,ill,lab\n10,0,1.5\n20,1,2.5\n",
    "north": "ward,age,ill\nA,30,0\nB,40,1\n",
    "south": "ill,lab,age,smoker\n0,3.5,50,1\n1,,60,0\n",
}
"""Three clients with the common columns age and ill."""


def hospital_options(folder: Path, **options: Any) -> Dataset:
    """Options to read the three files without a test part."""
    folder.mkdir(exist_ok=True)
    for name, text in HOSPITALS.items():
        (folder / f"{name}.csv").write_text(text)
    return load("csv", path=folder, test_fraction=0.0, **{"label": "ill"} | options)


def test_files_with_different_columns(tmp_path):
    """Their union with imputed values, or their intersection."""
    shared = hospital_options(tmp_path / "sites", different_columns="intersection", standardize="none")
    assert shared.feature_names == ("age",) and shared.train.x[:, 0].tolist() == [10, 20, 30, 40, 50, 60]
    assert "columns that not all files have are left out: lab, ward, smoker (different_columns)" in shared.notes

    every: dict[str, Any] = {"different_columns": "union", "standardize": "none"}
    filled = hospital_options(tmp_path / "sites", **every, missing=-1)
    assert filled.feature_names == ("age", "lab", "ward=A", "ward=B", "ward missing", "smoker")
    assert filled.train.x[:, 1].tolist() == [1.5, 2.5, -1, -1, 3.5, -1]
    assert filled.train.x[:, 5].tolist() == [-1, -1, -1, -1, 1, 0]
    assert filled.train.x[:, 2:5].argmax(1).tolist() == [2, 2, 0, 1, 2, 2]
    missing = "columns are missing in some of the 3 files: lab (1), ward (2), smoker (2) (different_columns)"
    assert {missing, "3 missing values of 'lab' are -1 (missing)"} < set(filled.notes)
    assert filled.client_names == ("east", "north", "south")

    by_mean = hospital_options(tmp_path / "sites", **every, missing="mean")
    assert by_mean.train.x[:, 1].tolist() == [1.5, 2.5, 2.5, 2.5, 3.5, 2.5]
    own = hospital_options(tmp_path / "sites", different_columns="union", missing="mean", standardize="client")
    assert own.train.x[2:4, 1].tolist() == [0, 0] and np.isfinite(own.train.x).all()
    scaled = hospital_options(tmp_path / "sites", different_columns="union", missing=2.5)  # the mean
    alone = hospital_options(tmp_path / "sites", different_columns="union", missing=2.5, columns=("lab",))
    np.testing.assert_allclose(scaled.train.x[:, 1], alone.train.x[:, 0])
    np.testing.assert_allclose(alone.train.x[:, 0], np.array([-1, 0, 0, 0, 1, 0]) / np.sqrt(1 / 3), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"different_columns": "union"},
            "column 'lab' has missing values, 3 of them, the first in row 2: missing = \"mean\"",
        ),
        ({"different_columns": "union", "missing": "mean", "label": "ward"}, "no column 'ward', which .* as label"),
        ({"different_columns": "union", "missing": 0, "client": "lab"}, r"north.csv has no column 'lab', .* as client"),
        ({"different_columns": "intersection", "columns": ("age", "lab")}, "has no column 'lab', .* as one of columns"),
        ({"different_columns": "intersection", "columns": ("age", "lap")}, "did you mean 'lab'"),
        (
            {"different_columns": "outer"},
            "different_columns must be one of 'refuse', 'union', 'intersection', not 'outer'",
        ),
        ({"different_columns": "union", "missing": float("nan")}, "missing must be a finite number, not nan"),
        (
            {"different_columns": "union", "missing": "0"},
            "missing must be one of 'refuse', 'mean' or a number, not '0'",
        ),
        ({"different_columns": "union", "missing": None}, "or a number, not None"),
    ],
)
def test_invalid_options_for_different_columns_are_rejected(tmp_path, options, message):
    with pytest.raises(FedraxError, match=message):
        hospital_options(tmp_path / "sites", **options)
    with pytest.raises(FedraxError, match="different_columns has no effect on a single file"):
        load("csv", path=tmp_path / "sites/east.csv", label="ill", different_columns="union")


def test_experiment_file_reads_different_columns(tmp_path):
    hospital_options(tmp_path / "sites", different_columns="intersection")
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "csv"\npath = "sites"\nlabel = "ill"\ndifferent_columns = "union"\nmissing = -1\n'
        'test_fraction = 0.0\nstandardize = "none"\n[partition]\nname = "natural"\n'
    )
    spec = experiment.read(tmp_path / "e.toml")
    assert experiment.load_federation(spec).train.x[:, 5].tolist() == [-1, -1, -1, -1, 1, 0]
    experiment.write(spec, tmp_path / "again.toml")
    assert experiment.read(tmp_path / "again.toml") == spec


def test_folder_of_files_has_a_client_per_file(tmp_path):
    (tmp_path / "sites").mkdir()
    rows = {"north": "age,sex,ill\n30,f,0\n40,m,1\n50,,0\n60,f,1\n", "south": "ill,sex,ward,age\n0,,A,70\n1,,B,90\n"}
    for name, text in rows.items():
        (tmp_path / f"sites/{name}.csv").write_text(text)
    options: dict[str, Any] = {"path": tmp_path / "sites", "label": "ill", "missing": "mean", "standardize": "none"}
    with pytest.raises(FedraxError, match=r"north.csv has no column 'ward', which .*south.csv has: .*or drop the col"):
        load("csv", **options)
    for chosen in ({"drop": ("ward",)}, {"columns": ("age", "sex")}):
        dataset = load("csv", **options, **chosen, test_fraction=0.5)
        assert dataset.client_names == ("north", "south") and "each of the 2 files" in dataset.notes[0]
        assert dataset.feature_names[0] == "age" and "sex missing" in dataset.feature_names
        ages = [
            part.x[clients == 1, 0]
            for part, clients in ((dataset.train, dataset.train_clients), (dataset.test, dataset.test_clients))
        ]
        assert sorted(np.concatenate(ages)) == [70, 90] and [len(one) for one in ages] == [1, 1]
    (tmp_path / "later").mkdir()
    (tmp_path / "later/south.csv").write_text(rows["south"])
    dataset = load("csv", **options, drop=("ward",), test_path=tmp_path / "later")
    assert dataset.test_clients is not None and dataset.test_clients.tolist() == [1, 1] and len(dataset.train.y) == 6
    with pytest.raises(FedraxError, match="is a client: test_path must be a folder of their files"):
        load("csv", **options, drop=("ward",), test_path=tmp_path / "later/south.csv")
    with pytest.raises(FedraxError, match=r"unknown column of .*sites 'wrad'; did you mean 'ward'"):
        load("csv", **options, drop=("wrad",))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (CSV, {"label": "lable"}, "did you mean 'label'"),
        (CSV, {"client": "usr"}, "did you mean 'user'"),
        (CSV, {"columns": ("age", "hight")}, "did you mean 'height'"),
        (CSV, {"columns": ("label",)}, "no feature left"),
        (CSV, {"columns": ("age",), "drop": ("age",)}, "no feature left"),
        (CSV, {"columns": ("user", "age"), "client": "user"}, "columns names 'user', the column of clients"),
        (CSV, {"client": "user", "max_categories": 7, "categorical": ("age",)}, "16 distinct texts, too many"),
        (CSV, {"labels": "numbers"}, "cannot be regression targets"),
        (CSV, {"standardize": "clients"}, "did you mean 'client'"),
        ("a,label\n1,0\n2,\n", {"missing": "mean"}, "'label' has missing values, which are not allowed"),
        ("a,label\n,0\n,1\n", {"missing": "mean"}, "no value in any training row"),
        ("a,label\ninf,0\n1,1\n", {}, "not finite"),
        (CSV, {"client": "user", "test_fraction": 1.0}, "test fraction"),
        ("a,label\n1,0\n,1\n", {}, "'a' has missing values, 1 of them, the first in row 1: missing = \"mean\""),
        ("a,label\n1,0\n1,2,3,4\n", {}, "cannot be read as a CSV"),
        ("a,label\nNaN,0\n2,1\n", {}, "'a' has missing values"),
        ("", {}, "cannot be read as a CSV"),
        ("a,label\n", {}, "holds no rows"),
        ("a,label,label\n1,0,0\n2,1,1\n", {}, "two columns 'label'"),
        (gzip.compress(b"a,label\n" + b"1,0\n" * 10_000, mtime=0), {}, "is compressed"),
        (b"a,l\xff\xfe\n1,0\n", {}, "cannot be read as a CSV"),
    ],
)
def test_broken_csv_is_rejected(tmp_path, text, options, message):
    path = tmp_path / "table.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FedraxError, match=message):
        load("csv", path=path, **options)


def test_single_file_that_is_standardized_by_client_is_one_client(tmp_path):
    """As at the client of a federation: its rows are those of a folder with this file, also in its test file."""
    rng = np.random.default_rng(0)
    for folder in ("train", "test"):
        (tmp_path / folder).mkdir()
        rows = "".join(f"{a:.3f},{a > 5:d}\n" for a in rng.normal(5, 2, 12))
        (tmp_path / folder / "north.csv").write_text(f"a,label\n{rows}")
    paths = [{"path": tmp_path / "train", "test_path": tmp_path / "test"}]
    paths.append({name: folder / "north.csv" for name, folder in paths[0].items()})
    folder, file = (load("csv", **part, standardize="client") for part in paths)
    assert file.client_names == folder.client_names == ("north",)
    for one, other in ((file.train, folder.train), (file.test, folder.test)):
        np.testing.assert_array_equal(one.x, other.x)
    np.testing.assert_array_equal(file.train_clients, folder.train_clients)
    np.testing.assert_array_equal(file.test_clients, folder.test_clients)
    assert abs(file.train.x.mean()) < 1e-6 and abs(file.test.x.mean()) > 1e-3
    assert "of one client, as without client" in file.notes[0]


def test_path_is_not_a_glob_pattern(tmp_path):
    for name in ("d1.csv", "d2.csv"):
        (tmp_path / name).write_text("a,label\n1,0\n2,1\n")
    with pytest.raises(FedraxError, match="there is no file"):
        load("csv", path=tmp_path / "d*.csv")
    (tmp_path / "d*.csv").write_text("a,label\n" + "1,0\n2,1\n" * 5)
    assert len(load("csv", path=tmp_path / "d*.csv").train.y) == 8


@pytest.mark.parametrize("special", ["/dev/zero", "fifo"])
def test_special_files_are_no_csv_files(special, tmp_path):
    if special == "fifo":
        os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FedraxError, match="not a regular file"):
        load("csv", path=tmp_path / special)


def test_missing_csv_file_is_named(tmp_path):
    with pytest.raises(FedraxError, match="there is no file"):
        load("csv", path=tmp_path / "none.csv")


# OpenML


def bunch(x, y, **categories):
    return SimpleNamespace(data=x, target=y, feature_names=["a", "b"], categories=categories)


def test_openml_arrays_become_a_dataset(monkeypatch):
    x = np.arange(40.0).reshape(20, 2)
    y = np.array(["b", "a"] * 10, object)
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *a, **k: bunch(x, y))
    dataset = load("openml", dataset="letters")
    assert dataset.class_names == ("a", "b") and dataset.train.x.dtype == np.float32
    assert len(dataset.train.y) == 16 and list(np.bincount(dataset.test.y)) == [2, 2]
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *a, **k: bunch(x * np.nan, y))
    with pytest.raises(FedraxError, match="missing, sparse or non-numeric"):
        load("openml", dataset="letters")
    monkeypatch.setattr("sklearn.datasets.fetch_openml", lambda *a, **k: bunch(x, y, b=["red", "blue"], class_=["a"]))
    with pytest.raises(FedraxError, match=r"has nominal features \(b\): read it from a csv file"):
        load("openml", dataset="letters")


def test_openml_without_network_raises_a_clear_error(monkeypatch):
    def offline(*arguments, **options):
        raise OSError("name resolution failed")

    monkeypatch.setattr("sklearn.datasets.fetch_openml", offline)
    with pytest.raises(FedraxError, match=r"'iris'.*name resolution failed.*needs the network"):
        load("openml", dataset="iris")


def test_large_integer_classes_stay_distinct_and_targets_beyond_32_bits_are_rejected(tmp_path):
    (tmp_path / "d.csv").write_text("a,label\n" + "".join(f"{i},{v}\n" for i, v in enumerate([1e6 + 1, 1e6 + 2, 0.5])))
    dataset = load("csv", path=tmp_path / "d.csv", labels="classes", test_fraction=0.0)
    assert dataset.class_names == ("0.5", "1000001", "1000002")
    (tmp_path / "y.csv").write_text("a,label\n0,1e300\n1,2.5\n")
    with pytest.raises(FedraxError, match="targets hold numbers beyond 32-bit floats, 1e"):
        load("csv", path=tmp_path / "y.csv", test_fraction=0.0)
    (tmp_path / "x.csv").write_text("a,label\n-1e300,0\n1,1\n")
    with pytest.raises(FedraxError, match="'a' holds numbers that are not finite, or beyond 32-bit floats"):
        load("csv", path=tmp_path / "x.csv", test_fraction=0.0)


@pytest.mark.parametrize("column", ["a", "label", "who"])
def test_integers_beyond_64_bits_are_rejected(column, tmp_path):
    rows = [{"a": 1, "label": 0, "who": 2} | ({column: 10**30 + i} if i else {}) for i in range(3)]
    text = "a,label,who\n" + "".join(f"{row['a']},{row['label']},{row['who']}\n" for row in rows)
    (tmp_path / "d.csv").write_text(text)
    with pytest.raises(FedraxError, match=f"column '{column}' holds integers beyond 64 bits"):
        load("csv", path=tmp_path / "d.csv", client="who", test_fraction=0.0)


@pytest.mark.parametrize("name", [b"d\xff.csv", b"caf\xe9/d.csv"])
def test_file_names_that_are_not_utf8(tmp_path: Path, name: bytes):
    path = tmp_path / os.fsdecode(name)
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_text("a,label\n1,0\n")
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(FedraxError, match=r"\\x.*is not valid UTF-8: rename the file"):
        load_csv(path)
