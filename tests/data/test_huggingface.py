"""Datasets of Hugging Face's ``datasets``, created here and saved to disk: ``make test-huggingface``."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from PIL import Image

from fedrax.data import DirichletClasses, Federation, Natural, from_huggingface, load
from fedrax.errors import FedraxError
from fedrax.experiments import experiment
from fedrax.simulation import simulate

datasets = pytest.importorskip("datasets", reason="datasets is not installed: make test-huggingface")
ClassLabel, EncodedFeatures, Value = datasets.ClassLabel, datasets.Features, datasets.Value


def rows(count: int = 12) -> dict[str, list]:
    """Patients of three hospitals."""
    rng = np.random.default_rng(0)
    return {
        "age": rng.integers(20, 80, count).tolist(),
        "sex": [("f", "m")[i % 2] for i in range(count)],
        "clinic": [("north", "south", "west")[i % 3] for i in range(count)],
        "ill": [i % 2 for i in range(count)],
    }


def table(count: int = 12) -> Any:
    kinds = {
        "age": Value("int64"),
        "sex": Value("string"),
        "clinic": Value("string"),
        "ill": ClassLabel(names=["no", "yes"]),
    }
    return datasets.Dataset.from_dict(rows(count), features=EncodedFeatures(kinds))


def picture(shade: int, size: tuple[int, int] = (4, 3)) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def test_tables_equal_those_of_the_csv_reader(tmp_path: Path) -> None:
    """Columns, clients and standardization are those of the same table in a CSV file; class names are kept."""
    lines = [",".join(map(str, row)) for row in zip(*rows().values(), strict=True)]
    (tmp_path / "t.csv").write_text("\n".join([",".join(rows()), *lines]))
    options: dict[str, Any] = dict(label="ill", client="clinic", test_fraction=0.25)
    table().save_to_disk(tmp_path / "saved")
    table().to_parquet(tmp_path / "t.parquet")
    other = load("csv", path=tmp_path / "t.csv", **options)
    for made in (
        load("huggingface", path=tmp_path / "saved", **options),
        load("huggingface", path=str(tmp_path / "t.parquet"), **options),
        from_huggingface(table(), **options),
        from_huggingface(table().select(range(11, -1, -1)).select(range(11, -1, -1)), **options),
    ):
        np.testing.assert_array_equal(made.train.x, other.train.x)
        np.testing.assert_array_equal(made.test.y, other.test.y)
        assert made.class_names == ("no", "yes") and made.client_names == ("north", "south", "west")
        assert made.feature_names == other.feature_names
    by_sex = from_huggingface(table(), label="age", labels="numbers", partition_by="sex", drop=("ill",))
    shares = DirichletClasses(2, 0.01).assign(by_sex, 0)
    assert by_sex.num_classes is None and len(shares.indices) == len(by_sex.train.y)


def test_experiment_file_reads_a_dataset(tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": table(12), "test": table(6)})
    splits.save_to_disk(tmp_path / "clinics")
    (tmp_path / "e.toml").write_text(
        '[data]\nname = "huggingface"\npath = "clinics"\nlabel = "ill"\nclient = "clinic"\n'
        '[partition]\nname = "natural"\n[model]\nname = "logistic"\n[run]\nrounds = 2\ncohort_size = 2\n'
    )
    spec = experiment.read(tmp_path / "e.toml")
    algorithm, task, federation = experiment.build(spec)
    assert len(federation.test.y) == 6 and federation.client_names == ("north", "south", "west")
    assert np.isfinite(simulate(algorithm, task, federation, spec.run).events[-1]["test_loss"])


def test_images_texts_and_lists(tmp_path: Path) -> None:
    shades = [10, 20, 30, 40]
    images = datasets.Dataset.from_dict(
        {"image": [picture(s) for s in shades], "writer": [3, 3, 1, 1], "label": [0, 1, 0, 1]},
        features=EncodedFeatures(
            {"image": datasets.Image(), "writer": Value("int32"), "label": ClassLabel(names=["a", "b"])}
        ),
    )
    folder = tmp_path / "hub/data"
    folder.mkdir(parents=True)
    images.to_parquet(folder / "train-00000-of-00001.parquet")
    images.select([0]).to_parquet(folder / "test-00000-of-00001.parquet")
    dataset = load("huggingface", path=tmp_path / "hub", client="writer")
    assert dataset.pixels and dataset.train.x.shape == (4, 3, 4, 3) and dataset.train.x[:, 0, 0, 0].tolist() == shades
    assert dataset.client_names == ("1", "3") and len(dataset.test.y) == 1 and dataset.class_names == ("a", "b")
    federation = Federation.from_dataset(dataset, Natural(), seed=0)
    assert sorted(federation.train.x[:2, 0, 0, 0].tolist()) == [30, 40]
    gray = from_huggingface(images, client="writer", size=(2, 2), color="gray", test_fraction=0.0)
    assert gray.train.x.shape == (4, 2, 2, 1)
    texts = datasets.Dataset.from_dict({"text": ["good day", "bad day"], "label": ["up", "down"]})
    printed = from_huggingface(texts, length=3, test_fraction=0.0)
    assert printed.vocabulary == ("day", "bad", "good") and printed.train.x.tolist() == [[4, 2, 0], [3, 2, 0]]
    assert from_huggingface(texts, tokens="characters", length=4, test_fraction=0.0).train.x.shape == (2, 4)
    lists = datasets.Dataset.from_dict(
        {"x": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "v": [[1.5], [2.5]], "label": [0, 1]},
        features=EncodedFeatures(
            {"x": datasets.Array2D((2, 2), "float32"), "v": datasets.List(Value("float64")), "label": Value("int64")}
        ),
    )
    arrays = from_huggingface(lists, columns=("x",), test_fraction=0.0)
    assert arrays.train.x.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert from_huggingface(lists, columns=("v",), test_fraction=0.0).train.x.tolist() == [[1.5], [2.5]]
    both = from_huggingface(lists, test_fraction=0.0)
    assert {name: a.shape for name, a in both.train.x.items()} == {"v": (2, 1), "x": (2, 2, 2)}


def test_columns_of_several_kinds_are_several_inputs() -> None:
    shades, ages = [10, 20, 30, 40], [5.0, 6.0, 7.0, 8.0]
    columns = {"scan": [picture(s) for s in shades], "age": ages, "note": ["a b", "c", "b", "a"], "label": [0, 1, 0, 1]}
    kinds = {"scan": datasets.Image(), "age": Value("float64"), "note": Value("string"), "label": Value("int64")}
    records = datasets.Dataset.from_dict(columns, features=EncodedFeatures(kinds))
    options: dict[str, Any] = {"test_fraction": 0.0, "standardize": "none", "size": (2, 2)}

    def letters(text: str) -> list[int]:
        return [ord(letter) - 96 for letter in text.replace(" ", "")]

    made = from_huggingface(records, texts=("note",), tokenizer=letters, **options)
    x = made.train.x
    assert sorted(x) == ["attention_mask", "features", "input_ids", "scan"] and made.feature_names == ("age",)
    assert x["scan"][:, 0, 0, 0].tolist() == shades and x["features"].ravel().tolist() == ages
    assert x["input_ids"].tolist() == [[1, 2], [3, 0], [2, 0], [1, 0]] and made.pixels == "scan"
    federation = Federation.from_dataset(made, DirichletClasses(2, 1.0), seed=0)
    scaled = federation.preprocess()(federation.train.x)  # type: ignore[misc]
    np.testing.assert_array_equal(scaled["input_ids"], federation.train.x["input_ids"])
    assert abs(float(scaled["scan"].mean())) < 1e-5
    words = from_huggingface(records, texts=("note",), drop=("age",), length=2, size=(2, 2), test_fraction=0.0)
    assert words.train.x["tokens"].shape == (4, 2) and sorted(words.train.x) == ["scan", "tokens"]
    encoded = from_huggingface(records, columns=("note",), tokenizer=letters, test_fraction=0.0)
    np.testing.assert_array_equal(encoded.train.x["input_ids"], x["input_ids"])
    with pytest.raises(FedraxError, match="tokenizer has no effect on features and images: leave it out"):
        from_huggingface(records, drop=("note",), tokenizer=letters, **options)
    with pytest.raises(FedraxError, match="scan, other are images, of which a sample may have one"):
        from_huggingface(records.add_column("other", [picture(1)] * 4), drop=("note",), **options)


def test_unsupported_datasets_are_rejected(tmp_path: Path) -> None:
    def assert_rejected(message: str, given: Any, **options: Any) -> None:
        with pytest.raises(FedraxError, match=message):
            from_huggingface(given, **options)  # call the reader directly, because it accepts objects and paths

    assert_rejected("download it first", tmp_path / "nothing")
    assert_rejected("neither what save_to_disk writes", tmp_path)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no table")
    assert_rejected("cannot be read as a Hugging Face", tmp_path / "bad.parquet")
    table().save_to_disk(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{")
    assert_rejected("cannot be read as a Hugging Face", tmp_path / "saved")
    assert_rejected("cannot be read: give a datasets.Dataset", table().to_iterable_dataset(), label="ill")
    assert_rejected("cannot be read: give a datasets.Dataset", [1, 2])
    assert_rejected("did you mean 'ill'", table(), label="il")
    assert_rejected("unknown tokens", table(), tokens="bytes")
    splits = datasets.DatasetDict({"train": table(), "test": table()})
    assert_rejected("unknown split of huggingface 'training'", splits, label="ill", train_split="training")
    assert_rejected("unknown split of huggingface 'tset'", splits, label="ill", test_split="tset")
    unlabeled = table().map(lambda row: {"ill": -1})
    assert_rejected("-1 are rows without label", datasets.DatasetDict(train=table(), test=unlabeled), label="ill")
    assert_rejected("without rows", table().select([]), label="ill")
    ragged = datasets.Dataset.from_dict({"x": [[1], [1, 2]], "label": [0, 1]})
    assert_rejected("all have one shape", ragged)
    assert_rejected("must hold numbers", datasets.Dataset.from_dict({"x": [["a"], ["b"]], "label": [0, 1]}))
    assert_rejected(
        "holds numbers that are not finite, in 1 rows, the first is row 1",
        datasets.Dataset.from_dict({"x": [[1.0], [float("inf")]], "label": [0, 1]}),
    )
    bad = [{"bytes": b"no image", "path": None}, {"bytes": None, "path": "/etc/hostname"}]
    kinds = EncodedFeatures({"image": datasets.Image(), "label": Value("int64")})
    assert_rejected("not a readable", datasets.Dataset.from_dict({"image": bad[:1], "label": [0]}, features=kinds))
    assert_rejected("stored as bytes", datasets.Dataset.from_dict({"image": bad[1:], "label": [0]}, features=kinds))


def test_loading_scripts_are_not_run(tmp_path: Path) -> None:
    """A Python script in the folder, as old versions of the hub allowed."""
    table().to_parquet(tmp_path / "hub.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub.parquet").rename(tmp_path / "hub/train.parquet")
    (tmp_path / "hub/hub.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    load("huggingface", path=tmp_path / "hub", label="ill")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("of_splits", [False, True])
def test_files_and_splits_with_different_columns_are_rejected(tmp_path: Path, of_splits: bool) -> None:
    """PyArrow would drop columns that the first file lacks."""
    first, second = {"age": [1, 2], "ill": ["no", "yes"]}, {"age": [3, 4], "ill": ["no", "yes"], "lab": [0.5, 1.5]}
    names = ("train", "test") if of_splits else ("train-00000-of-00002", "train-00001-of-00002")
    for name, rows in zip(names, (first, second), strict=True):
        polars.DataFrame(rows).write_parquet(tmp_path / f"{name}.parquet")
    options: dict[str, Any] = {"path": tmp_path, "label": "ill", "standardize": "none"}
    options |= {} if of_splits else {"test_fraction": 0.0}
    with pytest.raises(FedraxError, match=r"has no column 'lab', which .* set different_columns"):
        load("huggingface", **options)
    assert load("huggingface", **options, different_columns="intersection", columns=("age",)).feature_names == ("age",)
    if of_splits:
        with pytest.raises(FedraxError, match="'lab' has no value in any training row"):
            load("huggingface", **options, different_columns="union", missing=0)
    else:
        dataset = load("huggingface", **options, different_columns="union", missing=-1)
        assert dataset.feature_names == ("age", "lab") and dataset.train.x[:, 1].tolist() == [-1, -1, 0.5, 1.5]


def test_splits_with_different_class_codes_are_rejected():
    """A split without one of the classes, encoded by itself, has other codes for the remaining classes."""
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"x": [1.0, 2.0, 3.0], "label": ["a", "b", "c"]}),
        test=datasets.Dataset.from_dict({"x": [2.0, 3.0], "label": ["b", "c"]}),
    )
    with pytest.raises(FedraxError, match="number the classes of 'label' differently"):
        from_huggingface(splits.class_encode_column("label"))
    assert from_huggingface(splits).class_names == ("a", "b", "c")


def test_column_of_encoded_images(tmp_path):
    def png(shade: int) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "PNG")
        return file.getvalue()

    polars.DataFrame({"image": [png(20 * i) for i in range(8)], "label": [0, 1] * 4}).write_parquet(
        tmp_path / "b.parquet"
    )
    dataset = load("huggingface", path=tmp_path / "b.parquet", size=(4, 4))
    assert dataset.pixels and dataset.train.x.dtype == np.uint8 and dataset.train.x.shape[1:] == (4, 4, 3)


def test_options_without_effect_are_rejected() -> None:
    """Each kind of samples has its own options."""
    texts = datasets.Dataset.from_dict({"text": ["good day", "bad day"] * 4, "label": ["up", "down"] * 4})
    lists = datasets.Dataset.from_dict({"x": [[1, 2], [3, 4]], "label": [0, 1]})
    for given, options, message in (
        (texts, {"standardize": "none", "size": (2, 2)}, "size, standardize have no effect on texts: leave them out"),
        (texts, {"tokens": "characters", "min_count": 2}, "min_count has no effect on characters"),
        (lists, {"length": 3}, "length has no effect on lists"),
        (table(), {"label": "ill", "tokens": "characters"}, "tokens has no effect on features"),
        (datasets.DatasetDict(train=texts, test=texts), {"test_fraction": 0.5}, "no effect where test is a split"),
    ):
        with pytest.raises(FedraxError, match=message):
            from_huggingface(given, **options)
    made = from_huggingface(texts, categorical=["text"], test_fraction=0.0)
    assert made.feature_names == ("text=bad day", "text=good day") and not made.vocabulary


def test_numbers_with_a_few_texts_are_rejected_or_missing() -> None:
    """As in the CSV reader: missing if ``missing_as`` contains them, otherwise rejected."""
    dose = [str(i) for i in range(9)] + ["?"]
    mixed = datasets.Dataset.from_dict({"dose": dose, "a": list(range(10)), "label": ["x", "y"] * 5})
    with pytest.raises(FedraxError, match=r"'dose' holds numbers, and in 1 of 10 rows texts: '\?'\. missing_as"):
        from_huggingface(mixed)
    made = from_huggingface(mixed, missing_as=("?",), missing="mean", test_fraction=0.0)
    assert made.feature_names == ("dose", "a") and made.train.x[9, 0] == 0
    with pytest.raises(FedraxError, match="'dose' holds numbers"):
        from_huggingface(mixed, label="dose")


def test_numeric_partition_column_with_texts_is_rejected() -> None:
    ages = ["34", "35", "36", "unknown"] * 2
    texts = datasets.Dataset.from_dict({"text": ["good day", "bad day"] * 4, "age": ages, "label": [0, 1] * 4})
    options: dict[str, Any] = dict(columns=("text",), partition_by="age", test_fraction=0.0)
    with pytest.raises(FedraxError, match=r"texts: 'unknown'\. Remove those rows; categorical names columns"):
        from_huggingface(texts, **options)
    made = from_huggingface(texts, categorical=("age",), **options)
    assert made.vocabulary and made.partition_by is not None and made.partition_by.tolist() == [0, 1, 2, 3] * 2


def test_ignored_splits_are_noted() -> None:
    splits = datasets.DatasetDict(train=table(), validation=table(6))
    assert any(
        "validation left out (train_split, test_split)" in n for n in from_huggingface(splits, label="ill").notes
    )


def test_dates_are_categories_and_durations_are_rejected() -> None:
    """Dates are not tokenized as texts, also as the only column."""
    days = [datetime.date(2021, 1, 1 + i % 2) for i in range(8)]
    dated = datasets.Dataset.from_dict({"day": days, "label": [0, 1] * 4})
    assert from_huggingface(dated, test_fraction=0.0).feature_names == ("day=2021-01-01", "day=2021-01-02")
    waits = [datetime.timedelta(hours=i) for i in range(8)]
    waited = datasets.Dataset.from_dict({"wait": waits, "a": list(range(8)), "label": [0, 1] * 4})
    for options in ({}, {"categorical": ("wait",)}, {"label": "wait"}, {"partition_by": "wait", "columns": ("a",)}):
        with pytest.raises(FedraxError, match=r"'wait' holds Duration.* which are neither numbers nor texts"):
            from_huggingface(waited, **options)
