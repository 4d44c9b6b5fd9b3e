"""Standardization of table columns: constant columns, many clients, values far from those of training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedrax.data import load
from fedrax.data.readers.tabular import scale_notes
from fedrax.errors import FedraxError
from tests.data.text_files import write


def test_column_constant_up_to_rounding_is_not_scaled(tmp_path: Path):
    """The float mean of three times 0.1 is not 0.1; the standard deviation of all clients is used instead."""
    train = write(
        tmp_path / "tr.csv", "c,a,b,label\nA,0.1,1,x\nA,0.1,2,y\nA,0.1,4,x\nB,0.3,5,y\nB,0.5,3,x\nB,0.9,2,y\n"
    )
    test = write(tmp_path / "te.csv", "c,a,b,label\nA,0.2,1,x\n")
    dataset = load("csv", path=train, test_path=test, client="c", standardize="client")
    np.testing.assert_array_equal(dataset.train.x[:3, 0], 0)
    overall = np.std([0.1, 0.1, 0.1, 0.3, 0.5, 0.9])
    np.testing.assert_allclose(dataset.test.x[:, 0], 0.1 / overall, rtol=1e-5)
    one = write(tmp_path / "t2.csv", "a,b,label\n0.1,1,x\n0.1,2,y\n0.1,5,x\n")
    other = write(tmp_path / "e2.csv", "a,b,label\n0.2,1,x\n")
    dataset = load("csv", path=one, test_path=other)
    assert "columns that are constant in the training rows: 1, such as 'a'" in dataset.notes
    np.testing.assert_array_equal(dataset.train.x[:, 0], 0)
    np.testing.assert_allclose(dataset.test.x[:, 0], 0.1, rtol=1e-5)
    assert scale_notes(np.array([[0.1, 1.0], [0.1, 2.0], [0.1, 3.0]])) == []


def test_many_clients_are_standardized_in_one_pass(tmp_path: Path):
    """A pass over all rows for each client would take minutes."""
    rng = np.random.default_rng(0)
    owners = np.repeat(np.arange(20_000), 5)
    values = rng.normal(size=len(owners)) * owners
    rows = "".join(f"{c},{v:.6g},{'xy'[i % 2]}\n" for i, (c, v) in enumerate(zip(owners, values, strict=True)))
    path = write(tmp_path / "m.csv", "c,a,label\n" + rows)
    dataset = load("csv", path=path, client="c", standardize="client", test_fraction=0.0)
    of_client = dataset.train.x[:, 0].reshape(-1, 5)
    np.testing.assert_allclose(of_client.mean(1), 0, atol=1e-4)
    np.testing.assert_allclose(of_client[1:].std(1), 1, atol=1e-3)


def test_test_rows_beyond_float32_after_scaling_are_rejected(tmp_path: Path):
    train = write(tmp_path / "a.csv", "x,label\n1e-30,a\n2e-30,b\n")
    test = write(tmp_path / "b.csv", "x,label\n1e30,a\n")
    with pytest.raises(FedraxError, match=r"b\.csv: column 'x' .* once it is standardized: .* standardize = \"none\""):
        load("csv", path=train, test_path=test)
    assert load("csv", path=train, test_path=test, standardize="none").test.x.max() > 9e29


def test_a_test_value_far_beyond_training_values_is_rejected(tmp_path: Path):
    train = write(tmp_path / "a.csv", "a,label\n" + "".join(f"{1 + i * 1e-9},{i % 2}\n" for i in range(9)))
    with pytest.raises(FedraxError, match="'a' holds numbers beyond 32-bit floats once it is standardized"):
        load("csv", path=train, test_path=write(tmp_path / "b.csv", "a,label\n3e38,1\n"))
