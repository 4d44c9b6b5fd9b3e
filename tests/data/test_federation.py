"""Federations: grouping, order, alignment and size."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedrax
from fedrax.data import Dataset, Federation, Iid, Natural, Samples, aligned_array, as_samples, load
from fedrax.data.dataset import train_test_split
from fedrax.errors import FedraxError
from fedrax.models import Linear
from tests.simulation.problems import FEDERATION


def is_aligned(array):
    return array.flags.c_contiguous and (array.size == 0 or array.ctypes.data % 64 == 0)


def natural_dataset() -> Dataset:
    clients = np.array([3, 1, 3, 7, 1, 3])
    test_clients = np.array([9, 3, 1, 3, 9])
    x, x_test = np.arange(12, dtype=np.uint8).reshape(6, 2), np.arange(50, 60, dtype=np.uint8).reshape(5, 2)
    return Dataset(
        "natural",
        Samples(x, np.arange(6, dtype=np.int32)),
        Samples(x_test, np.arange(5, dtype=np.int32)),
        6,
        (0.5,),
        (0.2,),
        clients,
        test_clients,
        tuple("abcdef"),
    )


def test_natural_partition_assigns_test_rows_to_clients():
    federation = Federation.from_dataset(natural_dataset(), Natural(), seed=0, shuffle=False)
    assert federation.num_clients == 3 and list(federation.sizes) == [2, 3, 1]
    assert list(federation.train.y) == [1, 4, 0, 2, 5, 3]
    # client 1 has test row 2, client 3 rows 1 and 3, client 7 none; rows of client 9, which has no training rows, come
    # last
    assert federation.test_offsets is not None and list(federation.test_offsets) == [0, 1, 3, 3]
    assert list(federation.test.y) == [2, 1, 3, 0, 4]
    assert federation.test.x[0].tolist() == [54, 55]
    assert (federation.name, federation.num_classes, federation.mean) == ("natural", 6, (0.5,))
    assert federation.class_names == tuple("abcdef")


def test_other_partitions_do_not_assign_test_rows():
    federation = Federation.from_dataset(natural_dataset(), Iid(2), seed=0)
    assert federation.test_offsets is None and list(federation.test.y) == [0, 1, 2, 3, 4]


def test_test_rows_of_unknown_clients_belong_to_no_client():
    dataset = natural_dataset()
    strangers = Dataset("s", dataset.train, dataset.test, 6, (), (), dataset.train_clients, np.full(5, 100))
    assert Federation.from_dataset(strangers, Natural(), 0).test_offsets is None


@settings(max_examples=100, deadline=None)
@given(owners=st.lists(st.integers(-5, 5), min_size=1, max_size=60), seed=st.integers(0, 1000))
def test_from_arrays_groups_every_row_under_its_client(owners, seed):
    ids = np.array(owners)
    x = np.arange(len(ids), dtype=np.float32)[:, None]
    federation = Federation.from_arrays(x, ids + 5, ids, seed=seed)
    for client, name in enumerate(np.unique(ids)):
        rows = slice(federation.offsets[client], federation.offsets[client + 1])
        assert sorted(federation.train.x[rows, 0]) == list(np.flatnonzero(ids == name))
        assert (federation.train.y[rows] == name + 5).all()
    assert federation.train.y.dtype == np.int32 and federation.num_classes == max(owners) + 6


def test_shuffling_is_seeded_and_within_clients():
    x, y = np.arange(1000.0)[:, None], np.zeros(1000, int)
    offsets = np.array([0, 400, 1000])
    plain = Federation.from_arrays(x, y, offsets=offsets, shuffle=False)
    one, again, other = (Federation.from_arrays(x, y, offsets=offsets, seed=s) for s in (1, 1, 2))
    assert np.array_equal(plain.train.x, x)
    assert np.array_equal(one.train.x, again.train.x) and not np.array_equal(one.train.x, other.train.x)
    assert np.array_equal(np.sort(one.train.x[:400], axis=0), x[:400])
    assert not np.array_equal(one.train.x[:400], x[:400])


def test_named_clients_and_their_test_rows():
    federation = Federation.from_arrays(
        np.zeros((3, 2), np.float32),
        np.array([0.5, 1.5, 2.5]),
        np.array(["zoe", "ann", "zoe"]),
        test=(np.ones((2, 2), np.float32), np.array([9.0, 8.0])),
        test_client_ids=np.array(["zoe", "ann"]),
        shuffle=False,
    )
    assert federation.num_classes is None
    assert list(federation.train.y) == [1.5, 0.5, 2.5] and list(federation.test.y) == [8.0, 9.0]
    assert federation.test_offsets is not None and list(federation.test_offsets) == [0, 1, 2]


def test_all_arrays_are_aligned():
    rng = np.random.default_rng(0)
    x, y = rng.random((1001, 3))[1:, ::2], rng.integers(0, 4, 1001)[1:]
    ids = np.arange(1000) % 7
    for shuffle in (True, False):
        for owner in ({"client_ids": ids}, {"offsets": np.array([0, 5, 1000])}):
            federation = Federation.from_arrays(x, y, **owner, test=(x[:9], y[:9]), shuffle=shuffle)
            arrays = (*federation.train, *federation.test, federation.offsets)
            assert all(is_aligned(a) for a in arrays)
    natural = Federation.from_dataset(natural_dataset(), Natural(), 0)
    assert natural.test_offsets is not None and is_aligned(natural.test_offsets)


@settings(max_examples=50, deadline=None)
@given(length=st.integers(0, 40), start=st.integers(0, 8), dtype=st.sampled_from(["u1", "f4", "i8"]))
def test_aligned_array_copies_only_unaligned_arrays(length, start, dtype):
    array = np.arange(length + start).astype(dtype)[start:]
    result = aligned_array(array)
    assert is_aligned(result) and np.array_equal(result, array) and result.dtype == array.dtype
    assert aligned_array(result) is result


def test_grouped_aligned_arrays_are_not_copied():
    x, y = aligned_array(np.zeros((8, 4), np.float32)), aligned_array(np.zeros(8, np.int32))
    federation = Federation.from_arrays(x, y, offsets=np.array([0, 3, 8]), shuffle=False)
    assert federation.train.x is x and federation.train.y is y


def test_a_million_clients_need_no_python_loop():
    """Executed lines are counted; a loop over clients would execute millions."""
    n = 2_000_000
    x = np.zeros((n, 8), np.float32)
    y = (np.arange(n) % 10).astype(np.int32)
    dataset = Dataset("many", Samples(x, y), Samples(x[:5], y[:5]), 10)
    lines, before = 0, sys.gettrace()

    def count(frame, event, argument):
        nonlocal lines
        lines += 1
        return count

    sys.settrace(count)
    try:
        partitioned = Federation.from_dataset(dataset, Iid(1_000_000), 0)
        given = Federation.from_arrays(x, y, np.arange(n) % 1_000_000)
    finally:
        sys.settrace(before)
    assert (partitioned.sizes == 2).all() and given.num_clients == 1_000_000
    assert 100 < lines < 20_000


X, Y = np.zeros((4, 2), np.float32), np.array([0, 1, 1, 0])
INVALID_ARRAYS = [
    (dict(x=X, y=Y[:3], client_ids=Y), "not n samples with n labels"),
    (dict(x=X, y=Y), "give either client_ids or offsets"),
    (dict(x=X, y=Y, client_ids=Y, offsets=np.array([0, 4])), "give either client_ids or offsets"),
    (dict(x=X, y=Y, client_ids=Y[:2]), "for each of 4 rows"),
    (dict(x=X, y=Y, client_ids=Y / 2), "for each of 4 rows"),
    (dict(x=X, y=Y, offsets=np.array([0, 3])), "not at the number of rows 4"),
    (dict(x=X, y=Y, offsets=np.array([0, 5])), "rise from 0"),
    (dict(x=X, y=Y, offsets=np.array([1, 4])), "rise from 0"),
    (dict(x=X, y=Y, offsets=np.array([0, 3, 2, 4])), "rise from 0"),
    (dict(x=X, y=Y, offsets=np.array([0.0, 4.0])), "rise from 0"),
    (dict(x=X, y=Y, offsets=np.array([0, 2, 2, 4])), "client 1 has no training rows"),
    (dict(x=X, y=Y - 1, client_ids=Y), "0 or more"),
    (dict(x=X, y=Y, client_ids=Y, num_classes=1), "0 .. 0"),
    (dict(x=X.astype(object), y=Y, client_ids=Y), "real numbers"),
    (dict(x=X[:0], y=Y[:0], client_ids=Y[:0]), "needs training samples"),
    (dict(x=X, y=Y, client_ids=Y, test=(X[:, :1], Y)), "test samples"),
    (dict(x=X, y=Y, client_ids=Y, test=(X, Y / 2)), "must be int32"),
    (dict(x=X, y=Y, client_ids=Y, test=(X, Y), test_client_ids=Y[:2]), "test_client_ids must"),
    (dict(x=X, y=Y, offsets=np.array([0, 4]), test=(X, Y), test_client_ids=Y), "only with client_ids"),
    (dict(x=X, y=Y, offsets=np.array([0, 4]), test_offsets=np.array([0, 0, 0])), "another number of clients"),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID_ARRAYS, ids=[message for _, message in INVALID_ARRAYS])
def test_invalid_arrays_raise_a_clear_error(arguments, message):
    with pytest.raises(FedraxError, match=message):
        Federation.from_arrays(**arguments)


def test_invalid_datasets_raise_a_clear_error():
    x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 1, 0], np.int32)
    good = Samples(x, y)
    for arguments, message in (
        ((Samples(x[:0], y[:0]), good, 2), "no training samples"),
        ((good, Samples(x[:, :1], y), 2), "test sample"),
        ((good, good, 1), "0 .. 0"),
        ((Samples(x, y.astype(np.int64)), good, 2), "int32"),
        ((good, good, None), "floating"),
        ((good, good, 2, (0.1,), ()), "mean and std"),
        ((good, good, 2, (0.1,), (0.0,)), "mean and std"),
        ((good, good, 2, (), (), y[:2]), "one integer for each"),
        ((good, good, 2, (), (), None, None, ("a",)), "2 classes, but 1 names"),
    ):
        with pytest.raises(FedraxError, match=message):
            Dataset("bad", *arguments)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "must return arrays"),
        ((np.array([0, 1, 10**4]), np.array([0, 3])), "must return rows of 0 to 1441"),
        ((np.array([0, -1]), np.array([0, 2])), "must return rows of 0 to 1441"),
        ((np.array([0.5, 1.5]), np.array([0, 2])), "must return rows of 0 to 1441"),
        ((np.arange(4), np.array([0, 6, 4])), "offsets must be"),
        ((np.arange(4), np.array([0.0, 4.0])), "offsets must be"),
        ((np.arange(0), np.array([0])), "offsets must be"),
        ((np.arange(4), np.array([0, 2])), "offsets end at 2"),
        ((np.arange(4), np.array([0, 0, 4])), "client 0 has no training rows"),
    ],
)
def test_invalid_assignments_of_user_defined_partitions_are_rejected(found, message):
    class Mine:
        def assign(self, dataset, seed):
            return found

    with pytest.raises(FedraxError, match=message):
        Federation.from_dataset(load("digits"), Mine(), 0)


def test_client_ids_may_be_table_columns():
    """Object arrays, and columns of pandas and polars, with strings or integers."""
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    texts, x, y = ["b", "a", "b", "c"], np.zeros((4, 1)), np.arange(4)
    for ids in (
        texts,
        np.array(texts, object),
        np.array(texts, "S"),
        [text.encode() for text in texts],
        pandas.Series(texts, dtype="string"),
        pandas.Series(texts, dtype=object),
        pandas.Categorical(texts),
        polars.Series(texts),
    ):
        made = Federation.from_arrays(x, y, ids, test=(x, y), test_client_ids=ids, shuffle=False)
        assert made.client_names == ("a", "b", "c") and list(made.train.y) == list(made.test.y) == [1, 0, 2, 3]
    for ids in (pandas.Series([7, 5, 7, 9], dtype="Int64"), np.array([7, np.int8(5), 7, 9], object)):
        made = Federation.from_arrays(x, y, ids)
        assert made.client_names == () and list(made.sizes) == [1, 2, 1]


def test_similar_client_ids_stay_distinct():
    """Integers that are equal as floats, and bytes that are not UTF-8."""
    x, y = np.zeros((3, 1)), np.arange(3)
    ids = [2**63 + 2, 2**63 + 1, 5]
    for tests, last in ((ids, [2, 1, 0]), ([2**62, 5, 2**63 - 1], [1])):
        made = Federation.from_arrays(x, y, ids, test=(x, y), test_client_ids=tests, shuffle=False)
        assert made.train.y.tolist() == [2, 1, 0] and made.test.y[: made.test_offsets[-1]].tolist() == last
    for names in ([b"caf\xe9", b"caf\xe8", b"a"], np.array([b"caf\xe9", b"caf\xe8", b"a"])):
        assert Federation.from_arrays(x, y, names).client_names == ("a", "caf\\xe8", "caf\\xe9")


def test_malformed_client_ids_are_rejected():
    pandas, x, y = pytest.importorskip("pandas"), np.zeros((2, 1)), np.arange(2)
    for ids in (["a", None], ["a", np.nan], pandas.Series([1, None], dtype="Int64"), [1.0, np.nan], [pandas.NaT, 1]):
        with pytest.raises(FedraxError, match=r"missing in 1 of 2 rows: leave out rows"):
            Federation.from_arrays(x, y, ids)
    for ids, found in (([1, "a"], "int and str"), ([1.0, 2.0], "float"), ([True, False], "bool")):
        with pytest.raises(FedraxError, match=f"one integer or string for each of 2 rows, not {found}"):
            Federation.from_arrays(x, y, ids)
    for ids in ([2**70, 1], [2**63, -1]):
        with pytest.raises(FedraxError, match="client_ids hold integers of more than 64 bits"):
            Federation.from_arrays(x, y, ids)
    with pytest.raises(FedraxError, match="test_client_ids must be integers, as client_ids are"):
        Federation.from_arrays(x, y, [1, 2], test=(x, y), test_client_ids=["1", "2"])


def test_the_test_fraction_is_rounded_to_the_nearest_row():
    train, test = train_test_split(np.zeros(100), 0.29, np.random.default_rng(0))
    assert (len(train), len(test)) == (71, 29)


def test_test_offsets_without_rows_are_rejected():
    with pytest.raises(FedraxError, match="test_offsets assign no test row to a client: leave them out"):
        Federation.from_arrays(
            *FEDERATION.train, offsets=FEDERATION.offsets, test=tuple(FEDERATION.test),
            test_offsets=np.zeros(len(FEDERATION.offsets), int), num_classes=3,
        )  # fmt: skip


def with_nonfinite_entry(part: str, row: int, number: float) -> tuple[tuple, tuple]:
    """Training and test arrays in which one entry of ``part`` is not finite."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(12, 3)).astype(np.float32), "y": rng.normal(size=12),
        "x_test": rng.normal(size=(6, 3)), "y_test": rng.normal(size=6),
    }  # fmt: skip
    arrays[part][(row, 2) if part.startswith("x") else row] = number
    return (arrays["x"], arrays["y"]), (arrays["x_test"], arrays["y_test"])


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["x", "y", "x_test", "y_test"])
def test_nonfinite_entry_is_rejected_with_its_row(part: str, number: float):
    """The row in the given arrays, not in the order of the federation."""
    (x, y), test = with_nonfinite_entry(part, 4, number)
    which, name = ("test" if "test" in part else "training"), part[0]
    index = r"\[4, 2\]" if name == "x" else r"\[4\]"
    rows = 6 if which == "test" else 12
    message = f"{which} part: {name} is not finite in 1 of {rows} rows, first {name}{index} = {number}"
    owner = np.arange(12) % 4
    for clients in ({"client_ids": owner}, {"offsets": [0, 5, 12]}, {"offsets": [0, 5, 12], "shuffle": False}):
        with pytest.raises(FedraxError, match=message):
            Federation.from_arrays(x, y, test=test, **clients)
    with pytest.raises(FedraxError, match=message):
        Federation.from_arrays(x, y, owner, test=test, test_client_ids=np.arange(6) % 4)
    with pytest.raises(FedraxError, match=message):
        Dataset("spoiled", as_samples(x, y), as_samples(*test), None)
    sound = Federation.from_arrays(*with_nonfinite_entry("x", 0, 0.0)[0], offsets=[0, 12])
    with pytest.raises(FedraxError, match=message):
        replace(sound, train=as_samples(x, y), test=as_samples(*test))


def test_nonfinite_columns_of_tables_are_named():
    table = {"age": [1.0, 2.0, None, 4.0], "dose": [1.0, 2.0, 3.0, 4.0]}
    for made in (pytest.importorskip("pandas").DataFrame(table), pytest.importorskip("polars").DataFrame(table)):
        with pytest.raises(FedraxError, match="x is not finite in 1 of 4 rows, first column 'age' of row 2 = nan"):
            Federation.from_arrays(made, [0, 1, 0, 1], [0, 0, 1, 1])
        with pytest.raises(FedraxError, match=r"test part: .* first column 'age' of row 2 = nan"):
            Federation.from_arrays(np.zeros((2, 2)), [0, 1], [0, 1], test=(made, [0, 1, 0, 1]))


def test_nonfinite_rows_of_files_are_named(tmp_path):
    polars = pytest.importorskip("polars")
    table = polars.DataFrame({"a": [1.0, 2.0, 3.0], "b": [1.0, float("inf"), 3.0], "label": [0, 1, 0]})
    table.write_csv(tmp_path / "t.csv")
    with pytest.raises(
        FedraxError, match=r"'b' holds numbers that are not finite, .* in 1 rows, the first inf in row 1"
    ):
        load("csv", path=tmp_path / "t.csv")
    (tmp_path / "m.csv").write_text("a,label\n1,0\n2,1\n,0\nnan,1\n")
    with pytest.raises(FedraxError, match="'a' has missing values, 2 of them, the first in row 2"):
        load("csv", path=tmp_path / "m.csv")
    (tmp_path / "y.csv").write_text("a,label\n1,0.5\n2,inf\n3,0.25\n")
    with pytest.raises(
        FedraxError, match="'label' holds numbers that are not finite, in 1 rows, the first inf in row 1"
    ):
        load("csv", path=tmp_path / "y.csv")


def test_memory_mapped_samples_are_checked_when_copied_or_simulated(tmp_path):
    (x, y), _ = with_nonfinite_entry("x", 7, np.nan)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    message = r"training part: x is not finite in 1 of 12 rows, first x\[7, 2\] = nan"
    with pytest.raises(FedraxError, match=message):
        Federation.from_arrays(mapped, y, np.arange(12) % 4)
    with pytest.raises(FedraxError, match=message):
        Federation.from_dataset(Dataset("m", as_samples(mapped, y), as_samples(x[:2], y[:2]), None), Iid(3), 0)
    federation = Federation.from_arrays(mapped, y, offsets=[0, 5, 12], shuffle=False)
    with pytest.raises(FedraxError, match=message):
        fedrax.simulate(fedrax.FedAvg(), fedrax.regression(Linear().build((3,), 1)), federation, rounds=1)


def test_finite_entries_whose_sum_overflows_are_accepted():
    x = np.full((8, 2), np.finfo(np.float32).max)
    assert Federation.from_arrays(x, np.arange(8), [0] * 8).num_clients == 1
    assert Federation.from_arrays(np.full((8, 2), 60_000, np.float16), np.arange(8), [0] * 8).num_clients == 1
