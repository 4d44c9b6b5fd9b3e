"""Samples of any type and labels of any shape are kept, converted safely, or rejected with the reason."""

import jax.numpy as jnp
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrax import FedAvg, classification, simulate
from fedrax.data import (
    PARTITIONS,
    Dataset,
    Federation,
    Iid,
    LogNormal,
    Natural,
    Samples,
    as_samples,
    has_one_label,
    label_counts,
    load,
    measure_heterogeneity,
)
from fedrax.errors import FedraxError
from fedrax.models import Linear

INTEGERS = [order + code for code in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8") for order in "<>"]
FLOATS = [order + code for code in ("f2", "f4", "f8") for order in "<>"] + ["longdouble"]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([*INTEGERS, *FLOATS, "?"]), rows=st.integers(1, 5))
def test_samples_keep_their_values_in_a_dtype_of_jax(data, dtype, rows):
    dtype = np.dtype(dtype)
    low, high = (0, 1) if dtype.kind == "b" else (-(2**31), 2**31 - 1)
    if dtype.kind in "iu" and dtype.itemsize <= 4:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    elif dtype.kind == "f":
        low, high = -1000, 1000
    low = 0 if dtype.kind == "u" else low
    values = data.draw(st.lists(st.integers(int(low), int(high)), min_size=2 * rows, max_size=2 * rows))
    x = np.array(values).astype(dtype).reshape(rows, 2)
    held = as_samples(x, np.zeros(rows, int)).x
    assert held.dtype.isnative and np.array_equal(held, x)
    assert np.array_equal(np.asarray(jnp.asarray(held)).astype(held.dtype), held)  # nothing overflows on the device
    if dtype.itemsize <= 4 or dtype == np.float64:
        assert held.dtype == dtype.newbyteorder("=")
    Dataset("any", Samples(held, np.zeros(rows, np.int32)), Samples(held, np.zeros(rows, np.int32)), 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), dtype=st.sampled_from([*INTEGERS, "?"]), shape=st.sampled_from([(4,), (4, 3), (4, 2, 2)]))
def test_labels_of_any_integer_type_and_shape_become_int32(data, dtype, shape):
    size = int(np.prod(shape))
    labels = np.array(data.draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
    labels = labels.astype(dtype).reshape(shape)
    federation = Federation.from_arrays(np.zeros((4, 1)), labels, offsets=[0, 4], shuffle=False)
    assert federation.train.y.dtype == np.int32 and np.array_equal(federation.train.y, labels)
    assert federation.num_classes == int(labels.max()) + 1
    assert federation.test.y.shape == (0, *shape[1:])


@pytest.mark.parametrize("dtype", [">f8", "<f4", ">f2", "longdouble"])
def test_float_targets_of_any_dtype_and_shape(dtype):
    y = np.arange(6.0).reshape(3, 2).astype(dtype)
    samples = as_samples(np.zeros((3, 1), np.float32), y)
    assert np.array_equal(samples.y, y) and samples.y.dtype.isnative and samples.y.dtype.itemsize <= 8


def test_bfloat16_and_jax_arrays_are_samples():
    x = jnp.arange(6, dtype=jnp.bfloat16).reshape(3, 2)
    samples = as_samples(x, jnp.arange(3))
    assert samples.x.dtype == np.float32 and samples.x.tolist() == [[0, 1], [2, 3], [4, 5]]


X = np.zeros((2, 3), np.float32)
REJECTED = [
    (np.array([[2**31], [0]]), [0, 1], r"x holds integers of 0 .. 2147483648, which do not fit into 32 bits"),
    (np.array([[-(2**31) - 1], [0]]), [0, 1], r"x holds integers of -2147483649 .. 0"),
    (np.array([[2**64 - 1], [0]], np.uint64), [0, 1], r"18446744073709551615"),
    (X, np.array([0, 2**31]), r"found 0 .. 2147483648"),
    (X, np.array([0, 2**63], np.uint64), r"fit into 32 bits, found"),
    (X, [0, -1], r"0 or more"),
    (X, [[0, 1], [1, -1]], r"0 or more"),
    ([[1, 2], [3]], [0, 1], "samples must be arrays"),
    (X, [[1, 2], [3]], "samples must be arrays"),
    (X.astype(complex), [0, 1], "real numbers"),
    (X, ["cat", 1.5], "real numbers"),
    (X, [b"cat", b"dog"], "real numbers"),
    (X, np.array(["2026-01-01", "2026-01-02"], "M8[D]"), "real numbers"),
    (X, [None, 1], "labels are missing in 1 of 2 rows"),
    (X, 3, "not n samples with n labels"),
    (X, [0, 1, 2], "not n samples with n labels"),
    (X, np.zeros((2, 0), int), "are empty"),
]


@pytest.mark.parametrize(("x", "y", "message"), REJECTED)
def test_invalid_samples_are_rejected_with_the_reason(x, y, message):
    with pytest.raises(FedraxError, match=message) as caught:
        Federation.from_arrays(x, y, offsets=np.array([0, 2]))
    assert "\n" not in str(caught.value)


Y2 = np.array([[0, 1, -1], [2, -1, -1]], np.int32)


def test_padding_is_allowed_in_labels_of_positions():
    federation = Federation.from_arrays(X, Y2, offsets=[0, 1, 2], test=(X, Y2), padding=-1)
    assert (federation.num_classes, federation.padding) == (3, -1)
    bytes_of_255 = np.where(Y2 < 0, 255, Y2).astype(np.uint8)
    federation = Federation.from_arrays(X, bytes_of_255, offsets=[0, 1, 2], padding=255)
    assert (federation.num_classes, federation.padding) == (3, 255) and federation.train.y.max() == 255
    dataset = Dataset("padded", Samples(X, Y2), Samples(X, Y2), 3, padding=-1)
    assert Federation.from_dataset(dataset, Iid(2), 0).padding == -1


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (Y2, {}, r"0 or more .* found -1 .. 2 \(padding=-1 leaves positions out\)"),
        (Y2, {"padding": -100}, "0 or more"),
        (Y2, {"padding": -1, "num_classes": 2}, r"0 .. 1, or be the padding -1, found 0 .. 2"),
        (np.full((2, 3), -1), {"padding": -1}, "at least one class"),
        ([-1, 0], {"padding": -1}, r"padding needs class labels"),
        (Y2 / 2, {"padding": -1}, "padding needs class labels"),
        (Y2, {"padding": -1, "test": (X, Y2[:, :2])}, "test labels"),
        (Y2, {"padding": -1, "test": (X, np.where(Y2 < 0, -2, Y2))}, "0 or more"),
        (np.abs(Y2), {"pixels": True}, "pixels must be bytes"),
    ],
)
def test_invalid_labels_beside_padding_are_rejected(y, options, message):
    with pytest.raises(FedraxError, match=message):
        Federation.from_arrays(X, y, offsets=[0, 2], **options)


@pytest.mark.parametrize("dtype", ["i8", "u8", ">i4", ">f4", "longdouble", "complex64", "U3"])
def test_samples_created_without_as_samples_are_checked(dtype):
    bad = Samples(np.zeros((2, 3)).astype(dtype), np.zeros(2, np.int32))
    with pytest.raises(FedraxError, match=r"JAX does not support x of dtype .*as_samples"):
        Dataset("bad", bad, bad, 1)


def test_lists_are_no_samples():
    with pytest.raises(FedraxError, match="samples must be arrays; as_samples"):
        Dataset("lists", *(Samples([[0.0]], [0]),) * 2, 1)  # type: ignore[arg-type]


def positions() -> Dataset:
    rng = np.random.default_rng(0)
    samples = as_samples(rng.integers(0, 9, (40, 6)), rng.integers(0, 9, (40, 6)))
    owner = np.arange(40) % 4
    return Dataset("tokens", samples, samples, 9, train_clients=owner, test_clients=owner)


@pytest.mark.parametrize("name", PARTITIONS)
def test_partitions_by_label_require_one_label_per_row(name):
    dataset, rule = positions(), PARTITIONS[name](clients=4)
    if isinstance(rule, Iid | LogNormal | Natural):
        assert Federation.from_dataset(dataset, rule, 0).num_clients == 4
        return
    with pytest.raises(FedraxError, match=r"labels of shape \(6,\) per row.*use iid, lognormal or natural"):
        Federation.from_dataset(dataset, rule, 0)


def test_natural_clients_keep_rows_and_labels_together():
    dataset = positions()
    federation = Federation.from_dataset(dataset, Natural(), 0, shuffle=False)
    assert np.array_equal(federation.train.y[:10], dataset.train.y[::4])
    assert np.array_equal(federation.test.x[federation.test_offsets[1]], dataset.test.x[1])


def test_heterogeneity_with_several_labels_per_sample_has_sizes_only():
    federation = Federation.from_dataset(positions(), Natural(), 0)
    assert not has_one_label(federation)
    measured = measure_heterogeneity(federation)
    assert measured.median == 10 and measured.total_variation is None and measured.classes_per_client is None
    with pytest.raises(FedraxError, match=r"labels of shape \(6,\) a sample"):
        label_counts(federation)


# Pixels


def test_bytes_are_scaled_only_if_they_are_pixels():
    x, y = np.full((2, 2, 2, 3), 51, np.uint8), np.array([0, 1])
    images = Federation.from_arrays(x, y, offsets=[0, 2], pixels=True, mean=(0.1,) * 3, std=(0.5,) * 3)
    tokens = Federation.from_arrays(x, y, offsets=[0, 2])
    assert tokens.preprocess() is None and tokens.preprocess(normalize=False) is None
    normalize, only_scale = images.preprocess(), images.preprocess(normalize=False)
    assert normalize is not None and only_scale is not None
    np.testing.assert_allclose(normalize(jnp.asarray(x)), 0.2, rtol=1e-5)
    np.testing.assert_allclose(only_scale(jnp.asarray(x)), 0.2, rtol=1e-6)
    samples = Samples(x, y.astype(np.int32))
    dataset = Dataset("images", samples, samples, 2, pixels=True)
    federation = Federation.from_dataset(dataset, Iid(2), 0)
    assert federation.pixels and dataset.preprocess() is not None and federation.preprocess() is not None
    with pytest.raises(FedraxError, match="pixels must be bytes"):
        Dataset("floats", *(Samples(x / 255, samples.y),) * 2, 2, pixels=True)


def test_npz_options_for_pixels_and_padding(tmp_path):
    x, y = np.zeros((2, 3), np.uint8), np.array([[0, 1, 255], [1, 255, 255]], np.uint8)
    np.savez(tmp_path / "maps.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    dataset = load("npz", path=tmp_path / "maps.npz", pixels=True, padding=255)
    assert dataset.pixels and dataset.padding == 255 and dataset.num_classes == 2
    dataset = load("npz", path=tmp_path / "maps.npz")
    assert not dataset.pixels and dataset.padding is None and dataset.num_classes == 256


def test_unsupported_labels_are_rejected_with_the_remedy():
    x = np.zeros((4, 2))
    with pytest.raises(FedraxError, match=r"np.unique\(labels, .*\) of all training and test labels"):
        Federation.from_arrays(x, ["a", "b", "a", "b"], [0, 0, 1, 1], test=(x, [0, 1, 0, 1]))
    table = pl.DataFrame({"age": [1.0, 2.0, 3.0, 4.0], "sex": ["f", "m", "f", None]})
    with pytest.raises(FedraxError, match=r"column 'sex' holds text: .* with get_dummies of pandas"):
        Federation.from_arrays(table, [0, 1, 0, 1], [0, 0, 1, 1])
    for y in (np.array([[0], [1], [0], [1]]), np.eye(2, dtype=int)[[0, 1, 0, 1]]):
        made = Federation.from_arrays(x, y, [0, 0, 1, 1])
        with pytest.raises(FedraxError, match=r"y\[:, 0\] has one label a row, and of one-hot labels y.argmax\(1\)"):
            simulate(FedAvg(), classification(Linear().build((2,), 2)), made, rounds=1, cohort_size=2)


def test_samples_that_are_not_arrays_are_rejected_with_the_remedy():
    x, y, owner = np.arange(8.0).reshape(4, 2), np.array([0, 1, 0, 1]), [0, 0, 1, 1]
    sparse = pytest.importorskip("scipy.sparse").csr_matrix(x)
    for arrays, message in (
        ((np.ma.masked_greater(x, 5), y), "x has masked values: leave those rows out"),
        ((x, np.ma.masked_equal(y, 1)), "y has masked values"),
        ((sparse, y), r"x.toarray\(\) gives a dense array"),
        ((x.astype(object), y), r"x.astype\(float\) converts objects"),
        (([x, x], y), "several inputs of a sample are a tuple of arrays, or a dictionary"),
        (([*x, x[0, :1]], [*y, 1]), "all rows have one shape\\.$"),
        (([x[:2], x[2:]], y), "not n samples with n labels"),
        ((x, (y, y)), r"y is one array \[n, ...\], not a tuple of 2: stack several labels of a sample"),
        ((x, {"shape": y, "color": y}), r"y is one array .*, not a dict of 2: stack several labels"),
        ((x, [y, y]), "stack several labels of a sample"),
        ((tuple(x), y), r"x\[0\] of shape \(2,\) and y of shape \(4,\) are not n samples with n labels"),
        (({}, y), "names that are Python identifiers, and it is empty"),
    ):
        with pytest.raises(FedraxError, match=message):
            Federation.from_arrays(*arrays, owner)
    assert Federation.from_arrays(np.ma.masked_greater(x, 100), y, owner).num_clients == 2
    assert Federation.from_arrays(list(x), y, owner).train.x.shape == (4, 2)
    square = Federation.from_arrays([x[:2], x[2:]], [y[:2], y[2:]], [0, 1])  # two samples, not two inputs
    assert square.train.x.shape == (2, 2, 2)
    for part, message in (
        ((x, y, owner), "a pair .x, y. of the test samples, not 3 items: test_client_ids are the clients"),
        ((x,), "not 1 items"),
        ({"x": x, "y": y}, "not a dict"),
        (x, "not a ndarray"),
        ("test", "not 'test'"),
        (((x, x), y), r"the same inputs, not x and x\[0\], x\[1\]"),
        ((x, (y, y)), "stack several labels"),
    ):
        with pytest.raises(FedraxError, match=message):
            Federation.from_arrays(x, y, owner, test=part)
    floats = Federation.from_arrays(x, y.astype(float), owner)
    with pytest.raises(FedraxError, match=r"where classes are meant, y.astype\(int\) numbers them"):
        simulate(FedAvg(), classification(Linear().build((2,), 2)), floats, rounds=1, cohort_size=2)


def test_table_columns_must_be_numeric():
    pandas, y, owner = pytest.importorskip("pandas"), np.array([0, 1, 0, 1]), [0, 0, 1, 1]
    table = pandas.DataFrame({"age": [3, 5, 7, 9], "dose": [0.5, 1, 2, 4], "sex": ["f", "m", "f", "m"]})
    dummies = pandas.get_dummies(table).assign(visits=pandas.array([1, 2, 3, 4], dtype="Int64"))
    decimals = pl.DataFrame({"age": [3, 5, 7, 9], "price": [1.5, 2.5, 3.5, 4.5]}).cast({"price": pl.Decimal(5, 2)})
    for numbers, columns in ((dummies, 5), (decimals, 2)):
        made = Federation.from_arrays(numbers, y, owner, shuffle=False)
        assert made.train.x.dtype == np.float64 and made.train.x.shape == (4, columns)
        assert made.train.x.tolist() == np.asarray(numbers).astype(float).tolist()
    days = pandas.to_datetime(["2024-05-01", "2024-05-02", "2024-05-03", "2024-05-04"])
    dates = pl.DataFrame({"age": [3.0, 5, 7, 9], "day": pl.Series(days.to_numpy()).cast(pl.Date)})
    for columns, labels, message in (
        (table[["age"]].assign(day=days), y, "column 'day' holds datetime64.*: leave it out"),
        (dates, y, "column 'day' holds Date: leave it out, or convert it to numbers"),
        (dates.lazy(), y, r"x.collect\(\) gives the table"),
        (table[["age"]], pandas.Series(["a", None, "b", None]), "labels are missing in 2 of 4 rows: leave those"),
        (table[["age"]], pandas.cut(table["age"], 2), "labels are integers or strings for classes, floats for targets"),
    ):
        with pytest.raises(FedraxError, match=message):
            Federation.from_arrays(columns, labels, owner)


GAPS = {
    "codes": [1_000_000, 1_000_001, 1_000_000, 1_000_001],
    "years": [2019, 2020, 2021, 2019],
    "statuses": np.array([200, 404, 500, 200], np.uint16),
}


@pytest.mark.parametrize("kind", GAPS)
def test_integer_labels_with_large_gaps_are_rejected_with_the_remedy(kind: str, tmp_path):
    x, y, owner = np.zeros((4, 2)), np.asarray(GAPS[kind]), [0, 0, 1, 1]
    found, largest = len(np.unique(y)), int(y.max())
    message = f"the label {largest} makes {largest + 1:,} classes, of which {found} occur: as strings"
    with pytest.raises(FedraxError, match=message):
        Federation.from_arrays(x, y, owner)
    with pytest.raises(FedraxError, match=message):  # also in test rows
        Federation.from_arrays(x, y.min().repeat(4), owner, test=(x, y))
    named = Federation.from_arrays(x, y.astype(str), owner, shuffle=False)
    assert named.num_classes == found and [int(named.class_names[label]) for label in named.train.y] == y.tolist()
    assert Federation.from_arrays(x, y, owner, num_classes=largest + 1).num_classes == largest + 1
    np.savez(tmp_path / "codes.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(FedraxError, match=f"codes.npz: labels are .*{message}"):
        load("npz", path=tmp_path / "codes.npz")
    assert load("npz", path=tmp_path / "codes.npz", num_classes=largest + 1).num_classes == largest + 1


def test_integer_labels_with_small_gaps_are_kept():
    x, owner = np.zeros((4, 2)), [0, 0, 1, 1]
    for y, classes in (([0, 9, 9, 0], 10), ([1, 26, 26, 1], 27), ([99, 0, 0, 0], 100)):
        assert Federation.from_arrays(x, y, owner).num_classes == classes
    many = np.arange(0, 4000, 4)
    assert Federation.from_arrays(np.zeros((1000, 1)), many, np.arange(1000) % 2).num_classes == 3997
    tokens = [[0, 50_000], [7, 8], [9, 9], [1, 2]]  # of a vocabulary
    assert Federation.from_arrays(x, tokens, owner).num_classes == 50_001
    for y in ([-1, 1, -1, 1], [0, 2**40, 0, 0]):
        with pytest.raises(FedraxError, match=r"as strings, y.astype\(str\), each number that occurs is a class"):
            Federation.from_arrays(x, y, owner)


def test_class_names_must_match_the_number_of_classes():
    x, y, owner = np.zeros((4, 2)), np.array([0, 1, 0, 1]), [0, 0, 1, 1]
    assert Federation.from_arrays(x, y, owner, class_names=("a", "b", "c")).num_classes == 3
    with pytest.raises(FedraxError, match="labels must lie in 0"):
        Federation.from_arrays(x, y, owner, class_names=("a",))
    with pytest.raises(FedraxError, match="has 3 classes, but 2 names for them"):
        Federation.from_arrays(x, y, owner, num_classes=3, class_names=("a", "b"))
    targets = Samples(x, y.astype(float))
    with pytest.raises(FedraxError, match="has no classes, but 2 names for them"):
        Dataset("targets", targets, targets, None, class_names=("a", "b"))


def test_string_labels_become_classes():
    x, owner = np.arange(12.0).reshape(4, 3), [0, 0, 1, 1]
    y, later = ["dog", "cat", "dog", "ant"], (x[:2], np.array(["emu", "cat"], object))
    made = Federation.from_arrays(x, y, owner, test=later, shuffle=False)
    assert made.class_names == ("ant", "cat", "dog", "emu") and made.num_classes == 4
    assert made.train.y.tolist() == [2, 1, 2, 0] and made.test.y.tolist() == [3, 1]
    ordered = Federation.from_arrays(x, y, owner, class_names=("dog", "cat", "ant"), shuffle=False)
    assert ordered.train.y.tolist() == [0, 1, 0, 2] and ordered.class_names == ("dog", "cat", "ant")
    positions = Federation.from_arrays(x[:2], [["a", "b"], ["b", "b"]], owner[:2], test=(x[:0], []), shuffle=False)
    assert positions.train.y.tolist() == [[0, 1], [1, 1]]
    with pytest.raises(FedraxError, match="unknown class of class_names: 'ant'"):
        Federation.from_arrays(x, y, owner, class_names=("dog", "cat"))
    with pytest.raises(FedraxError, match="real numbers"):
        Federation.from_arrays(x, [2, 1, 2, 0], owner, test=later)
