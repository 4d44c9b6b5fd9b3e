"""Properties of every partition, and the label distribution of each."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedrax.data import (
    PARTITIONS,
    ClassesPerClient,
    Dataset,
    DirichletClasses,
    DirichletClients,
    Federation,
    Iid,
    LogNormal,
    Mix,
    Natural,
    Samples,
    Shards,
    Similarity,
    load,
    measure_heterogeneity,
)
from fedrax.errors import FedraxError


def labeled(labels, num_classes=None, clients=None) -> Dataset:
    """A data set whose x is the row number."""
    y = np.asarray(labels, np.int32)
    samples = Samples(np.arange(len(y), dtype=np.float32)[:, None], y)
    classes = num_classes or int(y.max()) + 1
    return Dataset("test", samples, Samples(samples.x[:0], y[:0]), classes, train_clients=clients)


def balanced(rows: int, classes: int = 10) -> Dataset:
    return labeled(np.random.default_rng(0).permutation(np.arange(rows) % classes), classes)


def clients_of(partition):
    return np.split(partition.indices, partition.offsets[1:-1])


def counts_of(dataset, partition):
    return np.array(
        [np.bincount(dataset.train.y[rows], minlength=dataset.num_classes) for rows in clients_of(partition)]
    )


def partitions(clients: int):
    """One partition of each kind that assigns every row to exactly one client."""
    return [
        Iid(clients),
        Shards(clients, 2),
        Shards(clients, 1),
        Similarity(clients, 30),
        Mix(clients, 30),
        DirichletClasses(clients, 0.3),
        DirichletClients(clients, 5.0, min_size=1),
        DirichletClients(clients, 5.0, min_size=1, balanced=True),
        ClassesPerClient(clients, 3),
        LogNormal(clients, 1.5),
    ]


@pytest.mark.parametrize("rule", partitions(12), ids=repr)
def test_rows_are_assigned_once_and_by_the_seed(rule):
    dataset = balanced(600)
    first, again, other = (rule.assign(dataset, seed) for seed in (3, 3, 4))
    assert first.indices.dtype == first.offsets.dtype == np.int64
    assert np.array_equal(np.sort(first.indices), np.arange(600))
    assert first.offsets[0] == 0 and first.offsets[-1] == 600 and len(first.offsets) == 13
    assert np.diff(first.offsets).min() >= 1
    assert np.array_equal(first.indices, again.indices) and np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.indices, other.indices)


@settings(max_examples=150, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=200),
    clients=st.integers(-1, 40),
    which=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_any_labels_give_a_complete_partition_or_a_clear_error(labels, clients, which, seed):
    dataset = labeled(labels, 7)
    try:
        partition = partitions(clients)[which].assign(dataset, seed)
    except FedraxError as error:
        assert "\n" not in str(error)
        return
    assert np.array_equal(np.sort(partition.indices), np.arange(len(labels)))
    assert len(partition.offsets) == clients + 1 and np.diff(partition.offsets).min() >= 1


@settings(max_examples=150, deadline=None)
@given(
    clients=st.integers(1, 30),
    each=st.integers(4, 20),
    extra=st.integers(0, 29),
    percent=st.floats(0, 100),
    per_client=st.integers(1, 4),
)
def test_even_partitions_have_exactly_even_sizes(clients, each, extra, percent, per_client):
    rows = clients * each + extra % clients
    dataset = balanced(rows, 7)
    for rule in (
        Iid(clients),
        Shards(clients, per_client),
        Similarity(clients, percent),
        Mix(clients, percent),
        DirichletClasses(clients, 0.1),
    ):
        sizes = np.diff(rule.assign(dataset, 0).offsets)
        expected = [each, each + 1] if rows % clients else [each]
        assert sorted(set(sizes)) == expected, rule
        assert sizes.sum() == rows


def test_shards_hold_few_labels():
    dataset = balanced(6000)
    assert ((counts_of(dataset, Shards(20, 2).assign(dataset, 0)) > 0).sum(axis=1) <= 2).all()
    one = counts_of(dataset, Shards(100, 1).assign(dataset, 0))
    assert ((one > 0).sum(axis=1) == 1).all() and (one.sum(axis=1) == 60).all()


def test_similarity_of_0_50_and_100_percent():
    dataset = balanced(10_000)
    by_label = counts_of(dataset, Similarity(20, 0).assign(dataset, 0))
    assert np.array_equal(by_label, np.kron(np.eye(10, dtype=int), np.full((2, 1), 500)))
    mixed = counts_of(dataset, Similarity(20, 40).assign(dataset, 0))
    own = mixed[np.arange(20), np.arange(20) // 2]  # the class of client i after sorting, except at borders
    assert np.all(own > 0.6 * 500 * 0.85)
    # s % i.i.d. rows: about 0.4 * 500 / 10 = 20 of each other class
    assert 15 < mixed[0, 3:].mean() < 25
    assert np.array_equal(Mix(20, 60).assign(dataset, 5).indices, Similarity(20, 40).assign(dataset, 5).indices)


def test_iid_is_closer_to_the_global_labels_than_similarity():
    dataset = balanced(5000)
    distance = [
        measure_heterogeneity(Federation.from_dataset(dataset, rule, 0)).total_variation
        for rule in (Iid(10), Similarity(10, 80), Similarity(10, 30), Similarity(10, 0))
    ]
    assert distance == sorted(distance) and distance[0] < 0.05 and distance[-1] == pytest.approx(0.9)


@pytest.mark.parametrize("omega", [0.05, 0.5, 5.0])
def test_dirichlet_classes_has_the_concentration_of_its_mix(omega):
    # E[sum_c p_c^2] = (omega + 1) / (C omega + 1) for a symmetric Dirichlet distribution; drawing without replacement
    # and finitely many clients change it by less than a tenth here.
    dataset = balanced(200_000)
    share = counts_of(dataset, DirichletClasses(400, omega).assign(dataset, 1)) / 500
    assert (share**2).sum(axis=1).mean() == pytest.approx((omega + 1) / (10 * omega + 1), rel=0.1)


def test_dirichlet_classes_at_extreme_concentrations():
    dataset = balanced(5000)
    pure = counts_of(dataset, DirichletClasses(100, 1e-4).assign(dataset, 0))
    assert np.median(pure.max(axis=1)) == 50
    flat = counts_of(dataset, DirichletClasses(10, 1e6).assign(dataset, 0))
    assert flat.min() > 25


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_dirichlet_clients_spreads_each_class_by_alpha(alpha):
    # The share of a class at one client has variance (1/N)(1 - 1/N) / (N alpha + 1).
    dataset = labeled(np.arange(200_000) % 200, 200)
    share = counts_of(dataset, DirichletClients(20, alpha, min_size=1).assign(dataset, 2)) / 1000
    assert share.var() == pytest.approx(0.05 * 0.95 / (20 * alpha + 1), rel=0.1)


@pytest.mark.parametrize("alpha", [0.5, 100.0])
def test_dirichlet_clients_rounding_favors_no_client(alpha):
    """Classes have fewer rows than there are clients; equal rounding in all classes would favor the same clients."""
    dataset, rule = labeled(np.arange(6000) % 60, 60), DirichletClients(300, alpha, min_size=1)
    sizes = np.mean([rule._draw(np.bincount(dataset.train.y), np.random.default_rng(s)).sum(1) for s in range(20)], 0)
    ends = sizes[[0, 1, 2, -3, -2, -1]]
    assert ends.min() > 16 and ends.max() < 24  # 20 each on average


def test_dirichlet_clients_satisfies_min_size_or_raises():
    dataset = balanced(2000)
    assert np.diff(DirichletClients(20, 0.5, min_size=20).assign(dataset, 0).offsets).min() >= 20
    with pytest.raises(FedraxError, match="none of 100 draws"):
        DirichletClients(100, 0.001, min_size=10).assign(dataset, 0)


def test_balanced_dirichlet_assigns_no_rows_to_full_clients():
    dataset = balanced(10_000)
    plain, capped = (
        np.diff(DirichletClients(20, 0.1, 1, balanced=on).assign(dataset, 0).offsets).max() for on in (False, True)
    )
    assert capped <= 500 + 1000 and capped < plain


def test_classes_per_client_is_exact_and_even():
    dataset = balanced(6000)
    for k in (1, 2, 3, 7, 10):
        held = counts_of(dataset, ClassesPerClient(40, k).assign(dataset, 0)) > 0
        assert (held.sum(axis=1) == k).all()
        assert np.ptp(held.sum(axis=0)) <= 1
    pairs = counts_of(dataset, ClassesPerClient(60, 2).assign(dataset, 0)) > 0
    assert len(np.unique(pairs, axis=0)) > 20  # classes are combined at random, not in fixed pairs


def test_lognormal_sizes():
    dataset = balanced(100_000)
    assert set(np.diff(LogNormal(100, 0.0).assign(dataset, 0).offsets)) == {1000}
    sizes = np.diff(LogNormal(1000, 0.8).assign(dataset, 0).offsets)
    assert np.log(sizes).std() == pytest.approx(0.8, rel=0.1)
    assert np.diff(LogNormal(1000, 10.0, min_size=7).assign(dataset, 0).offsets).min() == 7


def test_natural_partition_selects_clients():
    clients = np.array([9, 2, 2, 5, 9, 9, 5, 2, 2])
    dataset = labeled(np.zeros(9, int), 2, clients)
    rows = clients_of(Natural().assign(dataset, 0))
    assert [list(r) for r in rows] == [[1, 2, 7, 8], [3, 6], [0, 4, 5]]
    assert [list(r) for r in clients_of(Natural(min_size=3).assign(dataset, 0))] == [[1, 2, 7, 8], [0, 4, 5]]
    taken = {tuple(np.unique(clients[Natural(2).assign(dataset, seed).indices])) for seed in range(20)}
    assert taken == {(2, 5), (2, 9), (5, 9)}


IMPOSSIBLE = [
    (Iid(0), "at least 1 client"),
    (Iid(61), "too few for 61 clients"),
    (Shards(20, 4), "80 shards"),
    (Shards(20, 0), "at least 1 shard"),
    (Similarity(5, 101), "not 101"),
    (Mix(5, -1), "not -1"),
    (DirichletClasses(5, 0.0), "omega"),
    (DirichletClients(5, -1.0), "alpha"),
    (DirichletClients(5, 1.0, min_size=13), "5 clients of 13 rows"),
    (DirichletClients(5, 1.0, min_size=0), "min_size"),
    (ClassesPerClient(5, 11), "1 .. 10 classes"),
    (ClassesPerClient(4, 2), "cannot hold all 10"),
    (ClassesPerClient(50, 10), "too few for the 50 clients"),
    (LogNormal(5, -0.1), "sigma"),
    (LogNormal(5, 1.0, min_size=13), "5 clients of 13 rows"),
    (Natural(), "no natural clients"),
]


@pytest.mark.parametrize(("rule", "message"), IMPOSSIBLE, ids=repr)
def test_impossible_partitions_raise_a_clear_error(rule, message):
    with pytest.raises(FedraxError, match=message):
        rule.assign(balanced(60), 0)


def test_too_many_natural_clients_are_rejected():
    with pytest.raises(FedraxError, match="3 of them cannot be selected"):
        Natural(3).assign(labeled([0, 1], 2, np.array([0, 1])), 0)


def test_regression_targets_can_be_sorted_but_not_counted():
    x = np.arange(40, dtype=np.float32)[:, None]
    y = np.random.default_rng(0).permutation(40).astype(np.float32)
    dataset = Dataset("line", Samples(x, y), Samples(x[:0], y[:0]), None)
    spans = [np.ptp(y[rows]) for rows in clients_of(Similarity(4, 0).assign(dataset, 0))]
    assert spans == [9, 9, 9, 9]
    with pytest.raises(FedraxError, match="regression"):
        DirichletClasses(4).assign(dataset, 0)


def test_table_of_a_billion_cells_is_rejected():
    dataset = labeled(np.zeros(2_000_000, np.int32), 1000)
    with pytest.raises(FedraxError, match="too many"):
        DirichletClasses(1_000_000).assign(dataset, 0)


def test_negative_seed_is_rejected():
    with pytest.raises(FedraxError, match="seed"):
        Iid(2).assign(balanced(10), -1)


def test_registry_lists_frozen_dataclasses_with_defaults():
    promised = {type(rule) for rule in partitions(2)} | {Natural}
    assert set(PARTITIONS.values()) == promised and len(PARTITIONS) == len(promised)
    for rule in PARTITIONS.values():
        assert hash(rule()) == hash(rule()) and rule.__doc__


def test_partition_by_a_column(tmp_path: Path):
    """Equal to the partition of a data set with this column as labels; the labels to learn are unchanged."""
    rng = np.random.default_rng(0)
    region, age = rng.integers(0, 3, 60), rng.random(60).round(3)
    rows = [f"{i},{'abc'[r]},{a},{i / 7}" for i, (r, a) in enumerate(zip(region, age, strict=True))]
    (tmp_path / "t.csv").write_text("\n".join(["row,region,age,cost", *rows]))
    options: dict[str, Any] = dict(path=tmp_path / "t.csv", label="cost", columns=("row",), test_fraction=0.0)
    by_region, by_age = (load("csv", **options, partition_by=name) for name in ("region", "age"))
    assert by_region.num_classes is None
    for rule in (Shards(4, 2), DirichletClients(3, 1.0, 2), DirichletClasses(4, 0.3), ClassesPerClient(4, 2)):
        made, direct = rule.assign(by_region, 1), rule.assign(labeled(region, 3), 1)
        assert all(map(np.array_equal, made, direct))
    sorted_ages = [age[rows] for rows in clients_of(Shards(5, 1).assign(by_age, 0))]
    edges = sorted((ages.min(), ages.max()) for ages in sorted_ages)
    assert all(one[1] <= other[0] for one, other in pairwise(edges))
    with pytest.raises(FedraxError, match="no classes, which this partition needs: partition_by has floats"):
        DirichletClasses(4).assign(by_age, 0)
    with pytest.raises(FedraxError, match="did you mean 'region'"):
        load("csv", **options, partition_by="regions")
    by = np.array([-1, 0, 1])
    wrongs: list[np.ndarray] = [by, by[1:].astype(float), np.array(["a", "b", "c"])]
    for wrong in wrongs:
        with pytest.raises(FedraxError, match="partition"):
            replace(labeled([0, 1, 2]), partition_by=wrong)


def test_partition_columns_may_be_unsigned_integers():
    digits = load("digits")
    by = np.arange(len(digits.train.y)) % 3
    one, other = (replace(digits, partition_by=by.astype(kind)) for kind in (np.uint64, np.int32))
    parts = [DirichletClasses(5, 0.5).assign(data, 0) for data in (one, other)]
    for actual, desired in zip(*parts, strict=True):
        np.testing.assert_array_equal(actual, desired)
