"""Readers on small files, valid and broken, and on real data if FEDRAX_DATA is set."""

import gzip
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedrax.data import DATASETS, Federation, Natural, load
from fedrax.data.readers.array_files import find_file, read_idx, read_npz
from fedrax.data.readers.huggingface import _column_kind
from fedrax.data.registry import _bundled_digits, load_idx
from fedrax.errors import FedraxError

DATA_DIR = os.environ.get("FEDRAX_DATA")


@pytest.mark.parametrize("moved", [False, True])
def test_digits_equal_those_of_scikit_learn(moved, monkeypatch):
    """Read from scikit-learn's file, or by its function if a version stores it elsewhere."""
    from sklearn.datasets import load_digits

    if moved:
        monkeypatch.setattr("fedrax.data.registry.find_spec", lambda name: None)
    expected = load_digits(return_X_y=True)
    for actual, desired in zip(_bundled_digits(), expected, strict=True):
        np.testing.assert_array_equal(actual, desired, strict=True)


@pytest.fixture(autouse=True)
def _directories(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDRAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDRAX_DATA", raising=False)


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_idx_folder(folder: Path, compress: bool, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 4, 5), np.uint8)
    labels = (np.arange(30) % classes).astype(np.uint8)
    for part, rows in (("train", slice(0, 20)), ("t10k", slice(20, 30))):
        for kind, array in (("images-idx3", images[rows]), ("labels-idx1", labels[rows])):
            path = folder / f"{part}-{kind}-ubyte"
            if compress:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(idx(array)))
            else:
                path.write_bytes(idx(array))
    return images, labels


# Names, options, directories


def test_unknown_names_and_options_are_rejected():
    with pytest.raises(FedraxError, match="did you mean 'mnist'"):
        load("mnits")
    with pytest.raises(FedraxError, match="did you mean 'alpha'"):
        load("synthetic", alhpa=1)
    with pytest.raises(FedraxError, match="needs the option 'path'"):
        load("csv")


def test_missing_directory_and_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(FedraxError, match=r"mnist/train-images-idx3-ubyte.*FEDRAX_DATA"):
        load("mnist")
    monkeypatch.setenv("FEDRAX_DATA", str(tmp_path))
    with pytest.raises(FedraxError, match=r"where cifar10/train.parquet is missing"):
        load("cifar10")


def test_entries_describe_required_files_and_options():
    assert {name for name, entry in DATASETS.items() if not entry.needs_files} == {
        "digits", "synthetic", "matrix_sensing", "quartic_pair", "npz", "csv", "leaf", "image_folder", "huggingface",
        "openml",
    }  # fmt: skip
    assert all(entry.name == name and entry.description for name, entry in DATASETS.items())


def test_digits_need_nothing():
    dataset = load("digits")
    assert dataset.train.x.shape == (1442, 8, 8, 1) and dataset.test.x.shape == (355, 8, 8, 1)
    assert not dataset.pixels and dataset.preprocess() is None
    both = np.concatenate([dataset.train.x, dataset.test.x])
    assert both.dtype == np.float32 and both.min() == 0 and both.max() == 1
    assert np.array_equal(both * 16, np.round(both * 16))
    assert (np.bincount(dataset.test.y) >= 34).all()


# IDX


@pytest.mark.parametrize("compress", [False, True])
def test_idx_folder(tmp_path, compress):
    images, labels = write_idx_folder(tmp_path / "mnist", compress)
    dataset = load("mnist", tmp_path)
    assert np.array_equal(dataset.train.x[..., 0], images[:20]) and dataset.train.x.shape == (20, 4, 5, 1)
    assert np.array_equal(dataset.test.y, labels[20:]) and dataset.test.y.dtype == np.int32
    assert dataset.num_classes == 10 and dataset.mean == (0.1307,) and dataset.pixels
    assert load_idx(tmp_path / "mnist").num_classes == 10


def test_idx_labels_out_of_range_or_of_another_number_are_rejected(tmp_path):
    write_idx_folder(tmp_path / "mnist", False, classes=11)
    with pytest.raises(FedraxError, match=r"labels must lie in 0 .. 9, found 0 .. 10"):
        load("mnist", tmp_path)
    (tmp_path / "mnist" / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(19, np.uint8)))
    with pytest.raises(FedraxError, match=r"20 images, but .* 19 labels"):
        load("mnist", tmp_path)


VALID = idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
BROKEN = {
    "magic": (b"\x01" + VALID[1:], "not an IDX file"),
    "type": (idx(np.zeros((2, 3, 4), np.uint8), kind=0x0D), "not an IDX file"),
    "axes": (idx(np.zeros((2, 3), np.uint8)), "not an IDX file"),
    "empty": (b"", "not an IDX file"),
    "short header": (VALID[:10], "not an IDX file"),
    "truncated": (VALID[:-1], "truncated: 23 of 24"),
    "longer": (VALID + b"!", "holds more than its header"),
    "huge": (bytes([0, 0, 8, 3]) + b"\xff" * 12 + b"data", "announces an array of shape"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("compress", [False, True])
def test_broken_idx_is_rejected(tmp_path, case, compress):
    content, message = BROKEN[case]
    path = tmp_path / ("file.gz" if compress else "file")
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(FedraxError, match=message):
        read_idx(path, ndim=3)


def test_broken_gzip_is_rejected(tmp_path):
    whole = gzip.compress(idx(np.random.default_rng(0).integers(0, 256, (50, 9, 9), np.uint8)))
    for content in (
        whole[:-200],
        whole[:4],
        VALID,
        whole[:-8] + b"\0" * 8,
        whole[:30] + b"\xff" * 50 + whole[80:],
    ):
        path = tmp_path / "images.gz"
        path.write_bytes(content)
        with pytest.raises(FedraxError, match=r"cannot be read|truncated|not an IDX"):
            read_idx(path, ndim=3)


def test_find_file_prefers_the_uncompressed_file(tmp_path):
    assert find_file(tmp_path / "a") is None
    (tmp_path / "a.gz").touch()
    assert find_file(tmp_path / "a") == tmp_path / "a.gz"
    (tmp_path / "a").touch()
    assert find_file(tmp_path / "a") == tmp_path / "a"


# NPZ


def npz_arrays():
    return dict(
        x_train=np.arange(8, dtype=np.float32).reshape(4, 2),
        y_train=np.array([0, 1, 2, 1]),
        client_train=np.array([5, 3, 5, 3], np.int16),
        x_test=np.zeros((2, 2), np.float32),
        y_test=np.array([0, 2]),
        client_test=np.array([3, 8], np.int16),
    )


def test_npz_with_clients(tmp_path):
    np.savez_compressed(tmp_path / "mine.npz", **npz_arrays())
    dataset = load("npz", path=tmp_path / "mine.npz")
    assert dataset.name == "mine" and dataset.num_classes == 3
    federation = Federation.from_dataset(dataset, Natural(), 0, shuffle=False)
    assert list(federation.train.y) == [1, 1, 0, 2]
    assert federation.test_offsets is not None and list(federation.test_offsets) == [0, 1, 1]


def test_npz_with_a_global_test_set(tmp_path):
    arrays = npz_arrays() | {"client_train": np.array(["north", "east", "north", "east"])}
    del arrays["client_test"]
    np.savez(tmp_path / "mine.npz", **arrays)
    federation = Federation.from_dataset(load("npz", path=tmp_path / "mine.npz"), Natural(), 0, shuffle=False)
    assert federation.client_names == ("east", "north") and list(federation.train.y) == [1, 1, 0, 2]
    assert federation.test_offsets is None and len(federation.test.y) == 2


def test_npz_regression_without_clients(tmp_path):
    arrays = npz_arrays() | {"y_train": np.ones(4), "y_test": np.ones(2)}
    del arrays["client_train"], arrays["client_test"]
    np.savez(tmp_path / "mine.npz", **arrays)
    dataset = load("npz", path=str(tmp_path / "mine.npz"))
    assert dataset.num_classes is None and dataset.train_clients is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.array([{}] * 4, object)}, "Python objects"),
        ({"x_train": None}, "no array 'x_train'; it has y_train"),
        ({"y_train": np.array([0, 1, 2])}, "not n samples"),
        ({"y_train": np.array([0, 1, 2, -1])}, "0 or more"),
        ({"x_test": np.zeros((2, 3), np.float32)}, "test sample"),
        ({"x_train": np.full((4, 2), np.nan, np.float32)}, "not finite"),
        ({"x_train": np.array([["a", "b"]] * 4)}, "real numbers"),
        (
            {"y_train": np.arange(4, dtype=np.float32), "y_test": np.array([1, np.nan], np.float32)},
            r"bad.npz: y_test is not finite in 1 of 2 rows, first y_test\[1\] = nan",
        ),
        ({"client_train": None}, "holds client_test without client_train"),
        ({"client_test": np.zeros((2, 1), np.int16)}, "must be one integer or string"),
        ({"client_train": np.zeros(3, np.int16)}, "not n samples"),
        ({"client_train": np.zeros(4)}, "must be one integer or string"),
        ({"client_train": np.array([1, "a", 1], str), "client_test": None}, "not n samples|one integer for each"),
    ],
)
def test_broken_npz_is_rejected(tmp_path, change, message):
    arrays = {key: array for key, array in (npz_arrays() | change).items() if array is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(FedraxError, match=message):
        load("npz", path=tmp_path / "bad.npz")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (10**15,), }"), "cannot be read"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999,), }"), "bytes are not"),
        (npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n"), "Python objects"),
        (npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,), }", b"\0" * 24), "bytes are not"),
        (b"\x93NUMPY\x07\x00", "version"),
        (b"not an array", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_hostile_npz_members_are_rejected(tmp_path, member, message):
    with zipfile.ZipFile(tmp_path / "bad.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(FedraxError, match=message):
        read_npz(tmp_path / "bad.npz", ["x"])


def test_damaged_npz_is_rejected(tmp_path):
    path = tmp_path / "bad.npz"
    with pytest.raises(FedraxError, match="there is no file"):
        read_npz(path, ["x"])
    path.write_bytes(b"PK nonsense")
    with pytest.raises(FedraxError, match="cannot be read"):
        read_npz(path, ["x"])
    np.savez_compressed(path, x=np.random.default_rng(0).random(1000))
    content = bytearray(path.read_bytes())
    content[500:600] = b"\xff" * 100
    path.write_bytes(content)
    with pytest.raises(FedraxError, match="cannot be read"):
        read_npz(path, ["x"])


def save_har(path, x, **more):
    path.parent.mkdir(exist_ok=True)
    arrays = {
        "x_train": x[:4],
        "y_train": np.array([1, 2, 6, 3]),
        "subject_train": np.array([1, 1, 2, 2], np.int16),
        "x_test": x[4:],
        "y_test": np.array([4, 5]),
        "subject_test": np.array([1, 9], np.int16),
    }
    np.savez(path, **arrays | more)


def test_har_subjects_and_channels_last(tmp_path):
    x = np.random.default_rng(0).random((6, 9, 128), np.float32)
    save_har(tmp_path / "har" / "har_inertial.npz", x, activities=np.array(["W", "U", "D", "S", "T", "L"]))
    dataset = load("har_inertial", tmp_path)
    assert np.array_equal(dataset.train.x, x[:4].transpose(0, 2, 1)) and list(dataset.train.y) == [0, 1, 5, 2]
    assert dataset.class_names == tuple("WUDSTL")
    federation = Federation.from_dataset(dataset, Natural(), 0)
    assert federation.test_offsets is not None and list(federation.test_offsets) == [0, 1, 1]


def test_har_features_are_not_standardized(tmp_path):
    x = np.random.default_rng(0).random((6, 5), np.float32)
    save_har(tmp_path / "har" / "har_features561_recomputed.npz", x)
    dataset = load("har_features", tmp_path)
    assert np.array_equal(dataset.train.x, x[:4]) and list(dataset.test.y) == [3, 4]
    assert dataset.class_names[5] == "LAYING" and dataset.num_classes == 6
    save_har(tmp_path / "har" / "har_features561_recomputed.npz", x[..., None])
    with pytest.raises(FedraxError, match="must be \\[n, 561\\]"):
        load("har_features", tmp_path)


def save_esr(folder, **changes):
    (folder / "esr").mkdir(exist_ok=True)
    arrays = {"X": np.arange(200, dtype=np.int16).reshape(50, 4) - 60, "y": np.arange(50) % 5 + 1}
    np.savez(folder / "esr" / "esr.npz", **arrays | {"recording": np.arange(50, dtype=np.int16) // 5} | changes)


def test_esr_seizures_split_and_scaling(tmp_path):
    save_esr(tmp_path)
    dataset = load("esr", tmp_path)
    assert dataset.class_names == ("no seizure", "seizure") and dataset.num_classes == 2
    assert np.bincount(dataset.train.y).tolist() == [32, 8] and np.bincount(dataset.test.y).tolist() == [8, 2]
    assert dataset.train.x.mean() == pytest.approx(0, abs=1e-6) and dataset.train.x.std() == pytest.approx(1, abs=1e-5)
    raw = load("esr", tmp_path, classes=5, scaling="none")
    assert np.bincount(raw.train.y).tolist() == [8] * 5 and raw.class_names[0] == "seizure"
    assert np.array_equal(raw.train.y == 0, dataset.train.y == 1)
    low, high = raw.train.x.min(), raw.train.x.max()
    ranged = load("esr", tmp_path, scaling="range").test.x
    np.testing.assert_allclose(ranged, 2 * (raw.test.x - low) / (high - low) - 1, atol=1e-6)
    unit = load("esr", tmp_path, scaling="unit").test.x
    np.testing.assert_allclose(unit, (ranged + 1) / 2, atol=1e-6)
    federation = Federation.from_dataset(raw, Natural(), 0)  # each recording is five rows in a row
    assert federation.num_clients == 10 and sum(federation.sizes) == 40
    other = load("esr", tmp_path, classes=5, scaling="none", seed=1)
    assert not np.array_equal(other.test.x, raw.test.x)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"y": np.arange(50) % 5}, r"y must lie in 1 .. 5, found 0 .. 4"),
        ({"y": np.ones(49, int)}, r"lengths|must be numbers"),
        ({"X": np.zeros((50, 2, 2))}, r"X must be numbers \[n, 178\]"),
        ({"X": np.full((50, 4), np.inf)}, "beyond 32-bit floats"),
        ({"recording": np.zeros(50)}, "recording"),
    ],
)
def test_malformed_esr_is_rejected(tmp_path, changes, words):
    save_esr(tmp_path, **changes)
    with pytest.raises(FedraxError, match=words):
        load("esr", tmp_path)


# Real data


@pytest.mark.skipif(DATA_DIR is None, reason="FEDRAX_DATA is not set")
class TestRealData:
    def test_mnist(self):
        dataset = load("mnist", DATA_DIR)
        assert dataset.train.x.shape == (60_000, 28, 28, 1) and dataset.test.x.shape == (10_000, 28, 28, 1)
        expected = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
        assert list(np.bincount(dataset.train.y)) == expected
        assert dataset.train.x.mean(dtype=float) / 255 == pytest.approx(dataset.mean[0], abs=1e-4)
        assert dataset.train.x.std(dtype=float) / 255 == pytest.approx(dataset.std[0], abs=1e-4)

    def test_cifar10(self):
        dataset = load("cifar10", DATA_DIR)
        assert dataset.train.x.shape == (50_000, 32, 32, 3) and dataset.class_names[3] == "cat"
        assert (np.bincount(dataset.train.y) == 5000).all() and (np.bincount(dataset.test.y) == 1000).all()
        pixels = dataset.train.x[::10].reshape(-1, 3) / 255
        assert pixels.mean(axis=0) == pytest.approx(dataset.mean, abs=0.01)
        assert pixels.std(axis=0) == pytest.approx(dataset.std, abs=0.01)

    def test_upcycled_synthetic(self):
        sizes = {}
        for variant in ("iid", "0_0", "0.5_0.5", "1_1"):
            dataset = load("upcycled_synthetic", DATA_DIR, variant=variant)
            federation = Federation.from_dataset(dataset, Natural(), 0)
            assert federation.num_clients == 30 and federation.num_classes == 2
            sizes[variant] = (len(dataset.train.y) + len(dataset.test.y), len(dataset.test.y))
        assert sizes == {
            "iid": (6726, 683), "0_0": (13791, 1395), "0.5_0.5": (8036, 818), "1_1": (10493, 1063),
        }  # fmt: skip

    def test_esr(self):
        dataset = load("esr", DATA_DIR, classes=5)
        assert dataset.train.x.shape == (9200, 178) and dataset.test.x.shape == (2300, 178)
        assert (np.bincount(dataset.train.y) == 1840).all() and (np.bincount(dataset.test.y) == 460).all()
        assert Federation.from_dataset(dataset, Natural(), 0).num_clients == 500

    def test_har(self):
        dataset = load("har_inertial", DATA_DIR)
        assert dataset.train.x.shape == (7352, 128, 9) and dataset.class_names[5] == "LAYING"
        assert list(np.bincount(dataset.train.y)) == [1226, 1073, 986, 1286, 1374, 1407]
        federation = Federation.from_dataset(dataset, Natural(), 0)
        assert federation.num_clients == 21 and federation.test_offsets is None


def test_npz_with_string_labels_and_byte_client_ids(tmp_path):
    """Labels that start at 1 are warned of."""
    texts = {"y_train": np.array(["b", "a", "b", "b"]), "y_test": np.array(["c"] * 4)}
    x = {part: np.zeros((4, 8, 8), np.uint8) for part in ("x_train", "x_test")}
    np.savez(tmp_path / "t.npz", **x, **texts, client_train=np.array(["p", "q"] * 2, "S"))
    dataset = load("npz", path=tmp_path / "t.npz")
    assert dataset.class_names == ("a", "b", "c") and dataset.train.y.tolist() == [1, 0, 1, 1]
    assert dataset.client_names == ("p", "q")
    np.savez(tmp_path / "one.npz", **x, y_train=np.array([1, 2, 1, 2]), y_test=np.array([1, 2, 1, 2]))
    dataset = load("npz", path=tmp_path / "one.npz", pixels=True)
    assert dataset.notes == ("warning: labels must start at 0, and the smallest label is 1: subtract 1",)
    np.savez(tmp_path / "zero.npz", **x, y_train=np.array([1, 2, 1, 2]), y_test=np.array([0, 1, 1, 2]))
    assert not load("npz", path=tmp_path / "zero.npz", pixels=True).notes
    places = np.array([[0, 1], [2, 0], [1, 1], [2, 2]])
    np.savez(tmp_path / "padded.npz", **x, y_train=places, y_test=places)
    assert not load("npz", path=tmp_path / "padded.npz", pixels=True, padding=0).notes
    texts = {part: np.char.encode(labels) for part, labels in texts.items()}
    np.savez(tmp_path / "bytes.npz", **x, **texts)
    assert load("npz", path=tmp_path / "bytes.npz").class_names == ("a", "b", "c")


def test_binary_columns_are_images():
    pl = pytest.importorskip("polars")
    assert [_column_kind(dtype) for dtype in (pl.Binary, pl.String, pl.Int8, pl.List(pl.Int8))] == [
        "image", "text", "number", "list",
    ]  # fmt: skip
